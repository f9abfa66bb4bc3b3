"""Inputs of the functions of ``looping_pipeline``, and the form of their results.

Learners compute which layers a stage has, and at which ticks it works, so questions and layer numbers come with the
case.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes, Sizes
from autograder.contract.case_builders import (
    KEY,
    LEARNING_RATE,
    batch_shapes,
    build_model,
    data_of,
    param_shapes,
    pipe_of,
    pipelines_of,
    stages_of,
)
from autograder.contract.output_checks import describe, same_shapes, state_and_loss
from autograder.contract.value_tasks import wrap_questions
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, sgd_steps
from course.mesh import varying
from course.model import Model, layer_key

# Largest size in bytes of all answers of a case as text.
MOST = 8192


@dataclass(frozen=True, kw_only=True)
class Stages(Sizes):
    """The questions for ``layers_of_stage``; ``seed`` draws them, -1 selects the public ones."""

    num_stages: int
    seed: int = -1


@dataclass(frozen=True, kw_only=True)
class Schedule(Sizes):
    """The questions for ``loop_position``."""

    num_stages: int
    num_microbatches: int
    num_repeats: int


@dataclass(frozen=True, kw_only=True)
class Looped(ModelSizes):
    """A model of ``layers_per_stage`` for each stage and repeat; ``rows`` is the size of a microbatch.

    ``gradients`` makes ``execute_looping_pipeline`` return gradients; ``steps`` and ``rate_scale`` describe training:
    the number of steps, and the factor of the drawn learning rate.
    """

    num_microbatches: int
    num_repeats: int
    rows: int
    layers_per_stage: int = 1
    gradients: bool = True
    steps: int = 1
    rate_scale: float = 1.0


def whole_model(case: Case[Looped]) -> ModelSizes:
    """The sizes of the model, with a group of layers for each stage and repeat."""
    s = case.sizes
    return replace(s.model, num_layers=stages_of(case) * s.num_repeats * s.layers_per_stage)


def model_of(case: Case[Looped]) -> Model:
    """The model of the sizes from ``whole_model``."""
    return build_model(whole_model(case))


def params_of(case: Case[Looped]) -> tuple[Any, Any]:
    """Shapes and specs of the parameters: layers are ``[num_repeats, num_stages@pipe, layers_per_stage, ...]``."""
    whole, repeats = param_shapes(whole_model(case)), case.sizes.num_repeats
    stack = (repeats, stages_of(case), case.sizes.layers_per_stage)
    layers = jax.tree.map(lambda s: jax.ShapeDtypeStruct((*stack, *s.shape[1:]), s.dtype), whole["layers"])
    shapes = {**whole, "layers": layers}
    spec = {"embed": P(), "layers": P(None, pipe_of(case)), "head": P()}
    return shapes, {part: jax.tree.map(lambda _, part=part: spec[part], shapes[part]) for part in shapes}


def wrap_execute(function: Any, case: Case[Looped]) -> Wrapped:
    """The last stage's outputs, and the cotangents of each stage's layers and inputs; other stages return zeros."""
    pipe, data, s = pipe_of(case), data_of(case), case.sizes
    shapes, specs = params_of(case)

    def local(layers, microbatches, upstream, key):
        layers = jax.tree.map(lambda leaf: leaf[:, 0], layers)
        layers, microbatches, key = varying((layers, microbatches, key), case.mesh)

        def run(layers, microbatches):
            result = function(_stage(layers, key, case), microbatches, s.num_repeats, pipe)
            same_shapes("execute_looping_pipeline", result, microbatches, case)
            last = lax.axis_index(pipe) == stages_of(case) - 1
            return varying(jnp.where(last, result, 0), case.mesh)

        if not s.gradients:
            return {"values": run(layers, microbatches)[None]}
        outputs, backward = jax.vjp(run, layers, microbatches)
        of_layers, of_inputs = backward(varying(upstream, case.mesh))
        gradients = {"layers": jax.tree.map(lambda g: g[None, :, None], of_layers), "microbatches": of_inputs[None]}
        return {"values": outputs[None], "gradients": gradients}

    rows, stacked = P(None, data), P(pipe, None, data)
    results: dict[str, Any] = {"values": stacked}
    if s.gradients:
        of_layers = jax.tree.map(lambda _: P(data, None, pipe), specs["layers"])
        results["gradients"] = {"layers": of_layers, "microbatches": stacked}
    shape = (s.num_microbatches, s.rows * pipelines_of(case), s.width)
    activations = jax.ShapeDtypeStruct(shape, np.float32)
    inputs = {
        "layers": (shapes["layers"], specs["layers"]),
        "microbatches": (activations, rows),
        "upstream": (activations, rows),
        "key": (KEY, P()),
    }
    return on_mesh(local, case, inputs, results, {"layers": "state"}, squeezed=(pipe,))


def _stage(layers: Any, key: jax.Array, case: Case[Looped]) -> Any:
    """The stage passed to the function: this device's layers of a repeat, with dropout as on one device.

    ``layers_apart`` is the distance between the indices of their first layers, from repeat to repeat and from stage to
    stage. In a forward pass, the result for a microbatch or repeat that does not exist is NaN.
    """
    model, s = model_of(case), case.sizes
    shape, apart = (s.rows, s.width), case.given.get("layers_apart", {})

    def stage(x, microbatch, repeat):
        for name, number in (("microbatch", microbatch), ("repeat", repeat)):
            if jnp.shape(number) != () or not jnp.issubdtype(jnp.result_type(number), jnp.integer):
                raise Mismatch(f"stage was called with {describe(number)} as its {name}, expected one integer")
        if jnp.shape(x) != shape:
            raise Mismatch(f"stage was called with {describe(x)} as x, expected one microbatch, {list(shape)}")
        first = repeat * apart["repeats"] + lax.axis_index(pipe_of(case)) * apart["stages"]

        def layer(x, layer_and_index):
            dropout_key = layer_key(jax.random.wrap_key_data(key), microbatch, first + layer_and_index[1])
            return model.layer(layer_and_index[0], x, dropout_key), None

        weights = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, repeat, keepdims=False), layers)
        y = lax.scan(layer, x, (weights, jnp.arange(s.layers_per_stage)))[0]
        known = (microbatch >= 0) & (microbatch < s.num_microbatches) & (repeat >= 0) & (repeat < s.num_repeats)
        return y if s.gradients else jnp.where(known, y, jnp.nan)

    return stage


def rows_of(case: Case[Looped]) -> int:
    """Number of rows of a batch, over all pipelines."""
    return case.sizes.rows * case.sizes.num_microbatches * pipelines_of(case)


_STATE = {"params": "state"}


def wrap_step(function: Any, case: Case[Looped]) -> Wrapped:
    """The steps over several batches. Every device returns its copy, to detect copies that drift apart."""
    pipe, data, model = pipe_of(case), data_of(case), model_of(case)
    shapes, specs = params_of(case)
    each = P((data, pipe))
    place = {"layers": P(data, None, pipe), "embed": each, "head": each}
    param_specs = {part: jax.tree.map(lambda _, part=part: place[part], shapes[part]) for part in shapes}

    def with_device_dims(params):
        whole = {part: jax.tree.map(lambda leaf: leaf[None], params[part]) for part in ("embed", "head")}
        return {**whole, "layers": jax.tree.map(lambda leaf: leaf[None, :, None], params["layers"])}

    def local(params, batch, key, learning_rate):
        def one_step(params, step_inputs):
            rows, key = step_inputs
            arguments = (model, case.sizes.num_microbatches, pipe, data, learning_rate)
            result = function(dict(params), rows, jax.random.wrap_key_data(key), *arguments)
            return varying(state_and_loss("looping_train_step", "params", result, params, case), case.mesh)

        before = varying({**params, "layers": jax.tree.map(lambda leaf: leaf[:, 0], params["layers"])}, case.mesh)
        after, losses, gradients = sgd_steps(one_step, before, (batch, key), learning_rate)
        return {
            "values": {"loss": losses[None], "params": with_device_dims(after)},
            "gradients": with_device_dims(gradients),
        }

    steps = case.sizes.steps
    inputs = {
        "params": (shapes, specs),
        "batch": (batch_shapes(case.sizes, rows_of(case), steps, masked=True), P(None, data)),
        "key": (jax.ShapeDtypeStruct((steps, *KEY.shape), KEY.dtype), P()),
        "learning_rate": (LEARNING_RATE, P()),
    }
    results = {"values": {"loss": each, "params": param_specs}, "gradients": param_specs}
    return on_mesh(local, case, inputs, results, _STATE, squeezed=(pipe,))


_LAYERS = "(stage, num_stages, num_repeats, num_layers)"
_POSITION = "(tick, stage, num_stages, num_microbatches, num_repeats)"
_wrap_numbers = partial(wrap_questions, expected="numbers for most arguments", most=MOST)
_STEP = "(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate)"
WRAPPINGS = (
    Wrapping("layers_of_stage", _LAYERS, partial(_wrap_numbers, "layers_of_stage"), Stages),
    Wrapping("loop_position", _POSITION, partial(_wrap_numbers, "loop_position"), Schedule),
    Wrapping("execute_looping_pipeline", "(stage, microbatches, num_repeats, axis_name)", wrap_execute, Looped),
    Wrapping("looping_train_step", _STEP, wrap_step, Looped),
)
