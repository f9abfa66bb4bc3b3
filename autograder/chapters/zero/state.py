"""Grading of ``shard_optimizer_state`` and ``global_norm``: how the state is split, and the norm of its parts."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import all_reduce_bytes, split_spec
from autograder.chapters.draws import ODD, draw_leaves, meshes, unseen_case
from autograder.chapters.zero.wrapping import (
    MOMENTS,
    NormLeaves,
    StateLeaves,
    axis_given,
    devices_of,
    leaf_shapes,
    of_leaves,
)
from autograder.contract import byte_facts, facts
from autograder.contract.byte_facts import resident_bytes
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.mesh import mesh_text

WRAPPINGS = wrappings("zero")

# shard_optimizer_state: zeros, and how they are split.


def _split_rule(case: Case[StateLeaves], shape: tuple[int, ...]) -> P:
    return split_spec(shape, devices_of(case), case.sizes.min_size, axis_given(case))


def shard_optimizer_state_oracle(inputs: dict[str, Any], case: Case[StateLeaves]) -> dict[str, Any]:
    moments = {name: jax.tree.map(np.zeros_like, inputs["params"]) for name in MOMENTS}
    return {"values": {**moments, "count": np.zeros((), np.int32)}}


def shard_optimizer_state_facts(evidence: TaskEvidence) -> list[Fact]:
    def rules(e: Evidence) -> list[P]:
        return [P(), *2 * [_split_rule(e.case, leaf.shape) for leaf in e.inputs]]

    def resident(e: Evidence, split: bool = True) -> int:
        shapes = [(), *2 * [leaf.shape for leaf in e.inputs]]
        specs = rules(e) if split else [P()] * len(shapes)
        return sum(resident_bytes(s, spec, e.case.mesh) for s, spec in zip(shapes, specs, strict=True))

    def arguments(case: Case[Any]) -> str:
        return f"axis_name {axis_given(case)!r}, min_size {case.sizes.min_size}"

    cases = evidence.cases
    return [
        facts.arrays_match("values", cases, "values", "What does the optimizer know before the first update? "),
        facts.specs_match(cases, rules, arguments),
        byte_facts.state_bytes(cases, resident, lambda e: resident(e, split=False)),
        byte_facts.only_collectives("communication", cases, ()),
    ]


def _unseen_leaves(rng: np.random.Generator) -> Case[StateLeaves]:
    unit, low = int(rng.choice([12, 24, 40])), int(rng.choice([32, 96, 128]))
    turn, every_axis = int(rng.integers(1, 8)), bool(rng.integers(2))
    return unseen_case(rng, StateLeaves(unit=unit, min_size=low, turn=turn, every_axis=every_axis), *ODD)


SHARD_OPTIMIZER_STATE = Task(
    wrapping=WRAPPINGS["shard_optimizer_state"],
    points=1,
    core_facts=("state bytes per device",),
    cases=(
        *meshes(StateLeaves(), three=StateLeaves(unit=12, min_size=40)),
        Case.on({"node": 4, "data": 2}, StateLeaves(every_axis=True), "over both"),
    ),
    unseen=_unseen_leaves,
    draw=lambda rng, case: {"params": draw_leaves(rng, leaf_shapes(case))},
    oracle=shard_optimizer_state_oracle,
    facts=shard_optimizer_state_facts,
    naive_memory="keeps_whole_moments",
)

# global_norm: leaves that are whole, and split over one axis, another, or both.


def _groups(case: Case[NormLeaves]) -> list[int]:
    """The number of devices in each set of axes that leaves are split over, without sets of one device."""
    specs = jax.tree.leaves(of_leaves(case, lambda _, spec: frozenset(jax.tree.leaves(tuple(spec)))))
    sizes = [math.prod(case.mesh[axis] for axis in axes) for axes in set(specs)]
    return [size for size in sizes if size > 1]


def global_norm_oracle(inputs: dict[str, Any], case: Case[NormLeaves]) -> dict[str, Any]:
    return {"values": np.repeat(norm_of(inputs["tree"]), math.prod(case.mesh.values()))}


def norm_of(tree: Any) -> np.float32:
    """The Euclidean norm of all leaves together."""
    return np.float32(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))


def _norm_question(cases: list[Evidence]) -> str:
    """The question about the first case with wrong norms: whether nothing, too little, or too much is reduced."""
    for e in cases:
        errors = e.measured["values"] / e.expected["values"] - 1
        if not np.all(np.abs(errors) <= facts.TOLERANCE):
            if not e.costs.collectives:
                return "No device knows the parts of the others: over which axes is each leaf's sum added up?"
            if np.ptp(errors) > facts.TOLERANCE:
                return "Devices disagree: for which leaves are parts missing? An entry of a spec can name several axes."
            if np.all(errors > 0):
                return (
                    "It is too large: which leaf is added up over devices that have the same part of it? "
                    "And is the root taken once, of the sum of all squares?"
                )
    return "How often does each element of each leaf count?"


def global_norm_facts(evidence: TaskEvidence) -> list[Fact]:
    cases, once = evidence.cases, "One is enough for each set of axes that leaves are split over."
    return [
        facts.arrays_match("values", cases, "values", _norm_question(cases), weight=2),
        byte_facts.times_sent("all-reduces", cases, "all_reduce", lambda e: len(_groups(e.case)), once, fewer=True),
        byte_facts.bytes_sent(
            "all-reduce bytes",
            cases,
            "all_reduce",
            lambda e: sum(all_reduce_bytes(n, 4) for n in _groups(e.case)),
            times=(0, 1),
        ),
        byte_facts.only_collectives("other collectives", cases, ("all_reduce",)),
    ]


def _norm_case(mesh: dict[str, int], unit: int = 16, quick: bool = False) -> Case[NormLeaves]:
    return Case(mesh_text(mesh), mesh, NormLeaves(unit=unit), quick)


GLOBAL_NORM = Task(
    wrapping=WRAPPINGS["global_norm"],
    points=2,
    core_facts=("all-reduce bytes", "other collectives"),
    cases=(
        _norm_case({"data": 4, "tensor": 2}, quick=True),
        _norm_case({"pipe": 3, "tensor": 2}, 12, quick=True),
        _norm_case({"data": 8}),
        _norm_case({"data": 2, "tensor": 1}),
        _norm_case({"data": 1}),
    ),
    unseen=lambda rng: unseen_case(
        rng, NormLeaves(unit=int(rng.choice([8, 24])), turn=int(rng.integers(1, 8))), (2, 4), (2, 2), (3, 2), (5,)
    ),
    draw=lambda rng, case: draw_leaves(rng, GLOBAL_NORM.input_shapes(case)),
    oracle=global_norm_oracle,
    facts=global_norm_facts,
    naive_memory="gathers_every_leaf",
)
