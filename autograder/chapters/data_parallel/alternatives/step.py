"""Right answers for ``train_step_dp`` in another style."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax

from course.model import full_loss


def to_varying(tree, axis_name):
    """Every leaf, typed as each device's own."""
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axis_name, to="varying"), tree)


def unrolled(params, batch, model, axis_name, num_microbatches, learning_rate):
    """A Python loop over microbatches that are cut out one by one."""
    own = to_varying(params, axis_name)
    loss, total = jnp.zeros(()), None
    for i in range(num_microbatches):
        part = jax.tree.map(lambda rows: jnp.split(rows, num_microbatches)[i], batch)  # noqa: B023
        more, gradients = jax.value_and_grad(partial(full_loss, model))(own, part)
        loss, total = loss + more, gradients if total is None else jax.tree.map(jnp.add, total, gradients)
    mean = jax.tree.map(lambda g: lax.pmean(g, axis_name) / num_microbatches, total)
    new = jax.tree.map(lambda p, g: p - learning_rate * g, params, mean)
    return new, lax.pmean(loss / num_microbatches, axis_name), mean


def by_counting(params, batch, model, axis_name, num_microbatches, learning_rate):
    """``fori_loop`` that slices its rows, and weighs each microbatch as it comes."""
    own = to_varying(params, axis_name)
    length = batch["inputs"].shape[0] // num_microbatches

    def body(i, total):
        part = jax.tree.map(lambda rows: lax.dynamic_slice_in_dim(rows, i * length, length), batch)
        found = jax.value_and_grad(lambda p: full_loss(model, p, part) / num_microbatches)(own)
        return jax.tree.map(jnp.add, total, found)

    start = jax.tree.map(jnp.zeros_like, (to_varying(jnp.zeros(()), axis_name), own))
    loss, gradients = lax.pmean(lax.fori_loop(0, num_microbatches, body, start), axis_name)
    return jax.tree.map(lambda p, g: p - g * learning_rate, params, gradients), loss, gradients


def with_optax(params, batch, model, axis_name, num_microbatches, learning_rate):
    """The update from optax, and losses stacked instead of carried."""
    own = to_varying(params, axis_name)

    def add(total, part):
        loss, gradients = jax.value_and_grad(full_loss, argnums=1)(model, own, part)
        return jax.tree.map(jnp.add, total, gradients), loss

    parts = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    total, losses = lax.scan(add, jax.tree.map(jnp.zeros_like, own), parts)
    count = num_microbatches * lax.axis_size(axis_name)
    gradients = jax.tree.map(lambda g: lax.psum(g, axis_name) / count, total)
    optimizer = optax.sgd(learning_rate)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates), lax.pmean(jnp.mean(losses), axis_name), gradients


def first_apart(params, batch, model, axis_name, num_microbatches, learning_rate):
    """The first microbatch makes the sum to which the others are added: no zeros to type."""
    own = to_varying(params, axis_name)
    parts = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    value_and_grad = jax.value_and_grad(lambda p, part: full_loss(model, p, part))

    def add(total, part):
        return jax.tree.map(jnp.add, total, value_and_grad(own, part)), None

    first = value_and_grad(own, jax.tree.map(lambda rows: rows[0], parts))
    total, _ = lax.scan(add, first, jax.tree.map(lambda rows: rows[1:], parts))
    loss, gradients = jax.tree.map(lambda t: lax.pmean(t, axis_name) / num_microbatches, total)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients), loss, gradients


ALTERNATIVES = (unrolled, by_counting, with_optax, first_apart)
