"""Wrong answers for ``execute_pipeline``."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from autograder.chapters.pipeline.mutants.names import BUBBLE, GRADIENTS, OTHERS, PERMUTED, VALUES
from autograder.proof.mutants import mutant
from solutions.pipeline import execute_pipeline, pipeline_tick


def _run(stage, microbatches, axis_name, ticks, tick=pipeline_tick):
    """So many ticks; what every tick gave."""

    def step(arrived, number):
        y, sent = tick(stage, microbatches, arrived, number, axis_name)
        return sent, y

    return lax.scan(step, jnp.zeros_like(microbatches[0]), jnp.arange(ticks))[1]


def stops_when_the_last_microbatch_enters(stage, microbatches, axis_name):
    """As many ticks as microbatches: the last ones never come out."""
    return _run(stage, microbatches, axis_name, microbatches.shape[0])


def takes_the_first_outputs(stage, microbatches, axis_name):
    """All ticks, and of them the first ones, in which the last stage has computed garbage."""
    count = microbatches.shape[0]
    return _run(stage, microbatches, axis_name, count + lax.axis_size(axis_name) - 1)[:count]


def is_one_tick_off(stage, microbatches, axis_name):
    count, stages = microbatches.shape[0], lax.axis_size(axis_name)
    outputs = _run(stage, microbatches, axis_name, count + stages - 1)
    return lax.dynamic_slice_in_dim(outputs, max(stages - 2, 0), count)


def runs_a_tick_more(stage, microbatches, axis_name):
    """As many ticks as microbatches and stages."""
    count, stages = microbatches.shape[0], lax.axis_size(axis_name)
    return _run(stage, microbatches, axis_name, count + stages)[stages - 1 : -1]


def waits_for_each_microbatch(stage, microbatches, axis_name):
    """The next microbatch enters when this one has left: the right numbers, and one stage at work at a time."""
    stages = lax.axis_size(axis_name)

    def step(arrived, number):
        microbatch = number // stages
        y, sent = pipeline_tick(
            lambda x, _: stage(x, microbatch), microbatches[microbatch][None], arrived, number % stages, axis_name
        )
        return sent, y

    ticks = jnp.arange(microbatches.shape[0] * stages)
    outputs = lax.scan(step, jnp.zeros_like(microbatches[0]), ticks)[1]
    return outputs[stages - 1 :: stages]


def computes_both_inputs(stage, microbatches, axis_name):
    """Computes what enters and what has arrived, and keeps the one that counts: every tick takes twice as long."""

    def tick(stage, microbatches, arrived, number, axis_name):
        own, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
        entering = microbatches[jnp.clip(number, 0, microbatches.shape[0] - 1)]
        y = jnp.where(own == 0, stage(entering, number - own), stage(arrived, number - own))
        return y, lax.ppermute(y, axis_name, [(i, i + 1) for i in range(size - 1)])

    ticks = microbatches.shape[0] + lax.axis_size(axis_name) - 1
    return _run(stage, microbatches, axis_name, ticks, tick)[lax.axis_size(axis_name) - 1 :]


def broadcasts_what_comes_out(stage, microbatches, axis_name):
    """Gives all stages the last one's outputs."""
    outputs = execute_pipeline(stage, microbatches, axis_name)
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return lax.psum(jnp.where(last, outputs, 0), axis_name)


def sends_all_outputs_along(stage, microbatches, axis_name):
    """The whole list of outputs travels from stage to stage, tick by tick."""
    count, stages = microbatches.shape[0], lax.axis_size(axis_name)
    number = lax.axis_index(axis_name)

    def step(arrived, tick):
        microbatch = jnp.clip(tick - number, 0, count - 1)
        x = jnp.where(number == 0, microbatches[microbatch], arrived[microbatch])
        given = arrived.at[microbatch].set(stage(x, tick - number))
        return lax.ppermute(given, axis_name, [(i, i + 1) for i in range(stages - 1)]), given[microbatch]

    outputs = lax.scan(step, jnp.zeros_like(microbatches), jnp.arange(count + stages - 1))[1]
    return outputs[stages - 1 :]


def learns_in_the_last_stage_alone(stage, microbatches, axis_name):
    """No gradient flows from a tick to the one before it."""
    return _run(stage, microbatches, axis_name, microbatches.shape[0] + lax.axis_size(axis_name) - 1,
                lambda *a: pipeline_tick(a[0], a[1], lax.stop_gradient(a[2]), *a[3:]))[
        lax.axis_size(axis_name) - 1 :]  # fmt: skip


def needs_a_microbatch_for_every_stage(stage, microbatches, axis_name):
    """Counts ticks as if no stage would ever wait for want of microbatches."""
    count, stages = microbatches.shape[0], lax.axis_size(axis_name)
    return _run(stage, microbatches, axis_name, max(count, stages) + stages - 1)[stages - 1 : stages - 1 + count]


MUTANTS = (
    mutant("execute_pipeline", stops_when_the_last_microbatch_enters, VALUES, GRADIENTS, BUBBLE),
    mutant("execute_pipeline", takes_the_first_outputs, VALUES, GRADIENTS),
    mutant("execute_pipeline", is_one_tick_off, VALUES, GRADIENTS),
    mutant("execute_pipeline", runs_a_tick_more, BUBBLE, PERMUTED),
    mutant("execute_pipeline", waits_for_each_microbatch, BUBBLE, PERMUTED),
    mutant("execute_pipeline", computes_both_inputs, BUBBLE),
    mutant("execute_pipeline", broadcasts_what_comes_out, OTHERS),
    mutant("execute_pipeline", sends_all_outputs_along, PERMUTED),
    mutant("execute_pipeline", learns_in_the_last_stage_alone, GRADIENTS, PERMUTED),
    mutant(
        "execute_pipeline",
        needs_a_microbatch_for_every_stage,
        BUBBLE,
        PERMUTED,
        shown_by=("pipe=4, 6 microbatches", "pipe=8, 5 microbatches, forward"),
    ),
)
