"""What ``check --aot`` adds: what the GPU compiler makes of a function, beside what it makes of the course's own.

Not every install has the compiler, so these facts are advice: they cost no points.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from autograder.check import add_facts, exported
from autograder.contract.task import Task, references
from autograder.contract.verdict import Fact, Report, Result
from autograder.learner.baselines import solution
from course.machines import machine
from course.program import Locate, ProgramError, parse
from course.program.compiled import GpuReport, compile_all
from course.program.compiled.agreement import disagreement
from course.program.compiled.plugin import AotMissing

# Times the reference's.
RATIO = 1.15
ANOTHER = "the program for GPUs is another than the one that is judged, so it was not compiled"
NAMES = ("compiled program", "overlap", "compiled time", "compiled temporaries")
EXPOSED = "compiled exposed"


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

    def more(task: Task, result: Result, function: Any, locate: Locate) -> list[Fact]:
        if progress:
            progress(f"compiling {task.name}")
        return compiled_facts(chapter, task, function, locate)

    return add_facts(report, chapter, path, more)


def compiled_facts(chapter: str, task: Task, function: Any, locate: Locate) -> list[Fact]:
    """What the compiler makes of a function at its realistic size; "not measured" with the reason where it cannot."""
    assert task.analysed
    case = task.analysed[0]
    name = f"{case.name}, {task.machine}"
    own = solution(chapter, task.name)
    asked = (*NAMES, EXPOSED) if task.compiled_exposed else NAMES
    if isinstance(own, str):
        return [_not_measured(fact, name, own) for fact in asked]
    try:
        judged, ours = (exported(task, function, case, locate, platform) for platform in ("cpu", "cuda"))
        different = disagreement(parse(judged), parse(ours))
        if different:
            other = Fact(NAMES[0], False, "other", "same", case=name, weight=0, message=different)
            return [other, *(_not_measured(fact, name, ANOTHER) for fact in asked[1:])]
        theirs = exported(task, own, case, lambda _: None, "cuda")
        found, reference = compile_all([ours, theirs], machine(task.machine))
    except (AotMissing, ProgramError) as error:
        return [_not_measured(fact, name, str(error)) for fact in asked]
    return [
        Fact(NAMES[0], True, "same", "same", case=name, weight=0),
        _overlap(found, reference, name),
        _within(NAMES[2], 1e3 * found.replay.seconds, 1e3 * reference.replay.seconds, "ms", ".4g", name),
        _within(NAMES[3], found.memory.temporaries, reference.memory.temporaries, "bytes", ",.0f", name),
        *([_exposed(found, reference, chapter, task, name)] if task.compiled_exposed else []),
    ]


def _overlap(found: GpuReport, reference: GpuReport, case: str) -> Fact:
    """Of collectives, those in loops if both have such, at least the reference's share runs beside a matrix product."""
    ours, theirs = found.coverage_in_loops, reference.coverage_in_loops
    in_loops = ours is not None and theirs is not None
    if not in_loops:
        ours, theirs = found.coverage, reference.coverage
    if ours is None or theirs is None:
        return _not_measured(NAMES[1], case, "the compiled program has no collective")
    passed = ours >= theirs - 1e-9
    alone = next((c for c in found.collectives if not c.spans_matmul and (c.in_loop or not in_loops)), None)
    message = "" if passed or alone is None else (
        f"the compiler runs {alone.kind.replace('_', '-')} {alone.count} times with no matrix product beside it: what "
        "could be computed before its result is there?")  # fmt: skip
    unit = "of collectives in loops" if in_loops else "of collectives"
    return Fact(NAMES[1], passed, f"{ours:.2f}", f"{theirs:.2f}", unit, f"{theirs:.2f}", case=case,
                line=alone.line if alone and not passed else "", message=message, weight=0)  # fmt: skip


def _exposed(found: GpuReport, reference: GpuReport, chapter: str, task: Task, case: str) -> Fact:
    """What the compiled schedule leaves exposed, against the limit that the timeline's fact has."""
    naive = references(chapter).get(task.name, {}).get("exposed", {}).get("naive")
    if naive is None:
        return _not_measured(EXPOSED, case, "the naive version has not been measured with this version of jax")
    ours, theirs = (1e3 * sum(report.replay.exposed.values()) for report in (found, reference))
    limit = 1e3 * task.compiled_exposed * naive
    alone = [c for c in found.collectives if not c.spans_matmul]
    most = max(alone, key=lambda c: c.count * c.operand_bytes, default=None)
    message = f"in the compiler's schedule devices compute nothing for {ours:.4g} ms while a transfer goes on"
    if most:
        message += (
            f"; {most.kind.replace('_', '-')} of {most.operand_bytes / 1e6:,.4g} MB runs {most.count} times with no "
            "matrix product beside it. What must be computed before it can start, and in which iteration?")  # fmt: skip
    line = most.line if most else ""
    passed = ours <= limit
    return Fact(EXPOSED, passed, f"{ours:.4g}", f"{limit:.4g}", f"ms on {task.machine}", f"{theirs:.4g}",
                f"{1e3 * naive:.4g}", case, "" if passed else line, "" if passed else message, weight=0)  # fmt: skip


def _within(name: str, found: float, reference: float, unit: str, form: str, case: str) -> Fact:
    """At most 1.15 times the reference's."""
    return Fact(name, found <= RATIO * reference, f"{found:{form}}", f"{RATIO * reference:{form}}", unit,
                f"{reference:{form}}", case=case, weight=0)  # fmt: skip


def _not_measured(name: str, case: str, reason: str) -> Fact:
    return Fact(name, None, "not measured", case=case, message=reason, weight=0)
