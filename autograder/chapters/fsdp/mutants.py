"""Wrong answers for ``fsdp``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import full_loss
from solutions.fsdp import fsdp_loss, fsdp_train_step, gather_params


def keeps_everything(params, axis_name, min_size):
    """Replicates instead of sharding."""
    return params, jax.tree.map(lambda _: P(), params)


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


def sums_gradients(shards, specs, axis_name):
    """Autodiff alone: the transpose of an all-gather sums."""

    def gather(shard, spec):
        return lax.all_gather(shard, axis_name, axis=spec.index(axis_name), tiled=True) if len(spec) else shard

    return jax.tree.map(gather, shards, specs)


def _gather(shards: Any, specs: Any, axis_name: str, forward: Any, backward: Any) -> Any:
    def gather(shard, spec):
        if axis_name not in spec:
            return shard
        dim = spec.index(axis_name)
        whole = jax.custom_vjp(partial(forward, dim))
        whole.defvjp(lambda x: (forward(dim, x), None), lambda _, g: (backward(dim, g),))
        return whole(shard)

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


def stacks_parts(shards, specs, axis_name):
    """Forgets ``tiled=True``."""
    return jax.tree.map(lambda s, p: lax.all_gather(s, axis_name) if len(p) else s, shards, specs)


def layer_specs(specs: Any) -> Any:
    """One layer's specs: those of the stacked leaves without their first entry."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])


