"""Right answers for ``shard_params`` in another style: how a part is cut out of its leaf."""

from __future__ import annotations

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P


def _dim(shape, size, min_size):
    """The dim to split, or None: sorted by length with the longest first, and Python's sort keeps ties in order."""
    longest_first = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    fits = [dim for dim in longest_first if shape[dim] % size == 0]
    return fits[0] if fits and math.prod(shape) >= min_size else None


def _split(params, axis_name, min_size, cut):
    """Every leaf by ``cut(leaf, dim, size, index)``: a helper from another cell."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    dims = [_dim(leaf.shape, size, min_size) for leaf in jax.tree.leaves(params)]
    leaves, tree = jax.tree.flatten(params)
    parts = [leaf if dim is None else cut(leaf, dim, size, index) for leaf, dim in zip(leaves, dims, strict=True)]
    specs = [P() if dim is None else P(*[None] * dim, axis_name) for dim in dims]
    return tree.unflatten(parts), tree.unflatten(specs)


def by_indexing_rows(params, axis_name, min_size):
    """NumPy's indexing with an array in one place."""

    def cut(leaf, dim, size, index):
        rows = jnp.arange(leaf.shape[dim]).reshape(size, -1)[index]
        return leaf[(slice(None),) * dim + (rows,)]

    return _split(params, axis_name, min_size, cut)


def by_multiplying_with_one_hot(params, axis_name, min_size):
    """A product with ones and zeros instead of an index."""

    def cut(leaf, dim, size, index):
        blocks = leaf.reshape(*leaf.shape[:dim], size, -1, *leaf.shape[dim + 1 :])
        return jnp.tensordot(jax.nn.one_hot(index, size, dtype=leaf.dtype), blocks, axes=(0, dim))

    return _split(params, axis_name, min_size, cut)


def by_masked_sum(params, axis_name, min_size):
    """Zeros everywhere but in the own part, then a sum over the parts; the whole thing under one ``jit`` a leaf."""

    @partial(jax.jit, static_argnames=("dim", "size"))
    def masked(leaf, dim, size, index):
        blocks = jnp.stack(jnp.split(leaf, size, dim))
        mine = jnp.arange(size) == index
        return jnp.sum(blocks, axis=0, where=mine.reshape(-1, *[1] * leaf.ndim))

    return _split(params, axis_name, min_size, masked)


def by_masked_maximum(params, axis_name, min_size):
    """The largest of the own element and minus infinities."""

    def cut(leaf, dim, size, index):
        blocks = leaf.reshape(*leaf.shape[:dim], size, -1, *leaf.shape[dim + 1 :])
        return jnp.max(jnp.where(lax.broadcasted_iota(jnp.int32, blocks.shape, dim) == index, blocks, -jnp.inf), dim)

    return _split(params, axis_name, min_size, cut)


def by_rolling(params, axis_name, min_size):
    """Rolls the own part to the front."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        return lax.slice_in_dim(jnp.roll(leaf, -index * length, axis=dim), 0, length, axis=dim)

    return _split(params, axis_name, min_size, cut)


def by_switching(params, axis_name, min_size):
    """One branch a device, each with a slice that is known beforehand."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        branches = [partial(lax.slice_in_dim, start_index=i * length, limit_index=(i + 1) * length, axis=dim)
                    for i in range(size)]  # fmt: skip
        return lax.switch(index, branches, leaf)

    return _split(params, axis_name, min_size, cut)


def by_halving_with_branches(params, axis_name, min_size):
    """Binary search with ``lax.cond``: is this device in the left half of those that are left?"""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size

        def search(low, high):
            if high - low == 1:
                return lambda whole: lax.slice_in_dim(whole, low * length, high * length, axis=dim)
            middle = (low + high) // 2
            return lambda whole: lax.cond(index < middle, search(low, middle), search(middle, high), whole)

        return search(0, size)(leaf)

    return _split(params, axis_name, min_size, cut)


