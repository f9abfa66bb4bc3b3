"""Right answers for ``chunked_attention`` in another style: with a backward pass of their own."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def _cut(x, chunk):
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _join(x):
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _scores(q, keys, start):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    seen = jnp.arange(q.shape[1])[:, None] >= start + jnp.arange(keys.shape[1])
    return jnp.where(seen, scores, -jnp.inf)


def _forward(q, k, v, chunk):
    def step(carry, piece):
        largest, total, mixed = carry
        start, keys, values = piece
        scores = _scores(q, keys, start)
        now = jnp.maximum(largest, scores.max(-1))
        weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
        new = jnp.einsum("bhqk,bkhd->bhqd", weights, values)
        return (now, shrink * total + weights.sum(-1), shrink[..., None] * mixed + new), None

    shape = (q.shape[0], q.shape[2], q.shape[1])
    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, q.shape[3])))
    pieces = (jnp.arange(0, q.shape[1], chunk), _cut(k, chunk), _cut(v, chunk))
    (largest, total, mixed), _ = lax.scan(step, start, pieces)
    return jnp.swapaxes(mixed / total[..., None], 1, 2), largest + jnp.log(total)


def _backward(chunk, kept, upstream):
    q, k, v, found, log_total = kept
    # What flows back through the softmax's sum: the same for all keys of a query.
    shared = jnp.einsum("bqhd,bqhd->bhq", upstream, found)[..., None]

    def step(of_q, piece):
        start, keys, values = piece
        weights = jnp.exp(_scores(q, keys, start) - log_total[..., None])
        of_weights = jnp.einsum("bqhd,bkhd->bhqk", upstream, values)
        of_scores = weights * (of_weights - shared) * q.shape[-1] ** -0.5
        of_values = jnp.einsum("bhqk,bqhd->bkhd", weights, upstream)
        of_keys = jnp.einsum("bhqk,bqhd->bkhd", of_scores, q)
        return of_q + jnp.einsum("bhqk,bkhd->bqhd", of_scores, keys), (of_keys, of_values)

    pieces = (jnp.arange(0, q.shape[1], chunk), _cut(k, chunk), _cut(v, chunk))
    of_q, (of_k, of_v) = lax.scan(step, jnp.zeros_like(q), pieces)
    return of_q, _join(of_k), _join(of_v)


def with_custom_derivative(q, k, v, chunk):
    """As flash attention does it: keeps the result and the logarithm of the sum."""

    @jax.custom_vjp
    def attend(q, k, v):
        return _forward(q, k, v, chunk)[0]

    def forward(q, k, v):
        found, log_total = _forward(q, k, v, chunk)
        return found, (q, k, v, found, log_total)

    attend.defvjp(forward, partial(_backward, chunk))
    return attend(q, k, v)


ALTERNATIVES = (with_custom_derivative,)
