"""Right answers for ``train_step_3d`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

from solutions.transformer_3d import forward_3d


def leaf_by_leaf(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """Each leaf's square is summed over the axes that its spec names, and over no other."""
    axes = data_axis, pipe_axis, tensor_axis
    loss, gradients = jax.value_and_grad(forward_3d)(params, specs, batch, key, options, *axes)

    def named(spec):
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
        return {axis for entry in entries for axis in entry}

    total = jnp.float32(0)
    leaves, tree = jax.tree.flatten(gradients)
    for leaf, spec in zip(leaves, tree.flatten_up_to(specs), strict=True):
        square = jnp.vdot(leaf, leaf)
        for axis in axes:
            # Where all have the same, the mean gives it back, typed as the same.
            square = lax.psum(square, axis) if axis in named(spec) else lax.pmean(square, axis)
        total = total + square
    factor = jnp.where(total > largest_norm**2, largest_norm * lax.rsqrt(total), 1)
    updates = jax.tree.map(lambda leaf: -learning_rate * factor * leaf, gradients)
    return optax.apply_updates(params, updates), lax.psum(loss, data_axis) / lax.axis_size(data_axis)


def by_one_of_each(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """Of copies, the device at place 0 counts its own."""
    axes = (data_axis, pipe_axis, tensor_axis)

    def mean_loss(params):
        return forward_3d(params, specs, batch, key, options, *axes)

    loss, back = jax.vjp(mean_loss, params)
    (gradients,) = back(jnp.ones_like(loss))

    def counts(spec):
        own = jnp.float32(1)
        for axis in axes:
            if not any(axis == entry or (isinstance(entry, tuple) and axis in entry) for entry in spec):
                own = own * (lax.axis_index(axis) == 0).astype(jnp.float32)
        return own

    squares = [counts(spec) * jnp.sum(jnp.square(leaf)) for leaf, spec in zip(
        jax.tree.leaves(gradients), jax.tree.structure(gradients).flatten_up_to(specs), strict=True)]  # fmt: skip
    norm = jnp.sqrt(lax.psum(sum(squares), axes))
    shrunk = jax.tree.map(lambda leaf: leaf / jnp.maximum(1, norm / largest_norm), gradients)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, shrunk), lax.pmean(loss, data_axis)


ALTERNATIVES = (leaf_by_leaf, by_one_of_each)
