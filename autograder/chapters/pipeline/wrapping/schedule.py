"""Microbatches, ticks and whole schedules: inputs of their functions, and the form of their results.

When a stage has work is what ``pipeline_tick`` must compute, so the mask of results to compare arrives as an input.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, Sizes
from autograder.contract.case_builders import groups_of, others_of, pipe_of, stages_of
from autograder.contract.output_checks import describe, same_shapes, same_tree, tuple_of
from autograder.contract.wrapping import Mismatch, Wrapped, on_mesh
from course.mesh import varying

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
