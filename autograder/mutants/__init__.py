"""Named wrong answers, each of which a fact must reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autograder.check import executor, locate_file
from autograder.contract import load
from autograder.grading.judge import judge, plan, stopped
from autograder.grading.tracing import Problem, trace_cases
from autograder.verdict import Result


# --8<-- [start:mutant]
@dataclass(frozen=True)
class Mutant:
    """A wrong answer for a task, and exactly the facts that it must fail.

    ``shown_by`` names the cases that show it, where the task's first does not.
    """

    task: str
    function: Callable[..., Any]
    fails: frozenset[str]
    shown_by: tuple[str, ...] = ()
    # --8<-- [end:mutant]

    @property
    def name(self) -> str:
        return self.function.__name__


def mutant(task: str, function: Callable[..., Any], *fails: str, shown_by: tuple[str, ...] = ()) -> Mutant:
    return Mutant(task, function, frozenset(fails), shown_by)


def judged(chapter: str, mutant: Mutant, *, full: bool) -> Result:
    """The judgement of a mutant: on all meshes, or on the smallest case that shows it and the realistic size."""
    task = load(chapter).task(mutant.task)
    planned = plan(chapter, task, full=True)
    if not full:
        needed = set(mutant.shown_by or (task.cases[0].name,))
        needed |= {task.analysed[1]} if task.analysed else set()
        planned = replace(planned, cases=tuple(case for case in planned.cases if case.name in needed))
    traced = trace_cases(task, mutant.function, planned.traced, locate_file(mutant.function))
    if isinstance(traced, Problem):
        return stopped(task, traced)
    programs = {name: program.serialise() for name, program in traced.programs.items()}
    return judge(planned, programs, traced.line, executor().ask)
