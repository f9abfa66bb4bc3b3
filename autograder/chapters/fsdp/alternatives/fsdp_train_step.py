"""Right answers for ``fsdp_train_step`` in another style."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from solutions.fsdp import gather_params


def layer_specs(specs):
    """One layer's specs: those of the stacked leaves without their first entry."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])


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


def ends(shards, specs, batch, model, axis_name):
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


def by_hand(shards, specs, batch, model, axis_name, learning_rate):
    """No custom derivative: a step is never differentiated, so its two passes just stand one after the other."""
    own, stack = layer_specs(specs), shards["layers"]
    gather = partial(gather_params, specs=own, axis_name=axis_name)
    x, embed_back, head = ends(shards, specs, batch, model, axis_name)

    def backward(carry, layer):
        g, whole = carry
        part, x = layer
        coming = gather(part)
        of_whole, g = jax.vjp(model.layer, whole, x)[1](g)
        return (g, coming), scatter(of_whole, own, axis_name)

    (x, whole), inputs = ahead(stack, x, gather, model)
    loss, (of_head, g) = head(model.layer(whole, x))
    layers = take(stack, slice(-1)), jnp.concatenate([inputs[1:], x[None]])
    (g, whole), others = lax.scan(backward, (g, whole), layers, reverse=True)
    first, g = jax.vjp(model.layer, whole, inputs[0])[1](g)
    first = take(scatter(first, own, axis_name), None)
    of_layers = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), first, others)
    gradients = {"embed": embed_back(g), "layers": of_layers, "head": of_head}
    return descend(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def with_delay(shards, specs, batch, model, axis_name, learning_rate):
    """The gradient of a layer waits in the carry, and is reduce-scattered beside the layer before."""
    own, stack = layer_specs(specs), shards["layers"]
    gather = partial(gather_params, specs=own, axis_name=axis_name)
    x, embed_back, head = ends(shards, specs, batch, model, axis_name)

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


def with_counted_loops(shards, specs, batch, model, axis_name, learning_rate):
    """``fori_loop`` over numbers, buffers for inputs and gradients, and each layer cut out of the stack when needed."""
    own, stack, count = layer_specs(specs), shards["layers"], model.num_layers
    x, embed_back, head = ends(shards, specs, batch, model, axis_name)

    def gather(i):
        part = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), stack)
        return gather_params(part, own, axis_name)

    def forward(i, carry):
        x, whole, inputs = carry
        coming = gather(i + 1)
        return model.layer(whole, x), coming, inputs.at[i].set(x)

    buffer = jnp.zeros_like(x, shape=(count - 1, *x.shape))
    x, whole, inputs = lax.fori_loop(0, count - 1, forward, (x, gather(0), buffer))
    loss, (of_head, g) = head(model.layer(whole, x))

    def put(found, i, of_whole):
        done = scatter(of_whole, own, axis_name)
        return jax.tree.map(lambda leaf, one: lax.dynamic_update_index_in_dim(leaf, one, i, 0), found, done)

    def backward(back, carry):
        i = count - 2 - back
        g, whole, found = carry
        coming = gather(i - 1)
        of_whole, g = jax.vjp(model.layer, whole, inputs[i])[1](g)
        return g, coming, put(found, i, of_whole)

    coming = gather(count - 2)
    of_whole, g = jax.vjp(model.layer, whole, x)[1](g)
    found = put(jax.tree.map(jnp.zeros_like, stack), count - 1, of_whole)
    g, whole, found = lax.fori_loop(0, count - 2, backward, (g, coming, found))
    first, g = jax.vjp(model.layer, whole, inputs[0])[1](g)
    gradients = {"embed": embed_back(g), "layers": put(found, 0, first), "head": of_head}
    return descend(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def updating_on_the_way(shards, specs, batch, model, axis_name, learning_rate):
    """The backward scan returns updated parts: no device ever holds the gradient of the whole stack, not even parts."""
    own, stack = layer_specs(specs), shards["layers"]
    gather = partial(gather_params, specs=own, axis_name=axis_name)
    x, embed_back, head = ends(shards, specs, batch, model, axis_name)

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
    x, embed_back, head = ends(shards, specs, batch, model, axis_name)

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


ALTERNATIVES = (by_hand, with_delay, with_counted_loops, updating_on_the_way, layer_by_layer)
