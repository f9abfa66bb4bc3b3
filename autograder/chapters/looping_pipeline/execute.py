"""``execute_looping_pipeline``: all ticks of the looped schedule, forward, and differentiated by JAX."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autograder.chapters.draws import compile_oracle, draw_keys, draw_leaves, unseen_mesh
from autograder.chapters.looping_pipeline.wrapping import Looped, whole_model
from autograder.contract import byte_facts, facts, time_limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, pipelines_of, stages_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.machines import machine
from course.model import layer_key
from course.schedules import num_ticks

WRAPPINGS = wrappings("looping_pipeline")
MACHINE = "free network"


def ticks_of(case: Case[Looped]) -> int:
    """Number of ticks of a forward pass."""
    return num_ticks(stages_of(case), case.sizes.num_microbatches, case.sizes.num_repeats)


def permuted(evidence: TaskEvidence, passes: Any, weight: float = 1) -> Fact:
    """Limit a stage to one microbatch sent per tick, in each of ``passes(sizes)`` over the schedule."""

    def form(e: Evidence) -> float:
        microbatch_bytes = 4 * e.case.sizes.rows * (e.case.sizes.seq or 1) * e.case.sizes.width
        return passes(e.case.sizes) * ticks_of(e.case) * microbatch_bytes if stages_of(e.case) > 1 else 0

    return byte_facts.bytes_sent(
        "permute bytes", evidence.programs, "collective_permute", form, times=(0.5, 1), weight=weight
    )


def in_a_row(layers: Any) -> Any:
    """The layers as on one device, ``[num_layers, ...]``."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), layers)


def as_stages(layers: Any, case: Case[Looped]) -> Any:
    """The inverse of ``in_a_row``."""
    stack = (case.sizes.num_repeats, stages_of(case), case.sizes.layers_per_stage)
    return jax.tree.map(lambda leaf: np.reshape(leaf, (*stack, *leaf.shape[1:])), layers)


def given(case: Case[Looped]) -> dict[str, Any]:
    """Distance between corresponding layers of consecutive repeats, and of consecutive stages."""
    each = case.sizes.layers_per_stage
    return {"layers_apart": {"repeats": stages_of(case) * each, "stages": each}}


def draw(rng: np.random.Generator, case: Case[Looped]) -> dict[str, Any]:
    inputs = WRAPPINGS["execute_looping_pipeline"].input_shapes(case)
    arrays = {name: draw_leaves(rng, inputs[name], rng.uniform(0.5, 2)) for name in ("microbatches", "upstream")}
    return {"layers": draw_leaves(rng, inputs["layers"], 0.3), **arrays, "key": draw_keys(rng)}


def oracle(inputs: dict[str, Any], case: Case[Looped]) -> dict[str, Any]:
    """Run every microbatch of every pipeline through all layers in order, on one device."""
    pipelines, stages, count = pipelines_of(case), stages_of(case), case.sizes.num_microbatches

    def apart(rows):
        return np.moveaxis(rows.reshape(count, pipelines, -1, rows.shape[-1]), 1, 0)

    def together(rows):
        whole = np.moveaxis(np.asarray(rows), 0, 1)
        return whole.reshape(count, -1, whole.shape[-1])

    run = _on_one_device(whole_model(case))
    arrays = (apart(inputs["microbatches"]), apart(inputs["upstream"]))
    outputs, of_layers, of_inputs = run(in_a_row(inputs["layers"]), *arrays, inputs["key"])
    values = np.zeros((stages, *inputs["microbatches"].shape), np.float32)
    values[-1] = together(outputs)
    if not case.sizes.gradients:
        return {"values": values}
    back = np.zeros_like(values)
    back[0] = together(of_inputs)
    each = [as_stages(jax.tree.map(lambda g, i=i: np.asarray(g[i]), of_layers), case) for i in range(pipelines)]
    layers = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    return {"values": values, "gradients": {"layers": layers, "microbatches": back}}


@lru_cache(maxsize=32)
def _on_one_device(sizes: ModelSizes) -> Any:
    model = build_model(sizes)

    def run(layers, microbatches, upstream, data):
        key = jax.random.wrap_key_data(data)

        def one_microbatch(layers, x, microbatch):
            def layer(x, layer_and_index):
                return model.layer(layer_and_index[0], x, layer_key(key, microbatch, layer_and_index[1])), None

            return lax.scan(layer, x, (layers, jnp.arange(model.num_layers)))[0]

        def pipeline(layers, microbatches):
            return jax.vmap(one_microbatch, in_axes=(None, 0, 0))(layers, microbatches, jnp.arange(len(microbatches)))

        outputs, backward = jax.vjp(pipeline, layers, microbatches)
        return outputs, *backward(upstream)

    return compile_oracle(jax.vmap(run, in_axes=(None, 0, 0, None)))


