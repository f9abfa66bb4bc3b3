"""What the functions of ``looping_pipeline`` that run on devices share: axes, model, parameters as stages hold them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.cases import pipe_of, stages_of
from autograder.contract import Case
from course.model import Model, mlp, transformer
from course.schedules import num_ticks


def data_of(case: Case) -> str | None:
    """The axis of the pipelines, if there is one."""
    return next((axis for axis in case.mesh if axis != pipe_of(case)), None)


def pipelines_of(case: Case) -> int:
    """How many pipelines there are beside each other."""
    return case.mesh.get(data_of(case) or "", 1)


def ticks_of(case: Case) -> int:
    """Of a forward pass."""
    return num_ticks(stages_of(case), case.sizes["num_microbatches"], case.sizes["num_repeats"])


def model_of(case: Case) -> Model:
    """The model that the case's sizes describe, with a group of layers for each stage and repeat."""
    return _model_of(stages_of(case), tuple(case.sizes.items()))


@lru_cache(maxsize=64)
def _model_of(num_stages: int, sizes: tuple[tuple[str, int], ...]) -> Model:
    s = dict(sizes)
    how = {"width": s["width"], "hidden": s["hidden"], "dropout": s.get("percent_dropped", 0) / 100,
           "num_layers": num_stages * s["num_repeats"] * s["layers_per_stage"]}  # fmt: skip
    if "seq" in s:
        return transformer(**how, num_heads=2, vocab=s["vocab"], max_seq=s["seq"])
    return mlp(**how, num_inputs=s["features"], num_outputs=s["features"])


@lru_cache(maxsize=64)
def _whole_shapes(num_stages: int, sizes: tuple[tuple[str, int], ...]) -> Any:
    model = _model_of(num_stages, sizes)
    return jax.eval_shape(lambda: model.init(jax.random.key(0)))


def params_of(case: Case) -> tuple[Any, Any]:
    """Shapes and specs of the parameters: layers are ``[num_repeats, num_stages@pipe, layers_per_stage, ...]``."""
    whole, repeats = _whole_shapes(stages_of(case), tuple(case.sizes.items())), case.sizes["num_repeats"]
    stack = (repeats, stages_of(case), case.sizes["layers_per_stage"])
    layers = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*stack, *s.shape[1:]), s.dtype), whole["layers"])
    shapes = {**whole, "layers": layers}
    spec = {"embed": P(), "layers": P(None, pipe_of(case)), "head": P()}
    return shapes, {part: jax.tree.map(lambda _, part=part: spec[part], shapes[part]) for part in shapes}


def in_a_row(layers: Any) -> Any:
    """Layers as one device has them, ``[num_layers, ...]``."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), layers)


def as_stages(layers: Any, case: Case) -> Any:
    """The other way."""
    stack = (case.sizes["num_repeats"], stages_of(case), case.sizes["layers_per_stage"])
    return jax.tree.map(lambda leaf: np.reshape(leaf, (*stack, *leaf.shape[1:])), layers)
