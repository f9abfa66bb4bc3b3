"""``forward_3d``: the loss of a pipeline's rows, whose gradient comes back complete and in parts."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.chapters.transformer_3d.sent import no_pieces, sent_facts
from autograder.chapters.transformer_3d.shared import SIZES, draw_batch, given_specs, run_on_one_device, unseen
from autograder.chapters.transformer_3d.wrapping.model import axes_of, stacked_of
from autograder.contract import facts, limits
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings

_GRADIENTS = "Which devices hold this leaf, which of them have only a share of its gradient, and who averages? "
_TOO_MUCH = "What is kept from the forward pass until the backward pass comes to it? Of a tick, its input would do."
_EXPOSED = "When can the weights of a repeat be on their way, and how often are they gathered for its ticks?"
# Of the reference's; and of the time that gathering in every tick adds.
TEMPORARIES, EXPOSED = 1.3, 0.7
# The results of bfloat16 products in layers of this size, against float32.
ROUNDED = 0.05


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {
        "params": draw_leaves(rng, stacked_of(case), 0.3),
        "batch": draw_batch(rng, case),
        "key": rng.integers(0, 2**32 - 1, 2, np.uint32),
        "upstream": np.float32(rng.uniform(-4, -2)),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """On one device, with all rows: the loss of each device's place on the data axis, ``upstream`` times gradients."""
    batches = {name: rows[None] for name, rows in inputs["batch"].items()}
    _, losses, gradients = run_on_one_device({**inputs, "batch": batches}, case)
    scaled = jax.tree.map(lambda gradient: inputs["upstream"] * gradient, gradients)
    return {"values": on_each_device(losses[0], case), "gradients": scaled}


def on_each_device(of_places: np.ndarray, case: Case) -> np.ndarray:
    """Numbers of the places on the data axis, ``[data, ...]``, as each device has them, in the mesh's order."""
    at = [axis for axis in case.mesh].index(axes_of(case)[0])
    places = np.indices(tuple(case.mesh.values()))[at].ravel()
    return of_places[places]


def forward_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    exact = [e for e in cases if not e.case.sizes["bfloat16"]]
    rounded = [e for e in cases if e.case.sizes["bfloat16"]]
    return [
        facts.arrays_match("values", exact, "values"),
        facts.arrays_match("gradients", exact, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(exact, "gradients"),
        _in_bfloat16(rounded),
        limits.temporaries_within(large, references, TEMPORARIES, _TOO_MUCH, weight=2),
        limits.spent_within(large, references, EXPOSED, "data", _EXPOSED, weight=2, than=limits.NAIVE),
        *sent_facts([*cases, large] if large else cases),
        no_pieces(cases),
    ]


def _in_bfloat16(cases: list[Evidence]) -> Fact:
    """Where it is asked for, most products are of bfloat16, and loss and gradients are near those of float32."""
    name, found = "bfloat16 products", []
    if not cases:
        return Fact(name, None, "not measured", "", message="no case of this check computes in bfloat16", weight=0)
    for e in cases:
        low = e.costs.products.get("bf16 x bf16", 0)
        rest = sum(e.costs.products.values()) - low
        near = facts.worst([facts.arrays_match(name, [e], of, tolerance=ROUNDED) for of in ("values", "gradients")])
        message = "" if low > rest else (
            f"with dtype bfloat16 there are {low} products of bfloat16 and {rest} others: those of all dense layers "
            "outnumber those of attention, forward and backward")  # fmt: skip
        passed = low > rest and near.passed
        found.append(Fact(name, bool(passed), f"{low} of {low + rest}", "most", "products", case=e.case.name,
                          line=e.line, message=message or near.message,
                          kind=Kind.BUDGET if near.passed else near.kind))  # fmt: skip
    return facts.worst(found)


_OPTIONS = {**SIZES, "num_layers": 2, "num_repeats": 1, "num_microbatches": 3, "dropout": 25,
            "max_seq": 16}  # fmt: skip
_RINGS = {**_OPTIONS, "rings": 1, "parallel": 1, "num_heads": 8}
_BFLOAT16 = {**_OPTIONS, "bfloat16": 1, "dropout": 0, "num_microbatches": 2}
# So large that the same leaves are split as in the small case, along the same dims.
_LARGE = {"width": 2048, "hidden": 8192, "num_heads": 16, "vocab": 32000, "seq": 512, "max_seq": 512,
          "min_size": 20000}  # fmt: skip


def _unseen(rng: np.random.Generator) -> Case:
    how = {name: int(rng.integers(2)) for name in ("remat", "parallel")}
    return unseen(rng, ((2, 2, 1), (1, 2, 2), (1, 1, 3), (3, 1, 2)), num_microbatches=3, dropout=15, **how)


CASES = (
    Case("data=2 x pipe=2 x tensor=2", {"data": 2, "pipe": 2, "tensor": 2}, SIZES, quick=True),
    Case("replica=1 x stage=2 x model=4, rings, side by side, dropout", {"replica": 1, "stage": 2, "model": 4}, _RINGS,
         quick=True),
    Case("data=2 x pipe=1 x tensor=2, bfloat16", {"data": 2, "pipe": 1, "tensor": 2}, _BFLOAT16),
    Case("data=4 x pipe=1 x tensor=2, no remat", {"data": 4, "pipe": 1, "tensor": 2}, {**_OPTIONS, "remat": 0}),
    Case("data=1 x pipe=8 x tensor=1", {"data": 1, "pipe": 8, "tensor": 1}, {**_OPTIONS, "num_layers": 16,
                                                                             "num_repeats": 2}),
    Case("data=1 x pipe=1 x tensor=1", {"data": 1, "pipe": 1, "tensor": 1}, _OPTIONS),
)  # fmt: skip

FORWARD_3D = Task(
    wrapping=wrappings("transformer_3d")["forward_3d"],
    kind="local",
    points=8,
    cases=CASES,
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=forward_facts,
    stretches=(
        {"seq": 64, "max_seq": 64, "width": 256, "num_heads": 16, "hidden": 1024, "vocab": 2048, "min_size": 2500},
    ),
    analysed=(Case("data=2 x pipe=2 x tensor=2, width 2048", CASES[0].mesh, {**SIZES, **_LARGE}), CASES[0].name),
    naive="keeps_everything",
    slow="gathers_in_every_tick",
    spent_on=("data",),
    given=given_specs,
)
