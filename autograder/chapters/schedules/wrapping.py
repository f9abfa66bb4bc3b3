"""Inputs of the functions of ``schedules``, and the form of their results.

Questions about orders and the tables to execute come with the case, since code that computes them has the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, Sizes
from autograder.contract.case_builders import LEARNING_RATE, data_of, pipe_of, pipelines_of, stages_of
from autograder.contract.output_checks import describe, same_shapes, same_tree, scalar
from autograder.contract.value_tasks import wrap_questions
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, returned_by
from course.mesh import varying
from course.schedules import Table

# The most bytes of all answers of a case, as text.
MOST = 32_768


@dataclass(frozen=True, kw_only=True)
class OrderSizes(Sizes):
    """The questions about an order: ``num_stages``, and several numbers of microbatches up to ``most``."""

    num_stages: int
    most: int
    num_repeats: int = 1


@dataclass(frozen=True, kw_only=True)
class Layer(Sizes):
    """A residual MLP layer. ``passes`` is the number of passes run: 2 leaves out the gradients of the weights."""

    rows: int
    width: int
    hidden: int
    activation: str
    passes: int = 3


@dataclass(frozen=True, kw_only=True)
class Executed(Sizes):
    """A schedule by its name in the course's family, and stages of ``num_layers`` dense layers.

    Attributes:
        rows: Rows of a microbatch.
        activation: The activation of a dense layer, one of ``DENSE``.
        steps: Number of training steps.
    """

    schedule: str
    num_microbatches: int
    rows: int
    width: int
    num_repeats: int = 1
    num_layers: int = 1
    activation: str = "tanh"
    steps: int = 1


def activation_of(name: str) -> Any:
    """An activation by its name."""
    known = {"gelu": jax.nn.gelu, "tanh": jnp.tanh, "silu": jax.nn.silu, "softplus": jax.nn.softplus, "sin": jnp.sin}
    return known[name]


def layer_shapes(case: Case[Layer]) -> dict[str, Any]:
    """Shapes of the weights of a split layer."""
    s = case.sizes
    return {
        "up": jax.ShapeDtypeStruct((s.width, s.hidden), np.float32),
        "down": jax.ShapeDtypeStruct((s.hidden, s.width), np.float32),
    }


def wrap_split(function: Any, case: Case[Layer]) -> Wrapped:
    """The forward pass, and both parts of the backward pass or only the first.

    Each is traced separately, as in a loop over a schedule's ticks, so everything that it needs must be passed to it.
    """
    s = case.sizes

    def local(weights, x, upstream):
        functions = function(activation_of(s.activation))
        if not isinstance(functions, tuple) or len(functions) != 3 or not all(callable(each) for each in functions):
            raise Mismatch(f"split_backward returned {describe(functions)}, expected a tuple of three functions")
        forward, backward_input, backward_weights = map(jax.jit, functions)
        with returned_by(functions[0]):
            y, saved = _two("forward", forward(weights, x))
            _storable("forward", saved, jax.eval_shape(lambda *args: functions[0](*args), weights, x)[1])
            same_shapes("forward", y, x, case)
        with returned_by(functions[1]):
            dx, pending = _two("backward_input", backward_input(weights, saved, upstream))
            same_shapes("backward_input", dx, x, case)
            retraced = jax.eval_shape(lambda *args: functions[1](*args), weights, saved, upstream)
            _storable("backward_input", pending, retraced[1])
        if s.passes == 2:
            # Use what is pending, so that it is not removed as dead code; it adds 0.
            dx += 0 * sum(jnp.sum(leaf, dtype=jnp.float32) for leaf in jax.tree.leaves(pending))
            return {"values": y, "gradients": {"x": dx}}
        with returned_by(functions[2]):
            gradients = backward_weights(saved, pending)
            same_tree("the gradients of the weights", gradients, weights)
            same_shapes("backward_weights", gradients, weights, case)
        return {"values": y, "gradients": {"x": dx, **gradients}}

    rows = jax.ShapeDtypeStruct((s.rows, s.width), np.float32)
    inputs = {"weights": (layer_shapes(case), P()), "x": (rows, P()), "upstream": (rows, P())}
    return on_mesh(local, case, inputs, {"values": P(), "gradients": P()}, {"weights": "state"})


def _storable(name: str, tree: Any, retraced: Any) -> None:
    """Require the same tree of arrays from each trace, so that it fits into a slot."""
    if jax.tree.structure(tree) != jax.tree.structure(retraced):
        raise Mismatch(
            f"{name} returned a tree that differs each time it is traced, so no slot can hold it; return "
            "arrays, not the function that jax.vjp returns"
        )


def _two(name: str, result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise Mismatch(f"{name} returned {describe(result)}, expected a tuple of two")
    return result


# Activations of dense layers, each with its slope as a function of its result.
DENSE = {"tanh": (jnp.tanh, lambda y: 1 - y**2), "sigmoid": (jax.nn.sigmoid, lambda y: y * (1 - y))}


def dense_stage(activation: str = "tanh") -> tuple[Any, Any, Any]:
    """The argument ``stage`` of ``execute_schedule``: dense layers, each with a bias.

    Not all that it keeps has the shape of a microbatch, as with ``split_backward``.
    """
    act, slope = DENSE[activation]

    def forward(weights, x):
        y, outputs = x, []
        for kernel, bias in zip(weights["kernel"], weights["bias"], strict=True):
            y = act(y @ kernel + bias)
            outputs.append(y)
        return y, (x, jnp.stack(outputs))

    def backward_input(weights, saved, dy):
        pending = []
        for kernel, output in zip(weights["kernel"][::-1], saved[1][::-1], strict=True):
            pending.append(dy * slope(output))
            dy = pending[-1] @ kernel.T
        return dy, jnp.stack(pending[::-1])

    def backward_weights(saved, pending):
        x, outputs = saved
        kernels = [x.T @ dz for x, dz in zip((x, *outputs), pending, strict=False)]
        return {"kernel": jnp.stack(kernels), "bias": pending.sum(1)}

    return forward, backward_input, backward_weights


def weights_of(case: Case[Executed]) -> dict[str, Any]:
    """Shapes of the weights, ``[num_repeats, num_stages@pipe, num_layers, ...]``."""
    s = case.sizes
    parts = (s.num_repeats, stages_of(case), s.num_layers)
    return {
        "kernel": jax.ShapeDtypeStruct((*parts, s.width, s.width), np.float32),
        "bias": jax.ShapeDtypeStruct((*parts, s.width), np.float32),
    }


def rows_of(case: Case[Executed], *steps: int) -> Any:
    """The shape of inputs and of targets, ``[*steps, num_microbatches, rows@data, width]``."""
    s = case.sizes
    shape = (*steps, s.num_microbatches, s.rows * pipelines_of(case), s.width)
    return jax.ShapeDtypeStruct(shape, np.float32)


def _loss_of(targets: Any, case: Case[Executed]) -> Any:
    """The ``loss`` that is passed to the function."""
    shape = (case.sizes.rows, case.sizes.width)

    def loss(y, microbatch):
        if jnp.shape(microbatch) != () or not jnp.issubdtype(jnp.result_type(microbatch), jnp.integer):
            raise Mismatch(f"loss was called with {describe(microbatch)} as its microbatch, expected one integer")
        if jnp.shape(y) != shape:
            raise Mismatch(f"loss was called with {describe(y)} as y, expected one microbatch, {list(shape)}")
        return jnp.mean(jnp.sum((y - targets[microbatch]) ** 2, axis=-1)) / 2

    return loss


def table_of(case: Case[Executed]) -> Table:
    """The table, from the plain data of the case."""
    table = case.given["table"]
    columns = {name: np.asarray(rows, np.int32) for name, rows in table["columns"].items()}
    return Table(table["num_ticks"], table["num_repeats"], dict(table["num_slots"]), columns)


def _on_last_stage(loss: Any, case: Case[Any]) -> Any:
    return jnp.where(lax.axis_index(pipe_of(case)) == stages_of(case) - 1, loss, 0)


def wrap_execute(function: Any, case: Case[Executed]) -> Wrapped:
    """The last stage's loss of each pipeline, and the gradients on every device."""
    pipe, data = pipe_of(case), data_of(case)

    def local(weights, microbatches, targets):
        own = varying(jax.tree.map(lambda leaf: leaf[:, 0], weights), case.mesh)
        microbatches, targets = varying((microbatches, targets), case.mesh)
        args = (dense_stage(case.sizes.activation), _loss_of(targets, case), table_of(case), own, microbatches, pipe)
        result = function(*args)
        loss, gradients = _two("execute_schedule", result)
        scalar("execute_schedule", loss, "the mean over all microbatches")
        same_tree("the gradients", gradients, own)
        same_shapes("execute_schedule", gradients, own, case)
        loss, gradients = varying((_on_last_stage(loss, case), gradients), case.mesh)
        return {"values": loss[None], "gradients": jax.tree.map(lambda g: g[None, :, None], gradients)}

    results = {"values": P(tuple(case.mesh)), "gradients": P(data, None, pipe)}
    rows = rows_of(case)
    inputs = {
        "weights": (weights_of(case), P(None, pipe)),
        "microbatches": (rows, P(None, data)),
        "targets": (rows, P(None, data)),
    }
    return on_mesh(local, case, inputs, results, {"weights": "state"}, squeezed=(pipe,))


