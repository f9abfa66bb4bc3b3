"""Wrong answers for ``pipeline``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.model import layer_key
from solutions.data_parallel import fold_key_over_axes
from solutions.pipeline import execute_pipeline, pipeline_loss, pipeline_tick, pipeline_train_step, split_microbatches


def takes_every_nth_row(batch, num_microbatches):
    """Row ``i`` goes into microbatch ``i % num_microbatches``."""
    parts = split_microbatches(batch, num_microbatches)
    return jax.tree.map(lambda whole, part: _strided(whole, part.shape), batch, parts)


def _strided(leaf, shape):
    return jnp.swapaxes(leaf.reshape(shape[1], shape[0], *leaf.shape[1:]), 0, 1)


def turns_the_order_round(batch, num_microbatches):
    return jax.tree.map(lambda leaf: leaf[::-1], split_microbatches(batch, num_microbatches))


def leaves_the_error_to_reshape(batch, num_microbatches):
    """What JAX says is a ``TypeError`` about shapes, far from the cause."""
    return jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), batch)


def refuses_without_a_number(batch, num_microbatches):
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % num_microbatches:
            raise ValueError("bad batch")
    return split_microbatches(batch, num_microbatches)


def gathers_to_pick_its_own(batch, num_microbatches):
    """Gathers the rows of a whole axis to pick its own out of them."""

    axis = jax.sharding.get_abstract_mesh().axis_names[0]

    def split(leaf):
        every = lax.all_gather(leaf, axis)
        return split_microbatches(every[lax.axis_index(axis)], num_microbatches)

    return jax.tree.map(split, batch)


def numbers_microbatches_by_the_tick(stage, microbatches, arrived, tick, axis_name):
    """Tells every stage that it works on the microbatch that enters at this tick."""
    return pipeline_tick(lambda x, _: stage(x, tick), microbatches, arrived, tick, axis_name)


def is_one_microbatch_late(stage, microbatches, arrived, tick, axis_name):
    return pipeline_tick(lambda x, m: stage(x, m + 1), microbatches, arrived, tick, axis_name)


def _computed(stage, microbatches, arrived, tick, axis_name):
    """What this stage computes, as the reference does."""
    number = lax.axis_index(axis_name)
    entering = microbatches[jnp.clip(tick, 0, microbatches.shape[0] - 1)]
    return stage(jnp.where(number == 0, entering, arrived), tick - number)


def _passed(y, axis_name, by=1):
    size = lax.axis_size(axis_name)
    return lax.ppermute(y, axis_name, [(i, (i + by) % size) for i in range(size)])


def sends_backward(stage, microbatches, arrived, tick, axis_name):
    """The ring the other way round."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    return y, _passed(y, axis_name, by=-1)


def sends_twice(stage, microbatches, arrived, tick, axis_name):
    """To the next stage and to the one before it, which has no use for it."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    return y, _passed(y, axis_name) + 0 * _passed(y, axis_name, by=-1)


def gathers_all_stages(stage, microbatches, arrived, tick, axis_name):
    """Every stage is told what all of them computed, and takes what it needs."""
    y = _computed(stage, microbatches, arrived, tick, axis_name)
    every = lax.all_gather(y, axis_name)
    return y, every[jnp.maximum(lax.axis_index(axis_name) - 1, 0)]


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


def broadcasts_what_comes_out(stage, microbatches, axis_name):
    """Gives all stages the last one's outputs."""
    outputs = execute_pipeline(stage, microbatches, axis_name)
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return lax.psum(jnp.where(last, outputs, 0), axis_name)


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


def takes_layers_that_are_none(params, batch, key, model, num_microbatches, axis_name):
    """Rounds the layers of a stage down."""
    even = replace(model, num_layers=jax.tree.leaves(params["layers"])[0].shape[0] * lax.axis_size(axis_name))
    return pipeline_loss(params, batch, key, even, num_microbatches, axis_name)


ENDS = ("embed", "head")


