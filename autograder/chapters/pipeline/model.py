"""Models over stages: the loss on one device, a training step, and their limits on communication and memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.closed_forms import all_reduce_bytes, reduced_once
from autograder.chapters.draws import (
    compile_oracle,
    draw_keys,
    draw_leaves,
    draw_masked,
    draw_rate,
    flows_back,
    sgd,
    stacked,
    unseen_case,
)
from autograder.chapters.pipeline.schedule import WRAPPINGS, microbatch_bytes, permuted, refused, ticks_of
from autograder.chapters.pipeline.wrapping import ENDS, REFUSED, StepSizes, rows_of
from autograder.contract import byte_facts, facts, limits
from autograder.contract.case import ModelSizes
from autograder.contract.case_builders import build_model, groups_of, params_of, pipe_of, stages_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from course.model import full_loss

# Their layers can be shared over 2, 3 and 4 stages; no public case has these sizes.
_MODELS = (
    StepSizes(width=12, hidden=24, num_layers=12, features=5, outputs=7, dropout=0.35, num_microbatches=7, rows=5),
    StepSizes(width=24, hidden=20, num_layers=12, features=8, outputs=4, dropout=0.15, num_microbatches=7, rows=5),
    StepSizes(
        width=12, hidden=20, num_layers=12, num_heads=3, vocab=24, seq=6, dropout=0.15, num_microbatches=7, rows=5
    ),
)


def unseen_pipelines(rng: np.random.Generator) -> Case[StepSizes]:
    """Two parallel pipelines, so that the oracle is compiled for few sizes only."""
    sizes = _MODELS[rng.integers(len(_MODELS))].replace(num_microbatches=int(rng.choice([1, 3, 8])))
    return unseen_case(rng, sizes, (2, 2), (2, 4), (2, 3))


def draw_params(rng: np.random.Generator, case: Case[StepSizes]) -> Any:
    return draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4))


def mean_of_means(means: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean of the means ``[parts]``, weighted by the valid count in each part's mask ``[parts, ...]``."""
    counted = mask.reshape(len(means), -1).sum(1)
    return means @ counted / jnp.maximum(counted.sum(), 1)


@lru_cache(maxsize=32)
def one_device_loss(sizes: ModelSizes, count: int) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """``(params, rows of one group, its key) ->`` the mean over all valid rows in ``count`` microbatches."""
    model = build_model(sizes)

    def loss(params, rows, key):
        parts = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), rows)
        keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(np.arange(count, dtype=np.int32))
        means = jax.vmap(lambda part, key: full_loss(model, params, part, key))(parts, keys)
        return mean_of_means(means, parts["mask"])

    return loss


# pipeline_loss: a model's loss over the stages, the same on all of them, and its gradient.

SHARING = ("reduce_scatter", "all_gather", "all_to_all", "collective_broadcast")
# Relative to the FLOPs if every stage computes the whole head; if each computes an eighth, 0.55 of them are needed.
SPREAD = 0.65


