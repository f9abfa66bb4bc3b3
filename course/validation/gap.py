"""Where the timeline's seconds and those of the compiled schedule's replay differ, run by run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from course.machine import Machine
from course.machines import machine
from course.program import Timeline, parse, timeline
from course.program.compiled import GpuReport, compile_all
from course.program.compiled.kernels import Work, work_of
from course.program.compiled.schedule import Instruction, Schedule, walk
from course.validation.single_device import RUNS, PublishedRun, single_device

A5000 = machine("8xA5000")
# The compiler names an instruction that it computes a second time, to keep fewer results, after the first and this.
REMAT = ".remat"


@dataclass(frozen=True)
class Side:
    """One lens on one run.

    Attributes:
        products: Seconds in matrix products.
        others: Seconds in all other kernels.
        flops: Of matrix products.
        moved: Bytes that the other kernels read and write.
        copies: Of ``others``, seconds in kernels that only copy; 0 for the timeline, which counts its copies of what
            loops carry with the others.
        again: Matrix products whose name says that the compiler computes them again.
    """

    products: float
    others: float
    flops: float
    moved: float
    copies: float = 0.0
    again: int = 0


@dataclass(frozen=True)
class Gap:
    """One run by both lenses; ``compiled`` is None without the GPU compiler."""

    name: str
    measured: float
    timeline: Side
    compiled: Side | None


def gaps(runs: Iterable[PublishedRun] = RUNS, *, aot: bool = True) -> list[Gap]:
    """Both lenses on the published single-GPU runs.

    Args:
        runs: Which.
        aot: Whether the GPU compiler is asked.

    Raises:
        AotMissing: It is asked and not installed.
    """
    runs = tuple(runs)
    reports = compiled_runs(runs) if aot else [None] * len(runs)
    return [
        Gap(run.name, run.seconds, _predicted(timeline(parse(single_device(run)), A5000)), report and _compiled(report))
        for run, report in zip(runs, reports, strict=True)
    ]


@cache
def compiled_runs(runs: tuple[PublishedRun, ...]) -> list[GpuReport]:
    """The runs as the GPU compiler compiles them for the A5000; it is asked once, however many need them.

    Raises:
        AotMissing: It is not installed.
    """
    return compile_all([single_device(run, platform="cuda") for run in runs], A5000)


def _predicted(found: Timeline) -> Side:
    products = sum(bar.end - bar.start for bar in found.bars if bar.flops)
    flops = sum(bar.flops for bar in found.bars)
    return Side(products, found.seconds - products, flops, sum(bar.bytes for bar in found.bars if not bar.flops))


def _compiled(report: GpuReport) -> Side:
    assert report.schedule is not None
    kernels = list(_kernels(report.schedule))
    return Side(
        report.replay.matmul,
        report.replay.seconds - report.replay.matmul,
        sum(trips * work.flops for _, work, trips in kernels),
        sum(trips * work.bytes for _, work, trips in kernels if not work.flops),
        copying(report.schedule, A5000),
        sum(trips for instruction, work, trips in kernels if work.flops and REMAT in instruction.name),
    )


def copying(schedule: Schedule, machine: Machine) -> float:
    """Seconds of a compiled schedule's kernels that only copy."""
    return sum(trips * work.seconds(machine) for found, work, trips in _kernels(schedule) if found.opcode == "copy")


def _kernels(schedule: Schedule) -> Iterator[tuple[Instruction, Work, int]]:
    """Every instruction that is no control flow, what it does, and how often."""
    for computation, instruction, trips, _ in walk(schedule):
        if instruction.opcode not in ("while", "call", "conditional"):
            yield instruction, work_of(schedule, computation, instruction), trips
