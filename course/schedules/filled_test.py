"""ZB-H2, ZB-V and DualPipe: complete, as short as they claim to be, and with no more in flight."""

import pytest

from course.schedules import Costs, dualpipe, measure, run, written, zero_bubble, zero_bubble_2, zero_bubble_v


def idle(timed):
    """Time of each stage between its first action and its last in which it does nothing."""
    return [spans[-1].end - spans[0].start - sum(s.end - s.start for s in spans) for spans in timed.spans]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 24)])
def test_zb_h2_never_idles_between_its_first_action_and_its_last_for_almost_twice_the_memory(stages, microbatches):
    timed = run(zero_bubble_2(stages, microbatches))
    assert idle(timed) == [0] * stages
    assert measure(timed).activations == (2 * stages - 1,) * stages
    assert timed.end == run(zero_bubble(stages, microbatches)).end, "a step that ends for all at once is as long"


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 12), (8, 16), (1, 2)])
def test_zb_v_is_shorter_than_zb_h1_in_the_memory_of_1f1b(stages, microbatches):
    timed = run(zero_bubble_v(stages, microbatches))
    assert max(measure(timed).activations) <= stages
    assert timed.end <= run(zero_bubble(stages, microbatches)).end
    ends = {(s.stage, s.action.kind, s.action.microbatch, s.action.repeat): s for own in timed.spans for s in own}
    assert ends[0, "F", 0, 1].start >= ends[0, "F", 0, 0].end, "the first device has the last part too"


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 20)])
def test_dualpipe_loses_half_the_stages_less_one_and_holds_one_more_than_1f1b(stages, microbatches):
    timed = run(dualpipe(stages, microbatches))
    measured = measure(timed)
    assert timed.end == 3 * microbatches + stages / 2 - 1
    assert measured.activations == (stages + 1,) * stages and measured.weights == (2,) * stages
    assert timed.spans == run(dualpipe(stages, microbatches), Costs()).spans
    assert {spans[0].start for spans in timed.spans[: stages // 2]} == set(range(stages // 2))


def test_dualpipe_is_refused_where_it_is_not_defined():
    for stages, microbatches in ((3, 6), (4, 7), (4, 6)):
        with pytest.raises(ValueError, match="an even number of stages"):
            dualpipe(stages, microbatches)


def test_routes_lead_back_in_a_v_and_both_ways():
    v = written(["F0a F0b B0b B0a"] * 3, route="v")
    assert [v.neighbour(2, 0, 1), v.neighbour(0, 1, 1), v.neighbour(0, 1, -1)] == [(2, 1), None, (1, 1)]
    both = written(["F0a F0b B0a B0b"] * 3, route="both")
    assert [both.neighbour(2, 0, 1), both.neighbour(0, 1, 1), both.neighbour(0, 1, -1)] == [None, None, (1, 1)]
    with pytest.raises(ValueError, match="there is no route 'back'; there are: round, v, both"):
        written(["F0 B0"], route="back")
