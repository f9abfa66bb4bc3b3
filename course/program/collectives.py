"""Participants of a collective: its mesh axes and its groups of devices, from the attributes given to the compiler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from course.program.evaluate import follow
from course.program.ir import COLLECTIVES, Block, Module, Op, blocks_of, plain_kind, unsupported, walk
from course.program.program import ProgramError

MAX_COLLECTIVES = 1_000_000


@dataclass(frozen=True)
class Groups:
    """The groups of devices of a collective.

    Attributes:
        axes: Mesh axes that it runs over; axes of size 1 are never among them.
        groups: Device numbers of each group, without groups of one. For a permute, the devices connected by pairs.
        pairs: Source and target of each transfer of a permute.
    """

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...] = ()

    def of(self, device: int) -> tuple[int, ...]:
        """The group of a device, empty if it does not take part."""
        return next((group for group in self.groups if device in group), ())


@dataclass(frozen=True)
class DeviceClass:
    """Devices that do the same at the same time.

    Attributes:
        device: The representative of the class.
        members: All devices of the class.
        decisions: Their decisions, as returned by ``evaluate.follow``.
    """

    device: int
    members: tuple[int, ...]
    decisions: tuple[int, ...]


def groups_of(op: Op, mesh: dict[str, int]) -> Groups:
    """The groups of a collective.

    Groups that are not whole axes, as with ``axis_index_groups``, run over the axes along which their devices differ.
    """
    places = np.arange(math.prod(mesh.values())).reshape(list(mesh.values()))
    if op.kind == "collective_permute":
        return _permute_groups(op, mesh, places)
    if "replica_axes" in op.attributes:
        axes = tuple(axis for axis in mesh if axis in op.attributes["replica_axes"] and mesh[axis] > 1)
        return Groups(axes, _rows(axes, mesh, places)) if axes else Groups((), ())
    device_sets = {frozenset(int(d) for d in group if d >= 0) for group in op.attributes["replica_groups"]}
    if all(len(group) == 1 for group in device_sets):
        return Groups((), ())
    names = [axis for axis, size in mesh.items() if size > 1]
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            rows = _rows(axes, mesh, places)
            if {frozenset(row) for row in rows} == device_sets:
                return Groups(axes, rows)
    rows = tuple(tuple(sorted(group)) for group in sorted(device_sets, key=sorted) if len(group) > 1)
    shape = tuple(mesh.values())
    along = {i for row in rows for i, place in enumerate(np.unravel_index(row, shape)) if len(set(place)) > 1}
    return Groups(tuple(axis for i, axis in enumerate(mesh) if i in along), rows)


def check_axes(op: Op, mesh: dict[str, int]) -> None:
    """Raise ``ProgramError`` if the groups of a collective are not axes of the mesh."""
    groups = groups_of(op, mesh)
    size, devices = (math.prod(mesh[axis] for axis in axes) for axes in (groups.axes, mesh))
    whole = not groups.groups or sum(map(len, groups.groups)) == devices
    if op.kind != "collective_permute" and not (whole and all(len(group) == size for group in groups.groups)):
        raise unsupported(op, op.line, f"its groups {sorted(map(sorted, groups.groups))} are not axes of mesh {mesh}")


def _rows(axes: tuple[str, ...], mesh: dict[str, int], places: np.ndarray) -> tuple[tuple[int, ...], ...]:
    rest = [i for i, axis in enumerate(mesh) if axis not in axes]
    along = np.transpose(places, rest + [i for i, axis in enumerate(mesh) if axis in axes])
    return tuple(tuple(map(int, row)) for row in along.reshape(-1, math.prod(mesh[axis] for axis in axes)))


def _permute_groups(op: Op, mesh: dict[str, int], places: np.ndarray) -> Groups:
    pairs = tuple((int(s), int(t)) for s, t in op.attributes["source_target_pairs"] if s != t)
    coordinates = {int(d): np.argwhere(places == d)[0] for pair in pairs for d in pair}
    moved = {int(i) for s, t in pairs for i in np.flatnonzero(coordinates[s] != coordinates[t])}
    joined = {device: {device} for device in coordinates}
    for s, t in pairs:
        if joined[s] is not joined[t]:
            merged = joined[s] | joined[t]
            for device in merged:
                joined[device] = merged
    groups = {tuple(sorted(group)) for group in joined.values()}
    return Groups(tuple(axis for i, axis in enumerate(mesh) if i in moved), tuple(sorted(groups)), pairs)


def device_classes(
    module: Module, label: Callable[[Op, Groups, tuple[int, ...]], Hashable] = lambda *_: None
) -> list[DeviceClass]:
    """Partition the devices into classes whose members behave exactly alike.

    Two devices are alike if they make the same decisions and every collective groups each with devices of the
    same classes. The classes start from the decisions and are split until that holds.

    Args:
        module: The parsed Program.
        label: Label of a collective's group; groups with different labels are not alike, for example because one of
            them uses a slower link.

    Raises:
        ProgramError: A trip count or a branch depends on data.
    """
    count = math.prod(module.mesh.values())
    decisions = [follow(module, device).decisions for device in range(count)]
    structures = {}
    for op in walk(module.main):
        if op.kind in COLLECTIVES:
            groups = groups_of(op, module.mesh)
            structures[groups, tuple(label(op, groups, group) for group in groups.groups)] = None
    colours = _dense(decisions)
    while True:
        marks: list[list[Any]] = [[colour] for colour in colours]
        for groups, labels in structures:
            sources = {s for s, _ in groups.pairs}
            for group, name in zip(groups.groups, labels, strict=True):
                together = tuple(sorted(colours[device] for device in group))
                for device in group:
                    marks[device].append((groups.axes, together, name, device in sources))
        finer = _dense([repr(mark) for mark in marks])
        if len(set(finer)) == len(set(colours)):
            break
        colours = finer
    members = [[d for d in range(count) if colours[d] == colour] for colour in range(max(colours) + 1)]
    return [DeviceClass(devices[0], tuple(devices), decisions[devices[0]]) for devices in members]


def _dense(keys: list[Any]) -> list[int]:
    """Consecutive integers for keys, in order of first appearance."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def check_everyone_comes(module: Module, classes: list[DeviceClass]) -> None:
    """Simulate the devices' collectives in order; each waits for all devices of its group.

    Raises:
        ProgramError: Some devices wait for each other forever.
    """
    place = {device: number for number, device_class in enumerate(classes) for device in device_class.members}
    orders = [_meetings(module, device_class, place) for device_class in classes]
    reached = [0] * len(classes)

    def next_of(index: int) -> _Meeting | None:
        return orders[index][reached[index]] if reached[index] < len(orders[index]) else None

    moved = deque(range(len(classes)))
    while moved:
        meeting = next_of(moved.popleft())
        if meeting and all(next_of(index) == meeting for index in meeting.classes):
            for index in meeting.classes:
                reached[index] += 1
            moved.extend(meeting.classes)
    for index in range(len(classes)):
        if meeting := next_of(index):
            other = next(other for other in sorted(meeting.classes) if next_of(other) != meeting)
            raise _deadlock(classes[index].device, meeting, classes[other].device, next_of(other))


