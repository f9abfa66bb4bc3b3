"""``whole_weights``, ``stage_3d`` and ``layers_3d``: the components of a pipeline's loss."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.draws import compile_oracle, draw_keys, draw_leaves
from autograder.chapters.transformer_3d import communication
from autograder.chapters.transformer_3d.layouts import (
    SIZES,
    cut,
    given_specs,
    model_in_parts,
    parts_of_each_device,
    places_of,
    specs_of,
    unseen,
)
from autograder.chapters.transformer_3d.wrapping import (
    Sizes,
    axes_named,
    axes_of,
    in_stages,
    microbatches_at,
    named,
    rows_at,
    sizes_of,
    stacked_of,
    stage_specs,
    whole_on_data,
)
from autograder.contract import byte_facts, facts, limits
from autograder.contract.case import ModelSizes
from autograder.contract.case_builders import join_heads
from autograder.contract.task import Case, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.layout import along
from course.model import layer_key

WRAPPINGS = wrappings("transformer_3d")
CUBE = {"data": 2, "pipe": 2, "tensor": 2}
# Live temporaries, relative to the reference.
TEMPORARIES = 1.3

# whole_weights: parts gathered over the data axis, and the complete gradient of each.


def draw_whole(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    shapes, count = whole_on_data(_with_specs(case)), len(places_of(case))
    upstream = jax.tree.map(lambda s: jax.ShapeDtypeStruct((count, *s.shape), s.dtype), shapes)
    return {"params": draw_leaves(rng, stacked_of(case)), "upstream": draw_leaves(rng, upstream)}


def _with_specs(case: Case[Sizes]) -> Case[Sizes]:
    return WHOLE_WEIGHTS.complete(case)


def whole_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """Slices of whole arrays, rounded if they were sent; sums of the cotangents, and a slice of their mean."""
    (data, pipe, tensor), specs, places = axes_of(case), specs_of(case), places_of(case)
    sizes = tuple(case.mesh.values())

    def whole(leaf, spec):
        low = np.asarray(jnp.asarray(leaf, jnp.bfloat16), np.float32)
        leaf = low if case.sizes.bfloat16 and data in named(spec) else leaf
        without_data = P(*(tuple(axis for axis in axes_named(spec, i) if axis != data) for i in range(len(spec))))
        return np.stack([cut(leaf, without_data, place, case) for place in places])

    def complete(path, flows, spec):
        shared = {tensor} if path[0].key == "layers" else {pipe, tensor}
        by_place = np.asarray(flows, np.float64).reshape(*sizes, *flows.shape[1:])
        summed = tuple(i for i, axis in enumerate(case.mesh) if axis in shared - named(spec))
        total = by_place.sum(summed, keepdims=True).mean(list(case.mesh).index(data), keepdims=True)
        totals = np.broadcast_to(total, by_place.shape).reshape(flows.shape)
        own = [cut(g, along(spec, data), place, case) for g, place in zip(totals, places, strict=True)]
        return np.stack(own).astype(np.float32)

    gradients = jax.tree.map_with_path(complete, inputs["upstream"], specs)
    return {"values": jax.tree.map(whole, inputs["params"], specs), "gradients": gradients}


def whole_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients = "Which devices hold this leaf, which have only a share of its gradient, and where is it averaged? "
    values = "Which leaves are split over the data axis, along which dim, and in which dtype are they sent? "
    return [*facts.values_and_gradients(evidence.cases, values, gradients), *communication.whole_facts(evidence.cases)]


# A device's width, hidden units and heads are the same on 3 places as on 2.
THREE = {"width": 24, "hidden": 60, "num_heads": 6, "vocab": 48, "seq": 6, "max_seq": 12}


def _unseen_whole(rng: np.random.Generator) -> Case[Sizes]:
    meshes = (2, 2, 1), (1, 2, 2), (3, 1, 2), (2, 1, 3)
    return unseen(rng, *meshes, num_repeats=2, bfloat16=bool(rng.integers(2)), min_size=int(rng.choice([12, 60])))


WHOLE_WEIGHTS = Task(
    wrapping=WRAPPINGS["whole_weights"],
    points=3,
    cases=(
        Case("data=2 x pipe=2 x tensor=2, bfloat16", CUBE, SIZES.replace(bfloat16=True), quick=True),
        Case.on({"replica": 3, "stage": 1, "model": 2}, SIZES.replace(**THREE), quick=True),
        Case.on({"data": 1, "pipe": 4, "tensor": 2}, SIZES.replace(num_repeats=1)),
        Case.on({"data": 8, "pipe": 1, "tensor": 1}, SIZES),
    ),
    unseen=_unseen_whole,
    draw=draw_whole,
    oracle=whole_oracle,
    facts=whole_facts,
    given=given_specs,
)

# stage_3d: some layers on one microbatch.

# Error of the layers' contribution in bfloat16: measured 0.01, and 0.3 if the stream is rounded after each layer.
ADDED = 0.02


def draw_stage(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    return {
        "params": draw_leaves(rng, stacked_of(case)["layers"], 0.3),
        # Inputs so large that in bfloat16 a layer's contribution is lost when it is added to a rounded stream.
        "x": draw_leaves(rng, rows_at(case), 60.0 if case.sizes.bfloat16 else 1.0),
        "key": draw_keys(rng),
        "upstream": draw_leaves(rng, rows_at(case)),
    }


@lru_cache(maxsize=32)
def _layers(sizes: ModelSizes, parts: int) -> Any:
    """Jitted, on one device: ``(layers, x, upstream, key, data, microbatches, numbers) ->`` outputs and gradients.

    ``layers`` are ``[..., n, *leaf]`` with ``numbers`` ``[..., n]``, ``x`` ``[..., rows, seq, width]``, the others
    ``[...]``; each element of ``...`` is computed separately.
    """
    model = model_in_parts(sizes, parts)

    def run_layers(layers, x, key, data, microbatch, numbers):
        own = jax.random.fold_in(jax.random.wrap_key_data(key), data)

        def step(x, numbered):
            weights, number = numbered
            return model.layer(weights, x, layer_key(own, microbatch, number)), None

        return lax.scan(step, x, (join_heads(layers), numbers))[0]

    def run(layers, x, upstream, key, data, microbatches, numbers):
        def run_all(layers, x):
            return jax.vmap(run_layers, (0, 0, None, 0, 0, 0))(layers, x, key, data, microbatches, numbers)

        y, back = jax.vjp(run_all, layers, x)
        return y, back(upstream)

    return compile_oracle(run)


def stage_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """The layers of each stage on its own rows, on one device; every device's part of the outputs."""
    s, (places, stages, parts) = case.sizes, sizes_of(case)
    depth = s.num_layers // stages
    at = np.indices((places, stages)).reshape(2, -1)
    layers = jax.tree.map(lambda leaf: leaf[0][at[1]], inputs["params"])
    x, upstream = (inputs[name].reshape(places * stages, s.rows, s.seq, s.width) for name in ("x", "upstream"))
    numbers = at[1][:, None] * depth + np.arange(depth)
    y, (of_layers, of_x) = _layers(s.model, parts)(layers, x, upstream, inputs["key"], at[0], at[1] + 1, numbers)

    def device_parts(gradient, spec):
        gradient = np.asarray(gradient).reshape(places, 1, stages, *gradient.shape[1:])
        return np.stack([cut(gradient[place[axes_of(case)[0]]], spec, place, case)[0, 0] for place in places_of(case)])

    whole = inputs["x"].shape
    added = np.asarray(y).reshape(whole) - inputs["x"]
    gradients = {
        "layers": jax.tree.map(device_parts, of_layers, stage_specs(case)),
        "x": np.asarray(of_x).reshape(whole),
    }
    return {"values": added, "gradients": gradients}