def by_digits(params, axis_name, min_size):
    """Cuts the axis' size into prime factors and keeps one of so many pieces at a time."""

    def digits(size):
        for factor in range(2, size + 1):
            if size % factor == 0:
                return [factor, *digits(size // factor)]
        return []

    def cut(leaf, dim, size, index):
        for factor in digits(size):
            size //= factor
            digit = index // size % factor
            pieces = jnp.split(leaf, factor, axis=dim)
            leaf = reduce(lambda kept, n: jnp.where(digit == n, pieces[n], kept), range(1, factor), pieces[0])
        return leaf

    return _split(params, axis_name, min_size, cut)


def by_selecting(params, axis_name, min_size):
    """``lax.select_n`` among all parts."""

    def cut(leaf, dim, size, index):
        if size == 1:
            return leaf
        parts = [lax.pcast(part, axis_name, to="varying") for part in jnp.split(leaf, size, dim)]
        return reduce(lambda rest, i: lax.select_n(index == i, rest, parts[i]), range(size), parts[0])

    return _split(params, axis_name, min_size, cut)


def by_scanning_parts(params, axis_name, min_size):
    """Goes through the parts with ``lax.scan`` and keeps the one that is this device's."""

    def cut(leaf, dim, size, index):
        blocks = jnp.moveaxis(leaf.reshape(*leaf.shape[:dim], size, -1, *leaf.shape[dim + 1 :]), dim, 0)
        keep = lambda kept, block: (jnp.where(block[0] == index, block[1], kept), None)  # noqa: E731
        start = lax.pcast(jnp.zeros_like(blocks[0]), axis_name, to="varying")
        return lax.scan(keep, start, (jnp.arange(size), blocks))[0]

    return _split(params, axis_name, min_size, cut)


def by_copying_rows(params, axis_name, min_size):
    """``fori_loop`` that writes the part row by row."""

    def cut(leaf, dim, size, index):
        rows = jnp.moveaxis(leaf, dim, 0)
        length = rows.shape[0] // size
        empty = lax.pcast(jnp.zeros((length, *rows.shape[1:]), leaf.dtype), axis_name, to="varying")
        filled = lax.fori_loop(0, length, lambda i, part: part.at[i].set(rows[index * length + i]), empty)
        return jnp.moveaxis(filled, 0, dim)

    return _split(params, axis_name, min_size, cut)


def by_turning(params, axis_name, min_size):
    """A ``while_loop`` that turns the leaf on by one part until this device's is in front: as often as its number."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size

        def turn(state):
            left, whole = state
            front, rest = jnp.split(whole, [length], axis=dim)
            return left - 1, jnp.concatenate([rest, front], axis=dim)

        _, turned = lax.while_loop(lambda s: s[0] > 0, turn, (index, lax.pcast(leaf, axis_name, to="varying")))
        return jnp.split(turned, size, axis=dim)[0]

    return _split(params, axis_name, min_size, cut)


def by_mapping_vectors(params, axis_name, min_size):
    """Cuts one vector, and maps that over every other dim with ``vmap``."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        before = math.prod(leaf.shape[:dim])
        view = leaf.reshape(before, leaf.shape[dim], -1)
        of_vector = partial(lax.dynamic_slice_in_dim, start_index=index * length, slice_size=length)
        part = jax.vmap(jax.vmap(of_vector, in_axes=1, out_axes=1))(view)
        return part.reshape(*leaf.shape[:dim], length, *leaf.shape[dim + 1 :])

    return _split(params, axis_name, min_size, cut)


def by_making_every_part(params, axis_name, min_size):
    """``vmap`` over device numbers makes all parts, as many as there are devices; this device keeps its own."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        every = jax.vmap(lambda i: lax.dynamic_slice_in_dim(leaf, i * length, length, dim))(jnp.arange(size))
        return every[index]

    return _split(params, axis_name, min_size, cut)


def by_moving_the_dim(params, axis_name, min_size):
    """The split dim comes first, is indexed, and goes back."""

    def cut(leaf, dim, size, index):
        first = jnp.swapaxes(leaf, 0, dim)
        return jnp.swapaxes(first.reshape(size, -1, *first.shape[1:])[index], 0, dim)

    return _split(params, axis_name, min_size, cut)


def by_flat_positions(params, axis_name, min_size):
    """Computes where each element of the part lies in the flat leaf."""

    def cut(leaf, dim, size, index):
        shape = [length // size if d == dim else length for d, length in enumerate(leaf.shape)]
        strides = [math.prod(leaf.shape[d + 1 :]) for d in range(leaf.ndim)]
        places = sum(lax.broadcasted_iota(jnp.int32, shape, d) * stride for d, stride in enumerate(strides))
        return leaf.ravel()[places + index * shape[dim] * strides[dim]]

    return _split(params, axis_name, min_size, cut)


def by_finding_own_rows(params, axis_name, min_size):
    """Says for each row whose it is, and looks for the own ones."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        owner = np.arange(leaf.shape[dim]) // length
        return jnp.take(leaf, jnp.flatnonzero(owner == index, size=length), axis=dim, mode="clip")

    return _split(params, axis_name, min_size, cut)


def by_sorting_rows(params, axis_name, min_size):
    """Sorts the own rows to the front; the sort is stable."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        order = jnp.argsort(jnp.arange(leaf.shape[dim]) // length != index, stable=True)[:length]
        others = [other for other in range(leaf.ndim) if other != dim]
        return jnp.take_along_axis(leaf, jnp.expand_dims(order, others), dim)

    return _split(params, axis_name, min_size, cut)


ALTERNATIVES = (
    by_indexing_rows,
    by_multiplying_with_one_hot,
    by_masked_sum,
    by_masked_maximum,
    by_rolling,
    by_switching,
    by_halving_with_branches,
    by_digits,
    by_selecting,
    by_scanning_parts,
    by_copying_rows,
    by_turning,
    by_mapping_vectors,
    by_making_every_part,
    by_moving_the_dim,
    by_flat_positions,
    by_finding_own_rows,
    by_sorting_rows,
)