def _loss(shards, specs, batch, model, axis_name, gather=gather_params, wrap=lambda f: f) -> Any:
    def layer(x, part):
        return model.layer(gather(part, layer_specs(specs), axis_name), x), None

    x = model.embed(gather(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    x, _ = lax.scan(wrap(layer), x, shards["layers"])
    return model.loss(gather(shards["head"], specs["head"], axis_name), x, batch["targets"])


def keeps_gathered_weights(shards, specs, batch, model, axis_name):
    """Layer by layer, but what was gathered is saved for the backward pass."""
    return _loss(shards, specs, batch, model, axis_name)


def gathers_four_times(shards, specs, batch, model, axis_name):
    """Recomputes the whole loss around layers that recompute themselves."""
    return jax.checkpoint(lambda parts: fsdp_loss(parts, specs, batch, model, axis_name))(shards)


def computes_a_few_rows_at_a_time(shards, specs, batch, model, axis_name):
    """Reads every weight from memory for each few rows."""

    @jax.checkpoint
    def layer(x, part):
        weights = gather_params(part, layer_specs(specs), axis_name)
        few = x.reshape(-1, min(32, x.shape[0]), *x.shape[1:])
        return lax.map(lambda rows: model.layer(weights, rows), few).reshape(x.shape), None

    whole = jax.checkpoint(lambda part, name: gather_params(part, specs[name], axis_name), static_argnums=1)
    x = model.embed(whole(shards["embed"], "embed"), batch["inputs"])
    x, _ = lax.scan(layer, x, shards["layers"])
    return model.loss(whole(shards["head"], "head"), x, batch["targets"])


def averages_the_loss(shards, specs, batch, model, axis_name):
    """Returns the mean over devices, which costs a reduction, and mixes what flows back into the devices' losses."""
    return lax.pmean(fsdp_loss(shards, specs, batch, model, axis_name), axis_name)


def forgets_the_first_layers_gradient(shards, specs, batch, model, axis_name):
    frozen = {**shards, "embed": jax.tree.map(lax.stop_gradient, shards["embed"])}
    return fsdp_loss(frozen, specs, batch, model, axis_name)


def mean_of_whole(gradients: Any, specs: Any, axis_name: str) -> Any:
    return jax.tree.map(lambda g, spec: g if axis_name in spec else lax.pmean(g, axis_name), gradients, specs)


def _updated(shards: Any, specs: Any, gradients: Any, axis_name: str, learning_rate: Any) -> Any:
    mean = mean_of_whole(gradients, specs, axis_name)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, mean)


def _by_autodiff(loss_of: Any, shards: Any, specs: Any, axis_name: str, learning_rate: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(shards)
    return _updated(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def gathers_when_it_computes(shards, specs, batch, model, axis_name, learning_rate):
    """The derivative of ``fsdp_loss``: every layer waits for its gather, and its gradient for the reduce-scatter."""
    return _by_autodiff(
        lambda parts: fsdp_loss(parts, specs, batch, model, axis_name), shards, specs, axis_name, learning_rate
    )


def _take(stack: Any, at: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], stack)


def _scatter(gradients: Any, specs: Any, axis_name: str, divide: bool = True) -> Any:
    def split(g, spec):
        if axis_name not in spec:
            return g
        total = lax.psum_scatter(g, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
        return total / lax.axis_size(axis_name) if divide else total

    return jax.tree.map(split, gradients, specs)


def _back(model: Any, whole: Any, x: Any, gradient: Any) -> Any:
    return jax.vjp(model.layer, whole, x)[1](gradient)


def _forward(stack: Any, x: Any, gather: Any, model: Any) -> Any:
    """All layers, the next one's weights in the carry; and what the backward pass needs."""

    def step(carry, part):
        x, whole = carry
        return (model.layer(whole, x), gather(part)), x

    (x, whole), inputs = lax.scan(step, (x, gather(_take(stack, 0))), _take(stack, slice(1, None)))
    return model.layer(whole, x), (inputs, x, whole)


def _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward, gather=gather_params, forward=_forward):
    """A step whose layers have the given backward pass, ``(saved, gradient, gather) -> gradients of parts and x``."""
    own = layer_specs(specs)

    def gather_layer(part):
        return gather(part, own, axis_name)

    def embed(part):
        return model.embed(gather(part, specs["embed"], axis_name), batch["inputs"])

    def head(part, x):
        return model.loss(gather(part, specs["head"], axis_name), x, batch["targets"])

    x, of_embed = jax.vjp(embed, shards["embed"])
    x, saved = forward(shards["layers"], x, gather_layer, model)
    loss, (of_head, gradient) = jax.value_and_grad(head, argnums=(0, 1))(shards["head"], x)
    of_layers, gradient = backward((shards["layers"], *saved), gradient, gather_layer)
    gradients = {"embed": of_embed(gradient)[0], "layers": of_layers, "head": of_head}
    return _updated(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def prefetches_forward_only(shards, specs, batch, model, axis_name, learning_rate):
    """Gathers ahead in the forward pass; the backward pass gathers when it computes."""
    own = layer_specs(specs)

    def backward(saved, gradient, gather):
        stack, inputs, x, _ = saved

        def step(gradient, layer):
            part, x = layer
            of_whole, gradient = _back(model, gather(part), x, gradient)
            return gradient, _scatter(of_whole, own, axis_name)

        every = jnp.concatenate([inputs, x[None]])
        return lax.scan(step, gradient, (stack, every), reverse=True)[::-1]

    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward)


def keeps_gathered_weights_in_step(shards, specs, batch, model, axis_name, learning_rate):
    """Gathers ahead and leaves the backward pass to JAX, which saves the carry: every layer, whole."""
    own = layer_specs(specs)

    def loss_of(shards):
        x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        x, _ = _forward(shards["layers"], x, lambda part: gather_params(part, own, axis_name), model)
        return model.loss(gather_params(shards["head"], specs["head"], axis_name), x, batch["targets"])

    return _by_autodiff(loss_of, shards, specs, axis_name, learning_rate)


def keeps_the_carry_of_a_checkpoint(shards, specs, batch, model, axis_name, learning_rate):
    """The same with ``jax.checkpoint`` around the iteration, whose inputs are saved: the weights are among them."""
    own = layer_specs(specs)

    @jax.checkpoint
    def step(carry, part):
        x, whole = carry
        return (model.layer(whole, x), gather_params(part, own, axis_name)), None

    def loss_of(shards):
        stack = shards["layers"]
        x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        first = gather_params(_take(stack, 0), own, axis_name)
        (x, whole), _ = lax.scan(step, (x, first), _take(stack, slice(1, None)))
        x = model.layer(whole, x)
        return model.loss(gather_params(shards["head"], specs["head"], axis_name), x, batch["targets"])

    return _by_autodiff(loss_of, shards, specs, axis_name, learning_rate)


def gathers_everything_first(shards, specs, batch, model, axis_name, learning_rate):
    """The whole model at once: data parallelism with parts."""
    return _by_autodiff(
        lambda parts: full_loss(model, gather_params(parts, specs, axis_name), batch),
        shards,
        specs,
        axis_name,
        learning_rate,
    )


def gathers_round_the_end(shards, specs, batch, model, axis_name, learning_rate):
    """No code for first and last layers: both scans gather one layer more, for nobody."""
    own = layer_specs(specs)

    def forward(stack, x, gather, model):
        def step(carry, part):
            x, whole = carry
            coming = gather(part)
            return (model.layer(whole, x), coming), x

        after = jax.tree.map(lambda leaf: jnp.roll(leaf, -1, 0), stack)
        (x, _), inputs = lax.scan(step, (x, gather(_take(stack, 0))), after)
        return x, (inputs,)

    def backward(saved, gradient, gather):
        stack, inputs = saved

        def step(carry, layer):
            gradient, whole = carry
            part, x = layer
            coming = gather(part)
            of_whole, gradient = _back(model, whole, x, gradient)
            return (gradient, coming), _scatter(of_whole, own, axis_name)

        before = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), stack)
        carry = (gradient, gather(_take(stack, -1)))
        (gradient, _), done = lax.scan(step, carry, (before, inputs), reverse=True)
        return done, gradient

    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward, forward=forward)


