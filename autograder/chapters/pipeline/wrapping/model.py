"""The loss of a model over stages, and a training step: what they are given, and the form of what they give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.pipeline.wrapping.schedule import groups_of, others_of, refuses, row_axes
from autograder.contract import forms
from autograder.contract.cases import model_of, params_of, pipe_of, pull_back, stages_of, varying
from autograder.contract.wrapping import Case, Mismatch, Wrapped
from course.mesh import abstract_mesh

ENDS = ("embed", "head")


def by_part(case: Case, *, layers: Any, ends: Any) -> Any:
    """A tree like the parameters, with one value for all layers' leaves and another for embedding and head."""
    return {
        name: jax.tree.map(lambda _, of=layers if name == "layers" else ends: of, tree)
        for name, tree in params_of(case).items()
    }


def specs_of(case: Case) -> Any:
    """Layers are split over the stages; every device holds the embedding and the head."""
    return by_part(case, layers=P(pipe_of(case)), ends=P())


def rows_of(case: Case) -> int:
    """Rows of all groups together."""
    return groups_of(case) * case.sizes["microbatches"] * case.sizes["rows"]


def batch_shapes(case: Case, steps: int) -> dict[str, Any]:
    """``[steps, rows, ...]`` where there are steps, else ``[rows, ...]``."""
    s, lead = case.sizes, ((steps,) if steps else ()) + (rows_of(case),)
    if "seq" in s:
        return {name: jax.ShapeDtypeStruct((*lead, s["seq"]), np.int32) for name in ("inputs", "targets")}
    sizes = {"inputs": s["features"], "targets": s.get("outputs", s["features"])}
    return {name: jax.ShapeDtypeStruct((*lead, size), np.float32) for name, size in sizes.items()}


def wrap_loss(function: Any, case: Case) -> Wrapped:
    """Loss of every device, and gradients when a group's ``upstream`` flows back into it.

    Each returns its own share of the gradient of embedding and head.
    """
    axis, model, rows, others = pipe_of(case), model_of(case), row_axes(case), others_of(case)
    results = {"values": P((*others, axis)), "gradients": P(rows, axis), "refused": P()}

    def local(params, batch, key, upstream):
        params, key = varying(params, case.mesh), jax.random.wrap_key_data(key[0])

        def loss_of(params, model=model):
            loss = function(params, batch, key, model, case.sizes["microbatches"], axis)
            if not hasattr(loss, "shape") or loss.shape != ():
                raise Mismatch(
                    f"pipeline_loss returned {forms.describe(loss)}, expected a scalar, the mean loss of all rows"
                )
            return varying(loss, others)

        loss, gradients = pull_back(loss_of, params, upstream[0])
        odd = model.num_layers + 1
        uneven = lambda: loss_of(params, replace(model, num_layers=odd))  # noqa: E731
        flag = stages_of(case) == 1 or refuses(uneven, odd, stages_of(case))
        ends = {name: jax.tree.map(lambda g: g[None], gradients[name]) for name in ENDS}
        found = jax.tree.map(lambda g: g[None], {"layers": gradients["layers"], **ends})
        return {"values": varying(loss, case.mesh)[None], "gradients": found, "refused": jnp.asarray(flag)}

    in_specs = {"params": specs_of(case), "batch": P(rows), "key": P(rows), "upstream": P(rows)}

    def program(params, batch, key, upstream):
        specs = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=specs, out_specs=results)
        return mapped(params, batch, key, upstream)

    groups = groups_of(case)
    inputs = {
        "params": params_of(case),
        "batch": batch_shapes(case, 0),
        "key": jax.ShapeDtypeStruct((groups, 2), np.uint32),
        "upstream": jax.ShapeDtypeStruct((groups,), np.float32),
    }
    return Wrapped(program, inputs, in_specs, results, {"params": "state", "key": "key"})


def wrap_step(function: Any, case: Case) -> Wrapped:
    """The step over so many batches; every holder of a leaf returns its copy, so that copies which drift are seen."""
    axis, model, rows, others = pipe_of(case), model_of(case), row_axes(case), others_of(case)
    held = by_part(case, layers=P(rows, axis), ends=P((*others, axis)))
    results = {"values": {"loss": P((*others, axis)), "params": held}, "gradients": held}

    def local(params, batch, key, learning_rate):
        key = jax.random.wrap_key_data(key)

        def one(params, step):
            number, part = step
            own = jax.random.fold_in(key, number)
            found = function(params, part, own, model, case.sizes["microbatches"], axis, *others, learning_rate)
            return varying(forms.state_and_loss("pipeline_train_step", "params", found, params, case), case.mesh)

        before = varying(params, case.mesh)
        if case.sizes["steps"] == 1:
            after, loss = one(before, (0, jax.tree.map(lambda leaf: leaf[0], batch)))
            losses = loss[None]
        else:
            after, losses = lax.scan(one, before, (np.arange(case.sizes["steps"], dtype=np.int32), batch))
        gradients = jax.tree.map(lambda old, new: (old - new) / learning_rate, before, after)
        lead = jax.tree.map(lambda leaf: leaf[None], {"values": {"params": after}, "gradients": gradients})
        return {**lead, "values": {"loss": losses[None], **lead["values"]}}

    in_specs = {"params": specs_of(case), "batch": P(None, rows), "key": P(), "learning_rate": P()}

    def program(params, batch, key, learning_rate):
        specs = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=specs, out_specs=results)
        return mapped(params, batch, key, learning_rate)

    inputs = {
        "params": params_of(case),
        "batch": batch_shapes(case, case.sizes["steps"]),
        "key": jax.ShapeDtypeStruct((2,), np.uint32),
        "learning_rate": jax.ShapeDtypeStruct((), np.float32),
    }
    return Wrapped(program, inputs, in_specs, results, {"params": "state", "key": "key"})
