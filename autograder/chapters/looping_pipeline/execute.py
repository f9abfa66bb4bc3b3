"""``execute_looping_pipeline``: all ticks of the looped schedule, forward, and differentiated by JAX."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder import facts, forms, limits
from autograder.cases import microbatch_bytes, pipe_of, stages_of, varying
from autograder.chapters.looping_pipeline.shared import (
    as_stages,
    data_of,
    in_a_row,
    model_of,
    params_of,
    pipelines_of,
    ticks_of,
)
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.machines import machine
from course.mesh import abstract_mesh
from course.model import layer_key

NAME = "execute_looping_pipeline"
MACHINE = "free network"


def wrap(function: Any, case: Case) -> Wrapped:
    """The last stage's outputs, and what flows back to each stage's layers and inputs; other stages give zeros."""
    pipe, data, s = pipe_of(case), data_of(case), case.sizes
    shapes, specs = params_of(case)

    def local(layers, microbatches, upstream, key):
        layers = jax.tree.map(lambda leaf: leaf[:, 0], layers)
        layers, microbatches, key = varying((layers, microbatches, key), case.mesh)

        def run(layers, microbatches):
            found = function(_stage(layers, key, case), microbatches, s["num_repeats"], pipe)
            forms.same_tree("the result", found, microbatches)
            forms.same_shapes(NAME, found, microbatches, case)
            last = lax.axis_index(pipe) == stages_of(case) - 1
            return varying(jnp.where(last, found, 0), case.mesh)

        if not s["gradients"]:
            return {"values": run(layers, microbatches)[None]}
        outputs, backward = jax.vjp(run, layers, microbatches)
        of_layers, of_inputs = backward(varying(upstream, case.mesh))
        gradients = {"layers": jax.tree.map(lambda g: g[None, :, None], of_layers), "microbatches": of_inputs[None]}
        return {"values": outputs[None], "gradients": gradients}

    rows, stacked = P(None, data), P(pipe, None, data)
    results: dict[str, Any] = {"values": stacked}
    if s["gradients"]:
        of_layers = jax.tree.map(lambda _: P(data, None, pipe), specs["layers"])
        results["gradients"] = {"layers": of_layers, "microbatches": stacked}
    in_specs = {"layers": specs["layers"], "microbatches": rows, "upstream": rows, "key": P()}

    def program(layers, microbatches, upstream, key):
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=results)
        return mapped(layers, microbatches, upstream, key)

    shape = (s["num_microbatches"], s["rows"] * pipelines_of(case), s["width"])
    activations = jax.ShapeDtypeStruct(shape, np.float32)
    inputs = {"layers": shapes["layers"], "microbatches": activations, "upstream": activations,
              "key": jax.ShapeDtypeStruct((2,), np.uint32)}  # fmt: skip
    return Wrapped(program, inputs, in_specs, results, {"layers": "state"})


def _stage(layers: Any, key: jax.Array, case: Case) -> Any:
    """What the function is given to call: this device's layers of a repeat, dropping as one device would."""
    model, s = model_of(case), case.sizes
    given = (s["rows"], s["width"])

    def stage(x, microbatch, repeat):
        for name, number in (("microbatch", microbatch), ("repeat", repeat)):
            if jnp.shape(number) != () or not jnp.issubdtype(jnp.result_type(number), jnp.integer):
                raise Mismatch(f"stage was called with {forms.describe(number)} as its {name}, expected one integer")
        if jnp.shape(x) != given:
            raise Mismatch(f"stage was called with {forms.describe(x)} as x, expected one microbatch, {list(given)}")

        def layer(x, one):
            number = (repeat * stages_of(case) + lax.axis_index(pipe_of(case))) * s["layers_per_stage"] + one[1]
            return model.layer(one[0], x, layer_key(jax.random.wrap_key_data(key), microbatch, number)), None

        weights = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, repeat, keepdims=False), layers)
        return lax.scan(layer, x, (weights, jnp.arange(s["layers_per_stage"])))[0]

    return stage


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    inputs = wrap(None, case).inputs
    found = draw_leaves(rng, {name: inputs[name] for name in ("microbatches", "upstream")})
    key = rng.integers(2**32, size=2, dtype=np.uint32)
    return {"layers": draw_leaves(rng, inputs["layers"], 0.3), **found, "key": key}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Every microbatch of every pipeline through all layers in order, on one device."""
    pipelines, stages, count = pipelines_of(case), stages_of(case), case.sizes["num_microbatches"]

    def apart(rows):
        return np.moveaxis(rows.reshape(count, pipelines, -1, rows.shape[-1]), 1, 0)

    def together(rows):
        whole = np.moveaxis(np.asarray(rows), 0, 1)
        return whole.reshape(count, -1, whole.shape[-1])

    run = _on_one_device(stages, tuple(case.sizes.items()))
    arrays = (apart(inputs["microbatches"]), apart(inputs["upstream"]))
    outputs, of_layers, of_inputs = run(in_a_row(inputs["layers"]), *arrays, inputs["key"])
    values = np.zeros((stages, *inputs["microbatches"].shape), np.float32)
    values[-1] = together(outputs)
    if not case.sizes["gradients"]:
        return {"values": values}
    back = np.zeros_like(values)
    back[0] = together(of_inputs)
    each = [as_stages(jax.tree.map(lambda g, i=i: np.asarray(g[i]), of_layers), case) for i in range(pipelines)]
    layers = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    return {"values": values, "gradients": {"layers": layers, "microbatches": back}}


@lru_cache(maxsize=32)
def _on_one_device(num_stages: int, sizes: tuple[tuple[str, int], ...]) -> Any:
    case = Case("", {"pipe": num_stages}, dict(sizes))
    model = model_of(case)

    def run(layers, microbatches, upstream, data):
        key = jax.random.wrap_key_data(data)

        def one(layers, x, microbatch):
            def layer(x, one):
                return model.layer(one[0], x, layer_key(key, microbatch, one[1])), None

            return lax.scan(layer, x, (layers, jnp.arange(model.num_layers)))[0]

        def pipeline(layers, microbatches):
            return jax.vmap(one, in_axes=(None, 0, 0))(layers, microbatches, jnp.arange(len(microbatches)))

        outputs, backward = jax.vjp(pipeline, layers, microbatches)
        return outputs, *backward(upstream)

    return jax.jit(jax.vmap(run, in_axes=(None, 0, 0, None)))


_BUBBLE = (
    "Draw which stage works on what at each of your ticks, and compare it with loop_position: where does a stage wait "
    "though a microbatch is there for it?"
)


def execute_facts(cases: list[Evidence], large: Evidence | None, _: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases

    def permuted(e: Evidence) -> float:
        passes = 2 if e.case.sizes["gradients"] else 1
        return passes * ticks_of(e.case) * microbatch_bytes(e.case) if stages_of(e.case) > 1 else 0

    return [
        facts.arrays_match("values", cases, "values", "Only the last stage's result of the last repeat counts. "),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        limits.bubble_is(large, ticks_of, _busy, _tick_seconds, _BUBBLE, weight=4),
        facts.bytes_sent("permute bytes", counted, "collective_permute", permuted, times=(0.5, 1), weight=2),
        facts.only_collectives("other collectives", counted, ("collective_permute",)),
    ]


def _busy(case: Case) -> int:
    return case.sizes["num_repeats"] * case.sizes["num_microbatches"]


def _tick_seconds(case: Case) -> float:
    """Of the matrix products of one stage's layers for one microbatch."""
    s = case.sizes
    return 2 * s["rows"] * 2 * s["width"] * s["hidden"] * s["layers_per_stage"] / machine(MACHINE).peak("f32")