_NO_SUMS = "Here, each device keeps its own share of the gradients of whole leaves: what is summed?"


def stage_facts(evidence: TaskEvidence) -> list[Fact]:
    in_bfloat16, in_float32 = ([e for e in evidence.cases if e.case.sizes.bfloat16 is flag] for flag in (True, False))
    return [
        *facts.values_and_gradients(in_float32, "Which block runs, with which layer's key, and in which order? "),
        *communication.bfloat16_facts(in_bfloat16, lambda case: case.sizes.num_layers // sizes_of(case)[1], ADDED),
        communication.over_tensor(evidence.cases, communication.stage_moves),
        communication.no_whole_transfers(evidence.cases, 0),
        communication.nothing_else(evidence.cases, {("all_reduce", None), *communication.TENSOR}),
        # The wrapper's own sums, of leaves that are whole on the tensor axis, are not counted.
        byte_facts.bytes_at_most(
            "all-reduce bytes",
            evidence.cases,
            ("all_reduce",),
            lambda _: 0,
            _NO_SUMS,
            of_wrapper=communication.stage_sums,
        ),
    ]


_DEEP = SIZES.replace(num_repeats=1, dropout=0.25, rows=2)


def _unseen_stage(rng: np.random.Generator) -> Case[Sizes]:
    rings, parallel = bool(rng.integers(2)), bool(rng.integers(2))
    case = unseen(rng, (2, 2, 1), (1, 2, 2), (1, 1, 3), (1, 2, 3), rings=rings, parallel=parallel, dropout=0.15)
    return case.with_sizes(num_layers=2 * case.sizes.num_layers)


STAGE_3D = Task(
    wrapping=WRAPPINGS["stage_3d"],
    points=3,
    cases=(
        Case("data=2 x pipe=2 x tensor=2", CUBE, _DEEP, quick=True),
        Case.on(
            {"replica": 1, "stage": 1, "model": 4},
            _DEEP.replace(num_layers=2, bfloat16=True, rings=True, dropout=0.0),
            "bfloat16, rings",
            quick=True,
        ),
        Case.on(
            {"data": 1, "pipe": 2, "tensor": 3}, _DEEP.replace(**THREE, rings=True, parallel=True), "rings, parallel"
        ),
        Case.on(
            {"data": 2, "pipe": 1, "tensor": 1},
            _DEEP.replace(num_layers=2, bfloat16=True, parallel=True),
            "bfloat16, parallel, dropout",
        ),
    ),
    unseen=_unseen_stage,
    draw=draw_stage,
    oracle=stage_oracle,
    facts=stage_facts,
    given=given_specs,
)

# layers_3d: all repeats of the looped pipeline.


def draw_layers(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    return {
        "params": draw_leaves(rng, stacked_of(case)["layers"], 0.3),
        "x": draw_leaves(rng, microbatches_at(case)),
        "key": draw_keys(rng),
        "upstream": draw_leaves(rng, microbatches_at(case)),
    }


def layers_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """All layers on every microbatch of every place, on one device; the mean over places of their gradients."""
    s, (places, stages, parts) = case.sizes, sizes_of(case)
    at = np.indices((s.num_microbatches, places)).reshape(2, -1)

    def apart(x):
        return x.reshape(at.shape[1], s.rows, s.seq, s.width)

    in_a_row = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), inputs["params"])
    copies = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (at.shape[1], *leaf.shape)), in_a_row)
    numbers = np.broadcast_to(np.arange(s.num_layers), (at.shape[1], s.num_layers))
    args = copies, apart(inputs["x"]), apart(inputs["upstream"]), inputs["key"], at[1], at[0], numbers
    y, (of_layers, of_x) = jax.tree.map(np.asarray, _layers(s.model, parts)(*args))
    mean = {"layers": jax.tree.map(lambda g: g.sum(0) / places, of_layers)}
    specs, rows = specs_of(case)["layers"], P(None, axes_of(case)[0], axes_of(case)[2])

    def on_stage(x, stage):
        whole = x.reshape(inputs["x"].shape)
        on_this_stage = [place[axes_of(case)[1]] == stage for place in places_of(case)]
        return parts_of_each_device(whole, case, rows) * np.reshape(on_this_stage, (-1, 1, 1, 1, 1)).astype(np.float32)

    gradients = {"layers": parts_of_each_device(in_stages(mean, case)["layers"], case, specs), "x": on_stage(of_x, 0)}
    return {"values": on_stage(y, stages - 1), "gradients": gradients}


