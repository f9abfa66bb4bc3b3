"""What the functions of ``data_parallel`` are given, and the form of what they give."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract import forms
from autograder.contract.cases import axis_of, batch_shapes, model_of, params_of, varying
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping
from course.mesh import abstract_mesh, varying_axes
from course.program.program import path_name

# So many steps of ``train_step_dp`` are taken one after the other.
STEPS = 3
_SCALAR = jax.ShapeDtypeStruct((), np.float32)


def names_of(case: Case) -> tuple[str, ...]:
    """The axes that the function is told."""
    return tuple(axis for axis in case.mesh if case.sizes[f"over {axis}"])


def _own(stacked: jax.Array, case: Case) -> jax.Array:
    """This device's part of an array that has one leading dim for each axis of the mesh."""
    return stacked.reshape(stacked.shape[len(case.mesh) :])


def _each_device(x: jax.Array, case: Case) -> jax.Array:
    """A local array as a part of all devices' arrays, which get one leading dim for each axis of the mesh."""
    return varying(x, case.mesh).reshape(*[1] * len(case.mesh), *x.shape)


def wrap_keys(function: Any, case: Case) -> Wrapped:
    """Two keys are folded in one Program, so that it is seen whether the result depends on the key."""

    def fold(data):
        key = function(jax.random.wrap_key_data(data), names_of(case))
        dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
        if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or shape != ():
            raise Mismatch(
                f"fold_key_over_axes returned {forms.describe(key)}, expected one key like the one it was given"
            )
        return _each_device(jax.random.key_data(key), case)

    def local(keys):
        return {"values": {name: fold(data) for name, data in keys.items()}}

    def program(keys):
        return jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=P(), out_specs=P(*case.mesh))(keys)

    inputs = {"keys": {name: jax.ShapeDtypeStruct((2,), np.uint32) for name in ("first", "second")}}
    return Wrapped(program, inputs, {"keys": P()}, {"values": P(*case.mesh)})


# Which of the kinds of leaves each name has; a case may turn them, so that no name says how its leaf is split.
_LEAVES = {"norm": {"scale": 0}, "up": {"kernel": 1, "bias": 2}, "down": {"kernel": 3}, "stage": {"kernel": 4},
           "grid": 5, "flat": 6, "temperature": 7}  # fmt: skip


def leaves_of(case: Case) -> dict[str, Any]:
    """Local shape and spec of each leaf: whole, split over one axis, over another, over both in one dim or in two."""
    u, first, last = case.sizes["unit"], next(iter(case.mesh)), list(case.mesh)[-1]
    one = first == last
    kinds = [
        ((u,), P()),
        ((u, u), P(None, last)),
        ((u,), P(last)),
        ((u // 2, u), P()),
        ((2, u // 4, 3), P(first)),
        ((4, u // 2), P(None, first) if one else P(first, last)),
        ((2, 3), P(first if one else (first, last))),
        ((), P()),
    ]
    return jax.tree.map(lambda kind: kinds[(kind + case.sizes["turn"]) % len(kinds)], _LEAVES)


def of_leaves(case: Case, take: Any) -> Any:
    """A tree with ``take(local shape, spec)`` of each leaf."""
    return jax.tree.map(lambda leaf: take(*leaf), leaves_of(case), is_leaf=lambda x: isinstance(x, tuple))


def wrap_sync(function: Any, case: Case) -> Wrapped:
    """Every device's gradient enters and leaves apart, with one leading dim for each axis of the mesh."""
    specs, places = of_leaves(case, lambda _, spec: spec), P(*case.mesh)
    sizes = tuple(case.mesh.values())
    stacked = of_leaves(case, lambda shape, _: jax.ShapeDtypeStruct((*sizes, *shape), np.float32))

    def local(gradients):
        own = jax.tree.map(lambda leaf: _own(leaf, case), gradients)
        synced = forms.same_tree("the result", function(own, specs, names_of(case)), own)
        forms.same_shapes("sync_gradients", synced, own, case)
        return jax.tree.map(lambda leaf: _each_device(leaf, case), synced)

    def program(gradients):
        mesh = abstract_mesh(case.mesh)
        return {"values": jax.shard_map(local, mesh=mesh, in_specs=places, out_specs=places)(gradients)}

    return Wrapped(program, {"gradients": stacked}, {"gradients": places}, {"values": places})


def learning_rate(case: Case) -> float:
    """The step's, as the function is given it."""
    return case.sizes["percent"] / 100


def wrap_step(function: Any, case: Case) -> Wrapped:
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
        for name, tree, like in (("params", params, shapes), ("gradients", gradients, shapes), ("loss", loss, _SCALAR)):
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


def wrap_overlap(function: Any, case: Case) -> Wrapped:
    """Parameters arrive typed as varying over the axis; loss and gradients are returned per device, stacked."""
    axis, model, shapes = axis_of(case), model_of(case), params_of(case)

    def local(params, batch):
        result = function(varying(params, [axis]), batch, model, axis, case.sizes["num_microbatches"])
        if not isinstance(result, tuple) or len(result) != 2:
            raise Mismatch(
                f"overlapped_gradients returned {forms.describe(result)}, expected a tuple (loss, gradients)"
            )
        loss, gradients = result
        for name, tree, like in (("loss", loss, _SCALAR), ("gradients", gradients, shapes)):
            forms.same_tree(name, tree, like)
            forms.same_shapes(name, tree, like, case)
        found = varying({"values": loss, "gradients": gradients}, [axis])
        return jax.tree.map(lambda leaf: leaf[None], found)

    def program(params, batch):
        mesh = abstract_mesh(case.mesh)
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(axis)), out_specs=P(axis))(params, batch)

    inputs = {"params": shapes, "batch": batch_shapes(case)}
    results = {"values": P(axis), "gradients": P(axis)}
    return Wrapped(program, inputs, {"params": P(), "batch": P(axis)}, results, {"params": "state"})


WRAPPINGS = (
    Wrapping("fold_key_over_axes", "(key, axis_names)", wrap_keys),
    Wrapping("sync_gradients", "(gradients, specs, axis_names)", wrap_sync),
    Wrapping("train_step_dp", "(params, batch, model, axis_name, num_microbatches, learning_rate)", wrap_step),
    Wrapping("overlapped_gradients", "(params, batch, model, axis_name, num_microbatches)", wrap_overlap),
)
