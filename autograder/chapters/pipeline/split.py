"""``split_microbatches``: rows in equal parts, in their order, where they are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.chapters.pipeline.shared import refused, refuses
from autograder.contract import Case, Evidence, Task, Wrapped
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.mesh import abstract_mesh

NAME = "split_microbatches"
_HINT = "Whoever drops a row or fills one up trains on another batch than they think."


def _shapes(case: Case, rows: int) -> dict[str, Any]:
    width = case.sizes["width"]
    leaf = jax.ShapeDtypeStruct
    return {
        "inputs": leaf((rows, width), np.float32),
        "targets": leaf((rows,), np.int32),
        "more": {"weights": leaf((rows, 3, 2), np.float32)},
    }


def _sizes(case: Case) -> tuple[int, int, int]:
    """Devices, microbatches, and rows of one device."""
    devices = int(np.prod(list(case.mesh.values())))
    return devices, case.sizes["microbatches"], case.sizes["microbatches"] * case.sizes["rows"]


def wrap(function: Any, case: Case) -> Wrapped:
    axes = tuple(case.mesh)
    devices, count, rows = _sizes(case)

    def local(batch):
        found = forms.same_tree("microbatches", function(batch, count), batch)
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, rows // count, *a.shape[1:]), a.dtype), batch)
        forms.same_shapes(NAME, found, like, case)
        uneven = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), _shapes(case, rows + 1))
        flag = count == 1 or refuses(lambda: function(uneven, count), rows + 1, count)
        return {"values": found, "refused": jnp.asarray(flag)}

    spec, results = P(axes), {"values": P(None, axes), "refused": P()}

    def program(batch):
        return jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=spec, out_specs=results)(batch)

    return Wrapped(program, {"batch": _shapes(case, devices * rows)}, {"batch": spec}, results)


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    def leaf(shape):
        if shape.dtype == np.int32:
            return rng.integers(1000, size=shape.shape, dtype=np.int32)
        return rng.standard_normal(shape.shape, np.float32)

    devices, _, rows = _sizes(case)
    return {"batch": jax.tree.map(leaf, _shapes(case, devices * rows))}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    devices, count, rows = _sizes(case)

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
    mesh = [{"data": 4}, {"pipe": 2, "data": 2}, {"tensor": 8}][rng.integers(3)]
    return Case(
        "unseen", mesh, {"microbatches": int(rng.choice([2, 5, 7])), "rows": int(rng.choice([3, 4])), "width": 6}
    )


SPLIT_MICROBATCHES = Task(
    wrapping=Wrapping(NAME, "(batch, num_microbatches)", wrap),
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
