"""``pipeline_train_step``: SGD over several pipelines side by side, with one tick's activations at a time.

The learning rate is drawn with the rest and is large, so that an update is of the size of the parameters: what a
step subtracts, divided by it, is the raw gradient, and no scale can hide.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax

from autograder.chapters.pipeline.batches import (
    draw_batch,
    draw_key,
    draw_params,
    one_device_loss,
    unseen_pipelines,
)
from autograder.chapters.pipeline.loss import SHARING
from autograder.chapters.pipeline.shared import OTHER, PERMUTES, needed, passed_on, ticks_of
from autograder.chapters.pipeline.wrapping.schedule import groups_of
from autograder.contract import facts, limits
from autograder.contract.cases import microbatch_bytes, model_sizes, stages_of
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

_TOO_MUCH = "What does the backward pass of a tick need, and which of it could be computed again?"
_LOSS = "Only the last stage has activations that count; what do the others need of them?"


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    batch = draw_batch(rng, case, case.sizes["steps"])
    rate = np.float32(rng.uniform(0.5, 1.0) * case.sizes["rate"] / 100)
    return {"params": draw_params(rng, case), "batch": batch, "key": draw_key(rng), "learning_rate": rate}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a leaf gets the same."""
    groups, stages = groups_of(case), stages_of(case)
    run = _steps_on_one_device(model_sizes(case), case.sizes["microbatches"], groups)
    after, losses, gradients = jax.tree.map(np.asarray, run(*inputs.values()))

    def held(tree):
        copies = {name: groups if name == "layers" else groups * stages for name in tree}
        return {
            name: jax.tree.map(lambda leaf, n=copies[name]: np.repeat(leaf[None], n, 0), part)
            for name, part in tree.items()
        }

    losses = np.repeat(losses[None], groups * stages, 0)
    return {"values": {"loss": losses, "params": held(after)}, "gradients": held(gradients)}


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: tuple[tuple[str, int], ...], microbatches: int, groups: int) -> Any:
    """Parameters after the steps, each step's loss, and the sum of the gradients."""
    group_loss = one_device_loss(Case("", {}, {**dict(sizes), "microbatches": microbatches}))

    def mean_loss(params, batch, key):
        rows = jax.tree.map(lambda a: a.reshape(groups, -1, *a.shape[1:]), batch)
        keys = jax.vmap(lambda group: jax.random.fold_in(key, group))(np.arange(groups, dtype=np.int32))
        return jax.vmap(group_loss, in_axes=(None, 0, 0))(params, rows, keys).mean()

    def run(params, batches, key, rate):
        key = jax.random.wrap_key_data(key)

        def step(carry, numbered):
            params, total = carry
            number, batch = numbered
            loss, gradients = jax.value_and_grad(mean_loss)(params, batch, jax.random.fold_in(key, number))
            after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            return (after, jax.tree.map(lambda a, b: a + b, total, gradients)), loss

        start = (params, jax.tree.map(lambda p: 0 * p, params))
        numbers = np.arange(len(batches["inputs"]), dtype=np.int32)
        (after, total), losses = lax.scan(step, start, (numbers, batches))
        return after, losses, total

    return jax.jit(run)


def _held(e: Evidence, *parts: str) -> int:
    """Bytes of these parts of the model on one device."""
    return sum(
        leaf.local_bytes(e.case.mesh) for leaf in e.inputs if leaf.name.startswith(tuple(f"params/{p}/" for p in parts))
    )


def _ring(devices: int, size: float) -> float:
    return 2 * (devices - 1) / devices * size


def _apart(e: Evidence) -> float:
    """All-reduces of a step: embedding and head over the stages, then everything and the loss over the groups."""
    stages, groups = stages_of(e.case), groups_of(e.case)
    ends = _held(e, "embed", "head") + 4
    return e.case.sizes["steps"] * (_ring(stages, ends) + _ring(groups, ends + _held(e, "layers")))


def _together(e: Evidence) -> float:
    """The same, embedding and head over all devices at once, and the loss not counted."""
    stages, groups = stages_of(e.case), groups_of(e.case)
    ends = _held(e, "embed", "head")
    return e.case.sizes["steps"] * (_ring(stages * groups, ends) + _ring(groups, _held(e, "layers")))


