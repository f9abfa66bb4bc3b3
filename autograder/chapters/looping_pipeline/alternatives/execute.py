"""Right answers for ``execute_looping_pipeline`` in another style."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def around(axis_name):
    size = lax.axis_size(axis_name)
    return [(i, (i + 1) % size) for i in range(size)]


def skipping_idle_ticks(stage, microbatches, num_repeats, axis_name):
    """A counted loop that computes only where there is work, and writes results into a buffer of their own."""
    count, size, index = len(microbatches), lax.axis_size(axis_name), lax.axis_index(axis_name)
    period = max(count, size)

    def tick(t, carry):
        waiting, arrived, outputs = carry
        repeat, microbatch = jnp.divmod(t - index, period)
        busy = (repeat >= 0) & (repeat < num_repeats) & (microbatch < count)
        place = jnp.where(busy, microbatch, 0)
        first = (index == 0) & (repeat == 0)
        x = jnp.where(first, microbatches[place], jnp.where(index == 0, waiting[t % period], arrived))
        y = lax.cond(busy, lambda: stage(x, place, repeat), lambda: x)
        outputs = jnp.where(busy, outputs.at[place].set(y), outputs)
        arrived = lax.ppermute(y, axis_name, around(axis_name))
        # It comes back to stage 0 at the next tick, and is used a whole number of periods after its first tick.
        return waiting.at[(t + 1 - size) % period].set(arrived), arrived, outputs

    nothing = jnp.zeros_like(microbatches[0])
    waiting = jnp.zeros_like(microbatches, shape=(period, *nothing.shape))
    ticks = (num_repeats - 1) * period + count + size - 1
    # A counted loop of known length can be differentiated.
    return lax.fori_loop(0, ticks, tick, (waiting, nothing, jnp.zeros_like(microbatches)))[2]


def in_a_queue(stage, microbatches, num_repeats, axis_name):
    """What comes back joins the end of a queue that moves up by one each tick."""
    count, size, index = len(microbatches), lax.axis_size(axis_name), lax.axis_index(axis_name)
    period = max(count, size)
    padding = jnp.zeros_like(microbatches, shape=(period - count, *microbatches.shape[1:]))

    def tick(carry, t):
        queue, arrived = carry
        # Stage 0's inputs of the next period ticks; what arrives now was its input size ticks ago.
        queue = jnp.where(t >= size, queue.at[(period - size) % period].set(arrived), queue)
        turn = jnp.clip(t - index, 0, num_repeats * period - 1)
        x = jnp.where(index == 0, queue[0], arrived)
        y = stage(x, jnp.minimum(turn % period, count - 1), turn // period)
        return (jnp.roll(queue, -1, 0), lax.ppermute(y, axis_name, around(axis_name))), y

    start = jnp.concatenate([microbatches, padding]), jnp.zeros_like(microbatches[0])
    ticks = (num_repeats - 1) * period + count + size - 1
    return lax.scan(tick, start, jnp.arange(ticks))[1][ticks - count :]


def repeat_by_repeat(stage, microbatches, num_repeats, axis_name):
    """A scan over repeats around one over ticks, and what the last stage gives late after both."""
    count, size, index = len(microbatches), lax.axis_size(axis_name), lax.axis_index(axis_name)
    period = max(count, size)

    def one(carry, t):
        waiting, arrived = carry
        lands = (t - size) % period
        kept = jnp.where((t >= size) & (jnp.arange(count) == lands)[:, None, None], arrived, waiting)
        repeat, microbatch = jnp.divmod(jnp.maximum(t - index, 0), period)
        microbatch = jnp.minimum(microbatch, count - 1)
        x = lax.select(index == 0, lax.dynamic_index_in_dim(kept, microbatch, keepdims=False), arrived)
        y = stage(x, microbatch, jnp.minimum(repeat, num_repeats - 1))
        return (kept, lax.ppermute(y, axis_name, around(axis_name))), y

    def block(carry, repeat):
        return lax.scan(one, carry, repeat * period + jnp.arange(period))[0], None

    carry = microbatches, jnp.zeros_like(microbatches[0])
    carry, _ = lax.scan(block, carry, jnp.arange(num_repeats - 1))
    last = (num_repeats - 1) * period + jnp.arange(count + size - 1)
    return lax.scan(one, carry, last)[1][size - 1 :]


ALTERNATIVES = (skipping_idle_ticks, in_a_queue, repeat_by_repeat)
