"""What ``init_3d``, ``forward_3d`` and ``train_step_3d`` are given, and the form of what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.transformer_3d.wrapping.model import (
    axes_of,
    batch_shapes,
    given_specs,
    named,
    options_of,
    stacked_of,
    whole_of,
)
from autograder.contract import forms
from autograder.contract.cases import varying
from autograder.contract.wrapping import Case, Mismatch, Wrapped
from course.mesh import abstract_mesh, shard_map_with_specs, varying_axes
from course.program.program import path_name


def _on_mesh(local: Callable[..., Any], case: Case, in_specs: dict[str, Any], results: dict[str, Any]) -> Any:
    """What every device runs, as one function of whole arrays."""

    def program(**inputs):
        specs = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=specs, out_specs=results)
        return mapped(*inputs.values())

    return program


def wrap_init(function: Any, case: Case) -> Wrapped:
    """The parts, put together by the specs that come with them."""
    shapes, found = whole_of(case), {}
    how = case.sizes["num_repeats"], case.sizes["min_size"], *axes_of(case)

    def local(params):
        result = function(params, *how)
        if not isinstance(result, tuple) or len(result) != 2:
            raise Mismatch(f"init_3d returned {forms.describe(result)}, expected a tuple (parts, specs)")
        parts = forms.same_tree("parts", result[0], params)
        specs = forms.same_tree("specs", result[1], params, is_leaf=lambda s: isinstance(s, P))
        for (path, part), spec, like in zip(
            jax.tree.leaves_with_path(parts), jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)),
            jax.tree.leaves(stacked_of(case)), strict=True,
        ):  # fmt: skip
            _check(path_name("", path), part, spec, like, case)
        return parts, specs

    def program(params):
        arrays, found["specs"] = shard_map_with_specs(local, abstract_mesh(case.mesh), in_specs=(P(),))(params)
        return {"values": arrays}

    return Wrapped(
        program, {"params": shapes}, {"params": P()}, lambda: {"values": found["specs"]}, {"params": "state"}
    )


def _check(name: str, part: Any, spec: Any, like: Any, case: Case) -> None:
    where = f"leaf {name} on mesh {case.mesh_text}"
    if not isinstance(spec, P):
        raise Mismatch(f"{where}: its spec is {forms.describe(spec)}, expected a PartitionSpec")
    unknown = named(spec) - set(case.mesh)
    if unknown:
        raise Mismatch(
            f"{where}: its spec {forms.show_spec(spec)} names {sorted(unknown)}, and the mesh has no such axis"
        )
    if not hasattr(part, "shape") or part.ndim != len(like.shape) or len(spec) > part.ndim:
        raise Mismatch(
            f"{where}: the part is {forms.describe(part)} with spec {forms.show_spec(spec)}, expected one of an array "
            f"{list(like.shape)}"
        )
    differs = varying_axes(part) - named(spec)
    if differs:
        raise Mismatch(
            f"{where}: the part differs from device to device over {', '.join(sorted(differs))}, and its spec "
            f"{forms.show_spec(spec)} says that it is whole there. Does the spec say which dim you split?"
        )


_KEY, _SCALAR = jax.ShapeDtypeStruct((2,), np.uint32), jax.ShapeDtypeStruct((), np.float32)


def wrap_forward(function: Any, case: Case) -> Wrapped:
    """Loss and gradient; every device returns what it holds, so that copies which differ are seen."""
    data, pipe, tensor = axes_of(case)
    specs, each = given_specs(case), P(tuple(case.mesh))

    def local(params, batch, key, upstream):
        key = jax.random.wrap_key_data(key)
        own = jax.random.fold_in(key, 0)

        def loss_of(params):
            loss = function(params, specs, batch, own, options_of(case), data, pipe, tensor)
            return upstream * _same_in_a_pipeline(loss, case), loss

        (_, loss), gradients = jax.value_and_grad(loss_of, has_aux=True)(varying(params, case.mesh))
        return {"values": varying(loss, case.mesh)[None], "gradients": jax.tree.map(lambda g: g[None], gradients)}

    in_specs = {"params": specs, "batch": P(data), "key": P(), "upstream": P()}
    results = {"values": each, "gradients": each}
    inputs = {"params": stacked_of(case), "batch": batch_shapes(case), "key": _KEY, "upstream": _SCALAR}
    roles = {"params": "state", "key": "key"}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, roles)


def _same_in_a_pipeline(loss: Any, case: Case) -> Any:
    _, pipe, tensor = axes_of(case)
    if not hasattr(loss, "shape") or loss.shape != ():
        raise Mismatch(
            f"forward_3d returned {forms.describe(loss)}, expected a scalar, the mean over a pipeline's rows"
        )
    differs = varying_axes(loss) & {pipe, tensor}
    if differs:
        raise Mismatch(
            f"forward_3d returned a loss that is typed as another on each device of {' and '.join(sorted(differs))}: "
            "whoever differentiates it differentiates several losses. Which collective gives one that all have?"
        )
    return loss


def wrap_step(function: Any, case: Case) -> Wrapped:
    """The step over so many batches; every device returns what it holds, so that copies which drift apart are seen."""
    axes, specs, each = axes_of(case), given_specs(case), P(tuple(case.mesh))

    def local(params, batch, key, learning_rate, largest_norm):
        key = jax.random.wrap_key_data(key)

        def one(params, given):
            number, rows = given
            own = jax.random.fold_in(key, number)
            found = function(params, specs, rows, own, options_of(case), *axes, learning_rate, largest_norm)
            return varying(forms.state_and_loss("train_step_3d", "params", found, params, case), case.mesh)

        before = varying(params, case.mesh)
        numbers = np.arange(case.sizes["steps"], dtype=np.int32)
        after, losses = lax.scan(one, before, (numbers, batch))
        gradients = jax.tree.map(lambda old, new: ((old - new) / learning_rate)[None], before, after)
        held = jax.tree.map(lambda leaf: leaf[None], after)
        return {"values": {"loss": losses[None], "params": held}, "gradients": gradients}

    in_specs = {"params": specs, "batch": P(None, axes[0]), "key": P(), "learning_rate": P(), "largest_norm": P()}
    results = {"values": each, "gradients": each}
    batch = batch_shapes(case, case.sizes["steps"])
    scalars = {"learning_rate": _SCALAR, "largest_norm": _SCALAR}
    inputs = {"params": stacked_of(case), "batch": batch, "key": _KEY, **scalars}
    roles = {"params": "state", "key": "key"}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, roles)