def _shared(e: Evidence) -> float:
    n, outputs = stages_of(e.case), e.case.sizes["microbatches"] * microbatch_bytes(e.case)
    return _ring(n, e.case.sizes["steps"] * outputs)


# --8<-- [start:most_bytes]
def most_bytes(case: Case) -> int:
    """Live temporaries of a step that keeps one block a tick, and computes a stage's layers again.

    Two stacks of a block a tick (what a stage was given, and the gradient of what it gave), one of a block a microbatch
    (the gradient of what enters), the gradients of this stage's weights twice (the sum, and one tick's), and what the
    layers of one stage keep while they are differentiated: eight arrays of the hidden size, and eight of the width.
    """
    s = case.sizes
    block, inner = 4 * s["rows"] * s["width"], 4 * s["rows"] * s["hidden"]
    layers = s["num_layers"] // stages_of(case)
    weights = 4 * layers * 2 * s["width"] * s["hidden"]
    return (2 * ticks_of(case) + s["microbatches"]) * block + 2 * weights + 8 * layers * (block + inner)


# --8<-- [end:most_bytes]


def step_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        limits.temporaries_at_most(large, references, most_bytes, _TOO_MUCH, weight=4),
        facts.bytes_sent("all-reduce bytes", counted, "all_reduce", _apart, least=_together),
        facts.bytes_sent(PERMUTES, counted, "collective_permute", lambda e: passed_on(e, 2 * e.case.sizes["steps"]),
                         least=lambda e: needed(e, 2 * e.case.sizes["steps"])),
        facts.bytes_at_most("loss bytes", counted, SHARING, _shared, _LOSS),
        facts.only_collectives(OTHER, counted, ("collective_permute", "all_reduce", *SHARING)),
    ]  # fmt: skip


_SIZES = {"width": 16, "hidden": 32, "num_layers": 8, "features": 6, "outputs": 10, "microbatches": 6, "rows": 2,
          "dropout": 25, "steps": 1, "rate": 100}  # fmt: skip
_LONG = {**_SIZES, "microbatches": 32, "dropout": 0}
_LARGE = {**_LONG, "width": 512, "hidden": 2048, "features": 256, "outputs": 128, "rows": 1024}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "microbatches": 3, "rows": 2,
                "dropout": 25, "steps": 1, "rate": 200}  # fmt: skip
_THREE = {**_SIZES, "microbatches": 5, "dropout": 0, "steps": 3, "rate": 20}


def _unseen(rng: np.random.Generator) -> Case:
    case = unseen_pipelines(rng)
    # The gradient is read off the update, so that must not be small beside the parameter: a Transformer's is.
    steps, largest = (1, 300) if "seq" in case.sizes else (int(rng.choice([1, 2])), 90)
    rate = int(rng.integers(2 * largest // 3, largest)) // steps
    return replace(case, sizes={**case.sizes, "steps": steps, "rate": rate})


PIPELINE_TRAIN_STEP = Task(
    wrapping=wrappings("pipeline")["pipeline_train_step"],
    kind="local",
    points=5,
    cases=(
        Case("data=2 x pipe=4, 6 microbatches", {"data": 2, "pipe": 4}, {**_SIZES, "num_layers": 4}, quick=True),
        Case("data=2 x pipe=4, 32 microbatches", {"data": 2, "pipe": 4}, _LONG, quick=True),
        Case("data=1 x pipe=8, 5 microbatches, 3 steps", {"data": 1, "pipe": 8}, _THREE),
        Case("pipe=2 x data=2, 3 microbatches", {"pipe": 2, "data": 2}, _TRANSFORMER),
        Case("replica=4 x stage=2, 1 microbatch", {"replica": 4, "stage": 2}, {**_SIZES, "microbatches": 1}),
        Case(
            "data=8 x pipe=1, 4 microbatches",
            {"data": 8, "pipe": 1},
            {**_SIZES, "microbatches": 4, "rows": 1, "dropout": 0},
        ),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=step_facts,
    analysed=(
        Case("data=2 x pipe=4, 32 microbatches of 1,024 rows", {"data": 2, "pipe": 4}, _LARGE),
        "data=2 x pipe=4, 32 microbatches",
    ),
    naive="keeps_activations",
)
