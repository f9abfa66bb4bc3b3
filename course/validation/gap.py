"""Where the timeline's seconds and those of the compiled schedule's replay differ, run by run."""

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
        ProgramError: It took too long.
    """
    found = []
    for run in runs:
        program = single_device(run)
        module = parse(program)
        ours = predicted(timeline(module, A5000), memory(module, program))
        found.append(Gap(run.name, run.seconds, ours, compiled(compiled_run(run), A5000) if aot else None))
    return found


@cache
def compiled_run(run: PublishedRun) -> GpuReport:
    """A run as the GPU compiler compiles it for the A5000; it is asked once, however many need it.

    Raises:
        AotMissing: It is not installed.
        ProgramError: It took too long.
    """
    return compile_for(single_device(run, platform="cuda"), A5000)
