"""Wrong answers for ``execute_looping_pipeline``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from autograder.chapters.looping_pipeline.mutants.names import BUBBLE, GRADIENTS, OTHERS, PERMUTED, VALUES
from autograder.proof.mutants import mutant
from solutions.looping_pipeline import execute_looping_pipeline

NAME = "execute_looping_pipeline"


def _send(y, axis_name, num_stages):
    return lax.ppermute(y, axis_name, [(i, (i + 1) % num_stages) for i in range(num_stages)])


def looped(
    stage: Any, microbatches: Any, num_repeats: int, axis_name: str, *, period: int = 0, num_stages: int = 0,
    takes: Any = None, repeat_of: Any = None, microbatch_of: Any = None, send: Any = _send, more: int = 0
) -> Any:  # fmt: skip
    """The schedule with parts that can be replaced; ``more`` ticks at its end."""
    count, index = len(microbatches), lax.axis_index(axis_name)
    num_stages = num_stages or lax.axis_size(axis_name)
    period = period or max(count, num_stages)

    def tick(carry, t):
        waiting, arrived = carry
        back = (t - num_stages) % period
        slot = jnp.minimum(back, count - 1)
        returned = (t >= num_stages) & (back < count)
        waiting = waiting.at[slot].set(jnp.where(returned, arrived, waiting[slot]))
        since = jnp.maximum(t - index, 0)
        microbatch = jnp.minimum((microbatch_of or (lambda t, since: since % period))(t, since), count - 1)
        repeat = jnp.minimum((repeat_of or (lambda t, since: since // period))(t, since), num_repeats - 1)
        x = takes(waiting, arrived, microbatch) if takes else jnp.where(index == 0, waiting[microbatch], arrived)
        y = stage(x, microbatch, repeat)
        return (waiting, send(y, axis_name, num_stages)), y

    start = microbatches, jnp.zeros_like(microbatches[0])
    ticks = jnp.arange((num_repeats - 1) * period + count + num_stages - 1 + more)
    _, outputs = lax.scan(tick, start, ticks)
    return outputs[len(outputs) - more - count :][:count]


def drains_between_repeats(stage, microbatches, num_repeats, axis_name):
    """One plain pipeline after the other."""
    period = len(microbatches) + lax.axis_size(axis_name) - 1
    return looped(stage, microbatches, num_repeats, axis_name, period=period)


def begins_a_repeat_too_early(stage, microbatches, num_repeats, axis_name):
    """As soon as all microbatches are in: right with as many of them as stages, or more."""
    return looped(stage, microbatches, num_repeats, axis_name, period=len(microbatches))


def begins_a_repeat_with_the_first(stage, microbatches, num_repeats, axis_name):
    """As soon as the first microbatch is back: right with as many of them as stages, or fewer."""
    return looped(stage, microbatches, num_repeats, axis_name, period=lax.axis_size(axis_name))


def rounds_microbatches_up(stage, microbatches, num_repeats, axis_name):
    """To a multiple of the stages: right values, and idle ticks in every repeat."""
    stages = lax.axis_size(axis_name)
    period = -(-len(microbatches) // stages) * stages
    return looped(stage, microbatches, num_repeats, axis_name, period=period)


def has_four_stages(stage, microbatches, num_repeats, axis_name):
    return looped(stage, microbatches, num_repeats, axis_name, num_stages=4)


def keeps_nothing_waiting(stage, microbatches, num_repeats, axis_name):
    """Stage 0 takes what has just arrived, in every repeat but the first."""
    index, turn = lax.axis_index(axis_name), []

    def repeat_of(t, since):
        turn.append(since // len(microbatches))
        return turn[-1]

    def takes(waiting, arrived, microbatch):
        first = (index == 0) & (turn[-1] == 0)
        return jnp.where(first, microbatches[microbatch], arrived)

    return looped(stage, microbatches, num_repeats, axis_name, repeat_of=repeat_of, takes=takes)


def feeds_every_stage(stage, microbatches, num_repeats, axis_name):
    """All stages take the inputs, and what is sent is lost on all but the first."""
    return looped(
        stage, microbatches, num_repeats, axis_name, takes=lambda waiting, arrived, microbatch: waiting[microbatch]
    )


def changes_weights_everywhere_at_once(stage, microbatches, num_repeats, axis_name):
    """The repeat from the tick alone: later stages change their weights too early."""
    period = max(len(microbatches), lax.axis_size(axis_name))
    return looped(stage, microbatches, num_repeats, axis_name, repeat_of=lambda t, since: t // period)


def numbers_microbatches_by_ticks(stage, microbatches, num_repeats, axis_name):
    """Tells later stages the number of the microbatch that stage 0 has."""
    period, index = max(len(microbatches), lax.axis_size(axis_name)), lax.axis_index(axis_name)

    def numbered(x, microbatch, repeat):
        return stage(x, (microbatch + index) % len(microbatches), repeat)

    return looped(numbered, microbatches, num_repeats, axis_name, period=period)


def gathers_the_outputs(stage, microbatches, num_repeats, axis_name):
    """Gives every stage what the last one has."""
    outputs = execute_looping_pipeline(stage, microbatches, num_repeats, axis_name)
    return lax.all_gather(outputs, axis_name)[-1]


def sends_in_bfloat16(stage, microbatches, num_repeats, axis_name):
    def send(y, axis_name, num_stages):
        return _send(y.astype(jnp.bfloat16), axis_name, num_stages).astype(y.dtype)

    return looped(stage, microbatches, num_repeats, axis_name, send=send)


def stops_gradients_between_stages(stage, microbatches, num_repeats, axis_name):
    def send(y, axis_name, num_stages):
        return lax.stop_gradient(_send(y, axis_name, num_stages))

    return looped(stage, microbatches, num_repeats, axis_name, send=send)


def computes_both_inputs(stage, microbatches, num_repeats, axis_name):
    """Computes what waits and what arrived, and then chooses: each tick takes twice as long."""
    index, found = lax.axis_index(axis_name), []

    def takes(waiting, arrived, microbatch):
        found[:] = [waiting[microbatch], arrived]
        return arrived

    def both(x, microbatch, repeat):
        return jnp.where(index == 0, *(stage(one, microbatch, repeat) for one in found))

    return looped(both, microbatches, num_repeats, axis_name, takes=takes)


def runs_a_tick_too_many(stage, microbatches, num_repeats, axis_name):
    return looped(stage, microbatches, num_repeats, axis_name, more=1)


def shifts_the_microbatches(stage, microbatches, num_repeats, axis_name):
    """Off by one: the outputs of one microbatch stand in the place of the next."""
    return jnp.roll(looped(stage, microbatches, num_repeats, axis_name), 1, 0)


MUTANTS = (
    mutant(NAME, drains_between_repeats, BUBBLE, PERMUTED),
    mutant(NAME, begins_a_repeat_too_early, VALUES, GRADIENTS, BUBBLE, shown_by=("data=2 x pipe=4, 2 microbatches",)),
    mutant(NAME, begins_a_repeat_with_the_first, VALUES, GRADIENTS),
    mutant(NAME, rounds_microbatches_up, PERMUTED),
    mutant(NAME, has_four_stages, VALUES, GRADIENTS, shown_by=("pipe=8, 8 microbatches",)),
    mutant(NAME, keeps_nothing_waiting, VALUES, GRADIENTS),
    mutant(NAME, feeds_every_stage, VALUES, GRADIENTS),
    mutant(NAME, changes_weights_everywhere_at_once, VALUES, GRADIENTS),
    mutant(NAME, numbers_microbatches_by_ticks, VALUES, GRADIENTS),
    mutant(NAME, gathers_the_outputs, OTHERS),
    mutant(NAME, sends_in_bfloat16, VALUES, GRADIENTS),
    mutant(NAME, stops_gradients_between_stages, GRADIENTS),
    mutant(NAME, computes_both_inputs, BUBBLE),
    mutant(NAME, runs_a_tick_too_many, BUBBLE, PERMUTED),
    mutant(NAME, shifts_the_microbatches, VALUES, GRADIENTS),
)
