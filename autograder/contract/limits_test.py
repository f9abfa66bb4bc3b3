"""Facts against the reference and against the naive baseline, from hand-made evidence."""

from dataclasses import replace

import pytest

from autograder.contract.case import Sizes
from autograder.contract.facts import worst
from autograder.contract.limits import NAIVE, temporaries_at_most, temporaries_within
from autograder.contract.task import Case, Evidence, TaskEvidence
from autograder.contract.time_limits import (
    bubble_is,
    exposed_over_within,
    exposed_within,
    time_gained,
    time_within,
)
from course.program import Collective, Costs, Memory, Timeline
from course.program.memory import Alive
from course.program.simulator import DeviceTime, Piece

MiB = 2**20
REFERENCES = {
    "temporaries": {"reference": 100 * MiB, "naive": 400 * MiB},
    "seconds": {"reference": 1.0, "naive": 4.0},
    "exposed": {"reference": 0.1, "naive": 1.0},
    "flops": {"reference": 1e12},
}


def evidence(temporaries=100 * MiB, seconds=1.0, exposed=0.1, flops=1e12, difference=""):
    device = DeviceTime(0, (0, 1), seconds, seconds - exposed, 0.0, {"data": exposed})
    piece = Piece("all_gather", "mine:7", "data", exposed, 3)
    time = Timeline("8xH100", {"data": 2}, seconds, (device,), (piece,))
    memory = Memory(0, 0, 0, temporaries, ())
    case = Case("data=2", {"data": 2}, Sizes())
    return Evidence(case, (), (), {}, {}, Costs(flops, 0, 0, (), {}), memory, "mine:1", difference, time)


def judged(at_scale, references):
    return TaskEvidence([], at_scale, references)


FACTS = [
    (temporaries_within, "temporaries", MiB * 100),
    (time_within, "seconds", 1.0),
    (exposed_within, "exposed", 0.1),
]


@pytest.mark.parametrize(("fact", "figure", "unit"), FACTS[1:])
def test_a_limit_is_a_multiple_of_the_references_figure(fact, figure, unit):
    assert fact(judged(evidence(**{figure: 1.14 * unit}), REFERENCES), 1.15, "").passed is True
    failed = fact(judged(evidence(**{figure: 1.16 * unit}), REFERENCES), 1.15, "Look here.")
    assert (failed.passed, failed.message.endswith("Look here.")) == (False, True)


def test_a_limit_may_be_a_share_of_what_the_naive_version_takes():
    assert exposed_within(judged(evidence(exposed=0.34), REFERENCES), 0.35, "", than=NAIVE).passed is True
    assert exposed_within(judged(evidence(exposed=0.36), REFERENCES), 0.35, "", than=NAIVE).passed is False
    filled = time_gained(judged(evidence(exposed=0.0, seconds=3.9), REFERENCES), 0.16, "")
    assert filled.passed is False and "3900 ms, and the naive baseline takes 4000 ms" in filled.message
    assert filled.amiss == 1 and (filled.measured, filled.limit) == (3900.0, 3840.0)
    assert time_gained(judged(evidence(exposed=0.3, seconds=3.8), REFERENCES), 0.16, "").passed is True
    slow = time_within(judged(evidence(seconds=3.1), REFERENCES), 0.75, "", than=NAIVE)
    assert (slow.passed, slow.line) == (False, "mine:7")
    assert "3100 ms, 0.78 times the naive baseline's (the limit is 0.75 times)" in slow.message


@pytest.mark.parametrize(("fact", "figure", "unit"), FACTS)
def test_without_measured_references_nothing_is_judged(fact, figure, unit):
    for known in ({}, {"flops": REFERENCES["flops"]}, {figure: {"reference": unit}}):
        result = fact(judged(evidence(), known), 1.15, "")
        assert (result.passed, result.measured) == (None, "not measured")
    assert fact(judged(None, REFERENCES), 1.15, "").passed is None


@pytest.mark.parametrize(("fact", "figure", "unit"), FACTS)
def test_a_program_that_does_less_or_something_else_at_the_realistic_size_fails(fact, figure, unit):
    assert fact(judged(evidence(flops=0.6e12), REFERENCES), 1.15, "").passed is False
    assert fact(judged(evidence(difference="add is multiply"), REFERENCES), 1.15, "").measured == "not comparable"


