"""Inputs of the functions of ``tensor_parallel``, and the form of their results.

Rows are split over the axis between layers, features inside them. Devices along every other axis have different rows
and equal parameters. Replicated leaves enter varying, so a device's gradient of one is its share of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes, Sizes
from autograder.contract.case_builders import (
    KEY,
    batch_shapes,
    groups_of,
    model_of,
    others_of,
    params_of,
    parts_of,
    tensor_of,
)
from autograder.contract.output_checks import describe, same_shapes, state_and_loss
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, sgd_steps
from course.mesh import varying
from course.program.program import spec_of

SPLITS = {"columns": "columns", "rows": "rows", "whole": None}


@dataclass(frozen=True, kw_only=True)
class Kernel(Sizes):
    """A kernel that ``init_dense`` draws; ``whole`` also requests one that is not split."""

    d_in: int = 72
    d_out: int = 120
    whole: bool = True


@dataclass(frozen=True, kw_only=True)
class Activations(Sizes):
    """``[batch, *more, rows, features]`` for each group of devices, without the first dims where ``batch`` is 0.

    ``backward`` requests gradients too.
    """

    rows: int
    batch: int = 3
    more: tuple[int, ...] = ()
    backward: bool = True


@dataclass(frozen=True, kw_only=True)
class Dense(Activations):
    """One dense layer."""

    d_in: int
    d_out: int
    bias: bool = True


@dataclass(frozen=True, kw_only=True)
class Mlp(Activations):
    """Two dense layers."""

    width: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class Heads(Activations):
    """Attention; ``spread`` is about the standard deviation of the scores, unless it is 0."""

    width: int
    num_heads: int
    head_dim: int
    spread: float = 0


@dataclass(frozen=True, kw_only=True)
class StepSizes(ModelSizes):
    """A model in training: ``rows`` for each device and step, and the factor of the drawn learning rate."""

    rows: int
    steps: int = 1
    rate_scale: float = 1.0


def stacked_spec(spec: P, case: Case[Any]) -> P:
    """Spec of a leaf that each of its holders returns, stacked along a new first dim."""
    axis, others = tensor_of(case), others_of(case)
    return P(others or None, *spec) if axis in spec else P((*others, axis))


@dataclass(frozen=True)
class Layer:
    """A layer's parameters with their specs, its input, and its output: shape and spec of each."""

    params: Any
    specs: Any
    x: tuple[tuple[int, ...], P]
    y: tuple[tuple[int, ...], P]


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def _split_rows(case: Case[Any], features: int) -> tuple[tuple[int, ...], P]:
    """Activations between layers, ``[..., rows@tensor, features]``."""
    s, others, axis = case.sizes, others_of(case), tensor_of(case)
    if s.batch:
        return (groups_of(case) * s.batch, *s.more, s.rows, features), P(others or None, *[None for _ in s.more], axis)
    return (groups_of(case) * s.rows, features), P((*others, axis))


def _split_features(case: Case[Any], features: int) -> tuple[tuple[int, ...], P]:
    """Activations inside layers, ``[..., rows, features@tensor]``."""
    shape, _ = _split_rows(case, features)
    return shape, P(others_of(case) or None, *[None] * (len(shape) - 2), tensor_of(case))


def column(case: Case[Dense]) -> Layer:
    """A dense layer whose outputs are split."""
    s, axis = case.sizes, tensor_of(case)
    params, specs = {"kernel": leaf(s.d_in, s.d_out)}, {"kernel": P(None, axis)}
    if s.bias:
        params["bias"], specs["bias"] = leaf(s.d_out), P(axis)
    return Layer(params, specs, _split_rows(case, s.d_in), _split_features(case, s.d_out))


def row(case: Case[Dense]) -> Layer:
    """A dense layer whose inputs are split."""
    s, axis = case.sizes, tensor_of(case)
    params, specs = {"kernel": leaf(s.d_in, s.d_out)}, {"kernel": P(axis)}
    if s.bias:
        params["bias"], specs["bias"] = leaf(s.d_out), P()
    return Layer(params, specs, _split_features(case, s.d_in), _split_rows(case, s.d_out))


def mlp(case: Case[Mlp]) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    params = {
        "up": {"kernel": leaf(s.width, s.hidden), "bias": leaf(s.hidden)},
        "down": {"kernel": leaf(s.hidden, s.width), "bias": leaf(s.width)},
    }
    specs = {"up": {"kernel": P(None, axis), "bias": P(axis)}, "down": {"kernel": P(axis), "bias": P()}}
    return Layer(params, specs, _split_rows(case, s.width), _split_rows(case, s.width))


def attention(case: Case[Heads]) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    heads = s.num_heads, s.head_dim
    params = {"qkv": {"kernel": leaf(s.width, 3, *heads)}, "out": {"kernel": leaf(*heads, s.width)}}
    specs = {"qkv": {"kernel": P(None, None, axis)}, "out": {"kernel": P(axis)}}
    return Layer(params, specs, _split_rows(case, s.width), _split_rows(case, s.width))


LAYERS = {"column_parallel_dense": column, "row_parallel_dense": row, "tp_mlp": mlp, "tp_attention": attention}


