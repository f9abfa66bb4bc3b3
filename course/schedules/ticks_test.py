"""The ticks found in a Program's timeline match the schedule that it implements."""

import pytest

from course.machines import FREE_NETWORK
from course.program import parse, timeline
from course.schedules import Costs, breadth_first, forwards, gpipe, measure, num_ticks, one_f_one_b, run, zero_bubble
from course.schedules.ticks import match_ticks, program_ticks, schedule_ticks
from course.validation.pipelines import pipeline

SIZES = [(2, 2, 1), (4, 3, 1), (4, 6, 2), (4, 2, 3)]


def timed(stages, microbatches, repeats, **options):
    return timeline(parse(pipeline(stages, microbatches, repeats, **options)), FREE_NETWORK)


def active(ticks):
    return [{stage for stage, work in enumerate(tick.work) if work} for tick in ticks]


@pytest.mark.parametrize("size", SIZES)
def test_a_program_that_skips_idle_ticks_computes_exactly_where_the_schedule_does(size):
    expected = schedule_ticks(forwards(breadth_first(*size)))
    assert active(program_ticks(timed(*size, masked=False))) == [set(tick) for tick in expected]


@pytest.mark.parametrize("size", SIZES)
def test_so_does_its_backward_pass(size):
    expected = schedule_ticks(breadth_first(*size))
    assert active(program_ticks(timed(*size, masked=False, backward=True, data=2))) == [set(tick) for tick in expected]


@pytest.mark.parametrize("size", SIZES)
def test_a_masked_program_computes_on_every_stage_in_every_tick(size):
    assert active(program_ticks(timed(*size))) == [set(range(size[0]))] * num_ticks(*size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [True, False])
def test_both_simulators_give_the_same_times_on_a_free_network(size, masked):
    repeats = size[2]
    unit_seconds = timed(1, 1, 1).seconds
    program_timeline = timed(*size, masked=masked)
    timed_schedule = run(forwards(breadth_first(*size)), Costs(forward=repeats * unit_seconds))
    assert timed_schedule.end == pytest.approx(program_timeline.seconds, rel=1e-6)
    starts = [tick.start for tick in program_ticks(program_timeline)]
    assert sorted({span.start for spans in timed_schedule.spans for span in spans}) == pytest.approx(starts, rel=1e-6)
    useful = size[0] * size[1] * repeats * unit_seconds
    assert measure(timed_schedule).bubble == pytest.approx(1 - useful / (size[0] * program_timeline.seconds), rel=1e-6)


def test_backward_costs_twice_forward_in_both():
    program_timeline, unit_seconds = timed(4, 6, 2, backward=True), timed(1, 1, 1).seconds
    timed_schedule = run(breadth_first(4, 6, 2), Costs(2 * unit_seconds, 2 * unit_seconds, 2 * unit_seconds))
    assert timed_schedule.end == pytest.approx(program_timeline.seconds, rel=1e-4)


def test_the_ticks_of_a_schedule_are_those_drawn_by_hand():
    ticks = schedule_ticks(forwards(gpipe(3, 4)))
    rows = ["".join(str(tick[s].microbatch) if s in tick else "." for tick in ticks) for s in range(3)]
    assert rows == ["0123..", ".0123.", "..0123"]
    kinds = ["".join(tick[s].kind if s in tick else "." for tick in schedule_ticks(one_f_one_b(2, 2))) for s in (0, 1)]
    assert kinds == ["FF.B.B", ".FBFB."]
    assert len(schedule_ticks(zero_bubble(4, 8))) == 24 + 3


def test_a_loss_between_the_passes_is_no_tick_of_the_schedule():
    ticks = program_ticks(timed(2, 2, 1, backward=True))
    with_loss = (*ticks[:3], ticks[2], *ticks[3:])
    assert match_ticks(ticks, gpipe(2, 2)) == list(schedule_ticks(gpipe(2, 2)))
    matched = match_ticks(with_loss, gpipe(2, 2))
    assert len(matched) == 7 and matched[3] is None


def test_a_program_with_another_number_of_ticks_is_not_labelled():
    assert match_ticks(program_ticks(timed(2, 2, 1)), gpipe(2, 2)) == []
    assert match_ticks(program_ticks(timed(2, 2, 1)), forwards(gpipe(2, 3))) == []


def test_without_an_axis_or_a_permute_over_it_there_are_no_ticks():
    with pytest.raises(ValueError, match="has no axis 'stage'"):
        program_ticks(timed(2, 2, 1), "stage")
    with pytest.raises(ValueError, match=r"nothing is permuted over 'pipe' \(size 1\)"):
        program_ticks(timed(1, 2, 1))
