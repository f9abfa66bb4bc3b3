"""Inputs of the functions of ``zero``, and the form of their results.

The layout of leaves is what ``shard_params`` must compute, so all wrappers but the first two receive it with the case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.data_parallel.wrapping import Leaves as NormLeaves
from autograder.chapters.data_parallel.wrapping import of_leaves
from autograder.chapters.fsdp.wrapping import Leaves, leaf_shapes
from autograder.contract import output_checks
from autograder.contract.case import Case, ModelSizes
from autograder.contract.case_builders import axis_of, batch_shapes, decode_specs, model_of, params_of
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, with_own_specs
from course.mesh import varying
from course.program.program import path_name
from course.train import AdamW

MOMENTS = ("m", "v")
COUNT = jax.ShapeDtypeStruct((), np.int32)
__all__ = ["MOMENTS", "NormLeaves", "StateLeaves", "StepSizes", "leaf_shapes", "of_leaves"]


@dataclass(frozen=True, kw_only=True)
class StateLeaves(Leaves):
    """A tree with every kind of leaf.

    Attributes:
        every_axis: Whether all axes of the mesh split the state, or only one.
    """

    every_axis: bool = False


@dataclass(frozen=True, kw_only=True)
class StepSizes(ModelSizes):
    """A model in training, with ``rows`` for each device and step.

    Attributes:
        rows: Rows of a device's batch.
        num_microbatches: Number of microbatches that ``zero2_step`` splits the rows into.
        min_size: The least size of a leaf that is split.
        steps: Number of steps, one after the other.
        every_axis: Whether all axes of the mesh split batch and state, or only one.
        count: Updates made before the first step.
        learning_rate, beta1, beta2, eps, weight_decay, clip: As in ``course.train.AdamW``.
    """

    rows: int
    num_microbatches: int = 1
    min_size: int = 64
    steps: int = 1
    every_axis: bool = False
    count: int = 2
    learning_rate: float = 0.05
    beta1: float = 0.8
    beta2: float = 0.9
    eps: float = 0.01
    weight_decay: float = 0.4
    clip: float = 0.3


def axes_of(case: Case[StepSizes] | Case[StateLeaves]) -> tuple[str, ...]:
    """The axes that batch and state are split over."""
    return tuple(case.mesh) if case.sizes.every_axis else (axis_of(case),)


def axis_given(case: Case[StepSizes] | Case[StateLeaves]) -> str | tuple[str, ...]:
    """The argument ``axis_name``: one name, or a tuple of several."""
    return axes_of(case) if case.sizes.every_axis and len(case.mesh) > 1 else axis_of(case)


def devices_of(case: Case[StepSizes] | Case[StateLeaves]) -> int:
    """Number of devices that hold different parts and rows."""
    return math.prod(case.mesh[axis] for axis in axes_of(case))


def config_of(case: Case[StepSizes]) -> AdamW:
    """The argument ``config``."""
    return AdamW(**{name: getattr(case.sizes, name) for name in AdamW._fields})


def _check_state(function_name: str, state: Any, like: Any) -> None:
    """Raise unless it is a dict of two trees like the parameters, and a count."""
    expected = {**dict.fromkeys(MOMENTS, like), "count": COUNT}
    if not isinstance(state, dict) or set(state) != set(expected):
        shown = f"a dict of {', '.join(map(repr, state))}" if isinstance(state, dict) else output_checks.describe(state)
        raise Mismatch(f"{function_name}: its state is {shown}, expected a dict of 'm', 'v' and 'count'")
    for name, tree in expected.items():
        output_checks.same_tree(f"{function_name}, {name!r}", state[name], tree)


def wrap_state(function: Any, case: Case[StateLeaves]) -> Wrapped:
    axis, name = axis_given(case), "shard_optimizer_state"

    def local(params):
        state, specs = output_checks.tuple_of(name, function(params, axis, case.sizes.min_size), "state", "specs")
        _check_state(name, state, params)
        specs = output_checks.same_tree("specs", specs, params, is_leaf=lambda s: isinstance(s, P))
        for (path, part), spec in zip(jax.tree.leaves_with_path(state["m"]), jax.tree.leaves(specs), strict=True):
            output_checks.check_spec(f"leaf {path_name('', path)} {case.place}", part, spec, axes_of(case))
        return state, {**dict.fromkeys(MOMENTS, specs), "count": P()}

    return with_own_specs(local, case, leaf_shapes(case))


def wrap_norm(function: Any, case: Case[NormLeaves]) -> Wrapped:
    specs, everywhere = of_leaves(case, lambda _, spec: spec), P(tuple(case.mesh))

    def whole(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        parts = [math.prod(case.mesh[a] for a in jax.tree.leaves(entry)) for entry in spec]
        parts += [1] * (len(shape) - len(parts))
        return jax.ShapeDtypeStruct(tuple(map(math.prod, zip(shape, parts, strict=True))), np.float32)

    def local(tree):
        norm = function(tree, specs)
        output_checks.scalar("global_norm", norm, "the norm of all leaves")
        return {"values": varying(norm, case.mesh)[None]}

    return on_mesh(local, case, {"tree": (of_leaves(case, whole), specs)}, {"values": everywhere}, {"tree": "state"})


def _stacked(specs: Any, axes: tuple[str, ...]) -> Any:
    """Specs of leaves as ``_copies`` returns them."""
    return jax.tree.map(lambda spec: spec if any(spec) else P(axes), specs)


def _copies(tree: Any, specs: Any) -> Any:
    """Stack each device's copy of whole leaves, so that copies that drift apart are detected."""
    return jax.tree.map(lambda leaf, spec: leaf if any(spec) else leaf[None], tree, specs)


