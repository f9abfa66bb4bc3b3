"""Grading of ``execute_looping_pipeline`` and ``looping_train_step``, each in a part of its own."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autograder.chapters.closed_forms import reduced_once
from autograder.chapters.draws import (
    compile_oracle,
    draw_keys,
    draw_leaves,
    draw_masked,
    draw_rate,
    sgd,
    stacked,
    unseen_mesh,
)
from autograder.chapters.looping_pipeline.wrapping import Looped, params_of, rows_of, whole_model
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, pipelines_of, stages_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.machines import machine
from course.model import full_loss, layer_key
from course.schedules import num_ticks

WRAPPINGS = wrappings("looping_pipeline")
MACHINE = "free network"

# execute_looping_pipeline: all ticks of the looped schedule, forward, and differentiated by JAX.


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


def draw_execute(rng: np.random.Generator, case: Case[Looped]) -> dict[str, Any]:
    inputs = WRAPPINGS["execute_looping_pipeline"].input_shapes(case)
    arrays = {name: draw_leaves(rng, inputs[name], rng.uniform(0.5, 2)) for name in ("microbatches", "upstream")}
    return {"layers": draw_leaves(rng, inputs["layers"], 0.3), **arrays, "key": draw_keys(rng)}


def execute_oracle(inputs: dict[str, Any], case: Case[Looped]) -> dict[str, Any]:
    """Run every microbatch of every pipeline through all layers in order, on one device."""
    pipelines, stages, count = pipelines_of(case), stages_of(case), case.sizes.num_microbatches

    def apart(rows):
        return np.moveaxis(rows.reshape(count, pipelines, -1, rows.shape[-1]), 1, 0)

    def together(rows):
        whole = np.moveaxis(np.asarray(rows), 0, 1)
        return whole.reshape(count, -1, whole.shape[-1])

    run = _execute_on_one_device(whole_model(case))
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
def _execute_on_one_device(sizes: ModelSizes) -> Any:
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


_SIX = Looped(width=8, hidden=16, features=4, rows=3, num_microbatches=6, num_repeats=2)
_FORWARD = _SIX.replace(num_microbatches=3, num_repeats=3, gradients=False)


def unseen_execute(rng: np.random.Generator) -> Case[Looped]:
    mesh = unseen_mesh(rng, (4,), (3,), (2, 2), (2, 3), (4, 2), (5,))
    choices = {"width": (6, 10), "hidden": (12, 20), "rows": (2, 4), "layers_per_stage": (1, 2)}
    sizes: dict[str, Any] = {name: int(rng.choice(values)) for name, values in choices.items()}
    counts = {"num_microbatches": int(rng.integers(1, 8)), "num_repeats": int(rng.integers(1, 4))}
    return Case(UNSEEN, mesh, _SIX.replace(dropout=int(rng.integers(10, 40)) / 100, **counts, **sizes))


EXECUTE_LOOPING_PIPELINE = Task(
    wrapping=WRAPPINGS["execute_looping_pipeline"],
    points=4,
    core_facts=("bubble",),
    cases=(
        Case.on({"pipe": 4}, _SIX, "6 microbatches, 2 repeats", quick=True),
        Case.on({"pipe": 4}, _FORWARD, "3 microbatches, 3 repeats, forward", quick=True),
        Case.on(
            {"data": 2, "pipe": 3},
            _SIX.replace(num_microbatches=1, num_repeats=3, layers_per_stage=2, dropout=0.25),
            "1 microbatch",
        ),
        Case.on({"stage": 5}, _SIX.replace(num_microbatches=7, num_repeats=3, dropout=0.25), "7 microbatches"),
        Case.on({"pipe": 8}, _SIX.replace(num_microbatches=8, dropout=0.25), "8 microbatches"),
        Case.on({"pipe": 1}, _SIX.replace(num_microbatches=3), "3 microbatches"),
    ),
    unseen=unseen_execute,
    draw=draw_execute,
    oracle=execute_oracle,
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


# looping_train_step: the gradients of a repeat are averaged while earlier repeats still run backward.

# Relative to the synchronisation after the whole backward pass; one repeat of R is left exposed, 1/R of it.
EXPOSED = 0.5
# A layer's two products become six in a forward and a backward pass; the reference recomputes one of them. Recomputing
# both makes eight. Time separates less: a loop over a group's layers, equally right, takes up to 1.9 times as long.
FLOPS, TEMPORARIES = 9 / 7, 1.5


def draw_step(rng: np.random.Generator, case: Case[Looped]) -> dict[str, Any]:
    """Parameters, a batch and a key for every step, and a learning rate so large that no wrong scale can hide."""
    return {
        "params": draw_leaves(rng, params_of(case)[0], 0.3),
        "batch": stacked(lambda: draw_masked(rng, case.sizes, rows_of(case), pipelines_of(case)), case.sizes.steps),
        "key": draw_keys(rng, case.sizes.steps),
        "learning_rate": draw_rate(rng, case.sizes.rate_scale),
    }


def step_oracle(inputs: dict[str, Any], case: Case[Looped]) -> dict[str, Any]:
    """The steps on one device: every pipeline's microbatches one by one, and the mean over all their valid rows."""
    params = {**inputs["params"], "layers": in_a_row(inputs["params"]["layers"])}
    run = _step_on_one_device(pipelines_of(case), case.sizes.num_microbatches, whole_model(case))
    after, losses, gradients = run(params, (inputs["batch"], inputs["key"]), inputs["learning_rate"])
    devices = pipelines_of(case) * stages_of(case)

    def copied(tree):
        def repeated(part, times):
            return jax.tree.map(lambda leaf: np.repeat(leaf[None], times, 0), part)

        layers = repeated(as_stages(tree["layers"], case), pipelines_of(case))
        return {"embed": repeated(tree["embed"], devices), "layers": layers, "head": repeated(tree["head"], devices)}

    losses = np.repeat(losses[None], devices, 0)
    return {"values": {"loss": losses, "params": copied(after)}, "gradients": copied(gradients)}


