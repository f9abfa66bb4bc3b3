"""The page on schedules: its numbers are the simulator's, and its explorer shows the same in a real browser."""

import re
from itertools import product
from pathlib import Path

import pytest
from playwright.sync_api import expect

from course.render.quantities import digits, share_text
from course.schedules import (
    FAMILY,
    LOOPED,
    Costs,
    dualpipe,
    family,
    interleaved,
    measure,
    run,
    text_of,
    written,
    zero_bubble,
    zero_bubble_2,
    zero_bubble_v,
)

SITE = Path(__file__).parent

COSTS = (Costs(), Costs(1, 1.5, 0.5, 0.25), Costs(2, 3, 1, 4))
BEYOND = {"zb_h2": zero_bubble_2, "zb_v": zero_bubble_v, "dualpipe": dualpipe}  # repeats cannot be chosen
GRID = list(product(FAMILY, (1, 2, 4, 8), (1, 3, 4, 8), (1, 2, 3), range(len(COSTS))))
GRID += list(product(BEYOND, (1, 2, 4, 7), (1, 3, 8, 14), (1,), range(len(COSTS))))
MEASURE = """([grid, costs]) => {
  const { build, run, measure } = window.meshcraftSchedules;
  return grid.map(([name, S, M, R, cost]) => {
    try { return measure(run(build(name, S, M, R), costs[cost])); } catch (error) { return error.message; }
  });
}"""
SPANS = """([name, S, M, R, stream, costs]) => {
  const { build, run } = window.meshcraftSchedules;
  const timed = run(build(name, S, M, R, stream), costs);
  return {
    spans: timed.spans.map((own) => own.map(({ action, start, end }) => [...action, start, end])),
    messages: timed.messages.map(({ source, target, start, end }) => [source, target, start, end]),
    inFlight: window.meshcraftSchedules.inFlight(timed),
  };
}"""


def made(name, stages, microbatches, repeats):
    return BEYOND[name](stages, microbatches) if name in BEYOND else family(name, stages, microbatches, repeats)


def letters(costs):
    return {"f": costs.forward, "b": costs.backward_input, "w": costs.backward_weights, "c": costs.send}


@pytest.fixture
def opened(browser, built):
    """Opens the built page from its folder, as a reader without a server does."""
    contexts = []

    def open_page(hash="", **context):
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        errors = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"file://{built}/schedules.html{hash}")
        expect(page.locator("#explorer-schedule")).to_be_visible(timeout=20_000)
        page.errors = errors  # type: ignore[attr-defined]
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.long
def test_the_explorer_s_numbers_and_messages_are_the_simulator_s(opened):
    page = opened()
    results = page.evaluate(MEASURE, [GRID, [letters(costs) for costs in COSTS]])
    defined = 0
    for (name, stages, microbatches, repeats, cost), result in zip(GRID, results, strict=True):
        size = (name, stages, microbatches, repeats, cost)
        try:
            expected = measure(run(made(name, stages, microbatches, repeats), COSTS[cost]))
        except ValueError as error:
            assert result == str(error), size
            continue
        defined += 1
        for key in ("time", "bubble", "activations", "weights", "messages"):
            value = getattr(expected, key)
            value = list(value) if isinstance(value, tuple) else value
            assert result[key] == pytest.approx(value, rel=1e-9, abs=1e-9), (size, key)
    assert 400 < defined < len(GRID)
    assert not page.errors


def test_every_action_and_message_runs_when_the_simulator_says(opened):
    page, costs = opened(), COSTS[1]
    for name in (*FAMILY, *BEYOND):
        repeats = 2 if name in LOOPED else 1
        timed = run(made(name, 4, 8, repeats), costs)
        result = page.evaluate(SPANS, [name, 4, 8, repeats, 0, letters(costs)])
        for own, spans in zip(result["spans"], timed.spans, strict=True):
            assert [tuple(span[:3]) for span in own] == [
                (s.action.kind, s.action.microbatch, s.action.repeat) for s in spans
            ]
            assert [span[3:] for span in own] == [pytest.approx([s.start, s.end]) for s in spans]
        ticks = [0.01 + 0.13 * n for n in range(round(timed.end / 0.13))]
        for own, spans in zip(result["inFlight"], timed.spans, strict=True):
            begun = [s.start for s in spans if s.action.kind == "F"]
            ended = [s.end for s in spans if s.action.kind in "BW"]
            for tick in ticks:
                in_flight = sum(t <= tick for t in begun) - sum(t <= tick for t in ended)
                shown = [count for time, count in own if time <= tick][-1]
                assert shown == pytest.approx(in_flight / timed.schedule.parts), (name, tick)
        sent = sorted((m.source, m.target, m.start, m.end) for m in timed.messages)
        assert sorted(map(tuple, result["messages"])) == [pytest.approx(message) for message in sent]


