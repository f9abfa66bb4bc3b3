"""``sync_gradients``: a mean over the axes that a leaf is replicated over, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.chapters.data_parallel.named import case_over, names_of, varies_everywhere
from autograder.contract import Case, Evidence, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from course.mesh import abstract_mesh
from course.program.program import spec_of

_SIZES = {"unit": 16}
CASES = (
    case_over({"data": 4, "tensor": 2}, ("data", "tensor"), _SIZES, quick=True),
    case_over({"data": 8}, ("data",), _SIZES, quick=True),
    case_over({"pipe": 4, "tensor": 2}, ("tensor",), _SIZES),
    case_over({"data": 2, "tensor": 1}, ("data", "tensor"), _SIZES),
    case_over({"data": 1}, ("data",), _SIZES),
)


def unseen(rng: np.random.Generator) -> Case:
    mesh = [{"data": 2, "pipe": 4}, {"tensor": 4, "data": 2}, {"tensor": 2, "data": 2}][rng.integers(3)]
    names = tuple(axis for axis in mesh if axis == "data" or rng.integers(2))
    found = case_over(mesh, names, {"unit": int(rng.choice([8, 24, 32]))})
    return Case("unseen", found.mesh, found.sizes)


def leaves_of(case: Case) -> dict[str, Any]:
    """Whole shape and spec of each leaf: whole, split over one axis, over another, over both in one dim or in two."""
    u, first, last = case.sizes["unit"], next(iter(case.mesh)), list(case.mesh)[-1]
    both = (first, last) if first != last else first
    return {
        "norm": {"scale": ((u,), P())},
        "up": {"kernel": ((u, 2 * u), P(None, last)), "bias": ((2 * u,), P(last))},
        "down": {"kernel": ((u // 2, u), P())},
        "stage": {"kernel": ((8, u // 4, 3), P(first))},
        "grid": ((16, u), P(first, last) if first != last else P(None, first)),
        "flat": ((16, 3), P(both)),
        "temperature": ((), P()),
    }


def _of(case: Case, take: Any) -> Any:
    return jax.tree.map(lambda leaf: take(*leaf), leaves_of(case), is_leaf=lambda x: isinstance(x, tuple))


def missing(spec: P, case: Case) -> tuple[str, ...]:
    """The mesh axes that a leaf is not split over: it has one gradient for each of their places."""
    named = {axis for entry in spec_of(spec, len(spec)) for axis in entry}
    return tuple(axis for axis in case.mesh if axis not in named)


def wrap(function: Any, case: Case) -> Wrapped:
    """Every device's gradient enters and leaves apart: one leading dim an axis that its leaf is not split over."""
    specs = _of(case, lambda shape, spec: spec)
    whole = _of(case, lambda shape, spec: (*(case.mesh[a] for a in missing(spec, case)), *shape))
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, np.float32), whole, is_leaf=lambda s: type(s) is tuple)
    places = _of(case, lambda shape, spec: P(*missing(spec, case), *spec))

    def local(gradients):
        own = jax.tree.map(lambda g, s: g.reshape(g.shape[len(missing(s, case)) :]), gradients, specs)
        synced = forms.same_tree("the result", function(own, specs, names_of(case)), own)
        forms.same_shapes("sync_gradients", synced, own, case)
        return jax.tree.map(lambda g, like: varies_everywhere(g, case).reshape(like.shape), synced, gradients)

    def program(gradients):
        mesh = abstract_mesh(case.mesh)
        return {"values": jax.shard_map(local, mesh=mesh, in_specs=(places,), out_specs=places)(gradients)}

    return Wrapped(program, {"gradients": stacked}, {"gradients": places}, {"values": places})


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return draw_leaves(rng, wrap(None, case).inputs)


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The mean over the leading dims of the named axes, given to each of their places."""

    def mean(stacked, spec):
        dims = tuple(i for i, axis in enumerate(missing(spec, case)) if axis in names_of(case))
        average = np.mean(stacked, dims, np.float64, keepdims=True).astype(np.float32)
        return np.broadcast_to(average, stacked.shape).copy()

    return {"values": jax.tree.map(mean, inputs["gradients"], _of(case, lambda shape, spec: spec))}


def _reduced(case: Case) -> list[tuple[int, int]]:
    """Of each leaf that must be reduced: how many devices take part, and its local bytes."""
    found = []
    for shape, spec in jax.tree.leaves(leaves_of(case), is_leaf=lambda x: isinstance(x, tuple)):
        open_axes = missing(spec, case)
        group = math.prod(case.mesh[axis] for axis in open_axes if axis in names_of(case))
        parts = math.prod(size for axis, size in case.mesh.items() if axis not in open_axes)
        if group > 1:
            found.append((group, 4 * math.prod(shape) // parts))
    return found


def sync_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    def form(e):
        return sum(2 * (n - 1) / n * size for n, size in _reduced(e.case))

    one = "One for each leaf that needs a mean, over all the axes that it needs one over."
    return [
        facts.arrays_match("values", cases, "values", "Which axes does this leaf's spec name? ", weight=2),
        facts.times_sent("all-reduces", cases, "all_reduce", lambda e: len(_reduced(e.case)), one),
        facts.bytes_sent("all-reduce bytes", cases, "all_reduce", form),
        facts.only_collectives("other collectives", cases, ("all_reduce",)),
    ]
