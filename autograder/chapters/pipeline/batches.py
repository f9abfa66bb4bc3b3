"""Models over stages: batches for every group of stages, cases that nobody has seen, and the loss on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.pipeline.shared import unseen_stages
from autograder.chapters.pipeline.wrapping.model import rows_of
from autograder.contract.cases import model_of, model_sizes, params_of
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case
from course.data import regression_batch, token_batch
from course.model import full_loss

# Their layers can be shared out over 2, 3 and 4 stages; no size is a public case's. Dropout is in percent.
_MODELS = (
    {"width": 12, "hidden": 24, "num_layers": 12, "features": 5, "outputs": 7, "dropout": 35},
    {"width": 24, "hidden": 20, "num_layers": 12, "features": 8, "outputs": 4, "dropout": 15},
    {"width": 12, "hidden": 20, "num_layers": 12, "num_heads": 3, "vocab": 24, "seq": 6, "dropout": 15},
)


def unseen_pipelines(rng: np.random.Generator, **more: int) -> Case:
    """Two pipelines side by side, so that the oracle is compiled for few sizes only."""
    sizes = {**_MODELS[rng.integers(len(_MODELS))], "microbatches": int(rng.choice([7, 8])), "rows": 5}
    return Case("unseen", unseen_stages(rng, (2, 2), (2, 4), (2, 3)), {**sizes, **more})


def draw_batch(rng: np.random.Generator, case: Case, steps: int) -> dict[str, np.ndarray]:
    """Batches as ``batch_shapes`` says."""
    s, rows = case.sizes, rows_of(case)

    def one() -> dict[str, np.ndarray]:
        seed = int(rng.integers(2**31))
        if "seq" in s:
            return token_batch(seed, 0, batch=rows, seq=s["seq"], vocab=s["vocab"])
        return regression_batch(
            seed, 0, batch=rows, num_inputs=s["features"], num_outputs=s.get("outputs", s["features"])
        )

    if not steps:
        return one()
    every = [one() for _ in range(steps)]
    return {name: np.stack([batch[name] for batch in every]) for name in every[0]}


def draw_params(rng: np.random.Generator, case: Case) -> Any:
    return draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4))


def draw_key(rng: np.random.Generator, *lead: int) -> np.ndarray:
    """The data of a key, or of several."""
    return rng.integers(0, 2**32 - 1, (*lead, 2), np.uint32)


def one_device_loss(case: Case) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """``(params, rows of one group, its key) ->`` the mean over microbatches, each with masks of its own."""
    return _one_device_loss(model_sizes(case), case.sizes["microbatches"])


@lru_cache(maxsize=32)
def _one_device_loss(sizes: tuple[tuple[str, int], ...], count: int) -> Callable[[Any, Any, jax.Array], jax.Array]:
    model = model_of(Case("", {}, dict(sizes)))

    def loss(params, rows, key):
        parts = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), rows)
        keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(np.arange(count, dtype=np.int32))
        return jax.vmap(lambda part, key: full_loss(model, params, part, key))(parts, keys).mean()

    return loss
