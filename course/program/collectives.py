"""Who takes part in a collective: its mesh axes and its groups of devices, from what the compiler was told."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from course.program.evaluate import follow
from course.program.ir import COLLECTIVES, Module, Op, unsupported, walk


@dataclass(frozen=True)
class Groups:
    """The devices that a collective brings together.

    Attributes:
        axes: Mesh axes that it runs over; axes of size 1 are never among them.
        groups: Device numbers of each group, groups of one left out. For a permute those that pairs connect.
        pairs: Source and target of each transfer of a permute.
    """

    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[int, int], ...] = ()

    def of(self, device: int) -> tuple[int, ...]:
        """The group of a device, empty if it takes no part."""
        return next((group for group in self.groups if device in group), ())


@dataclass(frozen=True)
class DeviceClass:
    """Devices that do the same at the same time.

    Attributes:
        device: The one that stands for all of them.
        members: All of them.
        decisions: What they decide, as ``evaluate.follow`` gives it.
    """

    device: int
    members: tuple[int, ...]
    decisions: tuple[int, ...]


def groups_of(op: Op, mesh: dict[str, int]) -> Groups:
    """The groups of a collective.

    Raises:
        ProgramError: They are no axes of the mesh.
    """
    places = np.arange(math.prod(mesh.values())).reshape(list(mesh.values()))
    if op.kind == "collective_permute":
        return _permute_groups(op, mesh, places)
    if "replica_axes" in op.attributes:
        axes = tuple(axis for axis in mesh if axis in op.attributes["replica_axes"] and mesh[axis] > 1)
        return Groups(axes, _rows(axes, mesh, places)) if axes else Groups((), ())
    wanted = {frozenset(int(d) for d in group if d >= 0) for group in op.attributes["replica_groups"]}
    if all(len(group) == 1 for group in wanted):
        return Groups((), ())
    names = [axis for axis, size in mesh.items() if size > 1]
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            rows = _rows(axes, mesh, places)
            if {frozenset(row) for row in rows} == wanted:
                return Groups(axes, rows)
    raise unsupported(op, op.line, f"its groups {sorted(map(sorted, wanted))} are no axes of mesh {mesh}")


def _rows(axes: tuple[str, ...], mesh: dict[str, int], places: np.ndarray) -> tuple[tuple[int, ...], ...]:
    rest = [i for i, axis in enumerate(mesh) if axis not in axes]
    along = np.transpose(places, rest + [i for i, axis in enumerate(mesh) if axis in axes])
    return tuple(tuple(map(int, row)) for row in along.reshape(-1, math.prod(mesh[axis] for axis in axes)))


def _permute_groups(op: Op, mesh: dict[str, int], places: np.ndarray) -> Groups:
    pairs = tuple((int(s), int(t)) for s, t in op.attributes["source_target_pairs"] if s != t)
    where = {int(d): np.argwhere(places == d)[0] for pair in pairs for d in pair}
    moved = {int(i) for s, t in pairs for i in np.flatnonzero(where[s] != where[t])}
    joined = {device: {device} for device in where}
    for s, t in pairs:
        if joined[s] is not joined[t]:
            both = joined[s] | joined[t]
            for device in both:
                joined[device] = both
    groups = {tuple(sorted(group)) for group in joined.values()}
    return Groups(tuple(axis for i, axis in enumerate(mesh) if i in moved), tuple(sorted(groups)), pairs)


def device_classes(
    module: Module, label: Callable[[Op, Groups, tuple[int, ...]], Hashable] = lambda *_: None
) -> list[DeviceClass]:
    """Devices sorted into classes whose members behave alike, exactly.

    Two devices are alike if they decide the same and every collective brings each together with devices of the
    same classes. The classes start from the decisions and are split until that holds.

    Args:
        module: The parsed Program.
        label: Of a collective's group; groups with different labels are not alike, for example because one of them
            talks over a slower link.

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
    return [DeviceClass(found[0], tuple(found), decisions[found[0]]) for found in members]


def _dense(keys: list[Any]) -> list[int]:
    """Small numbers for keys, in order of appearance."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
