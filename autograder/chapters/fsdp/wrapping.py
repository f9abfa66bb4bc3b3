"""Inputs of the functions of ``fsdp``, and the form of their results.

The layout of leaves is what ``shard_params`` must compute, so the other wrappers receive it with the case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract import output_checks
from autograder.contract.case import Case, ModelSizes, Sizes
from autograder.contract.case_builders import (
    LEARNING_RATE,
    axis_of,
    axis_size,
    batch_shapes,
    decode_specs,
    model_of,
    params_of,
    pull_back,
)
from autograder.contract.wrapping import Wrapped, Wrapping, on_mesh, sgd_steps, with_own_specs
from course.mesh import as_varying, varying
from course.program.program import path_name

Axes = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Leaves(Sizes):
    """A tree with every kind of leaf.

    Attributes:
        unit: The factor of the leaves' dims.
        min_size: The least size of a leaf that is split.
        turn: Number of places by which shapes are rotated among the leaves' names; unless 0, dims are reversed too.
    """

    unit: int = 16
    min_size: int = 64
    turn: int = 0


@dataclass(frozen=True, kw_only=True)
class StepSizes(ModelSizes):
    """A model in training: ``rows`` for each device and step, and the factor of the drawn learning rate."""

    rows: int
    min_size: int = 64
    steps: int = 1
    rate_scale: float = 1.0


# The shape of each leaf; a case may rotate them, so that no name reveals how its leaf is treated.
_LEAVES = {
    "first": {"kernel": 0, "bias": 1, "vector": 2},
    "second": {"kernel": 3, "three": 4, "odd": 5},
    "at_limit": 6,
    "scale": 7,
}


def leaf_shapes(case: Case[Leaves]) -> dict[str, Any]:
    """A tree with every kind of leaf; rotated ones have reversed dims.

    Some have fewer elements than ``min_size``, but more bytes.
    """
    u, turn = case.sizes.unit, case.sizes.turn
    shapes = [
        (u, 2 * u),
        (3 * u // 2,),
        (u * u,),
        (2 * u + 2, u),
        (3, u, 8),
        (7, 9, 5),
        (8, case.sizes.min_size // 8),
        (),
    ]
    shapes = [shape[::-1] if turn else shape for shape in shapes]
    return jax.tree.map(lambda i: jax.ShapeDtypeStruct(shapes[(i + turn) % len(shapes)], np.float32), _LEAVES)


def _gradient_specs(specs: Any, axis: str) -> Any:
    """Sharded leaves keep their spec; whole leaves are returned per device, stacked."""
    return jax.tree.map(lambda spec: spec if len(spec) else P(axis), specs)


def _stack_copies(leaves: Any, specs: Any, axis: str) -> Any:
    """The leaves in the form of ``_gradient_specs``; runs inside ``shard_map``."""
    return jax.tree.map(lambda leaf, spec: leaf if len(spec) else as_varying(leaf, axis)[None], leaves, specs)


def wrap_shard_params(function: Any, case: Case[Leaves]) -> Wrapped:
    axis = axis_of(case)

    def local(params):
        result = function(params, axis, case.sizes.min_size)
        shards, specs = output_checks.tuple_of("shard_params", result, "shards", "specs")
        output_checks.same_tree("shards", shards, params)
        specs = output_checks.same_tree("specs", specs, params, is_leaf=lambda s: isinstance(s, P))
        for (path, shard), spec in zip(jax.tree.leaves_with_path(shards), jax.tree.leaves(specs), strict=True):
            output_checks.check_spec(f"leaf {path_name('', path)} {case.place}", shard, spec, (axis,))
        return shards, specs

    return with_own_specs(local, case, leaf_shapes(case))


def wrap_gather_params(function: Any, case: Case[Leaves]) -> Wrapped:
    axis, shapes = axis_of(case), leaf_shapes(case)
    specs = decode_specs(case, shapes)
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((axis_size(case), *s.shape), s.dtype), shapes)
    results = {"values": P(axis), "gradients": _gradient_specs(specs, axis)}

    def local(shards, upstream):
        def gather(shards):
            whole = output_checks.same_tree("the result", function(shards, specs, axis), shards)
            output_checks.same_shapes("gather_params", whole, shapes, case)
            return varying(whole, [axis])

        whole, transpose = jax.vjp(gather, varying(shards, [axis]))
        (gradients,) = transpose(jax.tree.map(lambda g: g[0], upstream))
        return {
            "values": jax.tree.map(lambda leaf: leaf[None], whole),
            "gradients": _stack_copies(gradients, specs, axis),
        }

    inputs = {"shards": (shapes, specs), "upstream": (stacked, P(axis))}
    return on_mesh(local, case, inputs, results, {"shards": "state"})


def wrap_fsdp_loss(function: Any, case: Case[StepSizes]) -> Wrapped:
    """Each device's loss, and the gradient of its parts for the cotangent ``upstream``."""
    axis, model, shapes = axis_of(case), model_of(case), params_of(case)
    specs = decode_specs(case, shapes)
    results = {"values": P(axis), "gradients": _gradient_specs(specs, axis)}

    def local(shards, batch, upstream):
        def loss_of(shards):
            loss = function(shards, specs, batch, model, axis)
            output_checks.scalar("fsdp_loss", loss, "this device's mean loss")
            return as_varying(loss, axis)

        loss, gradients = pull_back(loss_of, varying(shards, [axis]), upstream[0])
        return {"values": loss[None], "gradients": _stack_copies(gradients, specs, axis)}

    batch = batch_shapes(case.sizes, rows_of(case, (axis,)))
    upstream = jax.ShapeDtypeStruct((axis_size(case),), np.float32)
    inputs = {"shards": (shapes, specs), "batch": (batch, P(axis)), "upstream": (upstream, P(axis))}
    return on_mesh(local, case, inputs, results, {"shards": "state"})


