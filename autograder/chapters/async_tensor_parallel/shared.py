"""What the tasks of ``async_tensor_parallel`` share: meshes with an axis of features, and two kinds of product."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts
from autograder.cases import varying
from autograder.contract import Case, Evidence, Mismatch, Wrapped
from autograder.forms import describe
from autograder.verdict import Fact
from course.mesh import abstract_mesh

GATHER, SCATTER = "gather", "scatter"
# At these sizes, on eight idealised H100, a chunk of rows travels about as long as it is multiplied.
WIDTH, HIDDEN, TOKENS = 4608, 18432, 4096
UNSEEN = ({"tensor": 4}, {"data": 4, "tensor": 2}, {"tensor": 4, "data": 2}, {"pipe": 2, "tensor": 4})


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


def rows_spec(case: Case, rows: str | None, features: str | None) -> P:
    """The spec of such an array, its batch split over all other axes."""
    return P(*((others_of(case),) if "batch" in case.sizes else ()), rows, features)


def chunk_bytes(case: Case, features: int) -> int:
    """Of one device's rows with so many features, in float32."""
    return 4 * case.sizes.get("batch", 1) * case.sizes["rows"] * features


def grouped(array: np.ndarray, case: Case) -> np.ndarray:
    """``[groups, batch, rows, features]``: what each group of devices works on, in float64."""
    return array.reshape(groups_of(case), -1, *array.shape[-2:]).astype(np.float64)


def wrap(kind: str, name: str, function: Any, case: Case) -> Wrapped:
    """Both arrays enter varying over all axes; a kernel's gradients are each group's own, one below the other."""
    s, n, axis, others = case.sizes, size_of(case), axis_of(case), others_of(case)
    split = kind == GATHER
    whole_in, whole_out = (s["d_in"], n * s["d_out"]) if split else (n * s["d_in"], s["d_out"])
    specs = {
        "x": rows_spec(case, axis, None) if split else rows_spec(case, None, axis),
        "kernel": P(None, axis) if split else P(axis),
    }
    upstream = rows_spec(case, None, axis) if split else rows_spec(case, axis, None)
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


def draw(kind: str, rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Rows and gradients of unit size, and a kernel that keeps it."""
    shapes = wrap(kind, "", None, case).inputs
    found = {name: rng.standard_normal(shape.shape) for name, shape in shapes.items()}
    found["kernel"] /= np.sqrt(len(found["kernel"]))
    return {name: array.astype(np.float32) for name, array in found.items()}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """One product on one device, and its gradients."""
    kernel = inputs["kernel"].astype(np.float64)
    values = (inputs["x"].astype(np.float64) @ kernel).astype(np.float32)
    if "upstream" not in inputs:
        return {"values": values}
    of_x = (inputs["upstream"].astype(np.float64) @ kernel.T).astype(np.float32)
    x, upstream = grouped(inputs["x"], case), grouped(inputs["upstream"], case)
    of_kernel = np.einsum("gbri,gbro->gio", x, upstream).astype(np.float32)
    return {"values": values, "gradients": {"x": of_x, "kernel": of_kernel.reshape(-1, of_kernel.shape[-1])}}


def permuted(cases: list[Evidence], features: str) -> Fact:
    """Permutes send (n-1)/n of the rows forward, as much again backward, and once more at most for the kernel."""

    def form(e: Evidence) -> float:
        return (size_of(e.case) - 1) * chunk_bytes(e.case, e.case.sizes[features])

    found = []
    for e in cases:
        times = (2, 3) if e.case.sizes["backward"] else (1, 1)
        found.append(facts.bytes_sent("permute bytes", [e], "collective_permute", form, times=times))
    return facts.worst(found)


def meshes(small: dict[str, int], deep: dict[str, int], forward: str) -> tuple[Case, ...]:
    """The meshes that these functions are run on; ``forward`` names the case without gradients, which is analysed."""
    both = {"backward": 1}
    return (
        Case("tensor=8", {"tensor": 8}, {**small, **both}, quick=True),
        Case(forward, {"tensor": 8}, {**small, "backward": 0}, quick=True),
        Case("data=2 x tensor=4", {"data": 2, "tensor": 4}, {**deep, **both}, quick=True),
        Case("tensor=2 x data=4", {"tensor": 2, "data": 4}, {**deep, **both}),
        Case("model=2", {"model": 2}, {**small, **both}),
        Case("data=8 x tensor=1", {"data": 8, "tensor": 1}, {**deep, **both}),
    )


def unseen_mesh(rng: np.random.Generator) -> dict[str, int]:
    """A mesh that learners have not seen."""
    return UNSEEN[rng.integers(len(UNSEEN))]
