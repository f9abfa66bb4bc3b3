"""Inputs of the functions of ``collectives``, and the form of their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, Ordered, Sizes
from autograder.contract.case_builders import axis_of, axis_size
from autograder.contract.output_checks import same_shapes
from autograder.contract.value_tasks import wrap_answer
from autograder.contract.wrapping import Wrapped, Wrapping, on_mesh
from course.mesh import as_varying

RINGS = ("ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "ring_all_to_all")


@dataclass(frozen=True, kw_only=True)
class Chunks(Ordered):
    """A ring's chunks, ``[chunk, depth, width]`` without the dims that are 0; ``backward`` requests gradients too."""

    chunk: int
    width: int
    depth: int = 0
    dtype: str = "float32"
    backward: bool = True

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims after the first."""
        return tuple(dim for dim in (self.depth, self.width) if dim)


@dataclass(frozen=True, kw_only=True)
class Questions(Sizes):
    """A puzzle's questions; ``seed`` draws their shapes and specs."""

    seed: int


def local_shape(case: Case[Chunks], name: str, *, entering: bool) -> tuple[int, ...]:
    """The shape of a device's input or output."""
    one_chunk = name == ("ring_all_gather" if entering else "ring_reduce_scatter")
    return (1 if one_chunk else axis_size(case)) * case.sizes.chunk, *case.sizes.dims


def _wrap_ring(name: str) -> Wrapping:
    def wrap(function: Any, case: Case[Chunks]) -> Wrapped:
        axis, n = axis_of(case), axis_size(case)
        enters, leaves = (local_shape(case, name, entering=entering) for entering in (True, False))
        dtype = np.dtype(case.sizes.dtype)

        def run(x):
            result = same_shapes(name, function(x, axis), jax.ShapeDtypeStruct(leaves, dtype), case)
            return as_varying(result, axis)

        def forward(x):
            return {"values": run(x)[None]}

        def both_ways(x, upstream):
            result, transpose = jax.vjp(run, x)
            return {"values": result[None], "gradients": transpose(upstream)[0][None]}

        inputs = {"x": (jax.ShapeDtypeStruct((n * enters[0], *enters[1:]), dtype), P(axis))}
        if not case.sizes.backward:
            return on_mesh(forward, case, inputs, {"values": P(axis)})
        inputs["upstream"] = jax.ShapeDtypeStruct((n * leaves[0], *leaves[1:]), dtype), P(axis)
        return on_mesh(both_ways, case, inputs, {"values": P(axis), "gradients": P(axis)})

    return Wrapping(name, "(x, axis_name)", wrap, Chunks)


def axes_of(case: Case[Any]) -> tuple[str, str]:
    """The two axes of a picture."""
    first, second = case.mesh
    return first, second


def questions(case: Case[Questions]) -> list[tuple[tuple[int, ...], P]]:
    """Shapes and specs on the case's mesh: single axes, two in either order, all on one dim, and unsplit dims."""
    rng = np.random.default_rng(case.sizes.seed)
    axes = list(case.mesh)
    first, last = axes[0], axes[-1]
    specs = [P(first), P(None, last), P(None, None, first), P()]
    if len(axes) > 1:
        specs[2:2] = [P(last, first), P(tuple(axes)), P(None, (last, first))]
    shapes_and_specs = []
    for spec in specs:
        dims = max(2, len(spec) + int(rng.integers(2)))
        shapes_and_specs.append((tuple(math.prod(case.mesh.values()) * int(n) for n in rng.integers(1, 7, dims)), spec))
    return shapes_and_specs


def _wrap_picture(name: str, like: Any) -> Wrapping:
    """Wrap a puzzle about a picture, whose answer names axes."""

    def wrap(function: Any, case: Case[Any]) -> Wrapped:
        return wrap_answer(name, lambda: function(*axes_of(case)), like, case)

    return Wrapping(name, "(first, second)", wrap, Sizes)


def _wrap_numbers(name: str, signature: str, ask: Callable[..., Any], like: Any) -> Wrapping:
    """Wrap a puzzle about numbers: ``ask`` calls the function with one shape, spec and mesh."""

    def wrap(function: Any, case: Case[Questions]) -> Wrapped:
        def all_answers() -> Any:
            return tuple(ask(function, shape, spec, dict(case.mesh)) for shape, spec in questions(case))

        return wrap_answer(name, all_answers, (like,), case)

    return Wrapping(name, signature, wrap, Questions)


WRAPPINGS = (
    *map(_wrap_ring, RINGS),
    *(_wrap_picture(f"puzzle_{name}", P()) for name in ("rows", "crossed", "slices")),
    _wrap_numbers("puzzle_block", "(shape, spec, mesh)", lambda f, *question: f(*question), (1,)),
    _wrap_numbers("puzzle_copies", "(spec, mesh)", lambda f, _, spec, mesh: f(spec, mesh), 1),
    *(_wrap_picture(f"puzzle_{name}", ("", "")) for name in ("join", "add", "turn")),
)
