"""The other analyses' figures, read off the GPU compiler's schedule: for programs that cannot be priced as written."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from course.machine import Machine
from course.program.compiled.collectives import as_op
from course.program.compiled.kernels import work_of
from course.program.compiled.replay import replay
from course.program.compiled.report import GpuReport
from course.program.compiled.schedule import CONTAINERS, Schedule, walk
from course.program.costs import Collective, Costs, collectives_of
from course.program.memory import Memory
from course.program.simulator import DeviceTime, Timeline


def read_off(report: GpuReport, machine: Machine) -> tuple[Costs, Memory, Timeline]:
    """Costs, memory and timeline of a compiled program, as far as the schedule contains them.

    Raises:
        ProgramError: A trip count is unknown, or a collective's groups use an unknown notation.
    """
    assert report.schedule is not None
    m = report.memory
    memory = Memory(m.arguments, m.outputs, m.aliased, m.temporaries, ())
    return _costs(report.schedule, report.mesh), memory, _timeline(report.schedule, report.mesh, machine)


def _costs(schedule: Schedule, mesh: dict[str, int]) -> Costs:
    flops = operations = touched = 0.0
    products: Counter[str] = Counter()
    sent: Counter[Collective] = Counter()
    for computation, instruction, trips, _ in walk(schedule):
        if schedule.collective_kind(instruction):
            for collective in collectives_of(as_op(schedule, computation, instruction, mesh), mesh, 0):
                sent[collective] += trips
        elif instruction.opcode not in CONTAINERS:
            work = work_of(schedule, computation, instruction)
            flops, operations = flops + trips * work.flops, operations + trips * work.operations
            touched += trips * work.bytes
            if work.flops:
                products[f"{work.dtype} x {work.dtype}"] += trips
    collectives = tuple(replace(collective, count=count) for collective, count in sent.items())
    return Costs(flops, operations, touched, collectives, dict(products))


def _timeline(schedule: Schedule, mesh: dict[str, int], machine: Machine) -> Timeline:
    replayed = replay(schedule, mesh, machine, bars=True)
    device = DeviceTime(
        0, tuple(range(math.prod(mesh.values()))), replayed.seconds, replayed.busy, 0.0, replayed.exposed
    )
    return Timeline(machine.name, dict(mesh), replayed.seconds, (device,), (), replayed.bars)