def test_temporaries_may_be_compared_with_a_closed_form():
    fact = temporaries_at_most(
        judged(evidence(temporaries=3 * MiB), REFERENCES), lambda case: case.mesh["data"] * MiB, "Look."
    )
    assert (fact.passed, fact.measured, fact.limit) == (False, 3 * MiB, 2 * MiB)
    assert (fact.reference, fact.naive) == (100 * MiB, 400 * MiB)
    assert fact.message.endswith("are allowed. Look.")
    assert temporaries_at_most(judged(evidence(temporaries=2 * MiB), REFERENCES), lambda _: 2 * MiB, "").passed is True
    assert temporaries_at_most(judged(None, REFERENCES), lambda _: 1, "").passed is None
    assert temporaries_at_most(judged(evidence(), {}), lambda _: 1, "").passed is None
    assert (
        temporaries_at_most(judged(evidence(difference="add"), REFERENCES), lambda _: 1, "").measured
        == "not comparable"
    )


def test_arrays_at_the_peak_are_named_with_shape_dtype_and_line_the_largest_first():
    product = Alive(64 * MiB, (4096, 4096), "f32", "dot_general", "mine:5")
    stack = Alive(128 * MiB, (2, 4096, 4096), "f32", "while", "mine:3")
    many = tuple(Alive(16 * MiB, (n,), "bf16", "add", f"mine:{n}") for n in range(10, 20))
    e = replace(evidence(), memory=Memory(0, 0, 0, 416 * MiB, (stack, product, product, *many)))
    fact = temporaries_at_most(judged(e, REFERENCES), lambda _: MiB, "Look.")
    text, *rows = fact.message.split("\n")
    assert text.endswith("the largest, f32[2x4096x4096], takes 128 MiB. Look.") and fact.line == "mine:3"
    assert [row.split() for row in rows[1:4]] == [
        ["128", "MiB", "1", "x", "f32[2x4096x4096]", "kept", "by", "a", "loop", "mine:3"],
        ["128", "MiB", "2", "x", "f32[4096x4096]", "matmul", "mine:5"],
        ["16", "MiB", "1", "x", "bf16[10]", "add", "mine:10"],
    ]
    assert len(rows) == 8 and rows[-1].split() == ["96", "MiB", "smaller", "ones"]
    assert worst([fact, replace(fact, case="another")]).message.split("\n")[0].endswith("(also fails in: another)")


def test_exposed_communication_says_which_transfer_is_waited_for_and_how_often_it_runs():
    gather = Collective("all_gather", ("data",), 2, 8, 8.0, 7, "mine:7", (2,), "f32")
    e = evidence(exposed=0.5)
    e = replace(e, costs=replace(e.costs, collectives=(gather, replace(gather, line="mine:9", count=2))))
    fact = exposed_within(judged(e, REFERENCES), 1.15, "Look.")
    says = "The step waits longest for all-gather, which a device runs 7 times: 500 ms of its critical path. Look."
    assert fact.message.endswith(says) and fact.line == "mine:7"


def test_a_contract_may_say_that_less_work_is_right_too():
    half = evidence(flops=0.5e12)
    assert temporaries_within(judged(half, REFERENCES), 1.15, "").measured == "not comparable"
    assert temporaries_within(judged(half, REFERENCES), 1.15, "", least=0.45).passed is True


def bubble(seconds, difference="", stages=4, microbatches=8, **options):
    """Evidence of a pipeline whose stages take 2 ms per microbatch."""
    return bubble_is(
        evidence(seconds=seconds, difference=difference),
        lambda _: stages + microbatches - 1,
        lambda _: microbatches,
        lambda _: 2e-3,
        "Look.",
        drained=(lambda _: microbatches * stages, "microbatch"),
        **options,
    )


def test_a_bubble_is_what_the_schedule_says_and_no_other():
    assert bubble(11 * 2e-3).passed is True
    longer, shorter = bubble(12 * 2e-3), bubble(10 * 2e-3)
    assert (longer.passed, longer.measured_text, longer.limit_text) == (False, "0.3333", "0.2727")
    assert longer.message.startswith(
        "with zero-cost communication the forward pass takes as long as 12 ticks of one stage"
    )
    assert longer.message.endswith("has work in 8 of them. The other 4 do nothing useful, and 3 are enough. Look.")
    assert "each microbatch ended on the last stage before the next" in bubble(32 * 2e-3).message
    assert "which part is left out" in shorter.message
    assert shorter.passed is False
    assert (bubble(11.03 * 2e-3).passed, bubble(11.05 * 2e-3).passed) == (True, False)


