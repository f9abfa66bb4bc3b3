"""``tp_transformer_block`` and ``parallel_transformer_block``: one layer, its features and sequences split."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.tp_transformer.shared import (
    OTHER,
    SIZES,
    activation_bytes,
    added_up,
    heads_together,
    keys_of_parts,
    of_model,
    ring_bytes,
    shared_leaves,
    unseen,
)
from autograder.chapters.tp_transformer.wrapping import PARALLEL, SEQUENTIAL, groups_of, layer_of, model_of, wrap_block
from autograder.contract import facts, limits
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

_VALUES = "Which rows does this device hold, which heads, and which keys does it drop with?"
_GRADIENTS = "A leaf that all devices hold has a share of its gradient on each; is every part counted once?"
_TWICE = "What do attention and MLP both need, and what becomes of what both give?"
# Of a block that gathers and scatters twice, on eight H100.
FASTER = 0.85


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes = wrap_block(SEQUENTIAL, None, case).inputs
    scales = {"params": 0.3, "x": rng.uniform(0.5, 2), "upstream": rng.uniform(0.5, 2)}
    found = {name: draw_leaves(rng, shapes[name], scale) for name, scale in scales.items()}
    return {**found, "key": rng.integers(0, 2**32 - 1, (groups_of(case), 2), np.uint32)}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The course's layer on one device for each group, and what it keeps of the gradient of its weights."""
    run, groups = _one_group(*of_model(case)), groups_of(case)
    x, upstream = (np.split(inputs[name], groups) for name in ("x", "upstream"))
    each = [run(inputs["params"], *group) for group in zip(x, inputs["key"], upstream, strict=True)]
    values, of_params, of_x = zip(*each, strict=True)
    of_params = jax.tree.map(lambda *found: np.stack(found), *of_params)
    return {"values": np.concatenate(values), "gradients": {"params": of_params, "x": np.concatenate(of_x)}}


@lru_cache(maxsize=32)
def _one_group(sizes: tuple[tuple[str, int], ...], parts: int) -> Any:
    model = model_of(sizes)

    def run(params, x, key, upstream):
        keys = keys_of_parts(jax.random.wrap_key_data(key), parts)
        values, back = jax.vjp(lambda params, x: model.layer(heads_together(params), x, keys), params, x)
        return values, *back(upstream)

    return jax.jit(run)


def _sent(e: Evidence, times: int, *, by_sum: bool) -> float:
    """Of whole activations, gathered or scattered so often; or twice the bytes by sums, which do both."""
    if bool(e.case.sizes.get("by_sum")) != by_sum:
        return 0.0
    return times * (2 if by_sum else 1) * ring_bytes(e.case, activation_bytes(e.case))


def block_facts(cases: list[Evidence], times: int) -> list[Fact]:
    """``times`` is how often a pass gathers, and how often it scatters."""
    whole = [added_up(e, shared_leaves(layer_of(e.case), "gradients/params")) for e in cases]
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", whole, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(whole, "gradients"),
    ]


def sent_facts(counted: list[Evidence], times: int) -> list[Fact]:
    """Forward and backward: the transpose of a gather is a scatter, that of a sum another sum."""
    gathered = lambda e: _sent(e, 2 * times, by_sum=False)  # noqa: E731
    return [
        facts.bytes_sent("all-gather bytes", counted, "all_gather", gathered, weight=2),
        facts.bytes_sent("reduce-scatter bytes", counted, "reduce_scatter", gathered, weight=2),
        facts.bytes_sent("all-reduce bytes", counted, "all_reduce", lambda e: _sent(e, 4 * times, by_sum=True)),
        facts.only_collectives(OTHER, counted, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


def sequential_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [*block_facts(cases, 2), *sent_facts(cases, 2)]


def parallel_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        *block_facts(cases, 1),
        *sent_facts(counted, 1),
        limits.time_within(large, references, FASTER, _TWICE, than=limits.NAIVE, weight=3),
    ]


# The proportions of the realistic size: what is split off a product keeps its share.
_HEADS = {"width": 32, "hidden": 128, "num_heads": 16, "dropout": 0}


def _cases(parallel: int) -> tuple[Case, ...]:
    sizes = {**SIZES, "num_layers": 1, "parallel": parallel, "by_sum": 0}
    return (
        Case("tensor=4", {"tensor": 4}, sizes, quick=True),
        Case("tensor=8, 16 heads", {"tensor": 8}, {**sizes, **_HEADS}, quick=True),
        Case("data=2 x tensor=2, by sums", {"data": 2, "tensor": 2}, {**sizes, "by_sum": 1, "dropout": 0}),
        Case("data=4 x model=2", {"data": 4, "model": 2}, {**sizes, "rows": 1}),
        Case("tensor=1", {"tensor": 1}, {**sizes, "dropout": 0}),
    )


def _unseen(parallel: int) -> Callable[[np.random.Generator], Case]:
    return lambda rng: unseen(rng, ((2, 4), (2,), (3,), (2, 3), (4, 2)), parallel=parallel, by_sum=0)


_LARGE = {**_cases(1)[1].sizes, "width": 2048, "hidden": 8192, "seq": 1024, "max_seq": 1024, "rows": 8}

TP_TRANSFORMER_BLOCK = Task(
    wrapping=wrappings("tp_transformer")[SEQUENTIAL],
    kind="local",
    points=4,
    cases=_cases(0),
    unseen=_unseen(0),
    draw=draw,
    oracle=oracle,
    facts=sequential_facts,
)
PARALLEL_TRANSFORMER_BLOCK = Task(
    wrapping=wrappings("tp_transformer")[PARALLEL],
    kind="local",
    points=4,
    cases=_cases(1),
    unseen=_unseen(1),
    draw=draw,
    oracle=oracle,
    facts=parallel_facts,
    stretches=({"seq": 1024, "max_seq": 1024}, {"rows": 8, "width": 2048}, {"hidden": 8192}),
    analysed=(Case("tensor=8, width 2048", {"tensor": 8}, _LARGE), "tensor=8, 16 heads"),
    slow="one_after_the_other",
)
