"""Alternative implementations of ``zero``: each must pass every fact."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import as_varying
from course.model import full_loss
from solutions.zero import global_norm, sharded_adamw


def by_shapes(params, axis_name, min_size):
    """Works out shapes alone, and never touches a parameter."""
    size = lax.axis_size(axis_name)

    def dim_of(shape):
        fits = [dim for dim in range(len(shape)) if shape[dim] % size == 0]
        return min(fits, key=lambda dim: -shape[dim]) if fits and math.prod(shape) >= min_size else None

    def zeros(leaf):
        dim = dim_of(leaf.shape)
        return jnp.zeros([length // (size if i == dim else 1) for i, length in enumerate(leaf.shape)], leaf.dtype)

    def spec(leaf):
        dim = dim_of(leaf.shape)
        return P() if dim is None else P(*[None] * dim, axis_name)

    state = {"count": jnp.int32(0), "m": jax.tree.map(zeros, params), "v": jax.tree.map(zeros, params)}
    return state, jax.tree.map(spec, params)


def by_subtracting(params, axis_name, min_size):
    """Cuts leaf by leaf; zeros are a part minus itself, and both moments are the same arrays."""
    n, i = lax.axis_size(axis_name), lax.axis_index(axis_name)
    leaves, tree = jax.tree.flatten(params)
    zeros, specs = [], []
    for leaf in leaves:
        order = sorted(range(leaf.ndim), key=lambda dim: leaf.shape[dim], reverse=True)
        dim = next((dim for dim in order if leaf.shape[dim] % n == 0 and leaf.size >= min_size), None)
        part = leaf if dim is None else jnp.moveaxis(leaf, dim, 0).reshape(n, -1, *np.delete(leaf.shape, dim))[i]
        zeros.append(part * 0 if dim is None else jnp.moveaxis(part - part, 0, dim))
        specs.append(P() if dim is None else P(*[None] * dim, axis_name))
    zeros = tree.unflatten(zeros)
    return dict(m=zeros, v=zeros, count=jnp.array(0, "int32")), tree.unflatten(specs)


def in_one_message(tree, specs):
    """Divides by the number of copies, and adds up over all axes at once."""
    named = [jax.tree.leaves(tuple(spec)) for spec in jax.tree.leaves(specs)]
    all_axes = sorted({axis for axes in named for axis in axes})
    total: Any = 0.0
    for leaf, axes in zip(jax.tree.leaves(tree), named, strict=True):
        copies = math.prod(lax.axis_size(axis) for axis in all_axes if axis not in axes)
        total += jnp.vdot(leaf, leaf) / copies
    for axis in all_axes:
        total = as_varying(total, axis)
    return jnp.linalg.norm(jnp.sqrt(lax.psum(total, tuple(all_axes)))[None])


def by_flat_groups(tree, specs):
    """Joins all leaves that are split alike, and takes the norm of each of these vectors."""
    groups: dict = {}
    jax.tree.map(
        lambda leaf, spec: groups.setdefault(frozenset(jax.tree.leaves(tuple(spec))), []).append(leaf.ravel()),
        tree,
        specs,
    )
    norms = {axes: jnp.linalg.norm(jnp.concatenate(leaves)) for axes, leaves in groups.items()}
    return sum(lax.psum(norm**2, tuple(axes)) if axes else norm**2 for axes, norm in norms.items()) ** 0.5


def own_part(leaf, spec, axis_name):
    if axis_name not in spec:
        return leaf
    dim = spec.index(axis_name)
    length = leaf.shape[dim] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(leaf, lax.axis_index(axis_name) * length, length, dim)


def by_flat_parts(params, gradients, state, specs, axis_name, config):
    """All parts as one flat array: clipped in a branch, and one all-gather for all leaves that are split."""
    norm, t = global_norm(gradients, specs), (state["count"] + 1).astype("float32")
    leaves, tree = jax.tree.flatten(jax.tree.map(lambda leaf, spec: own_part(leaf, spec, axis_name), params, specs))
    rates = [
        config.weight_decay * (leaf.ndim - (path[0].key == "layers") > 1)
        for path, leaf in jax.tree.leaves_with_path(params)
    ]
    kinds = tree.flatten_up_to(specs)
    dims = [spec.index(axis_name) if axis_name in spec else None for spec in kinds]
    results: list = [None] * len(leaves)

    def flat(trees, places):
        return jnp.concatenate([tree.flatten_up_to(trees)[i].ravel() for i in places])

    for split in (True, False):
        places = [i for i, dim in enumerate(dims) if (dim is not None) == split]
        ends = np.cumsum([leaves[i].size for i in places])[:-1]
        part, g, m, v = (flat(trees, places) for trees in (tree.unflatten(leaves), gradients, state["m"], state["v"]))
        decay = jnp.concatenate([jnp.full(leaves[i].size, rates[i], "float32") for i in places])
        g = lax.cond(norm > config.clip, lambda g: g * (config.clip / norm), lambda g: g, g)
        m, v = m + (1 - config.beta1) * (g - m), v + (1 - config.beta2) * (g * g - v)
        step = m / (1 - config.beta1**t) / (jnp.sqrt(v / (1 - config.beta2**t)) + config.eps)
        part = part * (1 - config.learning_rate * decay) - config.learning_rate * step
        rows = lax.all_gather(part, axis_name) if split else part[None]
        for i, *pieces in zip(places, jnp.split(rows, ends, 1), jnp.split(m, ends), jnp.split(v, ends), strict=True):
            shape = leaves[i].shape
            blocks = [block.reshape(shape) for block in pieces[0]]
            whole = jnp.concatenate(blocks, dims[i]) if split else blocks[0]
            results[i] = whole, pieces[1].reshape(shape), pieces[2].reshape(shape)
    new, m, v = (tree.unflatten(column) for column in zip(*results, strict=True))
    return new, {"m": m, "v": v, "count": state["count"] + 1}, norm


def by_optax(params, gradients, state, specs, axis_name, config):
    """Optax's Adam on this device's parts, with the norm from ``global_norm``."""
    norm = global_norm(gradients, specs)
    clipped = jax.tree.map(lambda g: g / jnp.maximum(1, norm / config.clip), gradients)
    parts = jax.tree.map(partial(own_part, axis_name=axis_name), params, specs)
    decays = {part: jax.tree.map(lambda p, part=part: p.ndim > 1 + (part == "layers"), params[part]) for part in params}
    before = optax.ScaleByAdamState(state["count"], state["m"], state["v"])
    after: Any
    with jax.numpy_dtype_promotion("standard"):
        adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
        steps, after = adam.update(clipped, before, parts)
        decay = optax.add_decayed_weights(config.weight_decay, decays)
        steps, _ = decay.update(steps, decay.init(parts), parts)
    new = jax.tree.map(lambda part, step: part - config.learning_rate * step, parts, steps)

    def whole(part, spec):
        return lax.all_gather(part, axis_name, axis=spec.index(axis_name), tiled=True) if axis_name in spec else part

    return jax.tree.map(whole, new, specs), {"m": after.mu, "v": after.nu, "count": after.count}, norm


def scattered(gradient, spec, axis_name):
    """This device's part of the mean, or its own gradient for a leaf that stays whole."""
    if axis_name not in spec:
        return gradient
    n = lax.axis_size(axis_name)
    return lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True) / n


