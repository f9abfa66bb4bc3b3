"""What ``check --aot`` adds: what the GPU compiler makes of a function, beside what it makes of the course's own.

Not every install has the compiler, so these facts are advice: they cost no points.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autograder.check import functions_of
from autograder.contract import Task, load, trace
from autograder.grading.tracing import Problem, time_limit
from autograder.verdict import Fact, Report
from course.machines import machine
from course.program import Locate, ProgramError, parse
from course.program.compiled import GpuReport, compile_all
from course.program.compiled.agreement import disagreement
from course.program.compiled.plugin import AotMissing

TRACE_SECONDS = 60
# Times the reference's.
RATIO = 1.15
NAMES = ("compiled program", "overlap", "compiled time", "compiled temporaries")


def add_compiled(
    report: Report, chapter: str, path: Path | None, *, progress: Callable[[str], None] | None = None
) -> Report:
    """The same report, with the compiler's facts for every function that has a realistic size and ran at all.

    Args:
        report: What the other lenses gave.
        chapter: The chapter's name.
        path: The notebook that was judged; None for the course's own solution.
        progress: Told what is being compiled.
    """
    find = functions_of(path, chapter)
    results = []
    for result in report.functions:
        task = load(chapter).task(result.name)
        if task.analysed and result.facts:
            if progress:
                progress(f"compiling {task.name}")
            result = replace(result, facts=(*result.facts, *compiled_facts(chapter, task, *find(task))))
        results.append(result)
    return replace(report, functions=tuple(results))


def compiled_facts(chapter: str, task: Task, function: Any, locate: Locate) -> list[Fact]:
    """What the compiler makes of a function at its realistic size; "not measured" with the reason where it cannot."""
    assert task.analysed
    case = task.analysed[0]
    if isinstance(function, Problem):
        return [_not_measured(name, case.name, function.message) for name in NAMES]
    solution = getattr(importlib.import_module(f"solutions.{chapter}"), task.name)
    try:
        with time_limit(TRACE_SECONDS):
            judged = trace(task, function, case, locate)
            ours = trace(task, function, case, locate, "cuda")
        different = disagreement(parse(judged), parse(ours))
        theirs = trace(task, solution, case, lambda _: None, "cuda")
        found, reference = compile_all([ours, theirs], machine(task.machine))
    except (AotMissing, ProgramError) as error:
        return [_not_measured(name, case.name, str(error)) for name in NAMES]
    name = f"{case.name}, {task.machine}"
    return [
        Fact(NAMES[0], not different, "other" if different else "same", "same", case=name, weight=0, message=different),
        _overlap(found, reference, name),
        _within(NAMES[2], 1e3 * found.replay.seconds, 1e3 * reference.replay.seconds, "ms", ".4g", name),
        _within(NAMES[3], found.memory.temporaries, reference.memory.temporaries, "bytes", ",.0f", name),
    ]


def _overlap(found: GpuReport, reference: GpuReport, case: str) -> Fact:
    """The share of collectives that run beside a matrix product is at least the reference's."""
    if found.coverage is None or reference.coverage is None:
        return _not_measured(NAMES[1], case, "the compiled program has no collective")
    passed = found.coverage >= reference.coverage - 1e-9
    alone = next((c for c in found.collectives if not c.spans_matmul), None)
    message = "" if passed or alone is None else (
        f"the compiler runs {alone.kind.replace('_', '-')} {alone.count} times with no matrix product beside it: what "
        "could be computed before its result is there?")  # fmt: skip
    return Fact(NAMES[1], passed, f"{found.coverage:.2f}", f"{reference.coverage:.2f}", "of collectives",
                f"{reference.coverage:.2f}", case=case, line=alone.line if alone and not passed else "",
                message=message, weight=0)  # fmt: skip


def _within(name: str, found: float, reference: float, unit: str, form: str, case: str) -> Fact:
    """At most 1.15 times the reference's."""
    return Fact(name, found <= RATIO * reference, f"{found:{form}}", f"{RATIO * reference:{form}}", unit,
                f"{reference:{form}}", case=case, weight=0)  # fmt: skip


def _not_measured(name: str, case: str, reason: str) -> Fact:
    return Fact(name, None, "not measured", case=case, message=reason, weight=0)