@dataclass(frozen=True, slots=True)
class _Meeting:
    """A collective that a device reaches, in a branch or not, and the classes of the devices in its group."""

    kind: str
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    line: str
    in_branch: bool = field(compare=False)
    classes: frozenset[int]


def _meetings(module: Module, device_class: DeviceClass, place: dict[int, int]) -> list[_Meeting]:
    """The collectives that a device of the class takes part in, in execution order."""
    blocks = blocks_of(module.main)
    steps = {block: [op for op in block.ops if op.kind in COLLECTIVES | {"while", "case"}] for block in blocks}
    decisions = iter(device_class.decisions)
    known: dict[Op, _Meeting | None] = {}

    def run(block: Block, in_branch: bool = False) -> Iterator[tuple[Op, bool]]:
        for op in steps[block]:
            if op.kind == "case":
                yield from run(op.regions[next(decisions)], True)
            elif op.kind == "while":
                yield from run(op.regions[0], in_branch)
                while next(decisions):
                    yield from run(op.regions[1], in_branch)
                    yield from run(op.regions[0], in_branch)
            else:
                yield op, in_branch

    meetings: list[_Meeting] = []
    for op, in_branch in run(module.main):
        if op not in known:
            groups = groups_of(op, module.mesh)
            group, shapes = groups.of(device_class.device), tuple(operand.shape for operand in op.operands)
            meets = frozenset(place[device] for device in group)
            known[op] = _Meeting(op.kind, groups.axes, shapes, op.line, in_branch, meets) if group else None
        if meeting := known[op]:
            meetings.append(meeting)
        if len(meetings) > MAX_COLLECTIVES:
            raise ProgramError(f"a step runs more than {MAX_COLLECTIVES:,} collectives, too many to follow", op.line)
    return meetings


def _deadlock(device: int, ours: _Meeting, other: int, theirs: _Meeting | None) -> ProgramError:
    def description(meeting: _Meeting | None) -> str:
        kind = plain_kind(meeting.kind) if meeting else ""
        return f"runs {kind} ({meeting.line or 'unknown line'})" if meeting else "runs no further collective"

    to_blame = theirs if theirs and theirs.in_branch and not ours.in_branch else ours
    return ProgramError(
        f"devices would wait for each other forever: where device {device} "
        f"{description(ours)}, device {other} {description(theirs)}. A collective inside a branch must be "
        "reached by every device of its group: call it on all of them, and choose afterwards with jnp.where what is "
        "used.",
        to_blame.line,
    )
