"""How the functions of ``tensor_parallel`` are judged: a layer's oracle, what is sent, and cases nobody has seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.tensor_parallel.wrapping import LAYERS, leaf, places_of, split_of
from autograder.contract import facts
from autograder.contract.draws import axis_names, draw_leaves
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact

GATHERED, SCATTERED, OTHER = "all-gather bytes", "reduce-scatter bytes", "other collectives"
SHARE = "Which rows has each device seen, and how often is each counted? "


def unseen_mesh(rng: np.random.Generator) -> dict[str, int]:
    """A mesh that learners have not seen: names and sizes, the axis of features last."""
    sizes = [(2, 3), (2, 4), (3, 2), (1, 5), (4, 2)][rng.integers(5)]
    return dict(zip(axis_names(rng, 2), sizes, strict=True))


def draw_layer(name: str, rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Parameters of about the size that they are trained with, biases that are not zero, activations of any size."""
    layer = LAYERS[name](case)

    def weights(struct):
        fan_in = math.prod(struct.shape[:-1]) if len(struct.shape) < 4 else struct.shape[0]
        scale = fan_in**-0.5 if len(struct.shape) > 1 else 1.0
        return np.asarray(scale * rng.standard_normal(struct.shape), struct.dtype)

    found = {
        "params": jax.tree.map(weights, layer.params),
        "x": draw_leaves(rng, leaf(*layer.x[0]), rng.uniform(0.5, 2)),
    }
    back = draw_leaves(rng, leaf(*layer.y[0]), rng.uniform(0.1, 10))
    return found | ({"upstream": back} if case.sizes["backward"] else {})


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
