"""Causal attention between chunks of sequences that several devices share: the forward pass, and the backward pass.

A sequence is cut into equal chunks, numbered in order. A device has some of them, one after the other along the
``seq`` dim, and knows their numbers. Keys that come after all queries of a chunk are skipped.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import varying, varying_axes

# Scores of at most this many keys exist at the same time, so memory grows with the number of queries alone.
KEYS_AT_ONCE = 1024


# --8<-- [start:attend_chunks]
def attend_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, q_chunks: jax.Array, k_chunks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Causal attention from some chunks of queries to some chunks of keys and values.

    Args:
        q: Queries ``[batch, queries, num_heads, head_dim]``.
        k: Keys ``[batch, keys, num_kv_heads, head_dim]``; each of their heads serves consecutive heads of ``q``.
        v: Values, like ``k``.
        q_chunks: The number of each chunk of ``q``, ``[chunks]``.
        k_chunks: The number of each chunk of ``k`` and ``v``; all chunks have the same length.

    Returns:
        ``(out, lse)``: the weighted means of the values, like ``q``, and the logarithm of the sum of the
        exponentials of each query's scores, ``[batch, queries, num_heads]``. Where a query sees none of the keys,
        they are 0 and minus infinity.
    """

    def of_chunk(chunk):
        q, first = chunk

        def add(carry, piece):
            keys, values, start = piece

            @jax.checkpoint  # else a caller's checkpoint keeps the masks of all pieces
            def seen(carry):
                largest, total, mixed = carry
                scores = jnp.where(_allowed(q, first, keys, start), _scores(q, keys), -jnp.inf)
                now = jnp.maximum(largest, scores.max(-1))
                weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
                mixed = mixed * shrink[..., None] + jnp.einsum("bkgqs,bskd->bkgqd", weights, values)
                return now, total * shrink + weights.sum(-1), mixed

            return lax.cond(start < first + q.shape[3], seen, lambda carry: carry, carry), None

        nothing = jnp.zeros(q.shape[:-1])
        carry = _alike((nothing - 1e30, nothing, jnp.zeros_like(q)), (q, k, v))
        (largest, total, mixed), _ = lax.scan(add, carry, pieces)
        seen = total > 0
        total = jnp.where(seen, total, 1)
        return mixed / total[..., None], jnp.where(seen, largest + jnp.log(total), -jnp.inf)

    pieces = _in_pieces(k, k_chunks), _in_pieces(v, k_chunks), _starts(k, k_chunks)
    out, lse = lax.map(of_chunk, (_in_groups(q, k, q_chunks), q_chunks * (q.shape[1] // len(q_chunks))))
    return _in_heads(out, q.shape), _in_heads(lse, q.shape[:-1])


# --8<-- [end:attend_chunks]


def attend_chunks_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    upstream: jax.Array,
    q_chunks: jax.Array,
    k_chunks: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The part of attention's gradients that comes from these chunks of keys and values.

    Args:
        q: As for ``attend_chunks``.
        k: As for ``attend_chunks``.
        v: As for ``attend_chunks``.
        out: The finished attention of ``q`` to the keys of *all* chunks.
        lse: Its log-sum-exp, also over all chunks.
        upstream: The gradient of the loss with respect to ``out``.
        q_chunks: As for ``attend_chunks``.
        k_chunks: As for ``attend_chunks``.

    Returns:
        The contributions of these keys to the gradient of ``q``, and of these queries to those of ``k`` and ``v``.
    """
    inner = jnp.sum(out * upstream, axis=-1, keepdims=True)

    def of_chunk(of_kv, chunk):
        q, upstream, lse, inner, first = chunk

        def add(of_q, piece):
            keys, values, start = piece

            @jax.checkpoint  # else a caller's checkpoint keeps the masks of all pieces
            def seen(of_q):
                weights = jnp.where(_allowed(q, first, keys, start), jnp.exp(_scores(q, keys) - lse), 0)
                of_scores = weights * (jnp.einsum("bkgqd,bskd->bkgqs", upstream, values) - inner) * q.shape[-1] ** -0.5
                of_keys = jnp.einsum("bkgqs,bkgqd->bskd", of_scores, q)
                of_values = jnp.einsum("bkgqs,bkgqd->bskd", weights, upstream)
                return of_q + jnp.einsum("bkgqs,bskd->bkgqd", of_scores, keys), of_keys, of_values

            nothing = _alike((jnp.zeros_like(keys), jnp.zeros_like(values)), (q, k, v, upstream))
            of_q, *of_piece = lax.cond(start < first + q.shape[3], seen, lambda of_q: (of_q, *nothing), of_q)
            return of_q, tuple(of_piece)

        (of_q,) = _alike((jnp.zeros_like(q),), (q, k, v, upstream))
        of_q, of_pieces = lax.scan(add, of_q, pieces)
        return jax.tree.map(jnp.add, of_kv, of_pieces), of_q

    pieces = _in_pieces(k, k_chunks), _in_pieces(v, k_chunks), _starts(k, k_chunks)
    zeros = _alike(tuple(map(jnp.zeros_like, pieces[:2])), (q, k, v, upstream))
    chunks = (
        *(_in_groups(x, k, q_chunks) for x in (q, upstream, lse[..., None], inner)),
        q_chunks * (q.shape[1] // len(q_chunks)),
    )
    of_kv, of_q = lax.scan(of_chunk, zeros, chunks)
    of_k, of_v = (jnp.moveaxis(x, 0, 1).reshape(k.shape) for x in of_kv)
    return _in_heads(of_q, q.shape), of_k, of_v


def _scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    return jnp.einsum("bkgqd,bskd->bkgqs", q, keys) * q.shape[-1] ** -0.5


def _allowed(q: jax.Array, first: jax.Array, keys: jax.Array, start: jax.Array) -> jax.Array:
    """Mask of the keys of a piece that each query sees, ``[queries, keys]``; ``first`` and ``start`` are positions."""
    return first + jnp.arange(q.shape[3])[:, None] >= start + jnp.arange(keys.shape[1])


def _piece(x: jax.Array, chunks: jax.Array) -> int:
    """The number of keys in a piece.

    Raises:
        ValueError: A chunk has more keys than fit in one piece, and not a multiple of that number.
    """
    length = x.shape[1] // len(chunks)
    if length % min(length, KEYS_AT_ONCE):
        raise ValueError(f"a chunk of {length} keys is not a multiple of {KEYS_AT_ONCE}")
    return min(length, KEYS_AT_ONCE)


def _starts(x: jax.Array, chunks: jax.Array) -> jax.Array:
    """The position in the sequence at which each piece begins."""
    length = x.shape[1] // len(chunks)
    return (chunks[:, None] * length + jnp.arange(0, length, _piece(x, chunks))).reshape(-1)


def _in_pieces(x: jax.Array, chunks: jax.Array) -> jax.Array:
    """``[batch, keys, ...]`` as ``[pieces, batch, piece, ...]``."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, _piece(x, chunks), *x.shape[2:]), 1, 0)


def _in_groups(x: jax.Array, k: jax.Array, chunks: jax.Array) -> jax.Array:
    """``[batch, queries, num_heads, d]`` as ``[chunks, batch, num_kv_heads, group, length, d]``."""
    batch, queries, _, d = x.shape
    split = x.reshape(batch, len(chunks), queries // len(chunks), k.shape[2], -1, d)
    return split.transpose(1, 0, 3, 4, 2, 5)


def _in_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``_in_groups``, with or without its last dim."""
    return jnp.moveaxis(jnp.moveaxis(x, 0, 3), (3, 4), (1, 2)).reshape(shape)


def _alike(arrays: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    """``arrays``, each typed as varying over the axes over which any of ``others`` varies."""
    return varying(arrays, sorted(frozenset().union(*map(varying_axes, others))))
