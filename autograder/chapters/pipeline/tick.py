"""``pipeline_tick``: what one stage does in one tick, for every tick of a schedule."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.cases import pipe_of, stages_of
from autograder.chapters.pipeline.shared import OTHER, PERMUTES, needed, passed_on, stage_of, ticks_of
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.mesh import abstract_mesh, as_varying

NAME = "pipeline_tick"
_VALUES = "Which microbatch is this stage at, where does its input come from, and who needs what it computed?"


def wrap(function: Any, case: Case) -> Wrapped:
    """Every tick of a schedule, each with other things that arrive; what idle stages give does not count."""
    axis, count = pipe_of(case), case.sizes["microbatches"]
    number_of_ticks = ticks_of(case)

    def local(weights, microbatches, arrived, upstream):
        number = lax.axis_index(axis)

        def ticks(weights, microbatches, arrived):
            def one(_, inputs):
                tick, arrived = inputs
                y, sent = _checked(function(stage_of(weights), microbatches, arrived, tick, axis), arrived, case)
                busy, coming = _has_work(tick, number, count), _has_work(tick, number - 1, count) & (number > 0)
                return None, (jnp.where(busy, y, 0), jnp.where(coming, sent, 0))

            numbers = jnp.arange(number_of_ticks, dtype=jnp.int32)
            return dict(zip(("y", "sent"), lax.scan(one, None, (numbers, arrived))[1], strict=True))

        own = as_varying(microbatches, axis)
        values, back = jax.vjp(ticks, weights[0], own, arrived[:, 0])
        found = back(jax.tree.map(lambda a: a[:, 0], upstream))
        gradients = dict(zip(("weights", "microbatches", "arrived"), found, strict=True))
        return jax.tree.map(lambda a: a[None], {"values": values, "gradients": gradients})

    in_specs = {"weights": P(axis), "microbatches": P(), "arrived": P(None, axis), "upstream": P(None, axis)}
    results = {"values": P(axis), "gradients": P(axis)}

    def program(weights, microbatches, arrived, upstream):
        mapped = jax.shard_map(
            local, mesh=abstract_mesh(case.mesh), in_specs=tuple(in_specs.values()), out_specs=results
        )
        return mapped(weights, microbatches, arrived, upstream)

    return Wrapped(program, _shapes(case), in_specs, results)


def _has_work(tick: Any, stage: Any, count: int) -> Any:
    return (tick >= stage) & (tick - stage < count)


def _checked(found: Any, like: Any, case: Case) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise Mismatch(f"{NAME} returned {forms.describe(found)}, expected a tuple (y, sent)")
    forms.same_shapes(NAME, {"y": found[0], "sent": found[1]}, {"y": like, "sent": like}, case)
    return found


def _shapes(case: Case) -> dict[str, Any]:
    s, stages = case.sizes, stages_of(case)

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    block = (s["rows"], s["width"])
    flows = leaf(ticks_of(case), stages, *block)
    return {
        "weights": leaf(stages, s["width"], s["width"]),
        "microbatches": leaf(s["microbatches"], *block),
        "arrived": flows,
        "upstream": {"y": flows, "sent": flows},
    }


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    found = draw_leaves(rng, _shapes(case))
    return {**found, "weights": found["weights"] / np.float32(np.sqrt(case.sizes["width"]))}


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
    mesh = [{"pipe": 8}, {"pipe": 2, "data": 2}, {"stage": 4}][rng.integers(3)]
    return Case("unseen", mesh, {**_SIZES, "microbatches": int(rng.choice([2, 4, 5])), "rows": int(rng.choice([3, 4]))})


PIPELINE_TICK = Task(
    wrapping=Wrapping(NAME, "(stage, microbatches, arrived, tick, axis_name)", wrap),
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
