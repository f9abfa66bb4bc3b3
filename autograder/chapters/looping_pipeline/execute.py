"""``execute_looping_pipeline``: all ticks of the looped schedule, forward, and differentiated by JAX."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autograder.chapters.looping_pipeline.shared import as_stages, in_a_row, ticks_of, unseen_mesh
from autograder.chapters.looping_pipeline.wrapping import model_of, pipelines_of, wrap_execute
from autograder.contract import facts, limits
from autograder.contract.cases import microbatch_bytes, stages_of
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.machines import machine
from course.model import layer_key

MACHINE = "free network"


def given(case: Case) -> dict[str, Any]:
    """How far apart the layers of a repeat, and of a stage, are from those of the next one."""
    each = case.sizes["layers_per_stage"]
    return {"layers_apart": {"repeats": stages_of(case) * each, "stages": each}}


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    inputs = wrap_execute(None, case).inputs
    found = {name: draw_leaves(rng, inputs[name], rng.uniform(0.5, 2)) for name in ("microbatches", "upstream")}
    key = rng.integers(2**32, size=2, dtype=np.uint32)
    return {"layers": draw_leaves(rng, inputs["layers"], 0.3), **found, "key": key}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Every microbatch of every pipeline through all layers in order, on one device."""
    pipelines, stages, count = pipelines_of(case), stages_of(case), case.sizes["num_microbatches"]

    def apart(rows):
        return np.moveaxis(rows.reshape(count, pipelines, -1, rows.shape[-1]), 1, 0)

    def together(rows):
        whole = np.moveaxis(np.asarray(rows), 0, 1)
        return whole.reshape(count, -1, whole.shape[-1])

    run = _on_one_device(stages, tuple(case.sizes.items()))
    arrays = (apart(inputs["microbatches"]), apart(inputs["upstream"]))
    outputs, of_layers, of_inputs = run(in_a_row(inputs["layers"]), *arrays, inputs["key"])
    values = np.zeros((stages, *inputs["microbatches"].shape), np.float32)
    values[-1] = together(outputs)
    if not case.sizes["gradients"]:
        return {"values": values}
    back = np.zeros_like(values)
    back[0] = together(of_inputs)
    each = [as_stages(jax.tree.map(lambda g, i=i: np.asarray(g[i]), of_layers), case) for i in range(pipelines)]
    layers = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    return {"values": values, "gradients": {"layers": layers, "microbatches": back}}


@lru_cache(maxsize=32)
def _on_one_device(num_stages: int, sizes: tuple[tuple[str, int], ...]) -> Any:
    case = Case("", {"pipe": num_stages}, dict(sizes))
    model = model_of(case)

    def run(layers, microbatches, upstream, data):
        key = jax.random.wrap_key_data(data)

        def one(layers, x, microbatch):
            def layer(x, one):
                return model.layer(one[0], x, layer_key(key, microbatch, one[1])), None

            return lax.scan(layer, x, (layers, jnp.arange(model.num_layers)))[0]

        def pipeline(layers, microbatches):
            return jax.vmap(one, in_axes=(None, 0, 0))(layers, microbatches, jnp.arange(len(microbatches)))

        outputs, backward = jax.vjp(pipeline, layers, microbatches)
        return outputs, *backward(upstream)

    return jax.jit(jax.vmap(run, in_axes=(None, 0, 0, None)))


_BUBBLE = (
    "Draw which stage works on what at each of your ticks, and compare it with loop_position: where does a stage wait "
    "though a microbatch is there for it?"
)


def execute_facts(cases: list[Evidence], large: Evidence | None, _: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases

    def permuted(e: Evidence) -> float:
        passes = 2 if e.case.sizes["gradients"] else 1
        return passes * ticks_of(e.case) * microbatch_bytes(e.case) if stages_of(e.case) > 1 else 0

    return [
        facts.arrays_match("values", cases, "values", "Only the last stage's result of the last repeat counts. "),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        limits.bubble_is(large, ticks_of, _busy, _tick_seconds, _BUBBLE, weight=4),
        facts.bytes_sent("permute bytes", counted, "collective_permute", permuted, times=(0.5, 1), weight=2),
        facts.only_collectives("other collectives", counted, ("collective_permute",)),
    ]


def _busy(case: Case) -> int:
    return case.sizes["num_repeats"] * case.sizes["num_microbatches"]


def _tick_seconds(case: Case) -> float:
    """Of the matrix products of one stage's layers for one microbatch."""
    s = case.sizes
    return 2 * s["rows"] * 2 * s["width"] * s["hidden"] * s["layers_per_stage"] / machine(MACHINE).peak("f32")


_MLP = {"width": 8, "hidden": 16, "features": 4, "rows": 3, "layers_per_stage": 1, "gradients": 1}


def _sizes(num_microbatches: int, num_repeats: int, **more: int) -> dict[str, int]:
    return {**_MLP, "num_microbatches": num_microbatches, "num_repeats": num_repeats, **more}


FORWARD = Case("pipe=4, 3 microbatches, 3 repeats, forward", {"pipe": 4}, _sizes(3, 3, gradients=0), quick=True)
CASES = (
    Case("pipe=4, 6 microbatches, 2 repeats", {"pipe": 4}, _sizes(6, 2, percent_dropped=25), quick=True),
    FORWARD,
    Case("data=2 x pipe=4, 2 microbatches", {"data": 2, "pipe": 4}, _sizes(2, 3, layers_per_stage=2)),
    Case("stage=2, 5 microbatches", {"stage": 2}, _sizes(5, 3, percent_dropped=25)),
    Case("pipe=8, 8 microbatches", {"pipe": 8}, _sizes(8, 2)),
    Case("pipe=1, 3 microbatches", {"pipe": 1}, _sizes(3, 2)),
)
ANALYSED = (
    Case("pipe=4, 3 microbatches, 3 repeats, width 512", {"pipe": 4},
         _sizes(3, 3, gradients=0, width=512, hidden=2048, rows=256)),
    FORWARD.name,
)  # fmt: skip


def unseen(rng: np.random.Generator) -> Case:
    mesh = unseen_mesh(rng, ((4,), (3,), (2, 2), (2, 3), (4, 2), (5,)))
    choices = {"width": (6, 10), "hidden": (12, 20), "rows": (2, 4), "layers_per_stage": (1, 2)}
    sizes = {name: int(rng.choice(some)) for name, some in choices.items()}
    return Case(
        "unseen",
        mesh,
        _sizes(int(rng.integers(1, 8)), int(rng.integers(1, 4)), percent_dropped=int(rng.integers(10, 40)), **sizes),
    )


EXECUTE_LOOPING_PIPELINE = Task(
    wrapping=wrappings("looping_pipeline")["execute_looping_pipeline"],
    kind="local",
    points=4,
    cases=CASES,
    unseen=unseen,
    draw=draw,
    oracle=oracle,
    facts=execute_facts,
    analysed=ANALYSED,
    naive="drains_between_repeats",
    slow="drains_between_repeats",
    machine=MACHINE,
    given=given,
)
