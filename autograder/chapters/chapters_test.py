"""No contract accepts a wrong answer or is too strict: alternatives pass, and each mutant fails the facts it names.

Reference solutions are judged on every mesh and at the realistic size, the slowest on the cases of a first check; for
each fact that can fail, one mutant is judged on the case that shows it; and for each task, one alternative on the first
case and at scale. With ``MESHCRAFT_FULL``, as in ``make test-full``, references are judged on the stretched cases, too,
and every alternative and every mutant on every mesh, mutants of the slowest functions on the cases of a first check.
"""

import importlib
import os
from collections import Counter

import jax
import numpy as np
import pytest

from autograder.chapters.promises_test import PROMISES_TO_COME
from autograder.check import check_solution
from autograder.checking.judging import locate_file
from autograder.contract.task import load, references
from autograder.contract.verdict import FAIL, PASS, STUDENT_ERROR
from autograder.grading.inside.tracing import Problem, trace_cases
from autograder.grading.outside.judge import plan
from autograder.proof import alternatives
from autograder.proof.coverage import SLOWEST, mutants, one_for_each_fact
from autograder.proof.mutants import judged, judgement
from autograder.release import promises
from autograder.release.reference_metrics import measure
from course.curriculum import CHAPTERS

FULL = bool(os.environ.get("MESHCRAFT_FULL"))
NAMES = [entry.name for entry in CHAPTERS]
TASKS = [(chapter, task.name) for chapter in NAMES for task in load(chapter).tasks]
LEAST_MUTANTS, LEAST_ALTERNATIVES = 5, 2
ALL_MUTANTS = [(chapter, mutant) for chapter in NAMES for mutant in mutants(chapter)]
MUTANTS = ALL_MUTANTS if FULL else [(chapter, mutant) for chapter in NAMES for mutant in one_for_each_fact(chapter)]
ALL_ALTERNATIVES = [
    (chapter, task, function)
    for chapter in NAMES
    for task, functions in importlib.import_module(f"autograder.chapters.{chapter}.alternatives").ALTERNATIVES.items()
    for function in (functions if FULL else functions[:1])
]


def failed(result):
    """The facts that cost points; those of weight 0 are advice."""
    return {fact.name for fact in result.missed}


def failures(result):
    """Format a result for a failing test: the name and message of each failed fact."""
    return "\n".join(f"{fact.name}: {fact.message}" for fact in result.facts if fact.passed is False) or result.message


@pytest.mark.parametrize(("chapter", "task"), TASKS)
def test_reference_passes_every_fact_on_every_mesh_and_the_slowest_on_the_first_cases(chapter, task):
    on_every_mesh = FULL or task not in SLOWEST
    if on_every_mesh:
        (result,) = check_solution(chapter, [task], stretched=FULL).functions
    else:
        function = getattr(importlib.import_module(f"solutions.{chapter}"), task)
        result = judgement(plan(chapter, load(chapter).task(task)).first, function, locate_file(function))
    assert (result.message, failed(result)) == ("", set()), failures(result)
    assert (result.verdict, result.points) == (PASS, load(chapter).task(task).points)
    assert not on_every_mesh or all(fact.passed for fact in result.facts), "a fact was not measured"
    assert set(load(chapter).task(task).core_facts) <= {fact.name for fact in result.facts if fact.weight}
    unexplained = {fact.name for fact in result.facts if fact.weight} - set(load(chapter).explained_in)
    assert not unexplained, "Contract.explained_in has no page for them"
    failing = {fact for mutant in mutants(chapter) if mutant.task == task for fact in mutant.fails}
    assert {fact.name for fact in result.facts if fact.weight} <= failing, "no mutant shows that these can fail"
    if chapter not in PROMISES_TO_COME:
        promised = {fact for facts in promises.promised(chapter)[task].values() for fact in facts}
        unpromised = {fact.name for fact in result.facts if fact.weight} - promised
        assert not unpromised, "the notebook does not say that these are judged: quote it in PROMISES"
        assert not promised - {fact.name for fact in result.facts}, "PROMISES names facts that are never judged"


@pytest.mark.parametrize(("chapter", "task", "function"), ALL_ALTERNATIVES)
def test_alternative_passes_every_fact_as_it_is_handed_in(chapter, task, function):
    result = alternatives.judged(chapter, load(chapter).task(task), function, full=FULL)
    assert (result.verdict, failed(result), result.message) == (PASS, set(), ""), failures(result)


