"""What the functions of ``tensor_parallel`` are given, and the form of what they give.

Rows are split over the axis between layers, features inside of them. Devices along every other axis have rows of their
own and equal parameters. Replicated leaves enter varying, so a device's gradient of one is its share of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract import forms
from autograder.contract.cases import model_of, params_of, varying
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping
from course.mesh import abstract_mesh
from course.program.program import spec_of

SPLITS = {"columns": "columns", "rows": "rows", "whole": None}


def tensor_of(case: Case) -> str:
    """The axis that features are split over: ``tensor`` where there is one, else the last."""
    return "tensor" if "tensor" in case.mesh else list(case.mesh)[-1]


def others_of(case: Case) -> tuple[str, ...]:
    """The axes along which parameters are the same and rows are not."""
    return tuple(axis for axis in case.mesh if axis != tensor_of(case))


def places_of(case: Case) -> int:
    """How many groups of devices there are, each with rows of its own."""
    return math.prod(case.mesh[axis] for axis in others_of(case))


def split_of(case: Case) -> int:
    """Over how many devices features are split."""
    return case.mesh[tensor_of(case)]


def held_spec(spec: P, case: Case) -> P:
    """Of a leaf that each of its holders returns, stacked along a new first dim."""
    axis, others = tensor_of(case), others_of(case)
    return P(others or None, *spec) if axis in spec else P((*others, axis))


@dataclass(frozen=True)
class Layer:
    """A layer's parameters with their specs, what goes in, and what comes out: shape and spec of each."""

    params: Any
    specs: Any
    x: tuple[tuple[int, ...], P]
    y: tuple[tuple[int, ...], P]


def leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def _split_rows(case: Case, features: int) -> tuple[tuple[int, ...], P]:
    """Activations between layers, ``[..., rows@tensor, features]``."""
    s, others, axis = case.sizes, others_of(case), tensor_of(case)
    if s["batch"]:
        return (places_of(case) * s["batch"], s["rows"], features), P(others or None, axis)
    return (places_of(case) * s["rows"], features), P((*others, axis))


def _split_features(case: Case, features: int) -> tuple[tuple[int, ...], P]:
    """Activations inside of layers, ``[..., rows, features@tensor]``."""
    shape, _ = _split_rows(case, features)
    return shape, P(others_of(case) or None, *[None] * (len(shape) - 2), tensor_of(case))


def column(case: Case) -> Layer:
    """A dense layer whose outputs are split."""
    s, axis = case.sizes, tensor_of(case)
    params, specs = {"kernel": leaf(s["d_in"], s["d_out"])}, {"kernel": P(None, axis)}
    if s["bias"]:
        params["bias"], specs["bias"] = leaf(s["d_out"]), P(axis)
    return Layer(params, specs, _split_rows(case, s["d_in"]), _split_features(case, s["d_out"]))


def row(case: Case) -> Layer:
    """A dense layer whose inputs are split."""
    s, axis = case.sizes, tensor_of(case)
    params, specs = {"kernel": leaf(s["d_in"], s["d_out"])}, {"kernel": P(axis)}
    if s["bias"]:
        params["bias"], specs["bias"] = leaf(s["d_out"]), P()
    return Layer(params, specs, _split_features(case, s["d_in"]), _split_rows(case, s["d_out"]))


def mlp(case: Case) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    params = {
        "up": {"kernel": leaf(s["width"], s["hidden"]), "bias": leaf(s["hidden"])},
        "down": {"kernel": leaf(s["hidden"], s["width"]), "bias": leaf(s["width"])},
    }
    specs = {"up": {"kernel": P(None, axis), "bias": P(axis)}, "down": {"kernel": P(axis), "bias": P()}}
    return Layer(params, specs, _split_rows(case, s["width"]), _split_rows(case, s["width"]))


def attention(case: Case) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    heads = s["heads"], s["head_dim"]
    params = {"qkv": {"kernel": leaf(s["width"], 3, *heads)}, "out": {"kernel": leaf(*heads, s["width"])}}
    specs = {"qkv": {"kernel": P(None, None, axis)}, "out": {"kernel": P(axis)}}
    return Layer(params, specs, _split_rows(case, s["width"]), _split_rows(case, s["width"]))


LAYERS = {"column_parallel_dense": column, "row_parallel_dense": row, "tp_mlp": mlp, "tp_attention": attention}


def wrap_layer(name: str, function: Any, case: Case) -> Wrapped:
    """What the layer gives and, with ``backward``, the gradients of its input and parameters, by each holder."""
    layer = LAYERS[name](case)
    (x, x_spec), (y, y_spec) = layer.x, layer.y
    here = [
        size // math.prod(case.mesh[a] for a in axes) for size, axes in zip(y, spec_of(y_spec, len(y)), strict=True)
    ]
    results: dict[str, Any] = {"values": y_spec}
    if case.sizes["backward"]:
        held = jax.tree.map(lambda spec: held_spec(spec, case), layer.specs)
        results["gradients"] = {"x": x_spec, "params": held}

    def local(params, x, upstream=None):
        params = varying(params, case.mesh)

        def run(params, x):
            found = function(params, x, tensor_of(case))
            if not hasattr(found, "shape"):
                raise Mismatch(f"{name} returned {forms.describe(found)}, expected float32{here}")
            forms.same_shapes(name, {"result": found}, {"result": leaf(*here)}, case)
            return varying(found, case.mesh)

        if upstream is None:
            return {"values": run(params, x)}
        values, back = jax.vjp(run, params, x)
        of_params, of_x = back(upstream)
        return {"values": values, "gradients": {"x": of_x, "params": jax.tree.map(lambda g: g[None], of_params)}}

    inputs: dict[str, Any] = {"params": layer.params, "x": leaf(*x)}
    in_specs: dict[str, Any] = {"params": layer.specs, "x": x_spec}
    if case.sizes["backward"]:
        inputs["upstream"], in_specs["upstream"] = leaf(*y), y_spec

    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, {"params": "state"})


