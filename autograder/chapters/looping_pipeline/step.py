"""``looping_train_step``: the gradients of a repeat are averaged while earlier repeats still run backward."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.closed_forms import reduced_once
from autograder.chapters.draws import draw_keys, draw_leaves, draw_masked, draw_rate, sgd, stacked, unseen_mesh
from autograder.chapters.looping_pipeline.execute import WRAPPINGS, as_stages, in_a_row, permuted
from autograder.chapters.looping_pipeline.wrapping import Looped, params_of, rows_of, whole_model
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, pipelines_of, stages_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from course.model import full_loss

# Relative to the synchronisation after the whole backward pass; one repeat of R is left exposed, 1/R of it.
EXPOSED = 0.5
# A layer's two products become six in a forward and a backward pass; the reference recomputes one of them. Recomputing
# both makes eight. Time separates less: a loop over a group's layers, equally right, takes up to 1.9 times as long.
FLOPS, TEMPORARIES = 9 / 7, 1.5


def draw(rng: np.random.Generator, case: Case[Looped]) -> dict[str, Any]:
    """Parameters, a batch and a key for every step, and a learning rate so large that no wrong scale can hide."""
    return {
        "params": draw_leaves(rng, params_of(case)[0], 0.3),
        "batch": stacked(lambda: draw_masked(rng, case.sizes, rows_of(case), pipelines_of(case)), case.sizes.steps),
        "key": draw_keys(rng, case.sizes.steps),
        "learning_rate": draw_rate(rng, case.sizes.rate_scale),
    }


def oracle(inputs: dict[str, Any], case: Case[Looped]) -> dict[str, Any]:
    """The steps on one device: every pipeline's microbatches one by one, and the mean over all their valid rows."""
    params = {**inputs["params"], "layers": in_a_row(inputs["params"]["layers"])}
    run = _on_one_device(pipelines_of(case), case.sizes.num_microbatches, whole_model(case))
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
def _on_one_device(pipelines: int, count: int, sizes: ModelSizes) -> Any:
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


def unseen(rng: np.random.Generator) -> Case[Looped]:
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
            {"data": 2, "pipe": 3}, _TWO.replace(num_microbatches=1, layers_per_stage=2, dropout=0.25), "1 microbatch"
        ),
        Case.on({"pipe": 2, "data": 2}, _TRANSFORMER, "3 microbatches"),
        Case.on(
            {"data": 1, "pipe": 8},
            _FOUR.replace(num_microbatches=5, num_repeats=1, layers_per_stage=2, dropout=0.25),
            "5 microbatches",
        ),
        Case.on({"data": 8, "pipe": 1}, _TWO.replace(num_microbatches=2, dropout=0.25), "2 microbatches"),
    ),
    unseen=unseen,
    draw=draw,
    oracle=oracle,
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
