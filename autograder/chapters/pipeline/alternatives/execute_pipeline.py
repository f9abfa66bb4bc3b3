"""Right answers for ``execute_pipeline`` in another style."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from solutions.pipeline import pipeline_tick


def unrolled(stage, microbatches, axis_name):
    """A Python loop over ticks, and a list of what the last ones gave."""
    stages, outputs = lax.axis_size(axis_name), []
    arrived = jnp.zeros_like(microbatches[0])
    for tick in range(microbatches.shape[0] + stages - 1):
        y, arrived = pipeline_tick(stage, microbatches, arrived, jnp.int32(tick), axis_name)
        if tick >= stages - 1:
            outputs.append(y)
    return jnp.stack(outputs)


def with_outputs_in_the_carry(stage, microbatches, axis_name):
    """Each stage writes what it gives for a microbatch into its own row of a buffer."""
    stages, count = lax.axis_size(axis_name), microbatches.shape[0]
    number = lax.axis_index(axis_name)

    def step(carry, tick):
        arrived, outputs = carry
        y, sent = pipeline_tick(stage, microbatches, arrived, tick, axis_name)
        at = jnp.clip(tick - number, 0, count - 1)
        busy = (tick - number >= 0) & (tick - number < count)
        kept = jnp.where(busy, y, outputs[at])
        return (sent, lax.dynamic_update_index_in_dim(outputs, kept, at, 0)), None

    start = (jnp.zeros_like(microbatches[0]), jnp.zeros_like(microbatches))
    (_, outputs), _ = lax.scan(step, start, jnp.arange(count + stages - 1))
    return outputs


def with_the_last_tick_apart(stage, microbatches, axis_name):
    """Microbatches are fed by the scan, and after the last tick nothing is sent any more."""
    stages, number = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chain = [(i, i + 1) for i in range(stages - 1)]
    feed = jnp.concatenate([microbatches, jnp.zeros_like(microbatches, shape=(stages - 1, *microbatches.shape[1:]))])

    def compute(arrived, tick, entering):
        return stage(jnp.where(number == 0, entering, arrived), tick - number)

    def step(arrived, inputs):
        y = compute(arrived, *inputs)
        return lax.ppermute(y, axis_name, chain), y

    ticks = jnp.arange(feed.shape[0])
    arrived, outputs = lax.scan(step, jnp.zeros_like(microbatches[0]), (ticks[:-1], feed[:-1]))
    y = compute(arrived, ticks[-1], feed[-1])
    return jnp.concatenate([outputs, y[None]])[stages - 1 :]


ALTERNATIVES = (unrolled, with_outputs_in_the_carry, with_the_last_tick_apart)
