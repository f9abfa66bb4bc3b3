"""``fsdp_loss``: a model's loss and gradient, one layer whole at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.fsdp.shared import given_specs, mean_or_own, ring_bytes, specs_of
from autograder.contract import facts, limits
from autograder.contract.cases import axis_size, model_of, model_sizes
from autograder.contract.draws import ODD, batch_of, draw_leaves, flows_back, meshes, unseen_mesh, unseen_model
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.model import full_loss


def draw_fsdp_loss(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes, _ = specs_of(case)
    # The same on every device, as it is for a mean over them: who averages the gradient first is right too.
    upstream = np.repeat(flows_back(rng, 1), axis_size(case))
    shards = draw_leaves(rng, shapes, rng.uniform(0.2, 0.4))
    return {"shards": shards, "batch": batch_of(case, int(rng.integers(2**31))), "upstream": upstream}


def fsdp_loss_oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Loss and gradient of each device's rows on one device; sharded leaves then get the mean over devices."""
    size = axis_size(case)
    rows = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), inputs["batch"])
    each = _loss_of_each_device(model_sizes(case))
    losses, gradients = jax.tree.map(np.asarray, each(inputs["shards"], rows, inputs["upstream"]))
    return {"values": losses, "gradients": mean_or_own(gradients, specs_of(case)[1])}


@lru_cache(maxsize=32)
def _loss_of_each_device(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))

    def one(params, batch, upstream):
        loss, back = jax.vjp(lambda params: full_loss(model, params, batch), params)
        return loss, *back(upstream)

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))


TOO_MUCH = "Whose weights are whole at that moment? Which of them could be gathered later, or again?"
_TOO_SLOW = "What is computed or read more often than it must be?"
_EXPOSED = "The next function, `fsdp_train_step`, gathers one layer while another computes."


def fsdp_loss_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        limits.temporaries_within(large, references, 1.15, TOO_MUCH, weight=4),
        limits.time_within(large, references, 1.15, _TOO_SLOW),
        limits.exposed_within(large, references, 1.15, _EXPOSED, weight=0),
        facts.bytes_sent("all-gather bytes", counted, "all_gather", ring_bytes, times=(1, 2)),
        facts.bytes_sent("reduce-scatter bytes", counted, "reduce_scatter", ring_bytes),
        facts.only_collectives("other collectives", counted, ("all_gather", "reduce_scatter")),
    ]


# Four rows a device: a program that takes them in halves must not meet a single row, which JAX lowers differently.
_MLP = {"width": 16, "hidden": 32, "num_layers": 3, "features": 8, "rows": 4, "min_size": 64}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 4, "min_size": 64}
_LARGE_MLP = {"width": 4096, "hidden": 16384, "num_layers": 3, "features": 2048, "rows": 2048, "min_size": 16384}


def _unseen(rng: np.random.Generator) -> Case:
    sizes = {**unseen_model(rng), "min_size": int(rng.choice([32, 100, 160]))}
    return Case("unseen", unseen_mesh(rng, *ODD), sizes)


FSDP_LOSS = Task(
    wrapping=wrappings("fsdp")["fsdp_loss"],
    given=given_specs,
    kind="local",
    points=5,
    cases=meshes(_MLP, two=_TRANSFORMER),
    unseen=_unseen,
    draw=draw_fsdp_loss,
    oracle=fsdp_loss_oracle,
    facts=fsdp_loss_facts,
    analysed=(Case("data=8, width 4096", {"data": 8}, _LARGE_MLP), "data=8"),
    # The same leaves are split, along the same dims, as at both sizes.
    stretches=({"rows": 2048}, {"features": 64, "width": 512, "hidden": 4096, "min_size": 4097}),
    naive="keeps_gathered_weights",
    slow="computes_a_few_rows_at_a_time",
)
