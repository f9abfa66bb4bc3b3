"""Differences between the timeline and the compiled schedule's replay in seconds, run by run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from course.machines import machine
from course.program import memory, parse, timeline
from course.program.compiled import GpuReport, compile_for
from course.program.compiled.comparison import Side, compiled, predicted
from course.validation.single_device import RUNS, PublishedRun, single_device

A5000 = machine("8xA5000")


@dataclass(frozen=True)
class Gap:
    """One run by both analyses; ``compiled`` is None without the GPU compiler."""

    name: str
    measured: float
    timeline: Side
    compiled: Side | None


def gaps(runs: Iterable[PublishedRun] = RUNS, *, aot: bool = True) -> list[Gap]:
    """Run both analyses on the published single-GPU runs.

    Args:
        runs: The runs.
        aot: Whether to use the GPU compiler.

    Raises:
        AotMissing: The compiler is requested but not installed.
        ProgramError: It took too long.
    """
    run_gaps = []
    for run in runs:
        program = single_device(run)
        module = parse(program)
        ours = predicted(timeline(module, A5000), memory(module, program))
        run_gaps.append(Gap(run.name, run.seconds, ours, compiled(compiled_run(run), A5000) if aot else None))
    return run_gaps


@cache
def compiled_run(run: PublishedRun, name: str = A5000.name) -> GpuReport:
    """A run compiled by the GPU compiler for the machine of that name; compiled once and cached.

    Raises:
        AotMissing: It is not installed.
        ProgramError: It took too long.
    """
    return compile_for(single_device(run, platform="cuda"), machine(name))
