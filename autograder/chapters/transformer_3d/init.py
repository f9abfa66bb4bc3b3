"""``init_3d``: each device's part of a Transformer's parameters, over three axes at once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.transformer_3d.shared import SIZES, specs_of, unseen
from autograder.chapters.transformer_3d.wrapping.model import in_stages, stacked_of, whole_of
from autograder.contract import facts, forms
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.program.program import spec_of


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {"params": draw_leaves(rng, whole_of(case))}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Put together again, the parts are the whole parameters, in stages."""
    return {"values": in_stages(inputs["params"], case)}


def _held(e: Evidence) -> int:
    shapes, specs = jax.tree.leaves(stacked_of(e.case)), _leaves(specs_of(e.case))
    return sum(facts.held_bytes(leaf.shape, spec, e.case.mesh) for leaf, spec in zip(shapes, specs, strict=True))


def _whole(e: Evidence) -> int:
    return sum(4 * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(stacked_of(e.case)))


def _leaves(specs: Any) -> list[P]:
    return jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))


def _specs_by_rule(cases: list[Evidence]) -> Fact:
    found = []
    for e in cases:
        rules = _leaves(specs_of(e.case))
        wrong = [(part, rule) for part, rule in zip(e.outputs, rules, strict=True)
                 if part.spec != spec_of(rule, len(part.shape))]  # fmt: skip
        message = ""
        if wrong:
            part, rule = wrong[0]
            message = (
                f"leaf {part.name.partition('/')[2]} {list(part.shape)} on mesh {e.case.mesh_text}: measured "
                f"{forms.show_spec(part.partition_spec)}, expected {forms.show_spec(rule)} "
                f"(min_size {e.case.sizes['min_size']})"
            )
        right, every = len(rules) - len(wrong), len(rules)
        found.append(Fact("split dims", not wrong, f"{right} of {every}", f"{every} of {every}", "leaves",
                          case=e.case.name, line=e.line, message=message))  # fmt: skip
    return facts.worst(found)


def init_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", "Put together, the parts must give back each layer. "),
        _specs_by_rule(cases),
        facts.state_bytes(cases, _held, _whole),
        facts.only_collectives("communication", cases, ()),
    ]


_SMALL = {**SIZES, "num_layers": 8}


def _unseen(rng: np.random.Generator) -> Case:
    return unseen(rng, ((2, 4, 1), (4, 1, 2), (3, 2, 1), (1, 2, 3)), num_repeats=int(rng.integers(1, 4)))


INIT_3D = Task(
    wrapping=wrappings("transformer_3d")["init_3d"],
    kind="local",
    points=3,
    cases=(
        Case("data=2 x pipe=2 x tensor=2", {"data": 2, "pipe": 2, "tensor": 2}, _SMALL, quick=True),
        Case("replica=4 x stage=2 x model=1", {"replica": 4, "stage": 2, "model": 1}, _SMALL, quick=True),
        Case("data=1 x pipe=1 x tensor=8", {"data": 1, "pipe": 1, "tensor": 8}, _SMALL),
        Case("data=8 x pipe=1 x tensor=1", {"data": 8, "pipe": 1, "tensor": 1}, {**_SMALL, "num_repeats": 4}),
        Case("data=1 x pipe=2 x tensor=1", {"data": 1, "pipe": 2, "tensor": 1}, {**_SMALL, "num_repeats": 1}),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=init_facts,
)
