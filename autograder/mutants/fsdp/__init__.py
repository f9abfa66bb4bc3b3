"""Wrong answers for ``fsdp``: each works in some way, and each is a mistake that somebody has made."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from autograder.mutants import mutant
from course.model import full_loss
from solutions.fsdp import fsdp_loss, gather_params


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


def _layer_specs(specs: Any) -> Any:
    return jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])


def _loss(shards, specs, batch, model, axis_name, gather=gather_params, wrap=lambda f: f) -> Any:
    def layer(x, part):
        return model.layer(gather(part, _layer_specs(specs), axis_name), x), None

    x = model.embed(gather(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    x, _ = lax.scan(wrap(layer), x, shards["layers"])
    return model.loss(gather(shards["head"], specs["head"], axis_name), x, batch["targets"])


def keeps_gathered_weights(shards, specs, batch, model, axis_name):
    """Layer by layer, but what was gathered is saved for the backward pass."""
    return _loss(shards, specs, batch, model, axis_name)


def gathers_everything_first(shards, specs, batch, model, axis_name):
    return full_loss(model, gather_params(shards, specs, axis_name), batch)


def names_a_copy(shards, specs, batch, model, axis_name):
    """Tells the policy not to save a named copy of the weights; the gathered original is saved instead."""

    def gather(part, part_specs, axis_name):
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, "gathered"), gather_params(part, part_specs, axis_name))

    policy = jax.checkpoint_policies.save_anything_except_these_names("gathered")
    return _loss(shards, specs, batch, model, axis_name, gather, partial(jax.checkpoint, policy=policy))


def computes_less_where_nobody_runs_it(shards, specs, batch, model, axis_name):
    """Cuts every array to 64, which changes nothing at the sizes that are run."""
    size = lax.axis_size(axis_name)

    def cut(leaf, spec):
        whole = [64 // size if axis_name in spec and dim == spec.index(axis_name) else 64 for dim in range(leaf.ndim)]
        return lax.slice(leaf, [0] * leaf.ndim, [min(limit, dim) for limit, dim in zip(whole, leaf.shape, strict=True)])

    few = {name: cut(rows, P()) for name, rows in batch.items()}
    return full_loss(model, gather_params(jax.tree.map(cut, shards, specs), specs, axis_name), few)


def keeps_weights_behind_a_barrier(shards, specs, batch, model, axis_name):
    """Keeps every gathered weight and hides that from a liveness that does not follow aliases."""

    def gather(part, part_specs, axis_name):
        return jax.tree.map(
            lambda leaf: lax.optimization_barrier(leaf) * 1.0, gather_params(part, part_specs, axis_name)
        )

    return _loss(shards, specs, batch, model, axis_name, gather)


def gathers_four_times(shards, specs, batch, model, axis_name):
    """Recomputes the whole loss around layers that recompute themselves."""
    return jax.checkpoint(lambda parts: fsdp_loss(parts, specs, batch, model, axis_name))(shards)


def averages_the_loss(shards, specs, batch, model, axis_name):
    """Returns the mean over devices, which costs a reduction; the gradient does not change by it."""
    return lax.pmean(fsdp_loss(shards, specs, batch, model, axis_name), axis_name)


def divides_by_devices(shards, specs, batch, model, axis_name):
    """Makes the mean of a sum that was a mean already."""
    return fsdp_loss(shards, specs, batch, model, axis_name) / lax.axis_size(axis_name)


def forgets_the_first_layers_gradient(shards, specs, batch, model, axis_name):
    frozen = {**shards, "embed": jax.tree.map(lax.stop_gradient, shards["embed"])}
    return fsdp_loss(frozen, specs, batch, model, axis_name)


def sums_gradients_of_layers(shards, specs, batch, model, axis_name):
    return _loss(shards, specs, batch, model, axis_name, sums_gradients, jax.checkpoint)


def computes_a_few_rows_at_a_time(shards, specs, batch, model, axis_name):
    """Reads every weight from memory for each few rows."""

    @jax.checkpoint
    def layer(x, part):
        weights = gather_params(part, _layer_specs(specs), axis_name)
        few = x.reshape(-1, min(32, x.shape[0]), *x.shape[1:])
        return lax.map(lambda rows: model.layer(weights, rows), few).reshape(x.shape), None

    whole = jax.checkpoint(lambda part, name: gather_params(part, specs[name], axis_name), static_argnums=1)
    x = model.embed(whole(shards["embed"], "embed"), batch["inputs"])
    x, _ = lax.scan(layer, x, shards["layers"])
    return model.loss(whole(shards["head"], "head"), x, batch["targets"])


VALUES, GRADIENTS = "values", "gradients"
SPLIT, STATE = "split dims", "state bytes per device"
GATHERED, SCATTERED, OTHERS = "all-gather bytes", "reduce-scatter bytes", "other collectives"
NORM, TEMPORARIES, TIME = "gradient norm", "live temporaries", "predicted time"

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
    mutant("fsdp_loss", keeps_gathered_weights, TEMPORARIES),
    mutant("fsdp_loss", gathers_everything_first, TEMPORARIES),
    mutant("fsdp_loss", names_a_copy, TEMPORARIES),
    mutant("fsdp_loss", computes_less_where_nobody_runs_it, TEMPORARIES, TIME, GATHERED, SCATTERED),
    mutant("fsdp_loss", keeps_weights_behind_a_barrier, TEMPORARIES, TIME),
    mutant("fsdp_loss", gathers_four_times, GATHERED, TIME),
    mutant("fsdp_loss", computes_a_few_rows_at_a_time, TEMPORARIES, TIME),
    mutant("fsdp_loss", averages_the_loss, VALUES, OTHERS),
    mutant("fsdp_loss", divides_by_devices, VALUES, GRADIENTS, NORM),
    mutant("fsdp_loss", forgets_the_first_layers_gradient, GRADIENTS, NORM, SCATTERED),
    mutant("fsdp_loss", sums_gradients_of_layers, GRADIENTS, NORM),
)
