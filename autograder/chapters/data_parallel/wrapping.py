"""Inputs of the functions of ``data_parallel``, and the form of their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract import output_checks
from autograder.contract.case import Case, ModelSizes, Sizes
from autograder.contract.case_builders import KEY, axis_of, axis_size, batch_shapes, model_of, params_of
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh
from course.mesh import varying, varying_axes
from course.program.program import path_name

# Number of consecutive steps of ``train_step_dp``.
STEPS = 3
_SCALAR = jax.ShapeDtypeStruct((), np.float32)


@dataclass(frozen=True, kw_only=True)
class Named(Sizes):
    """Named axes; ``names`` are the ones that the function receives."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Leaves(Named):
    """A tree with every kind of leaf: ``unit`` scales their dims, and kinds are rotated by ``turn`` places."""

    unit: int = 16
    turn: int = 0


@dataclass(frozen=True, kw_only=True)
class StepSizes(ModelSizes):
    """A model in training, with ``rows`` for each device and a mask of the valid ones."""

    rows: int
    num_microbatches: int
    learning_rate: float = 0.1
    weight_decay: float = 0.3


def rows_of(case: Case[StepSizes]) -> int:
    """Number of rows in the whole batch."""
    return case.sizes.rows * axis_size(case)


def _own(stacked: jax.Array, case: Case[Any]) -> jax.Array:
    """This device's part of an array that has one leading dim for each axis of the mesh."""
    return stacked.reshape(stacked.shape[len(case.mesh) :])


def _each_device(x: jax.Array, case: Case[Any]) -> jax.Array:
    """A local array as part of a global array with one leading dim for each axis of the mesh."""
    return varying(x, case.mesh).reshape(*[1] * len(case.mesh), *x.shape)


def wrap_keys(function: Any, case: Case[Named]) -> Wrapped:
    """Fold two keys in one Program, to show whether the result depends on the key."""

    def fold(data):
        key = function(jax.random.wrap_key_data(data), case.sizes.names)
        dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
        if dtype is None or not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or shape != ():
            raise Mismatch(
                f"fold_key_over_axes returned {output_checks.describe(key)}, expected one key like the one it was given"
            )
        return _each_device(jax.random.key_data(key), case)

    def local(keys):
        return {"values": {name: fold(data) for name, data in keys.items()}}

    return on_mesh(local, case, {"keys": ({"first": KEY, "second": KEY}, P())}, {"values": P(*case.mesh)})


# The kind of leaf for each name; a case may rotate them, so that no name reveals how its leaf is split.
_LEAVES = {
    "norm": {"scale": 0},
    "up": {"kernel": 1, "bias": 2},
    "down": {"kernel": 3},
    "stage": {"kernel": 4},
    "grid": 5,
    "flat": 6,
    "temperature": 7,
}


