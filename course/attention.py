"""Causal attention between chunks of sequences that several devices share: the forward pass, and the backward pass.

A sequence is cut into equal chunks, numbered in order. A device has some of them, one after the other along the
``seq`` dim, and knows their numbers. Queries of an earlier chunk see no keys of a later one: such pairs are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import as_varying, varying_axes

# The largest number of keys whose scores exist at the same time: memory grows with the number of queries alone.
KEYS_AT_ONCE = 1024


# --8<-- [start:attend_chunks]
def attend_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, q_chunks: jax.Array, k_chunks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of some chunks of queries to some chunks of keys and values.

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

    def one(q, number):
        def add(carry, keys, values, allowed):
            largest, total, mixed = carry
            scores = jnp.where(allowed, _scores(q, keys), -jnp.inf)
            now = jnp.maximum(largest, scores.max(-1))
            weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
            mixed = mixed * shrink[..., None] + jnp.einsum("bkgqs,bskd->bkgqd", weights, values)
            return (now, total * shrink + weights.sum(-1), mixed), ()

        nothing = jnp.zeros(q.shape[:-1])
        carry = _alike((nothing - 1e30, nothing, jnp.zeros_like(q)), (q, k, v))
        for keys, values, theirs in zip(_cut(k, k_chunks), _cut(v, k_chunks), k_chunks, strict=True):
            carry, _ = _if_seen(add, carry, keys, values, number, theirs)
        largest, total, mixed = carry
        seen = total > 0
        total = jnp.where(seen, total, 1)
        return mixed / total[..., None], jnp.where(seen, largest + jnp.log(total), -jnp.inf)

    found = [one(part, number) for part, number in zip(_in_groups(q, k, q_chunks), q_chunks, strict=True)]
    out, lse = (jnp.concatenate(parts, 3) for parts in zip(*found, strict=True))
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
        q: As for ``attend_chunks``, like ``k`` and ``v``.
        k: These keys.
        v: These values.
        out: The finished attention of ``q``, to the keys of *all* chunks.
        lse: Its log-sum-exp, over all chunks too.
        upstream: The gradient of the loss by ``out``.
        q_chunks: As for ``attend_chunks``.
        k_chunks: As for ``attend_chunks``.

    Returns:
        What these keys add to the gradient of ``q``, and what these queries add to those of ``k`` and ``v``.
    """
    inner = jnp.sum(out * upstream, axis=-1, keepdims=True)
    arrays = (q, upstream, lse[..., None], inner)
    of_q, of_k, of_v = [], [0.0] * len(k_chunks), [0.0] * len(k_chunks)
    for queries, number in zip(zip(*(_in_groups(x, k, q_chunks) for x in arrays), strict=True), q_chunks, strict=True):

        def add(total, keys, values, allowed, queries=queries):
            q, upstream, lse, inner = queries
            weights = jnp.where(allowed, jnp.exp(_scores(q, keys) - lse), 0)
            of_scores = weights * (jnp.einsum("bkgqd,bskd->bkgqs", upstream, values) - inner) * q.shape[-1] ** -0.5
            of_keys = jnp.einsum("bkgqs,bkgqd->bskd", of_scores, q)
            of_values = jnp.einsum("bkgqs,bkgqd->bskd", weights, upstream)
            return total + jnp.einsum("bkgqs,bskd->bkgqd", of_scores, keys), (of_keys, of_values)

        (total,) = _alike((jnp.zeros_like(queries[0]),), (q, k, v, upstream))
        for i, (keys, values) in enumerate(zip(_cut(k, k_chunks), _cut(v, k_chunks), strict=True)):
            total, (more_k, more_v) = _if_seen(add, total, keys, values, number, k_chunks[i])
            of_k[i], of_v[i] = of_k[i] + more_k, of_v[i] + more_v
        of_q.append(total)
    return _in_heads(jnp.concatenate(of_q, 3), q.shape), jnp.concatenate(of_k, 1), jnp.concatenate(of_v, 1)


def _if_seen(add: Callable[..., Any], carry: Any, keys: jax.Array, values: jax.Array, number: Any, theirs: Any) -> Any:
    """Call ``add`` for pieces of a chunk of keys, if the chunk ``number`` of queries sees any of them.

    Returns:
        The last ``carry``, and the other results of ``add``, joined along their ``keys`` dim; zeros if nothing is seen.
    """
    length = keys.shape[1]
    piece = min(length, KEYS_AT_ONCE)
    if length % piece:
        raise ValueError(f"a chunk of {length} keys is not a multiple of {KEYS_AT_ONCE}")

    def step(carry, start):
        part = (lax.dynamic_slice_in_dim(x, start, piece, 1) for x in (keys, values))
        places = jnp.arange(length)[:, None] + (number - theirs) * length
        return add(carry, *part, places >= start + jnp.arange(piece))

    def seen(carry):
        carry, more = lax.scan(step, carry, jnp.arange(0, length, piece))
        return carry, tuple(jnp.moveaxis(x, 0, 1).reshape(x.shape[1], length, *x.shape[3:]) for x in more)

    def skip(carry):
        return carry, jax.tree.map(lambda x: _alike((jnp.zeros(x.shape, x.dtype),), (x,))[0], of_seen)

    of_seen = jax.eval_shape(seen, carry)[1]
    return lax.cond(number >= theirs, seen, skip, carry)


def _scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    return jnp.einsum("bkgqd,bskd->bkgqs", q, keys) * q.shape[-1] ** -0.5


def _cut(x: jax.Array, chunks: jax.Array) -> list[jax.Array]:
    return jnp.split(x, len(chunks), 1)


def _in_groups(x: jax.Array, k: jax.Array, chunks: jax.Array) -> list[jax.Array]:
    """``[batch, queries, num_heads, d]`` as one array a chunk, ``[batch, num_kv_heads, group, length, d]``."""
    grouped = x.reshape(*x.shape[:2], k.shape[2], -1, x.shape[-1])
    return jnp.split(jnp.moveaxis(grouped, 1, 3), len(chunks), 3)


def _in_heads(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``_in_groups``, for all chunks together."""
    return jnp.moveaxis(x, 3, 1).reshape(shape)


def _alike(arrays: tuple[jax.Array, ...], others: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """``arrays``, each typed as varying over the axes over which any of ``others`` varies."""
    for axis in sorted(frozenset().union(*map(varying_axes, others))):
        arrays = tuple(as_varying(array, axis) for array in arrays)
    return arrays