def _signature(case: Case[StepSizes]) -> tuple[Any, dict[str, tuple[Any, Any]], dict[str, Any]]:
    """Specs of the parts, the inputs ``params`` and ``state``, and the specs of results."""
    shapes, axes = params_of(case), axes_of(case)
    specs = decode_specs(case, shapes)
    state = {**dict.fromkeys(MOMENTS, shapes), "count": COUNT}
    inputs = {"params": (shapes, P()), "state": (state, {**dict.fromkeys(MOMENTS, specs), "count": P()})}
    state_specs = {**dict.fromkeys(MOMENTS, _stacked(specs, axes)), "count": P(axes)}
    return specs, inputs, {"params": P(axes), "state": state_specs, "norm": P(axes)}


def _check_update(name: str, params: Any, state: Any, norm: Any, arguments: tuple[Any, Any], case: Case[Any]) -> None:
    """Raise unless parameters and state have the form of those that were given, and the norm is a scalar."""
    output_checks.same_shapes(name, output_checks.same_tree("params", params, arguments[0]), arguments[0], case)
    _check_state(name, state, arguments[0])
    for part, like in arguments[1].items():
        output_checks.same_shapes(f"{name}, {part!r}", state[part], like, case)
    output_checks.scalar(name, norm, "the global norm")


def _results(params: Any, state: Any, norm: Any, specs: Any, axes: tuple[str, ...]) -> dict[str, Any]:
    params, state, norm = varying((params, state, norm), axes)
    moments = {moment: _copies(state[moment], specs) for moment in MOMENTS}
    return {
        "params": jax.tree.map(lambda leaf: leaf[None], params),
        "state": {**moments, "count": state["count"][None]},
        "norm": norm[None],
    }


def wrap_adamw(function: Any, case: Case[StepSizes]) -> Wrapped:
    specs, inputs, results = _signature(case)
    axes, config = axes_of(case), config_of(case)

    def local(params, state, gradients):
        arguments = varying(params, axes), state
        result = function(arguments[0], gradients, state, specs, axis_given(case), config)
        params, state, norm = output_checks.tuple_of("sharded_adamw", result, "params", "state", "norm")
        _check_update("sharded_adamw", params, state, norm, arguments, case)
        return {"values": _results(params, state, norm, specs, axes)}

    inputs["gradients"] = (inputs["params"][0], specs)
    return on_mesh(local, case, inputs, {"values": results}, {"params": "state", "state": "state"})


def wrap_step(name: str, microbatches: bool) -> Callable[[Any, Case[StepSizes]], Wrapped]:
    """Wrap a step, which is taken ``steps`` times.

    The gradient that the step used is read off its first moments, which are linear in it, and its clipping is undone
    with the norm that the step returns: this reveals a wrong scale, which Adam would hide.
    """

    def wrap(function: Any, case: Case[StepSizes]) -> Wrapped:
        specs, inputs, results = _signature(case)
        axes, config, model = axes_of(case), config_of(case), model_of(case)
        extra_arguments: Any = (case.sizes.num_microbatches,) if microbatches else ()

        def one_step(carry, rows):
            result = function(*carry, specs, rows, model, axis_given(case), *extra_arguments, config)
            params, state, loss, norm = output_checks.tuple_of(name, result, "params", "state", "loss", "norm")
            _check_update(name, params, state, norm, carry, case)
            output_checks.scalar(name, loss, "the mean loss")
            after = varying((params, state, loss, norm), axes)
            clipped = jnp.maximum(1, norm / config.clip) / (1 - config.beta1)
            gradients = jax.tree.map(lambda new, old: (new - config.beta1 * old) * clipped, state["m"], carry[1]["m"])
            return after[:2], (*after[2:], varying(gradients, axes))

        def local(params, state, batches):
            carry = varying((params, state), axes)
            if case.sizes.steps == 1:
                carry, step_results = one_step(carry, jax.tree.map(lambda rows: rows[0], batches))
                step_results = jax.tree.map(lambda leaf: leaf[None], step_results)
            else:
                carry, step_results = lax.scan(one_step, carry, batches)
            (after, state), (losses, norms, gradients) = carry, step_results
            values = _results(after, state, norms, specs, axes) | {"loss": losses[None]}
            return {"values": values, "gradients": _copies(jax.tree.map(lambda g: g.sum(0), gradients), specs)}

        rows = case.sizes.rows * devices_of(case)
        inputs["batch"] = (batch_shapes(case.sizes, rows, case.sizes.steps), P(None, axes))
        outputs = {"values": {**results, "loss": P(axes)}, "gradients": results["state"]["m"]}
        return on_mesh(local, case, inputs, outputs, {"params": "state", "state": "state"})

    return wrap


_STEP = "(params, state, specs, batch, model, axis_name, {}config)"
WRAPPINGS = (
    Wrapping("shard_optimizer_state", "(params, axis_name, min_size)", wrap_state, StateLeaves),
    Wrapping("global_norm", "(tree, specs)", wrap_norm, NormLeaves),
    Wrapping("sharded_adamw", "(params, gradients, state, specs, axis_name, config)", wrap_adamw, StepSizes),
    Wrapping("zero1_step", _STEP.format(""), wrap_step("zero1_step", microbatches=False), StepSizes),
    Wrapping("zero2_step", _STEP.format("num_microbatches, "), wrap_step("zero2_step", microbatches=True), StepSizes),
)
