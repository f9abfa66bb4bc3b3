"""``scan_layers`` and ``remat_layers``: depth as a loop, and what of it is kept for the backward pass."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.single_device.common import does_not_grow
from autograder.chapters.single_device.wrapping import MESH, activations
from autograder.contract import facts, limits
from autograder.contract.cases import model_of, model_sizes, params_of
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

SHALLOW, DEEP = "2 layers", "8 layers"


def _draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    x = activations(case)
    leaves = draw_leaves(rng, {"params": params_of(case)["layers"], "inputs": x, "upstream": x})
    # Small enough that a deep stack's gradients do not explode, nor do their rounding errors.
    return {**leaves, "params": jax.tree.map(lambda a: a * np.float32(a.shape[1] ** -0.5), leaves["params"])}


@lru_cache(maxsize=16)
def _run_and_transpose(sizes: tuple[tuple[str, int], ...]) -> Any:
    case = Case("", {}, dict(sizes))
    layer = jax.jit(model_of(case).layer)  # traced once, for all layers

    def run(params, x):
        for i in range(case.sizes["num_layers"]):
            x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params), x)
        return x

    @jax.jit
    def both(params, x, upstream):
        values, transpose = jax.vjp(run, params, x)
        return values, transpose(upstream)

    return both


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Layer after layer in a Python loop."""
    run = _run_and_transpose(model_sizes(case))
    values, (of_params, of_inputs) = run(inputs["params"], inputs["inputs"], inputs["upstream"])
    return jax.tree.map(np.asarray, {"values": values, "gradients": {"layers": of_params, "x": of_inputs}})


_GROWS = "What is written once for each layer, and could be a loop?"
_KEPT = "What is kept for every layer until the backward pass gets there? Which of it is cheap to compute again?"
_AGAIN = "How often is each matrix product of the forward pass computed?"


def _scan_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients"),
        facts.global_norm_matches(cases, "gradients"),
        does_not_grow(cases, SHALLOW, DEEP, "depth", _GROWS),
    ]


def _remat_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients"),
        facts.global_norm_matches(cases, "gradients"),
        limits.temporaries_within(large, references, 0.35, _KEPT, than=limits.NAIVE, weight=2),
        limits.flops_within(large, references, 4 / 3, _AGAIN, than=limits.NAIVE, weight=2),
    ]


_MLP = {"width": 16, "hidden": 32, "num_layers": 8, "features": 8, "rows": 4}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 3, "vocab": 8, "seq": 8, "rows": 2}
_TWELVE = {**_TRANSFORMER, "num_layers": 12}
# At these, attention's squares are what a policy that keeps every product pays most for.
_LARGE = {"width": 1024, "hidden": 4096, "num_heads": 16, "num_layers": 12, "vocab": 8, "seq": 1024, "rows": 4}


_UNSEEN = (
    {"width": 12, "hidden": 20, "num_layers": 5, "features": 8, "rows": 6},
    {"width": 24, "hidden": 40, "num_layers": 4, "features": 8, "rows": 5},
    {"width": 24, "hidden": 20, "num_layers": 6, "num_heads": 3, "vocab": 8, "seq": 6, "rows": 3},
    {"width": 12, "hidden": 40, "num_layers": 5, "num_heads": 3, "vocab": 8, "seq": 10, "rows": 3},
)


def _unseen(rng: np.random.Generator) -> Case:
    return Case("unseen", MESH, dict(_UNSEEN[rng.integers(len(_UNSEEN))]))


SCAN = Task(
    wrapping=wrappings("single_device")["scan_layers"],
    kind="transform",
    points=1,
    cases=(
        Case(DEEP, MESH, _MLP, quick=True),
        Case(SHALLOW, MESH, {**_MLP, "num_layers": 2}, quick=True),
        Case("3 layers with attention", MESH, _TRANSFORMER),
        Case("1 layer", MESH, {**_MLP, "num_layers": 1}),
    ),
    unseen=_unseen,
    draw=_draw,
    oracle=oracle,
    facts=_scan_facts,
)

REMAT = Task(
    wrapping=wrappings("single_device")["remat_layers"],
    kind="transform",
    points=2,
    cases=(
        Case("12 layers", MESH, _TWELVE, quick=True),
        Case("3 layers", MESH, _TRANSFORMER, quick=True),
        Case("8 layers without attention", MESH, _MLP),
    ),
    unseen=_unseen,
    draw=_draw,
    oracle=oracle,
    facts=_remat_facts,
    analysed=(Case("12 layers, width 1024", MESH, _LARGE), "12 layers"),
    stretches=({"seq": 640}, {"width": 256, "num_heads": 4}, {"hidden": 1024}),
    naive="keeps_everything",
)
