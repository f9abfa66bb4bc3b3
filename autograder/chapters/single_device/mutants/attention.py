"""Wrong answers for ``chunked_attention``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from solutions.single_device import chunked_attention

VALUES, GRADIENTS = "values", "gradients"
LARGEST, TEMPORARIES, FLOPS = "largest temporary", "live temporaries", "FLOPs"


@dataclass(frozen=True)
class How:
    """What differs from a right scan over chunks."""

    wrap: Callable[[Any], Any] = jax.checkpoint
    rescale_total: bool = True
    rescale_mixed: bool = True
    divide: bool = True
    maximum: bool = True
    scale: bool = True
    shift: int = 0
    causal: bool = True
    dtype: Any = jnp.float32
    loop: bool = False
    around: Callable[[Any], Any] = lambda f: f


def _attend(how: How, q: Any, k: Any, v: Any, chunk: int) -> Any:
    batch, seq, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if how.scale else 1.0

    def cut(x):
        return jnp.moveaxis(x.reshape(batch, seq // chunk, chunk, num_heads, head_dim), 1, 0)

    def run(q, k, v):
        def step(carry, piece):
            largest, total, mixed = carry
            start, keys, values = piece
            scores = jnp.einsum("bqhd,bkhd->bhqk", (q * scale).astype(how.dtype), keys.astype(how.dtype))
            scores = scores.astype(jnp.float32)
            allowed = jnp.arange(seq)[:, None] >= start + jnp.arange(chunk) + how.shift
            scores = jnp.where(allowed, scores, -1e30) if how.causal else scores
            now = lax.stop_gradient(jnp.maximum(largest, scores.max(-1))) if how.maximum else largest
            weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
            total = total * (shrink if how.rescale_total else 1.0) + weights.sum(-1)
            mixed = mixed * (shrink[..., None] if how.rescale_mixed else 1.0)
            return (now, total, mixed + jnp.einsum("bhqk,bkhd->bhqd", weights, values)), None

        nothing = jnp.zeros((batch, num_heads, seq))
        start = (nothing - (1e30 if how.maximum else 0), nothing, jnp.zeros((batch, num_heads, seq, head_dim)))
        pieces = (jnp.arange(0, seq, chunk), cut(k), cut(v))
        if how.loop:
            carry = start
            for i in range(seq // chunk):
                carry, _ = step(carry, jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        else:
            carry, _ = lax.scan(how.wrap(step), start, pieces)
        _, total, mixed = carry
        return jnp.moveaxis(mixed / total[..., None] if how.divide else mixed, 1, 2)

    return how.around(run)(q, k, v)


def keeps_the_square(q, k, v, chunk):
    """Attention as it stands in books."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def keeps_every_chunk(q, k, v, chunk):
    """In chunks, but what the backward pass needs of each is kept: stacked, it is the square."""
    return _attend(How(wrap=lambda f: f), q, k, v, chunk)


def keeps_every_chunk_apart(q, k, v, chunk):
    """The same unrolled: no single array is large, all together are."""
    return _attend(How(wrap=lambda f: f, loop=True), q, k, v, chunk)


def checkpoints_all_chunks_at_once(q, k, v, chunk):
    """While the backward pass runs, the square is there."""
    return _attend(How(wrap=lambda f: f, around=jax.checkpoint), q, k, v, chunk)


def recomputes_twice(q, k, v, chunk):
    return _attend(How(around=jax.checkpoint), q, k, v, chunk)


def recomputes_three_times(q, k, v, chunk):
    return _attend(How(around=lambda f: jax.checkpoint(jax.checkpoint(f))), q, k, v, chunk)


def takes_the_maximum_of_all_scores_first(q, k, v, chunk):
    """Two passes over the keys, the first one for the largest score: an array of the square's size again."""
    largest = jnp.max(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
    return _attend(How(), q, k, v, chunk) + 0 * jnp.moveaxis(largest, 1, 2)[..., None]


def forgets_the_maximum(q, k, v, chunk):
    """``exp`` overflows beyond 88."""
    return _attend(How(maximum=False), q, k, v, chunk)


def forgets_to_correct_the_sum(q, k, v, chunk):
    return _attend(How(rescale_total=False), q, k, v, chunk)


def forgets_to_correct_the_values(q, k, v, chunk):
    return _attend(How(rescale_mixed=False), q, k, v, chunk)


def forgets_to_divide(q, k, v, chunk):
    return _attend(How(divide=False), q, k, v, chunk)


def forgets_to_scale(q, k, v, chunk):
    return _attend(How(scale=False), q, k, v, chunk)


def sees_the_future(q, k, v, chunk):
    return _attend(How(causal=False), q, k, v, chunk)


def does_not_see_itself(q, k, v, chunk):
    """Off by one: a query sees only the keys before it."""
    return _attend(How(shift=1), q, k, v, chunk)


def averages_chunks(q, k, v, chunk):
    """A softmax within each chunk, and the mean of what they give."""
    batch, seq, num_heads, head_dim = q.shape

    def cut(x):
        return jnp.moveaxis(x.reshape(batch, seq // chunk, chunk, num_heads, head_dim), 1, 0)

    @jax.checkpoint
    def step(total, piece):
        start, keys, values = piece
        scores = jnp.einsum("bqhd,bkhd->bhqk", q * head_dim**-0.5, keys)
        allowed = jnp.arange(seq)[:, None] >= start + jnp.arange(chunk)
        weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), axis=-1)
        return total + jnp.einsum("bhqk,bkhd->bqhd", weights, values), None

    pieces = (jnp.arange(0, seq, chunk), cut(k), cut(v))
    return lax.scan(step, jnp.zeros_like(q), pieces)[0] / (seq // chunk)


def multiplies_in_bfloat16(q, k, v, chunk):
    return _attend(How(dtype=jnp.bfloat16), q, k, v, chunk)


def freezes_keys(q, k, v, chunk):
    return chunked_attention(q, lax.stop_gradient(k), v, chunk)


TASK = "chunked_attention"
MUTANTS = (
    mutant(TASK, keeps_the_square, LARGEST, TEMPORARIES),
    mutant(TASK, keeps_every_chunk, LARGEST, TEMPORARIES),
    mutant(TASK, keeps_every_chunk_apart, TEMPORARIES),
    mutant(TASK, checkpoints_all_chunks_at_once, LARGEST, TEMPORARIES),
    mutant(TASK, recomputes_twice, FLOPS),
    mutant(TASK, recomputes_three_times, FLOPS),
    mutant(TASK, takes_the_maximum_of_all_scores_first, LARGEST, TEMPORARIES, FLOPS),
    mutant(TASK, forgets_the_maximum, VALUES, GRADIENTS),
    mutant(TASK, forgets_to_correct_the_sum, VALUES, GRADIENTS),
    mutant(TASK, forgets_to_correct_the_values, VALUES, GRADIENTS),
    mutant(TASK, forgets_to_divide, VALUES, GRADIENTS),
    mutant(TASK, forgets_to_scale, VALUES, GRADIENTS),
    mutant(TASK, sees_the_future, VALUES, GRADIENTS),
    mutant(TASK, does_not_see_itself, VALUES, GRADIENTS),
    mutant(TASK, averages_chunks, VALUES, GRADIENTS),
    mutant(TASK, multiplies_in_bfloat16, VALUES, GRADIENTS),
    mutant(TASK, freezes_keys, GRADIENTS),
)
