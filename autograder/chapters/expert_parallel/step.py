"""Grading of ``moe_step``: experts are averaged over the data axis alone, all other leaves over both."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.draws import draw_leaves, draw_rate, sgd, stacked, unseen_case
from autograder.chapters.expert_parallel.layer import traveling
from autograder.chapters.expert_parallel.wrapping import (
    StepSizes,
    build_moe,
    data_of,
    devices_of,
    expert_of,
    expert_specs,
    holders_of,
    moe_shapes,
)
from autograder.contract import byte_facts, facts
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.data import token_batch
from course.moe import moe_loss

WRAPPINGS = wrappings("expert_parallel")


def draw_step(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    s, rows = case.sizes, devices_of(case) * case.sizes.rows
    params = draw_leaves(rng, moe_shapes(s), rng.uniform(0.2, 0.4))
    layers, bias = params["layers"], params["layers"]["moe"]["router"]["bias"]
    layers["moe"]["router"]["bias"] = np.float32(rng.uniform(-0.1, 0.1, bias.shape))
    layers["norm"]["scale"] += 1  # otherwise experts read so little that an update of them is lost in rounding
    return {
        "params": params,
        "batch": stacked(
            lambda: token_batch(int(rng.integers(2**31)), 0, batch=rows, seq=s.seq, vocab=s.vocab), s.steps
        ),
        "learning_rate": draw_rate(rng, s.rate_scale),
    }


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: StepSizes, groups: int) -> Any:
    return sgd(lambda params, batch: moe_loss(build_moe(sizes), params, batch, sizes.capacity, groups))


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """The steps on one device, where each device's tokens compete for places separately."""
    run = _steps_on_one_device(case.sizes, devices_of(case))
    after, losses, gradients = run(inputs["params"], (inputs["batch"],), inputs["learning_rate"])

    def copies(leaf, spec):
        holders = holders_of(spec, case)
        return np.repeat(leaf[None], int(np.prod([case.mesh[axis] for axis in holders])), 0) if holders else leaf

    specs = expert_specs(after, case, skip=1)
    after, gradients = (jax.tree.map(copies, tree, specs) for tree in (after, gradients))
    return {"values": {"loss": copies(losses, P()), "params": after}, "gradients": gradients}


def _bytes_of(case: Case[StepSizes]) -> tuple[float, float]:
    """Bytes of a device's own experts, and of all other leaves."""
    shapes = moe_shapes(case.sizes)
    leaves_and_specs = zip(jax.tree.leaves(shapes), jax.tree.leaves(expert_specs(shapes, case, 1)), strict=True)
    sizes = [(4 * leaf.size, any(spec)) for leaf, spec in leaves_and_specs]
    own = sum(size for size, split in sizes if split) / case.mesh[expert_of(case)]
    return own, sum(size for size, split in sizes if not split)


def _averaged(most: bool) -> Callable[[Evidence], float]:
    """The least, or the most, bytes of all-reduces: over all devices at once, or over one axis and then the other.

    The router's bias has no gradient, and may be left out.
    """

    def total(e: Evidence) -> float:
        s, (own, other_bytes) = e.case.sizes, _bytes_of(e.case)
        data, n = e.case.mesh[data_of(e.case)], devices_of(e.case)
        counts, bias = 4 * s.num_layers * s.num_experts, 4 * s.num_layers * s.num_experts
        if not most:
            return s.steps * (all_reduce_bytes(data, own) + all_reduce_bytes(n, other_bytes - bias + counts))
        reduced_bytes = other_bytes + 3 * counts + 4 * (4 * s.num_layers + 4)
        return s.steps * (
            all_reduce_bytes(data, own) + sum(all_reduce_bytes(size, reduced_bytes) for size in e.case.mesh.values())
        )

    return total


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients = "Over which axes do devices have copies of this leaf, and whose tokens contribute to its gradient? "
    own = "Which devices have a copy of an expert?"
    router = "And does it include both losses of the router, with their weights, each as the mean over layers?"
    return [
        *facts.values_and_gradients(evidence.cases, gradients=gradients, step=True, first_loss=router),
        byte_facts.bytes_sent(
            "all-reduce bytes", evidence.cases, "all_reduce", _averaged(True), least=_averaged(False), hint=own
        ),
        byte_facts.bytes_sent(
            "all-to-all bytes",
            evidence.cases,
            "all_to_all",
            lambda e: e.case.sizes.steps * traveling(e, e.case.sizes.num_layers),
        ),
        byte_facts.only_collectives("other collectives", evidence.cases, ("all_reduce", "all_to_all")),
    ]


_STEP = StepSizes(width=8, hidden=12, num_layers=2, num_experts=8, k=2, capacity=5, vocab=16, seq=6, rows=2)


def _step_case(name: str, quick: bool = False, **sizes: Any) -> Case[StepSizes]:
    mesh = dict(part.split("=") for part in name.split(" x "))
    return Case(name, {axis: int(size) for axis, size in mesh.items()}, _STEP.replace(**sizes), quick=quick)


def _unseen_step(rng: np.random.Generator) -> Case[StepSizes]:
    sizes = _STEP.replace(num_experts=12, k=int(rng.choice([1, 3])), vocab=24, rows=3, capacity=7, balance=0.2, z=0.05)
    sizes = sizes.replace(width=int(rng.choice([8, 12])), hidden=int(rng.choice([16, 20])))
    return unseen_case(rng, sizes, (2, 2), (2, 3), (3, 2), (1, 6))


MOE_STEP = Task(
    wrapping=WRAPPINGS["moe_step"],
    points=5,
    core_facts=("all-reduce bytes", "other collectives"),
    cases=(
        _step_case("data=2 x expert=4", quick=True),
        _step_case("replica=3 x device=2", quick=True, num_experts=6, rows=1, seq=8, k=1, z=0.02),
        _step_case("data=1 x expert=8"),
        _step_case("expert=1 x data=5", num_experts=3, num_layers=1, steps=2, rate_scale=3.0),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
)