def hybrid_axes(case: Case[Any]) -> Axes:
    """The axis inside a node, along which parameters are split, and the axis across nodes."""
    inside = axis_of(case)
    (across,) = (axis for axis in case.mesh if axis != inside)
    return inside, across


def step_axes(case: Case[Any]) -> Axes:
    """The axis of ``fsdp_train_step``."""
    return (axis_of(case),)


def wrap_step(
    name: str, axes_of: Callable[[Case[Any]], Axes], masked: bool = False
) -> Callable[[Any, Case[StepSizes]], Wrapped]:
    """Wrap a step, which is taken ``steps`` times; ``axes_of`` names the axes that the batch is split over.

    Parts that several devices hold are returned by each of them, to detect copies that drift apart.
    """

    def wrap(function: Any, case: Case[StepSizes]) -> Wrapped:
        axes, model, shapes = axes_of(case), model_of(case), params_of(case)
        specs = decode_specs(case, shapes)
        result_specs = jax.tree.map(
            lambda spec: P(holders, *spec) if (holders := holders_of(spec, axes)) else spec, specs
        )
        results = {"values": {"loss": P(axes), "shards": result_specs}, "gradients": result_specs}

        def stacked(leaves):
            return jax.tree.map(lambda leaf, spec: leaf[None] if holders_of(spec, axes) else leaf, leaves, specs)

        def local(shards, batch, learning_rate):
            def one_step(shards, rows):
                result = function(shards, specs, rows, model, *axes, learning_rate)
                return varying(output_checks.state_and_loss(name, "shards", result, shards, case), axes)

            after, losses, gradients = sgd_steps(one_step, varying(shards, axes), batch, learning_rate)
            return {"values": {"loss": losses[None], "shards": stacked(after)}, "gradients": stacked(gradients)}

        batch = batch_shapes(case.sizes, rows_of(case, axes), case.sizes.steps, masked=masked)
        inputs = {"shards": (shapes, specs), "batch": (batch, P(None, axes)), "learning_rate": (LEARNING_RATE, P())}
        return on_mesh(local, case, inputs, results, {"shards": "state"})

    return wrap


def holders_of(spec: P, axes: Axes) -> Axes:
    """The axes along which every device holds a copy of the leaf, or of its part."""
    return tuple(axis for axis in axes if axis not in spec)


def rows_of(case: Case[StepSizes], axes: Axes) -> int:
    """Number of rows of a batch that is split over these axes."""
    return case.sizes.rows * math.prod(case.mesh[axis] for axis in axes)


_STEP = "(shards, specs, batch, model, axis_name, {}learning_rate)"
WRAPPINGS = (
    Wrapping("shard_params", "(params, axis_name, min_size)", wrap_shard_params, Leaves),
    Wrapping("gather_params", "(shards, specs, axis_name)", wrap_gather_params, Leaves),
    Wrapping("fsdp_loss", "(shards, specs, batch, model, axis_name)", wrap_fsdp_loss, StepSizes),
    Wrapping("fsdp_train_step", _STEP.format(""), wrap_step("fsdp_train_step", step_axes, masked=True), StepSizes),
    Wrapping(
        "hybrid_shard_step", _STEP.format("replica_axis, "), wrap_step("hybrid_shard_step", hybrid_axes), StepSizes
    ),
)
