"""Inputs of the functions of ``pipeline`` and the form of their results.

When a stage has work is what ``pipeline_tick`` must compute, so the mask of results to compare arrives as an input.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes, Sizes
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
from autograder.contract.output_checks import describe, same_shapes, same_tree, scalar, state_and_loss, tuple_of
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, sgd_steps
from course.mesh import varying

# split_microbatches, pipeline_tick and execute_pipeline: microbatches, ticks and whole schedules.

# The constant that a stage adds to its products.
SHIFT = 0.5
EXECUTED = ("weights", "microbatches")
# How a call that must be refused can end: no error, another type of error, a message that lacks a number, or refused.
ACCEPTED, OTHER_ERROR, UNNAMED, REFUSED = range(4)


@dataclass(frozen=True, kw_only=True)
class Blocks(Sizes):
    """Microbatches of ``rows`` and ``width``; ``backward`` requests gradients too."""

    num_microbatches: int
    rows: int
    width: int
    backward: bool = True


def row_axes(case: Case[Any]) -> Any:
    """The entry of a spec for a dim of rows."""
    return others_of(case, pipe_of) or None


def refusal(call: Callable[[], Any], *numbers: int) -> int:
    """Return how ``call`` ends: ``REFUSED`` is a ``ValueError`` that names the numbers. The program is not affected."""
    try:
        jax.eval_shape(call)
    except ValueError as error:
        return REFUSED if {*map(str, numbers)} <= {*re.findall(r"\d+", str(error))} else UNNAMED
    except Exception:
        return OTHER_ERROR
    return ACCEPTED


def split_shapes(case: Case[Blocks], rows: int) -> dict[str, Any]:
    width = case.sizes.width
    leaf = jax.ShapeDtypeStruct
    return {
        "inputs": leaf((rows, width), np.float32),
        "targets": leaf((rows,), np.int32),
        "more": {"weights": leaf((rows, 3, 2), np.float32)},
    }


def split_sizes(case: Case[Blocks]) -> tuple[int, int, int]:
    """Devices, microbatches, and rows of one device."""
    devices = int(np.prod(list(case.mesh.values())))
    return devices, case.sizes.num_microbatches, case.sizes.num_microbatches * case.sizes.rows


def wrap_split(function: Any, case: Case[Blocks]) -> Wrapped:
    axes = tuple(case.mesh)
    devices, count, rows = split_sizes(case)

    def local(batch):
        microbatches = same_tree("microbatches", function(batch, count), batch)
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, rows // count, *a.shape[1:]), a.dtype), batch)
        same_shapes("split_microbatches", microbatches, like, case)
        uneven = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), split_shapes(case, rows + 1))
        ended = REFUSED if count == 1 else refusal(lambda: function(uneven, count), rows + 1, count)
        return {"values": microbatches, "refused": jnp.int32(ended)}

    shapes = split_shapes(case, devices * rows)
    return on_mesh(local, case, {"batch": (shapes, P(axes))}, {"values": P(None, axes), "refused": P()})


def stage_of(weights: jax.Array, case: Case[Blocks]) -> Callable[..., jax.Array]:
    """A stage with a different result for every microbatch: ``[microbatch_size, width] -> `` the same.

    It maps zeros to something else, so that adding garbage changes the sum; in a forward pass, garbage is NaN. (In a
    backward pass zero times NaN is NaN, even when ``jnp.where`` selects.)
    """

    def stage(x, microbatch):
        number = jnp.asarray(microbatch)
        if number.shape != () or not jnp.issubdtype(number.dtype, jnp.integer):
            raise Mismatch(f"stage was called with {describe(number)} as its microbatch, expected one integer")
        y = x + (1 + number.astype(x.dtype) / 8) * jnp.tanh(x @ weights + SHIFT)
        known = (number >= 0) & (number < case.sizes.num_microbatches)
        return y if case.sizes.backward else jnp.where(known, y, jnp.nan)

    return stage


def tick_shapes(case: Case[Blocks]) -> dict[str, Any]:
    """``counted`` marks the stages and ticks whose results are compared: idle stages may return anything."""
    s, stages, ticks = case.sizes, stages_of(case), case.given["ticks"]

    def leaf(*shape, dtype: Any = np.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    block = (s.rows, s.width)
    flows, counted = leaf(ticks, stages, *block), leaf(ticks, stages, dtype=np.bool_)
    return {
        "weights": leaf(stages, s.width, s.width),
        "microbatches": leaf(s.num_microbatches, *block),
        "arrived": flows,
        "upstream": {"y": flows, "sent": flows},
        "counted": {"y": counted, "sent": counted},
    }


def wrap_tick(function: Any, case: Case[Blocks]) -> Wrapped:
    """Every tick of a schedule, each with different arriving data; whatever is not ``counted`` becomes zero."""
    axis, number_of_ticks = pipe_of(case), case.given["ticks"]

    def local(weights, microbatches, arrived, upstream, counted):
        def ticks(weights, microbatches, arrived):
            def one_tick(_, inputs):
                tick, arrived, counted = inputs
                results = _tick(function(stage_of(weights, case), microbatches, arrived, tick, axis), arrived, case)
                return None, jax.tree.map(lambda counts, a: jnp.where(counts, a, 0), counted, results)

            numbers = jnp.arange(number_of_ticks, dtype=jnp.int32)
            own = jax.tree.map(lambda a: a[:, 0], counted)
            return lax.scan(one_tick, None, (numbers, arrived, own))[1]

        values, back = jax.vjp(ticks, weights[0], varying(microbatches, [axis]), arrived[:, 0])
        cotangents = back(jax.tree.map(lambda a: a[:, 0], upstream))
        gradients = dict(zip(("weights", "microbatches", "arrived"), cotangents, strict=True))
        return jax.tree.map(lambda a: a[None], {"values": values, "gradients": gradients})

    each = P(None, axis)
    specs = {"weights": P(axis), "microbatches": P(), "arrived": each, "upstream": each, "counted": each}
    inputs = {name: (shapes, specs[name]) for name, shapes in tick_shapes(case).items()}
    return on_mesh(local, case, inputs, {"values": P(axis), "gradients": P(axis)})


def _tick(result: Any, like: Any, case: Case[Blocks]) -> dict[str, Any]:
    outputs: dict[str, Any] = dict(zip(("y", "sent"), tuple_of("pipeline_tick", result, "y", "sent"), strict=True))
    return same_shapes("pipeline_tick", outputs, {"y": like, "sent": like}, case)


def execute_shapes(case: Case[Blocks]) -> dict[str, Any]:
    s = case.sizes
    rows = jax.ShapeDtypeStruct((s.num_microbatches, s.rows * groups_of(case, pipe_of), s.width), np.float32)
    weights = jax.ShapeDtypeStruct((stages_of(case), s.width, s.width), np.float32)
    return {"weights": weights, "microbatches": rows} | ({"upstream": rows} if s.backward else {})


def wrap_execute(function: Any, case: Case[Blocks]) -> Wrapped:
    """Outputs of the last stage; with ``backward``, gradients of all stages' weights and of the microbatches."""
    axis, others = pipe_of(case), others_of(case, pipe_of)

    def local(weights, microbatches, upstream=None):
        number = lax.axis_index(axis)

        def run(weights, microbatches):
            result = function(stage_of(weights, case), microbatches, axis)
            same_shapes("execute_pipeline", result, microbatches, case)
            return jnp.where(number == stages_of(case) - 1, result, 0)

        weights, own = varying(weights, others), varying(microbatches, [axis])
        if upstream is None:
            return {"values": run(weights[0], own)[None]}
        values, back = jax.vjp(run, weights[0], own)
        gradients = dict(zip(EXECUTED, back(varying(upstream, [axis])), strict=True))
        return jax.tree.map(lambda a: a[None], {"values": values, "gradients": gradients})

    rows = P(None, row_axes(case))
    results: dict[str, Any] = {"values": P(axis, None, row_axes(case))}
    if case.sizes.backward:
        results["gradients"] = {"weights": P((*others, axis)), "microbatches": P(axis, None, row_axes(case))}
    inputs = {name: (shape, P(axis) if name == "weights" else rows) for name, shape in execute_shapes(case).items()}
    return on_mesh(local, case, inputs, results)


# pipeline_loss and pipeline_train_step: the loss of a model over stages, and a step.

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


_STEP = "(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate)"
WRAPPINGS = (
    Wrapping("split_microbatches", "(batch, num_microbatches)", wrap_split, Blocks),
    Wrapping("pipeline_tick", "(stage, microbatches, arrived, tick, axis_name)", wrap_tick, Blocks),
    Wrapping("execute_pipeline", "(stage, microbatches, axis_name)", wrap_execute, Blocks),
    Wrapping("pipeline_loss", "(params, batch, key, model, num_microbatches, axis_name)", wrap_loss, StepSizes),
    Wrapping("pipeline_train_step", _STEP, wrap_step, StepSizes),
)
