"""``tp_train_step``: the course's MLP on ``data`` x ``tensor``, with sharded and replicated leaves side by side.

The learning rate is drawn with the rest and is large, so that an update is of the size of the parameters: what a
step subtracts, divided by it, is the raw gradient, and no scale can hide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.cases import model_of, params_of, varying
from autograder.chapters.tensor_parallel.shared import (
    GATHERED,
    OTHER,
    SCATTERED,
    held_spec,
    others_of,
    places_of,
    split_of,
    tensor_of,
)
from autograder.contract import Case, Evidence, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.data import regression_batch
from course.mesh import abstract_mesh
from course.model import full_loss

NAME = "tp_train_step"
WHOSE = "Is this leaf split or a copy, and whose losses does a device's gradient of it belong to? "


# --8<-- [start:specs]
def specs_of(case: Case) -> Any:
    """Hidden features are split over the axis; everything else is whole on every device."""
    axis = tensor_of(case)
    specs = jax.tree.map(lambda _: P(), params_of(case))
    specs["layers"]["up"] = {"kernel": P(None, None, axis), "bias": P(None, axis)}
    specs["layers"]["down"] = {"kernel": P(None, axis), "bias": P()}
    return specs


# --8<-- [end:specs]


def wrap(function: Any, case: Case) -> Wrapped:
    """The step over so many batches; every holder of a leaf returns its copy, so that copies which drift are seen."""
    axis, (data_axis,), model, specs = tensor_of(case), others_of(case), model_of(case), specs_of(case)
    rows = (data_axis, axis)
    held = jax.tree.map(lambda spec: held_spec(spec, case), specs)
    results = {"values": {"loss": P(rows), "params": held}, "gradients": held}

    def local(params, batch, learning_rate):
        def one(params, part):
            found = function(params, specs, part, model, data_axis, axis, learning_rate)
            return varying(forms.state_and_loss(NAME, "params", found, params, case), case.mesh)

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

    def program(params, batch, learning_rate):
        every = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=every, out_specs=results)
        return mapped(params, batch, learning_rate)

    s, rate = case.sizes, jax.ShapeDtypeStruct((), np.float32)
    lead = (s["steps"], _rows(case))
    batch = {
        "inputs": jax.ShapeDtypeStruct((*lead, s["features"]), np.float32),
        "targets": jax.ShapeDtypeStruct((*lead, s["outputs"]), np.float32),
    }
    inputs = {"params": params_of(case), "batch": batch, "learning_rate": rate}
    return Wrapped(program, inputs, in_specs, results, {"params": "state"})


def _rows(case: Case) -> int:
    """Of all devices together."""
    return case.sizes["rows"] * places_of(case) * split_of(case)


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Parameters, a batch for every step, and a learning rate."""
    s = case.sizes
    batches = [
        regression_batch(int(seed), 0, batch=_rows(case), num_inputs=s["features"], num_outputs=s["outputs"])
        for seed in rng.integers(2**31, size=s["steps"])
    ]
    return {
        "params": draw_leaves(rng, params_of(case), 0.3),
        "batch": {name: np.stack([batch[name] for batch in batches]) for name in batches[0]},
        "learning_rate": np.float32(rng.uniform(0.5, 1.0) * s["rate"] / 100),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a leaf gets the same."""
    run = _steps_on_one_device(tuple(case.sizes.items()))
    after, losses, gradients = jax.tree.map(np.asarray, run(*inputs.values()))
    places, every = places_of(case), places_of(case) * split_of(case)

    def held(tree):
        return jax.tree.map(lambda leaf, spec: np.repeat(leaf[None], places if any(spec) else every, 0),
                            tree, specs_of(case))  # fmt: skip

    values = {"loss": np.repeat(losses[None], every, 0), "params": held(after)}
    return {"values": values, "gradients": held(gradients)}


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: tuple[tuple[str, int], ...]) -> Any:
    """Parameters after the steps, each step's loss, and the sum of the gradients."""
    model = model_of(Case("", {}, dict(sizes)))

    def run(params, batches, rate):
        def step(carry, batch):
            params, total = carry
            loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, batch))(params)
            after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            return (after, jax.tree.map(lambda a, b: a + b, total, gradients)), loss

        start = (params, jax.tree.map(lambda p: 0 * p, params))
        (after, total), losses = lax.scan(step, start, batches)
        return after, losses, total

    return jax.jit(run)


