"""Right answers for ``fsdp`` in other styles: each must pass every fact."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from solutions.fsdp import fsdp_loss, gather_params


def _dim(shape, size, min_size):
    """The dim to split, or None: ``min`` gives the first of equals."""
    fits = [dim for dim in range(len(shape)) if shape[dim] % size == 0]
    return min(fits, key=lambda dim: -shape[dim]) if fits and math.prod(shape) >= min_size else None


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


def _dim_of_shard_params(shape, size, min_size):
    """The dim to split, or None: sorted by length with the longest first, and Python's sort keeps ties in order."""
    longest_first = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    fits = [dim for dim in longest_first if shape[dim] % size == 0]
    return fits[0] if fits and math.prod(shape) >= min_size else None


def _split(params, axis_name, min_size, cut):
    """Every leaf by ``cut(leaf, dim, size, index)``: a helper from another cell."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    dims = [_dim_of_shard_params(leaf.shape, size, min_size) for leaf in jax.tree.leaves(params)]
    leaves, tree = jax.tree.flatten(params)
    parts = [leaf if dim is None else cut(leaf, dim, size, index) for leaf, dim in zip(leaves, dims, strict=True)]
    specs = [P() if dim is None else P(*[None] * dim, axis_name) for dim in dims]
    return tree.unflatten(parts), tree.unflatten(specs)


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


def _each(shards, specs, axis_name, gather):
    """Every leaf that is split by ``gather(shard, dim)``: a helper from another cell."""
    leaves, tree = jax.tree.flatten(shards)
    for i, spec in enumerate(tree.flatten_up_to(specs)):
        leaves[i] = gather(leaves[i], spec.index(axis_name)) if axis_name in spec else leaves[i]
    return tree.unflatten(leaves)


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


def layer_specs(specs):
    """One layer's specs: those of the stacked leaves without their first entry."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])


def ends(shards, specs, batch, model, axis_name):
    """The embedding's result, and what makes a loss of the last layer's: a helper from another cell."""
    embed = jax.checkpoint(lambda part, rows: model.embed(gather_params(part, specs["embed"], axis_name), rows))
    head = jax.checkpoint(lambda part, x, y: model.loss(gather_params(part, specs["head"], axis_name), x, y))
    return embed(shards["embed"], batch["inputs"]), lambda x: head(shards["head"], x, batch["targets"])


def by_recursion(shards, specs, batch, model, axis_name):
    """The first layer, then the rest of the stack, until nothing is left."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)
    layer = jax.checkpoint(lambda part, x: model.layer(gather_params(part, own, axis_name), x))

    def run(stack, x):
        if jax.tree.leaves(stack)[0].shape[0] == 0:
            return x
        first = jax.tree.map(lambda leaf: leaf[0], stack)
        return run(jax.tree.map(lambda leaf: leaf[1:], stack), layer(first, x))

    return loss(run(shards["layers"], x))


def with_rows_mapped(shards, specs, batch, model, axis_name):
    """The layer of one row, and ``vmap`` over rows; the head's loss is a mean over rows, so a mean of their means."""
    own = layer_specs(specs)

    @jax.checkpoint
    def layer(x, part):
        whole = gather_params(part, own, axis_name)
        return jax.vmap(lambda row: model.layer(whole, row[None])[0])(x), None

    @jax.checkpoint
    def head(part, x, targets):
        whole = gather_params(part, specs["head"], axis_name)
        return jnp.mean(jax.vmap(lambda row, target: model.loss(whole, row[None], target[None]))(x, targets))

    x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    return head(shards["head"], lax.scan(layer, x, shards["layers"])[0], batch["targets"])


def with_the_next_layer_on_its_way(shards, specs, batch, model, axis_name):
    """The forward scan gathers one layer while another computes; the backward scan gathers again."""
    x, loss = ends(shards, specs, batch, model, axis_name)

    def gather(part):
        return gather_params(part, layer_specs(specs), axis_name)

    def forward(stack, x):
        def step(carry, part):
            x, whole = carry
            return (model.layer(whole, x), gather(part)), x

        first, others = (jax.tree.map(lambda leaf, at=at: leaf[at], stack) for at in (0, slice(1, None)))
        (x, whole), inputs = lax.scan(step, (x, gather(first)), others)
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
    """This device's part of the mean of each split leaf's gradient; others pass through."""
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
    """The first activations and how to go back from them, and the loss with its gradients."""

    def embed(part):
        return model.embed(gather_params(part, specs["embed"], axis_name), batch["inputs"])

    def head(part, x):
        return model.loss(gather_params(part, specs["head"], axis_name), x, batch["targets"])

    x, embed_back = jax.vjp(embed, shards["embed"])
    return x, lambda g: embed_back(g)[0], partial(jax.value_and_grad(head, argnums=(0, 1)), shards["head"])