def wrap_layer(name: str, function: Any, case: Case[Any]) -> Wrapped:
    """The layer's output and, with ``backward``, the gradients of its input and parameters, by each holder."""
    layer = LAYERS[name](case)
    (x, x_spec), (y, y_spec) = layer.x, layer.y
    local_shape = [
        size // math.prod(case.mesh[a] for a in axes) for size, axes in zip(y, spec_of(y_spec, len(y)), strict=True)
    ]
    results: dict[str, Any] = {"values": y_spec}
    if case.sizes.backward:
        param_specs = jax.tree.map(lambda spec: stacked_spec(spec, case), layer.specs)
        results["gradients"] = {"x": x_spec, "params": param_specs}

    def local(params, x, upstream=None):
        params = varying(params, case.mesh)

        def run(params, x):
            result = same_shapes(name, function(params, x, tensor_of(case)), leaf(*local_shape), case)
            return varying(result, case.mesh)

        if upstream is None:
            return {"values": run(params, x)}
        values, back = jax.vjp(run, params, x)
        of_params, of_x = back(upstream)
        return {"values": values, "gradients": {"x": of_x, "params": jax.tree.map(lambda g: g[None], of_params)}}

    inputs: dict[str, Any] = {"params": (layer.params, layer.specs), "x": (leaf(*x), x_spec)}
    if case.sizes.backward:
        inputs["upstream"] = leaf(*y), y_spec
    return on_mesh(local, case, inputs, results, {"params": "state"})


def splits_of(case: Case[Kernel]) -> dict[str, str | None]:
    """The split dim of each kernel that the case draws, by name."""
    return {name: split for name, split in SPLITS.items() if split or case.sizes.whole}


def init_shapes(case: Case[Kernel], split: str | None) -> dict[str, Any]:
    """Shapes of the parameters that ``init_dense`` draws on one device."""
    s, n = case.sizes, parts_of(case)
    if split == "columns":
        return {"kernel": leaf(s.d_in, s.d_out // n), "bias": leaf(s.d_out // n)}
    return {"kernel": leaf(s.d_in // (n if split == "rows" else 1), s.d_out), "bias": leaf(s.d_out)}


def wrap_init(function: Any, case: Case[Kernel]) -> Wrapped:
    """Every split, with two keys; every device returns the parameters that it drew."""
    name, spec = "init_dense", P(tuple(case.mesh))

    def drawn(data, split):
        key = jax.random.wrap_key_data(data)
        params = function(key, case.sizes.d_in, case.sizes.d_out, tensor_of(case), split)
        if not isinstance(params, dict) or set(params) != {"kernel", "bias"}:
            description = f"a dict of {sorted(map(str, params))}" if isinstance(params, dict) else describe(params)
            raise Mismatch(f"{name} returned {description}, expected a dict of a kernel and a bias")
        same_shapes(f"{name} split by {split}", params, init_shapes(case, split), case)
        return jax.tree.map(lambda a: a[None], varying(params, case.mesh))

    def local(keys):
        params = {
            f"{kernel}_{which}": drawn(data, split)
            for kernel, split in splits_of(case).items()
            for which, data in keys.items()
        }
        return {"values": params}

    return on_mesh(local, case, {"keys": ({"first": KEY, "second": KEY}, P())}, {"values": spec}, {"keys": "key"})


def specs_of(case: Case[StepSizes]) -> Any:
    """Hidden features are split over the axis; everything else is whole on every device."""
    axis = tensor_of(case)
    specs = jax.tree.map(lambda _: P(), params_of(case))
    specs["layers"]["up"] = {"kernel": P(None, None, axis), "bias": P(None, axis)}
    specs["layers"]["down"] = {"kernel": P(None, axis), "bias": P()}
    return specs


def rows_of(case: Case[StepSizes]) -> int:
    """Number of rows of all devices together, in a step."""
    return case.sizes.rows * groups_of(case) * parts_of(case)


def wrap_step(function: Any, case: Case[StepSizes]) -> Wrapped:
    """The step over several batches; every holder of a leaf returns its copy, to detect copies that drift apart."""
    axis, (data_axis,), model, specs = tensor_of(case), others_of(case), model_of(case), specs_of(case)
    rows, name = (data_axis, axis), "tp_train_step"
    copy_specs = jax.tree.map(lambda spec: stacked_spec(spec, case), specs)
    results = {"values": {"loss": P(rows), "params": copy_specs}, "gradients": copy_specs}

    def local(params, batch, learning_rate):
        def step(params, part):
            result = function(params, specs, part, model, data_axis, axis, learning_rate)
            return varying(state_and_loss(name, "params", result, params, case), case.mesh)

        after, losses, gradients = sgd_steps(step, varying(params, case.mesh), batch, learning_rate)
        lead = jax.tree.map(lambda leaf: leaf[None], {"values": {"params": after}, "gradients": gradients})
        return {**lead, "values": {"loss": losses[None], **lead["values"]}}

    batch = batch_shapes(case.sizes, rows_of(case), case.sizes.steps)
    inputs = {"params": (params_of(case), specs), "batch": (batch, P(None, rows)), "learning_rate": (leaf(), P())}
    return on_mesh(local, case, inputs, results, {"params": "state"})


_LAYER = {name: partial(wrap_layer, name) for name in LAYERS}
WRAPPINGS = (
    Wrapping("init_dense", "(key, d_in, d_out, axis_name, split)", wrap_init, Kernel),
    Wrapping("column_parallel_dense", "(params, x, axis_name)", _LAYER["column_parallel_dense"], Dense),
    Wrapping("row_parallel_dense", "(params, x, axis_name)", _LAYER["row_parallel_dense"], Dense),
    Wrapping("tp_mlp", "(params, x, axis_name)", _LAYER["tp_mlp"], Mlp),
    Wrapping("tp_attention", "(params, x, axis_name)", _LAYER["tp_attention"], Heads),
    Wrapping(
        "tp_train_step", "(params, specs, batch, model, data_axis, tensor_axis, learning_rate)", wrap_step, StepSizes
    ),
)
