"""``train_step_3d``: SGD over three axes, with its gradient clipped by the norm that one device would see."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.cases import varying
from autograder.chapters.transformer_3d.forward import on_each_device
from autograder.chapters.transformer_3d.sent import sent_facts
from autograder.chapters.transformer_3d.shared import (
    SIZES,
    axes_of,
    batch_shapes,
    draw_batch,
    options_of,
    part_shapes,
    run_on_one_device,
    sizes_of,
    specs_of,
    stacked_of,
)
from autograder.contract import Case, Evidence, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.mesh import abstract_mesh

NAME = "train_step_3d"
_GRADIENTS = "Is the gradient complete, and is it scaled by one number, the same on every device? "


def wrap(function: Any, case: Case) -> Wrapped:
    """The step over so many batches; every device returns what it holds, so that copies which drift apart are seen."""
    axes, specs, each = axes_of(case), specs_of(case), P(tuple(case.mesh))

    def local(params, batch, key, learning_rate, largest_norm):
        key = jax.random.wrap_key_data(key)

        def one(params, given):
            number, rows = given
            own = jax.random.fold_in(key, number)
            found = function(params, specs, rows, own, options_of(case), *axes, learning_rate, largest_norm)
            return varying(forms.state_and_loss(NAME, "params", found, part_shapes(case), case), case.mesh)

        before = varying(params, case.mesh)
        numbers = np.arange(case.sizes["steps"], dtype=np.int32)
        after, losses = lax.scan(one, before, (numbers, batch))
        gradients = jax.tree.map(lambda old, new: ((old - new) / learning_rate)[None], before, after)
        held = jax.tree.map(lambda leaf: leaf[None], after)
        return {"values": {"loss": losses[None], "params": held}, "gradients": gradients}

    in_specs = {"params": specs, "batch": P(None, axes[0]), "key": P(), "learning_rate": P(), "largest_norm": P()}
    results = {"values": each, "gradients": each}

    def program(**inputs):
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=results)
        return mapped(*inputs.values())

    scalar = jax.ShapeDtypeStruct((), np.float32)
    inputs = {
        "params": stacked_of(case),
        "batch": batch_shapes(case, case.sizes["steps"]),
        "key": jax.ShapeDtypeStruct((2,), np.uint32),
        "learning_rate": scalar,
        "largest_norm": scalar,
    }
    return Wrapped(program, inputs, in_specs, results, {"params": "state", "key": "key"})


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """A learning rate so large that an update shows; ``norm`` is in percent, and 0 leaves gradients as they are."""
    s, every = case.sizes, [draw_batch(rng, case) for _ in range(case.sizes["steps"])]
    return {
        "params": draw_leaves(rng, stacked_of(case), 0.3),
        "batch": {name: np.stack([batch[name] for batch in every]) for name in every[0]},
        "key": rng.integers(0, 2**32 - 1, 2, np.uint32),
        "learning_rate": np.float32(rng.uniform(0.5, 1.0) * s["rate"] / 100),
        "largest_norm": np.float32(rng.uniform(0.8, 1.0) * s["norm"] / 100 if s["norm"] else 1e30),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a part gets the same."""
    after, losses, gradients = run_on_one_device(inputs, case, case.sizes["steps"])
    mean = np.repeat(losses.mean(1)[None], sizes_of(case)[0], 0)
    return {"values": {"loss": on_each_device(mean, case), "params": after}, "gradients": gradients}


def step_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(cases, "gradients"),
        *sent_facts(cases),
    ]


_SIZES = {**SIZES, "num_layers": 2, "num_repeats": 1, "steps": 2, "rate": 50, "norm": 50}
_TWENTY = {**_SIZES, "steps": 20, "rate": 60, "norm": 0}
_CLIPPED = {**_SIZES, "steps": 20, "rate": 60, "norm": 50}


def _unseen(rng: np.random.Generator) -> Case:
    mesh = [{"data": 2, "pipe": 2, "tensor": 1}, {"replica": 2, "stage": 1, "model": 2}][rng.integers(2)]
    return Case("unseen", mesh, {**_SIZES, "norm": int(rng.choice([0, 40, 80])), "vocab": 48})


TRAIN_STEP_3D = Task(
    wrapping=Wrapping(
        NAME,
        "(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm)",
        wrap,
    ),
    kind="local",
    points=4,
    cases=(
        Case("data=2 x pipe=2 x tensor=2", {"data": 2, "pipe": 2, "tensor": 2}, _SIZES, quick=True),
        Case("replica=1 x stage=2 x model=4, 20 steps", {"replica": 1, "stage": 2, "model": 4}, _TWENTY, quick=True),
        Case("data=4 x pipe=1 x tensor=2, 20 steps", {"data": 4, "pipe": 1, "tensor": 2}, _CLIPPED),
        Case("data=8 x pipe=1 x tensor=1, 20 steps", {"data": 8, "pipe": 1, "tensor": 1}, _TWENTY),
        Case("data=1 x pipe=8 x tensor=1, 20 steps", {"data": 1, "pipe": 8, "tensor": 1}, {**_TWENTY, "num_layers": 8}),
        Case("data=1 x pipe=1 x tensor=8, 20 steps", {"data": 1, "pipe": 1, "tensor": 8}, _CLIPPED),
        Case("data=2 x pipe=2 x tensor=2, 20 steps", {"data": 2, "pipe": 2, "tensor": 2}, _TWENTY),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=step_facts,
)
