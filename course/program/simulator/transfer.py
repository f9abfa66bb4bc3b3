"""How long a collective takes on a machine, and which links it uses meanwhile."""

from __future__ import annotations

from course.machine import Machine
from course.program.collectives import Groups
from course.program.costs import wire_bytes
from course.program.ir import Op
from course.program.simulator.network import Instance


def transfer(
    op: Op,
    groups: Groups,
    group: tuple[int, ...],
    members: tuple[int, ...],
    machine: Machine,
    free: frozenset[str] = frozenset(),
) -> Instance:
    """One execution of a collective.

    Args:
        op: The collective.
        groups: ``groups_of(op, mesh)``.
        group: The devices that take part.
        members: Their classes.
        machine: Whose links they talk over.
        free: Axes whose collectives take no time.
    """
    link, direction = machine.link_of(group), 0
    if op.kind == "collective_permute":
        pairs = [pair for pair in groups.pairs if pair[0] in group]
        wire = size = float(sum(operand.bytes for operand in op.operands))
        each = [machine.transfer(op.kind, group, wire, size, pair=pair) for pair in pairs]
        latency, rate = max(e[0] for e in each), min(e[1] for e in each)
        if machine.links[link].two_way:
            source, target = pairs[0]
            direction = 1 if (target - source) % len(group) <= len(group) // 2 else 2
    else:
        wire = sum(wire_bytes(op, operand.bytes, len(group), group[0]) for operand in op.operands)
        size = float(sum(max(a.bytes, b.bytes) for a, b in zip(op.operands, op.results, strict=True)))
        latency, rate = machine.transfer(op.kind, group, wire, size)
    links = ((link, direction),) if direction or not machine.links[link].two_way else ((link, 1), (link, 2))
    if free.issuperset(groups.axes):
        latency, wire = 0.0, 0.0
    return Instance(op, groups.axes, members, latency, wire, rate, links)
