"""``fsdp_loss``: a model's loss and gradient, one layer whole at a time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms, limits
from autograder.cases import axis_of, axis_size, batch_shapes, model_of
from autograder.chapters.fsdp.shared import keep, kept_specs, mean_or_own, ring_bytes, specs_of
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import batch_of, draw_leaves, meshes, unseen_mesh
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.mesh import abstract_mesh, as_varying
from course.model import full_loss


def wrap_fsdp_loss(function: Any, case: Case) -> Wrapped:
    axis, model = axis_of(case), model_of(case)
    shapes, specs = specs_of(case)
    results = {"values": P(axis), "gradients": kept_specs(specs, axis)}

    def local(shards, batch):
        def loss_of(shards):
            loss = function(shards, specs, batch, model, axis)
            if not hasattr(loss, "shape") or loss.shape != ():
                raise Mismatch(f"fsdp_loss returned {forms.describe(loss)}, expected a scalar, this device's mean loss")
            return as_varying(loss, axis)

        loss, gradients = jax.value_and_grad(loss_of)(jax.tree.map(lambda s: as_varying(s, axis), shards))
        return {"values": loss[None], "gradients": keep(gradients, specs, axis)}

    def program(shards, batch):
        mesh = abstract_mesh(case.mesh)
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, P(axis)), out_specs=results)(shards, batch)

    inputs = {"shards": shapes, "batch": batch_shapes(case)}
    return Wrapped(program, inputs, {"shards": specs, "batch": P(axis)}, results, {"shards": "state"})


def draw_fsdp_loss(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes, _ = specs_of(case)
    return {"shards": draw_leaves(rng, shapes, 0.3), "batch": batch_of(case, int(rng.integers(2**31)))}


def fsdp_loss_oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Loss and gradient of each device's rows on one device; sharded leaves then get the mean over devices."""
    size = axis_size(case)
    rows = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), inputs["batch"])
    each = _loss_of_each_device(tuple(case.sizes.items()))
    losses, gradients = jax.tree.map(np.asarray, each(inputs["shards"], rows))
    return {"values": losses, "gradients": mean_or_own(gradients, specs_of(case)[1])}


@lru_cache(maxsize=32)
def _loss_of_each_device(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.vmap(jax.value_and_grad(lambda p, b: full_loss(model, p, b)), in_axes=(None, 0)))


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


def _unseen_mlp(rng: np.random.Generator) -> Case:
    sizes = {**_MLP, "width": int(rng.choice([16, 32])), "hidden": 64, "num_layers": int(rng.choice([2, 4]))}
    return Case("unseen", unseen_mesh(rng), sizes)


FSDP_LOSS = Task(
    wrapping=Wrapping("fsdp_loss", "(shards, specs, batch, model, axis_name)", wrap_fsdp_loss),
    kind="local",
    points=5,
    cases=meshes(_MLP, two=_TRANSFORMER),
    unseen=_unseen_mlp,
    draw=draw_fsdp_loss,
    oracle=fsdp_loss_oracle,
    facts=fsdp_loss_facts,
    analysed=(Case("data=8, width 4096", {"data": 8}, _LARGE_MLP), "data=8"),
    naive="keeps_gathered_weights",
    slow="computes_a_few_rows_at_a_time",
)
