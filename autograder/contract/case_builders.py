"""Builders shared by wrappers: axes of a case, models, batch shapes. Nothing here draws a case or an input."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes
from course.mesh import varying, varying_axes
from course.model import Model, heads_apart, mlp, transformer
from course.program.program import path_name

LEARNING_RATE = jax.ShapeDtypeStruct((), np.float32)
KEY = jax.ShapeDtypeStruct((2,), np.uint32)


def axis_of(case: Case[Any]) -> str:
    """The axis that a function works over: ``data`` if there is one, else the first."""
    return "data" if "data" in case.mesh else next(iter(case.mesh))


def axis_size(case: Case[Any]) -> int:
    """The size of ``axis_of``."""
    return case.mesh[axis_of(case)]


def pipe_of(case: Case[Any]) -> str:
    """The axis of a pipeline's stages: ``pipe`` if there is one, else the last."""
    return "pipe" if "pipe" in case.mesh else list(case.mesh)[-1]


def stages_of(case: Case[Any]) -> int:
    """The number of pipeline stages."""
    return case.mesh[pipe_of(case)]


def data_of(case: Case[Any]) -> str | None:
    """The axis of parallel pipelines, if there is one."""
    return next((axis for axis in case.mesh if axis != pipe_of(case)), None)


def pipelines_of(case: Case[Any]) -> int:
    """The number of parallel pipelines."""
    return case.mesh.get(data_of(case) or "", 1)


def tensor_of(case: Case[Any]) -> str:
    """The axis that features are split over: ``tensor`` if there is one, else the last."""
    return "tensor" if "tensor" in case.mesh else list(case.mesh)[-1]


def parts_of(case: Case[Any]) -> int:
    """The size of ``tensor_of``: the number of parts that features are split into."""
    return case.mesh[tensor_of(case)]


def others_of(case: Case[Any], split: Callable[[Case[Any]], str] = tensor_of) -> tuple[str, ...]:
    """All axes except those named by ``split``: the ones over which a batch's rows are split."""
    return tuple(axis for axis in case.mesh if axis != split(case))


def groups_of(case: Case[Any], split: Callable[[Case[Any]], str] = tensor_of) -> int:
    """The number of devices with the same index on the axis ``split``, each with different rows."""
    return math.prod(case.mesh[axis] for axis in others_of(case, split))


def pull_back(loss_of: Callable[[Any], jax.Array], tree: Any, upstream: jax.Array) -> tuple[jax.Array, Any]:
    """The loss of ``tree``, and its gradient when ``upstream`` flows back into the loss; inside ``shard_map``.

    ``upstream`` must not vary over an axis over which the loss does not vary.
    """
    loss, back = jax.vjp(loss_of, tree)
    (gradients,) = back(varying(upstream.astype(loss.dtype), varying_axes(loss)))
    return loss, gradients


# Cached: building a model from modules takes a tenth of a second, and every case needs it several times.
@lru_cache(maxsize=128)
def build_model(sizes: ModelSizes) -> Model:
    """The model on one device: ``build_model(case.sizes.model)``."""
    common: dict[str, Any] = {
        "width": sizes.width,
        "hidden": sizes.hidden,
        "num_layers": sizes.num_layers,
        "dropout": sizes.dropout,
    }
    if sizes.seq:
        positions = sizes.max_seq or sizes.seq
        optional = {"parallel": sizes.parallel} if sizes.parallel else {}
        return transformer(**common, num_heads=sizes.num_heads, vocab=sizes.vocab, max_seq=positions, **optional)
    return mlp(**common, num_inputs=sizes.features, num_outputs=sizes.outputs or sizes.features)


@lru_cache(maxsize=128)
def param_shapes(sizes: ModelSizes) -> Any:
    """Shapes of the parameters of ``build_model``."""
    model = build_model(sizes)
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def model_of(case: Case[ModelSizes]) -> Model:
    """The model described by the case's sizes."""
    return build_model(case.sizes.model)


def params_of(case: Case[ModelSizes]) -> Any:
    """Shapes of the model's parameters."""
    return param_shapes(case.sizes.model)


@lru_cache(maxsize=128)
def _params_by_head(sizes: ModelSizes) -> Any:
    return jax.eval_shape(partial(heads_apart, num_heads=sizes.num_heads), param_shapes(sizes))


def params_by_head(case: Case[ModelSizes]) -> Any:
    """Shapes of a Transformer's parameters, with a separate dim for heads."""
    return _params_by_head(case.sizes.model)


def join_heads(layers: Any) -> Any:
    """Parameters of one layer, or of stacked layers, without the separate dim for heads: as in the course's model."""
    qkv, out = (layers["attention"][name]["kernel"] for name in ("qkv", "out"))
    *stacked, _, _, width = out.shape
    kernels = {"qkv": qkv.reshape(*stacked, width, -1), "out": out.reshape(*stacked, -1, width)}
    return {**layers, "attention": {name: {"kernel": kernel} for name, kernel in kernels.items()}}


def batch_shapes(sizes: ModelSizes, rows: int, *steps: int, masked: bool = False) -> dict[str, Any]:
    """Shapes and dtypes of a model's batch, ``[*steps, rows, ...]``: tokens, or an MLP's features.

    A masked batch also marks which tokens, or which rows for an MLP, count.
    """
    lasts = (sizes.seq, sizes.seq) if sizes.seq else (sizes.features, sizes.outputs or sizes.features)
    dtype = np.int32 if sizes.seq else np.float32
    shapes = (jax.ShapeDtypeStruct((*steps, rows, last), dtype) for last in lasts)
    mask = jax.ShapeDtypeStruct((*steps, rows, sizes.seq) if sizes.seq else (*steps, rows), np.float32)
    return dict(zip(("inputs", "targets"), shapes, strict=True)) | ({"mask": mask} if masked else {})


def encode_specs(specs: Any) -> dict[str, Any]:
    """A tree of specs as plain data, by the leaf's path: ``Task.given`` of a function that takes specs."""
    leaves = jax.tree.leaves_with_path(specs, is_leaf=lambda spec: isinstance(spec, P))
    return {"specs": {path_name("", path): list(spec) for path, spec in leaves}}


def decode_specs(case: Case[Any], like: Any) -> Any:
    """The specs of the leaves of ``like``, which come with the case as ``encode_specs`` wrote them."""

    def entry(axes: str | list[str] | tuple[str, ...] | None) -> Any:
        if axes is None or isinstance(axes, str):
            return axes
        return axes[0] if len(axes) == 1 else tuple(axes)

    def spec(path: Any, _: Any) -> P:
        return P(*map(entry, case.given["specs"][path_name("", path)]))

    return jax.tree.map_with_path(spec, like)
