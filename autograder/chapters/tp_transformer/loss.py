"""``vocab_parallel_loss``: cross-entropy of logits that no device has all of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.tp_transformer.shared import (
    EVERY,
    SIZES,
    activation_bytes,
    added_up,
    model_sizes,
    ring_bytes,
    shared_leaves,
    unseen,
)
from autograder.chapters.tp_transformer.wrapping import groups_of, model_of, params_of, parts_of, wrap_loss
from autograder.contract import facts, limits
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

_VALUES = "Which numbers must all devices agree on before the logarithm, and what happens to exp of a large one?"
_GRADIENTS = "How many devices return this loss, how is it typed, and which rows of logits has this device a part in?"
_LOGITS = "Which of all logits does a device need, and what of the others is enough?"
_SENT = "What does a token's loss need of another device's logits?"


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """All logits are large, of either sign: the loss is what it would be without, and ``exp`` of them is not."""
    shapes = wrap_loss(None, case).inputs
    found = {"params": draw_leaves(rng, shapes["params"], 0.3), "x": draw_leaves(rng, shapes["x"])}
    found["params"]["out"]["bias"] += np.float32(case.sizes["offset"])
    targets = rng.integers(0, case.sizes["vocab"], shapes["targets"].shape, np.int32)
    return {**found, "targets": targets, "upstream": np.float32(rng.uniform(-4, -2))}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The course's head and loss on one device for each group, and ``upstream`` times its gradients."""
    groups = groups_of(case)
    x, targets = (inputs[name].reshape(groups, -1, *inputs[name].shape[1:]) for name in ("x", "targets"))
    run = _each_group(model_sizes(case))
    losses, (of_params, of_x) = jax.tree.map(np.asarray, run(inputs["params"], x, targets))
    gradients = {"params": of_params, "x": of_x.reshape(inputs["x"].shape)}
    scaled = jax.tree.map(lambda gradient: inputs["upstream"] * gradient, gradients)
    return {"values": np.repeat(losses, parts_of(case)), "gradients": scaled}


@lru_cache(maxsize=32)
def _each_group(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(sizes)
    return jax.jit(jax.vmap(jax.value_and_grad(model.loss, argnums=(0, 1)), in_axes=(None, 0, 0)))


# --8<-- [start:logits]
def part_of_logits(case: Case) -> int:
    """Elements of the logits that a device has: all tokens of its group, and its part of the vocabulary."""
    return case.sizes["rows"] * case.sizes["seq"] * case.sizes["vocab"] // parts_of(case)


# --8<-- [end:logits]


def sums_bytes(case: Case) -> float:
    """Three numbers a token, all-reduced: the largest logit, the sum of the exponentials, the target's logit.

    And a scalar, for those who add up parts of the loss.
    """
    return 2 * ring_bytes(case, 4 * (3 * case.sizes["rows"] * case.sizes["seq"] + 1))


def most_sent(case: Case) -> float:
    """Those sums, and the activations once in each direction, or twice as much where the sum of all is how they go."""
    return (4 if case.sizes["by_sum"] else 2) * ring_bytes(case, activation_bytes(case)) + sums_bytes(case)


def loss_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    whole = [added_up(e, shared_leaves(params_of(e.case)["head"], "gradients/params")) for e in cases]
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", whole, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(whole, "gradients"),
        limits.largest_within(large, references, part_of_logits, _LOGITS, weight=3),
        facts.bytes_at_most("bytes sent", counted, EVERY, lambda e: most_sent(e.case), _SENT),
    ]


_SIZES = {**SIZES, "num_layers": 1, "by_sum": 0, "offset": 120}
_LARGE = {
    **_SIZES,
    "width": 2048,
    "hidden": 8192,
    "num_heads": 16,
    "vocab": 32000,
    "seq": 1024,
    "max_seq": 1024,
    "rows": 8,
}


def _unseen(rng: np.random.Generator) -> Case:
    offset = int(rng.choice([-1, 1]) * rng.integers(100, 250))
    return unseen(rng, ((2, 4), (2,), (3,), (2, 3), (5,)), by_sum=0, offset=offset)


VOCAB_PARALLEL_LOSS = Task(
    wrapping=wrappings("tp_transformer")["vocab_parallel_loss"],
    kind="local",
    points=5,
    cases=(
        Case("tensor=4", {"tensor": 4}, {**_SIZES, "offset": -150}, quick=True),
        Case("tensor=8", {"tensor": 8}, _SIZES, quick=True),
        Case("data=2 x tensor=2, by sums", {"data": 2, "tensor": 2}, {**_SIZES, "by_sum": 1, "offset": 0}),
        Case("data=4 x model=2", {"data": 4, "model": 2}, {**_SIZES, "rows": 1}),
        Case("tensor=1", {"tensor": 1}, _SIZES),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=loss_facts,
    analysed=(Case("tensor=8, vocabulary of 32,000", {"tensor": 8}, _LARGE), "tensor=8"),
    naive="gathers_logits",
)
