"""Models over stages: who holds what of them, batches for every group of stages, and the loss on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.cases import model_of, params_of, pipe_of
from autograder.chapters.pipeline.shared import groups_of, others_of
from autograder.contract import Case
from autograder.draws import draw_leaves
from course.data import regression_batch, token_batch
from course.model import full_loss


def specs_of(case: Case) -> Any:
    """Layers are split over the stages; every device holds the embedding and the head."""
    return by_part(case, layers=P(pipe_of(case)), ends=P())


def by_part(case: Case, *, layers: Any, ends: Any) -> Any:
    """A tree like the parameters, with one value for all layers' leaves and another for embedding and head."""
    return {
        name: jax.tree.map(lambda _, of=layers if name == "layers" else ends: of, tree)
        for name, tree in params_of(case).items()
    }


def rows_of(case: Case) -> int:
    """Rows of all groups together."""
    return groups_of(case) * case.sizes["microbatches"] * case.sizes["rows"]


def batch_shapes(case: Case, steps: int) -> dict[str, Any]:
    """``[steps, rows, ...]`` where there are steps, else ``[rows, ...]``."""
    s, lead = case.sizes, ((steps,) if steps else ()) + (rows_of(case),)
    if "seq" in s:
        return {name: jax.ShapeDtypeStruct((*lead, s["seq"]), np.int32) for name in ("inputs", "targets")}
    sizes = {"inputs": s["features"], "targets": s.get("outputs", s["features"])}
    return {name: jax.ShapeDtypeStruct((*lead, size), np.float32) for name, size in sizes.items()}


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
    return draw_leaves(rng, params_of(case), 0.3)


def draw_key(rng: np.random.Generator, *lead: int) -> np.ndarray:
    """The data of a key, or of several."""
    return rng.integers(0, 2**32 - 1, (*lead, 2), np.uint32)


def row_axes(case: Case) -> Any:
    """The entry of a spec for a dim of rows."""
    return others_of(case) or None


def one_device_loss(case: Case) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """``(params, rows of one group, its key) ->`` the mean over microbatches, each with masks of its own."""
    return _one_device_loss(tuple(case.sizes.items()))


@lru_cache(maxsize=32)
def _one_device_loss(sizes: tuple[tuple[str, int], ...]) -> Callable[[Any, Any, jax.Array], jax.Array]:
    case = Case("", {}, dict(sizes))
    model, count = model_of(case), case.sizes["microbatches"]

    def loss(params, rows, key):
        parts = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), rows)
        keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(np.arange(count, dtype=np.int32))
        return jax.vmap(lambda part, key: full_loss(model, params, part, key))(parts, keys).mean()

    return loss
