"""Between a run's parameters as they are kept and the parts of them that a pipeline's devices use.

Kept are the arrays of ``ModelSizes.model().init``, on every mesh. Used are the same numbers with more dims: layers by
repeat and stage, heads apart. A block of a kept array is a block of the used one only where the dim that is split comes
first of those that were one dim before: that of the heads in ``qkv`` comes after q, k and v, and that of the stages
after the repeats. Such an axis splits another dim of what is kept, and one all-to-all over it turns one into the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import as_varying

PyTree = Any


@dataclass(frozen=True)
class Resharding:
    """From what a device keeps of one leaf to what it uses, and back.

    Attributes:
        spec: The ``PartitionSpec`` of the leaf as it is kept.
        block: The shape of a device's block of it.
        inside: The shape of the same block in the dims of what is used.
        moves: ``(axis, dim, carrier)`` in order: an axis that splits ``dim`` of what is used and the last, as it
            splits ``carrier``, of what is kept.
        copies: The axes over which it is kept whole.
    """

    spec: P
    block: tuple[int, ...]
    inside: tuple[int, ...]
    moves: tuple[tuple[str, int, int], ...]
    copies: tuple[str, ...]


def reshardings(kept: PyTree, used: PyTree, specs: PyTree, sizes: Mapping[str, int]) -> PyTree:
    """The resharding of each leaf.

    Args:
        kept: Shapes of the arrays as they are kept.
        used: Shapes of the same with dims divided; a tree of the same form.
        specs: The ``PartitionSpec`` of each of these.
        sizes: Of the mesh axes, which are all that specs may name.

    Raises:
        ValueError: A leaf cannot be kept in parts over an axis, as no dim is left that it divides.
    """

    def of_leaf(path, leaf, more, spec):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return resharding(name, leaf.shape, more.shape, spec, sizes)

    return jax.tree.map_with_path(of_leaf, kept, used, specs)


def resharding(
    name: str, kept: tuple[int, ...], used: tuple[int, ...], spec: P, sizes: Mapping[str, int]
) -> Resharding:
    """The resharding of the leaf of that name, with shapes ``kept`` and ``used``; the rest as for ``reshardings``."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    wanted = [[axis for axis in entry if axis is not None and sizes[axis] > 1] for entry in entries]
    wanted += [[] for _ in used[len(wanted) :]]
    groups = _groups(kept, used)
    first = [next((dim for dim in group if used[dim] > 1), group[0]) for group in groups]
    own = {dim: list(wanted[dim]) for dim in first}
    carried: dict[int, list[str]] = {dim: [] for dim in first}
    moves = []

    def left(dim: int) -> float:
        return used[dim] / prod(sizes[axis] for axis in own[dim] + carried[dim])

    for dim, axis in [(dim, axis) for dim, axes in enumerate(wanted) if dim not in first for axis in axes]:
        fine = [carrier for carrier in first if left(carrier) % sizes[axis] == 0]
        if not fine:
            raise ValueError(
                f"the parameter {name} {list(kept)} cannot be kept in parts over {axis}={sizes[axis]}: no dim is left "
                "that it divides"
            )
        carrier = max(fine, key=left)
        # What moves first is innermost: its parts are next to each other.
        carried[carrier].insert(0, axis)
        moves.append((axis, dim, carrier))
    dims = [own[dim] + carried[dim] for dim in first]
    inside = tuple(int(left(dim)) if dim in own else length for dim, length in enumerate(used))
    block = tuple(prod(inside[dim] for dim in group) for group in groups)
    copies = tuple(axis for axis in sizes if not any(axis in axes for axes in dims))
    while dims and not dims[-1]:
        dims.pop()
    names = (tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in dims)
    return Resharding(P(*names), block, inside, tuple(moves), copies)


def parts_of(kept: PyTree, moves: PyTree) -> PyTree:
    """The parts that this device uses of what it keeps, all of it varying over all axes. Runs inside ``shard_map``."""

    def part(leaf: jax.Array, move: Resharding) -> jax.Array:
        for axis in move.copies:
            leaf = as_varying(leaf, axis)
        leaf = leaf.reshape(move.inside)
        for axis, dim, carrier in move.moves:
            leaf = lax.all_to_all(leaf, axis, split_axis=dim, concat_axis=carrier, tiled=True)
        return leaf

    return jax.tree.map(part, kept, moves)


def kept_of(parts: PyTree, moves: PyTree) -> PyTree:
    """``parts_of`` backwards, for complete gradients in parts. Runs inside ``shard_map``.

    Copies come back with a mean over their axes: they are equal, and only a collective gives what is typed so.
    """

    def block(leaf: jax.Array, move: Resharding) -> jax.Array:
        for axis, dim, carrier in reversed(move.moves):
            leaf = lax.all_to_all(leaf, axis, split_axis=carrier, concat_axis=dim, tiled=True)
        leaf = leaf.reshape(move.block)
        return lax.pmean(leaf, move.copies) if move.copies else leaf

    return jax.tree.map(block, parts, moves)


def _groups(kept: tuple[int, ...], used: tuple[int, ...]) -> list[list[int]]:
    """Which dims of ``used`` were each dim of ``kept``."""
    groups, at = [], 0
    for length in kept:
        group: list[int] = []
        while not group or prod(used[dim] for dim in group) < length:
            group.append(at)
            at += 1
        groups.append(group)
    groups[-1] += range(at, len(used))
    return groups
