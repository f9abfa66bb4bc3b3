"""``train_step_dp``: three steps of SGD on many devices are three steps on one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.data_parallel.wrapping import STEPS, learning_rate
from autograder.contract import facts, limits
from autograder.contract.cases import axis_size, model_of, model_sizes, params_of
from autograder.contract.draws import ODD, batch_of, draw_leaves, unseen_mesh, unseen_model
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact
from course.model import full_loss

_MLP = {"width": 16, "hidden": 32, "num_layers": 2, "features": 8, "rows": 8, "num_microbatches": 4, "percent": 10}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 4, "num_microbatches": 2,
                "percent": 20}  # fmt: skip
_LARGE = {"width": 1024, "hidden": 4096, "num_layers": 2, "features": 1024, "rows": 8192, "num_microbatches": 4,
          "percent": 10}  # fmt: skip
CASES = (
    Case("data=8", {"data": 8}, _MLP, quick=True),
    Case("pipe=4 x tensor=2", {"pipe": 4, "tensor": 2}, {**_MLP, "num_microbatches": 2, "percent": 5}, quick=True),
    Case("data=2", {"data": 2}, _TRANSFORMER),
    Case("data=1", {"data": 1}, {**_MLP, "num_microbatches": 1}),
)
ANALYSED = (Case("data=8, width 1024", {"data": 8}, _LARGE), "data=8")


def unseen(rng: np.random.Generator) -> Case:
    more = {"num_microbatches": int(rng.choice([3, 6])), "percent": int(rng.choice([7, 13, 17, 26]))}
    return Case("unseen", unseen_mesh(rng, *ODD), {**unseen_model(rng), **more})


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    batches = [batch_of(case, int(rng.integers(2**31))) for _ in range(STEPS)]
    return {
        "params": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)),
        "batches": jax.tree.map(lambda *rows: np.stack(rows), *batches),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Plain SGD on one device, on all rows at once."""
    params, losses, found = inputs["params"], [], None
    for number in range(STEPS):
        batch = jax.tree.map(lambda a, i=number: a[i], inputs["batches"])
        loss, gradients = jax.tree.map(np.asarray, _loss_and_gradient(model_sizes(case))(params, batch))
        params = jax.tree.map(lambda p, g: p - np.float32(learning_rate(case)) * g, params, gradients)
        found, losses = found or gradients, [*losses, loss]
    return {"values": {"losses": np.stack(losses), "params": params}, "gradients": found}


@lru_cache(maxsize=32)
def _loss_and_gradient(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.value_and_grad(lambda params, batch: full_loss(model, params, batch)))


_TOO_MUCH = "How many rows' activations are there at that moment, and how many are in a microbatch?"


def step_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    def leaves(e):
        return [leaf for leaf in e.inputs if leaf.name.startswith("params/")]

    def form(e):
        n = axis_size(e.case)
        return STEPS * 2 * (n - 1) / n * (4 + sum(leaf.local_bytes(e.case.mesh) for leaf in leaves(e)))

    def count(e):
        return STEPS * (len(leaves(e)) + 1) if axis_size(e.case) > 1 else 0

    once = f"In {STEPS} steps, one a step for each leaf and one for the loss: where does each of yours run?"
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        facts.bytes_sent("all-reduce bytes", cases, "all_reduce", form, weight=2),
        facts.times_sent("all-reduces", cases, "all_reduce", count, once),
        facts.only_collectives("other collectives", cases, ("all_reduce",)),
        limits.temporaries_within(large, references, 1.5, _TOO_MUCH),
    ]