@lru_cache(maxsize=32)
def _step_on_one_device(pipelines: int, count: int, sizes: ModelSizes) -> Any:
    model = build_model(sizes)

    def loss_of(params, batch, data):
        def microbatch_loss(rows, pipeline, microbatch):
            key = jax.random.fold_in(jax.random.wrap_key_data(data), pipeline)
            return full_loss(model, params, rows, jax.random.fold_in(key, microbatch))

        rows = jax.tree.map(lambda a: a.reshape(pipelines * count, -1, *a.shape[1:]), batch)
        numbers = jnp.arange(pipelines * count)
        counted = rows["mask"].reshape(pipelines * count, -1).sum(1)
        return jax.vmap(microbatch_loss)(rows, numbers // count, numbers % count) @ counted / counted.sum()

    return sgd(loss_of)


def _resident_bytes(case: Case[Looped]) -> tuple[int, int]:
    """Resident bytes of embedding and head, and of a device's layers."""
    shapes = params_of(case)[0]
    size = {part: sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes[part])) for part in shapes}
    return size["embed"] + size["head"], size["layers"] // stages_of(case)


def _reduced(e: Evidence) -> tuple[float, float]:
    """The least and the most bytes of all steps' all-reduces."""
    least, most = reduced_once(stages_of(e.case), pipelines_of(e.case), *_resident_bytes(e.case))
    return e.case.sizes.steps * least, e.case.sizes.steps * most


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    exposed = (
        "After which tick of the backward pass is a repeat's gradient complete, where in your program does its average "
        "begin, and what is computed after that?"
    )
    values = (
        "Does each tick use the weights of its own repeat, on every stage, and is each pipeline's loss weighted by its "
        "unmasked count?"
    )
    gradients = "For which leaves have devices seen different rows, and for which does each stage have only a share?"
    slow = "What is computed more often than necessary?"
    too_much = "What is kept from every tick until the backward pass gets to it? A tick's input would be enough."
    return [
        *facts.values_and_gradients(evidence.cases, values, gradients, step=True),
        time_limits.exposed_over_within(evidence, EXPOSED, "data", exposed, weight=4, than=limits.NAIVE),
        limits.flops_within(evidence, FLOPS, slow),
        limits.temporaries_within(evidence, TEMPORARIES, too_much, weight=2),
        byte_facts.bytes_sent(
            "all-reduce bytes",
            evidence.programs,
            "all_reduce",
            lambda e: _reduced(e)[1],
            least=lambda e: _reduced(e)[0],
            hint="Is every gradient of this device reduced exactly once per step?",
        ),
        permuted(evidence, lambda sizes: 2 * sizes.steps),
        byte_facts.only_collectives("other collectives", evidence.programs, ("all_reduce", "collective_permute")),
    ]