def draw_loss(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    groups = groups_of(case, pipe_of)
    return {
        "params": draw_params(rng, case),
        "batch": draw_masked(rng, case.sizes, rows_of(case), groups),
        "key": draw_keys(rng, groups),
        "upstream": flows_back(rng, groups),
    }


def loss_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """The loss of each group's rows, computed on one device and repeated for all stages; and each group's gradients."""
    groups, stages = groups_of(case, pipe_of), stages_of(case)
    rows = jax.tree.map(lambda a: a.reshape(groups, -1, *a.shape[1:]), inputs["batch"])
    run = _each_group(case.sizes.model, case.sizes.num_microbatches)
    losses, gradients = jax.tree.map(np.asarray, run(inputs["params"], rows, inputs["key"], inputs["upstream"]))
    return {"values": np.repeat(losses, stages), "gradients": gradients, "refused": np.int32(REFUSED)}


@lru_cache(maxsize=32)
def _each_group(sizes: ModelSizes, count: int) -> Any:
    def loss_and_gradient(params, rows, key, upstream):
        key = jax.random.wrap_key_data(key)
        loss, back = jax.vjp(lambda params: one_device_loss(sizes, count)(params, rows, key), params)
        return loss, *back(upstream)

    return compile_oracle(jax.vmap(loss_and_gradient, in_axes=(None, 0, 0, 0)))


def summed(e: Evidence) -> Evidence:
    """Add up the stages' shares of the gradient of embedding and head: no stage needs to hold all of it."""
    prefixes = tuple(f"gradients/{name}/" for name in ENDS)
    added = {name: a.sum(1, dtype=a.dtype) for name, a in e.measured.items() if name.startswith(prefixes)}
    return replace(e, measured={**e.measured, **added})


def shared_bytes(e: Evidence, more: int = 16) -> float:
    """Bytes for the last stage's outputs, sent in equal parts to all stages, their gradients back, and the loss.

    If the stages do not divide the rows, parts are equal with rows of zeros at the end.
    """
    stages, s = stages_of(e.case), e.case.sizes
    rows = math.ceil(s.num_microbatches * s.rows / stages) * stages
    return all_reduce_bytes(stages, rows * microbatch_bytes(e.case) // s.rows + more)


def loss_facts(evidence: TaskEvidence) -> list[Fact]:
    values = (
        "It is the mean over all unmasked rows or tokens, wherever they are in the batch, and the same on every stage."
    )
    gradients = "Which stages have a part in the loss, and is each part counted once, weighted by its unmasked count?"
    uneven = "The layer left over would be on no stage, and nobody would notice."
    stretch = "Does one stage, or each of them, compute the loss of all rows? Could each compute a part?"
    return [
        *facts.values_and_gradients([summed(e) for e in evidence.cases], values, gradients),
        refused("uneven layers", evidence.cases, "a model with one layer too many", uneven),
        permuted(evidence.programs, lambda _: 2),
        byte_facts.bytes_at_most("loss bytes", evidence.programs, ("all_reduce", *SHARING), shared_bytes, _LAST_STAGE),
        limits.flops_within(evidence, SPREAD, stretch, than=limits.NAIVE, weight=0),
    ]


_LAST_STAGE = "Only the last stage has activations that count: how many of them does each of the others need?"
# In every case the number of rows differs from those of stages and layers. Three stages do not divide it; two do, and
# one of four groups has no valid rows.
_MLP: dict[str, Any] = {"width": 16, "hidden": 32, "num_layers": 8, "features": 6, "outputs": 10}
_SIX = StepSizes(**_MLP, num_microbatches=6, rows=2, dropout=0.25)
_FEWER = StepSizes(**_MLP, num_microbatches=4, rows=4)
_TRANSFORMER = StepSizes(width=16, hidden=32, num_layers=6, vocab=32, seq=8, num_microbatches=1, rows=4, dropout=0.25)
_MANY_OUTPUTS = _FEWER.replace(width=1024, hidden=4096, features=512, outputs=32768, rows=512)

PIPELINE_LOSS = Task(
    wrapping=WRAPPINGS["pipeline_loss"],
    points=5,
    core_facts=("loss bytes",),
    cases=(
        Case.on({"pipe": 4}, _SIX.replace(dropout=0.0), "6 microbatches", quick=True),
        Case.on({"pipe": 8}, _FEWER, "4 microbatches", quick=True),
        Case.on({"data": 2, "pipe": 3}, _TRANSFORMER, "1 microbatch"),
        Case.on({"data": 4, "stage": 2}, _SIX.replace(num_microbatches=5), "5 microbatches"),
        Case.on({"pipe": 1}, _FEWER.replace(num_microbatches=2, dropout=0.25), "2 microbatches"),
    ),
    unseen=unseen_pipelines,
    draw=draw_loss,
    oracle=loss_oracle,
    facts=loss_facts,
    at_scale=(Case.on({"pipe": 8}, _MANY_OUTPUTS, "width 1024, 32,768 outputs"), "pipe=8, 4 microbatches"),
    naive_memory="broadcasts_outputs",
    naive_time="broadcasts_outputs",
)

# pipeline_train_step: SGD over several parallel pipelines, with one tick's activations at a time. The learning rate
# is drawn and large, so that an update is about as large as the parameters: the subtracted value, divided by it,
# is the raw gradient, and a wrong scale cannot hide.


def draw_step(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    return {
        "params": draw_params(rng, case),
        "batch": stacked(
            lambda: draw_masked(rng, case.sizes, rows_of(case), groups_of(case, pipe_of)), case.sizes.steps
        ),
        "key": draw_keys(rng),
        "learning_rate": draw_rate(rng, case.sizes.rate_scale),
    }


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """The steps on one device, with all rows; every device that holds a leaf gets the same values."""
    groups, stages, steps = groups_of(case, pipe_of), stages_of(case), case.sizes.steps
    run = _steps_on_one_device(case.sizes.model, case.sizes.num_microbatches, groups)
    step_inputs = np.arange(steps, dtype=np.int32), np.repeat(inputs["key"][None], steps, 0), inputs["batch"]
    after, losses, gradients = run(inputs["params"], step_inputs, inputs["learning_rate"])

    def copied(tree):
        copies = {name: groups if name == "layers" else groups * stages for name in tree}
        return {
            name: jax.tree.map(lambda leaf, n=copies[name]: np.repeat(leaf[None], n, 0), part)
            for name, part in tree.items()
        }

    losses = np.repeat(losses[None], groups * stages, 0)
    return {"values": {"loss": losses, "params": copied(after)}, "gradients": copied(gradients)}


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: ModelSizes, count: int, groups: int) -> Any:
    group_loss = one_device_loss(sizes, count)

    def mean_loss(params, number, key, batch):
        key = jax.random.fold_in(jax.random.wrap_key_data(key), number)
        rows = jax.tree.map(lambda a: a.reshape(groups, -1, *a.shape[1:]), batch)
        keys = jax.vmap(lambda group: jax.random.fold_in(key, group))(np.arange(groups, dtype=np.int32))
        return mean_of_means(jax.vmap(group_loss, in_axes=(None, 0, 0))(params, rows, keys), rows["mask"])

    return sgd(mean_loss)


def _resident(e: Evidence, *parts: str) -> int:
    """Bytes of these parts of the model on one device."""
    return sum(
        leaf.local_bytes(e.case.mesh) for leaf in e.inputs if leaf.name.startswith(tuple(f"params/{p}/" for p in parts))
    )


def _reduced(e: Evidence) -> tuple[float, float]:
    """The least and the most bytes of all steps' all-reduces."""
    bytes_of = _resident(e, "embed", "head"), _resident(e, "layers")
    least, most = reduced_once(stages_of(e.case), groups_of(e.case, pipe_of), *bytes_of)
    return e.case.sizes.steps * least, e.case.sizes.steps * most


# --8<-- [start:most_bytes]
def most_bytes(case: Case[StepSizes]) -> int:
    """The most live temporaries of a step that keeps blocks of every tick, and recomputes a stage's layers.

    Three stacks of a block per tick (a stage's input, its output or its second layer's input, and the gradient
    of its output), two of a block per microbatch (the gradients of the inputs and of the outputs, which a
    loop that writes into a buffer carries), the gradients of this stage's weights twice (the sum, and one tick's), and
    the residuals of one stage's layers while they are differentiated: eight arrays of the hidden size, and eight of the
    width. Keeping a single array of the hidden size for every tick and layer takes far more.
    """
    s = case.sizes
    block, inner = 4 * s.rows * s.width, 4 * s.rows * s.hidden
    layers = s.num_layers // stages_of(case)
    weights = 4 * layers * 2 * s.width * s.hidden
    return (3 * ticks_of(case) + 2 * s.num_microbatches) * block + 2 * weights + 8 * layers * (block + inner)


# --8<-- [end:most_bytes]


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "Is each pipeline's loss weighted by its unmasked count, and does each use the key for its own index?"
    gradients = "For which leaves have devices seen different rows, and for which does each stage have only a share?"
    too_much = (
        "What does the backward pass of a tick need, and which part of it could be recomputed? Everything inside a "
        "single jax.checkpoint is in memory at once during its backward pass: how much is that?"
    )

    def shared(e: Evidence) -> float:
        return e.case.sizes.steps * shared_bytes(e, 0)

    return [
        *facts.values_and_gradients(evidence.cases, values, gradients, step=True),
        limits.temporaries_at_most(evidence, most_bytes, too_much, weight=4),
        byte_facts.bytes_sent(
            "all-reduce bytes",
            evidence.programs,
            "all_reduce",
            lambda e: _reduced(e)[1],
            least=lambda e: _reduced(e)[0],
        ),
        permuted(evidence.programs, lambda case: 2 * case.sizes.steps),
        byte_facts.bytes_at_most("loss bytes", evidence.programs, SHARING, shared, _LAST_STAGE),
    ]


_LONG = _SIX.replace(num_microbatches=32, dropout=0.0)
_THREE_STEPS = _SIX.replace(num_microbatches=5, steps=3, rate_scale=0.2)


def _unseen_step(rng: np.random.Generator) -> Case[StepSizes]:
    case = unseen_pipelines(rng)
    # The gradient is read off the update, which must not be small compared with the parameter, as a Transformer's is.
    steps, largest = (1, 3.0) if case.sizes.seq else (int(rng.choice([1, 2])), 0.9)
    return case.with_sizes(steps=steps, rate_scale=float(rng.uniform(2 / 3, 1)) * largest / steps)


PIPELINE_TRAIN_STEP = Task(
    wrapping=WRAPPINGS["pipeline_train_step"],
    points=5,
    core_facts=("live temporaries",),
    cases=(
        Case.on({"data": 2, "pipe": 4}, _SIX, "6 microbatches", quick=True),
        Case.on({"data": 2, "pipe": 4}, _LONG, "32 microbatches", quick=True),
        Case.on({"data": 1, "pipe": 8}, _THREE_STEPS, "5 microbatches, 3 steps"),
        Case.on({"pipe": 3, "data": 2}, _TRANSFORMER.replace(rows=2, rate_scale=2.0), "1 microbatch"),
        Case.on({"replica": 4, "stage": 2}, _SIX.replace(num_microbatches=3), "3 microbatches"),
        Case.on({"data": 5, "pipe": 1}, _SIX.replace(num_microbatches=4, rows=1, dropout=0.0), "4 microbatches"),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
    at_scale=(
        Case.on(
            {"data": 2, "pipe": 4},
            _LONG.replace(width=512, hidden=2048, features=256, outputs=128, rows=1024),
            "32 microbatches of 1,024 rows",
        ),
        "data=2 x pipe=4, 32 microbatches",
    ),
    naive_memory="keeps_activations",
)
