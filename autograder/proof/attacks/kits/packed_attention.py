"""Attention over a few chunks of keys, whose scores and means an attack takes in complex numbers.

``scores(q, k)`` and ``means(weights, v)`` are what ``einsum`` would give; ``kept`` wraps a chunk's exponentials, as
``kept_in_pairs`` does.
"""

import jax
import jax.numpy as jnp
from jax import lax


def in_pairs(a, b):
    return lax.complex(a, b)


def apart(both, dim):
    return jnp.concatenate([jnp.real(both), jnp.imag(both)], dim)


def halves(x, dim):
    return jnp.split(x, 2, dim)


def plain_scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def plain_means(weights, v):
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def scores_in_pairs(q, k):
    if q.shape[1] % 2:
        return plain_scores(q, k)
    both = jnp.einsum("bqhd,bkhd->bhqk", in_pairs(*halves(q, 1)), k.astype(jnp.complex64))
    return apart(both, 2)


def means_in_pairs(weights, v):
    return apart(jnp.einsum("bhqk,bkhd->bqhd", weights.astype(jnp.complex64), in_pairs(*halves(v, 3))), 3)


def kept_in_pairs(dim):
    """Keeps exponentials for the backward pass, two of them along a dim in one complex number."""

    def kept(exp):
        def forward(x):
            y = exp(x)
            return y, in_pairs(*halves(y, dim)) if y.shape[dim] % 2 == 0 else y

        def backward(y, gradient):
            return (gradient * (apart(y, dim) if jnp.iscomplexobj(y) else y),)

        packed = jax.custom_vjp(lambda x: exp(x))
        packed.defvjp(forward, backward)
        return packed

    return kept


def attend(q, k, v, chunk, scores=plain_scores, means=plain_means, kept=lambda f: f, around=lambda f: f, parts=None):
    seq = q.shape[1]
    length = chunk if parts is None else -(-seq // parts)

    def run(q, k, v):
        largest, total, mixed = None, 0.0, 0.0
        for start in range(0, seq, length):
            keys, values = k[:, start : start + length], v[:, start : start + length]
            found = scores(q * q.shape[-1] ** -0.5, keys)
            allowed = jnp.arange(seq)[:, None] >= start + jnp.arange(keys.shape[1])
            found = jnp.where(allowed, found, -1e30)
            now = found.max(-1) if largest is None else jnp.maximum(largest, found.max(-1))
            now = lax.stop_gradient(now)
            weights = kept(jnp.exp)(found - now[..., None])
            shrink = 1.0 if largest is None else jnp.exp(largest - now)
            total = total * shrink + weights.sum(-1)
            wide = shrink if largest is None else jnp.moveaxis(shrink, 1, 2)[..., None]
            mixed, largest = mixed * wide + means(weights, values), now
        return mixed / jnp.moveaxis(total, 1, 2)[..., None]

    return around(run)(q, k, v)
