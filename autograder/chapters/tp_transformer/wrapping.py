"""Inputs of the functions of ``tp_transformer``, and the form of their results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes
from autograder.contract.case_builders import (
    KEY,
    LEARNING_RATE,
    batch_shapes,
    groups_of,
    others_of,
    params_by_head,
    parts_of,
    tensor_of,
)
from autograder.contract.output_checks import same_shapes, scalar, state_and_loss
from autograder.contract.wrapping import Wrapped, Wrapping, on_mesh, sgd_steps
from course.layout import tensor_specs
from course.mesh import varying

SEQUENTIAL, PARALLEL = "tp_transformer_block", "parallel_transformer_block"


@dataclass(frozen=True, kw_only=True)
class Sizes(ModelSizes):
    """A Transformer over ``data`` x ``tensor``.

    Attributes:
        rows: Sequences of each group of devices.
        by_sum: The functions passed to a block sum everything instead of gathering and scattering.
        offset: Added to all logits.
        reach: How far the logits of one part of the vocabulary are raised for some tokens, and lowered for others.
        steps: Number of steps.
        rate_scale: The factor of the drawn learning rate.
    """

    rows: int
    by_sum: bool = False
    offset: int = 0
    reach: int = 0
    steps: int = 1
    rate_scale: float = 2.0


def rows_of(case: Case[Sizes]) -> int:
    """Number of sequences in the whole batch."""
    return case.sizes.rows * groups_of(case)


def layer_of(case: Case[Sizes]) -> Any:
    """Shapes of one layer's parameters."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params_by_head(case)["layers"])


# How a block communicates activations: by gathers and scatters, or, in some cases, by sums of everything.
def gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel


