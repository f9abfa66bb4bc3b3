"""Judging on this machine: which cases run, when a function is stopped, and which callee is at fault."""

from dataclasses import replace

import jax
import pytest

from autograder.chapters.collectives.mutants import adds_at_the_end
from autograder.chapters.mutant import patch
from autograder.checking import judging as checking
from autograder.checking.follow_up import blame_callee
from autograder.checking.judging import judge_function, plan_of_callee
from autograder.contract.task import every_task, find_task, load
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    PARTIAL,
    PASS,
    STUDENT_ERROR,
    Fact,
    Kind,
    conclude,
)
from autograder.grading.outside.judge import plan
from solutions import data_parallel
from solutions import fsdp as solutions_fsdp


def test_program_that_never_ends_is_stopped_and_the_next_check_works(monkeypatch):
    def shard_params(params, axis_name, min_size):
        """Devices wait for each other in different branches."""
        from jax import lax
        from jax.sharding import PartitionSpec as P

        def endless(x):
            return lax.fori_loop(0, 900_000, lambda i, x: lax.fori_loop(0, 900_000, lambda j, x: x * 1.0001, x), x)

        return jax.tree.map(endless, params), jax.tree.map(lambda _: P(), params)

    task = load("fsdp").task("shard_params")
    monkeypatch.setattr(checking.executor(), "seconds", 4)
    result = judge_function(plan("fsdp", task), shard_params, lambda _: None)[0]
    assert result.verdict == LIMIT_EXCEEDED
    assert "longer than 4 s" in result.message
    monkeypatch.setattr(checking.executor(), "seconds", 120)
    from solutions.fsdp import shard_params as right

    assert judge_function(plan("fsdp", task), right, lambda _: None)[0].verdict == PASS


def judged_here(body):
    space = {}
    exec(f"import time\ndef shard_params(params, axis_name, min_size):\n    {body}", space)
    return judge_function(plan("fsdp", load("fsdp").task("shard_params")), space["shard_params"], lambda _: None)[0]


def test_tracing_is_limited_in_processor_time_and_what_waits_in_wall_time(monkeypatch):
    monkeypatch.setattr(checking, "TRACE_SECONDS", 1)
    assert "longer to trace than 1 s of processor time" in judged_here("while True: pass").message
    monkeypatch.setattr(checking, "TRACE_WALL_SECONDS", 1.5)
    result = judged_here("time.sleep(60)")
    assert result.verdict == LIMIT_EXCEEDED and "1.5 s, in which it computed for 0 s" in result.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_that_ends_a_finaliser_and_no_more_ends_the_function_later(monkeypatch):
    monkeypatch.setattr(checking, "TRACE_SECONDS", 1)
    result = judged_here("""
    class Busy:
        def __del__(self):
            while True: pass
    Busy()
    while True: pass""")
    assert "longer to trace than 1 s of processor time" in result.message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "error = ValueError('x'); error.__notes__ = 5; raise error",
            "shard_params raised an exception that cannot be",
        ),
        ("class Text(str): strip = 5\n    raise type('E', (Exception,), {'__str__': lambda _: Text()})", "cannot be"),
        ("shard_params.__wrapped__ = shard_params; raise NotImplementedError", "it raises NotImplementedError"),
        ("raise NameError('x', name=len)", "NameError: x"),
    ],
)
def test_an_exception_that_breaks_what_describes_it_is_the_learners_error(body, says):
    result = judged_here(body)
    assert result.verdict == STUDENT_ERROR and says in result.message


# A pass is a pass


def planned_for(function):
    chapter, task = find_task(function)
    return task, plan(chapter, task, stretched=True), plan(chapter, task, stretched=True, secret=b"s" * 32)


def test_a_check_judges_all_that_grading_does_but_for_the_case_that_is_drawn():
    for function in every_task():
        _, ours, official = planned_for(function)
        assert [case.name for case in official.cases] == [*(case.name for case in ours.cases), "unseen"], function
        assert set(ours.first.cases) < set(ours.cases) and ours.at_scale == official.at_scale, function


LATER = {  # wrong over `pipe`, with one layer, on an axis of size 1
    data_parallel.fold_key_over_axes: {
        "for name in axis_names:": "for name in [n for n in axis_names if n != 'pipe']:"
    },
    data_parallel.overlapped_gradients: {
        "first = lax.psum(waiting, axis_name)": (
            "first = jax.tree.map(lambda g: g if len(inputs) > 1 else 0 * g, lax.psum(waiting, axis_name))"
        )
    },
    solutions_fsdp.fsdp_loss: {
        "### BEGIN SOLUTION": "batch = jax.tree.map(lambda rows: rows[:: 2 - (lax.axis_size(axis_name) > 1)], batch)"
    },
}