def _on_mesh(local: Callable[..., Any], case: Case, in_specs: dict[str, Any], results: dict[str, Any]) -> Any:
    """What every device runs, as one function of whole arrays."""

    def program(**inputs):
        specs = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=specs, out_specs=results)
        return mapped(*inputs.values())

    return program


def init_shapes(case: Case, split: str | None) -> dict[str, Any]:
    """Of what ``init_dense`` draws on one device."""
    s, n = case.sizes, split_of(case)
    if split == "columns":
        return {"kernel": leaf(s["d_in"], s["d_out"] // n), "bias": leaf(s["d_out"] // n)}
    return {"kernel": leaf(s["d_in"] // (n if split == "rows" else 1), s["d_out"]), "bias": leaf(s["d_out"])}


def wrap_init(function: Any, case: Case) -> Wrapped:
    """All three ways to split, with two keys; every device returns what it drew."""
    name, spec = "init_dense", P(tuple(case.mesh))

    def drawn(data, split):
        key = jax.random.wrap_key_data(data)
        found = function(key, case.sizes["d_in"], case.sizes["d_out"], tensor_of(case), split)
        if not isinstance(found, dict) or set(found) != {"kernel", "bias"}:
            said = f"a dict of {sorted(map(str, found))}" if isinstance(found, dict) else forms.describe(found)
            raise Mismatch(f"{name} returned {said}, expected a dict of a kernel and a bias")
        forms.same_shapes(f"{name} split by {split}", found, init_shapes(case, split), case)
        return jax.tree.map(lambda a: a[None], varying(found, case.mesh))

    def local(keys):
        every = {f"{of}_{which}": drawn(data, split) for of, split in SPLITS.items() for which, data in keys.items()}
        return {"values": every}

    in_specs, results = {"keys": P()}, {"values": spec}
    inputs = {"keys": {name: jax.ShapeDtypeStruct((2,), np.uint32) for name in ("first", "second")}}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, {"keys": "key"})


def specs_of(case: Case) -> Any:
    """Hidden features are split over the axis; everything else is whole on every device."""
    axis = tensor_of(case)
    specs = jax.tree.map(lambda _: P(), params_of(case))
    specs["layers"]["up"] = {"kernel": P(None, None, axis), "bias": P(None, axis)}
    specs["layers"]["down"] = {"kernel": P(None, axis), "bias": P()}
    return specs


def rows_of(case: Case) -> int:
    """Of all devices together, in a step."""
    return case.sizes["rows"] * places_of(case) * split_of(case)


def wrap_step(function: Any, case: Case) -> Wrapped:
    """The step over so many batches; every holder of a leaf returns its copy, so that copies which drift are seen."""
    axis, (data_axis,), model, specs = tensor_of(case), others_of(case), model_of(case), specs_of(case)
    rows, name = (data_axis, axis), "tp_train_step"
    held = jax.tree.map(lambda spec: held_spec(spec, case), specs)
    results = {"values": {"loss": P(rows), "params": held}, "gradients": held}

    def local(params, batch, learning_rate):
        def one(params, part):
            found = function(params, specs, part, model, data_axis, axis, learning_rate)
            return varying(forms.state_and_loss(name, "params", found, params, case), case.mesh)

        before = varying(params, case.mesh)
        if case.sizes["steps"] == 1:
            after, loss = one(before, jax.tree.map(lambda leaf: leaf[0], batch))
            losses = loss[None]
        else:
            after, losses = lax.scan(one, before, batch)
        gradients = jax.tree.map(lambda old, new: (old - new) / learning_rate, before, after)
        lead = jax.tree.map(lambda leaf: leaf[None], {"values": {"params": after}, "gradients": gradients})
        return {**lead, "values": {"loss": losses[None], **lead["values"]}}

    in_specs = {"params": specs, "batch": P(None, rows), "learning_rate": P()}
    s, lead = case.sizes, (case.sizes["steps"], rows_of(case))
    batch = {"inputs": leaf(*lead, s["features"]), "targets": leaf(*lead, s["outputs"])}
    inputs = {"params": params_of(case), "batch": batch, "learning_rate": leaf()}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, {"params": "state"})


WRAPPINGS = (
    Wrapping("init_dense", "(key, d_in, d_out, axis_name, split)", wrap_init),
    *(
        Wrapping(name, "(params, x, axis_name)", lambda function, case, name=name: wrap_layer(name, function, case))
        for name in LAYERS
    ),
    Wrapping("tp_train_step", "(params, specs, batch, model, data_axis, tensor_axis, learning_rate)", wrap_step),
)