@pytest.mark.parametrize(("chapter", "mutant"), MUTANTS, ids=lambda value: getattr(value, "name", value))
def test_mutant_fails_exactly_what_it_names(chapter, mutant):
    result = judged(chapter, mutant, full=FULL)
    assert (result.message, failed(result)) == ("", mutant.fails), failures(result)
    task = load(chapter).task(mutant.task)
    assert result.points < task.points
    if any(fact.kind.required for fact in result.missed):
        assert (result.points, result.reason.startswith("No points for ")) == (0, True)
    elif mutant.fails & set(task.core_facts):
        assert result.points <= task.points / 2 and "most half" in result.reason
    for fact in result.facts:
        assert fact.passed is not False or fact.message, f"{fact.name} fails without a message"
        shown = isinstance(fact.measured, str) or fact.amiss
        assert fact.passed is not False or shown, f"{fact.name} fails, but the figure shown is within its limit"


def test_the_slowest_functions_are_functions_of_the_course():
    assert {name for _, name in TASKS} >= SLOWEST


@pytest.mark.parametrize("chapter", NAMES)
def test_every_function_has_mutants_and_alternatives(chapter):
    wrong = Counter(mutant.task for mutant in mutants(chapter))
    right = importlib.import_module(f"autograder.chapters.{chapter}.alternatives").ALTERNATIVES
    for task in load(chapter).tasks:
        assert wrong[task.name] >= LEAST_MUTANTS, task.name
        assert len(right[task.name]) >= LEAST_ALTERNATIVES, task.name


@pytest.mark.parametrize(("chapter", "name"), TASKS)
def test_naive_baseline_misses_the_point(chapter, name):
    task = load(chapter).task(name)
    baselines = [m for m in mutants(chapter) if m.task == name and m.name in (task.naive_memory, task.naive_time)]
    assert len(baselines) == len({task.naive_memory, task.naive_time} - {""})
    for baseline in baselines:
        assert baseline.fails & set(task.core_facts), f"{baseline.name} earns more than half of the points"


@pytest.mark.parametrize(("chapter", "name"), TASKS)
def test_stub_gets_nothing(chapter, name):
    task = load(chapter).task(name)
    space: dict = {}
    exec(compile(f"def {name}{task.signature}:\n    raise NotImplementedError()", "stub", "exec"), space)
    traced = trace_cases(task, space[name], [task.cases[0]], lambda file: "mine" if file == "stub" else None)
    assert isinstance(traced, Problem)
    assert (traced.verdict, traced.line) == (STUDENT_ERROR, "mine:2")
    assert "is not written yet" in traced.message


@pytest.mark.parametrize(("chapter", "name"), TASKS)
def test_message_for_a_function_that_returns_none_names_the_expected_result(chapter, name):
    task = load(chapter).task(name)
    space: dict = {}
    exec(f"def {name}{task.signature}:\n    return None", space)
    traced = trace_cases(task, space[name], [task.cases[0]], lambda _: None)
    assert isinstance(traced, Problem)
    assert traced.verdict == FAIL, traced
    assert "expected" in traced.message


def test_the_first_cases_have_the_small_one_that_the_realistic_size_is_compared_with():
    for chapter, name in TASKS:
        task = load(chapter).task(name)
        first_plan = plan(chapter, task).first
        assert not task.at_scale or task.at_scale[1] in {case.name for case in first_plan.cases}, name


@pytest.mark.long
@pytest.mark.parametrize("chapter", NAMES)
def test_references_are_fresh(chapter):
    assert references(chapter) == measure(chapter), "run `meshcraft build`"


@pytest.mark.parametrize(("chapter", "name"), [task for task in TASKS if FULL or task[1] not in SLOWEST])
def test_unseen_cases_are_legal_for_every_draw(chapter, name):
    task = load(chapter).task(name)
    solution = getattr(importlib.import_module(f"solutions.{chapter}"), name)
    assert task.unseen(np.random.default_rng(0)).name == "unseen"
    cases = [task.unseen(np.random.default_rng(seed)) for seed in range(4 if FULL else 1)]  # `make draws` has more
    meshes = list({str(case.mesh): case for case in cases}.values())
    assert not hasattr(trace_cases(task, solution, meshes, lambda _: None), "verdict")
    for case in cases:
        inputs = task.draw(np.random.default_rng(0), case)
        if case in meshes:
            assert jax.tree.leaves(task.oracle(inputs, case))
