"""``split_backward``: a layer's backward pass in two halves that cost as much as the whole one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.chapters.draws import draw_leaves
from autograder.chapters.schedules.wrapping import Layer, activation_of
from autograder.contract import facts
from autograder.contract.case import UNSEEN
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("schedules")


def draw_split(rng: np.random.Generator, case: Case[Layer]) -> dict[str, Any]:
    inputs = WRAPPINGS["split_backward"].input_shapes(case)
    return {name: draw_leaves(rng, tree, 0.5 if name == "weights" else 1) for name, tree in inputs.items()}


def split_oracle(inputs: dict[str, Any], case: Case[Layer]) -> dict[str, Any]:
    """One layer's output, and its gradients as JAX computes them."""

    def layer(weights, x):
        return x + activation_of(case.sizes.activation)(x @ weights["up"]) @ weights["down"]

    y, back = jax.vjp(layer, inputs["weights"], inputs["x"])
    of_weights, of_x = back(inputs["upstream"])
    gradients = {"x": of_x} if case.sizes.passes == 2 else {"x": of_x, **of_weights}
    return jax.tree.map(np.asarray, {"values": y, "gradients": gradients})


def products(evidence: TaskEvidence) -> Fact:
    """Require two products in each pass: nothing is recomputed, and nothing is computed for another pass."""
    name, hint = "FLOPs", "Which product is computed again, or computed early, for a later pass?"

    def fact(e: Evidence) -> Fact:
        s = e.case.sizes
        form, count = s.passes * 2 * 2 * s.rows * s.width * s.hidden, sum(e.costs.products.values())
        passes, message = "all three functions" if s.passes == 3 else "forward and backward_input", ""
        if e.costs.flops > form:
            message = f"{passes} compute {e.costs.flops:,.0f} FLOPs together, and {form:,} are enough. {hint}"
        elif count > 2 * s.passes:  # such as sums of elementwise products
            message = f"{passes} compute {count} matmuls together, and {2 * s.passes} are enough. {hint}"
        return facts.case_fact(e, name, Kind.COMPUTE, message, e.costs.flops, form, unit=Unit.FLOPS, weight=2)

    return facts.worst([fact(e) for e in evidence.cases], name, Kind.COMPUTE)


def split_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.arrays_match("values", evidence.cases, "values"),
        facts.arrays_match(
            "gradients",
            evidence.cases,
            "gradients",
            "What does this leaf multiply in the forward pass, or which paths lead from `x` to the output? And which "
            "of these gradients go through the activation's derivative?",
        ),
        products(evidence),
    ]


def unseen_split(rng: np.random.Generator) -> Case[Layer]:
    rows, width, hidden = (int(rng.choice(sizes)) for sizes in ((4, 7), (9, 11), (10, 17)))
    activation = str(rng.choice(["softplus", "sin"]))
    return Case(UNSEEN, {"data": 1}, Layer(rows=rows, width=width, hidden=hidden, activation=activation))


SPLIT_BACKWARD = Task(
    wrapping=WRAPPINGS["split_backward"],
    points=2,
    core_facts=("FLOPs",),
    cases=(
        Case("gelu", {"data": 1}, Layer(rows=6, width=5, hidden=12, activation="gelu"), quick=True),
        Case(
            "silu, without weights' gradients",
            {"data": 1},
            Layer(rows=4, width=8, hidden=10, activation="silu", passes=2),
            quick=True,
        ),
        Case("tanh, wide", {"data": 1}, Layer(rows=5, width=16, hidden=7, activation="tanh")),
    ),
    unseen=unseen_split,
    draw=draw_split,
    oracle=split_oracle,
    facts=split_facts,
)
