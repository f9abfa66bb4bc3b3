"""Right answers for ``pipeline_tick`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def with_cond(stage, microbatches, arrived, tick, axis_name):
    """Idle stages do nothing, and the first stage picks its input in a branch."""
    number, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
    count = microbatches.shape[0]
    microbatch = tick - number
    x = lax.cond(
        number == 0,
        lambda: lax.dynamic_index_in_dim(microbatches, jnp.minimum(tick, count - 1), keepdims=False),
        lambda: arrived,
    )
    busy = (microbatch >= 0) & (microbatch < count)
    y = lax.cond(busy, lambda x: stage(x, microbatch), lambda x: x, x)
    return y, lax.ppermute(y, axis_name, [(i, (i + 1) % size) for i in range(size)])


def with_a_ring(stage, microbatches, arrived, tick, axis_name):
    """Every stage reads its own microbatch, and what the last stage sends comes back to the first one."""
    number, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
    microbatch = jnp.clip(tick - number, 0, len(microbatches) - 1)
    first = (number == 0).astype(arrived.dtype)
    y = stage(first * microbatches[microbatch] + (1 - first) * arrived, microbatch)
    return y, lax.ppermute(y, axis_name, [((i - 1) % size, i) for i in range(size)])


def with_zeros_when_idle(stage, microbatches, arrived, tick, axis_name):
    """Garbage is thrown away at once."""
    number, last = lax.axis_index(axis_name), lax.axis_size(axis_name) - 1
    count = microbatches.shape[0]
    entering = jnp.take(microbatches, tick, axis=0, mode="clip")
    y = stage(lax.select(jnp.broadcast_to(number == 0, arrived.shape), entering, arrived), tick - number)
    busy = jnp.logical_and(tick >= number, tick < number + count)
    y = jnp.where(busy, y, jnp.zeros_like(y))
    return y, lax.ppermute(y, axis_name, perm=list(zip(range(last), range(1, last + 1), strict=True)))


def with_a_switch(stage, microbatches, arrived, tick, axis_name):
    """``lax.switch`` over what a stage is: the first one or not."""
    number, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
    own = jax.tree.map(lambda leaf: leaf[jnp.clip(tick, max=leaf.shape[0] - 1)], microbatches)
    x = lax.switch(jnp.minimum(number, 1), [lambda own, arrived: own, lambda own, arrived: arrived], own, arrived)
    y = stage(x, tick - number)
    return y, lax.ppermute(y, axis_name, [(i, i + 1) for i in range(size - 1)])


ALTERNATIVES = (with_cond, with_a_ring, with_zeros_when_idle, with_a_switch)