def by_flat_gradients(params, state, specs, batch, model, axis_name, config):
    """One reduce-scatter for the whole gradient, with each device's entries in a separate row."""
    n = lax.axis_size(axis_name)
    loss, gradients = jax.value_and_grad(full_loss, argnums=1)(model, params, batch)
    leaves, tree = jax.tree.flatten(gradients)
    dims: list[Any] = [spec.index(axis_name) if axis_name in spec else None for spec in tree.flatten_up_to(specs)]
    split = [i for i, dim in enumerate(dims) if dim is not None]
    first = {i: jnp.moveaxis(leaves[i], dims[i], 0) for i in split}
    rows = jnp.concatenate([first[i].reshape(n, -1) for i in split], 1)
    pieces = jnp.split(lax.psum_scatter(rows, axis_name) / n, np.cumsum([leaves[i].size // n for i in split])[:-1])
    for i, piece in zip(split, pieces, strict=True):
        leaves[i] = jnp.moveaxis(piece.reshape(-1, *first[i].shape[1:]), 0, dims[i])
    whole = [i for i, dim in enumerate(dims) if dim is None]
    flat = lax.pmean(jnp.concatenate([loss[None], *(leaves[i].ravel() for i in whole)]), axis_name)
    for i, piece in zip(whole, jnp.split(flat[1:], np.cumsum([leaves[i].size for i in whole])[:-1]), strict=True):
        leaves[i] = piece.reshape(leaves[i].shape)
    params, state, norm = sharded_adamw(params, tree.unflatten(leaves), state, specs, axis_name, config)
    return params, state, flat[0], norm


def by_a_transpose(params, state, specs, batch, model, axis_name, config):
    """Differentiates with respect to the parts: the transpose of a whole leaf scatters its gradient."""

    def use(part, leaf, spec):
        whole = jax.custom_vjp(lambda part, leaf: leaf)
        whole.defvjp(lambda part, leaf: (leaf, None), lambda _, g: (scattered(g, spec, axis_name), None))
        return whole(part, leaf)

    def loss_of(parts):
        return full_loss(model, jax.tree.map(use, parts, params, specs), batch)

    loss, gradients = jax.value_and_grad(loss_of)(state["m"])
    gradients = jax.tree.map(lambda g, s: g if axis_name in s else lax.pmean(g, axis_name), gradients, specs)
    params, state, norm = sharded_adamw(params, gradients, state, specs, axis_name, config)
    return params, state, lax.pmean(loss, axis_name), norm


def finish(loss, gradients, params, state, specs, axis_name, config):
    """The part of the step after the last microbatch."""
    gradients = jax.tree.map(lambda g, s: g if axis_name in s else lax.pmean(g, axis_name), gradients, specs)
    params, state, norm = sharded_adamw(params, gradients, state, specs, axis_name, config)
    return params, state, lax.pmean(loss, axis_name), norm


def with_loops_over_numbers(params, state, specs, batch, model, axis_name, num_microbatches, config):
    """Loops over the indices of microbatches and layers; inputs and sums are written in place."""
    count, own = len(jax.tree.leaves(batch)[0]) // num_microbatches, jax.tree.map(lambda s: P(*s[1:]), specs["layers"])

    def at(tree, i):
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree)

    def put(stack, new, i):
        return lax.dynamic_update_index_in_dim(stack, new, i, 0)

    def plus(total, gradients, kinds):
        return jax.tree.map(lambda t, g, s: t + scattered(g, s, axis_name) / num_microbatches, total, gradients, kinds)

    def microbatch(m, carry):
        loss, total = carry
        rows = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, m * count, count), batch)
        x, embed_back = jax.vjp(lambda p: model.embed(p, rows["inputs"]), params["embed"])

        def forward(i, carry):
            x, layer_inputs = carry
            return model.layer(at(params["layers"], i), x), put(layer_inputs, x, i)

        def backward(back, carry):
            i = model.num_layers - 1 - back
            g, layers = carry
            of_layer, g = jax.vjp(model.layer, at(params["layers"], i), at(layer_inputs, i))[1](g)
            return g, jax.tree.map(lambda t, new: put(t, new, i), layers, plus(at(layers, i), of_layer, own))

        layer_inputs = jnp.stack([x * 0] * model.num_layers)
        x, layer_inputs = lax.fori_loop(0, model.num_layers, forward, (x, layer_inputs))
        part_loss, head_back = jax.vjp(lambda p, x: model.loss(p, x, rows["targets"]), params["head"], x)
        of_head, g = head_back(as_varying_like(jnp.ones(()), part_loss))
        g, layers = lax.fori_loop(0, model.num_layers, backward, (g, total["layers"]))
        embed = plus(total["embed"], embed_back(g)[0], specs["embed"])
        head = plus(total["head"], of_head, specs["head"])
        return loss + part_loss / num_microbatches, {"embed": embed, "layers": layers, "head": head}

    start = jnp.sum(batch["inputs"] * 0).astype("float32"), jax.tree.map(jnp.zeros_like, state["m"])
    loss, gradients = lax.fori_loop(0, num_microbatches, microbatch, start)
    return finish(loss, gradients, params, state, specs, axis_name, config)


