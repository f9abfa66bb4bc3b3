"""``accumulate_gradients``: the gradient of a batch from microbatches, one at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.single_device.common import does_not_grow
from autograder.chapters.single_device.wrapping import MESH
from autograder.contract import facts, limits
from autograder.contract.cases import model_of, model_sizes, params_of
from autograder.contract.draws import batch_of, draw_leaves, unseen_model
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.model import full_loss

FEW, MANY = "2 microbatches", "8 microbatches"


def _draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {
        "params": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)),
        "batch": batch_of(case, int(rng.integers(2**31))),
    }


@lru_cache(maxsize=16)
def _value_and_gradient(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.value_and_grad(lambda params, batch: full_loss(model, params, batch)))


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Loss and gradient of the whole batch at once."""
    loss, gradients = _value_and_gradient(model_sizes(case))(inputs["params"], inputs["batch"])
    return {"values": np.asarray(loss), "gradients": jax.tree.map(np.asarray, gradients)}


_GROWS = "What is written once for each microbatch, and could be a loop?"
_TOO_MUCH = "What of one microbatch is still there when the next one starts?"
_TWICE = "Is a forward or backward pass run that another one has done already?"


def _facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", "Mean over rows: of each microbatch, and of them all? "),
        facts.global_norm_matches(cases, "gradients"),
        does_not_grow(cases, FEW, MANY, "the number of microbatches", _GROWS),
        limits.temporaries_within(large, references, 1.15, _TOO_MUCH, weight=2),
        limits.flops_within(large, references, 1.15, _TWICE),
    ]


_MLP = {"width": 16, "hidden": 32, "num_layers": 2, "features": 8, "rows": 32, "num_microbatches": 8}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 12, "num_microbatches": 4}
# A batch that is small beside a gradient: nobody is charged much for laying it out anew.
_LARGE = {"width": 2048, "hidden": 8192, "num_layers": 2, "features": 128, "rows": 16384, "num_microbatches": 8}


def _unseen(rng: np.random.Generator) -> Case:
    return Case("unseen", MESH, {**unseen_model(rng), "num_microbatches": int(rng.choice([3, 6]))})


TASK = Task(
    wrapping=wrappings("single_device")["accumulate_gradients"],
    kind="transform",
    points=2,
    cases=(
        Case(MANY, MESH, _MLP, quick=True),
        Case(FEW, MESH, {**_MLP, "num_microbatches": 2}, quick=True),
        Case("4 microbatches of tokens", MESH, _TRANSFORMER),
        Case("1 microbatch", MESH, {**_MLP, "num_microbatches": 1}),
    ),
    unseen=_unseen,
    draw=_draw,
    oracle=oracle,
    facts=_facts,
    analysed=(Case("8 microbatches, width 2048", MESH, _LARGE), MANY),
    naive="differentiates_the_scanned_loss",
)