def layers_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients = "Does a repeat's gradient include what late stages add in the next block, and is it completed once? "
    too_much = "What is kept from the forward pass until the backward pass needs it, and how many groups are whole?"
    in_bfloat16, in_float32 = ([e for e in evidence.cases if e.case.sizes.bfloat16 is flag] for flag in (True, False))
    return [
        *facts.values_and_gradients(in_float32, "Which repeat's weights does a late stage use? ", gradients),
        *communication.bfloat16_facts(in_bfloat16, communication.layer_runs),
        limits.temporaries_within(evidence, TEMPORARIES, too_much, weight=2),
        *communication.layers_facts(evidence.programs),
        communication.no_whole_transfers(evidence.cases, 0),
    ]


_LOOPED = SIZES.replace(dropout=0.25)
_WIDE = {"data": 4, "pipe": 2, "tensor": 1}
_EIGHT_REPEATS = SIZES.replace(num_layers=16, num_repeats=8)
# So large that the same leaves are split as in the small case, along the same dims.
_LARGE = {"width": 2048, "hidden": 8192, "num_heads": 16, "vocab": 32000, "seq": 128, "max_seq": 128, "min_size": 20000}


def _unseen_layers(rng: np.random.Generator) -> Case[Sizes]:
    options: dict[str, Any] = {"num_microbatches": int(rng.choice([1, 3])), "remat": bool(rng.integers(2))}
    options["rows"] = int(rng.integers(1, 3))
    case = unseen(rng, (2, 2, 1), (1, 2, 2), (1, 3, 1), num_repeats=2, dropout=0.15, **options)
    return case.with_sizes(num_layers=2 * case.sizes.num_layers)


