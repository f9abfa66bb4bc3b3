"""What the functions of ``collectives`` are given, and the form of what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract import answers, forms
from autograder.contract.cases import axis_of, axis_size
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping
from course.mesh import abstract_mesh, as_varying

RINGS = ("ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "ring_all_to_all")


def _chunks(case: Case, entering: bool, name: str) -> int:
    """How many chunks a device holds before or after."""
    one = name == ("ring_all_gather" if entering else "ring_reduce_scatter")
    return 1 if one else axis_size(case)


def local_shape(case: Case, name: str, *, entering: bool) -> tuple[int, ...]:
    """The shape of what a device enters or leaves with."""
    s = case.sizes
    return _chunks(case, entering, name) * s["chunk"], *([s["depth"]] if "depth" in s else []), s["width"]


def wrap_ring(name: str, function: Any, case: Case) -> Wrapped:
    axis, n = axis_of(case), axis_size(case)
    enters, leaves = (local_shape(case, name, entering=entering) for entering in (True, False))
    results: dict[str, Any] = {"values": P(axis)}

    def run(x):
        result = function(x, axis)
        wanted = jax.ShapeDtypeStruct(leaves, np.float32)
        if not hasattr(result, "shape") or (result.shape, result.dtype) != (wanted.shape, wanted.dtype):
            raise Mismatch(
                f"on mesh {case.mesh_text} {name} gets {forms.describe(x)} and gives {forms.describe(result)}, "
                f"expected {forms.describe(wanted)}"
            )
        return as_varying(result, axis)

    def forward(x):
        return {"values": run(x)[None]}

    def both_ways(x, upstream):
        result, transpose = jax.vjp(run, x)
        return {"values": result[None], "gradients": transpose(upstream)[0][None]}

    inputs = {"x": jax.ShapeDtypeStruct((n * enters[0], *enters[1:]), np.float32)}
    if case.sizes["backward"]:
        inputs["upstream"] = jax.ShapeDtypeStruct((n * leaves[0], *leaves[1:]), np.float32)
        results["gradients"] = P(axis)

    def program(**arrays):
        local = both_ways if "upstream" in arrays else forward
        specs = (P(axis),) * len(arrays)
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=specs, out_specs=results)
        return mapped(*arrays.values())

    return Wrapped(program, inputs, dict.fromkeys(inputs, P(axis)), results)


def axes_of(case: Case) -> tuple[str, str]:
    """The two axes of a picture."""
    first, second = case.mesh
    return first, second


def questions(case: Case) -> list[tuple[tuple[int, ...], P]]:
    """Shapes and specs on the case's mesh: each axis alone, both orders, both on one dim, dims that nobody splits."""
    rng = np.random.default_rng(case.sizes["seed"])
    axes = list(case.mesh)
    first, last = axes[0], axes[-1]
    specs = [P(first), P(None, last), P(None, None, first), P()]
    if len(axes) > 1:
        specs[2:2] = [P(last, first), P((first, last)), P(None, (last, first))]
    found = []
    for spec in specs:
        dims = max(2, len(spec) + int(rng.integers(2)))
        found.append((tuple(8 * int(n) for n in rng.integers(1, 7, dims)), spec))
    return found


def _wrap_picture(name: str, like: Any) -> Wrapping:
    """A puzzle about a picture, which is asked for the names of its axes."""

    def wrap(function: Any, case: Case) -> Wrapped:
        return answers.wrap_answer(name, lambda: function(*axes_of(case)), like, case.mesh)

    return Wrapping(name, "(first, second)", wrap)


def _wrap_numbers(name: str, signature: str, ask: Callable[..., Any], like: Any) -> Wrapping:
    """A puzzle about numbers: ``ask`` calls the function with one shape, spec and mesh."""

    def wrap(function: Any, case: Case) -> Wrapped:
        def every() -> Any:
            return tuple(ask(function, shape, spec, dict(case.mesh)) for shape, spec in questions(case))

        return answers.wrap_answer(name, every, (like,), case.mesh)

    return Wrapping(name, signature, wrap)


WRAPPINGS = (
    *(
        Wrapping(name, "(x, axis_name)", lambda function, case, name=name: wrap_ring(name, function, case))
        for name in RINGS
    ),
    *(_wrap_picture(f"puzzle_{name}", P()) for name in ("rows", "crossed", "slices")),
    _wrap_numbers("puzzle_block", "(shape, spec, mesh)", lambda f, *question: f(*question), (1,)),
    _wrap_numbers("puzzle_copies", "(spec, mesh)", lambda f, _, spec, mesh: f(spec, mesh), 1),
    *(_wrap_picture(f"puzzle_{name}", ("", "")) for name in ("join", "add", "turn")),
)
