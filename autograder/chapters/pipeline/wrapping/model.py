"""The loss of a model over stages, and a training step: their inputs, and the form of their results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.pipeline.wrapping.schedule import REFUSED, refusal, row_axes
from autograder.contract.case import Case, ModelSizes
from autograder.contract.case_builders import (
    KEY,
    LEARNING_RATE,
    batch_shapes,
    groups_of,
    model_of,
    others_of,
    params_of,
    pipe_of,
    pull_back,
    stages_of,
)
from autograder.contract.output_checks import scalar, state_and_loss
from autograder.contract.wrapping import Wrapped, on_mesh, sgd_steps
from course.mesh import varying

ENDS = ("embed", "head")


@dataclass(frozen=True, kw_only=True)
class StepSizes(ModelSizes):
    """A model over stages, its rows per microbatch, and the factor of the drawn learning rate."""

    num_microbatches: int
    rows: int
    steps: int = 1
    rate_scale: float = 1.0


def by_part(case: Case[StepSizes], *, layers: Any, ends: Any) -> Any:
    """A tree like the parameters, with one value for all layers' leaves and another for embedding and head."""
    return {
        name: jax.tree.map(lambda _, of=layers if name == "layers" else ends: of, tree)
        for name, tree in params_of(case).items()
    }


def specs_of(case: Case[StepSizes]) -> Any:
    """Layers are split over the stages; every device holds the embedding and the head."""
    return by_part(case, layers=P(pipe_of(case)), ends=P())


def rows_of(case: Case[StepSizes]) -> int:
    """Number of rows of all groups together."""
    return groups_of(case, pipe_of) * case.sizes.num_microbatches * case.sizes.rows


def wrap_loss(function: Any, case: Case[StepSizes]) -> Wrapped:
    """Loss of every device, and gradients for the cotangent ``upstream`` of each group.

    Each device returns its own share of the gradient of embedding and head.
    """
    axis, model, rows, others = pipe_of(case), model_of(case), row_axes(case), others_of(case, pipe_of)
    results = {"values": P((*others, axis)), "gradients": P(rows, axis), "refused": P()}

    def local(params, batch, key, upstream):
        params, key = varying(params, case.mesh), jax.random.wrap_key_data(key[0])

        def loss_of(params, model=model):
            loss = function(params, batch, key, model, case.sizes.num_microbatches, axis)
            scalar("pipeline_loss", loss, "the mean loss over all unmasked rows or tokens")
            return varying(loss, others)

        loss, gradients = pull_back(loss_of, params, upstream[0])
        odd = model.num_layers + 1
        uneven = lambda: loss_of(params, replace(model, num_layers=odd))  # noqa: E731
        ended = REFUSED if stages_of(case) == 1 else refusal(uneven, odd, stages_of(case))
        ends = {name: jax.tree.map(lambda g: g[None], gradients[name]) for name in ENDS}
        stacked = jax.tree.map(lambda g: g[None], {"layers": gradients["layers"], **ends})
        return {"values": varying(loss, case.mesh)[None], "gradients": stacked, "refused": jnp.int32(ended)}

    groups = groups_of(case, pipe_of)
    inputs = {
        "params": (params_of(case), specs_of(case)),
        "batch": (batch_shapes(case.sizes, rows_of(case), masked=True), P(rows)),
        "key": (jax.ShapeDtypeStruct((groups, 2), np.uint32), P(rows)),
        "upstream": (jax.ShapeDtypeStruct((groups,), np.float32), P(rows)),
    }
    return on_mesh(local, case, inputs, results, {"params": "state", "key": "key"})


def wrap_step(function: Any, case: Case[StepSizes]) -> Wrapped:
    """The steps over several batches; every holder of a leaf returns its copy, to detect copies that drift apart."""
    axis, model, rows, others = pipe_of(case), model_of(case), row_axes(case), others_of(case, pipe_of)
    param_specs = by_part(case, layers=P(rows, axis), ends=P((*others, axis)))
    results = {"values": {"loss": P((*others, axis)), "params": param_specs}, "gradients": param_specs}

    def local(params, batch, key, learning_rate):
        key = jax.random.wrap_key_data(key)

        def one_step(params, step):
            number, step_batch = step
            step_key = jax.random.fold_in(key, number)
            result = function(
                params, step_batch, step_key, model, case.sizes.num_microbatches, axis, *others, learning_rate
            )
            return varying(state_and_loss("pipeline_train_step", "params", result, params, case), case.mesh)

        numbers = np.arange(case.sizes.steps, dtype=np.int32)
        after, losses, gradients = sgd_steps(one_step, varying(params, case.mesh), (numbers, batch), learning_rate)
        stacked = jax.tree.map(lambda leaf: leaf[None], {"values": {"params": after}, "gradients": gradients})
        return {**stacked, "values": {"loss": losses[None], **stacked["values"]}}

    inputs = {
        "params": (params_of(case), specs_of(case)),
        "batch": (batch_shapes(case.sizes, rows_of(case), case.sizes.steps, masked=True), P(None, rows)),
        "key": (KEY, P()),
        "learning_rate": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, results, {"params": "state", "key": "key"})
