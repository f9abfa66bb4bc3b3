"""Wrong answers for ``shard_params`` and ``gather_params``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.fsdp.mutants.names import GATHERED, GRADIENTS, OTHERS, SCATTERED, SPLIT, STATE, VALUES
from autograder.proof.mutants import mutant
from solutions.fsdp import gather_params


def _split(params: Any, axis_name: str, choose: Any, size: int | None = None, index: Any = None) -> Any:
    size = size or lax.axis_size(axis_name)
    index = lax.axis_index(axis_name) if index is None else index

    def split(leaf):
        dim = choose(leaf, size)
        if dim is None:
            return leaf, P()
        length = leaf.shape[dim] // size
        return lax.dynamic_slice_in_dim(leaf, index * length, length, dim), P(*[None] * dim, axis_name)

    leaves, tree = jax.tree.flatten(params)
    shards, specs = zip(*map(split, leaves), strict=True)
    return tree.unflatten(shards), tree.unflatten(specs)


def _largest(leaf: Any, size: int, min_size: int) -> int | None:
    dims = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % size == 0]
    return max(dims, key=lambda d: (leaf.shape[d], -d)) if dims and leaf.size >= min_size else None


def keeps_everything(params, axis_name, min_size):
    """Replicates instead of sharding."""
    return params, jax.tree.map(lambda _: P(), params)


def splits_first_divisible_dim(params, axis_name, min_size):
    def choose(leaf, size):
        dims = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % size == 0]
        return dims[0] if dims and leaf.size >= min_size else None

    return _split(params, axis_name, choose)


def splits_largest_dim_or_nothing(params, axis_name, min_size):
    """Gives up where the largest dim is not divisible, though another is."""

    def choose(leaf, size):
        dim = _largest(leaf, 1, min_size)
        return dim if dim is not None and leaf.shape[dim] % size == 0 else None

    return _split(params, axis_name, choose)


def takes_last_of_equal_dims(params, axis_name, min_size):
    def choose(leaf, size):
        dims = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % size == 0]
        return max(dims, key=lambda d: (leaf.shape[d], d)) if dims and leaf.size >= min_size else None

    return _split(params, axis_name, choose)


def ignores_min_size(params, axis_name, min_size):
    return _split(params, axis_name, partial(_largest, min_size=0))


def keeps_leaves_of_min_size(params, axis_name, min_size):
    """Off by one: a leaf with exactly ``min_size`` elements is large."""
    return _split(params, axis_name, partial(_largest, min_size=min_size + 1))


def everyone_takes_first_part(params, axis_name, min_size):
    return _split(params, axis_name, partial(_largest, min_size=min_size), index=0)


def counts_devices_backwards(params, axis_name, min_size):
    index = lax.axis_size(axis_name) - 1 - lax.axis_index(axis_name)
    return _split(params, axis_name, partial(_largest, min_size=min_size), index=index)


def _gather(shards: Any, specs: Any, axis_name: str, forward: Any, backward: Any) -> Any:
    def gather(shard, spec):
        if axis_name not in spec:
            return shard
        dim = spec.index(axis_name)
        whole = jax.custom_vjp(partial(forward, dim))
        whole.defvjp(lambda x: (forward(dim, x), None), lambda _, g: (backward(dim, g),))
        return whole(shard)

    return jax.tree.map(gather, shards, specs)


def sums_gradients(shards, specs, axis_name):
    """Autodiff alone: the transpose of an all-gather sums."""

    def gather(shard, spec):
        return lax.all_gather(shard, axis_name, axis=spec.index(axis_name), tiled=True) if len(spec) else shard

    return jax.tree.map(gather, shards, specs)


def sums_padded_parts(shards, specs, axis_name):
    """All-reduces arrays that are mostly zeros: right values, twice the bytes."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def forward(dim, shard):
        shape = [*shard.shape]
        shape[dim] *= size
        empty = lax.pcast(jnp.zeros(shape, shard.dtype), axis_name, to="varying")
        placed = lax.dynamic_update_slice_in_dim(empty, shard, index * shard.shape[dim], dim)
        return lax.pcast(lax.psum(placed, axis_name), axis_name, to="varying")

    return _gather(shards, specs, axis_name, forward, partial(_reduce_and_cut, axis_name=axis_name))


