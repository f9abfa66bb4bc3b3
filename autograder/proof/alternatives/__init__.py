"""Alternative implementations: right answers that every contract must accept, and a measure of how they differ."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from autograder.contract.task import Task, load, trace
from autograder.contract.verdict import Result
from autograder.grading.inside.cells import locate_cell
from autograder.grading.inside.intake import Cell
from autograder.grading.inside.running import run_cells
from autograder.grading.inside.tracing import Problem
from autograder.grading.outside.judge import plan, stopped
from autograder.proof.mutants import judgement
from course.program import parse
from course.program.ir import walk

Function = Callable[..., Any]
_SECRET = b"the secret of a course that has none"


@cache
def operations(chapter: str, task: str, function: Function) -> frozenset[tuple[Any, int]]:
    """The operations in the program of a task's first case, with their shapes, and how often each occurs.

    Order, constants and names are left out, calls are inlined, and dead code is removed: two programs with the same
    StableHLO have the same operations, and so have many that differ in text alone.
    """
    loaded_task = load(chapter).task(task)
    main = parse(trace(loaded_task, function, loaded_task.cases[0], lambda _: None)).main
    counted = Counter(
        (op.kind, *(tuple((v.shape, v.dtype) for v in values) for values in (op.operands, op.results)))
        for op in walk(main)
        if op.kind != "constant"
    )
    return frozenset(counted.items())


def judged(chapter: str, task: Task, function: Function, *, full: bool) -> Result:
    """Judge an alternative as a submission: its module in one cell, and the task's function in the next.

    Args:
        chapter: The chapter's name.
        task: Its task.
        function: The alternative.
        full: Judge all cases of official grading, including those drawn for a submission; otherwise the first case, the
            realistic size if there is one, and the case that it enlarges.
    """
    module = inspect.getmodule(function)
    assert module
    calls = f"def {task.name}{task.signature}:\n    return {function.__name__}{task.signature}\n"
    ran = run_cells([Cell("alternative", inspect.getsource(module)), Cell(task.name, calls)], [task.name])
    if full:
        planned = plan(chapter, task, stretched=True, secret=_SECRET, submission=function.__name__)
    else:
        planned = plan(chapter, task)
        needed = {task.cases[0].name} | ({task.at_scale[1]} if task.at_scale else set())
        planned = replace(planned, cases=tuple(case for case in planned.cases if case.name in needed))
    answer = ran.function(task)
    return stopped(task, answer) if isinstance(answer, Problem) else judgement(planned, answer, locate_cell)