_MLP = {"width": 8, "hidden": 16, "features": 4, "rows": 3, "layers_per_stage": 1, "gradients": 1}


def _sizes(num_microbatches: int, num_repeats: int, **more: int) -> dict[str, int]:
    return {**_MLP, "num_microbatches": num_microbatches, "num_repeats": num_repeats, **more}


FORWARD = Case("pipe=4, 3 microbatches, 3 repeats, forward", {"pipe": 4}, _sizes(3, 3, gradients=0), quick=True)
CASES = (
    Case("pipe=4, 6 microbatches, 2 repeats", {"pipe": 4}, _sizes(6, 2, percent_dropped=25), quick=True),
    FORWARD,
    Case("data=2 x pipe=4, 2 microbatches", {"data": 2, "pipe": 4}, _sizes(2, 3, layers_per_stage=2)),
    Case("stage=2, 5 microbatches", {"stage": 2}, _sizes(5, 3, percent_dropped=25)),
    Case("pipe=8, 8 microbatches", {"pipe": 8}, _sizes(8, 2)),
    Case("pipe=1, 3 microbatches", {"pipe": 1}, _sizes(3, 2)),
)
ANALYSED = (
    Case("pipe=4, 3 microbatches, 3 repeats, width 512", {"pipe": 4},
         _sizes(3, 3, gradients=0, width=512, hidden=2048, rows=256)),
    FORWARD.name,
)  # fmt: skip


def unseen(rng: np.random.Generator) -> Case:
    mesh = [{"pipe": 4}, {"pipe": 2, "data": 2}, {"data": 4, "stage": 2}, {"pipe": 8}][rng.integers(4)]
    sizes = _sizes(int(rng.integers(1, 8)), int(rng.integers(2, 4)), percent_dropped=25)
    return Case("unseen", mesh, {**sizes, "rows": int(rng.choice([2, 4]))})


EXECUTE_LOOPING_PIPELINE = Task(
    wrapping=Wrapping(NAME, "(stage, microbatches, num_repeats, axis_name)", wrap),
    kind="local",
    points=4,
    cases=CASES,
    unseen=unseen,
    draw=draw,
    oracle=oracle,
    facts=execute_facts,
    analysed=ANALYSED,
    naive="drains_between_repeats",
    slow="drains_between_repeats",
    machine=MACHINE,
)
