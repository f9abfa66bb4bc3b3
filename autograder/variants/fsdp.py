"""Right answers for ``fsdp`` in another style: each must pass every fact."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from solutions.fsdp import gather_params


def shard_params_by_stacking(params, axis_name, min_size):
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


def shard_params_by_reshaping(params, axis_name, min_size):
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


def gather_params_by_scaling(shards, specs, axis_name):
    """No derivative of our own: the part enters with 1/n of its gradient, and autodiff's reduce-scatter sums."""
    size = lax.axis_size(axis_name)

    def gather(shard, spec):
        if spec == P():
            return shard
        scaled = shard / size
        entering = scaled + lax.stop_gradient(shard - scaled)
        return lax.all_gather(entering, axis_name, axis=spec.index(axis_name), tiled=True)

    return jax.tree.map(gather, shards, specs)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(shard, axis_name, dim):
    blocks = lax.all_gather(shard, axis_name)
    return jnp.concatenate([blocks[i] for i in range(blocks.shape[0])], axis=dim)


def _whole_backward(axis_name, dim, _, gradient):
    size = lax.axis_size(axis_name)
    blocks = jnp.stack(jnp.split(gradient, size, axis=dim))
    return (lax.psum_scatter(blocks / size, axis_name, scatter_dimension=0, tiled=False),)


_whole.defvjp(lambda shard, axis_name, dim: (_whole(shard, axis_name, dim), None), _whole_backward)


def gather_params_by_concatenating(shards, specs, axis_name):
    """Untiled collectives, put together and taken apart by hand; one derivative for all leaves."""
    leaves, tree = jax.tree.flatten(shards)
    whole = []
    for leaf, spec in zip(leaves, tree.flatten_up_to(specs), strict=True):
        named = [dim for dim, axis in enumerate(spec) if axis == axis_name]
        whole.append(_whole(leaf, axis_name, named[0]) if named else leaf)
    return tree.unflatten(whole)


def fsdp_loss_with_own_derivative(shards, specs, batch, model, axis_name):
    """Each stage has a derivative that saves the parts and the input, and gathers again."""

    def stage(compute, stage_specs):
        def forward(part, x):
            return compute(gather_params(part, stage_specs, axis_name), x)

        run = jax.custom_vjp(forward)

        def backward(saved, gradient):
            _, transpose = jax.vjp(forward, *saved)
            return transpose(gradient)

        run.defvjp(lambda part, x: (forward(part, x), (part, x)), backward)
        return run

    targets = batch["targets"]
    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])
    layer = stage(model.layer, layer_specs)
    head = stage(lambda params, x: model.loss(params, x, targets), specs["head"])
    x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    x = lax.scan(lambda x, part: (layer(part, x), None), x, shards["layers"])[0]
    return head(shards["head"], x)


def fsdp_loss_with_policy(shards, specs, batch, model, axis_name):
    """One helper for all three stages, and a policy that saves nothing."""
    remat = partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, static_argnums=(0,))

    @remat
    def apply(name, part, *arguments):
        part_specs = specs["layers"] if name == "layer" else specs[name]
        if name == "layer":
            part_specs = jax.tree.map(lambda spec: P(*tuple(spec)[1:]), part_specs)
        compute = {"embed": model.embed, "layer": model.layer, "head": model.loss}[name]
        return compute(gather_params(part, part_specs, axis_name), *arguments)

    x = apply("embed", shards["embed"], batch["inputs"])
    x, _ = lax.scan(lambda x, part: (apply("layer", part, x), ()), x, shards["layers"])
    return apply("head", shards["head"], x, batch["targets"])


VARIANTS = {
    "shard_params": (shard_params_by_stacking, shard_params_by_reshaping),
    "gather_params": (gather_params_by_scaling, gather_params_by_concatenating),
    "fsdp_loss": (fsdp_loss_with_own_derivative, fsdp_loss_with_policy),
}