def _prefetched(
    model: Any,
    specs: Any,
    axis_name: str,
    *,
    divide: bool = True,
    stale: bool = False,
    shift: int = 0,
    before: Any = None,
):
    """The right backward pass, with room for mistakes."""
    own = layer_specs(specs)

    def scatter(gradients):
        if before:
            gradients = jax.tree.map(lambda g, spec: before(g) if axis_name in spec else g, gradients, own)
        return _scatter(gradients, own, axis_name, divide)

    def backward(saved, gradient, gather):
        stack, inputs, x, whole = saved

        def step(carry, layer):
            gradient, whole = carry
            part, x = layer
            coming = gather(part)
            of_whole, gradient = _back(model, coming if stale else whole, x, gradient)
            return (gradient, coming), scatter(of_whole)

        layers = _take(stack, slice(-1)), jnp.concatenate([inputs[1:], x[None]])
        (gradient, whole), done = lax.scan(step, (gradient, whole), layers, reverse=True)
        first, gradient = _back(model, whole, inputs[0], gradient)
        every = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), scatter(first), done)
        return jax.tree.map(lambda leaf: jnp.roll(leaf, shift, 0), every) if shift else every, gradient

    return backward


def gathers_in_bfloat16(shards, specs, batch, model, axis_name, learning_rate):
    """Half of the bytes, and a few digits fewer."""

    def gather(part, part_specs, axis_name):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), part)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gather_params(low, part_specs, axis_name))

    backward = _prefetched(model, specs, axis_name)
    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward, gather)


def averages_whole_leaves_twice(shards, specs, batch, model, axis_name, learning_rate):
    """Once where they are found and once at the end: the same numbers, twice the messages."""

    def once_more(shards, updated):
        mean = jax.tree.map(lambda old, new: (old - new) / learning_rate, shards, updated)
        return mean_of_whole(jax.tree.map(lambda g: as_varying(g, axis_name), mean), specs, axis_name)

    updated, loss = fsdp_train_step(shards, specs, batch, model, axis_name, learning_rate)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, once_more(shards, updated)), loss


def forgets_the_learning_rate(shards, specs, batch, model, axis_name, learning_rate):
    return fsdp_train_step(shards, specs, batch, model, axis_name, jnp.float32(0.1))


def _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, average: Any, loss_of: Any = fsdp_loss):
    """A step whose gradients are averaged by ``average(gradients)`` after those of whole leaves are, inside a node."""
    loss, gradients = jax.value_and_grad(loss_of)(shards, specs, batch, model, axis_name)
    gradients = average(mean_of_whole(gradients, specs, axis_name))
    updated = jax.tree.map(lambda part, g: part - learning_rate * g, shards, gradients)
    return updated, lax.pmean(loss, (axis_name, replica_axis))


def _with_gather(gather: Any) -> Any:
    """The whole model's loss with another way to gather; memory is not judged here."""

    def loss_of(shards, specs, batch, model, axis_name):
        whole = jax.tree.map(lambda s, spec: gather(s, spec) if axis_name in spec else s, shards, specs)
        return full_loss(model, whole, batch)

    return loss_of


def _gather_in_hybrid(forward: Any, backward: Any, shard: Any, spec: Any) -> Any:
    whole = jax.custom_vjp(partial(forward, spec))
    whole.defvjp(lambda x: (forward(spec, x), None), lambda _, g: (backward(spec, g),))
    return whole(shard)


def _part_of_mean(axis_name: str, spec: Any, gradient: Any) -> Any:
    total = lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
    return total / lax.axis_size(axis_name)


def reduces_whole_gradients_between_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """All-reduces whole gradients across nodes, then splits them: right numbers, many times the bytes."""

    def forward(spec, shard):
        return lax.all_gather(shard, axis_name, axis=spec.index(axis_name), tiled=True)

    def backward(spec, gradient):
        return lax.pcast(_part_of_mean(axis_name, spec, lax.pmean(gradient, replica_axis)), replica_axis, to="varying")

    loss_of = _with_gather(partial(_gather_in_hybrid, forward, backward))
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate,
                 lambda gradients: _between(gradients, specs, axis_name, replica_axis), loss_of)  # fmt: skip


