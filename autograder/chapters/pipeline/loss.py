"""``pipeline_loss``: a model's loss over the stages, the same on all of them, and its gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.pipeline.batches import (
    draw_batch,
    draw_key,
    draw_params,
    one_device_loss,
    unseen_pipelines,
)
from autograder.chapters.pipeline.shared import OTHER, PERMUTES, needed, passed_on, refused
from autograder.chapters.pipeline.wrapping.model import ENDS
from autograder.chapters.pipeline.wrapping.schedule import groups_of
from autograder.contract import facts, limits
from autograder.contract.cases import microbatch_bytes, model_sizes, stages_of
from autograder.contract.draws import flows_back
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

SHARING = ("reduce_scatter", "all_gather", "all_to_all")
_GRADIENTS = "Which stages have a part in the loss, and is each part counted once?"
_UNEVEN = "A stage that holds fewer layers than the others would be given some that are none."
_LOSS = "Only the last stage has activations that count; what do the others need of them?"
_STRETCH = "All stages wait while the loss is computed. Could each compute a part of it?"
FASTER = 0.85


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    groups = groups_of(case)
    batch, upstream = draw_batch(rng, case, 0), flows_back(rng, groups)
    return {"params": draw_params(rng, case), "batch": batch, "key": draw_key(rng, groups), "upstream": upstream}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The loss of each group's rows on one device, on every stage; gradients of its share of the batch."""
    groups, stages = groups_of(case), stages_of(case)
    rows = jax.tree.map(lambda a: a.reshape(groups, -1, *a.shape[1:]), inputs["batch"])
    run = _each_group(model_sizes(case), case.sizes["microbatches"])
    losses, gradients = jax.tree.map(np.asarray, run(inputs["params"], rows, inputs["key"], inputs["upstream"]))
    return {"values": np.repeat(losses, stages), "gradients": gradients, "refused": np.True_}


@lru_cache(maxsize=32)
def _each_group(sizes: tuple[tuple[str, int], ...], microbatches: int) -> Any:
    loss_of = one_device_loss(Case("", {}, {**dict(sizes), "microbatches": microbatches}))

    def one(params, rows, key, upstream):
        loss, back = jax.vjp(lambda params: loss_of(params, rows, jax.random.wrap_key_data(key)), params)
        return loss, *back(upstream)

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0, 0)))


def summed(e: Evidence) -> Evidence:
    """With the stages' shares of the gradient of embedding and head added up: no stage need hold all of it."""
    prefixes = tuple(f"gradients/{name}/" for name in ENDS)
    added = {name: a.sum(1, dtype=a.dtype) for name, a in e.measured.items() if name.startswith(prefixes)}
    return replace(e, measured={**e.measured, **added})


def shared_bytes(e: Evidence) -> float:
    """The last stage's outputs in equal parts to all stages, and their gradients back; and the loss itself."""
    n, outputs = stages_of(e.case), e.case.sizes["microbatches"] * microbatch_bytes(e.case)
    return 0.0 if n == 1 else 2 * (n - 1) / n * (outputs + 16)


def loss_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    whole = [summed(e) for e in cases]
    return [
        facts.arrays_match("values", cases, "values", "Each stage returns the mean over all rows of its group."),
        facts.arrays_match("gradients", whole, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(whole, "gradients"),
        refused("uneven layers", cases, "a model with one layer too many", _UNEVEN),
        facts.bytes_sent(PERMUTES, counted, "collective_permute", lambda e: passed_on(e, 2),
                         least=lambda e: needed(e, 2)),
        facts.bytes_at_most("loss bytes", counted, ("all_reduce", *SHARING), shared_bytes, _LOSS),
        facts.only_collectives(OTHER, counted, ("collective_permute", "all_reduce", *SHARING)),
        limits.time_within(large, references, FASTER, _STRETCH, than=limits.NAIVE, weight=0, least=0.4),
    ]  # fmt: skip


# Rows of every case differ from its stages and layers; dropout is in percent.
_SIZES = {"width": 16, "hidden": 32, "num_layers": 8, "features": 6, "outputs": 10, "microbatches": 6, "rows": 2,
          "dropout": 25}  # fmt: skip
_FEWER = {**_SIZES, "microbatches": 4, "rows": 4, "dropout": 0}
_LARGE = {**_FEWER, "width": 1024, "hidden": 4096, "features": 512, "outputs": 32768, "rows": 512}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "microbatches": 3, "rows": 3,
                "dropout": 25}  # fmt: skip


PIPELINE_LOSS = Task(
    wrapping=wrappings("pipeline")["pipeline_loss"],
    kind="local",
    points=5,
    cases=(
        Case("pipe=4, 6 microbatches", {"pipe": 4}, {**_SIZES, "num_layers": 4}, quick=True),
        Case("pipe=8, 4 microbatches", {"pipe": 8}, _FEWER, quick=True),
        Case("data=2 x pipe=2, 3 microbatches", {"data": 2, "pipe": 2}, _TRANSFORMER),
        Case("data=4 x stage=2, 5 microbatches", {"data": 4, "stage": 2}, {**_FEWER, "microbatches": 5, "rows": 1}),
        Case("pipe=1, 2 microbatches", {"pipe": 1}, {**_FEWER, "microbatches": 2}),
    ),
    unseen=unseen_pipelines,
    draw=draw,
    oracle=oracle,
    facts=loss_facts,
    analysed=(Case("pipe=8, width 1024, 32,768 outputs", {"pipe": 8}, _LARGE), "pipe=8, 4 microbatches"),
    naive="broadcasts_outputs",
    slow="broadcasts_outputs",
)
