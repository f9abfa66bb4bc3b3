"""Right answers for ``gather_params`` in another style: how parts travel and how they are joined."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(shard, axis_name, dim):
    blocks = lax.all_gather(shard, axis_name)
    return jnp.concatenate([blocks[i] for i in range(blocks.shape[0])], axis=dim)


def _whole_backward(axis_name, dim, _, gradient):
    size = lax.axis_size(axis_name)
    blocks = jnp.stack(jnp.split(gradient, size, axis=dim))
    return (lax.psum_scatter(blocks / size, axis_name, scatter_dimension=0, tiled=False),)


_whole.defvjp(lambda shard, axis_name, dim: (_whole(shard, axis_name, dim), None), _whole_backward)


def by_concatenating(shards, specs, axis_name):
    """Untiled collectives, put together and taken apart by hand; one derivative for all leaves."""
    leaves, tree = jax.tree.flatten(shards)
    whole = []
    for leaf, spec in zip(leaves, tree.flatten_up_to(specs), strict=True):
        named = [dim for dim, axis in enumerate(spec) if axis == axis_name]
        whole.append(_whole(leaf, axis_name, named[0]) if named else leaf)
    return tree.unflatten(whole)


def _each(shards, specs, axis_name, gather):
    """Every leaf that is split by ``gather(shard, dim)``: a helper from another cell."""
    leaves, tree = jax.tree.flatten(shards)
    for i, spec in enumerate(tree.flatten_up_to(specs)):
        leaves[i] = gather(leaves[i], spec.index(axis_name)) if axis_name in spec else leaves[i]
    return tree.unflatten(leaves)


def by_gathering_rows(shards, specs, axis_name):
    """The split dim goes first, so that parts lie one behind the other; then it goes back."""
    share = 1 / lax.axis_size(axis_name)

    def gather(shard, dim):
        first = jnp.swapaxes(shard, 0, dim)
        mixed = share * first + (1 - share) * lax.stop_gradient(first)
        return jnp.swapaxes(lax.all_gather(mixed, axis_name, tiled=True), 0, dim)

    return _each(shards, specs, axis_name, gather)


def by_mapping_rows(shards, specs, axis_name):
    """``vmap`` over every dim but the split one: the collective is of a vector."""

    def gather(shard, dim):
        before = math.prod(shard.shape[:dim])
        view = shard.reshape(before, shard.shape[dim], -1)
        vector = partial(lax.all_gather, axis_name=axis_name, tiled=True)

        @jax.custom_vjp
        def whole(x):
            return jax.vmap(jax.vmap(vector, in_axes=1, out_axes=1))(x)

        def backward(_, gradient):
            scatter = partial(lax.psum_scatter, axis_name=axis_name, tiled=True)
            return (jax.vmap(jax.vmap(scatter, in_axes=1, out_axes=1))(gradient) / lax.axis_size(axis_name),)

        whole.defvjp(lambda x: (whole(x), None), backward)
        return whole(view).reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])

    return _each(shards, specs, axis_name, gather)


def by_flat_parameters(shards, specs, axis_name):
    """All parts in one flat buffer, one all-gather for the whole tree, one reduce-scatter on the way back."""
    size = lax.axis_size(axis_name)
    leaves, tree = jax.tree.flatten(shards)
    dims = [spec.index(axis_name) if axis_name in spec else None for spec in tree.flatten_up_to(specs)]
    split = [i for i, dim in enumerate(dims) if dim is not None]

    @jax.custom_vjp
    def gather(flat):
        return lax.all_gather(flat, axis_name)

    gather.defvjp(
        lambda flat: (gather(flat), None),
        lambda _, gradient: (lax.psum_scatter(gradient, axis_name) / size,),
    )
    rows, place = gather(jnp.concatenate([leaves[i].ravel() for i in split])), 0
    for i in split:
        shape, dim = leaves[i].shape, dims[i]
        blocks = rows[:, place : place + leaves[i].size].reshape(size, *shape)
        leaves[i], place = jnp.concatenate(list(blocks), axis=dim), place + math.prod(shape)
    return tree.unflatten(leaves)


def by_buckets(shards, specs, axis_name):
    """Leaves that are split along the same dim share one all-gather of matrices."""
    size = lax.axis_size(axis_name)
    leaves, tree = jax.tree.flatten(shards)
    buckets = defaultdict(list)
    for i, spec in enumerate(tree.flatten_up_to(specs)):
        if axis_name in spec:
            buckets[spec.index(axis_name)].append(i)
    for dim, members in buckets.items():
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in members]) / size
        carried = flat + lax.stop_gradient((size - 1) * flat)
        every = lax.all_gather(carried, axis_name, axis=1)
        ends = [sum(leaves[j].size for j in members[: n + 1]) for n in range(len(members))]
        for i, block in zip(members, jnp.split(every, ends[:-1]), strict=True):
            parts = jnp.moveaxis(block.reshape(*leaves[i].shape, size), -1, dim)
            leaves[i] = lax.collapse(parts, dim, dim + 2)
    return tree.unflatten(leaves)


def by_two_halves(shards, specs, axis_name):
    """Leaves of two dims or more travel in two pieces, cut along another dim."""
    size = lax.axis_size(axis_name)

    def send(x, dim):
        return lax.all_gather(x / size + lax.stop_gradient(x - x / size), axis_name, axis=dim, tiled=True)

    def gather(shard, dim):
        others = [d for d in range(shard.ndim) if d != dim and shard.shape[d] > 1]
        if not others:
            return send(shard, dim)
        return jnp.concatenate([send(x, dim) for x in jnp.array_split(shard, 2, axis=others[-1])], axis=others[-1])

    return _each(shards, specs, axis_name, gather)


def by_placing_parts(shards, specs, axis_name):
    """A loop writes the gathered parts to their places; the backward rule reads them from there."""
    size = lax.axis_size(axis_name)

    def place(blocks, dim):
        shape = list(blocks.shape[1:])
        length = shape[dim]
        shape[dim] *= size
        empty = lax.pcast(jnp.zeros(shape, blocks.dtype), axis_name, to="varying")
        write = lambda i, whole: lax.dynamic_update_slice_in_dim(whole, blocks[i], i * length, dim)  # noqa: E731
        return lax.fori_loop(0, size, write, empty)

    def gather(shard, dim):
        whole = jax.custom_vjp(lambda x: place(lax.all_gather(x, axis_name), dim))

        def backward(_, gradient):
            cut = lambda i: lax.dynamic_slice_in_dim(gradient, i * shard.shape[dim], shard.shape[dim], dim)  # noqa: E731
            return (lax.psum_scatter(lax.map(cut, jnp.arange(size)), axis_name) / size,)

        whole.defvjp(lambda x: (whole(x), None), backward)
        return whole(shard)

    return _each(shards, specs, axis_name, gather)


def by_taking_blocks(shards, specs, axis_name):
    """``einsum`` names the dims: device, length and what is around them."""

    def gather(shard, dim):
        before, after = math.prod(shard.shape[:dim]), math.prod(shard.shape[dim + 1 :])
        share = jnp.ones((), shard.dtype) / lax.axis_size(axis_name)

        @jax.custom_vjp
        def whole(x):
            blocks = lax.all_gather(x.reshape(before, -1, after), axis_name)
            return jnp.einsum("nbla->bnla", blocks).reshape(*shard.shape[:dim], -1, *shard.shape[dim + 1 :])

        def backward(_, gradient):
            blocks = jnp.einsum("bnla,->nbla", gradient.reshape(before, lax.axis_size(axis_name), -1, after), share)
            return (lax.psum_scatter(blocks, axis_name).reshape(shard.shape),)

        whole.defvjp(lambda x: (whole(x), None), backward)
        return whole(shard)

    return _each(shards, specs, axis_name, gather)


def by_dividing_blocks(shards, specs, axis_name):
    """Untiled collectives along the split dim itself, with a dim for devices in front of it."""
    size = lax.axis_size(axis_name)

    def gather(shard, dim):
        shape, length = shard.shape, shard.shape[dim]
        whole = jax.custom_vjp(
            lambda x: lax.all_gather(x, axis_name, axis=dim).reshape(*shape[:dim], size * length, *shape[dim + 1 :])
        )

        def backward(_, gradient):
            blocks = gradient.reshape(*shape[:dim], size, length, *shape[dim + 1 :])
            return (lax.psum_scatter(blocks, axis_name, scatter_dimension=dim, tiled=False) / size,)

        whole.defvjp(lambda x: (whole(x), None), backward)
        return whole(shard)

    return _each(shards, specs, axis_name, gather)


def by_vectors(shards, specs, axis_name):
    """Every part travels as a vector and gets its shape back afterwards."""
    size = lax.axis_size(axis_name)

    def gather(shard, dim):
        vector = shard.ravel()
        share = lax.stop_gradient(vector * (1 - 1 / size)) + vector * (1 / size)
        parts = lax.all_gather(share, axis_name, tiled=True).reshape(size, *shard.shape)
        return jnp.concatenate(jnp.unstack(parts), axis=dim)

    return _each(shards, specs, axis_name, gather)


def by_indexing_blocks(shards, specs, axis_name):
    """Says for each row of the whole leaf which device has it, and where."""
    size = lax.axis_size(axis_name)

    def gather(shard, dim):
        first = jnp.moveaxis(shard, dim, 0)
        device, row = jnp.divmod(jnp.arange(size * first.shape[0]), first.shape[0])

        @jax.custom_vjp
        def whole(x):
            return lax.all_gather(x, axis_name)[device, row]

        def backward(_, gradient):
            blocks = jnp.zeros_like(gradient, shape=(size, *first.shape)).at[device, row].set(gradient)
            return (lax.psum_scatter(blocks, axis_name) / size,)

        whole.defvjp(lambda x: (whole(x), None), backward)
        return jnp.moveaxis(whole(first), 0, dim)

    return _each(shards, specs, axis_name, gather)


def by_transposed_leaves(shards, specs, axis_name):
    """All dims in reverse on the way; the gradient is divided while it is."""
    size = lax.axis_size(axis_name)

    def gather(shard, dim):
        last = shard.ndim - 1 - dim
        whole = jax.custom_vjp(lambda x: lax.all_gather(x.T, axis_name, axis=last, tiled=True).T)

        def backward(_, gradient):
            return ((lax.psum_scatter(gradient.T, axis_name, scatter_dimension=last, tiled=True) / size).T,)

        whole.defvjp(lambda x: (whole(x), None), backward)
        return whole(shard)

    return _each(shards, specs, axis_name, gather)


def by_one_bucket_of_gradients(shards, specs, axis_name):
    """Leaves are gathered one by one, and their gradients travel back in one bucket."""
    size = lax.axis_size(axis_name)
    leaves, tree = jax.tree.flatten(shards)
    dims = {i: spec.index(axis_name) for i, spec in enumerate(tree.flatten_up_to(specs)) if axis_name in spec}

    @jax.custom_vjp
    def gather(parts):
        return [lax.all_gather(x, axis_name, axis=dim, tiled=True) for x, dim in zip(parts, dims.values(), strict=True)]

    def backward(_, gradients):
        rows = [jnp.stack(jnp.split(g, size, dim)) for g, dim in zip(gradients, dims.values(), strict=True)]
        bucket = jnp.concatenate([row.reshape(size, -1) for row in rows], axis=1)
        mean = lax.psum_scatter(bucket, axis_name) / size
        ends = np.cumsum([math.prod(row.shape[1:]) for row in rows])[:-1]
        return ([part.reshape(row.shape[1:]) for part, row in zip(jnp.split(mean, ends), rows, strict=True)],)

    gather.defvjp(lambda parts: (gather(parts), None), backward)
    for i, leaf in zip(dims, gather([leaves[i] for i in dims]), strict=True):
        leaves[i] = leaf
    return tree.unflatten(leaves)


ALTERNATIVES = (
    by_concatenating,
    by_gathering_rows,
    by_mapping_rows,
    by_flat_parameters,
    by_buckets,
    by_two_halves,
    by_placing_parts,
    by_taking_blocks,
    by_dividing_blocks,
    by_vectors,
    by_indexing_blocks,
    by_transposed_leaves,
    by_one_bucket_of_gradients,
)