def _reduce_and_cut(dim, gradient, axis_name):
    mean = lax.pmean(gradient, axis_name)
    length = mean.shape[dim] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(mean, lax.axis_index(axis_name) * length, length, dim)


def all_reduces_gradients(shards, specs, axis_name):
    """Gathers rightly, then all-reduces whole gradients and keeps a part of them."""

    def forward(dim, shard):
        return lax.all_gather(shard, axis_name, axis=dim, tiled=True)

    return _gather(shards, specs, axis_name, forward, partial(_reduce_and_cut, axis_name=axis_name))


def keeps_own_gradient(shards, specs, axis_name):
    """Cuts out the part of this device's own gradient: no reduction at all."""

    def backward(dim, gradient):
        length = gradient.shape[dim] // lax.axis_size(axis_name)
        return lax.dynamic_slice_in_dim(gradient, lax.axis_index(axis_name) * length, length, dim)

    return _gather(shards, specs, axis_name, lambda d, s: lax.all_gather(s, axis_name, axis=d, tiled=True), backward)


def divides_by_eight(shards, specs, axis_name):
    """A hard-coded device count."""

    def backward(dim, gradient):
        return lax.psum_scatter(gradient, axis_name, scatter_dimension=dim, tiled=True) / 8

    return _gather(shards, specs, axis_name, lambda d, s: lax.all_gather(s, axis_name, axis=d, tiled=True), backward)


def stops_gradients(shards, specs, axis_name):
    return jax.tree.map(lax.stop_gradient, gather_params(shards, specs, axis_name))


def averages_whole_leaves_too(shards, specs, axis_name):
    """All-reduces the gradients of whole leaves at every use."""

    @jax.custom_vjp
    def averaged(leaf):
        return leaf

    averaged.defvjp(
        lambda leaf: (leaf, None),
        lambda _, g: (lax.pcast(lax.pmean(g, axis_name), axis_name, to="varying"),),
    )
    whole = gather_params(shards, specs, axis_name)
    return jax.tree.map(lambda leaf, spec: leaf if len(spec) else averaged(leaf), whole, specs)


def gathers_in_bfloat16(shards, specs, axis_name):
    low = jax.tree.map(lambda shard: shard.astype(jnp.bfloat16), shards)
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gather_params(low, specs, axis_name))


def stacks_parts(shards, specs, axis_name):
    """Forgets ``tiled=True``."""
    return jax.tree.map(lambda s, p: lax.all_gather(s, axis_name) if len(p) else s, shards, specs)


MUTANTS = (
    mutant("shard_params", keeps_everything, SPLIT, STATE),
    mutant("shard_params", splits_first_divisible_dim, SPLIT),
    mutant("shard_params", splits_largest_dim_or_nothing, SPLIT, STATE),
    mutant("shard_params", takes_last_of_equal_dims, SPLIT),
    mutant("shard_params", ignores_min_size, SPLIT, STATE),
    mutant("shard_params", keeps_leaves_of_min_size, SPLIT, STATE),
    mutant("shard_params", everyone_takes_first_part, VALUES),
    mutant("shard_params", counts_devices_backwards, VALUES),
    mutant("gather_params", sums_gradients, GRADIENTS),
    mutant("gather_params", sums_padded_parts, GATHERED, SCATTERED, OTHERS),
    mutant("gather_params", all_reduces_gradients, SCATTERED, OTHERS),
    mutant("gather_params", keeps_own_gradient, GRADIENTS, SCATTERED),
    mutant("gather_params", divides_by_eight, GRADIENTS, shown_by=("pipe=4 x tensor=2",)),
    mutant("gather_params", stops_gradients, GRADIENTS, SCATTERED),
    mutant("gather_params", averages_whole_leaves_too, GRADIENTS, OTHERS),
    mutant("gather_params", gathers_in_bfloat16, VALUES, GRADIENTS, GATHERED, SCATTERED),
    mutant("gather_params", stacks_parts, VALUES),
)
