"""Alternative implementations of ``fsdp``: each must pass every fact."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from solutions.fsdp import fsdp_loss, gather_params


def _dim(shape, size, min_size):
    """The dim to split, or None: ``min`` returns the first of equals."""
    fits = [dim for dim in range(len(shape)) if shape[dim] % size == 0]
    return min(fits, key=lambda dim: -shape[dim]) if fits and math.prod(shape) >= min_size else None


def _pairs(params, axis_name, min_size, cut):
    """``(shards, specs)`` from a tree of pairs; ``cut(leaf, dim, size, index)`` gives a part."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def pair(leaf):
        dim = _dim(leaf.shape, size, min_size)
        return (leaf, P()) if dim is None else (cut(leaf, dim, size, index), P(*[None] * dim, axis_name))

    pairs = jax.tree.map(pair, params)
    return tuple(jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs))


def by_taking_rows(params, axis_name, min_size):
    """``jnp.take`` with the row indices."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        return jnp.take(leaf, index * length + jnp.arange(length), axis=dim)

    return _pairs(params, axis_name, min_size, cut)


def by_sorting_rows(params, axis_name, min_size):
    """Sorts this device's rows to the front; the sort is stable."""

    def cut(leaf, dim, size, index):
        length = leaf.shape[dim] // size
        order = jnp.argsort(jnp.arange(leaf.shape[dim]) // length != index, stable=True)[:length]
        other_dims = [d for d in range(leaf.ndim) if d != dim]
        return jnp.take_along_axis(leaf, jnp.expand_dims(order, other_dims), dim)

    return _pairs(params, axis_name, min_size, cut)


def by_flat_parameters(shards, specs, axis_name):
    """All parts in one flat buffer: one all-gather for the whole tree, and one reduce-scatter backward."""
    size = lax.axis_size(axis_name)
    leaves, tree = jax.tree.flatten(shards)
    dims = [spec.index(axis_name) if axis_name in spec else None for spec in tree.flatten_up_to(specs)]
    split = [i for i, dim in enumerate(dims) if dim is not None]

    @jax.custom_vjp
    def gather(flat):
        return lax.all_gather(flat, axis_name)

    gather.defvjp(
        lambda flat: (gather(flat), None), lambda _, gradient: (lax.psum_scatter(gradient, axis_name) / size,)
    )
    rows, place = gather(jnp.concatenate([leaves[i].ravel() for i in split])), 0
    for i in split:
        shape, dim = leaves[i].shape, dims[i]
        blocks = rows[:, place : place + leaves[i].size].reshape(size, *shape)
        leaves[i], place = jnp.concatenate(list(blocks), axis=dim), place + math.prod(shape)
    return tree.unflatten(leaves)


def by_indexing_blocks(shards, specs, axis_name):
    """Index arrays map each row of the whole leaf to its device and local row; the transpose's sum is divided first."""
    size = lax.axis_size(axis_name)

    def gather(shard, spec):
        if axis_name not in spec:
            return shard
        dim = spec.index(axis_name)
        first = jnp.moveaxis(shard, dim, 0)
        device, row = jnp.divmod(jnp.arange(size * first.shape[0]), first.shape[0])
        carried = first / size + lax.stop_gradient(first - first / size)
        return jnp.moveaxis(lax.all_gather(carried, axis_name)[device, row], 0, dim)

    return jax.tree.map(gather, shards, specs)


def layer_specs(specs):
    """One layer's specs: those of the stacked leaves without their first entry."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])


def ends(shards, specs, batch, model, axis_name):
    """The embedding's output, and a function from the last layer's output to the loss: a helper from another cell."""
    embed = jax.checkpoint(lambda part, rows: model.embed(gather_params(part, specs["embed"], axis_name), rows))
    head = jax.checkpoint(lambda part, x, y: model.loss(gather_params(part, specs["head"], axis_name), x, y))
    return embed(shards["embed"], batch["inputs"]), lambda x: head(shards["head"], x, batch["targets"])


def by_number(shards, specs, batch, model, axis_name):
    """A loop over layer indices: the backward pass adds each gradient to the stack that it carries."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)
    layer = jax.checkpoint(lambda part, x: model.layer(gather_params(part, own, axis_name), x))
    return loss(lax.fori_loop(0, model.num_layers, lambda i, x: layer(take(shards["layers"], i), x), x))


def with_the_next_layer_on_its_way(shards, specs, batch, model, axis_name):
    """The forward scan gathers one layer while another computes; the backward scan gathers again."""
    x, loss = ends(shards, specs, batch, model, axis_name)

    def gather(part):
        return gather_params(part, layer_specs(specs), axis_name)

    def forward(stack, x):
        def step(carry, part):
            x, whole = carry
            return (model.layer(whole, x), gather(part)), x

        first, rest = (jax.tree.map(lambda leaf, at=at: leaf[at], stack) for at in (0, slice(1, None)))
        (x, whole), inputs = lax.scan(step, (x, gather(first)), rest)
        return model.layer(whole, x), (stack, jnp.concatenate([inputs, x[None]]))

    def backward(saved, gradient):
        def step(gradient, layer_and_input):
            of_part, of_x = jax.vjp(lambda part, x: model.layer(gather(part), x), *layer_and_input)[1](gradient)
            return of_x, of_part

        return lax.scan(step, gradient, saved, reverse=True)[::-1]

    layers = jax.custom_vjp(lambda stack, x: forward(stack, x)[0])
    layers.defvjp(forward, backward)
    return loss(layers(shards["layers"], x))


def take(stack, at):
    return jax.tree.map(lambda leaf: leaf[at], stack)


def scatter(gradients, specs, axis_name):
    """This device's part of the mean of each split leaf's gradient; other leaves are unchanged."""
    size = lax.axis_size(axis_name)

    def split(g, spec):
        if axis_name not in spec:
            return g
        return lax.psum_scatter(g, axis_name, scatter_dimension=spec.index(axis_name), tiled=True) / size

    return jax.tree.map(split, gradients, specs)


def descend(shards, specs, gradients, axis_name, learning_rate):
    def update(part, gradient, spec):
        mean = gradient if axis_name in spec else lax.psum(gradient, axis_name) / lax.axis_size(axis_name)
        return part - learning_rate * mean

    return jax.tree.map(update, shards, gradients, specs)


def ends_of_fsdp_train_step(shards, specs, batch, model, axis_name):
    """The first activations and their VJP, and the loss with its gradients."""

    def embed(part):
        return model.embed(gather_params(part, specs["embed"], axis_name), batch["inputs"])

    count = batch["mask"].sum()
    share = lax.axis_size(axis_name) * count / lax.psum(count, axis_name)

    def head(part, x):
        return share * model.loss(gather_params(part, specs["head"], axis_name), x, batch["targets"], batch["mask"])

    x, embed_back = jax.vjp(embed, shards["embed"])
    return x, lambda g: embed_back(g)[0], partial(jax.value_and_grad(head, argnums=(0, 1)), shards["head"])


def ahead(stack, x, gather, model):
    """Run all layers but the last, each overlapping the next one's gather.

    Returns:
        ``((input, weights) of the last layer, inputs of the others)``.
    """

    def step(carry, part):
        (x, whole), coming = carry, gather(part)
        return (model.layer(whole, x), coming), x

    return lax.scan(step, (x, gather(take(stack, 0))), take(stack, slice(1, None)))


def with_delay(shards, specs, batch, model, axis_name, learning_rate):
    """A layer's gradient waits in the carry, and its reduce-scatter overlaps the preceding layer."""
    own, stack = layer_specs(specs), shards["layers"]
    gather = partial(gather_params, specs=own, axis_name=axis_name)
    x, embed_back, head = ends_of_fsdp_train_step(shards, specs, batch, model, axis_name)

    def backward(carry, layer):
        g, whole, waiting = carry
        part, x = layer
        coming, done = gather(part), scatter(waiting, own, axis_name)
        waiting, g = jax.vjp(model.layer, whole, x)[1](g)
        return (g, coming, waiting), done

    (x, whole), inputs = ahead(stack, x, gather, model)
    loss, (of_head, g) = head(model.layer(whole, x))
    coming = gather(take(stack, -2))
    waiting, g = jax.vjp(model.layer, whole, x)[1](g)
    carry, done = lax.scan(backward, (g, coming, waiting), (take(stack, slice(-2)), inputs[1:]), reverse=True)
    g, whole, waiting = carry
    second = scatter(waiting, own, axis_name)
    first, g = jax.vjp(model.layer, whole, inputs[0])[1](g)
    of_layers = [take(tree, None) for tree in (scatter(first, own, axis_name), second)]
    of_layers = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *of_layers, done)
    gradients = {"embed": embed_back(g), "layers": of_layers, "head": of_head}
    return descend(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def layer_by_layer(shards, specs, batch, model, axis_name, learning_rate):
    """Python loops over layers, gathering one ahead each time; a barrier keeps a gather from moving further ahead."""
    own, stack, count = layer_specs(specs), shards["layers"], model.num_layers
    x, embed_back, head = ends_of_fsdp_train_step(shards, specs, batch, model, axis_name)

    def gather(i: int, behind: Any):
        part, _ = lax.optimization_barrier((take(stack, i), behind))
        return gather_params(part, own, axis_name)

    coming, inputs, whole = gather(0, x), [], None
    for i in range(count):
        whole, coming = coming, gather(i + 1, x) if i + 1 < count else None
        inputs.append(x)
        x = model.layer(whole, x)
    loss, (of_head, g) = head(x)
    layer_gradients, waiting = [], None
    for i in reversed(range(count)):
        coming = gather(i - 1, g) if i else None
        if waiting is not None:
            layer_gradients.append(scatter(waiting, own, axis_name))
        waiting, g = jax.vjp(model.layer, *lax.optimization_barrier((whole, inputs.pop())))[1](g)
        whole = coming
    layer_gradients.append(scatter(waiting, own, axis_name))
    of_layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *reversed(layer_gradients))
    gradients = {"embed": embed_back(g), "layers": of_layers, "head": of_head}
    return descend(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def parts_of_parts(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Across nodes, a reduce-scatter and then an all-gather: the parts of an all-reduce, with the same bytes."""
    loss, gradients = jax.value_and_grad(fsdp_loss)(shards, specs, batch, model, axis_name)
    nodes = lax.axis_size(replica_axis)

    def across(g):
        if g.size % nodes:
            return lax.pmean(g, replica_axis)
        part = lax.psum_scatter(g.reshape(-1), replica_axis, tiled=True) / nodes
        return lax.all_gather(part, replica_axis, tiled=True).reshape(g.shape)

    def mean(g, spec):
        return across(g) if axis_name in spec else lax.pmean(g, (replica_axis, axis_name))

    updated = jax.tree.map(lambda s, g, spec: s - learning_rate * mean(g, spec), shards, gradients, specs)
    return updated, lax.pmean(loss, (axis_name, replica_axis))


def small_leaves_in_one_message(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Whole leaves and the loss are averaged as one flat array; each split leaf is sent separately."""
    loss, gradients = jax.value_and_grad(fsdp_loss)(shards, specs, batch, model, axis_name)
    leaves, tree = jax.tree.flatten(gradients)
    whole = [i for i, spec in enumerate(tree.flatten_up_to(specs)) if axis_name not in spec]
    flat = jnp.concatenate([loss[None], *(leaves[i].ravel() for i in whole)])
    flat, place = lax.pmean(flat, (replica_axis, axis_name)), 1
    for i in range(len(leaves)):
        if i in whole:
            leaves[i], place = flat[place : place + leaves[i].size].reshape(leaves[i].shape), place + leaves[i].size
        else:
            leaves[i] = lax.pmean(leaves[i], replica_axis)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, tree.unflatten(leaves)), flat[0]


ALTERNATIVES = {
    "shard_params": (by_taking_rows, by_sorting_rows),
    "gather_params": (by_flat_parameters, by_indexing_blocks),
    "fsdp_loss": (by_number, with_the_next_layer_on_its_way),
    "fsdp_train_step": (with_delay, layer_by_layer),
    "hybrid_shard_step": (parts_of_parts, small_leaves_in_one_message),
}
