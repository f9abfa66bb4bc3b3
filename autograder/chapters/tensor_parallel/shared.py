"""What the functions of ``tensor_parallel`` share: who holds which rows and features, and a layer's gradients.

Rows are split over the axis between layers, features inside of them. Devices along every other axis have rows of their
own and equal parameters. Replicated leaves enter varying, so a device's gradient of one is its share of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.cases import varying
from autograder.contract import Case, Evidence, Mismatch, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from course.mesh import abstract_mesh
from course.program.program import spec_of

GATHERED, SCATTERED, OTHER = "all-gather bytes", "reduce-scatter bytes", "other collectives"
SHARE = "Which rows has each device seen, and how often is each counted? "


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


def split_rows(case: Case, features: int) -> tuple[tuple[int, ...], P]:
    """Activations between layers, ``[..., rows@tensor, features]``."""
    s, others, axis = case.sizes, others_of(case), tensor_of(case)
    if s["batch"]:
        return (places_of(case) * s["batch"], s["rows"], features), P(others or None, axis)
    return (places_of(case) * s["rows"], features), P((*others, axis))


def split_features(case: Case, features: int) -> tuple[tuple[int, ...], P]:
    """Activations inside of layers, ``[..., rows, features@tensor]``."""
    shape, _ = split_rows(case, features)
    return shape, P(others_of(case) or None, *[None] * (len(shape) - 2), tensor_of(case))


def wrap_layer(name: str, function: Any, case: Case, layer: Layer) -> Wrapped:
    """What the layer gives and, with ``backward``, the gradients of its input and parameters, by each holder."""
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

    def program(**inputs):
        specs = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=specs, out_specs=results)
        return mapped(*inputs.values())

    return Wrapped(program, inputs, in_specs, results, {"params": "state"})


def draw_layer(rng: np.random.Generator, layer: Layer, backward: int) -> dict[str, Any]:
    """Parameters of about the size that they are trained with, biases that are not zero, and activations."""

    def weights(struct):
        fan_in = math.prod(struct.shape[:-1]) if len(struct.shape) < 4 else struct.shape[0]
        scale = fan_in**-0.5 if len(struct.shape) > 1 else 1.0
        return np.asarray(scale * rng.standard_normal(struct.shape), struct.dtype)

    found = {"params": jax.tree.map(weights, layer.params), "x": draw_leaves(rng, leaf(*layer.x[0]))}
    return found | ({"upstream": draw_leaves(rng, leaf(*layer.y[0]))} if backward else {})


def layer_oracle(inputs: dict[str, Any], case: Case, on_one_device: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """The layer on one device, for each place's rows; of a replicated leaf, the sum of its holders' gradients."""
    run = _each_place(on_one_device, places_of(case))
    values, gradients = jax.tree.map(np.asarray, run(inputs["params"], inputs["x"], inputs.get("upstream")))
    return {"values": values} | ({} if gradients is None else {"gradients": gradients})


@lru_cache(maxsize=64)
def _each_place(on_one_device: Callable[[Any, Any], Any], places: int) -> Any:
    def by_place(a):
        return a.reshape(places, -1, *a.shape[1:])

    def whole(a):
        return a.reshape(-1, *a.shape[2:])

    def run(params, x, upstream):
        if upstream is None:
            return whole(jax.vmap(on_one_device, in_axes=(None, 0))(params, by_place(x))), None

        def one(x, upstream):
            values, back = jax.vjp(on_one_device, params, x)
            return values, back(upstream)

        values, (of_params, of_x) = jax.vmap(one)(by_place(x), by_place(upstream))
        return whole(values), {"x": whole(of_x), "params": of_params}

    return jax.jit(run)


def summed(e: Evidence) -> Evidence:
    """With the shares of each replicated leaf's gradient added up: no device need hold all of it."""
    added = {
        name: a.reshape(places_of(e.case), -1, *a.shape[1:]).sum(1, dtype=a.dtype)
        for name, a in e.measured.items()
        if name.startswith("gradients/params/") and a.shape != e.expected[name].shape
    }
    return replace(e, measured={**e.measured, **added})


def ring_bytes(case: Case, features: int) -> float:
    """(n-1)/n of the bytes of one place's rows with so many features: one all-gather of them, or reduce-scatter."""
    s, n = case.sizes, split_of(case)
    return 4 * (n - 1) / n * max(s["batch"], 1) * s["rows"] * features


def sent(
    name: str, cases: list[Evidence], kind: str, features: str, least: tuple[int, int], more: tuple[int, int] = (0, 0)
) -> Fact:
    """So many collectives of one kind forward, and so many backward; at most ``more`` in addition.

    ``features`` names the size of the array that travels: it is the smaller one.
    """

    def times(e: Evidence, pair: tuple[int, int]) -> float:
        return (pair[0] + e.case.sizes["backward"] * pair[1]) * ring_bytes(e.case, e.case.sizes[features])

    return facts.bytes_sent(
        name, cases, kind, lambda e: times(e, least) + times(e, more), least=lambda e: times(e, least)
    )


def layer_facts(cases: list[Evidence]) -> list[Fact]:
    """Values and gradients."""
    backward = [summed(e) for e in cases if e.case.sizes["backward"]]
    unknown = Fact("gradients", None, "not measured", message="no case of this check is differentiated", weight=2)
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", backward, "gradients", SHARE, weight=2) if backward else unknown,
    ]