def test_a_bubble_may_be_smaller_than_the_schedule_s_as_long_as_all_work_is_done():
    facts = {ticks: bubble(ticks * 2e-3, within=0.03, what="step", shorter=True) for ticks in (7, 8, 10, 11.1, 12)}
    assert [fact.passed for fact in facts.values()] == [False, True, True, True, False]
    assert facts[12].message.startswith("with zero-cost communication the step takes as long as 12 ticks of one stage")
    assert facts[12].limit == pytest.approx(1.03 * 3 / 11)
    assert "all of the work takes 8: which part is left out" in facts[7].message


def test_a_pipeline_of_one_stage_has_no_bubble():
    assert bubble(8 * 2e-3, stages=1).passed is True
    assert bubble(8.1 * 2e-3, stages=1).passed is False


def test_a_bubble_that_nobody_measured_is_not_judged_and_one_of_another_program_fails():
    assert bubble_is(None, lambda _: 1, lambda _: 1, lambda _: 1.0, "").passed is None
    assert (bubble(0.0).passed, bubble(0.0).measured) == (False, "no time")
    other = bubble(11 * 2e-3, difference="add is multiply")
    assert (other.passed, other.measured) == (False, "not comparable")


def test_what_an_axis_costs_is_compared_where_it_was_timed_apart():
    known = {**REFERENCES, "spent": {"reference": 0.05, "naive": 0.2}}
    timed = [replace(evidence(), exposed=exposed) for exposed in (0.09, 0.11)]
    facts = [exposed_over_within(judged(e, known), 0.5, "data", "Look here.", than=NAIVE) for e in timed]
    assert [fact.passed for fact in facts] == [True, False]
    assert facts[1].name == "exposed over data"
    assert (
        "and 110 ms less if sending over 'data' took no time, 0.55 times the naive baseline's (the limit is 0.5 times)."
        in facts[1].message
    )
    assert exposed_over_within(judged(evidence(), known), 0.5, "data", "").passed is None, "nobody timed it apart"
    assert exposed_over_within(judged(timed[0], REFERENCES), 0.5, "data", "").passed is None, "no reference is known"
    assert exposed_over_within(judged(None, known), 0.5, "data", "").passed is None


def test_a_figure_just_above_its_limit_reads_so():
    message = time_within(judged(evidence(seconds=1.1504), REFERENCES), 1.15, "").message
    assert "1.1504 times the reference's (the limit is 1.15 times)" in message


def test_a_slow_step_names_a_transfer_where_it_waits_and_else_what_is_computed():
    """The transfer lasts longer than the copy, and as long as in the reference: the copies are what costs more."""
    copies = Piece("transpose", "mine:9", "compute", 0.05, 1), Piece("add", "mine:8", "compute", 0.04, 2)
    for exposed, line in ((0.1, "mine:9"), (1.0, "mine:7")):
        e = evidence(seconds=2.0, exposed=exposed)
        assert e.timeline
        e = replace(e, timeline=replace(e.timeline, critical=(*e.timeline.critical, *copies)))
        fact = time_within(judged(e, REFERENCES), 1.15, "")
        assert fact.line == line
        assert ("; add takes 40 ms of the critical path, in 2 runs (mine:8)" in fact.message) == (line == "mine:9")


def test_a_step_that_waits_little_and_still_gains_nothing_names_what_it_computes():
    copy = Piece("transpose", "mine:9", "compute", 0.05, 1)
    for exposed, named in ((0.1, True), (1.0, False)):
        e = evidence(seconds=3.9, exposed=exposed)
        assert e.timeline
        e = replace(e, timeline=replace(e.timeline, critical=(*e.timeline.critical, copy)))
        fact = time_gained(judged(e, REFERENCES), 0.16, "What does it wait for?")
        assert (fact.line, "besides the products, transpose takes 50 ms" in fact.message) == ("mine:9" * named, named)
        assert fact.message.endswith("What does it wait for?") != named
