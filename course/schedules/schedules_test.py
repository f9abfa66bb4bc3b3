"""Schedules: every one in the family matches its closed forms; invalid schedules are refused with a message."""

from itertools import pairwise, product

import pytest

from course.schedules import (
    FAMILY,
    LOOPED,
    Action,
    Costs,
    Schedule,
    activations_form,
    breadth_first,
    bubble_form,
    compare,
    family,
    forwards,
    gpipe,
    interleaved,
    measure,
    messages_form,
    num_ticks,
    one_f_one_b,
    pipedream,
    run,
    written,
    zero_bubble,
)

STAGES, MICROBATCHES, REPEATS = (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 8, 16), (1, 2, 4)
FREE = (Costs(), Costs(1, 1.3, 0.7), Costs(2, 3, 1), Costs(1, 0.5, 1.5), Costs(1, 2, 3))
SENDING = (Costs(send=0.1), Costs(send=1), Costs(1, 1.5, 0.5, 5))


def sizes(name):
    """Every size of the grid for which the schedule is defined."""
    for stages, microbatches, repeats in product(STAGES, MICROBATCHES, REPEATS):
        defined = {"interleaved": repeats > 1 and microbatches % stages == 0, "breadth_first": True}
        if defined.get(name, repeats == 1):
            yield stages, microbatches, repeats


@pytest.mark.parametrize("name", FAMILY)
def test_bubble_meets_the_closed_form(name):
    checked = 0
    for size, costs in product(sizes(name), FREE):
        form = bubble_form(name, *size, costs)
        if form is not None:
            assert measure(run(family(name, *size), costs)).bubble == pytest.approx(form, abs=1e-12), (size, costs)
            checked += 1
    assert checked >= 100


@pytest.mark.parametrize("name", FAMILY)
def test_activations_messages_and_weights_meet_their_closed_forms(name):
    for stages, microbatches, repeats in sizes(name):
        measured = measure(run(family(name, stages, microbatches, repeats)))
        for stage in range(stages):
            assert measured.activations[stage] == activations_form(name, stage, stages, microbatches, repeats)
            assert measured.messages[stage] == messages_form(stage, stages, microbatches, repeats)
            assert measured.weights[stage] == (stages - stage if name == "pipedream" else 1)


def test_the_design_s_figures_for_eight_stages():
    published = {(1, 1): 0.875, (8, 1): 0.4667, (16, 1): 0.3043, (8, 2): 0.3043, (8, 4): 0.1795}
    for (microbatches, repeats), bubble in published.items():
        measured = measure(run(breadth_first(8, microbatches, repeats))).bubble
        assert measured == pytest.approx(bubble, abs=5e-5)


def test_forward_alone_takes_the_ticks_of_the_formula_also_with_fewer_microbatches_than_stages():
    for stages, microbatches, repeats in product(STAGES, MICROBATCHES, REPEATS):
        timed = run(forwards(breadth_first(stages, microbatches, repeats)), Costs(forward=repeats))
        assert timed.end == num_ticks(stages, microbatches, repeats)


def test_zero_bubble_loses_a_third_of_the_time_that_1f1b_loses_and_holds_no_more_than_its_first_stage():
    plain, split = (measure(run(make(4, 8))) for make in (one_f_one_b, zero_bubble))
    assert (split.time - 24) / (plain.time - 24) == pytest.approx(1 / 3)
    assert max(split.activations) == max(plain.activations) == 4 and min(split.activations) == 4


@pytest.mark.parametrize("costs", SENDING)
def test_messages_that_take_time_slow_a_stream_by_the_time_of_the_round_trip(costs):
    for stages, microbatches in product(STAGES, MICROBATCHES):
        form = bubble_form("pipedream", stages, microbatches, 1, costs)
        assert measure(run(pipedream(stages, microbatches), costs)).bubble == pytest.approx(form, abs=1e-12)


def test_messages_that_overlap_with_compute_cost_a_flush_only_one_round_trip():
    costs = Costs(send=0.5)
    assert run(gpipe(4, 8), costs).end == run(gpipe(4, 8)).end + 2 * 3 * 0.5
    assert run(one_f_one_b(4, 8), costs).end > run(gpipe(4, 8), costs).end  # it waits for more round trips