_FOUR = Looped(width=8, hidden=16, features=4, rows=2, num_microbatches=4, num_repeats=4)
_TWO = _FOUR.replace(num_repeats=2)
_TRANSFORMER = Looped(
    width=8,
    hidden=16,
    vocab=16,
    seq=4,
    rows=2,
    num_microbatches=3,
    num_repeats=2,
    layers_per_stage=2,
    dropout=0.25,
    rate_scale=2.0,
)


def unseen_step(rng: np.random.Generator) -> Case[Looped]:
    mesh = unseen_mesh(rng, (2, 2), (2, 3), (2, 4), (3, 2))
    choices = {"width": (6, 12), "hidden": (12, 20), "features": (3, 5), "rows": (1, 3), "layers_per_stage": (1, 2)}
    sizes: dict[str, Any] = {name: int(rng.choice(values)) for name, values in choices.items()}
    counts = {"num_microbatches": int(rng.integers(1, 7)), "num_repeats": int(rng.integers(2, 4))}
    steps, dropout = int(rng.choice([1, 2])), int(rng.integers(10, 40)) / 100
    scale = float(rng.uniform(0.6, 1.2)) / steps
    return Case(UNSEEN, mesh, _FOUR.replace(dropout=dropout, steps=steps, rate_scale=scale, **counts, **sizes))


LOOPING_TRAIN_STEP = Task(
    wrapping=WRAPPINGS["looping_train_step"],
    points=5,
    core_facts=("exposed over data", "live temporaries"),
    cases=(
        Case.on({"data": 4, "pipe": 2}, _FOUR, "4 microbatches", quick=True),
        Case.on(
            {"replica": 2, "stage": 4},
            _TWO.replace(num_microbatches=2, layers_per_stage=2, steps=3, rate_scale=0.6),
            "2 microbatches",
            quick=True,
        ),
        Case.on(
            {"data": 2, "pipe": 3},
            _TWO.replace(num_microbatches=1, layers_per_stage=2, dropout=0.25),
            "1 microbatch",
        ),
        Case.on({"pipe": 2, "data": 2}, _TRANSFORMER, "3 microbatches"),
        Case.on(
            {"data": 1, "pipe": 8},
            _FOUR.replace(num_microbatches=5, num_repeats=1, layers_per_stage=2, dropout=0.25),
            "5 microbatches",
        ),
        Case.on({"data": 8, "pipe": 1}, _TWO.replace(num_microbatches=2, dropout=0.25), "2 microbatches"),
    ),
    unseen=unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
    at_scale=(
        Case.on({"data": 4, "pipe": 2}, _FOUR.replace(width=2048, hidden=8192, features=64, rows=512), "width 2048"),
        "data=4 x pipe=2, 4 microbatches",
    ),
    naive_memory="keeps_all_activations",
    naive_time="averages_after_the_backward_pass",
    machine="8xA5000",
    exposed_axes=("data",),
)
