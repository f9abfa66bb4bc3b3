"""Wrong answers for ``pipeline_train_step``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import lax

from autograder.chapters.pipeline.mutants.loss import of_last, outputs
from autograder.chapters.pipeline.mutants.names import LOSS, PERMUTED, REDUCED, TEMPORARIES, VALUES, WRONG
from autograder.proof.mutants import mutant
from solutions.data_parallel import fold_key_over_axes
from solutions.pipeline import pipeline_loss, pipeline_train_step

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


def keeps_products(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """A policy that saves the results of matmuls, of every layer in every tick."""
    policy = jax.checkpoint_policies.dots_saveable

    def loss_of(params, batch, key, model, num_microbatches, axis_name):
        layer = jax.checkpoint(model.layer, policy=policy)
        return _remembers(params, batch, key, replace(model, layer=layer), num_microbatches, axis_name)

    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, loss_of=loss_of)


def leaves_embedding_and_head_to_each_stage(
    params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate
):
    """Updates each stage's copy by the share of the gradient that this stage has."""
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                 stages=lambda gradients, axis: gradients)  # fmt: skip


def averages_shares(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The mean of what the stages have of one gradient, where it is their sum."""
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, stages=lax.pmean)


def averages_layers_over_stages(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The mean over all devices for every leaf, which mixes different layers."""

    def groups(gradients, axis):
        return {**lax.pmean(gradients, axis), "layers": lax.pmean(gradients["layers"], (axis, pipe_axis))}

    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, groups=groups)


def sums_over_groups(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, groups=lax.psum)


def drops_the_same_in_every_group(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                 fold=lambda key, axes: jax.random.fold_in(key, 0))  # fmt: skip


def averages_twice(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The gradients, and then the updated parameters too, to be sure."""
    updated, loss = pipeline_train_step(
        params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate
    )
    return lax.pmean(updated, data_axis), loss


def reports_the_loss_of_its_group(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                 report=lambda loss, axis: loss)  # fmt: skip


def recomputes_the_whole_pipeline(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Runs all ticks again before the backward pass, and sends everything again."""
    loss_of = partial(jax.checkpoint, static_argnums=(3, 4, 5))(pipeline_loss)
    return _step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, loss_of=loss_of)


TASK = "pipeline_train_step"
MUTANTS = (
    mutant(TASK, keeps_activations, TEMPORARIES),
    mutant(TASK, keeps_products, TEMPORARIES),
    mutant(TASK, leaves_embedding_and_head_to_each_stage, *WRONG, REDUCED),
    mutant(TASK, averages_shares, *WRONG),
    mutant(TASK, averages_layers_over_stages, *WRONG, REDUCED),
    mutant(TASK, sums_over_groups, *WRONG),
    mutant(TASK, drops_the_same_in_every_group, *WRONG),
    mutant(TASK, averages_twice, REDUCED),
    mutant(TASK, reports_the_loss_of_its_group, VALUES),
    mutant(TASK, recomputes_the_whole_pipeline, PERMUTED, LOSS),
)
