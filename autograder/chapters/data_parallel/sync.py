"""``sync_gradients``: a mean over the axes that a leaf is replicated over, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.data_parallel.named import case_over, unseen_over
from autograder.chapters.data_parallel.wrapping import leaves_of, names_of, of_leaves, wrap_sync
from autograder.contract import facts
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact
from course.program.program import spec_of

_SIZES = {"unit": 16, "turn": 0}
CASES = (
    case_over({"data": 4, "tensor": 2}, ("data", "tensor"), _SIZES, quick=True),
    case_over({"data": 8}, ("data",), _SIZES, quick=True),
    case_over({"pipe": 4, "tensor": 2}, ("tensor",), _SIZES),
    case_over({"data": 2, "tensor": 1}, ("data", "tensor"), _SIZES),
    case_over({"data": 1}, ("data",), _SIZES),
)


def unseen(rng: np.random.Generator) -> Case:
    return unseen_over(rng, {"unit": int(rng.choice([8, 24, 32])), "turn": int(rng.integers(1, 8))})


def open_axes(spec: P, case: Case) -> tuple[str, ...]:
    """The mesh axes that a leaf is not split over: it has one gradient for each of their places."""
    named = {axis for entry in spec_of(spec, len(spec)) for axis in entry}
    return tuple(axis for axis in case.mesh if axis not in named)


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return draw_leaves(rng, wrap_sync(None, case).inputs)


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The mean over the dims of the named axes that a leaf is not split over, given to each of their places."""

    def mean(stacked, spec):
        averaged = {*open_axes(spec, case)} & {*names_of(case)}
        dims = tuple(i for i, axis in enumerate(case.mesh) if axis in averaged)
        average = np.mean(stacked, dims, np.float64, keepdims=True).astype(np.float32)
        return np.broadcast_to(average, stacked.shape).copy()

    return {"values": jax.tree.map(mean, inputs["gradients"], of_leaves(case, lambda _, spec: spec))}


def _reduced(case: Case) -> list[tuple[int, int]]:
    """Of each leaf that must be reduced: how many devices take part, and its local bytes."""
    found = []
    for shape, spec in jax.tree.leaves(leaves_of(case), is_leaf=lambda x: isinstance(x, tuple)):
        group = math.prod(case.mesh[axis] for axis in open_axes(spec, case) if axis in names_of(case))
        if group > 1:
            found.append((group, 4 * math.prod(shape)))
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
