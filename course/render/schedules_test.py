"""Pictures of schedules: every action once, at its time, with its number, and bubbles and messages."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from course.machines import FREE_NETWORK, machine
from course.program import parse, timeline
from course.render import schedule_svg
from course.render.lanes import CELL, FILLS, LEFT, MASKED, WIRE
from course.render.render_test import SVG, rectangles
from course.render.schedules import beginning
from course.schedules import (
    FAMILY,
    LOOPED,
    Costs,
    breadth_first,
    family,
    forwards,
    gpipe,
    interleaved,
    pipedream,
    run,
    written,
    zero_bubble,
)
from course.validation.pipelines import pipeline


def actions(picture):
    return rectangles(picture, CELL)


def texts(picture):
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def program(stages, microbatches, repeats=1, target=FREE_NETWORK, **options):
    return timeline(parse(pipeline(stages, microbatches, repeats, **options)), target)


@pytest.mark.parametrize("name", FAMILY)
def test_every_action_is_drawn_once_where_it_runs(name):
    timed = run(family(name, 4, 8, 2 if name in LOOPED else 1), Costs(1, 1.5, 0.5, 0.25))
    timed = timed if timed.schedule.flushes else beginning(timed)
    picture = schedule_svg(timed)
    rects = [rect for rect in actions(picture) if not rect[3].startswith("bubble")]
    spans = [span for spans in timed.spans for span in spans]
    assert len(rects) == len(spans) == len({title for *_, title in rects})
    scale = (rects[-1][0] - LEFT) / spans[-1].start
    for span, (x, width, fill, title) in zip(spans, rects, strict=True):
        assert x == pytest.approx(LEFT + span.start * scale, abs=0.2)
        assert width == pytest.approx((span.end - span.start) * scale - 1, abs=0.2)
        assert fill == FILLS[span.action.kind][span.action.repeat % 2]
        assert title.startswith(f"stage {span.stage}, microbatch {span.action.microbatch}, repeat {span.action.repeat}")


@pytest.mark.parametrize("name", FAMILY)
def test_actions_and_bubbles_fill_every_stage_s_time(name):
    timed = run(family(name, 3, 6, 2 if name in LOOPED else 1))
    rects = actions(schedule_svg(timed))
    whole = sum(width + (0 if title.startswith("bubble") else 1) for _, width, _, title in rects)
    last = max(x + width for x, width, *_ in rects) - LEFT
    assert whole == pytest.approx(3 * last, rel=0.01)


def test_every_action_has_its_number_and_repeats_have_letters():
    labels = texts(schedule_svg(interleaved(2, 4, 2)))
    assert [labels.count(f"{m}{r}") for m in range(4) for r in "ab"] == [4] * 8
    assert "the number is the microbatch, the letter the repeat" in labels
    assert [texts(schedule_svg(gpipe(3, 4)))[6:][:3].count(str(m)) for m in range(3)] == [1, 1, 1]


def test_forward_backward_and_weights_differ_in_colour_and_pattern():
    picture = schedule_svg(zero_bubble(3, 4))
    patterns = [set(re.findall(r"url\(#m\w+-(lines|dots)\)", part)) for part in picture.split("<title>")[1:]]
    kinds = re.findall(r"repeat 0, ([^:<]*):", picture)
    assert set(kinds) == {"forward", "backward, input&#x27;s gradient", "weights&#x27; gradient"}
    assert {frozenset(p) for p in patterns} >= {frozenset(), frozenset({"lines"}), frozenset({"dots"})}
    assert len({FILLS[kind][0] for kind in "FIW"}) == 3


def test_messages_that_take_time_are_drawn_and_others_are_not():
    timed = run(breadth_first(3, 3, 2), Costs(send=0.5))
    wires = rectangles(schedule_svg(timed), WIRE)
    assert len(wires) == len(timed.messages) and wires[0][3] == "to stage 1: microbatch 0, repeat 0, forward"
    assert rectangles(schedule_svg(breadth_first(3, 3, 2)), WIRE) == []


def test_a_picture_describes_its_content_in_words():
    root = ElementTree.fromstring(schedule_svg(gpipe(2, 2)))
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and title.text == "GPipe, 2 stages, 2 microbatches: GPipe: 9, bubble 33.3%"
    assert desc is not None and desc.text
    assert desc.text.startswith("Stage 0 computes 6 of 9: F0 F1 B1 B0. Stage 1 computes 6 of 9: F0 F1 B1 B0.")
    assert "stream that never flushes" in schedule_svg(pipedream(2, 2, stream=6))


def test_the_picture_of_an_endless_stream_ends_before_a_stage_has_nothing_left_to_do():
    for stream in (12, 20):
        picture = schedule_svg(pipedream(4, 8, stream=stream))
        busy = [list(map(float, times)) for times in re.findall(r"Stage \d computes ([\d.]+) of ([\d.]+)", picture)]
        # Each stage waits for its first microbatch and its first gradient, and then never again.
        assert [end - computed for computed, end in busy] == [6.0, 5.0, 4.0, 3.0]


def test_a_program_is_drawn_with_the_same_actions_as_its_schedule():
    of_schedule = actions(schedule_svg(breadth_first(4, 2, 2)))
    of_program = actions(schedule_svg(program(4, 2, 2, backward=True, masked=False), breadth_first(4, 2, 2)))
    named = [
        [title.split(":")[0] for *_, title in rects if not title.startswith("bubble")]
        for rects in (of_schedule, of_program)
    ]
    assert named[0] == named[1]


def test_masked_ticks_of_a_program_are_no_work_and_skipped_ones_are_bubbles():
    schedule = forwards(gpipe(4, 3))
    masked = actions(schedule_svg(program(4, 3), schedule))
    skipped = actions(schedule_svg(program(4, 3, masked=False), schedule))
    idle = [sum(text in title for *_, title in rects) for rects, text in ((masked, MASKED), (skipped, MASKED))]
    assert idle == [4 * 6 - 4 * 3, 0]
    assert not any(title.startswith("bubble") for *_, title in masked)
    useful = [[r for r in rects if "microbatch" in r[3]] for rects in (masked, skipped)]
    assert [r[3] for r in useful[0]] == [r[3] for r in useful[1]] and len(useful[0]) == 12


def test_idle_ticks_of_a_program_in_which_the_schedule_works_are_marked():
    schedule = forwards(written(["F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2"]))
    step = program(2, 3, masked=False)
    first = [bar for bar in step.bars if bar.device == 1 and bar.flops][:2]  # the two matmuls of a layer
    lazy = replace(step, bars=tuple(bar for bar in step.bars if bar not in first))
    picture = schedule_svg(lazy, schedule)
    assert picture.count("nothing computed, where the schedule has microbatch 0") == 1
    assert "useful in 2 of 4 ticks" in picture


def test_a_program_with_other_ticks_is_drawn_without_numbers():
    picture = schedule_svg(program(4, 3), forwards(gpipe(4, 5)))
    assert "6 ticks that do not match GPipe, forward pass, of 5 microbatches, so they are not numbered" in picture
    assert "microbatch 0" not in picture and "tick 5" in texts(picture)


def test_transfers_that_all_stages_wait_for_are_no_bubble():
    step = program(4, 4, target=machine("8xA5000"))
    picture = schedule_svg(step, forwards(gpipe(4, 4)))
    assert len(rectangles(picture, WIRE)) == 4 * 7
    assert not [rect for rect in actions(picture) if rect[3].startswith("bubble")]


def test_transfers_over_other_axes_are_drawn_on_a_second_line():
    step = program(2, 2, target=machine("8xA5000"), backward=True, data=2)
    picture = schedule_svg(step, gpipe(2, 2))
    sent = [title for *_, title in rectangles(picture, WIRE)]
    over = {axes: sum(title.startswith(f"sent over {axes}: ") for title in sent) for axes in ("pipe", "data")}
    assert over["data"] >= 2 and over["pipe"] == len(sent) - over["data"] >= 2 * 6
    assert "sent over other axes" in texts(picture)


def test_undrawable_input_is_refused_with_a_sentence():
    with pytest.raises(TypeError, match="a timeline does not know its microbatches"):
        schedule_svg(program(2, 2))
    with pytest.raises(TypeError, match="not a str"):
        schedule_svg("1f1b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has 2 stages over 'pipe' and the schedule 3"):
        schedule_svg(program(2, 2), gpipe(3, 2))
    with pytest.raises(ValueError, match="10,240 actions cannot be read"):
        schedule_svg(gpipe(16, 320))


def test_two_pictures_have_different_ids():
    one, other = (schedule_svg(gpipe(2, m)) for m in (2, 3))
    names = [set(re.findall(r'id="([^"]+)"', picture)) for picture in (one, other)]
    ids = re.findall(r'id="([^"]+)"', schedule_svg(zero_bubble(2, 2)))
    assert len(ids) == len(set(ids))
    assert not names[0] & names[1] and "<script" not in one and "<style" not in one
    assert "prefers-color-scheme:dark" in schedule_svg(gpipe(2, 2), file=True)