def test_a_link_carries_one_message_at_a_time_in_each_direction():
    for name in FAMILY:
        timed = run(family(name, 3, 6, 2 if name in LOOPED else 1), Costs(send=1.75))
        links = {(message.source, message.target) for message in timed.messages}
        for link in links:
            messages = [message for message in timed.messages if (message.source, message.target) == link]
            assert all(a.end <= b.start for a, b in pairwise(messages)), (name, link)


@pytest.mark.parametrize("name", FAMILY)
def test_every_action_waits_for_its_dependencies_and_no_longer(name):
    repeats = 2 if name in LOOPED else 1
    timed = run(family(name, 4, 8, repeats), Costs(1, 1.5, 0.5, 0.25))
    ended = {(span.stage, span.action): span.end for spans in timed.spans for span in spans}
    sent = {(m.source, m.action): m.end for m in timed.messages}
    for spans in timed.spans:
        free = 0.0
        for span in spans:
            needs = [free, *_arrivals(span, repeats, sent)]
            own = {"B": "F", "I": "F", "W": "I"}.get(span.action.kind)
            if own:
                assert ended[span.stage, Action(own, span.action.microbatch, span.action.repeat)] <= span.start
            assert span.start == max(needs)
            free = span.end


def _arrivals(span, repeats, sent):
    kind, microbatch, repeat = span.action.kind, span.action.microbatch, span.action.repeat
    step = {"F": -1, "B": 1, "I": 1}.get(kind)
    if step is None:
        return
    other = repeat * 4 + span.stage + step
    if 0 <= other < 4 * repeats:
        yield sent[other % 4, Action(kind, microbatch, other // 4)]


def test_one_repeat_of_breadth_first_is_gpipe():
    assert breadth_first(4, 6, 1).orders == gpipe(4, 6).orders


def test_a_schedule_written_down_is_the_one_that_is_built():
    lines = ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert written(lines).orders == one_f_one_b(2, 3).orders
    looped = written(["F0a F1a F0b F1b B1b B0b B1a B0a"] * 2)
    assert looped.orders == breadth_first(2, 2, 2).orders and looped.num_repeats == 2


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: gpipe(0, 1), "at least 1 of its stages, not 0"),
        (lambda: gpipe(1, 0), "at least 1 of its microbatches, not 0"),
        (lambda: breadth_first(2, 2, 0), "at least 1 of its repeats, not 0"),
        (lambda: breadth_first(2, 2, 27), "at most 26 repeats"),
        (lambda: one_f_one_b(4, 8, 2), "1F1B has one part of the model on each device, not 2"),
        (lambda: zero_bubble(4, 8, 2), "ZB-H1 has one part"),
        (lambda: interleaved(4, 8, 1), "at least 2 repeats, not 1: with one it would be 1F1B"),
        (lambda: interleaved(4, 6, 2), "groups of 4, one for each stage, and 6 is not a multiple of it"),
        (lambda: written([]), "at least one action"),
        (lambda: written(["F0 X0"]), "'X0' is not an action"),
        (lambda: written(["F0 F0 B0"]), "stage 0 needs one F and one B .* microbatch 0, and has 2 x F, 1 x B"),
        (lambda: written(["F0 B0 W0"]), "stage 0 needs one F and one B"),
        (lambda: written(["F0 B0", "F0"]), "stage 1 needs one F and one B .* and has 1 x F"),
        (lambda: Schedule("mine", 2, 1, 1, ((Action("F", 0),),)), "2 stages need as many orders, not 1"),
        (lambda: Schedule("mine", 1, 1, 1, ((Action("F", 0), Action("F", 1)),)), "F1a, which is not part of"),
        (lambda: run(written(["B0 F0"])), "stage 0 waits in B0 for F0, which comes later on the same stage"),
        (lambda: run(written(["F0 B0 F1 B1", "F0 F1 B0 B1"])), "would wait forever"),
        (lambda: measure(run(pipedream(4, 2, stream=12))), "too short for a steady state; give it 40"),
        (lambda: Costs(send=-1), "send is a time: 0 or more, not -1"),
        (lambda: Costs(forward=0), "forward must be above 0"),
        (lambda: Costs(forward=float("nan")), "forward is a time"),
    ],
)
def test_invalid_schedules_are_refused_with_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_schedule_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(LookupError, match="there are: gpipe, pipedream, 1f1b"):
        family("gipe", 2, 2)


def test_comparing_the_family_leaves_out_undefined_schedules():
    assert list(compare(4, 8, 2)) == list(FAMILY)
    assert "interleaved" not in compare(4, 6, 2)