def test_lines_written_by_hand_cost_what_the_simulator_says(opened):
    page = opened()
    measured = "({ written, run, measure }, lines, route, costs) => measure(run(written(lines, route), costs))"
    for schedule in (zero_bubble_2(4, 8), zero_bubble_v(4, 8), dualpipe(4, 8), interleaved(2, 4, 2), zero_bubble(3, 4)):
        lines = "\n".join(" ".join(text_of(a, schedule.num_repeats) for a in order) for order in schedule.orders)
        parsed = written(lines.split("\n"), route=schedule.route)
        assert parsed.orders == schedule.orders
        for costs in COSTS:
            result = page.evaluate(
                f"(a) => ({measured})(window.meshcraftSchedules, ...a)", [lines, schedule.route, letters(costs)]
            )
            expected = measure(run(parsed, costs))
            for key in ("time", "bubble", "activations", "weights", "messages"):
                value = getattr(expected, key)
                value = list(value) if isinstance(value, tuple) else value
                assert result[key] == pytest.approx(value, rel=1e-9, abs=1e-9), (schedule.name, key)
    assert not page.errors


def test_a_learner_s_own_lines_are_drawn_and_their_errors_are_shown(opened):
    page = opened("#schedule=by_hand&lines=F0%20F1%20B0%20B1%0AF0%20B0%20F1%20B1")
    status = page.get_by_role("status")
    bubble = share_text(measure(run(written(["F0 F1 B0 B1", "F0 B0 F1 B1"]))).bubble, 1)
    expect(status).to_contain_text(f"by hand, 2 stages, 2 microbatches: bubble {bubble};")
    expect(page.locator("#explorer-S")).to_be_disabled()
    alert, lines = page.get_by_role("alert"), page.get_by_label("orders")
    for text, wrong in {
        "F0 B0 F2 B2": "stage 0 needs one F and one B (or one I and one W) of microbatch 1, and has nothing",
        "F0 X0": '"X0" is no action',
        "B0 F0\nF0 B0": "stages would wait forever: stage 0 waits in B0",
        "": "a schedule needs at least one action",
    }.items():
        lines.fill(text)
        expect(alert).to_contain_text(wrong)
    lines.fill("F0 B0")
    expect(alert).to_be_hidden()
    expect(status).to_contain_text("by hand, 1 stages, 1 microbatches: bubble 0%")
    page.locator("#explorer-schedule").select_option("gpipe")
    expect(page.locator("#explorer-by-hand")).to_be_hidden()
    expect(page.locator("#explorer-S")).to_be_enabled()
    assert "lines" not in page.url and not page.errors


def test_the_explorer_formats_figures_as_the_course_does(opened):
    values = [0, 1, 33, 28.5, 28.25, 28.75, 12345, 0.25, 1234.5, 1e-3, 2 / 3, 9.996, 53.846]
    page = opened()
    assert page.evaluate("(v) => v.map(window.meshcraftExplorer.digits)", values) == list(map(digits, values))
    shares = [0, 0.273, 1 / 7, 0.0004, 0.5, 0.05]
    texts = page.evaluate("(v) => v.map(window.meshcraftExplorer.percent)", shares)
    assert texts == [share_text(share, 1) for share in shares]


def test_the_picture_has_every_action_once(opened):
    page = opened("#schedule=interleaved&S=4&M=8&R=2&c=0.25")
    titles = page.locator(".explorer-picture rect > title").all_text_contents()
    timed = run(family("interleaved", 4, 8, 2), Costs(send=0.25))
    assert len([t for t in titles if t.startswith("stage")]) == sum(map(len, timed.spans)) == 4 * 2 * 2 * 8
    assert len([t for t in titles if t.startswith("to stage")]) == len(timed.messages)
    span = timed.spans[2][3]
    assert text_of(span.action, 2) == "F3a"
    assert f"stage 2, microbatch 3, repeat 0, forward: {digits(span.start)} to {digits(span.end)}" in titles