def leaves_of(case: Case[Leaves]) -> dict[str, Any]:
    """Local shape and spec of each leaf: whole, split over one axis, over another, over both in one dim or in two."""
    u, first, last = case.sizes.unit, next(iter(case.mesh)), list(case.mesh)[-1]
    one_axis = first == last
    kinds = [
        ((u,), P()),
        ((u, u), P(None, last)),
        ((u,), P(last)),
        ((u // 2, u), P()),
        ((2, u // 4, 3), P(first)),
        ((4, u // 2), P(None, first) if one_axis else P(last, first)),
        ((2, 3), P(first if one_axis else (first, last))),
        ((), P()),
    ]
    return jax.tree.map(lambda kind: kinds[(kind + case.sizes.turn) % len(kinds)], _LEAVES)


def of_leaves(case: Case[Leaves], take: Callable[[tuple[int, ...], P], Any]) -> Any:
    """A tree with ``take(local shape, spec)`` of each leaf."""
    return jax.tree.map(lambda leaf: take(*leaf), leaves_of(case), is_leaf=lambda x: isinstance(x, tuple))


def wrap_sync(function: Any, case: Case[Leaves]) -> Wrapped:
    """Every device's gradient enters and leaves separately, with one leading dim for each axis of the mesh."""
    specs, places = of_leaves(case, lambda _, spec: spec), P(*case.mesh)
    sizes = tuple(case.mesh.values())
    stacked = of_leaves(case, lambda shape, _: jax.ShapeDtypeStruct((*sizes, *shape), np.float32))

    def local(gradients):
        own = jax.tree.map(lambda leaf: _own(leaf, case), gradients)
        synced = output_checks.same_tree("the result", function(own, specs, case.sizes.names), own)
        output_checks.same_shapes("sync_gradients", synced, own, case)
        return {"values": jax.tree.map(lambda leaf: _each_device(leaf, case), synced)}

    return on_mesh(local, case, {"gradients": (stacked, places)}, {"values": places}, squeezed=tuple(case.mesh))


def wrap_step(function: Any, case: Case[StepSizes]) -> Wrapped:
    """Three steps on three batches; gradients are those of the first."""
    axis, model, shapes = axis_of(case), model_of(case), params_of(case)
    arguments = (model, axis, case.sizes.num_microbatches, case.sizes.learning_rate, case.sizes.weight_decay)

    def one_step(params, batch):
        result = function(params, batch, *arguments)
        params, loss, gradients = output_checks.tuple_of("train_step_dp", result, "params", "loss", "gradients")
        for name, tree, like in (("params", params, shapes), ("gradients", gradients, shapes), ("loss", loss, _SCALAR)):
            output_checks.same_shapes(name, tree, like, case)
            _same_everywhere(name, tree, case)
        return params, loss, gradients

    def local(params, batches):
        losses, first_gradients = [], None
        for number in range(STEPS):
            params, loss, gradients = one_step(params, jax.tree.map(lambda a, i=number: a[i], batches))
            first_gradients, losses = first_gradients or gradients, [*losses, loss]
        return {"values": {"losses": jax.numpy.stack(losses), "params": params}, "gradients": first_gradients}

    batches = batch_shapes(case.sizes, rows_of(case), STEPS, masked=True)
    inputs = {"params": (shapes, P()), "batches": (batches, P(None, axis))}
    return on_mesh(local, case, inputs, {"values": P(), "gradients": P()}, {"params": "state"})


def _same_everywhere(name: str, tree: Any, case: Case[Any]) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        differs = varying_axes(leaf)
        if differs:
            inner = path_name("", path)
            raise Mismatch(
                f"{name}{f', leaf {inner},' if inner else ''} {case.place}: measured "
                f"{jax.typeof(leaf)}, which may differ from device to device over {', '.join(sorted(differs))}; "
                "expected the same on all of them. Which collective makes it so?"
            )


def wrap_overlap(function: Any, case: Case[StepSizes]) -> Wrapped:
    """Parameters arrive typed as varying over the axis; loss and gradients are returned per device, stacked."""
    axis, model, shapes = axis_of(case), model_of(case), params_of(case)

    def local(params, batch):
        result = function(varying(params, [axis]), batch, model, axis, case.sizes.num_microbatches)
        loss, gradients = output_checks.tuple_of("overlapped_gradients", result, "loss", "gradients")
        for name, tree, like in (("loss", loss, _SCALAR), ("gradients", gradients, shapes)):
            output_checks.same_shapes(name, tree, like, case)
        outputs = varying({"values": loss, "gradients": gradients}, [axis])
        return jax.tree.map(lambda leaf: leaf[None], outputs)

    inputs = {"params": (shapes, P()), "batch": (batch_shapes(case.sizes, rows_of(case), masked=True), P(axis))}
    return on_mesh(local, case, inputs, {"values": P(axis), "gradients": P(axis)}, {"params": "state"})


_STEP = "(params, batch, model, axis_name, num_microbatches{})"
WRAPPINGS = (
    Wrapping("fold_key_over_axes", "(key, axis_names)", wrap_keys, Named),
    Wrapping("sync_gradients", "(gradients, specs, axis_names)", wrap_sync, Leaves),
    Wrapping("train_step_dp", _STEP.format(", learning_rate, weight_decay"), wrap_step, StepSizes),
    Wrapping("overlapped_gradients", _STEP.format(""), wrap_overlap, StepSizes),
)
