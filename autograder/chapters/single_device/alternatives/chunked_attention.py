"""Right answers for ``chunked_attention`` in another style: autodiff does the backward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def with_queries_in_chunks_too(q, k, v, chunk):
    """Chunks of queries outside, chunks of keys inside; scores of one chunk with one chunk."""
    batch, seq, heads, dim = q.shape
    pieces = seq // chunk

    def cut(x):
        return x.reshape(batch, pieces, chunk, heads, dim).transpose(1, 0, 3, 2, 4)

    keys, values = cut(k), cut(v)

    @jax.checkpoint
    def inner(carry, piece, rows, i):
        largest, total, mixed = carry
        j, some_keys, some_values = piece
        scores = jnp.einsum("bhqd,bhkd->bhqk", rows, some_keys) / jnp.sqrt(jnp.float32(dim))
        places = jnp.arange(chunk)
        scores = jnp.where(i * chunk + places[:, None] >= j * chunk + places, scores, -1e30)
        now = jnp.maximum(largest, lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        weights = jnp.exp(scores - now)
        shrink = jnp.exp(largest - now)
        total = shrink * total + weights.sum(axis=-1, keepdims=True)
        return now, total, shrink * mixed + weights @ some_values

    def outer(_, one):
        i, rows = one
        start = (
            jnp.full((batch, heads, chunk, 1), -1e30),
            jnp.zeros((batch, heads, chunk, 1)),
            jnp.zeros((batch, heads, chunk, dim)),
        )
        js = jnp.arange(pieces)
        carry, _ = lax.scan(lambda c, piece: (inner(c, piece, rows, i), None), start, (js, keys, values))
        return None, carry[2] / carry[1]

    _, found = lax.scan(outer, None, (jnp.arange(pieces), cut(q)))
    return found.transpose(1, 0, 3, 2, 4).reshape(q.shape)


def one_chunk_of_queries_at_a_time(q, k, v, chunk):
    """All keys for a few queries: no running sum is needed, and no array is larger than a share of the square."""
    batch, seq, heads, dim = q.shape
    places = jnp.arange(seq)

    @jax.checkpoint
    def attend(rows, own):
        scores = jnp.einsum("bqhd,bkhd->bhqk", rows, k) * dim**-0.5
        weights = jax.nn.softmax(jnp.where(own[:, None] >= places, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    rows = jnp.moveaxis(q.reshape(batch, -1, chunk, heads, dim), 1, 0)
    _, found = lax.scan(lambda _, x: (None, attend(*x)), None, (rows, places.reshape(-1, chunk)))
    return jnp.moveaxis(found, 0, 1).reshape(q.shape)


def in_a_python_loop(q, k, v, chunk):
    """Unrolled, each chunk computed again."""
    seq, dim = q.shape[1], q.shape[3]
    places = jnp.arange(seq)

    @jax.checkpoint
    def add(largest, total, mixed, keys, values, theirs):
        scores = jnp.einsum("bqhd,bkhd->bqhk", q, keys) * dim**-0.5
        scores = jnp.where((places[:, None] >= theirs)[None, :, None], scores, -jnp.inf)
        now = jnp.maximum(largest, lax.stop_gradient(jnp.max(scores, -1)))
        weights = jnp.exp(scores - now[..., None])
        shrink = jnp.exp(largest - now)
        new = jnp.einsum("bqhk,bkhd->bqhd", weights, values)
        return now, total * shrink + jnp.sum(weights, -1), mixed * shrink[..., None] + new

    state = (jnp.full(q.shape[:3], -jnp.inf), jnp.zeros(q.shape[:3]), jnp.zeros_like(q))
    for start in range(0, seq, chunk):
        part = slice(start, start + chunk)
        state = add(*state, k[:, part], v[:, part], places[part])
    return state[2] / state[1][..., None]


def by_logsumexp(q, k, v, chunk):
    """Carries a finished mean and the logarithm of its weight, and mixes it with each chunk's."""
    batch, seq, heads, dim = q.shape

    @jax.checkpoint
    def step(carry, piece):
        mean, weight = carry
        first, keys, values = piece
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * dim**-0.5, keys)
        seen = jnp.arange(seq)[:, None] >= first + jnp.arange(chunk)[None]
        scores = jnp.where(seen, scores, -1e30)
        here = jax.nn.logsumexp(scores, axis=-1)
        there = jnp.einsum("bhqk,bkhd->bhqd", jnp.exp(scores - here[..., None]), values)
        both = jnp.logaddexp(weight, here)
        return (mean * jnp.exp(weight - both)[..., None] + there * jnp.exp(here - both)[..., None], both), None

    def cut(x):
        return jnp.stack(jnp.split(x, seq // chunk, axis=1))

    start = (jnp.zeros((batch, heads, seq, dim)), jnp.full((batch, heads, seq), -1e30))
    (mean, _), _ = lax.scan(step, start, (jnp.arange(0, seq, chunk), cut(k), cut(v)))
    return jnp.swapaxes(mean, 1, 2)


def without_masked_chunks(q, k, v, chunk):
    """Queries in chunks, each with the keys that it may see: about half of the work."""
    seq, dim = q.shape[1], q.shape[3]
    found = []
    for end in range(chunk, seq + 1, chunk):

        @jax.checkpoint
        def attend(rows, keys, values, end=end):
            scores = jnp.einsum("bqhd,bkhd->bhqk", rows, keys) * dim**-0.5
            own = jnp.arange(end - chunk, end)
            weights = jax.nn.softmax(jnp.where(own[:, None] >= jnp.arange(end), scores, -jnp.inf), axis=-1)
            return jnp.einsum("bhqk,bkhd->bqhd", weights, values)

        found.append(attend(q[:, end - chunk : end], k[:, :end], v[:, :end]))
    return jnp.concatenate(found, axis=1)


ALTERNATIVES = (
    with_queries_in_chunks_too,
    one_chunk_of_queries_at_a_time,
    in_a_python_loop,
    by_logsumexp,
    without_masked_chunks,
)