LAYERS_3D = Task(
    wrapping=WRAPPINGS["layers_3d"],
    points=5,
    core_facts=("live temporaries",),
    cases=(
        Case("data=2 x pipe=2 x tensor=2", CUBE, SIZES.replace(num_layers=6, num_repeats=3), quick=True),
        Case.on(
            {"replica": 2, "stage": 3, "model": 1},
            _LOOPED.replace(num_layers=12, num_microbatches=1, rows=2),
            "one microbatch, dropout",
            quick=True,
        ),
        Case(
            "data=2 x pipe=2 x tensor=2, no remat, parallel, dropout",
            CUBE,
            _LOOPED.replace(remat=False, parallel=True, num_microbatches=3),
        ),
        Case.on(
            {"data": 2, "pipe": 1, "tensor": 2},
            SIZES.replace(num_layers=2, bfloat16=True, rings=True),
            "bfloat16, rings",
        ),
        Case("data=4 x pipe=2 x tensor=1, 8 repeats", _WIDE, _EIGHT_REPEATS),
    ),
    unseen=_unseen_layers,
    draw=draw_layers,
    oracle=layers_oracle,
    facts=layers_facts,
    at_scale=(
        Case("data=4 x pipe=2 x tensor=1, width 2048", _WIDE, _EIGHT_REPEATS.replace(**_LARGE)),
        "data=4 x pipe=2 x tensor=1, 8 repeats",
    ),
    stretches=({"seq": 64, "max_seq": 64, "width": 256, "num_heads": 16, "hidden": 1024, "min_size": 2500},),
    naive_memory="keeps_gathered_weights",
    given=given_specs,
)
