"""``train_step_dp``: three steps of SGD on many devices are three steps on one."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms, limits
from autograder.cases import axis_of, axis_size, batch_shapes, model_of, params_of
from autograder.contract import Case, Evidence, Mismatch, Wrapped
from autograder.draws import batch_of, draw_leaves, unseen_mesh
from autograder.verdict import Fact
from course.mesh import abstract_mesh, varying_axes
from course.model import full_loss
from course.program.program import path_name

STEPS = 3
_MLP = {"width": 16, "hidden": 32, "num_layers": 2, "features": 8, "rows": 8, "num_microbatches": 4, "percent": 10}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 4, "num_microbatches": 2,
                "percent": 20}  # fmt: skip
_LARGE = {"width": 1024, "hidden": 4096, "num_layers": 2, "features": 1024, "rows": 8192, "num_microbatches": 4,
          "percent": 10}  # fmt: skip
CASES = (
    Case("data=8", {"data": 8}, _MLP, quick=True),
    Case("pipe=4 x tensor=2", {"pipe": 4, "tensor": 2}, {**_MLP, "num_microbatches": 2, "percent": 5}, quick=True),
    Case("data=2", {"data": 2}, _TRANSFORMER),
    Case("data=1", {"data": 1}, {**_MLP, "num_microbatches": 1}),
)
ANALYSED = (Case("data=8, width 1024", {"data": 8}, _LARGE), "data=8")


def unseen(rng: np.random.Generator) -> Case:
    more = {"width": int(rng.choice([8, 24])), "num_microbatches": int(rng.choice([2, 4])), "percent": 8}
    return Case("unseen", unseen_mesh(rng), {**_MLP, **more})


def learning_rate(case: Case) -> float:
    return case.sizes["percent"] / 100


def wrap(function: Any, case: Case) -> Wrapped:
    """Three steps on three batches; gradients are those of the first."""
    axis, model, shapes = axis_of(case), model_of(case), params_of(case)
    how = (model, axis, case.sizes["num_microbatches"], learning_rate(case))

    def one(params, batch):
        result = function(params, batch, *how)
        if not isinstance(result, tuple) or len(result) != 3:
            raise Mismatch(
                f"train_step_dp returned {forms.describe(result)}, expected a tuple (params, loss, gradients)"
            )
        params, loss, gradients = result
        scalar = jax.ShapeDtypeStruct((), np.float32)
        for name, tree, like in (("params", params, shapes), ("gradients", gradients, shapes), ("loss", loss, scalar)):
            forms.same_tree(name, tree, like)
            forms.same_shapes(name, tree, like, case)
            _same_everywhere(name, tree, case)
        return params, loss, gradients

    def local(params, batches):
        losses, found = [], None
        for number in range(STEPS):
            params, loss, gradients = one(params, jax.tree.map(lambda a, i=number: a[i], batches))
            found, losses = found or gradients, [*losses, loss]
        return {"values": {"losses": jax.numpy.stack(losses), "params": params}, "gradients": found}

    def program(params, batches):
        mesh, rows = abstract_mesh(case.mesh), P(None, axis)
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), rows), out_specs=P())(params, batches)

    batches = jax.tree.map(lambda s: jax.ShapeDtypeStruct((STEPS, *s.shape), s.dtype), batch_shapes(case))
    places = {"params": P(), "batches": P(None, axis)}
    results = {"values": P(), "gradients": P()}
    return Wrapped(program, {"params": shapes, "batches": batches}, places, results, {"params": "state"})


def _same_everywhere(name: str, tree: Any, case: Case) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        differs = varying_axes(leaf)
        if differs:
            inner = path_name("", path)
            raise Mismatch(
                f"{name}{f', leaf {inner},' if inner else ''} on mesh {case.mesh_text}: measured "
                f"{jax.typeof(leaf)}, which may differ from device to device over {', '.join(sorted(differs))}; "
                "expected the same on all of them. Which collective makes it so?"
            )


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    batches = [batch_of(case, int(rng.integers(2**31))) for _ in range(STEPS)]
    return {
        "params": draw_leaves(rng, params_of(case), 0.3),
        "batches": jax.tree.map(lambda *rows: np.stack(rows), *batches),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Plain SGD on one device, on all rows at once."""
    params, losses, found = inputs["params"], [], None
    for number in range(STEPS):
        batch = jax.tree.map(lambda a, i=number: a[i], inputs["batches"])
        loss, gradients = jax.tree.map(np.asarray, _loss_and_gradient(tuple(case.sizes.items()))(params, batch))
        params = jax.tree.map(lambda p, g: p - np.float32(learning_rate(case)) * g, params, gradients)
        found, losses = found or gradients, [*losses, loss]
    return {"values": {"losses": np.stack(losses), "params": params}, "gradients": found}


@lru_cache(maxsize=32)
def _loss_and_gradient(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.value_and_grad(lambda params, batch: full_loss(model, params, batch)))


_TOO_MUCH = "How many rows' activations are there at that moment, and how many are in a microbatch?"


def step_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    def leaves(e):
        return [leaf for leaf in e.inputs if leaf.name.startswith("params/")]

    def form(e):
        n = axis_size(e.case)
        return STEPS * 2 * (n - 1) / n * (4 + sum(leaf.local_bytes(e.case.mesh) for leaf in leaves(e)))

    def count(e):
        return STEPS * (len(leaves(e)) + 1) if axis_size(e.case) > 1 else 0

    once = f"In {STEPS} steps, one a step for each leaf and one for the loss: where does each of yours run?"
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        facts.bytes_sent("all-reduce bytes", cases, "all_reduce", form, weight=2),
        facts.times_sent("all-reduces", cases, "all_reduce", count, once),
        facts.only_collectives("other collectives", cases, ("all_reduce",)),
        limits.temporaries_within(large, references, 1.5, _TOO_MUCH),
    ]
