"""Right answers for ``tp_attention`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def by_einsum(params, x, axis_name):
    """Scores, mask and softmax by hand, without a reshape."""
    rows = lax.all_gather(x, axis_name, axis=1, tiled=True)
    q, k, v = jnp.einsum("bsw,wthd->tbhsd", rows, params["qkv"]["kernel"])
    scores = q @ jnp.swapaxes(k, -1, -2) / jnp.sqrt(jnp.float32(q.shape[-1]))
    position = jnp.arange(rows.shape[1])
    weights = jax.nn.softmax(jnp.where(position[:, None] >= position, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bhqk,bhkd,hdw->bqw", weights, v, params["out"]["kernel"])
    return lax.psum_scatter(y, axis_name, scatter_dimension=1, tiled=True)


def head_by_head(params, x, axis_name):
    """A scan over the heads of this device, whose outputs are added up."""
    rows = lax.all_gather(x, axis_name, axis=1, tiled=True)
    hidden = jnp.tril(jnp.ones((rows.shape[1], rows.shape[1]))) == 0

    def head(total, weights):
        qkv, out = weights
        q, k, v = (rows @ qkv[:, i] for i in range(3))
        scores = jnp.einsum("bqd,bkd->bqk", q, k) * q.shape[-1] ** -0.5
        mixed = jax.nn.softmax(jnp.where(hidden, -1e30, scores)) @ v
        return total + mixed @ out, None

    start = jnp.zeros_like(rows)
    heads = jnp.moveaxis(params["qkv"]["kernel"], 2, 0), params["out"]["kernel"]
    y, _ = lax.scan(head, start, heads)
    return lax.psum_scatter(y, axis_name, scatter_dimension=1, tiled=True)


def sequence_by_sequence(params, x, axis_name):
    """One sequence at a time by ``vmap``, between the collectives; scores are computed again in the backward pass."""

    @jax.checkpoint
    def attend(rows):
        q, k, v = (jnp.tensordot(rows, params["qkv"]["kernel"][:, i], 1) for i in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jnp.tensordot(mixed, params["out"]["kernel"], 2)

    y = jax.vmap(attend)(lax.all_gather(x, axis_name, axis=1, tiled=True))
    return lax.psum_scatter(y, axis_name, scatter_dimension=1, tiled=True)


def with_a_mask_of_zeros_and_minus_infinity(params, x, axis_name):
    """A bias in place of the mask, and softmax by its definition."""
    kernel = params["qkv"]["kernel"]
    rows = lax.all_gather(x, axis_name, axis=1, tiled=True)
    qkv = (rows @ kernel.reshape(kernel.shape[0], -1)).reshape(*rows.shape[:2], *kernel.shape[1:])
    q, k, v = (jnp.squeeze(part, 2) for part in jnp.split(qkv, 3, axis=2))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    scores = scores + jnp.triu(jnp.full(scores.shape[-2:], -jnp.inf), 1)
    raised = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    weights = raised / raised.sum(-1, keepdims=True)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    out = params["out"]["kernel"]
    y = mixed.reshape(*mixed.shape[:2], -1) @ out.reshape(-1, out.shape[-1])
    return lax.psum_scatter(y, axis_name, scatter_dimension=1, tiled=True)


ALTERNATIVES = (by_einsum, head_by_head, sequence_by_sequence, with_a_mask_of_zeros_and_minus_infinity)
