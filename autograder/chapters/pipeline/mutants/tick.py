"""Wrong answers for ``pipeline_tick``."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from autograder.chapters.pipeline.mutants.names import GRADIENTS, OTHERS, PERMUTED, VALUES
from autograder.proof.mutants import mutant
from solutions.pipeline import pipeline_tick


def _computed(stage, microbatches, arrived, tick, axis_name):
    """What this stage computes, as the reference does."""
    number = lax.axis_index(axis_name)
    entering = microbatches[jnp.clip(tick, 0, microbatches.shape[0] - 1)]
    return stage(jnp.where(number == 0, entering, arrived), tick - number)


def _passed(y, axis_name, by=1):
    size = lax.axis_size(axis_name)
    return lax.ppermute(y, axis_name, [(i, (i + by) % size) for i in range(size)])


def numbers_microbatches_by_the_tick(stage, microbatches, arrived, tick, axis_name):
    """Tells every stage that it works on the microbatch that enters at this tick."""
    return pipeline_tick(lambda x, _: stage(x, tick), microbatches, arrived, tick, axis_name)


def is_one_microbatch_late(stage, microbatches, arrived, tick, axis_name):
    return pipeline_tick(lambda x, m: stage(x, m + 1), microbatches, arrived, tick, axis_name)


def reads_the_batch_on_every_stage(stage, microbatches, arrived, tick, axis_name):
    """Never looks at what has arrived."""
    number = lax.axis_index(axis_name)
    y = stage(microbatches[jnp.clip(tick - number, 0, microbatches.shape[0] - 1)], tick - number)
    return y, _passed(y, axis_name)


def adds_what_arrives_to_what_enters(stage, microbatches, arrived, tick, axis_name):
    number = lax.axis_index(axis_name)
    entering = microbatches[jnp.clip(tick - number, 0, microbatches.shape[0] - 1)]
    y = stage(entering + jnp.where(number == 0, 0, arrived), tick - number)
    return y, _passed(y, axis_name)


def sends_backward(stage, microbatches, arrived, tick, axis_name):
    """The ring the other way round."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    return y, _passed(y, axis_name, by=-1)


def passes_its_input_on(stage, microbatches, arrived, tick, axis_name):
    number = lax.axis_index(axis_name)
    entering = microbatches[jnp.clip(tick, 0, microbatches.shape[0] - 1)]
    x = jnp.where(number == 0, entering, arrived)
    return stage(x, tick - number), _passed(x, axis_name)


def cuts_the_gradient_between_stages(stage, microbatches, arrived, tick, axis_name):
    """Stages learn, each from what it computes alone."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    return y, _passed(lax.stop_gradient(y), axis_name)


def rounds_what_travels(stage, microbatches, arrived, tick, axis_name):
    """Activations travel in bfloat16: half of the bytes, and other numbers than one device's."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    return y, _passed(y.astype(jnp.bfloat16), axis_name).astype(y.dtype)


def sends_twice(stage, microbatches, arrived, tick, axis_name):
    """To the next stage and to the one before it, which has no use for it."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    return y, _passed(y, axis_name) + 0 * _passed(y, axis_name, by=-1)


def gathers_all_stages(stage, microbatches, arrived, tick, axis_name):
    """Every stage is told what all of them computed, and takes what it needs."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    every = lax.all_gather(y, axis_name)
    return y, every[jnp.maximum(lax.axis_index(axis_name) - 1, 0)]


MUTANTS = (
    mutant("pipeline_tick", numbers_microbatches_by_the_tick, VALUES, GRADIENTS),
    mutant("pipeline_tick", is_one_microbatch_late, VALUES, GRADIENTS),
    mutant("pipeline_tick", reads_the_batch_on_every_stage, VALUES, GRADIENTS),
    mutant("pipeline_tick", adds_what_arrives_to_what_enters, VALUES, GRADIENTS),
    mutant("pipeline_tick", sends_backward, VALUES, GRADIENTS),
    mutant("pipeline_tick", passes_its_input_on, VALUES, GRADIENTS),
    mutant("pipeline_tick", cuts_the_gradient_between_stages, GRADIENTS),
    mutant("pipeline_tick", rounds_what_travels, VALUES, GRADIENTS),
    mutant("pipeline_tick", sends_twice, PERMUTED),
    mutant("pipeline_tick", gathers_all_stages, PERMUTED, OTHERS),
)
