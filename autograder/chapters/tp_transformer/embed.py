"""``vocab_parallel_embed``: tokens and positions, with the table split over the vocabulary."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.tp_transformer.shared import (
    OTHER,
    SIZES,
    activation_bytes,
    added_up,
    model_sizes,
    ring_bytes,
    shared_leaves,
    unseen,
)
from autograder.chapters.tp_transformer.wrapping import groups_of, model_of, params_of, wrap_embed
from autograder.contract import facts
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

_VALUES = (
    "Which tokens does this device know, what does it give for the others, and at which position do its rows begin?"
)
_GRADIENTS = "Whose rows of the table, and which positions, has this device a part in?"


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes = wrap_embed(None, case).inputs
    found = {name: draw_leaves(rng, shapes[name], rng.uniform(0.5, 2)) for name in ("params", "upstream")}
    return {**found, "tokens": rng.integers(0, case.sizes["vocab"], shapes["tokens"].shape, np.int32)}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The course's embedding on one device for each group."""
    groups = groups_of(case)
    tokens, upstream = (inputs[name].reshape(groups, -1, *inputs[name].shape[1:]) for name in ("tokens", "upstream"))
    run = _each_group(model_sizes(case))
    values, gradients = jax.tree.map(np.asarray, run(inputs["params"], tokens, upstream))
    return {"values": values.reshape(inputs["upstream"].shape), "gradients": gradients}


@lru_cache(maxsize=32)
def _each_group(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(sizes)

    def one(params, tokens, upstream):
        values, back = jax.vjp(lambda params: model.embed(params, tokens), params)
        return values, back(upstream)[0]

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))


def embed_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    whole = [added_up(e, shared_leaves(params_of(e.case)["embed"], "gradients")) for e in cases]
    once = lambda e: ring_bytes(e.case, activation_bytes(e.case))  # noqa: E731
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", whole, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(whole, "gradients"),
        facts.bytes_sent("reduce-scatter bytes", cases, "reduce_scatter", once, weight=2),
        facts.bytes_sent("all-gather bytes", cases, "all_gather", once),
        facts.only_collectives(OTHER, cases, ("all_gather", "reduce_scatter")),
    ]


_SIZES = {**SIZES, "num_layers": 1}


VOCAB_PARALLEL_EMBED = Task(
    wrapping=wrappings("tp_transformer")["vocab_parallel_embed"],
    kind="local",
    points=3,
    cases=(
        Case("tensor=4", {"tensor": 4}, _SIZES, quick=True),
        Case("data=2 x model=2", {"data": 2, "model": 2}, _SIZES, quick=True),
        Case("tensor=8, as long as there are positions", {"tensor": 8}, {**_SIZES, "seq": 32}),
        Case("data=4 x tensor=2", {"data": 4, "tensor": 2}, {**_SIZES, "rows": 1}),
        Case("tensor=1", {"tensor": 1}, _SIZES),
    ),
    unseen=lambda rng: unseen(rng, ((2, 4), (2,), (3,), (2, 3), (5,))),
    draw=draw,
    oracle=oracle,
    facts=embed_facts,
)
