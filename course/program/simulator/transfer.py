"""The time of a collective on a machine, and the links that it uses."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

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
        machine: The machine whose links they use.
        free: Axes whose collectives take no time.
    """
    directions = (1, 2)
    if op.kind == "collective_permute":
        pairs = [pair for pair in groups.pairs if pair[0] in group]
        wire = size = float(sum(operand.bytes for operand in op.operands))
        transfers = [machine.transfer(op.kind, group, wire, size, pair=pair) for pair in pairs]
        latency, rate = max(e[0] for e in transfers), min(e[1] for e in transfers)
        link_rates = [(machine.link_of(group), rate)]
        source, target = pairs[0]
        directions = (1,) if (target - source) % len(group) <= len(group) // 2 else (2,)
    else:
        wire = sum(wire_bytes(op, operand.bytes, len(group), group[0]) for operand in op.operands)
        size = float(sum(max(a.bytes, b.bytes) for a, b in zip(op.operands, op.results, strict=True)))
        latency, rate = machine.transfer(op.kind, group, wire, size)
        link_rates = machine.level_rates(op.kind, group)
        if op.kind in machine.links[machine.link_of(group)].rates:
            link_rates = [(machine.link_of(group), rate)]
    places = tuple(
        (place, capacity)
        for link, capacity in link_rates
        for place in _places(machine, link, groups.axes, directions, group, members)
    )
    if free.issuperset(groups.axes):
        latency, wire = 0.0, 0.0
    return Instance(op, groups.axes, members, latency, wire, rate, places)


def _places(
    machine: Machine,
    index: int,
    axes: tuple[str, ...],
    directions: tuple[int, ...],
    group: tuple[int, ...],
    members: tuple[int, ...],
) -> Iterator[tuple[Hashable, ...]]:
    """The links that a transfer occupies: each member's own, or that of all devices of an inner group.

    On a torus every axis has its own wires, separate for the two directions.
    """
    link = machine.links[index]
    owners: Iterable[Hashable] = members
    if link.shared and index:
        inner = machine.links[index - 1].group
        owners = dict.fromkeys(("inner group", device // inner) for device in group)
    wires = [(axis, direction) for axis in axes or ("",) for direction in directions] if link.torus else [()]
    return ((owner, index, *wire) for owner in owners for wire in wires)
