"""The functions of ``transformer_3d`` as their tracer wraps them: their inputs, and the form of their results."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.transformer_3d.wrapping.choice import Models, wrap_choice
from autograder.chapters.transformer_3d.wrapping.layers import wrap_layers, wrap_stage, wrap_whole
from autograder.chapters.transformer_3d.wrapping.model import (
    Sizes,
    axes_of,
    given_specs,
    options_of,
    rows_of,
    stacked_of,
)
from autograder.contract.case import Case
from autograder.contract.case_builders import KEY, LEARNING_RATE, batch_shapes, params_by_head
from autograder.contract.output_checks import check_spec, same_tree, scalar, state_and_loss, tuple_of
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, with_own_specs
from course.mesh import varying, varying_axes
from course.program.program import path_name

_ROLES = {"params": "state", "key": "key"}


def wrap_init(function: Any, case: Case[Sizes]) -> Wrapped:
    """The parts, assembled by the specs that come with them."""
    args = case.sizes.num_repeats, case.sizes.min_size, *axes_of(case)

    def local(params):
        result = tuple_of("init_3d", function(params, *args), "parts", "specs")
        parts = same_tree("parts", result[0], params)
        specs = same_tree("specs", result[1], params, is_leaf=lambda s: isinstance(s, P))
        leaves = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)), jax.tree.leaves(stacked_of(case))
        for (path, part), spec, like in zip(jax.tree.leaves_with_path(parts), *leaves, strict=True):
            check_spec(f"leaf {path_name('', path)} {case.place}", part, spec, axes_of(case), len(like.shape))
        return parts, specs

    return with_own_specs(local, case, params_by_head(case))


def wrap_forward(function: Any, case: Case[Sizes]) -> Wrapped:
    """Loss and gradient; every device returns its copy, to detect copies that differ."""
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

    inputs = {
        "params": (stacked_of(case), specs),
        "batch": (batch_shapes(case.sizes, rows_of(case)), P(data)),
        "key": (KEY, P()),
        "upstream": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, _ROLES)


def _same_in_a_pipeline(loss: Any, case: Case[Sizes]) -> Any:
    _, pipe, tensor = axes_of(case)
    scalar("forward_3d", loss, "the mean over a pipeline's rows")
    differs = varying_axes(loss) & {pipe, tensor}
    if differs:
        raise Mismatch(
            f"forward_3d returned a loss that is typed as different on each device of {' and '.join(sorted(differs))}: "
            "differentiating it differentiates several losses. Which collective returns one loss that all share?"
        )
    return loss


def wrap_step(function: Any, case: Case[Sizes]) -> Wrapped:
    """The steps over several batches; every device returns its copy, to detect copies that drift apart."""
    axes, specs, each = axes_of(case), given_specs(case), P(tuple(case.mesh))

    def local(params, batch, key, learning_rate, largest_norm):
        key = jax.random.wrap_key_data(key)

        def step(params, numbered):
            number, rows = numbered
            own = jax.random.fold_in(key, number)
            result = function(params, specs, rows, own, options_of(case), *axes, learning_rate, largest_norm)
            return varying(state_and_loss("train_step_3d", "params", result, params, case), case.mesh)

        numbers = np.arange(case.sizes.steps, dtype=np.int32)
        before = varying(params, case.mesh)
        after, losses = lax.scan(step, before, (numbers, batch))
        gradients = jax.tree.map(lambda old, new: ((old - new) / learning_rate)[None], before, after)
        resident = jax.tree.map(lambda leaf: leaf[None], after)
        return {"values": {"loss": losses[None], "params": resident}, "gradients": gradients}

    inputs = {
        "params": (stacked_of(case), specs),
        "batch": (batch_shapes(case.sizes, rows_of(case), case.sizes.steps), P(None, axes[0])),
        "key": (KEY, P()),
        "learning_rate": (LEARNING_RATE, P()),
        "largest_norm": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, _ROLES)


_OPTIONS, _AXES = "(params, specs, batch, key, options", "data_axis, pipe_axis, tensor_axis"
WRAPPINGS = (
    Wrapping("init_3d", f"(params, num_repeats, min_size, {_AXES})", wrap_init, Sizes),
    Wrapping("whole_weights", "(parts, specs, dtype, data_axis, shared_axes)", wrap_whole, Sizes),
    Wrapping("stage_3d", "(weights, x, key, microbatch, first, options, tensor_axis)", wrap_stage, Sizes),
    Wrapping("layers_3d", f"(parts, specs, x, key, options, {_AXES})", wrap_layers, Sizes),
    Wrapping("forward_3d", f"{_OPTIONS}, {_AXES})", wrap_forward, Sizes),
    Wrapping("train_step_3d", f"{_OPTIONS}, {_AXES}, learning_rate, largest_norm)", wrap_step, Sizes),
    Wrapping("choose_mesh", "(sizes, num_devices, batch, estimate)", wrap_choice, Models),
)
