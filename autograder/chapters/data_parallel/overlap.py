"""``overlapped_gradients``: the reductions run while the last microbatch's backward pass goes on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.contract import facts, limits
from autograder.contract.cases import axis_size, model_of, model_sizes, params_of
from autograder.contract.draws import ODD, batch_of, draw_leaves, unseen_mesh, unseen_model
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact
from course.model import full_loss

_DEEP = {"width": 8, "hidden": 16, "num_layers": 12, "features": 8, "rows": 4, "num_microbatches": 2}
_FLAT = {"width": 16, "hidden": 32, "num_layers": 1, "features": 8, "rows": 4, "num_microbatches": 1}
_THREE = {"width": 16, "hidden": 32, "num_layers": 3, "features": 8, "rows": 6, "num_microbatches": 3}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 4, "num_microbatches": 2}
# Two microbatches of 4,096 rows a device.
_LARGE = {"width": 2048, "hidden": 8192, "num_layers": 12, "features": 2048, "rows": 8192, "num_microbatches": 2}
CASES = (
    Case("data=8", {"data": 8}, _DEEP, quick=True),
    Case("pipe=4 x tensor=2", {"pipe": 4, "tensor": 2}, _THREE, quick=True),
    Case("data=2", {"data": 2}, _TRANSFORMER),
    Case("data=1", {"data": 1}, _FLAT),
)
ANALYSED = (Case("data=8, width 2048", {"data": 8}, _LARGE), "data=8")


# Of what one synchronisation after the whole backward pass exposes; also asked of the compiled schedule, as advice.
EXPOSED = 0.35


def unseen(rng: np.random.Generator) -> Case:
    more = {"num_microbatches": int(rng.choice([4, 6]))}
    return Case("unseen", unseen_mesh(rng, *ODD), {**unseen_model(rng), **more})


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {
        "params": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)),
        "batch": batch_of(case, int(rng.integers(2**31))),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Each device's loss, and on every device the mean of their gradients."""
    size = axis_size(case)
    rows = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), inputs["batch"])
    each = _loss_of_each_device(model_sizes(case))
    losses, gradients = jax.tree.map(np.asarray, each(inputs["params"], rows))

    def mean(stacked):
        average = np.mean(stacked, 0, np.float64, keepdims=True).astype(np.float32)
        return np.broadcast_to(average, stacked.shape).copy()

    return {"values": losses, "gradients": jax.tree.map(mean, gradients)}


@lru_cache(maxsize=32)
def _loss_of_each_device(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.vmap(jax.value_and_grad(lambda p, b: full_loss(model, p, b)), in_axes=(None, 0)))


_EXPOSED = (
    "Which computation is left to hide a reduction behind when it begins, and is the sum that it needs computed by "
    "then? Computations run in the order in which your program has them."
)
_SLOW = "What is computed more often than it must be? Work that only fills the wait is no gain."


def overlap_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases

    def form(e):
        n = axis_size(e.case)
        held = sum(leaf.local_bytes(e.case.mesh) for leaf in e.inputs if leaf.name.startswith("params/"))
        return 2 * (n - 1) / n * held

    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        facts.bytes_sent("all-reduce bytes", counted, "all_reduce", form, weight=2),
        facts.only_collectives("other collectives", counted, ("all_reduce",)),
        limits.exposed_within(large, references, EXPOSED, _EXPOSED, weight=4, than=limits.NAIVE, gains=True),
        limits.time_within(large, references, 1.25, _SLOW),
    ]
