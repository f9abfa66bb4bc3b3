"""The collectives of the GPU compiler's schedule: overlap with matmuls, and the time of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from course.machine import Machine
from course.program.collectives import groups_of
from course.program.compiled.groups import replica_groups, source_target_pairs
from course.program.compiled.schedule import Computation, Instruction, Schedule, walk
from course.program.ir import Op, Value
from course.program.simulator.network import Instance
from course.program.simulator.transfer import transfer as collective_transfer


@dataclass(frozen=True)
class GpuCollective:
    """One collective of the compiled schedule.

    Attributes:
        kind: StableHLO's name, ``all_gather``.
        axes: Mesh axes that it runs over; axes of size 1 are never among them.
        group_size: Number of devices that take part.
        operand_bytes: Bytes that each device contributes; the compiler may have combined several arrays.
        count: Number of executions.
        asynchronous: Whether it is started and awaited separately, and not marked as synchronous.
        spans_matmul: Whether a matmul is scheduled between its start and its end.
        in_loop: Whether it is in the body of a loop.
        line: The learner's line, empty if the compiler kept none.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    operand_bytes: int
    count: int
    asynchronous: bool
    spans_matmul: bool
    in_loop: bool
    line: str


def collectives(schedule: Schedule, mesh: dict[str, int]) -> tuple[GpuCollective, ...]:
    """Every collective in scheduled order, with equal ones counted together and groups of one device left out.

    Raises:
        ProgramError: Its groups are not axes of the mesh, or a loop's trip count is unknown.
    """
    counts: Counter[GpuCollective] = Counter()
    for computation, instruction, trips, in_loop in walk(schedule):
        kind = schedule.collective_kind(instruction)
        op = as_op(schedule, computation, instruction, mesh) if kind else None
        groups = groups_of(op, mesh) if op else None
        if op is None or not groups or not groups.groups:
            continue
        done = done_of(computation, instruction)
        spans = False
        if done:
            order = computation.instructions
            between = order[order.index(instruction) + 1 : order.index(done)]
            spans = any(schedule.is_matmul(other) for other in between)
        counts[
            GpuCollective(
                kind,
                groups.axes,
                max(len(group) for group in groups.groups),
                sum(operand.bytes for operand in op.operands),
                1,
                done is not None and not instruction.is_sync,
                spans,
                in_loop,
                instruction.line,
            )
        ] += trips
    return tuple(replace(collective, count=count) for collective, count in counts.items())


def done_of(computation: Computation, start: Instruction) -> Instruction | None:
    """The instruction that waits for ``start``; None if it is not asynchronous."""
    return computation.done_by_start.get(start.name)


def as_op(schedule: Schedule, computation: Computation, instruction: Instruction, mesh: dict[str, int]) -> Op:
    """Convert a scheduled collective to the representation of the other analyses."""
    kind = schedule.collective_kind(instruction)
    inner = schedule.wrapped(instruction)
    done = done_of(computation, instruction)
    num_devices = int(np.prod(list(mesh.values())))
    if kind == "collective_permute":
        attributes = {"source_target_pairs": np.array(source_target_pairs(inner)).reshape(-1, 2)}
    else:
        attributes = {"replica_groups": replica_groups(inner, num_devices)}
    operands = [array for name in instruction.operands for array in computation.by_name[name].results]
    operand_values, results = (
        [Value(array.shape, array.dtype, array.bits) for array in arrays]
        for arrays in (operands, (done or instruction).results)
    )
    return Op(kind, operand_values, results, attributes, [], instruction.line)


def transfer(op: Op, mesh: dict[str, int], machine: Machine) -> Instance | None:
    """The collective as a network transfer, for the slowest group; None if no device sends anything."""
    groups = groups_of(op, mesh)
    transfers = [collective_transfer(op, groups, group, (0,), machine) for group in groups.groups]
    return max(transfers, key=lambda instance: instance.latency + instance.wire_bytes / instance.rate, default=None)
