"""``chunked_attention``: causal attention over chunks of keys and values, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.chapters.single_device.wrapping import MESH, wrap_attention
from autograder.contract import facts, limits
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

# Scores go up to about 110, where float32 is exact to 2^-18 (4e-6). A score adds up ten such roundings, what
# is off in an exponent is off by the same share in the weight, and JAX's own attention is off by 1.2e-5 here.
TOLERANCE = 1e-4
# Masked chunks may be left out, and then hardly more than half of the work remains.
LEAST_WORK = 0.45


def _draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Normal numbers; the first feature of queries and keys is large and alike, which adds ``offset`` to each score."""
    arrays = draw_leaves(rng, wrap_attention(None, case).inputs)
    large = np.sqrt(case.sizes["offset"] * np.sqrt(case.sizes["head_dim"]))
    for name in "qk":
        arrays[name][..., 0] = large
    return arrays


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64: values ``[batch, seq, num_heads, head_dim]`` and weights."""
    q, k, v = (np.moveaxis(x, 1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.moveaxis(weights @ v, 2, 1), weights


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Attention and its gradient in float64, with the whole square of scores."""
    q, k, v, upstream = (inputs[name].astype(np.float64) for name in ("q", "k", "v", "upstream"))
    values, weights = attention(q, k, v)
    q, k, v, upstream = (np.moveaxis(x, 1, 2) for x in (q, k, v, upstream))
    of_weights = upstream @ v.swapaxes(2, 3)
    of_scores = weights * (of_weights - np.sum(weights * of_weights, -1, keepdims=True)) / np.sqrt(q.shape[-1])
    gradients = {
        "q": np.moveaxis(of_scores @ k, 2, 1),
        "k": np.moveaxis(of_scores.swapaxes(2, 3) @ q, 2, 1),
        "v": np.moveaxis(weights.swapaxes(2, 3) @ upstream, 2, 1),
    }
    return jax.tree.map(lambda a: a.astype(np.float32), {"values": values, "gradients": gradients})


_SQUARE = "Which array has an element for each pair of a query and a key, even if it is made in parts?"
_ALIVE = "What of each chunk is still there when all chunks have been seen?"
_AGAIN = "How often is the product of queries and keys taken, and how often that of weights and values?"


def _facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    least: dict[str, Any] = {"least": LEAST_WORK}
    return [
        facts.arrays_match("values", cases, "values", tolerance=TOLERANCE),
        facts.arrays_match("gradients", cases, "gradients", tolerance=TOLERANCE, weight=2),
        limits.largest_within(large, references, _quarter, _SQUARE, weight=2, **least),
        limits.temporaries_within(large, references, 0.4, _ALIVE, than=limits.NAIVE, **least),
        limits.flops_within(large, references, 1.35, _AGAIN, than=limits.NAIVE, **least),
    ]


def _quarter(case: Case) -> int:
    s = case.sizes
    return s["rows"] * s["num_heads"] * s["seq"] ** 2 // 4


# No two sizes are equal: JAX would merge what they make.
_SMALL = {"rows": 2, "num_heads": 3, "head_dim": 10, "seq": 48, "chunk": 6, "offset": 100}
_LARGE = {"rows": 2, "num_heads": 4, "head_dim": 64, "seq": 4096, "chunk": 512, "offset": 0}


def _unseen(rng: np.random.Generator) -> Case:
    chunk, chunks = int(rng.choice([4, 8, 12])), int(rng.choice([4, 5, 7]))
    sizes = {"chunk": chunk, "seq": chunk * chunks, "rows": int(rng.choice([1, 3])), "offset": int(rng.integers(5, 90))}
    return Case("unseen", MESH, {"num_heads": int(rng.choice([2, 5])), "head_dim": int(rng.choice([6, 14])), **sizes})


TASK = Task(
    wrapping=wrappings("single_device")["chunked_attention"],
    kind="step",
    points=4,
    cases=(
        Case("8 chunks", MESH, _SMALL, quick=True),
        Case("3 chunks", MESH, {**_SMALL, "seq": 48, "chunk": 16, "num_heads": 4, "offset": 0}, quick=True),
        Case("1 chunk", MESH, {**_SMALL, "seq": 16, "chunk": 16}),
    ),
    unseen=_unseen,
    draw=_draw,
    oracle=oracle,
    facts=_facts,
    analysed=(Case("4,096 tokens, 8 chunks", MESH, _LARGE), "8 chunks"),
    stretches=({"seq": 3072, "chunk": 384, "num_heads": 2}, {"num_heads": 4, "head_dim": 64}),
    naive="keeps_the_square",
)