def execute_facts(evidence: TaskEvidence) -> list[Fact]:
    last = (
        "Only the last stage's result of the last repeat counts. Which input does stage 0 take in each tick? With more "
        "microbatches than stages, what comes back is early, and with fewer, stage 0 waits for it. Is `stage` called "
        "with the microbatch first and then the repeat, and does the ring lead to the next stage?"
    )
    bubble = (
        "Draw what each stage works on in each of your ticks, and compare it with loop_position: in which ticks does a "
        "stage compute nothing although a microbatch has arrived for it?"
    )
    early = "does a repeat begin before its first microbatch is back, or is a part left out at this size?"
    drained = (lambda case: case.sizes.num_repeats * (case.sizes.num_microbatches + stages_of(case) - 1)), "repeat"
    return [
        facts.arrays_match("values", evidence.cases, "values", last),
        facts.arrays_match("gradients", evidence.cases, "gradients", weight=2),
        time_limits.bubble_is(
            evidence.at_scale, ticks_of, _busy, _tick_seconds, bubble, weight=4, drained=drained, early=early
        ),
        permuted(evidence, lambda sizes: 1 + sizes.gradients, weight=2),
        byte_facts.only_collectives("other collectives", evidence.programs, ("collective_permute",)),
    ]


def _busy(case: Case[Looped]) -> int:
    return case.sizes.num_repeats * case.sizes.num_microbatches


def _tick_seconds(case: Case[Looped]) -> float:
    """Seconds of the matmuls of one stage's layers for one microbatch."""
    s = case.sizes
    return 2 * s.rows * 2 * s.width * s.hidden * s.layers_per_stage / machine(MACHINE).peak("f32")


_TWO = Looped(width=8, hidden=16, features=4, rows=3, num_microbatches=6, num_repeats=2)
_FORWARD = _TWO.replace(num_microbatches=3, num_repeats=3, gradients=False)


def unseen(rng: np.random.Generator) -> Case[Looped]:
    mesh = unseen_mesh(rng, (4,), (3,), (2, 2), (2, 3), (4, 2), (5,))
    choices = {"width": (6, 10), "hidden": (12, 20), "rows": (2, 4), "layers_per_stage": (1, 2)}
    sizes: dict[str, Any] = {name: int(rng.choice(values)) for name, values in choices.items()}
    counts = {"num_microbatches": int(rng.integers(1, 8)), "num_repeats": int(rng.integers(1, 4))}
    return Case(UNSEEN, mesh, _TWO.replace(dropout=int(rng.integers(10, 40)) / 100, **counts, **sizes))


EXECUTE_LOOPING_PIPELINE = Task(
    wrapping=WRAPPINGS["execute_looping_pipeline"],
    points=4,
    core_facts=("bubble",),
    cases=(
        Case.on({"pipe": 4}, _TWO, "6 microbatches, 2 repeats", quick=True),
        Case.on({"pipe": 4}, _FORWARD, "3 microbatches, 3 repeats, forward", quick=True),
        Case.on(
            {"data": 2, "pipe": 3},
            _TWO.replace(num_microbatches=1, num_repeats=3, layers_per_stage=2, dropout=0.25),
            "1 microbatch",
        ),
        Case.on({"stage": 5}, _TWO.replace(num_microbatches=7, num_repeats=3, dropout=0.25), "7 microbatches"),
        Case.on({"pipe": 8}, _TWO.replace(num_microbatches=8, dropout=0.25), "8 microbatches"),
        Case.on({"pipe": 1}, _TWO.replace(num_microbatches=3), "3 microbatches"),
    ),
    unseen=unseen,
    draw=draw,
    oracle=oracle,
    facts=execute_facts,
    at_scale=(
        Case.on(
            {"pipe": 4}, _FORWARD.replace(width=512, hidden=2048, rows=256), "3 microbatches, 3 repeats, width 512"
        ),
        "pipe=4, 3 microbatches, 3 repeats, forward",
    ),
    naive_memory="drains_between_repeats",
    naive_time="drains_between_repeats",
    machine=MACHINE,
    given=given,
)
