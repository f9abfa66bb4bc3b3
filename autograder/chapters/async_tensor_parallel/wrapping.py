"""Inputs of the functions of ``async_tensor_parallel``, and the form of their results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, Ordered, Sizes
from autograder.contract.case_builders import groups_of, others_of, parts_of, tensor_of
from autograder.contract.output_checks import same_shapes
from autograder.contract.wrapping import Wrapped, Wrapping, on_mesh
from course.mesh import varying

GATHER, SCATTER = "gather", "scatter"
KINDS = {
    "ring_gather_matmul": GATHER,
    "matmul_ring_scatter": SCATTER,
    "bidirectional_gather_matmul": GATHER,
    "bidirectional_matmul_scatter": SCATTER,
}


@dataclass(frozen=True, kw_only=True)
class Rows(Sizes):
    """Rows of one device, ``[batch, rows, features]``, or without the first dim where ``batch`` is 0."""

    rows: int
    batch: int = 0


@dataclass(frozen=True, kw_only=True)
class Product(Rows, Ordered):
    """One device's dims of a product; ``backward`` requests gradients too."""

    d_in: int
    d_out: int
    backward: bool = True


@dataclass(frozen=True, kw_only=True)
class Mlp(Rows):
    """An MLP over a tensor axis.

    ``hidden`` is the number of hidden features on one device; ``shared`` layers are the same over all other axes.
    """

    width: int
    hidden: int
    shared: bool = False


def rows_shape(case: Case[Any], features: int) -> tuple[int, ...]:
    """Shape of the global array: ``[batch, rows, features]``, without the batch if the case names none."""
    batch = (groups_of(case) * case.sizes.batch,) if case.sizes.batch else ()
    return *batch, case.sizes.rows * parts_of(case), features


def _rows_spec(case: Case[Any], rows: str | None, features: str | None) -> P:
    """The spec of such an array, its batch split over all other axes."""
    return P(*((others_of(case),) if case.sizes.batch else ()), rows, features)


def wrap_product(name: str, function: Any, case: Case[Product]) -> Wrapped:
    """Both arrays enter varying over all axes; each group returns its own kernel gradients, concatenated."""
    s, n, axis, others = case.sizes, parts_of(case), tensor_of(case), others_of(case)
    split = KINDS[name] == GATHER
    whole_in, whole_out = (s.d_in, n * s.d_out) if split else (n * s.d_in, s.d_out)
    specs = {
        "x": _rows_spec(case, axis, None) if split else _rows_spec(case, None, axis),
        "kernel": P(None, axis) if split else P(axis),
    }
    upstream = _rows_spec(case, None, axis) if split else _rows_spec(case, axis, None)
    inputs = {
        "x": jax.ShapeDtypeStruct(rows_shape(case, whole_in), np.float32),
        "kernel": jax.ShapeDtypeStruct((whole_in, whole_out), np.float32),
    }
    results: dict[str, Any] = {"values": upstream}
    if s.backward:
        inputs["upstream"] = jax.ShapeDtypeStruct(rows_shape(case, whole_out), np.float32)
        specs["upstream"] = upstream
        results["gradients"] = {"x": specs["x"], "kernel": P(others, axis) if split else P((*others, axis))}

    def run(x, kernel):
        rows = s.rows * (n if split else 1)
        expected = jax.ShapeDtypeStruct((*x.shape[:-2], rows, s.d_out), np.float32)
        return same_shapes(name, function(x, kernel, axis), expected, case)

    def local(x, kernel, upstream=None):
        x, kernel, upstream = varying((x, kernel, upstream), case.mesh)
        if upstream is None:
            return {"values": run(x, kernel)}
        result, transpose = jax.vjp(run, x, kernel)
        of_x, of_kernel = transpose(upstream)
        return {"values": result, "gradients": {"x": of_x, "kernel": of_kernel}}

    return on_mesh(local, case, {key: (inputs[key], specs[key]) for key in inputs}, results, {"kernel": "state"})


def mlp_shapes(case: Case[Mlp]) -> dict[str, Any]:
    """Shapes of the whole parameters; ``hidden`` is the number of hidden features on one device."""
    width, hidden = case.sizes.width, case.sizes.hidden * parts_of(case)

    def dense(d_in, d_out):
        return {
            "kernel": jax.ShapeDtypeStruct((d_in, d_out), np.float32),
            "bias": jax.ShapeDtypeStruct((d_out,), np.float32),
        }

    return {"up": dense(width, hidden), "down": dense(hidden, width)}


def wrap_mlp(function: Any, case: Case[Mlp]) -> Wrapped:
    """All leaves enter varying over all axes, or over the feature axis alone if they are shared.

    The cotangent depends on the result, so the backward pass starts only after it.
    """
    axis, others = tensor_of(case), others_of(case)
    rows = _rows_spec(case, axis, None)
    specs = {"up": {"kernel": P(None, axis), "bias": P(axis)}, "down": {"kernel": P(axis), "bias": P()}}
    # Concatenated, since a separate dim would copy each.
    everywhere = P((*others, axis))
    results = {
        "values": rows,
        "gradients": {
            "params": {
                "up": {"kernel": P(others, axis), "bias": everywhere},
                "down": {"kernel": everywhere, "bias": everywhere},
            },
            "x": rows,
        },
    }
    activations = jax.ShapeDtypeStruct(rows_shape(case, case.sizes.width), np.float32)

    def run(params, x):
        return same_shapes("async_tp_mlp", function(params, x, axis), x, case)

    def local(params, x, upstream):
        params = varying(params, (axis,) if case.sizes.shared else case.mesh)
        x, upstream = varying((x, upstream), case.mesh)
        result, transpose = jax.vjp(run, params, x)
        of_params, of_x = transpose(upstream * result)
        return {"values": result, "gradients": {"params": varying(of_params, case.mesh), "x": of_x}}

    inputs = {"params": (mlp_shapes(case), specs), "x": (activations, rows), "upstream": (activations, rows)}
    return on_mesh(local, case, inputs, results, {"params": "state"})


WRAPPINGS = (
    *(Wrapping(name, "(x, kernel, axis_name)", partial(wrap_product, name), Product) for name in KINDS),
    Wrapping("async_tp_mlp", "(params, x, axis_name)", wrap_mlp, Mlp),
)
