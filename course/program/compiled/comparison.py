"""Compare one Program by liveness and timeline with the GPU compiler: kernels, bytes, seconds and temporaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from course.machine import Machine
from course.program.compiled.kernels import Work, work_of
from course.program.compiled.report import GpuReport
from course.program.compiled.schedule import CONTAINERS, Instruction, Schedule, walk
from course.program.memory import Memory
from course.program.simulator import Timeline

# Suffix of instructions that the compiler rematerialises to keep fewer results.
REMAT = ".remat"


@dataclass(frozen=True)
class Side:
    """The work of one device, without transfers: the busiest one in the timeline, any one in the compiled program.

    Attributes:
        kernels: Executions of kernels that move memory.
        products: Seconds in matmuls.
        others: Seconds in all other kernels.
        flops: FLOPs of matmuls.
        moved: Bytes that the other kernels read and write.
        temporaries: Bytes of temporaries.
        copies: The part of ``others`` in kernels that only copy; 0 for the timeline, which counts copies of loop
            carries with the other kernels.
        again: Matmuls whose name shows that the compiler recomputes them.
    """

    kernels: int
    products: float
    others: float
    flops: float
    moved: float
    temporaries: int
    copies: float = 0.0
    again: int = 0

    @property
    def seconds(self) -> float:
        """Seconds in all kernels."""
        return self.products + self.others


def predicted(timeline: Timeline, memory: Memory) -> Side:
    """Predictions of the timeline and the liveness analysis."""
    busiest = max(timeline.devices, key=lambda device: device.busy)
    bars = [bar for bar in timeline.bars if (bar.device, bar.stream) == (busiest.device, "compute") and bar.bytes]
    products = sum(bar.end - bar.start for bar in bars if bar.flops)
    return Side(
        len(bars),
        products,
        busiest.busy - products,
        sum(bar.flops for bar in bars),
        sum(bar.bytes for bar in bars if not bar.flops),
        memory.temporaries,
    )


def compiled(report: GpuReport, machine: Machine) -> Side:
    """Figures from the compiled schedule; ``machine`` is the report's."""
    assert report.schedule is not None
    kernels = [(instruction, work, trips) for instruction, work, trips in _kernels(report.schedule) if work.bytes]
    return Side(
        sum(trips for *_, trips in kernels),
        report.replay.matmul,
        report.replay.busy - report.replay.matmul,
        sum(trips * work.flops for _, work, trips in kernels),
        sum(trips * work.bytes for _, work, trips in kernels if not work.flops),
        report.memory.temporaries,
        copying(report.schedule, machine),
        sum(trips for instruction, work, trips in kernels if work.flops and REMAT in instruction.name),
    )


def copying(schedule: Schedule, machine: Machine) -> float:
    """Seconds of a compiled schedule's kernels that only copy."""
    return sum(
        trips * work.seconds(machine) for instruction, work, trips in _kernels(schedule) if instruction.opcode == "copy"
    )


def _kernels(schedule: Schedule) -> Iterator[tuple[Instruction, Work, int]]:
    """Every instruction that is neither a transfer nor control flow, its work, and its number of executions."""
    for computation, instruction, trips, _ in walk(schedule):
        if instruction.opcode not in CONTAINERS and not schedule.collective_kind(instruction):
            yield instruction, work_of(schedule, computation, instruction), trips
