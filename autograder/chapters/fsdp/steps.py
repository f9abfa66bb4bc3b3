"""What the two training steps of ``fsdp`` share: what is drawn for them, and what one device makes of it.

The learning rate is drawn with the rest and is large, so that an update is of the size of the parameters: what a
step subtracts, divided by it, is the raw gradient, and no scale can hide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.fsdp.shared import specs_of
from autograder.chapters.fsdp.wrapping import Axes, holders_of, larger
from autograder.contract.cases import model_of, model_sizes
from autograder.contract.draws import batch_of, draw_leaves, unseen_model
from autograder.contract.task import Case
from course.model import full_loss


def unseen_step(rng: np.random.Generator) -> dict[str, int]:
    """Sizes of a step, or of two, that nobody has seen."""
    model = unseen_model(rng)
    # The gradient is read off the update, so that must not be small beside the parameter: a Transformer's is.
    steps, largest = (1, 300) if "seq" in model else (int(rng.choice([1, 2])), 90)
    rate = int(rng.integers(2 * largest // 3, largest)) // steps
    return {**model, "min_size": int(rng.choice([32, 100, 160])), "steps": steps, "rate": rate}


def draw_step(rng: np.random.Generator, case: Case, axes: Axes) -> dict[str, Any]:
    """Parameters, a batch for every step, and a learning rate."""
    shapes, _ = specs_of(case)
    seeds = rng.integers(2**31, size=case.sizes["steps"])
    batches = [batch_of(larger(case, axes), int(seed)) for seed in seeds]
    return {
        "shards": draw_leaves(rng, shapes, rng.uniform(0.2, 0.4)),
        "batch": {name: np.stack([batch[name] for batch in batches]) for name in batches[0]},
        "learning_rate": np.float32(rng.uniform(0.5, 1.0) * case.sizes["rate"] / 100),
    }


def step_oracle(inputs: dict[str, Any], case: Case, axes: Axes) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a leaf gets the same."""
    run = _steps_on_one_device(model_sizes(case))
    after, losses, gradients = jax.tree.map(np.asarray, run(inputs["shards"], inputs["batch"], inputs["learning_rate"]))
    specs = specs_of(case)[1]

    def held(leaf, spec):
        holders = holders_of(spec, axes)
        return np.repeat(leaf[None], np.prod([case.mesh[axis] for axis in holders]), 0) if holders else leaf

    losses = held(losses, P())
    values = {"loss": losses, "shards": jax.tree.map(held, after, specs)}
    return {"values": values, "gradients": jax.tree.map(held, gradients, specs)}


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: tuple[tuple[str, int], ...]) -> Any:
    """Parameters after the steps, each step's loss, and the sum of the gradients."""
    model = model_of(Case("", {}, dict(sizes)))

    def run(params, batches, rate):
        def step(carry, batch):
            params, total = carry
            loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, batch))(params)
            after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            return (after, jax.tree.map(lambda a, b: a + b, total, gradients)), loss

        start = (params, jax.tree.map(lambda p: 0 * p, params))
        (after, total), losses = lax.scan(step, start, batches)
        return after, losses, total

    return jax.jit(run)
