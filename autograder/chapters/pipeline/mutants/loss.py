"""Wrong answers for ``pipeline_loss``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.pipeline.mutants.names import GRADIENTS, LOSS, NORM, UNEVEN_LAYERS, VALUES, WRONG
from autograder.proof.mutants import mutant
from course.model import layer_key
from solutions.pipeline import execute_pipeline, pipeline_loss, split_microbatches


def outputs(params, batch, key, model, num_microbatches, axis_name, key_of: Any = layer_key, remat=True) -> Any:
    """What comes out of the last stage, for all rows; layers that cannot be shared out evenly are refused."""
    number, stages = lax.axis_index(axis_name), lax.axis_size(axis_name)
    own, rest = divmod(model.num_layers, stages)
    if rest:
        raise ValueError(f"{model.num_layers} layers for {stages} stages")

    def stage(x, microbatch):
        def layer(x, numbered):
            return model.layer(numbered[1], x, key_of(key, microbatch, numbered[0])), None

        return lax.scan(layer, x, (number * own + jnp.arange(own), params["layers"]))[0]

    x = model.embed(params["embed"], batch["inputs"])
    parts = split_microbatches(x, num_microbatches)
    return execute_pipeline(jax.checkpoint(stage) if remat else stage, parts, axis_name).reshape(x.shape)


def of_last(params, batch, model, y, axis_name) -> Any:
    """The loss of the last stage's outputs, and zero on the others."""
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return jnp.where(last, model.loss(params["head"], y, batch["targets"]), 0.0)


def returns_zero_but_on_the_last_stage(params, batch, key, model, num_microbatches, axis_name):
    """The gradient is right; the number is one stage's alone."""
    y = outputs(params, batch, key, model, num_microbatches, axis_name)
    return of_last(params, batch, model, y, axis_name)


def averages_over_stages(params, batch, key, model, num_microbatches, axis_name):
    y = outputs(params, batch, key, model, num_microbatches, axis_name)
    return lax.pmean(of_last(params, batch, model, y, axis_name), axis_name)


def counts_every_stages_loss(params, batch, key, model, num_microbatches, axis_name):
    """The mean of all stages' losses; most of them are of garbage."""
    y = outputs(params, batch, key, model, num_microbatches, axis_name)
    return lax.pmean(model.loss(params["head"], y, batch["targets"]), axis_name)


def gathers_the_loss(params, batch, key, model, num_microbatches, axis_name):
    """Takes the last of all stages' losses: the right number, and a gradient that is as often counted as it is read."""
    y = outputs(params, batch, key, model, num_microbatches, axis_name)
    return lax.all_gather(model.loss(params["head"], y, batch["targets"]), axis_name)[-1]


def broadcasts_outputs(params, batch, key, model, num_microbatches, axis_name):
    """Gives all stages the outputs, and each computes the whole loss."""
    y = outputs(params, batch, key, model, num_microbatches, axis_name)
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    every = lax.psum(jnp.where(last, y, 0.0), axis_name)
    varying = lax.pcast(every, axis_name, to="varying")
    return lax.pmean(model.loss(params["head"], varying, batch["targets"]), axis_name)


def forgets_the_heads_gradient(params, batch, key, model, num_microbatches, axis_name):
    frozen = {**params, "head": jax.tree.map(lax.stop_gradient, params["head"])}
    return pipeline_loss(frozen, batch, key, model, num_microbatches, axis_name)


def drops_the_same_in_every_layer(params, batch, key, model, num_microbatches, axis_name):
    def same(key, microbatch, layer):
        return layer_key(key, microbatch, 0)

    y = outputs(params, batch, key, model, num_microbatches, axis_name, same)
    return lax.psum(of_last(params, batch, model, y, axis_name), axis_name)


def numbers_layers_from_its_own_first(params, batch, key, model, num_microbatches, axis_name):
    """Every stage calls its first layer number 0."""
    first = lax.axis_index(axis_name) * (model.num_layers // lax.axis_size(axis_name))

    def local(key, microbatch, layer):
        return layer_key(key, microbatch, layer - first)

    y = outputs(params, batch, key, model, num_microbatches, axis_name, local)
    return lax.psum(of_last(params, batch, model, y, axis_name), axis_name)


def drops_the_same_in_every_microbatch(params, batch, key, model, num_microbatches, axis_name):
    def same(key, microbatch, layer):
        return layer_key(key, 0, layer)

    y = outputs(params, batch, key, model, num_microbatches, axis_name, same)
    return lax.psum(of_last(params, batch, model, y, axis_name), axis_name)


def takes_layers_that_are_none(params, batch, key, model, num_microbatches, axis_name):
    """Rounds the layers of a stage down."""
    even = replace(model, num_layers=jax.tree.leaves(params["layers"])[0].shape[0] * lax.axis_size(axis_name))
    return pipeline_loss(params, batch, key, even, num_microbatches, axis_name)


TASK = "pipeline_loss"
MUTANTS = (
    mutant(TASK, returns_zero_but_on_the_last_stage, VALUES),
    mutant(TASK, averages_over_stages, *WRONG),
    mutant(TASK, counts_every_stages_loss, *WRONG),
    mutant(TASK, gathers_the_loss, GRADIENTS, NORM),
    mutant(TASK, broadcasts_outputs, LOSS),
    mutant(TASK, forgets_the_heads_gradient, GRADIENTS, NORM),
    mutant(TASK, drops_the_same_in_every_layer, *WRONG),
    mutant(TASK, numbers_layers_from_its_own_first, *WRONG),
    mutant(TASK, drops_the_same_in_every_microbatch, *WRONG),
    mutant(TASK, takes_layers_that_are_none, UNEVEN_LAYERS),
)
