"""``shard_params`` and ``gather_params``: a tree of leaves of every kind, split and put together again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import split_spec
from autograder.chapters.fsdp.shared import as_given, mean_or_own, ring_bytes
from autograder.chapters.fsdp.wrapping import leaf_shapes
from autograder.contract import facts, forms
from autograder.contract.cases import axis_of, axis_size
from autograder.contract.draws import ODD, draw_leaves, meshes, unseen_mesh
from autograder.contract.facts import held_bytes
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.program import Leaf
from course.program.program import spec_of


def shard_params_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", "Put together, the parts must give back the leaf. "),
        _specs_by_rule(cases),
        facts.state_bytes(cases, _held, lambda e: _held(e, split=False)),
        facts.only_collectives("communication", cases, ()),
    ]


def _specs_by_rule(cases: list[Evidence]) -> Fact:
    found = []
    for e in cases:
        pairs = list(zip(e.inputs, e.outputs, strict=True))
        wrong = [(leaf, part) for leaf, part in pairs if part.spec != spec_of(_rule_of(leaf, e.case), len(leaf.shape))]
        message = ""
        if wrong:
            leaf, part = wrong[0]
            message = (
                f"leaf {leaf.name.partition('/')[2]} {list(leaf.shape)} on mesh {e.case.mesh_text}: measured "
                f"{forms.show_spec(part.partition_spec)}, expected {forms.show_spec(_rule_of(leaf, e.case))} "
                f"(axis_name {axis_of(e.case)!r}, min_size {e.case.sizes['min_size']})"
            )
        measured, limit = f"{len(pairs) - len(wrong)} of {len(pairs)}", f"{len(pairs)} of {len(pairs)}"
        place: dict[str, Any] = {"case": e.case.name, "line": e.line}
        found.append(Fact("split dims", not wrong, measured, limit, "leaves", **place, message=message))
    return facts.worst(found)


def _rule_of(leaf: Leaf, case: Case) -> P:
    return split_spec(leaf.shape, axis_size(case), case.sizes["min_size"], axis_of(case))


def _held(e: Evidence, split: bool = True) -> int:
    """Bytes that the rule leaves on each device, or those of the whole tree."""
    return sum(held_bytes(leaf.shape, _rule_of(leaf, e.case) if split else P(), e.case.mesh) for leaf in e.inputs)


def _gather_specs(case: Case) -> Any:
    size, low, axis = axis_size(case), case.sizes["min_size"], axis_of(case)
    return jax.tree.map(lambda s: split_spec(s.shape, size, low, axis), leaf_shapes(case))


def _draw_gather_params(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return draw_leaves(rng, GATHER_PARAMS.wrap(None, case).inputs)  # type: ignore[arg-type]


def gather_params_oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Whole leaves on every device; the mean over devices of what flows back, or each device's own."""
    size = axis_size(case)
    return {
        "values": jax.tree.map(lambda a: np.repeat(a[None], size, 0), inputs["shards"]),
        "gradients": mean_or_own(inputs["upstream"], _gather_specs(case)),
    }


def gather_params_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=3),
        facts.bytes_sent("all-gather bytes", cases, "all_gather", ring_bytes),
        facts.bytes_sent("reduce-scatter bytes", cases, "reduce_scatter", ring_bytes),
        facts.only_collectives("other collectives", cases, ("all_gather", "reduce_scatter")),
    ]


_LEAVES = {"unit": 16, "min_size": 64, "turn": 0}


def _unseen_leaves(rng: np.random.Generator) -> Case:
    sizes = {"unit": int(rng.choice([12, 24, 40])), "min_size": int(rng.choice([32, 96, 128]))}
    return Case("unseen", unseen_mesh(rng, *ODD), {**sizes, "turn": int(rng.integers(1, 8))})


SHARD_PARAMS = Task(
    wrapping=wrappings("fsdp")["shard_params"],
    kind="local",
    points=2,
    cases=meshes(_LEAVES),
    unseen=_unseen_leaves,
    draw=lambda rng, case: {"params": draw_leaves(rng, leaf_shapes(case))},
    oracle=lambda inputs, case: {"values": inputs["params"]},
    facts=shard_params_facts,
    naive="keeps_everything",
)

GATHER_PARAMS = Task(
    wrapping=wrappings("fsdp")["gather_params"],
    kind="local",
    points=3,
    cases=meshes(_LEAVES),
    unseen=_unseen_leaves,
    given=lambda case: as_given(_gather_specs(case)),
    draw=_draw_gather_params,
    oracle=gather_params_oracle,
    facts=gather_params_facts,
    naive="sums_padded_parts",
)
