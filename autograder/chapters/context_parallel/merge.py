"""Grading of ``merge_attention``: partial results, in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.chapters.context_parallel.wrapping import Partials
from autograder.chapters.draws import draw_leaves
from autograder.contract import facts
from autograder.contract.case import UNSEEN
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

WRAPPING = wrappings("context_parallel")["merge_attention"]
ONE = {"data": 1}


def draw_partials(rng: np.random.Generator, case: Case[Partials]) -> dict[str, Any]:
    """Partial results near each other and far apart, by up to twice ``reach``; some queries see one set, or neither."""
    inputs = draw_leaves(rng, WRAPPING.input_shapes(case))
    partials, sign = inputs["partials"], rng.choice([-1, 1], (case.sizes.queries, case.sizes.num_heads))
    for name, (start, step) in {"first": (0, 4), "second": (0, 6)}.items():
        lse = partials[name]["lse"] + case.sizes.reach * sign
        lse.reshape(-1)[start::step] = -np.inf
        partials[name]["lse"] = np.float32(lse)
        partials[name]["out"][np.isinf(lse)] = 0
    partials["second"]["lse"].reshape(-1)[1::5] += np.float32(30)
    partials["second"]["lse"].reshape(-1)[5::6] *= -1  # where both sets are seen
    return inputs


def merge_oracle(inputs: dict[str, Any], case: Case[Partials]) -> dict[str, Any]:
    """Merge in float64, from the weights of both."""
    del case
    first, second = (jax.tree.map(np.float64, inputs["partials"][name]) for name in ("first", "second"))
    upstream = jax.tree.map(np.float64, inputs["upstream"])
    lse = np.logaddexp(first["lse"], second["lse"])
    unseen = np.isneginf(lse)
    weights = [np.exp(part["lse"] - np.where(unseen, 0, lse)) for part in (first, second)]
    out = sum(w[..., None] * part["out"] for w, part in zip(weights, (first, second), strict=True))
    gradients = {}
    for name, part, w in zip(("first", "second"), (first, second), weights, strict=True):
        of_weight = (upstream["out"] * (part["out"] - out)).sum(-1) + upstream["lse"]
        gradients[name] = {"out": w[..., None] * upstream["out"], "lse": w * of_weight}
    values = {"out": out, "lse": np.where(unseen, 0, lse), "lse_is_infinite": unseen}
    return jax.tree.map(np.float32, {"values": values, "gradients": gradients})


# The largest error, as a share of the largest element, that lost digits can explain.
LITTLE = 1e-2
DIGITS = (
    "Results near zero are right, so the formula is right, but digits are lost: near 10,000, float32 has steps of "
    "0.001, and so does the logarithm of a sum. Which differences are exact, and do the two weights add up to 1?"
)


def merge_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "What share of the whole sum does each result have, and what if a query has no key in one set, or in both?"
    back = "Each `lse` changes both weights, and with them both results: which of these derivatives is missing?"
    infinite = "Is there an infinite derivative, or NaN, on a side that `jnp.where` did not choose?"
    hints = (DIGITS, DIGITS) if _loses_digits(evidence.cases) else (values, back)
    return [
        facts.arrays_match("values", evidence.cases, "values", hints[0], weight=2, not_finite=values),
        facts.arrays_match("gradients", evidence.cases, "gradients", hints[1], not_finite=infinite),
    ]


def _loses_digits(cases: list[Evidence]) -> bool:
    """Return True if results are only slightly wrong, and only where log-sum-exps are in the thousands."""
    off = {True: [0.0], False: [0.0]}
    for e in cases:
        for leaf, expected in e.expected.items():
            error = np.abs(e.measured[leaf] - expected).max() / max(np.abs(expected).max(), 1e-30)
            off[e.case.sizes.reach >= 1000].append(float(error))
    return bool(np.max(off[False]) <= facts.TOLERANCE < np.max(off[True]) < LITTLE)


def _unseen_partials(rng: np.random.Generator) -> Case[Partials]:
    queries, heads, size, reach = (int(rng.choice(choices)) for choices in ((6, 9), (4, 7), (3, 8), (0, 3000, 8000)))
    return Case(UNSEEN, ONE, Partials(queries=queries, num_heads=heads, head_dim=size, reach=reach))


_PARTIALS = Partials(queries=8, num_heads=3, head_dim=5)
MERGE_ATTENTION = Task(
    wrapping=WRAPPING,
    points=2,
    cases=(
        Case("scores near zero", ONE, _PARTIALS, quick=True),
        Case("scores near 10,000", ONE, _PARTIALS.replace(reach=10_000), quick=True),
        Case("scores near 90, one head", ONE, _PARTIALS.replace(reach=90, num_heads=1, queries=24)),
    ),
    unseen=_unseen_partials,
    draw=draw_partials,
    oracle=merge_oracle,
    facts=merge_facts,
)