def ahead(stack, x, gather, model):
    """All layers but the last, each beside the gather of the next: the last one's input and weights, and all inputs."""

    def step(carry, part):
        (x, whole), coming = carry, gather(part)
        return (model.layer(whole, x), coming), x

    return lax.scan(step, (x, gather(take(stack, 0))), take(stack, slice(1, None)))


def with_delay(shards, specs, batch, model, axis_name, learning_rate):
    """The gradient of a layer waits in the carry, and is reduce-scattered beside the layer before."""
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


def updating_on_the_way(shards, specs, batch, model, axis_name, learning_rate):
    """The backward scan returns updated parts: no device ever holds the gradient of the whole stack, not even parts."""
    own, stack = layer_specs(specs), shards["layers"]
    gather = partial(gather_params, specs=own, axis_name=axis_name)
    x, embed_back, head = ends_of_fsdp_train_step(shards, specs, batch, model, axis_name)

    def update(part, of_whole):
        return descend(part, own, scatter(of_whole, own, axis_name), axis_name, learning_rate)

    def backward(carry, layer):
        g, whole = carry
        before, part, x = layer
        coming = gather(before)
        of_whole, g = jax.vjp(model.layer, whole, x)[1](g)
        return (g, coming), update(part, of_whole)

    (x, whole), inputs = ahead(stack, x, gather, model)
    loss, (of_head, g) = head(model.layer(whole, x))
    layers = take(stack, slice(-1)), take(stack, slice(1, None)), jnp.concatenate([inputs[1:], x[None]])
    (g, whole), others = lax.scan(backward, (g, whole), layers, reverse=True)
    first, g = jax.vjp(model.layer, whole, inputs[0])[1](g)
    first = take(update(take(stack, 0), first), None)
    updated = {
        "embed": descend(shards["embed"], specs["embed"], embed_back(g), axis_name, learning_rate),
        "layers": jax.tree.map(lambda *leaves: jnp.concatenate(leaves), first, others),
        "head": descend(shards["head"], specs["head"], of_head, axis_name, learning_rate),
    }
    return updated, lax.pmean(loss, axis_name)


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
    found, waiting = [], None
    for i in reversed(range(count)):
        coming = gather(i - 1, g) if i else None
        if waiting is not None:
            found.append(scatter(waiting, own, axis_name))
        waiting, g = jax.vjp(model.layer, *lax.optimization_barrier((whole, inputs.pop())))[1](g)
        whole = coming
    found.append(scatter(waiting, own, axis_name))
    of_layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *reversed(found))
    gradients = {"embed": embed_back(g), "layers": of_layers, "head": of_head}
    return descend(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def parts_of_parts(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Across nodes a reduce-scatter, then an all-gather: what an all-reduce is made of, and as many bytes."""
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
    """Whole leaves and the loss are averaged together, as one flat array; parts travel each alone."""
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


def without_remat(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Its own loss, in which every layer keeps what it gathered: memory is not what this function is judged by."""
    own = jax.tree.map(lambda spec: jax.P(*spec[1:]), specs["layers"])

    def loss_of(shards):
        x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        for i in range(model.num_layers):
            part = jax.tree.map(lambda leaf: leaf[i], shards["layers"])  # noqa: B023
            x = model.layer(gather_params(part, own, axis_name), x)
        return model.loss(gather_params(shards["head"], specs["head"], axis_name), x, batch["targets"])

    loss, gradients = jax.value_and_grad(loss_of)(shards)
    axes = jax.tree.map(lambda spec: (replica_axis,) if axis_name in spec else (axis_name, replica_axis), specs)
    updated = jax.tree.map(lambda s, g, a: s - learning_rate * lax.pmean(g, a), shards, gradients, axes)
    return updated, lax.pmean(loss, (axis_name, replica_axis))


ALTERNATIVES = {
    "shard_params": (
        by_taking_rows,
        by_finding_own_rows,
        by_sorting_rows,
    ),
    "gather_params": (
        by_flat_parameters,
        by_buckets,
        by_indexing_blocks,
    ),
    "fsdp_loss": (
        by_recursion,
        with_rows_mapped,
        with_the_next_layer_on_its_way,
    ),
    "fsdp_train_step": (
        with_delay,
        updating_on_the_way,
        layer_by_layer,
    ),
    "hybrid_shard_step": (
        parts_of_parts,
        small_leaves_in_one_message,
        without_remat,
    ),
}
