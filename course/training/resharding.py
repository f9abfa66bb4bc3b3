"""Move a run's parameters between their stored layout and the parts that a pipeline's devices use.

The stored arrays are those of ``ModelSizes.model().init``, on every mesh. The used ones have more dims: layers by
repeat and stage, separate heads. A block of a stored array is a block of the used one only if the split dim comes
first among those merged into one dim: the heads dim in ``qkv`` comes after q, k and v, and that of the stages
after the repeats. Such an axis splits another dim of the stored array, and one all-to-all over it converts them.
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
    """Conversion of one leaf from a device's stored block to its used block, and back.

    Attributes:
        spec: The ``PartitionSpec`` of the stored leaf.
        block: The shape of a device's stored block.
        inside: The shape of the same block in the dims of the used array.
        moves: ``(axis, dim, carrier)`` in order: an axis that splits ``dim`` of the used array, and ``carrier`` of the
            stored one, innermost among the axes that have not moved yet.
        copies: The axes over which it is replicated.
    """

    spec: P
    block: tuple[int, ...]
    inside: tuple[int, ...]
    moves: tuple[tuple[str, int, int], ...]
    copies: tuple[str, ...]


def reshardings(kept: PyTree, used: PyTree, specs: PyTree, sizes: Mapping[str, int]) -> PyTree:
    """The resharding of each leaf.

    Args:
        kept: Shapes of the stored arrays.
        used: Shapes of the used arrays, with dims divided; a tree of the same structure.
        specs: The ``PartitionSpec`` of each used array.
        sizes: Sizes of the mesh axes; specs may name no others.

    Raises:
        ValueError: A leaf cannot be stored in parts over an axis, because the axis divides none of the remaining dims.
    """

    def of_leaf(path, leaf, used_leaf, spec):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return resharding(name, leaf.shape, used_leaf.shape, spec, sizes)

    return jax.tree.map_with_path(of_leaf, kept, used, specs)


def resharding(
    name: str, kept: tuple[int, ...], used: tuple[int, ...], spec: P, sizes: Mapping[str, int]
) -> Resharding:
    """The resharding of the leaf with that name, with shapes ``kept`` and ``used``; the rest as for ``reshardings``."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    axes_by_dim = [[axis for axis in entry if axis is not None and sizes[axis] > 1] for entry in entries]
    axes_by_dim += [[] for _ in used[len(axes_by_dim) :]]
    groups = _groups(kept, used)
    first = [next((dim for dim in group if used[dim] > 1), group[0]) for group in groups]
    own = {dim: list(axes_by_dim[dim]) for dim in first}
    carried: dict[int, list[str]] = {dim: [] for dim in first}
    moves = []

    def left(dim: int) -> float:
        return used[dim] / prod(sizes[axis] for axis in own[dim] + carried[dim])

    for dim, axis in [(dim, axis) for dim, axes in enumerate(axes_by_dim) if dim not in first for axis in axes]:
        carriers = [carrier for carrier in first if left(carrier) % sizes[axis] == 0]
        if not carriers:
            raise ValueError(
                f"the parameter {name} {list(kept)} cannot be kept in parts over {axis}={sizes[axis]}: no dim is left "
                "that it divides"
            )
        carrier = max(carriers, key=left)
        # The first move is innermost: its parts are next to each other.
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
    """The parts that this device uses, from its stored blocks; all vary over all axes. Runs inside ``shard_map``."""

    def part(leaf: jax.Array, move: Resharding) -> jax.Array:
        for axis in move.copies:
            leaf = as_varying(leaf, axis)
        leaf = leaf.reshape(move.inside)
        for axis, dim, carrier in move.moves:
            leaf = lax.all_to_all(leaf, axis, split_axis=dim, concat_axis=carrier, tiled=True)
        return leaf

    return jax.tree.map(part, kept, moves)


def kept_of(parts: PyTree, moves: PyTree) -> PyTree:
    """The inverse of ``parts_of``, for complete gradients in parts. Runs inside ``shard_map``.

    Copies are restored with a mean over their axes: they are equal, and only a collective gives a result of that type.
    """

    def block(leaf: jax.Array, move: Resharding) -> jax.Array:
        for axis, dim, carrier in reversed(move.moves):
            leaf = lax.all_to_all(leaf, axis, split_axis=carrier, concat_axis=dim, tiled=True)
        leaf = leaf.reshape(move.block)
        return lax.pmean(leaf, move.copies) if move.copies else leaf

    return jax.tree.map(block, parts, moves)


def _groups(kept: tuple[int, ...], used: tuple[int, ...]) -> list[list[int]]:
    """The dims of ``used`` that make up each dim of ``kept``."""
    groups, at = [], 0
    for length in kept:
        group: list[int] = []
        while not group or prod(used[dim] for dim in group) < length:
            group.append(at)
            at += 1
        groups.append(group)
    groups[-1] += range(at, len(used))
    return groups
