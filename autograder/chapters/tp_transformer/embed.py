"""``vocab_parallel_embed``: tokens and positions, with the table split over the vocabulary."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.cases import varying
from autograder.chapters.tp_transformer.shared import (
    OTHER,
    SIZES,
    activation_bytes,
    added_up,
    groups_of,
    held_specs,
    hold,
    model_of,
    others_of,
    params_of,
    parts_of,
    ring_bytes,
    rows_of,
    shared_leaves,
    tensor_of,
)
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.layout import tensor_specs
from course.mesh import abstract_mesh

NAME = "vocab_parallel_embed"
_VALUES = (
    "Which tokens does this device know, what does it give for the others, and at which position do its rows begin?"
)
_GRADIENTS = "Whose rows of the table, and which positions, has this device a part in?"


def wrap(function: Any, case: Case) -> Wrapped:
    """Activations and gradients of every device; each returns its own share of the positions' gradient."""
    axis, rows, shapes = tensor_of(case), others_of(case) or None, params_of(case)["embed"]
    block = P(rows, axis)
    results = {"values": block, "gradients": held_specs(shapes, case)}
    expected = (case.sizes["rows"], case.sizes["seq"] // parts_of(case), case.sizes["width"])

    def local(params, tokens, upstream):
        def run(params):
            x = function(params, tokens, axis)
            if not hasattr(x, "shape"):
                raise Mismatch(f"{NAME} returned {forms.describe(x)}, expected activations of this device's rows")
            forms.same_shapes(NAME, {"x": x}, {"x": jax.ShapeDtypeStruct(expected, np.float32)}, case)
            return varying(x, case.mesh)

        values, back = jax.vjp(run, varying(params, case.mesh))
        return {"values": values, "gradients": hold(back(upstream)[0])}

    in_specs = {"params": tensor_specs(shapes, axis), "tokens": P(rows), "upstream": block}

    def program(**inputs):
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=results)
        return mapped(*inputs.values())

    return Wrapped(program, _shapes(case), in_specs, results, {"params": "state"})


def _shapes(case: Case) -> dict[str, Any]:
    tokens = rows_of(case), case.sizes["seq"]
    return {
        "params": params_of(case)["embed"],
        "tokens": jax.ShapeDtypeStruct(tokens, np.int32),
        "upstream": jax.ShapeDtypeStruct((*tokens, case.sizes["width"]), np.float32),
    }


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes = _shapes(case)
    found = {name: draw_leaves(rng, shapes[name]) for name in ("params", "upstream")}
    return {**found, "tokens": rng.integers(0, case.sizes["vocab"], shapes["tokens"].shape, np.int32)}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The course's embedding on one device for each group."""
    groups = groups_of(case)
    tokens, upstream = (inputs[name].reshape(groups, -1, *inputs[name].shape[1:]) for name in ("tokens", "upstream"))
    run = _each_group(tuple(case.sizes.items()))
    values, gradients = jax.tree.map(np.asarray, run(inputs["params"], tokens, upstream))
    return {"values": values.reshape(inputs["upstream"].shape), "gradients": gradients}


@lru_cache(maxsize=32)
def _each_group(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))

    def one(params, tokens, upstream):
        values, back = jax.vjp(lambda params: model.embed(params, tokens), params)
        return values, back(upstream)[0]

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))


def embed_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    whole = [added_up(e, shared_leaves(params_of(e.case)["embed"], "gradients")) for e in cases]
    once = lambda e: ring_bytes(e.case, activation_bytes(e.case))  # noqa: E731
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", whole, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(whole, "gradients"),
        facts.bytes_sent("reduce-scatter bytes", cases, "reduce_scatter", once, weight=2),
        facts.bytes_sent("all-gather bytes", cases, "all_gather", once),
        facts.only_collectives(OTHER, cases, ("all_gather", "reduce_scatter")),
    ]


_SIZES = {**SIZES, "num_layers": 1}


def _unseen(rng: np.random.Generator) -> Case:
    mesh = [{"data": 2, "tensor": 4}, {"tensor": 2}, {"tensor": 4, "data": 2}][rng.integers(3)]
    sizes = {**_SIZES, "rows": 3, "vocab": int(rng.choice([40, 72])), "seq": int(rng.choice([8, 24]))}
    return Case("unseen", mesh, sizes)


VOCAB_PARALLEL_EMBED = Task(
    wrapping=Wrapping(NAME, "(params, tokens, axis_name)", wrap),
    kind="local",
    points=3,
    cases=(
        Case("tensor=4", {"tensor": 4}, _SIZES, quick=True),
        Case("data=2 x model=2", {"data": 2, "model": 2}, _SIZES, quick=True),
        Case("tensor=8, as long as there are positions", {"tensor": 8}, {**_SIZES, "seq": 32}),
        Case("data=4 x tensor=2", {"data": 4, "tensor": 2}, {**_SIZES, "rows": 1}),
        Case("tensor=1", {"tensor": 1}, _SIZES),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=embed_facts,
)
