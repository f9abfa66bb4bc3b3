"""What the functions of ``fsdp`` are given, and the form of what they give.

How leaves are split is the answer of ``shard_params``: the other wrappers are given it with the case.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract import forms
from autograder.contract.cases import axis_of, axis_size, batch_shapes, model_of, params_of, pull_back, varying
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping
from course.mesh import abstract_mesh, as_varying, shard_map_with_specs, varying_axes
from course.program.program import path_name, spec_of

Axes = tuple[str, ...]
_RATE = jax.ShapeDtypeStruct((), np.float32)
# Which of the shapes each leaf has; a case may turn them, so that no name says what is done with its leaf.
_LEAVES = {"first": {"kernel": 0, "bias": 1, "square": 2}, "second": {"kernel": 3, "three": 4, "odd": 5},
           "at_limit": 6, "scale": 7}  # fmt: skip


def leaf_shapes(case: Case) -> dict[str, Any]:
    """A tree of leaves of every kind; turned ones have their dims the other way round."""
    u, turn = case.sizes["unit"], case.sizes["turn"]
    shapes = [(u, 2 * u), (u // 2,), (u, u), (2 * u + 2, u), (3, u, 8), (7, 9, 5), (8, case.sizes["min_size"] // 8), ()]
    shapes = [shape[::-1] if turn else shape for shape in shapes]
    return jax.tree.map(lambda i: jax.ShapeDtypeStruct(shapes[(i + turn) % len(shapes)], np.float32), _LEAVES)


def specs_given(case: Case, like: Any) -> Any:
    """How the leaves of ``like`` are split, as the case says (``shared.as_given``)."""

    def spec(path, _):
        return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in case.given["specs"][path]))

    return jax.tree.map_with_path(lambda path, leaf: spec(path_name("", path), leaf), like)


def kept_specs(specs: Any, axis: str) -> Any:
    """Sharded leaves keep their spec; those of whole leaves are returned per device, stacked."""
    return jax.tree.map(lambda spec: spec if len(spec) else P(axis), specs)


def _keep(leaves: Any, specs: Any, axis: str) -> Any:
    """The leaves in the form of ``kept_specs``; runs inside ``shard_map``."""
    return jax.tree.map(lambda leaf, spec: leaf if len(spec) else as_varying(leaf, axis)[None], leaves, specs)


def wrap_shard_params(function: Any, case: Case) -> Wrapped:
    axis, shapes = axis_of(case), leaf_shapes(case)
    found: dict[str, Any] = {}

    def local(params):
        result = function(params, axis, case.sizes["min_size"])
        if not isinstance(result, tuple) or len(result) != 2:
            raise Mismatch(f"shard_params returned {forms.describe(result)}, expected a tuple (shards, specs)")
        shards, specs = result
        forms.same_tree("shards", shards, params)
        specs = forms.same_tree("specs", specs, params, is_leaf=lambda s: isinstance(s, P))
        for (path, shard), spec in zip(jax.tree.leaves_with_path(shards), jax.tree.leaves(specs), strict=True):
            _check_spec(path_name("", path), shard, spec, axis, case)
        return shards, specs

    def program(params):
        arrays, found["specs"] = shard_map_with_specs(local, abstract_mesh(case.mesh), in_specs=(P(),))(params)
        return {"values": arrays}

    return Wrapped(
        program, {"params": shapes}, {"params": P()}, lambda: {"values": found["specs"]}, {"params": "state"}
    )


def _check_spec(name: str, shard: Any, spec: Any, axis: str, case: Case) -> None:
    where = f"leaf {name} on mesh {case.mesh_text}"
    if not isinstance(spec, P):
        raise Mismatch(f"{where}: its spec is {forms.describe(spec)}, expected a PartitionSpec")
    named = {a for entry in spec_of(spec, max(len(spec), shard.ndim)) for a in entry}
    if not named <= {axis}:
        raise Mismatch(
            f"{where}: its spec {forms.show_spec(spec)} names {sorted(named - {axis})}; "
            f"the axis to split over is {axis!r}"
        )
    if len(spec) > shard.ndim:
        raise Mismatch(
            f"{where}: its spec {forms.show_spec(spec)} has {len(spec)} entries and the leaf has {shard.ndim} dims"
        )
    differs = varying_axes(shard) - named
    if differs:
        raise Mismatch(
            f"{where}: the part differs from device to device over {', '.join(sorted(differs))}, and its spec "
            f"{forms.show_spec(spec)} says that it is whole. Does the spec say which dim you split?"
        )


def wrap_gather_params(function: Any, case: Case) -> Wrapped:
    axis, shapes = axis_of(case), leaf_shapes(case)
    specs = specs_given(case, shapes)
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((axis_size(case), *s.shape), s.dtype), shapes)
    results = {"values": P(axis), "gradients": kept_specs(specs, axis)}

    def local(shards, upstream):
        def gather(shards):
            whole = forms.same_tree("the result", function(shards, specs, axis), shards)
            forms.same_shapes("gather_params", whole, shapes, case)
            return varying(whole, [axis])

        whole, transpose = jax.vjp(gather, varying(shards, [axis]))
        (gradients,) = transpose(jax.tree.map(lambda g: g[0], upstream))
        return {"values": jax.tree.map(lambda leaf: leaf[None], whole), "gradients": _keep(gradients, specs, axis)}

    def program(shards, upstream):
        mesh = abstract_mesh(case.mesh)
        in_specs = (specs, P(axis))
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=results)(shards, upstream)

    inputs = {"shards": shapes, "upstream": stacked}
    return Wrapped(program, inputs, {"shards": specs, "upstream": P(axis)}, results, {"shards": "state"})


def wrap_fsdp_loss(function: Any, case: Case) -> Wrapped:
    """Each device's loss, and the gradient of the parts when ``upstream`` flows back into it."""
    axis, model, shapes = axis_of(case), model_of(case), params_of(case)
    specs = specs_given(case, shapes)
    results = {"values": P(axis), "gradients": kept_specs(specs, axis)}

    def local(shards, batch, upstream):
        def loss_of(shards):
            loss = function(shards, specs, batch, model, axis)
            if not hasattr(loss, "shape") or loss.shape != ():
                raise Mismatch(f"fsdp_loss returned {forms.describe(loss)}, expected a scalar, this device's mean loss")
            return as_varying(loss, axis)

        loss, gradients = pull_back(loss_of, varying(shards, [axis]), upstream[0])
        return {"values": loss[None], "gradients": _keep(gradients, specs, axis)}

    in_specs = {"shards": specs, "batch": P(axis), "upstream": P(axis)}

    def program(shards, batch, upstream):
        places = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=places, out_specs=results)
        return mapped(shards, batch, upstream)

    upstream = jax.ShapeDtypeStruct((axis_size(case),), np.float32)
    inputs = {"shards": shapes, "batch": batch_shapes(case), "upstream": upstream}
    return Wrapped(program, inputs, in_specs, results, {"shards": "state"})