def matmul_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    return lax.psum_scatter(x @ kernel, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


def gather_matmul_by_sum(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    size, rows = lax.axis_size(axis_name), x.shape[-2]
    pieces = [jnp.where(lax.axis_index(axis_name) == place, x, 0) for place in range(size)]
    return lax.psum(jnp.concatenate(pieces, axis=-2), axis_name).reshape(*x.shape[:-2], size * rows, -1) @ kernel


def matmul_scatter_by_sum(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    rows = x.shape[-2] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(lax.psum(x @ kernel, axis_name), lax.axis_index(axis_name) * rows, rows, -2)


def _collectives_of(case: Case[Sizes]) -> tuple[Any, Any]:
    """The two functions passed to a block or a loss."""
    by_sum = gather_matmul_by_sum, matmul_scatter_by_sum
    return by_sum if case.sizes.by_sum else (gather_matmul, matmul_scatter)


def is_split(params: Any) -> Any:
    """A tree of flags: True if the leaf is split over the tensor axis."""
    return jax.tree.map(lambda spec: "tensor" in spec, tensor_specs(params, "tensor"))


def _result_specs(params: Any, case: Case[Sizes]) -> Any:
    """Specs of results with a leading dim for each group, and another for copies of a whole leaf."""
    rows, axis = others_of(case) or None, tensor_of(case)
    return jax.tree.map(lambda spec: P(rows, *spec) if axis in spec else P(rows, axis), tensor_specs(params, axis))


def _with_leading_dims(tree: Any) -> Any:
    """A device's part with these dims: see ``_result_specs``."""
    return jax.tree.map(lambda leaf, split: leaf[None] if split else leaf[None, None], tree, is_split(tree))


def wrap_block(name: str, function: Any, case: Case[Sizes]) -> Wrapped:
    """Output and gradients of every device; each returns its own share of the gradients of whole leaves."""
    axis, rows, shapes = tensor_of(case), others_of(case) or None, layer_of(case)
    block = P(rows, axis)
    results = {"values": block, "gradients": {"params": _result_specs(shapes, case), "x": block}}

    def local(params, x, key, upstream):
        key = jax.random.wrap_key_data(key[0])

        def run(params, x):
            y = function(params, x, key, case.sizes.dropout, *_collectives_of(case), axis)
            return varying(same_shapes(name, y, x, case), case.mesh)

        values, back = jax.vjp(run, varying(params, case.mesh), x)
        of_params, of_x = back(upstream)
        return {"values": values, "gradients": {"params": _with_leading_dims(of_params), "x": of_x}}

    x = jax.ShapeDtypeStruct((rows_of(case), case.sizes.seq, case.sizes.width), np.float32)
    key = jax.ShapeDtypeStruct((groups_of(case), 2), np.uint32)
    inputs = {
        "params": (shapes, tensor_specs(shapes, axis)),
        "x": (x, block),
        "key": (key, P(rows)),
        "upstream": (x, block),
    }
    return on_mesh(local, case, inputs, results, {"params": "state", "key": "key"})


def _tokens(case: Case[Sizes]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows_of(case), case.sizes.seq), np.int32)


def wrap_embed(function: Any, case: Case[Sizes]) -> Wrapped:
    """Activations and gradients of every device; each returns its own share of the positions' gradient."""
    axis, rows, shapes = tensor_of(case), others_of(case) or None, params_by_head(case)["embed"]
    block, name = P(rows, axis), "vocab_parallel_embed"
    results = {"values": block, "gradients": _result_specs(shapes, case)}
    shape = (case.sizes.rows, case.sizes.seq // parts_of(case), case.sizes.width)
    like = jax.ShapeDtypeStruct(shape, np.float32)

    def local(params, tokens, upstream):
        def run(params):
            return varying(same_shapes(name, function(params, tokens, axis), like, case), case.mesh)

        values, back = jax.vjp(run, varying(params, case.mesh))
        return {"values": values, "gradients": _with_leading_dims(back(upstream)[0])}

    tokens = _tokens(case)
    upstream = jax.ShapeDtypeStruct((*tokens.shape, case.sizes.width), np.float32)
    specs = tensor_specs(shapes, axis)
    inputs = {"params": (shapes, specs), "tokens": (tokens, P(rows)), "upstream": (upstream, block)}
    return on_mesh(local, case, inputs, results, {"params": "state"})


def wrap_loss(function: Any, case: Case[Sizes]) -> Wrapped:
    """Loss and gradients of every device; each returns its own share of the gradient of the norm."""
    axis, others, shapes = tensor_of(case), others_of(case), params_by_head(case)["head"]
    rows, name = others or None, "vocab_parallel_loss"
    results = {"values": P((*others, axis)), "gradients": {"params": _result_specs(shapes, case), "x": P(rows, axis)}}

    def local(params, x, targets, upstream):
        def run(params, x):
            loss = function(params, x, targets, _collectives_of(case)[0], axis)
            scalar(name, loss, "the mean over all tokens")
            return upstream * loss, loss

        differentiated = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
        (_, loss), (of_params, of_x) = differentiated(varying(params, case.mesh), x)
        return {
            "values": varying(loss, case.mesh)[None],
            "gradients": {"params": _with_leading_dims(of_params), "x": of_x},
        }

    targets = _tokens(case)
    x = jax.ShapeDtypeStruct((*targets.shape, case.sizes.width), np.float32)
    inputs = {
        "params": (shapes, tensor_specs(shapes, axis)),
        "x": (x, P(rows, axis)),
        "targets": (targets, P(rows)),
        "upstream": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, results, {"params": "state"})


def wrap_step(function: Any, case: Case[Sizes]) -> Wrapped:
    """The step over several batches; every holder of a leaf returns its copy, to detect copies that drift apart."""
    axis, others, shapes = tensor_of(case), others_of(case), params_by_head(case)
    rows, specs, result_specs = others or None, tensor_specs(shapes, axis), _result_specs(shapes, case)
    results = {"values": {"loss": P((*others, axis)), "params": result_specs}, "gradients": result_specs}

    def local(params, batch, key, learning_rate):
        key = jax.random.wrap_key_data(key)

        def step(params, numbered):
            number, part = numbered
            own, rate = jax.random.fold_in(key, number), case.sizes.dropout
            result = function(params, specs, part, own, rate, case.sizes.parallel, *others, axis, learning_rate)
            return varying(state_and_loss("tp_transformer_step", "params", result, params, case), case.mesh)

        numbers = np.arange(case.sizes.steps, dtype=np.int32)
        after, losses, gradients = sgd_steps(step, varying(params, case.mesh), (numbers, batch), learning_rate)
        return {
            "values": {"loss": losses[None], "params": _with_leading_dims(after)},
            "gradients": _with_leading_dims(gradients),
        }

    batch = batch_shapes(case.sizes, rows_of(case), case.sizes.steps)
    inputs = {
        "params": (shapes, specs),
        "batch": (batch, P(None, rows)),
        "key": (KEY, P()),
        "learning_rate": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, results, {"params": "state", "key": "key"})


_BLOCK = "(params, x, key, rate, gather_matmul, matmul_scatter, axis_name)"
_STEP = "(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate)"
WRAPPINGS = (
    Wrapping(SEQUENTIAL, _BLOCK, partial(wrap_block, SEQUENTIAL), Sizes),
    Wrapping(PARALLEL, _BLOCK, partial(wrap_block, PARALLEL), Sizes),
    Wrapping("vocab_parallel_embed", "(params, tokens, axis_name)", wrap_embed, Sizes),
    Wrapping("vocab_parallel_loss", "(params, x, targets, gather_matmul, axis_name)", wrap_loss, Sizes),
    Wrapping("tp_transformer_step", _STEP, wrap_step, Sizes),
)
