"""Right answers for ``accumulate_gradients`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def by_slicing_in_a_loop(loss_fn, params, batch, num_microbatches):
    """A ``fori_loop`` that cuts out its microbatch itself."""
    rows = jax.tree.leaves(batch)[0].shape[0] // num_microbatches

    def step(i, total):
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i * rows, rows), batch)
        loss, gradients = jax.value_and_grad(loss_fn)(params, part)
        return total[0] + loss, jax.tree.map(lambda t, g: t + g, total[1], gradients)

    nothing = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    loss, gradients = lax.fori_loop(0, num_microbatches, step, nothing)
    return loss / num_microbatches, jax.tree.map(lambda g: g / num_microbatches, gradients)


def by_adding_shares(loss_fn, params, batch, num_microbatches):
    """Each microbatch adds its share of the mean: nothing is left to divide at the end."""

    def cut(leaf):
        return leaf.reshape(num_microbatches, -1, *leaf.shape[1:])

    def step(total, part):
        found = jax.value_and_grad(loss_fn)(params, part)
        return jax.tree.map(lambda t, new: t + new / num_microbatches, total, found), ()

    found = jax.eval_shape(jax.value_and_grad(loss_fn), params, batch)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)
    total, _ = lax.scan(step, nothing, jax.tree.map(cut, batch))
    return total


def by_a_loss_of_shares(loss_fn, params, batch, num_microbatches):
    """The share is taken in the loss, and losses are stacked instead of added."""

    def share(params, part):
        return loss_fn(params, part) / num_microbatches

    def step(gradients, part):
        loss, new = jax.value_and_grad(share)(params, part)
        return jax.tree.map(jnp.add, gradients, new), loss

    parts = jax.tree.map(lambda leaf: jnp.reshape(leaf, (num_microbatches, -1, *leaf.shape[1:])), batch)
    gradients, losses = lax.scan(step, jax.tree.map(jnp.zeros_like, params), parts)
    return jnp.sum(losses), gradients


def by_taking_every_nth_row(loss_fn, params, batch, num_microbatches):
    """Rows are dealt out like cards: the mean is the same."""

    def deal(leaf):
        return jnp.swapaxes(leaf.reshape(-1, num_microbatches, *leaf.shape[1:]), 0, 1)

    def step(carry, part):
        loss, gradients = carry
        new, transpose = jax.vjp(lambda p: loss_fn(p, part), params)
        (more,) = transpose(jnp.ones_like(new) / num_microbatches)
        return (loss + new / num_microbatches, jax.tree.map(jnp.add, gradients, more)), None

    start = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    (loss, gradients), _ = lax.scan(step, start, jax.tree.map(deal, batch))
    return loss, gradients


def as_a_running_mean(loss_fn, params, batch, num_microbatches):
    """The mean of what has been seen so far."""

    def step(carry, part):
        count, mean = carry
        found = jax.value_and_grad(loss_fn)(params, part)
        return (count + 1, jax.tree.map(lambda m, new: m + (new - m) / (count + 1), mean, found)), None

    parts = jax.tree.map(lambda leaf: leaf.reshape((num_microbatches, -1, *leaf.shape[1:])), batch)
    start = (jnp.zeros(()), (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)))
    (_, mean), _ = lax.scan(step, start, parts)
    return mean


ALTERNATIVES = (
    by_slicing_in_a_loop,
    by_adding_shares,
    by_a_loss_of_shares,
    by_taking_every_nth_row,
    as_a_running_mean,
)
