"""``pipeline_tick``: what one stage does in one tick, for every tick of a schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.pipeline.shared import OTHER, PERMUTES, needed, passed_on, ticks_of, unseen_stages
from autograder.chapters.pipeline.wrapping.schedule import tick_shapes
from autograder.contract import facts
from autograder.contract.cases import stages_of
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

_VALUES = "Which microbatch is this stage at, where does its input come from, and who needs what it computed?"


def _has_work(tick: Any, stage: Any, count: int) -> Any:
    return (tick >= stage) & (tick - stage < count)


def _counted(case: Case) -> dict[str, np.ndarray]:
    """At which ``[tick, stage]`` a stage has work, and at which it is sent what the stage before it has computed."""
    tick, stage = np.arange(ticks_of(case))[:, None], np.arange(stages_of(case))
    busy = _has_work(tick, stage, case.sizes["microbatches"])
    return {"y": busy, "sent": np.concatenate([np.zeros_like(busy[:, :1]), busy[:, :-1]], 1)}


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes = tick_shapes(PIPELINE_TICK.complete(case))
    found = draw_leaves(rng, {name: shape for name, shape in shapes.items() if name != "counted"})
    weights = found["weights"] / np.float32(np.sqrt(case.sizes["width"]))
    return {**found, "weights": weights, "counted": _counted(case)}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """All stages and ticks at once on one device: what each computes, and what it has been sent."""
    run = _all_ticks(stages_of(case), case.sizes["microbatches"])
    stages = stages_of(case)
    every = np.broadcast_to(inputs["microbatches"], (stages, *inputs["microbatches"].shape))
    values, gradients = jax.tree.map(
        np.asarray, run(inputs["weights"], every, np.moveaxis(inputs["arrived"], 1, 0), inputs["upstream"])
    )
    return {"values": values, "gradients": gradients}


@lru_cache(maxsize=32)
def _all_ticks(stages: int, count: int) -> Any:
    number = jnp.arange(stages)[:, None]
    tick = jnp.arange(count + stages - 1)[None]
    busy = _has_work(tick, number, count)[..., None, None]
    turn = (tick - number)[..., None, None].astype(jnp.float32)

    def values(weights, microbatches, arrived):
        own = microbatches[number, jnp.clip(tick, 0, count - 1)]
        x = jnp.where(number[..., None, None] == 0, own, arrived)
        y = jnp.where(busy, x + (1 + turn / 8) * jnp.tanh(jnp.einsum("strw,swv->strv", x, weights)), 0)
        return {"y": y, "sent": jnp.concatenate([jnp.zeros_like(y[:1]), y[:-1]])}

    def run(weights, microbatches, arrived, upstream):
        found, back = jax.vjp(values, weights, microbatches, arrived)
        gradients = back(jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), upstream))
        return found, dict(zip(("weights", "microbatches", "arrived"), gradients, strict=True))

    return jax.jit(run)


def tick_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.bytes_sent(PERMUTES, cases, "collective_permute", lambda e: passed_on(e, 2),
                         least=lambda e: needed(e, 2)),
        facts.only_collectives(OTHER, cases, ("collective_permute",)),
    ]  # fmt: skip


_SIZES = {"microbatches": 3, "rows": 2, "width": 6}


def _unseen(rng: np.random.Generator) -> Case:
    sizes = {
        "microbatches": int(rng.choice([2, 4, 6])),
        "rows": int(rng.choice([3, 4])),
        "width": int(rng.choice([5, 8])),
    }
    return Case("unseen", unseen_stages(rng, (8,), (2, 2), (4,), (2, 3), (5,)), sizes)


PIPELINE_TICK = Task(
    wrapping=wrappings("pipeline")["pipeline_tick"],
    given=lambda case: {"ticks": ticks_of(case)},
    kind="local",
    points=3,
    cases=(
        Case("pipe=4", {"pipe": 4}, _SIZES, quick=True),
        Case("tensor=2 x pipe=2", {"tensor": 2, "pipe": 2}, {**_SIZES, "microbatches": 5}, quick=True),
        Case("stage=8", {"stage": 8}, _SIZES),
        Case("pipe=1", {"pipe": 1}, _SIZES),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=tick_facts,
)
