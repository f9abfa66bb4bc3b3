"""Right answers for ``shard_params`` in another style: how trees are walked and results are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P


def by_stacking(params, axis_name, min_size):
    """Two passes: first the specs, then the parts, each picked out of a stack of all parts."""
    size = lax.axis_size(axis_name)

    def spec_of(leaf):
        best = None
        for dim, length in enumerate(leaf.shape):
            if length % size == 0 and (best is None or length > leaf.shape[best]):
                best = dim
        if best is None or leaf.size < min_size:
            return P()
        return P(*(axis_name if dim == best else None for dim in range(best + 1)))

    def part(leaf, spec):
        if axis_name not in spec:
            return leaf
        return jnp.stack(jnp.split(leaf, size, axis=spec.index(axis_name)))[lax.axis_index(axis_name)]

    specs = jax.tree.map(spec_of, params)
    return jax.tree.map(part, params, specs), specs


def by_reshaping(params, axis_name, min_size):
    """Gives the split dim a dim of its own for devices, and indexes it."""
    size = lax.axis_size(axis_name)

    def best_dim(leaf):
        divisible = {dim: length for dim, length in enumerate(leaf.shape) if not length % size}
        return max(divisible, key=divisible.__getitem__) if divisible and leaf.size >= min_size else -1

    def part(leaf):
        dim = best_dim(leaf)
        if dim < 0:
            return leaf
        blocks = leaf.reshape(*leaf.shape[:dim], size, leaf.shape[dim] // size, *leaf.shape[dim + 1 :])
        return lax.dynamic_index_in_dim(blocks, lax.axis_index(axis_name), dim, keepdims=False)

    def spec(leaf):
        dim = best_dim(leaf)
        return P() if dim < 0 else P(*(None,) * dim, axis_name)

    return jax.tree.map(part, params), jax.tree.map(spec, params)


def _dim(shape, size, min_size):
    """The dim to split, or None: ``min`` gives the first of equals."""
    fits = [dim for dim in range(len(shape)) if shape[dim] % size == 0]
    return min(fits, key=lambda dim: -shape[dim]) if fits and math.prod(shape) >= min_size else None


def by_slicing_with_every_start(params, axis_name, min_size):
    """``lax.dynamic_slice`` with a start for each dim, and recursion over the dicts in place of a tree map."""
    size = lax.axis_size(axis_name)

    def walk(node):
        if isinstance(node, dict):
            both = {name: walk(child) for name, child in node.items()}
            return {name: part for name, (part, _) in both.items()}, {name: spec for name, (_, spec) in both.items()}
        dim = _dim(node.shape, size, min_size)
        if dim is None:
            return node, P()
        sizes = [length // size if d == dim else length for d, length in enumerate(node.shape)]
        starts = [lax.axis_index(axis_name) * sizes[d] if d == dim else 0 for d in range(node.ndim)]
        return lax.dynamic_slice(node, starts, sizes), P(*[None] * dim, axis_name)

    return walk(params)


class _Splitter:
    """Knows its axis; called with a leaf, gives its part and spec."""

    def __init__(self, axis_name: str, min_size: int):
        self.axis_name, self.min_size, self.size = axis_name, min_size, lax.axis_size(axis_name)

    def __call__(self, leaf: jax.Array) -> tuple[jax.Array, P]:
        dim = _dim(leaf.shape, self.size, self.min_size)
        if dim is None:
            return leaf, P()
        length = leaf.shape[dim] // self.size
        rows = lax.axis_index(self.axis_name) * length + jnp.arange(length)
        return jnp.take(leaf, rows, axis=dim), P(*[None] * dim, self.axis_name)


def by_taking_rows(params, axis_name, min_size):
    """A class with ``__call__``; ``jnp.take`` with the rows' numbers; ``jax.tree.transpose`` of a tree of pairs."""
    pairs = jax.tree.map(_Splitter(axis_name, min_size), params)
    return tuple(jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs))


def by_selection_matrix(params, axis_name, min_size):
    """A matrix ``[length, whole]`` that picks rows, applied with ``einsum``; map with path into two flat dicts."""
    size, parts, specs = lax.axis_size(axis_name), {}, {}
    for path, leaf in jax.tree.leaves_with_path(params):
        parts[path], specs[path] = leaf, P()
        dim = _dim(leaf.shape, size, min_size)
        if dim is not None:
            length = leaf.shape[dim] // size
            start = lax.axis_index(axis_name) * length
            picks = (jnp.arange(length)[:, None] + start == jnp.arange(leaf.shape[dim])).astype(leaf.dtype)
            letters = "abcdef"[: leaf.ndim]
            result = letters.replace(letters[dim], "z")
            parts[path] = jnp.einsum(f"z{letters[dim]},{letters}->{result}", picks, leaf)
            specs[path] = P(*[None] * dim, axis_name)
    return tuple(jax.tree.map_with_path(lambda path, _, found=found: found[path], params) for found in (parts, specs))