def hybrid_axes(case: Case) -> tuple[str, str]:
    """The axis inside a node, along which parameters are split, and the one across nodes."""
    inside = axis_of(case)
    (across,) = (axis for axis in case.mesh if axis != inside)
    return inside, across


def wrap_step(name: str, axes_of: Any, function: Any, case: Case) -> Wrapped:
    """The step over so many batches, one after the other; ``axes_of`` names those that the batch is split over.

    Parts that several devices hold are returned by each of them, so that copies which drift apart are seen.
    """
    axes, model, shapes = axes_of(case), model_of(case), params_of(case)
    specs = specs_given(case, shapes)
    kept = jax.tree.map(lambda spec: P(holders, *spec) if (holders := holders_of(spec, axes)) else spec, specs)
    results = {"values": {"loss": P(axes), "shards": kept}, "gradients": kept}

    def stacked(leaves):
        return jax.tree.map(lambda leaf, spec: leaf[None] if holders_of(spec, axes) else leaf, leaves, specs)

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
        return {"values": {"loss": losses[None], "shards": stacked(after)}, "gradients": stacked(gradients)}

    in_specs = {"shards": specs, "batch": P(None, axes), "learning_rate": P()}

    def program(shards, batch, learning_rate):
        mapped = jax.shard_map(
            local, mesh=abstract_mesh(case.mesh), in_specs=tuple(in_specs.values()), out_specs=results
        )
        return mapped(shards, batch, learning_rate)

    inputs = {"shards": shapes, "batch": _batches(case, axes), "learning_rate": _RATE}
    return Wrapped(program, inputs, in_specs, results, {"shards": "state"})


def holders_of(spec: P, axes: Axes) -> Axes:
    """The axes along which every device holds a copy of the leaf, or of its part."""
    return tuple(axis for axis in axes if axis not in spec)


def larger(case: Case, axes: Axes) -> Case:
    """The same case with rows for every device of all axes, and not of the first alone."""
    more = int(np.prod([case.mesh[axis] for axis in axes])) // axis_size(case)
    return replace(case, sizes={**case.sizes, "rows": case.sizes["rows"] * more})


def _batches(case: Case, axes: Axes) -> dict[str, Any]:
    steps, shapes = case.sizes["steps"], batch_shapes(larger(case, axes))
    return {name: jax.ShapeDtypeStruct((steps, *s.shape), s.dtype) for name, s in shapes.items()}


def step_axes(case: Case) -> tuple[str]:
    """The axis of ``fsdp_train_step``."""
    return (axis_of(case),)


WRAPPINGS = (
    Wrapping("shard_params", "(params, axis_name, min_size)", wrap_shard_params),
    Wrapping("gather_params", "(shards, specs, axis_name)", wrap_gather_params),
    Wrapping("fsdp_loss", "(shards, specs, batch, model, axis_name)", wrap_fsdp_loss),
    Wrapping(
        "fsdp_train_step",
        "(shards, specs, batch, model, axis_name, learning_rate)",
        partial(wrap_step, "fsdp_train_step", step_axes),
    ),
    Wrapping(
        "hybrid_shard_step",
        "(shards, specs, batch, model, axis_name, replica_axis, learning_rate)",
        partial(wrap_step, "hybrid_shard_step", hybrid_axes),
    ),
)
