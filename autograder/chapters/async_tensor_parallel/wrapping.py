"""What the functions of ``async_tensor_parallel`` are given, and the form of what they give."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.cases import varying
from autograder.contract.forms import describe
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping
from course.mesh import abstract_mesh

GATHER, SCATTER = "gather", "scatter"
KINDS = {
    "ring_gather_matmul": GATHER,
    "matmul_ring_scatter": SCATTER,
    "bidirectional_gather_matmul": GATHER,
    "bidirectional_matmul_scatter": SCATTER,
}


def axis_of(case: Case) -> str:
    """The axis over which features are split: ``tensor`` where there is one, else the last."""
    return "tensor" if "tensor" in case.mesh else list(case.mesh)[-1]


def size_of(case: Case) -> int:
    """How many devices split the features."""
    return case.mesh[axis_of(case)]


def groups_of(case: Case) -> int:
    """How many groups of devices work on batches of their own."""
    return math.prod(case.mesh.values()) // size_of(case)


def others_of(case: Case) -> tuple[str, ...]:
    """The axes over which the batch is split."""
    return tuple(axis for axis in case.mesh if axis != axis_of(case))


def rows_shape(case: Case, features: int) -> tuple[int, ...]:
    """The whole array of all rows: ``[batch, rows, features]``, without the batch where the case names none."""
    s = case.sizes
    batch = (groups_of(case) * s["batch"],) if "batch" in s else ()
    return *batch, s["rows"] * size_of(case), features


def _rows_spec(case: Case, rows: str | None, features: str | None) -> P:
    """The spec of such an array, its batch split over all other axes."""
    return P(*((others_of(case),) if "batch" in case.sizes else ()), rows, features)


def wrap_product(name: str, function: Any, case: Case) -> Wrapped:
    """Both arrays enter varying over all axes; a kernel's gradients are each group's own, one below the other."""
    s, n, axis, others = case.sizes, size_of(case), axis_of(case), others_of(case)
    split = KINDS[name] == GATHER
    whole_in, whole_out = (s["d_in"], n * s["d_out"]) if split else (n * s["d_in"], s["d_out"])
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
    if s["backward"]:
        inputs["upstream"] = jax.ShapeDtypeStruct(rows_shape(case, whole_out), np.float32)
        specs["upstream"] = upstream
        results["gradients"] = {"x": specs["x"], "kernel": P(others, axis) if split else P((*others, axis))}

    def run(x, kernel):
        result = function(x, kernel, axis)
        rows = s["rows"] * (n if split else 1)
        wanted = jax.ShapeDtypeStruct((*x.shape[:-2], rows, s["d_out"]), np.float32)
        if not hasattr(result, "shape") or (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            raise Mismatch(
                f"on mesh {case.mesh_text} {name} gets {describe(x)} and {describe(kernel)} and gives "
                f"{describe(result)}, expected {describe(wanted)}"
            )
        return result

    def local(x, kernel, upstream=None):
        x, kernel, upstream = varying((x, kernel, upstream), case.mesh)
        if upstream is None:
            return {"values": run(x, kernel)}
        result, transpose = jax.vjp(run, x, kernel)
        of_x, of_kernel = transpose(upstream)
        return {"values": result, "gradients": {"x": of_x, "kernel": of_kernel}}

    def program(**arrays):
        in_specs = tuple(specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=in_specs, out_specs=results)
        return mapped(*arrays.values())

    return Wrapped(program, inputs, specs, results, {"kernel": "state"})


def mlp_shapes(case: Case) -> dict[str, Any]:
    """The whole parameters; ``hidden`` is what one device has of the hidden features."""
    width, hidden = case.sizes["width"], case.sizes["hidden"] * size_of(case)

    def dense(d_in, d_out):
        return {
            "kernel": jax.ShapeDtypeStruct((d_in, d_out), np.float32),
            "bias": jax.ShapeDtypeStruct((d_out,), np.float32),
        }

    return {"up": dense(width, hidden), "down": dense(hidden, width)}


def wrap_mlp(function: Any, case: Case) -> Wrapped:
    """All leaves enter varying over all axes. What flows back depends on the result, so it cannot start before it."""
    axis, others = axis_of(case), others_of(case)
    rows = _rows_spec(case, axis, None)
    specs = {"up": {"kernel": P(None, axis), "bias": P(axis)}, "down": {"kernel": P(axis), "bias": P()}}
    # One below the other, since a dim of their own would be a copy of each.
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
    activations = jax.ShapeDtypeStruct(rows_shape(case, case.sizes["width"]), np.float32)

    def run(params, x):
        result = function(params, x, axis)
        if not hasattr(result, "shape") or (result.shape, result.dtype) != (x.shape, x.dtype):
            raise Mismatch(
                f"on mesh {case.mesh_text} async_tp_mlp gets {describe(x)} and gives {describe(result)}, "
                f"expected {describe(x)}"
            )
        return result

    def local(params, x, upstream):
        params, x, upstream = varying((params, x, upstream), case.mesh)
        result, transpose = jax.vjp(run, params, x)
        of_params, of_x = transpose(upstream * result)
        return {"values": result, "gradients": {"params": of_params, "x": of_x}}

    def program(params, x, upstream):
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=(specs, rows, rows), out_specs=results)
        return mapped(params, x, upstream)

    inputs = {"params": mlp_shapes(case), "x": activations, "upstream": activations}
    in_specs = {"params": specs, "x": rows, "upstream": rows}
    return Wrapped(program, inputs, in_specs, results, {"params": "state"})


WRAPPINGS = (
    *(
        Wrapping(name, "(x, kernel, axis_name)", lambda function, case, name=name: wrap_product(name, function, case))
        for name in KINDS
    ),
    Wrapping("async_tp_mlp", "(params, x, axis_name)", wrap_mlp),
)
