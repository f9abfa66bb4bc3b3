"""``split_microbatches``: rows in equal parts, in their order, where they are."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.chapters.pipeline.shared import refused, unseen_stages
from autograder.chapters.pipeline.wrapping.schedule import split_shapes, split_sizes
from autograder.contract import facts
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

_HINT = "Whoever drops a row or fills one up trains on another batch than they think."


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    def leaf(shape):
        if shape.dtype == np.int32:
            return rng.integers(1000, size=shape.shape, dtype=np.int32)
        return rng.standard_normal(shape.shape, np.float32)

    devices, _, rows = split_sizes(case)
    return {"batch": jax.tree.map(leaf, split_shapes(case, devices * rows))}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    devices, count, rows = split_sizes(case)

    def split(leaf):
        parts = leaf.reshape(devices, count, rows // count, *leaf.shape[1:])
        return np.moveaxis(parts, 0, 1).reshape(count, -1, *leaf.shape[1:])

    return {"values": jax.tree.map(split, inputs["batch"]), "refused": np.True_}


def split_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", "Microbatch 0 is the first rows, in their order."),
        refused("uneven batch", cases, "a batch with one row too many", _HINT),
        facts.only_collectives("communication", cases, ()),
    ]


def _unseen(rng: np.random.Generator) -> Case:
    sizes = {
        "microbatches": int(rng.choice([2, 5, 7])),
        "rows": int(rng.choice([4, 5])),
        "width": int(rng.choice([4, 6])),
    }
    return Case("unseen", unseen_stages(rng, (4,), (2, 2), (6,), (2, 4)), sizes)


SPLIT_MICROBATCHES = Task(
    wrapping=wrappings("pipeline")["split_microbatches"],
    kind="local",
    points=1,
    cases=(
        Case("data=2 x pipe=4", {"data": 2, "pipe": 4}, {"microbatches": 4, "rows": 3, "width": 5}, quick=True),
        Case("data=8", {"data": 8}, {"microbatches": 3, "rows": 2, "width": 5}, quick=True),
        Case("tensor=2", {"tensor": 2}, {"microbatches": 8, "rows": 1, "width": 5}),
        Case("data=1", {"data": 1}, {"microbatches": 1, "rows": 7, "width": 5}),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=split_facts,
)