@pytest.mark.long
@pytest.mark.parametrize("function", LATER, ids=lambda function: function.__name__)
def test_an_answer_that_is_right_on_the_first_cases_alone_does_not_pass(function):
    _, planned, _ = planned_for(function.__name__)
    mistaken = patch(function, "wrong in a later case", LATER[function]).function
    progress = []
    result, _ = judge_function(planned, mistaken, lambda _: None, progress.append)
    assert (result.verdict, result.points, result.cases_left) == (FAIL, 0, 0), result.message
    assert any("; now " in text for text in progress), "it fell short on the first cases already"
    assert judge_function(planned.first, mistaken, lambda _: None)[0].verdict == PASS


def test_a_result_on_the_first_cases_alone_says_how_many_are_left():
    _, planned, _ = planned_for("ring_reduce_scatter")
    result, _ = judge_function(planned, adds_at_the_end, lambda _: None)
    assert result.verdict == PARTIAL and result.cases == tuple(case.name for case in planned.first.cases)
    assert result.cases_left == len(planned.cases) - len(planned.first.cases) > 0


def test_a_function_that_falls_short_names_the_callee_that_does_so_by_itself():
    right, short = Fact("values", Kind.VALUES, True), Fact("permute bytes", Kind.COMMUNICATION, False)
    caller, callee = (conclude(name, 4, [right, short]) for name in ("cp_transformer_step", "ring_attention"))
    used = {"ring_attention": "", "layer_with": ""}
    result = blame_callee("context_parallel", caller, used, lambda _: callee)
    assert result.points == caller.points and "ring_attention, which cp_transformer_step calls" in result.message
    assert "falls short of “permute bytes” on its own" in result.message
    honest = conclude("ring_attention", 4, [right])
    assert blame_callee("context_parallel", caller, used, lambda _: honest) == caller


def test_what_will_run_is_compiled_while_the_next_cases_are_traced_and_a_failure_of_that_is_no_verdict(monkeypatch):
    worker, requests = checking.executor(), []
    ask = worker.ask

    def refuse_to_compile(header, blobs):
        requests.append(header["do"])
        if header["do"] == "compile":
            raise checking.Stopped(LIMIT_EXCEEDED, "it took too long")
        return ask(header, blobs)

    monkeypatch.setattr(worker, "ask", refuse_to_compile)
    planned = plan("fsdp", load("fsdp").task("gather_params"))
    result, _ = judge_function(planned, solutions_fsdp.gather_params, lambda _: None)
    assert result.verdict == PASS and requests.count("run") == len(planned.cases)
    assert 0 < requests.count("compile") <= len(planned.cases)


def test_a_callee_is_judged_on_as_few_cases_as_can_show_what_it_lacks():
    task = load("context_parallel").task("ring_attention")
    assert task.at_scale is not None
    right = Fact("values", Kind.VALUES, True)

    def planned(name, kind):
        caller = conclude("cp_transformer_step", 4, [right, Fact("some", kind, False, case=name)])
        return plan_of_callee("context_parallel", task, replace(caller, cases=("one", "two")))

    scaled, first, later = planned("one", Kind.MEMORY), planned("one", Kind.VALUES), planned("two", Kind.VALUES)
    names = {case.name for case in scaled.cases}
    assert (
        scaled.at_scale == task.at_scale[0]
        and task.at_scale[1] in names
        and {case.name for case in later.cases} <= names
    )
    assert first.at_scale is later.at_scale is None and len(first.cases) == 1 < len(later.cases)


def test_a_callee_that_is_right_is_not_blamed_for_what_no_case_shows():
    from solutions.async_tensor_parallel import ring_gather_matmul

    partial = conclude(
        "async_tp_mlp", 4, [Fact("values", Kind.VALUES, True), Fact("time", Kind.TIME, False, case="one")]
    )
    task = load("async_tensor_parallel").task("ring_gather_matmul")
    planned = plan_of_callee("async_tensor_parallel", task, replace(partial, cases=("one",)))
    assert not judge_function(planned, ring_gather_matmul, lambda _: None)[0].missed
