"""The facts that ``check --aot`` adds: the GPU compiler's figures for a function, compared with the course's own.

Not every install has the compiler, so these facts are advice: they cost no points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autograder.checking.judging import Export, exported
from autograder.contract.facts import unmeasured
from autograder.contract.task import Task, references
from autograder.contract.verdict import Direction, Fact, Kind, Result, Unit
from autograder.learner.baselines import solution
from course.machines import machine
from course.program import Locate, ProgramError, parse
from course.program.compiled import GpuReport, compile_all
from course.program.compiled.agreement import disagreement
from course.program.compiled.plugin import AotMissing

# Ratio to the reference's.
RATIO = 1.15
ANOTHER = "the program for GPUs differs from the one that is judged, so it was not compiled"
NAMES = ("compiled program", "overlap", "compiled time", "compiled temporaries")
EXPOSED = "compiled exposed"


@dataclass(frozen=True)
class CompiledFacts:
    """The compiler's facts about a chapter's functions; ``progress`` is called with the current activity."""

    chapter: str
    progress: Callable[[str], None] = lambda text: None
    notes: tuple[str, ...] = ()

    def exports(self, task: Task) -> list[Export]:
        assert task.at_scale
        return [(task, [task.at_scale[0]], platform) for platform in ("cpu", "cuda")]

    def facts(self, task: Task, result: Result, function: Any, locate: Locate) -> list[Fact]:
        self.progress(f"compiling {task.name}")
        return compiled_facts(self.chapter, task, function, locate)


def compiled_facts(chapter: str, task: Task, function: Any, locate: Locate) -> list[Fact]:
    """The compiler's facts about a function at its realistic size; "not measured" with the reason if it fails."""
    assert task.at_scale
    case = task.at_scale[0]
    at = f"{case.name}, {task.machine}"
    names = (*NAMES, EXPOSED) if task.compiled_exposed else NAMES
    own = solution(chapter, task.name)
    try:
        if isinstance(own, str):
            raise ProgramError(own)
        judged, ours = (exported(task, function, case, locate, platform) for platform in ("cpu", "cuda"))
        different = disagreement(parse(judged), parse(ours))
        if different:
            other = Fact(NAMES[0], Kind.PROGRAM, False, "other", "same", case=at, weight=0, message=different)
            return [other, *(_not_measured(name, at, ANOTHER) for name in names[1:])]
        theirs = exported(task, own, case, lambda _: None, "cuda")
        report, reference = compile_all([ours, theirs], machine(task.machine))
    except (AotMissing, ProgramError) as error:
        return [_not_measured(name, at, str(error)) for name in names]
    return [
        Fact(NAMES[0], Kind.PROGRAM, True, "same", "same", case=at, weight=0),
        _overlap(report, reference, at),
        _within(
            NAMES[2], Kind.TIME, 1e3 * report.replay.seconds, 1e3 * reference.replay.seconds, Unit.MILLISECONDS, at
        ),
        _within(NAMES[3], Kind.MEMORY, report.memory.temporaries, reference.memory.temporaries, Unit.BYTES, at),
        *([_exposed(report, reference, chapter, task, at)] if task.compiled_exposed else []),
    ]


def _overlap(report: GpuReport, reference: GpuReport, case: str) -> Fact:
    """Require the reference's share of collectives overlapping a matmul; within loops if both programs have any."""
    ours, theirs = report.coverage_in_loops, reference.coverage_in_loops
    in_loops = ours is not None and theirs is not None
    if not in_loops:
        ours, theirs = report.coverage, reference.coverage
    if ours is None or theirs is None:
        return _not_measured(NAMES[1], case, "the compiled program has no collective")
    details: dict[str, Any] = {
        "direction": Direction.AT_LEAST,
        "unit": Unit.COLLECTIVES,
        "of": "in loops" if in_loops else "",
    }
    details |= {"reference": theirs, "case": case, "weight": 0}
    fact = Fact(NAMES[1], Kind.TIME, ours >= theirs - 1e-9, ours, theirs, **details)
    alone = next((c for c in report.collectives if not c.spans_matmul and (c.in_loop or not in_loops)), None)
    if fact.passed or alone is None:
        return fact
    message = (
        f"the compiler runs {alone.kind.replace('_', '-')} {alone.count} times without overlapping a matmul: "
        "what could be computed before its result is there?"
    )
    return replace(fact, line=alone.line, message=message)


def _exposed(report: GpuReport, reference: GpuReport, chapter: str, task: Task, case: str) -> Fact:
    """Limit the exposed communication of the compiled schedule like the timeline's fact does."""
    naive = references(chapter).get(task.name, {}).get("exposed", {}).get("naive")
    if naive is None:
        return _not_measured(EXPOSED, case, "the naive version has not been measured with this version of jax")
    ours, theirs = (1e3 * sum(each.replay.exposed.values()) for each in (report, reference))
    limit = 1e3 * task.compiled_exposed * naive
    details: dict[str, Any] = {"unit": Unit.MILLISECONDS, "of": task.machine, "reference": theirs, "naive": 1e3 * naive}
    fact = Fact(EXPOSED, Kind.TIME, ours <= limit, ours, limit, **details, case=case, weight=0)
    if fact.passed:
        return fact
    message = f"in the compiler's schedule {ours:.4g} ms of communication are exposed"
    alone = [c for c in report.collectives if not c.spans_matmul]
    if not alone:
        return replace(fact, message=message)
    most = max(alone, key=lambda c: c.count * c.operand_bytes)
    message += (
        f"; {most.kind.replace('_', '-')} of {most.operand_bytes / 1e6:,.4g} MB runs {most.count} times without "
        "overlapping a matmul. What must be computed before it can start, and in which iteration?"
    )
    return replace(fact, line=most.line, message=message)


def _within(name: str, kind: Kind, measured: float, reference: float, unit: Unit, case: str) -> Fact:
    """Limit a figure to 1.15 times the reference's."""
    limit = RATIO * reference
    return Fact(name, kind, measured <= limit, measured, limit, unit=unit, reference=reference, case=case, weight=0)


def _not_measured(name: str, case: str, why: str) -> Fact:
    return unmeasured(name, Kind.TIME, why, 0, case)