def test_the_explorer_is_used_with_the_keyboard_alone_and_says_what_changed(opened):
    page = opened()
    page.locator("#explorer-schedule").focus()
    page.keyboard.type("ZB")
    for _ in range(2):  # past the schedule to compare it with
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "explorer-S"
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowUp")
    status = page.get_by_role("status")
    bubble = share_text(measure(run(zero_bubble(4, 9))).bubble, 1)
    expect(status).to_contain_text(f"ZB-H1, 4 stages, 9 microbatches: bubble {bubble};")
    assert status.get_attribute("aria-live") == "polite"
    for field in page.locator("#schedule-explorer input, #schedule-explorer select").all():
        name = field.get_attribute("id")
        assert page.locator(f"label[for={name}]").count() == 1
    assert "schedule=zero_bubble&S=4&M=9" in page.url
    for region in ("Picture of the schedule", "The family at these sizes"):
        assert page.get_by_role("region", name=region).get_attribute("tabindex") == "0"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


def test_a_link_restores_the_choices_and_undefined_ones_are_explained(opened):
    page = opened("#schedule=interleaved&S=4&M=6&R=2&f=1&b=1&w=1&c=0")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("groups of 4, one for each stage, and 6 is not a multiple of it")
    expect(page.locator(".explorer-picture")).to_be_hidden()
    page.get_by_role("button", name="Set microbatches to 8").press("Enter")
    expect(alert).to_be_hidden()
    expect(page.get_by_role("status")).to_contain_text("interleaved 1F1B, 4 stages, 8 microbatches, 2 repeats")
    assert page.evaluate("document.activeElement.id") == "explorer-M" and "M=8" in page.url
    page.locator("#explorer-f").fill("")
    expect(alert).to_contain_text("forward: give a number from 0.1 to 100")
    assert page.locator("#explorer-f").get_attribute("aria-invalid") == "true"
    page.goto(f"{page.url.split('#')[0]}#schedule=nonsense")
    expect(alert).to_contain_text('there is no schedule called "nonsense"')
    page.goto(f"{page.url.split('#')[0]}#schedule=gpipe&S=16&M=64&R=1&c=%3Cimg%3E")
    expect(alert).to_contain_text("sending one message: give a number from 0 to 100")
    assert not page.errors


def test_two_schedules_are_shown_on_one_time_scale_with_what_is_in_flight(opened):
    page = opened("#schedule=1f1b&other=interleaved&S=4&M=8&R=2")
    status = page.get_by_role("status")
    for name, repeats, words in (("1f1b", 1, "1F1B, 4 stages, 8 microbatches"), ("interleaved", 2, "2 repeats")):
        bubble = share_text(measure(run(family(name, 4, 8, repeats))).bubble, 1)
        expect(status).to_contain_text(f"{words}: bubble {bubble};")
    pictures = page.locator(".explorer-picture svg")
    assert len({box.split()[2] for box in [p.get_attribute("viewBox") for p in pictures.all()]}) == 1
    assert pictures.nth(1).get_attribute("aria-label").endswith("at most, by stage: 4, 3, 2, 1")
    page.locator("#explorer-other").select_option("dualpipe")
    expect(status).to_contain_text("DualPipe, 4 stages, 8 microbatches, 2 parts on each device")
    assert "other=dualpipe" in page.url
    page.locator("#explorer-M").fill("6")
    expect(page.get_by_role("alert")).to_contain_text("not 4 and 6")
    page.get_by_role("button", name="Set microbatches to 8").press("Enter")
    page.locator("#explorer-other").select_option("")
    page.locator("#explorer-schedule").select_option("zb_v")
    expect(page.locator("#explorer-R")).to_be_disabled()
    expect(pictures).to_have_count(2)
    assert "other" not in page.url and not page.errors


@pytest.mark.parametrize(
    ("scheme", "chosen"), [("light", "by_hand"), ("dark", "breadth_first&other=zb_h2&S=8&M=16&R=4")]
)
def test_nothing_is_wider_than_a_phone_and_everything_is_seen(opened, scheme, chosen):
    page = opened(f"#schedule={chosen}", viewport={"width": 390, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    outside = "[...document.querySelectorAll('#schedule-explorer :is(input, select, textarea, p)')].filter((e) => "
    assert page.evaluate(f"{outside} e.getBoundingClientRect().right > 390).length") == 0
    ink, ground = page.evaluate(
        "['color', 'backgroundColor'].map((k) => getComputedStyle(document.querySelector('#explorer-S'))[k])"
    )
    light = [sum(map(float, re.findall(r"[\d.]+", colour)[:3])) for colour in (ink, ground)]
    assert (light[0] > light[1]) == (scheme == "dark") and abs(light[0] - light[1]) > 250


def test_without_script_the_page_names_the_command(browser, built):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"file://{built}/schedules.html")
    expect(page.locator("#schedule-explorer")).to_contain_text("python site/examples/schedules.py --help")
    context.close()
