"""Judge mutants on every mesh, on the cases that reveal them, or on an unseen one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from autograder.chapters.mutant import Mutant, mutant
from autograder.checking.judging import executor, locate_file
from autograder.contract.task import Case, Evidence, load
from autograder.contract.verdict import Result
from autograder.grading.inside.tracing import Problem, trace_cases
from autograder.grading.outside.judge import GradingPlan, judge, plan, stopped
from autograder.proof.coverage import SLOWEST
from course.program import Locate

# The Programs that were exported so far, and the evidence of the cases that ran, by case.
Known = tuple[dict[str, bytes], dict[str, Evidence]]


def doubles_gradients(tree: Any) -> Any:
    """The same numbers, with twice their gradient."""
    return jax.tree.map(lambda x: x + (x - jax.lax.stop_gradient(x)), tree)


def judged(chapter: str, mutant: Mutant, *, full: bool) -> Result:
    """Judge a mutant on all meshes, or on the smallest case that reveals it.

    The full form judges the slowest functions on the cases of a first check, and on those that reveal the mutant. The
    short form includes the realistic size only if the small one does not fail all the facts that the mutant names.
    """
    task = load(chapter).task(mutant.task)
    planned = plan(chapter, task)
    shown_by = set(mutant.shown_by or (task.cases[0].name,))
    if full:
        first = {case.name for case in planned.first.cases} | shown_by
        cases = tuple(case for case in planned.cases if task.name not in SLOWEST or case.name in first)
        return _judged(replace(planned, cases=cases), mutant)
    known: Known = {}, {}
    small = replace(planned, cases=tuple(c for c in planned.cases if c.name in shown_by), at_scale=None)
    result = _judged(small, mutant, known)
    short = {fact.name for fact in result.missed}
    if task.at_scale is None or short == mutant.fails:
        return result
    needed = shown_by | {task.at_scale[1]}
    return _judged(replace(planned, cases=tuple(c for c in planned.cases if c.name in needed)), mutant, known)


def judged_on(chapter: str, task: str, function: Callable[..., Any], cases: tuple[Case[Any], ...]) -> Result:
    """Judge a function on these cases only, at small sizes."""
    planned = plan(chapter, load(chapter).task(task))
    return _judged(replace(planned, cases=cases, at_scale=None), mutant(task, function))


def judged_unseen(chapter: str, task: str, function: Callable[..., Any], seed: int = 0) -> Result:
    """Judge a function on one case that official grading may draw, and on nothing else."""
    planned = plan(chapter, load(chapter).task(task), secret=str(seed).encode())
    only = replace(planned, cases=planned.cases[-1:], at_scale=None)
    return _judged(only, mutant(task, function))


def _judged(planned: GradingPlan, mutant: Mutant, known: Known | None = None) -> Result:
    return judgement(planned, mutant.function, locate_file(mutant.function), known)


def judgement(planned: GradingPlan, function: Callable[..., Any], locate: Locate, known: Known | None = None) -> Result:
    """Judge a function by a plan; export and run what is not in ``known`` yet, and add it."""
    programs, seen = known or ({}, {})
    missing = [case for case in planned.traced if case.name not in programs]
    traced = trace_cases(planned.task, function, missing, locate)
    if isinstance(traced, Problem):
        return stopped(planned.task, traced)
    programs |= traced.serialised()
    return judge(planned, programs, traced.line, executor().ask, seen=seen)