def _between(gradients: Any, specs: Any, axis_name: str, replica_axis: str) -> Any:
    """Averages whole leaves across nodes; parts are averaged already."""
    return jax.tree.map(lambda g, spec: g if axis_name in spec else lax.pmean(g, replica_axis), gradients, specs)


def gathers_from_every_node(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Gathers over both axes, and uses the first copy of each part."""

    def forward(spec, shard):
        dim = spec.index(axis_name)
        every = lax.all_gather(shard, (replica_axis, axis_name), axis=dim, tiled=True)
        return lax.slice_in_dim(every, 0, shard.shape[dim] * lax.axis_size(axis_name), axis=dim)

    loss_of = _with_gather(partial(_gather_in_hybrid, forward, partial(_part_of_mean, axis_name)))
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate,
                 lambda gradients: lax.pmean(gradients, replica_axis), loss_of)  # fmt: skip


def forgets_the_other_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Every node trains a model of its own."""
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, lambda gradients: gradients)


def sums_over_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate,
                 lambda gradients: lax.psum(gradients, replica_axis))  # fmt: skip


def permutes_round_the_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """A ring by hand whose every step sends everything: right numbers, more bytes than an all-reduce."""
    size = lax.axis_size(replica_axis)
    ring = [(i, (i + 1) % size) for i in range(size)]

    def mean(g):
        total = passed = g
        for _ in range(size - 1):
            passed = lax.ppermute(passed, replica_axis, ring)
            total = total + passed
        return total / size

    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, partial(jax.tree.map, mean))


MUTANTS = (
    mutant("shard_params", keeps_everything, "split dims", "state bytes per device"),
    mutant("shard_params", ignores_min_size, "split dims", "state bytes per device"),
    mutant("shard_params", keeps_leaves_of_min_size, "split dims", "state bytes per device"),
    mutant("shard_params", everyone_takes_first_part, "values"),
    mutant("shard_params", counts_devices_backwards, "values"),
    mutant("gather_params", sums_gradients, "gradients"),
    mutant("gather_params", sums_padded_parts, "all-gather bytes", "other collectives", "reduce-scatter bytes"),
    mutant("gather_params", all_reduces_gradients, "other collectives", "reduce-scatter bytes"),
    mutant("gather_params", keeps_own_gradient, "gradients", "reduce-scatter bytes"),
    mutant("gather_params", stacks_parts, "values"),
    mutant("fsdp_loss", keeps_gathered_weights, "live temporaries"),
    mutant("fsdp_loss", gathers_four_times, "all-gather bytes", "predicted time"),
    mutant("fsdp_loss", computes_a_few_rows_at_a_time, "live temporaries", "predicted time"),
    mutant("fsdp_loss", averages_the_loss, "other collectives", "values"),
    mutant("fsdp_loss", forgets_the_first_layers_gradient, "gradient norm", "gradients", "reduce-scatter bytes"),
    mutant("fsdp_train_step", gathers_when_it_computes, "predicted time"),
    mutant("fsdp_train_step", prefetches_forward_only, "predicted time"),
    mutant("fsdp_train_step", keeps_gathered_weights_in_step, "live temporaries", "predicted time"),
    mutant("fsdp_train_step", keeps_the_carry_of_a_checkpoint, "live temporaries"),
    mutant("fsdp_train_step", gathers_everything_first, "live temporaries", "predicted time"),
    mutant("fsdp_train_step", gathers_round_the_end, "all-gather bytes"),
    mutant(
        "fsdp_train_step",
        gathers_in_bfloat16,
        "all-gather bytes",
        "gradient norm",
        "gradients",
        "predicted time",
        "reduce-scatter bytes",
        "values",
    ),
    mutant("fsdp_train_step", averages_whole_leaves_twice, "all-reduce bytes"),
    mutant("fsdp_train_step", forgets_the_learning_rate, "gradient norm", "gradients", "values"),
    mutant("hybrid_shard_step", reduces_whole_gradients_between_nodes, "bytes between nodes"),
    mutant("hybrid_shard_step", gathers_from_every_node, "all-gather bytes", "bytes between nodes"),
    mutant("hybrid_shard_step", forgets_the_other_nodes, "bytes between nodes", "gradient norm", "gradients", "values"),
    mutant("hybrid_shard_step", sums_over_nodes, "gradient norm", "gradients", "values"),
    mutant("hybrid_shard_step", permutes_round_the_nodes, "other collectives"),
)