def _ring(devices: int, size: float) -> float:
    return 2 * (devices - 1) / devices * size


def _held(e: Evidence) -> tuple[int, int]:
    """Bytes of copies and of parts on one device."""
    leaves = [leaf for leaf in e.inputs if leaf.name.startswith("params/")]
    copies, parts = ([leaf for leaf in leaves if any(leaf.spec) == split] for split in (False, True))
    return tuple(sum(leaf.local_bytes(e.case.mesh) for leaf in some) for some in (copies, parts))  # type: ignore


def _apart(e: Evidence) -> float:
    """All-reduces of a step: copies and the loss over both axes, one after the other; parts over the data axis."""
    (copies, parts), places, n = _held(e), places_of(e.case), split_of(e.case)
    return e.case.sizes["steps"] * (_ring(places, copies + parts + 4) + _ring(n, copies + 4))


def _together(e: Evidence) -> float:
    """The same, copies over both axes at once, and the loss not counted."""
    (copies, parts), places, n = _held(e), places_of(e.case), split_of(e.case)
    return e.case.sizes["steps"] * (_ring(places * n, copies) + _ring(places, parts))


def _travels(e: Evidence, times: int) -> float:
    """So many gathers, or scatters, of one place's activations in every layer and step."""
    s, n = e.case.sizes, split_of(e.case)
    return times * s["steps"] * s["num_layers"] * (n - 1) / n * 4 * n * s["rows"] * s["width"]


def step_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", WHOSE, weight=3),
        facts.global_norm_matches(cases, "gradients"),
        facts.bytes_sent(GATHERED, cases, "all_gather", lambda e: _travels(e, 3), least=lambda e: _travels(e, 2)),
        facts.bytes_sent(SCATTERED, cases, "reduce_scatter", lambda e: _travels(e, 2)),
        facts.bytes_sent("all-reduce bytes", cases, "all_reduce", _apart, least=_together),
        facts.only_collectives(OTHER, cases, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


_SIZES = {"width": 12, "hidden": 40, "num_layers": 2, "features": 6, "outputs": 10, "rows": 3, "steps": 1, "rate": 100}
_THREE = {**_SIZES, "num_layers": 3, "steps": 3, "rate": 20}


def _on(data: int, tensor: int, sizes: dict[str, int], **how: Any) -> Case:
    said = ", 3 steps" if sizes["steps"] == 3 else ""
    return Case(f"data={data} x tensor={tensor}{said}", {"data": data, "tensor": tensor}, sizes, **how)


def _unseen(rng: np.random.Generator) -> Case:
    mesh = [{"tensor": 2, "data": 4}, {"replica": 2, "model": 4}, {"tensor": 4, "data": 1}][rng.integers(3)]
    sizes = {**_SIZES, "width": int(rng.choice([10, 14])), "hidden": int(rng.choice([24, 32])), "num_layers": 3}
    return Case("unseen", mesh, sizes)


TP_TRAIN_STEP = Task(
    wrapping=Wrapping(NAME, "(params, specs, batch, model, data_axis, tensor_axis, learning_rate)", wrap),
    kind="local",
    points=5,
    cases=(
        _on(2, 4, _SIZES, quick=True),
        _on(1, 8, _THREE, quick=True),
        _on(4, 2, _SIZES),
        _on(8, 1, _SIZES),
        _on(1, 1, {**_SIZES, "rows": 6}),
        Case("replica=2 x model=2", {"replica": 2, "model": 2}, _SIZES),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=step_facts,
)
