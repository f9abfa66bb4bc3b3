"""What the two training steps of ``fsdp`` share: how they are called, drawn for, and what one device makes of it.

The learning rate is drawn with the rest and is large, so that an update is of the size of the parameters: what a
step subtracts, divided by it, is the raw gradient, and no scale can hide.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder import forms
from autograder.cases import axis_size, batch_shapes, model_of, varying
from autograder.chapters.fsdp.shared import specs_of
from autograder.contract import Case, Wrapped
from autograder.draws import batch_of, draw_leaves
from course.mesh import abstract_mesh
from course.model import full_loss

Axes = tuple[str, ...]


def wrap_step(name: str, function: Any, case: Case, axes: Axes) -> Wrapped:
    """The step over so many batches, one after the other; ``axes`` are those that the batch is split over.

    Parts that several devices hold are returned by each of them, so that copies which drift apart are seen.
    """
    model, (shapes, specs) = model_of(case), specs_of(case)
    kept = jax.tree.map(lambda spec: _kept(spec, axes), specs)
    results = {"values": {"loss": P(axes), "shards": kept}, "gradients": kept}

    def local(shards, batch, learning_rate):
        def one(shards, rows):
            found = function(shards, specs, rows, model, *axes, learning_rate)
            return varying(forms.state_and_loss(name, "shards", found, shards, case), axes)

        before = varying(shards, axes)
        if case.sizes["steps"] == 1:
            after, loss = one(before, jax.tree.map(lambda rows: rows[0], batch))
            losses = loss[None]
        else:
            after, losses = lax.scan(one, before, batch)
        gradients = jax.tree.map(lambda old, new: (old - new) / learning_rate, before, after)
        values = {"loss": losses[None], "shards": _keep(after, specs, axes)}
        return {"values": values, "gradients": _keep(gradients, specs, axes)}

    in_specs = {"shards": specs, "batch": P(None, axes), "learning_rate": P()}

    def program(shards, batch, learning_rate):
        mapped = jax.shard_map(
            local, mesh=abstract_mesh(case.mesh), in_specs=tuple(in_specs.values()), out_specs=results
        )
        return mapped(shards, batch, learning_rate)

    rate = jax.ShapeDtypeStruct((), np.float32)
    inputs = {"shards": shapes, "batch": _batch_shapes(case, axes), "learning_rate": rate}
    return Wrapped(program, inputs, in_specs, results, {"shards": "state"})


def _holders(spec: P, axes: Axes) -> Axes:
    """The axes along which every device holds a copy of the leaf, or of its part."""
    return tuple(axis for axis in axes if axis not in spec)


def _kept(spec: P, axes: Axes) -> P:
    holders = _holders(spec, axes)
    return P(holders, *spec) if holders else spec


def _keep(leaves: Any, specs: Any, axes: Axes) -> Any:
    return jax.tree.map(lambda leaf, spec: leaf[None] if _holders(spec, axes) else leaf, leaves, specs)


def _larger(case: Case, axes: Axes) -> Case:
    """The same case with rows for every device of all axes, and not of the first alone."""
    more = int(np.prod([case.mesh[axis] for axis in axes])) // axis_size(case)
    return replace(case, sizes={**case.sizes, "rows": case.sizes["rows"] * more})


def _batch_shapes(case: Case, axes: Axes) -> dict[str, Any]:
    steps = case.sizes["steps"]
    shapes = batch_shapes(_larger(case, axes))
    return {name: jax.ShapeDtypeStruct((steps, *s.shape), s.dtype) for name, s in shapes.items()}


def draw_step(rng: np.random.Generator, case: Case, axes: Axes) -> dict[str, Any]:
    """Parameters, a batch for every step, and a learning rate."""
    shapes, _ = specs_of(case)
    seeds = rng.integers(2**31, size=case.sizes["steps"])
    batches = [batch_of(_larger(case, axes), int(seed)) for seed in seeds]
    return {
        "shards": draw_leaves(rng, shapes, 0.3),
        "batch": {name: np.stack([batch[name] for batch in batches]) for name in batches[0]},
        "learning_rate": np.float32(rng.uniform(0.5, 1.0) * case.sizes["rate"] / 100),
    }


def step_oracle(inputs: dict[str, Any], case: Case, axes: Axes) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a leaf gets the same."""
    run = _steps_on_one_device(tuple(case.sizes.items()))
    after, losses, gradients = jax.tree.map(np.asarray, run(inputs["shards"], inputs["batch"], inputs["learning_rate"]))
    specs = specs_of(case)[1]

    def held(leaf, spec):
        holders = _holders(spec, axes)
        return np.repeat(leaf[None], np.prod([case.mesh[axis] for axis in holders]), 0) if holders else leaf

    losses = held(losses, P())
    values = {"loss": losses, "shards": jax.tree.map(held, after, specs)}
    return {"values": values, "gradients": jax.tree.map(held, gradients, specs)}


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
