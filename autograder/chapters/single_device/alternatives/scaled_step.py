"""Right answers for ``scaled_step`` in another style."""

from __future__ import annotations

from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree


def by_branching(loss_fn, params, state, batch, learning_rate, growth_interval):
    """``lax.cond`` on whether all is finite, gradients unscaled in the branch that uses them."""
    scale = state["scale"]
    low = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    loss, gradients = jax.value_and_grad(lambda p: loss_fn(p, batch) * scale)(low)
    finite = reduce(jnp.logical_and, (jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)))

    def good(_):
        count = state["good_steps"] + 1
        rate = learning_rate / scale
        new = jax.tree.map(lambda p, g: p - rate * g.astype(jnp.float32), params, gradients)
        grown = {"scale": scale * 2, "good_steps": jnp.zeros_like(count)}
        same = {"scale": scale, "good_steps": count}
        return new, jax.tree.map(lambda a, b: jnp.where(count == growth_interval, a, b), grown, same)

    def bad(_):
        return params, {"scale": jnp.maximum(scale * 0.5, 1.0), "good_steps": jnp.zeros_like(state["good_steps"])}

    return *lax.cond(finite, good, bad, None), loss / scale


def by_flattening(loss_fn, params, state, batch, learning_rate, growth_interval):
    """One vector for all gradients; what is not finite is replaced by zero before it is used."""

    def scaled(p):
        loss = loss_fn(jax.tree.map(lambda a: a.astype("float16"), p), batch)
        return state["scale"] * loss, loss

    (_, loss), gradients = jax.value_and_grad(scaled, has_aux=True)(params)
    flat, rebuild = ravel_pytree(gradients)
    finite = jnp.isfinite(flat).all()
    step = rebuild(jnp.where(finite, flat / state["scale"], 0.0))
    new = jax.tree.map(lambda p, g: p - learning_rate * g, params, step)
    count = (state["good_steps"] + 1) * finite.astype(jnp.int32)
    full = count == growth_interval
    factor = jnp.where(finite, jnp.where(full, 2.0, 1.0), 0.5)
    after = {"scale": jnp.maximum(1.0, state["scale"] * factor), "good_steps": count * (1 - full.astype(jnp.int32))}
    return new, after, loss


def by_the_sum_of_squares(loss_fn, params, state, batch, learning_rate, growth_interval):
    """A sum of zeros times the gradients is finite exactly if they all are."""

    def cast(p):
        return jax.tree.map(lambda a: lax.convert_element_type(a, jnp.float16), p)

    loss, transpose = jax.vjp(lambda p: loss_fn(cast(p), batch), params)
    (gradients,) = transpose(state["scale"])
    probe = sum(jnp.sum(0.0 * g) for g in jax.tree.leaves(gradients))
    finite = probe == 0.0
    inverse = 1.0 / state["scale"]
    new = jax.tree.map(lambda p, g: lax.select(jnp.full(p.shape, finite), p - learning_rate * (g * inverse), p),
                       params, gradients)  # fmt: skip
    count = jnp.where(finite, 1 + state["good_steps"], 0)
    scale = jnp.select(
        [~finite, count % growth_interval == 0],
        [jnp.maximum(state["scale"] / 2.0, 1.0), state["scale"] * 2.0],
        state["scale"],
    )
    return new, {"good_steps": count % growth_interval, "scale": scale}, loss


ALTERNATIVES = (by_branching, by_flattening, by_the_sum_of_squares)