def as_varying_like(x, like):
    return x + like * 0


def microbatch_by_microbatch(params, state, specs, batch, model, axis_name, num_microbatches, config):
    """A Python loop over microbatches; sums travel through the layers' scan as its carry."""
    own = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])
    total, losses = jax.tree.map(lambda leaf: leaf * 0, state["m"]), []
    for rows in zip(*(jnp.split(batch[name], num_microbatches) for name in ("inputs", "targets")), strict=True):
        (inputs, targets), _ = lax.optimization_barrier((rows, total))
        x, embed_back = jax.vjp(lambda p, inputs=inputs: model.embed(p, inputs), params["embed"])
        x, layer_inputs = lax.scan(lambda x, layer: (model.layer(layer, x), x), x, params["layers"])
        loss, (head, g) = jax.value_and_grad(model.loss, argnums=(0, 1))(params["head"], x, targets)

        def backward(carry, now):
            g, total = carry
            layer, x, i = now
            of_layer, g = jax.vjp(model.layer, layer, x)[1](g)
            return (
                g,
                jax.tree.map(lambda t, new, s: t.at[i].add(scattered(new, s, axis_name)), total, of_layer, own),
            ), None

        now = params["layers"], layer_inputs, jnp.arange(model.num_layers)
        (g, layers), _ = lax.scan(backward, (g, total["layers"]), now, reverse=True)
        ends = {"embed": embed_back(g)[0], "head": head}
        sums = jax.tree.map(lambda g, s: scattered(g, s, axis_name), ends, {end: specs[end] for end in ends})
        total = {"layers": layers} | jax.tree.map(jnp.add, {end: total[end] for end in ends}, sums)
        losses.append(loss)
    loss = sum(losses) / num_microbatches
    gradients = jax.tree.map(lambda g: g / num_microbatches, total)
    return finish(loss, gradients, params, state, specs, axis_name, config)


ALTERNATIVES = {
    "shard_optimizer_state": (by_shapes, by_subtracting),
    "global_norm": (in_one_message, by_flat_groups),
    "sharded_adamw": (by_optax, by_flat_parts),
    "zero1_step": (by_a_transpose, by_flat_gradients),
    "zero2_step": (microbatch_by_microbatch, with_loops_over_numbers),
}
