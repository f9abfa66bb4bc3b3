"""``execute_pipeline``: all ticks of a schedule, its values and gradients, and how long the stages wait."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.pipeline.shared import (
    OTHER,
    PERMUTES,
    needed,
    passed_on,
    stage_seconds,
    ticks_of,
    unseen_stages,
)
from autograder.chapters.pipeline.wrapping.schedule import EXECUTED, execute_shapes, groups_of
from autograder.contract import facts, limits
from autograder.contract.cases import stages_of
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings

_VALUES = "Which tick does a stage finish a microbatch in, and how many ticks does the last one need?"
_BUBBLE = "How many ticks are there, and does a stage compute once in each?"


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    found = draw_leaves(rng, execute_shapes(case))
    return {**found, "weights": found["weights"] / np.float32(np.sqrt(case.sizes["width"]))}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """One stage after the other on one device; the last stage's outputs and the first one's gradients count."""
    stages, groups = stages_of(case), groups_of(case)
    values, gradients = jax.tree.map(
        np.asarray, _one_device(groups)(inputs["weights"], inputs["microbatches"], inputs.get("upstream"))
    )

    def at(stage, array):
        return np.stack([array if i == stage else np.zeros_like(array) for i in range(stages)])

    found: dict[str, Any] = {"values": at(stages - 1, values)}
    if gradients is not None:
        weights = gradients["weights"].reshape(groups * stages, *gradients["weights"].shape[2:])
        found["gradients"] = {"weights": weights, "microbatches": at(0, gradients["microbatches"])}
    return found


@lru_cache(maxsize=32)
def _one_device(groups: int) -> Any:
    """Outputs ``[microbatches, rows, width]``, and gradients of each group's weights and of all microbatches."""

    def outputs(weights, microbatches):
        count, rows, width = microbatches.shape
        x = microbatches.reshape(count, groups, rows // groups, width)
        scale = 1 + jnp.arange(count, dtype=jnp.float32)[:, None, None, None] / 8
        for stage in range(weights.shape[1]):
            x = x + scale * jnp.tanh(jnp.einsum("mgrw,gwv->mgrv", x, weights[:, stage]))
        return x.reshape(microbatches.shape)

    def run(weights, microbatches, upstream):
        every = jnp.broadcast_to(weights, (groups, *weights.shape))
        values, back = jax.vjp(outputs, every, microbatches)
        return values, None if upstream is None else dict(zip(EXECUTED, back(upstream), strict=True))

    return jax.jit(run)


def _passes(e: Evidence) -> int:
    return 1 + e.case.sizes["backward"]


def execute_facts(cases: list[Evidence], large: Evidence | None, _: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    backward = [e for e in cases if e.case.sizes["backward"]]
    unknown = Fact("gradients", None, "not measured", message="no case of this check is differentiated", weight=2,
                   kind=Kind.GRADIENTS)  # fmt: skip
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", backward, "gradients", weight=2) if backward else unknown,
        limits.bubble_is(large, ticks_of, lambda case: case.sizes["microbatches"], stage_seconds, _BUBBLE, weight=3),
        facts.bytes_sent(PERMUTES, counted, "collective_permute", lambda e: passed_on(e, _passes(e)),
                         least=lambda e: needed(e, _passes(e))),
        facts.only_collectives(OTHER, counted, ("collective_permute",)),
    ]  # fmt: skip


_SIZES = {"microbatches": 6, "rows": 2, "width": 8, "backward": 1}
# Fewer microbatches than stages, and forward only: the formula is of a forward pass.
_FORWARD = {"microbatches": 5, "rows": 2, "width": 16, "backward": 0}
_LARGE = {**_FORWARD, "rows": 1024, "width": 2048}


def _unseen(rng: np.random.Generator) -> Case:
    sizes = {
        "microbatches": int(rng.choice([2, 4, 7])),
        "rows": int(rng.choice([3, 4])),
        "width": int(rng.choice([6, 12])),
    }
    return Case("unseen", unseen_stages(rng, (4, 2), (2, 2), (8,), (2, 3), (5,)), {**sizes, "backward": 1})


EXECUTE_PIPELINE = Task(
    wrapping=wrappings("pipeline")["execute_pipeline"],
    kind="local",
    points=5,
    cases=(
        Case("pipe=4, 6 microbatches", {"pipe": 4}, _SIZES, quick=True),
        Case("pipe=8, 5 microbatches, forward", {"pipe": 8}, _FORWARD, quick=True),
        Case("data=2 x pipe=2, 3 microbatches", {"data": 2, "pipe": 2}, {**_SIZES, "microbatches": 3}),
        Case("stage=8, 8 microbatches", {"stage": 8}, {**_SIZES, "microbatches": 8}),
        Case("pipe=1, 2 microbatches", {"pipe": 1}, {**_SIZES, "microbatches": 2}),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=execute_facts,
    analysed=(Case("pipe=8, 5 microbatches of 1,024 rows", {"pipe": 8}, _LARGE), "pipe=8, 5 microbatches, forward"),
    slow="waits_for_each_microbatch",
    machine="free network",
)
