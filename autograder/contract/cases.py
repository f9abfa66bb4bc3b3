"""What wrappers share about cases: their axes, models and shapes of batches. Nothing here draws a case or an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.contract.wrapping import Case
from course.mesh import as_varying, varying_axes
from course.model import Model, mlp, transformer

_MODEL = ("width", "hidden", "num_layers", "num_heads", "features", "outputs", "vocab", "seq", "dropout")


def axis_of(case: Case) -> str:
    """The axis that a function is told to work over: ``data`` where there is one, else the first."""
    return "data" if "data" in case.mesh else next(iter(case.mesh))


def axis_size(case: Case) -> int:
    """The size of ``axis_of``."""
    return case.mesh[axis_of(case)]


def pipe_of(case: Case) -> str:
    """The axis of a pipeline's stages: ``pipe`` where there is one, else the last."""
    return "pipe" if "pipe" in case.mesh else list(case.mesh)[-1]


def stages_of(case: Case) -> int:
    """How many stages a pipeline has."""
    return case.mesh[pipe_of(case)]


def microbatch_bytes(case: Case) -> int:
    """Of one microbatch between two stages: float32 of the model's width, for each row or token."""
    return 4 * case.sizes["rows"] * case.sizes.get("seq", 1) * case.sizes["width"]


def varying(tree: Any, axes: Iterable[str]) -> Any:
    """Every leaf, typed as another on each device of these axes."""
    for axis in axes:
        tree = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), tree)
    return tree


def pull_back(loss_of: Callable[[Any], jax.Array], tree: Any, upstream: jax.Array) -> tuple[jax.Array, Any]:
    """The loss of ``tree``, and its gradient when ``upstream`` flows back into the loss; inside ``shard_map``.

    ``upstream`` may vary over no axis over which the loss does not.
    """
    loss, back = jax.vjp(loss_of, tree)
    (gradients,) = back(varying(upstream.astype(loss.dtype), varying_axes(loss)))
    return loss, gradients


def model_of(case: Case) -> Model:
    """The model that the case's sizes describe: a Transformer where they name a sequence, else an MLP.

    ``outputs`` of an MLP are as many as ``features`` where they are not named; ``dropout`` is in percent.
    """
    return _model_of(model_sizes(case))


def params_of(case: Case) -> Any:
    """Shapes of the model's parameters."""
    return _params_of(model_sizes(case))


def model_sizes(case: Case) -> tuple[tuple[str, int], ...]:
    """Those of the case's sizes that ``model_of`` reads: cases that differ in others alone share a model."""
    return tuple((name, size) for name, size in case.sizes.items() if name in _MODEL)


# Kept, since making a model from modules takes a tenth of a second and every case asks several times.
@lru_cache(maxsize=64)
def _model_of(sizes: tuple[tuple[str, int], ...]) -> Model:
    s = dict(sizes)
    if "seq" in s:
        return transformer(width=s["width"], hidden=s["hidden"], num_layers=s["num_layers"],
                           num_heads=s.get("num_heads", 2), vocab=s["vocab"], max_seq=s["seq"],
                           dropout=s.get("dropout", 0) / 100)  # fmt: skip
    return mlp(width=s["width"], hidden=s["hidden"], num_layers=s["num_layers"], num_inputs=s["features"],
               num_outputs=s.get("outputs", s["features"]), dropout=s.get("dropout", 0) / 100)  # fmt: skip


@lru_cache(maxsize=64)
def _params_of(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = _model_of(sizes)
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def batch_shapes(case: Case) -> dict[str, Any]:
    """The shapes and dtypes of ``batch_of``."""
    s, rows = case.sizes, case.sizes["rows"] * axis_size(case)
    shape, dtype = ((rows, s["seq"]), np.int32) if "seq" in s else ((rows, s["features"]), np.float32)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name in ("inputs", "targets")}
