"""Holdings: the blocks that a spec divides an array into, and the devices that hold each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec


@dataclass(frozen=True)
class Layout:
    """An array of some shape, divided over a mesh.

    Attributes:
        shape: Shape of the whole array.
        axes: Size of each mesh axis by name, in order.
        devices: Device ids as in the mesh: an array with one dim per axis.
        counts: Number of blocks in each dim.
        holders: Ids of the devices that hold a block, in mesh order, by the block's index along each dim.
    """

    shape: tuple[int, ...]
    axes: Mapping[str, int]
    devices: np.ndarray
    counts: tuple[int, ...]
    holders: Mapping[tuple[int, ...], tuple[int, ...]]

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of one device's block."""
        return tuple(size // count for size, count in zip(self.shape, self.counts, strict=True))

    @property
    def copies(self) -> int:
        """Number of devices that hold the same block."""
        return self.devices.size // math.prod(self.counts)

    def ranges(self, index: tuple[int, ...]) -> tuple[str, ...]:
        """Index range of a block in each dim, as ``0:4``; ``:`` if the dim is not divided."""
        sizes = zip(index, self.block, self.counts, strict=True)
        return tuple(":" if count == 1 else f"{i * size}:{(i + 1) * size}" for i, size, count in sizes)


def layout(shape: Sequence[int], spec: Any, mesh: Any) -> Layout:
    """Work out which device holds which block of an array.

    Args:
        shape: Shape of the whole array.
        spec: A ``PartitionSpec``, or a tuple like one: for each dim ``None``, an axis, or a tuple of axes.
        mesh: A ``Mesh``, an ``AbstractMesh``, or axis sizes by name; without its own devices, ids count from 0.

    Raises:
        ValueError: The spec does not fit the shape or the mesh; the message says where.
    """
    shape, axes = tuple(int(size) for size in shape), _axes(mesh)
    entries = _entries(shape, spec, axes)
    counts = tuple(math.prod(axes[name] for name in entry) for entry in entries)
    for dim, (size, count) in enumerate(zip(shape, counts, strict=True)):
        if size % count:
            over = " times ".join(f"{name} {axes[name]}" for name in entries[dim])
            raise ValueError(
                f"dim {dim} of shape {list(shape)} has {size} elements, and {over} cannot divide it into {count} equal "
                f"blocks: make it a multiple of {count}, or divide another dim"
            )
    devices = mesh.device_ids if isinstance(mesh, Mesh) else np.arange(math.prod(axes.values()))
    devices = np.reshape(devices, tuple(axes.values()))
    holders: dict[tuple[int, ...], list[int]] = {index: [] for index in product(*map(range, counts))}
    for place in np.ndindex(devices.shape):
        at = dict(zip(axes, place, strict=True))
        holders[tuple(_position(entry, at, axes) for entry in entries)].append(int(devices[place]))
    return Layout(shape, axes, devices, counts, {index: tuple(ids) for index, ids in holders.items()})


def _axes(mesh: Any) -> dict[str, int]:
    axes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(axes, Mapping) or not axes:
        raise ValueError(
            f"a mesh is needed, and a value of type {type(mesh).__name__} was given: pass one from "
            'course.mesh.make_mesh, or the sizes of its axes as in {"data": 4}'
        )
    return {str(name): int(size) for name, size in axes.items()}


def _entries(shape: tuple[int, ...], spec: Any, axes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """For each dim, the axes that divide it."""
    if not isinstance(spec, (PartitionSpec, tuple, list)):
        raise ValueError(f"a spec is needed, and {spec!r} was given: write P({spec!r}) with a PartitionSpec as P")
    if len(spec) > len(shape):
        raise ValueError(
            f"the spec has {len(spec)} entries and shape {list(shape)} has {len(shape)} dims: give at most one per dim"
        )
    entries = [_entry(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    used: dict[str, int] = {}
    for dim, entry in enumerate(entries):
        for name in entry:
            if name not in axes:
                raise ValueError(
                    f"the spec names the axis {name!r}, and the mesh has {', '.join(axes)}: use one of these"
                )
            if name in used:
                where = f"dim {dim}" if used[name] == dim else f"dims {used[name]} and {dim}"
                raise ValueError(
                    f"the spec uses the axis {name!r} twice, for {where}: an axis divides at most one dim, once"
                )
            used[name] = dim
    return entries


def _entry(entry: Any) -> tuple[str, ...]:
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"an entry of a spec is None, an axis or a tuple of axes, not {entry!r}: write one of these")
    return tuple(names)


def _position(entry: tuple[str, ...], at: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """Index of a device's block along a dim: the first axis varies slowest."""
    position = 0
    for name in entry:
        position = position * axes[name] + at[name]
    return position