def by_one_flat_buffer(params, axis_name, min_size):
    """All large leaves side by side in one matrix with a row for each device; one row is cut out, and taken apart."""
    size = lax.axis_size(axis_name)
    leaves, tree = jax.tree.flatten(params)
    found = {i: _dim(leaf.shape, size, min_size) for i, leaf in enumerate(leaves)}
    dims = {i: dim for i, dim in found.items() if dim is not None}
    firsts = {i: jnp.moveaxis(leaves[i], dim, 0) for i, dim in dims.items()}
    matrix = jnp.concatenate([first.reshape(size, -1) for first in firsts.values()], axis=1)
    row, place = lax.dynamic_index_in_dim(matrix, lax.axis_index(axis_name), keepdims=False), 0
    for i, first in firsts.items():
        part = row[place : place + first.size // size].reshape(-1, *first.shape[1:])
        leaves[i], place = jnp.moveaxis(part, 0, dims[i]), place + part.size
    specs = [P(*[None] * dims[i], axis_name) if i in dims else P() for i in found]
    return tree.unflatten(leaves), tree.unflatten(specs)


class _Cut(NamedTuple):
    part: Any
    spec: P


def with_named_tuples(params, axis_name, min_size):
    """A named tuple a leaf, and ``match`` on the dims that are divisible."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def split(leaf: jax.Array) -> _Cut:
        match [dim for dim, length in enumerate(leaf.shape) if length % size == 0]:
            case [first, *others] if leaf.size >= min_size:
                dim = max([first, *others], key=leaf.shape.__getitem__)
                length = leaf.shape[dim] // size
                return _Cut(lax.dynamic_slice_in_dim(leaf, index * length, length, dim), P(*[None] * dim, axis_name))
        return _Cut(leaf, P())

    cuts = jax.tree.map(split, params)
    return tuple(jax.tree.map(itemgetter(i), cuts, is_leaf=lambda x: isinstance(x, _Cut)) for i in (0, 1))


class _Kept(nnx.Module):
    """The part that stays on this device, as a module's parameter, and how it was cut."""

    def __init__(self, leaf: jax.Array, axis_name: str, min_size: int):
        size = lax.axis_size(axis_name)
        self.dim = _dim(leaf.shape, size, min_size)
        self.spec = P() if self.dim is None else P(*[None] * self.dim, axis_name)
        if self.dim is None:
            self.part = nnx.Param(leaf)
        else:
            length = leaf.shape[self.dim] // size
            self.part = nnx.Param(lax.dynamic_slice_in_dim(leaf, lax.axis_index(axis_name) * length, length, self.dim))


def with_modules(params, axis_name, min_size):
    """An ``nnx`` module holds each part."""
    leaves, tree = jax.tree.flatten(params)
    kept = [_Kept(leaf, axis_name, min_size) for leaf in leaves]
    return tree.unflatten([module.part[...] for module in kept]), tree.unflatten([module.spec for module in kept])


@dataclass(frozen=True)
class _Whole:
    def cut(self, leaf: jax.Array, _: jax.Array) -> jax.Array:
        return leaf

    def spec(self, _: str) -> P:
        return P()


@dataclass(frozen=True)
class _AlongDim:
    dim: int
    length: int

    def cut(self, leaf: jax.Array, index: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(leaf, index * self.length, self.length, self.dim)

    def spec(self, axis_name: str) -> P:
        return P(*[None] * self.dim, axis_name)


def with_a_plan_of_dataclasses(params, axis_name, min_size):
    """First a tree of plans, which know nothing of arrays; then each plan is carried out."""
    size = lax.axis_size(axis_name)

    def plan(leaf: jax.Array) -> _Whole | _AlongDim:
        lengths = np.array([length if length % size == 0 else 0 for length in leaf.shape], np.int64)
        if leaf.size < min_size or not lengths.any():
            return _Whole()
        return _AlongDim(int(lengths.argmax()), int(lengths.max()) // size)

    plans = jax.tree.map(plan, params)
    parts = jax.tree.map(lambda leaf, how: how.cut(leaf, lax.axis_index(axis_name)), params, plans)
    return parts, jax.tree.map(lambda how: how.spec(axis_name), plans)


ALTERNATIVES = (
    by_stacking,
    by_reshaping,
    by_slicing_with_every_start,
    by_taking_rows,
    by_selection_matrix,
    by_one_flat_buffer,
    with_named_tuples,
    with_modules,
    with_a_plan_of_dataclasses,
)