def _over_stages(gradients: Any, reduce: Any) -> Any:
    """The gradients, those of embedding and head reduced."""
    return {**gradients, **{name: reduce(gradients[name]) for name in ENDS}}


def _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, *,
          loss_of: Any = pipeline_loss, fold: Any = fold_key_over_axes, stages: Any = lax.psum, groups: Any = lax.pmean,
          report: Any = lax.pmean):  # fmt: skip
    """The reference's step with parts to replace."""
    key = fold(key, (data_axis,))
    loss, gradients = jax.value_and_grad(loss_of)(params, batch, key, model, num_microbatches, pipe_axis)
    gradients = groups(_over_stages(gradients, lambda g: stages(g, pipe_axis)), data_axis)
    updated = jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, gradients)
    return updated, report(loss, data_axis)


def _remembers(params, batch, key, model, num_microbatches, axis_name):
    y = outputs(params, batch, key, model, num_microbatches, axis_name, remat=False)
    return lax.psum(of_last(params, batch, model, y, axis_name), axis_name)


def keeps_activations(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Every tick keeps what its layers need for their backward pass."""
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, loss_of=_remembers)


def averages_shares(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The mean of what the stages have of one gradient, where it is their sum."""
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, stages=lax.pmean)


def sums_over_groups(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, groups=lax.psum)


def averages_twice(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The gradients, and then the updated parameters too, to be sure."""
    updated, loss = pipeline_train_step(
        params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate
    )
    return lax.pmean(updated, data_axis), loss


def recomputes_the_whole_pipeline(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Runs all ticks again before the backward pass, and sends everything again."""
    loss_of = partial(jax.checkpoint, static_argnums=(3, 4, 5))(pipeline_loss)
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, loss_of=loss_of)


MUTANTS = (
    mutant("split_microbatches", takes_every_nth_row, "values"),
    mutant("split_microbatches", turns_the_order_round, "values"),
    mutant("split_microbatches", leaves_the_error_to_reshape, "uneven batch"),
    mutant("split_microbatches", refuses_without_a_number, "uneven batch"),
    mutant("split_microbatches", gathers_to_pick_its_own, "communication"),
    mutant("pipeline_tick", numbers_microbatches_by_the_tick, "gradients", "values"),
    mutant("pipeline_tick", is_one_microbatch_late, "gradients", "values"),
    mutant("pipeline_tick", sends_backward, "gradients", "values"),
    mutant("pipeline_tick", sends_twice, "permute bytes"),
    mutant("pipeline_tick", gathers_all_stages, "other collectives", "permute bytes"),
    mutant("execute_pipeline", stops_when_the_last_microbatch_enters, "bubble", "gradients", "values"),
    mutant("execute_pipeline", takes_the_first_outputs, "gradients", "values"),
    mutant("execute_pipeline", is_one_tick_off, "gradients", "values"),
    mutant("execute_pipeline", waits_for_each_microbatch, "bubble", "permute bytes"),
    mutant("execute_pipeline", broadcasts_what_comes_out, "other collectives"),
    mutant("pipeline_loss", returns_zero_but_on_the_last_stage, "values"),
    mutant("pipeline_loss", averages_over_stages, "gradient norm", "gradients", "values"),
    mutant("pipeline_loss", broadcasts_outputs, "loss bytes"),
    mutant("pipeline_loss", forgets_the_heads_gradient, "gradient norm", "gradients"),
    mutant("pipeline_loss", takes_layers_that_are_none, "uneven layers"),
    mutant("pipeline_train_step", keeps_activations, "live temporaries"),
    mutant("pipeline_train_step", averages_shares, "gradient norm", "gradients", "values"),
    mutant("pipeline_train_step", sums_over_groups, "gradient norm", "gradients", "values"),
    mutant("pipeline_train_step", averages_twice, "all-reduce bytes"),
    mutant("pipeline_train_step", recomputes_the_whole_pipeline, "loss bytes", "permute bytes"),
)