def wrap_versions(function: Any, case: Case[Executed]) -> Wrapped:
    """Several steps. Every device returns its own copies, to detect copies that drift apart."""
    pipe, data, steps = pipe_of(case), data_of(case), case.sizes.steps
    shapes = {"newest": weights_of(case), "older": weights_of(case)}

    def local(versions, microbatches, targets, learning_rate):
        def step(versions, batch):
            inputs, targets = varying(batch, case.mesh)
            stage, loss_of = dense_stage(case.sizes.activation), _loss_of(targets, case)
            args = (stage, loss_of, table_of(case), dict(versions), inputs, learning_rate)
            after, loss = _two("two_weight_versions_step", function(*args, pipe, data))
            same_tree("the versions", after, versions)
            same_shapes("two_weight_versions_step", after, versions, case)
            scalar("two_weight_versions_step", loss, "the mean over all rows")
            return varying((after, loss), case.mesh)

        own = varying(jax.tree.map(lambda leaf: leaf[:, 0], versions), case.mesh)
        after, losses = lax.scan(step, own, (microbatches, targets))
        applied = jax.tree.map(lambda old, new: (old - new) / learning_rate, own["newest"], after["newest"])
        after, applied = (jax.tree.map(lambda leaf: leaf[None, :, None], tree) for tree in (after, applied))
        return {"values": {"loss": losses[None], "versions": after}, "gradients": applied}

    state = P(data, None, pipe)
    results = {"values": {"loss": P(tuple(case.mesh)), "versions": state}, "gradients": state}
    rows = rows_of(case, steps)
    inputs = {
        "versions": (shapes, P(None, pipe)),
        "microbatches": (rows, P(None, None, data)),
        "targets": (rows, P(None, None, data)),
        "learning_rate": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, results, {"versions": "state"}, squeezed=(pipe,))


_order = partial(wrap_questions, expected="a line for each stage", most=MOST)
_ORDER = "(num_stages, num_microbatches)"
_EXECUTE = "(stage, loss, table, weights, microbatches, axis_name)"
_VERSIONS = "(stage, loss, table, versions, microbatches, learning_rate, pipe_axis, data_axis)"
WRAPPINGS = (
    Wrapping("one_f_one_b", _ORDER, partial(_order, "one_f_one_b"), OrderSizes),
    Wrapping("interleaved", "(num_stages, num_microbatches, num_repeats)", partial(_order, "interleaved"), OrderSizes),
    Wrapping("split_backward", "(activation)", wrap_split, Layer),
    Wrapping("zero_bubble", _ORDER, partial(_order, "zero_bubble"), OrderSizes),
    Wrapping("execute_schedule", _EXECUTE, wrap_execute, Executed),
    Wrapping("two_weight_versions_step", _VERSIONS, wrap_versions, Executed),
)
