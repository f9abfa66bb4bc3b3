"""What the functions of ``tp_transformer`` are given, and the form of what they give."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract import forms
from autograder.contract.cases import varying
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping
from course.layout import tensor_specs
from course.mesh import abstract_mesh
from course.model import Model, split_heads, transformer

SEQUENTIAL, PARALLEL = "tp_transformer_block", "parallel_transformer_block"


def tensor_of(case: Case) -> str:
    """The axis that features are split over: ``tensor`` where there is one, else the last."""
    return "tensor" if "tensor" in case.mesh else list(case.mesh)[-1]


def parts_of(case: Case) -> int:
    """Its size: in how many parts features and sequences are split."""
    return case.mesh[tensor_of(case)]


def others_of(case: Case) -> tuple[str, ...]:
    """The axes along which the rows of a batch are split: all others."""
    return tuple(axis for axis in case.mesh if axis != tensor_of(case))


def groups_of(case: Case) -> int:
    """How many devices there are for each place on the tensor axis, each with sequences of its own."""
    return math.prod(case.mesh[axis] for axis in others_of(case))


def rows_of(case: Case) -> int:
    """Sequences in the whole batch."""
    return case.sizes["rows"] * groups_of(case)


@lru_cache(maxsize=64)
def model_of(sizes: tuple[tuple[str, int], ...]) -> Model:
    """The course's model on one device, by a case's sizes."""
    s = dict(sizes)
    return transformer(width=s["width"], hidden=s["hidden"], num_layers=s["num_layers"], num_heads=s["num_heads"],
                       vocab=s["vocab"], max_seq=s["max_seq"], dropout=s["dropout"] / 100,
                       parallel=bool(s["parallel"]))  # fmt: skip


def params_of(case: Case) -> Any:
    """Shapes of its parameters, heads apart."""
    return _params_of(tuple(case.sizes.items()))


@lru_cache(maxsize=64)
def _params_of(sizes: tuple[tuple[str, int], ...]) -> Any:
    def init():
        params = model_of(sizes).init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], dict(sizes)["num_heads"])
        return params

    return jax.eval_shape(init)


def layer_of(case: Case) -> Any:
    """Shapes of one layer's."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params_of(case)["layers"])


# How activations travel, as a block is told: by gathers and scatters, or, in some cases, by sums of everything.
def gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel


def matmul_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    return lax.psum_scatter(x @ kernel, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


def gather_matmul_by_sum(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    size, rows = lax.axis_size(axis_name), x.shape[-2]
    each = [jnp.where(lax.axis_index(axis_name) == place, x, 0) for place in range(size)]
    return lax.psum(jnp.concatenate(each, axis=-2), axis_name).reshape(*x.shape[:-2], size * rows, -1) @ kernel


def matmul_scatter_by_sum(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    rows = x.shape[-2] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(lax.psum(x @ kernel, axis_name), lax.axis_index(axis_name) * rows, rows, -2)


def _given(case: Case) -> tuple[Any, Any]:
    """The two functions that a block or a loss is handed."""
    by_sum = gather_matmul_by_sum, matmul_scatter_by_sum
    return by_sum if case.sizes.get("by_sum") else (gather_matmul, matmul_scatter)


def is_split(params: Any) -> Any:
    """Whether each leaf is split over the tensor axis."""
    return jax.tree.map(lambda spec: "tensor" in spec, tensor_specs(params, "tensor"))


def _held_specs(params: Any, case: Case) -> Any:
    """Of results with a leading dim for what each group holds, and one more for copies of a leaf that is whole."""
    rows, axis = others_of(case) or None, tensor_of(case)
    return jax.tree.map(lambda spec: P(rows, *spec) if axis in spec else P(rows, axis), tensor_specs(params, axis))


def _hold(tree: Any) -> Any:
    """A device's part with these dims: see ``_held_specs``."""
    return jax.tree.map(lambda leaf, split: leaf[None] if split else leaf[None, None], tree, is_split(tree))


def _on_mesh(local: Callable[..., Any], case: Case, in_specs: dict[str, Any], results: dict[str, Any]) -> Any:
    """What every device runs, as one function of whole arrays."""

    def program(**inputs):
        specs = tuple(in_specs.values())
        mapped = jax.shard_map(local, mesh=abstract_mesh(case.mesh), in_specs=specs, out_specs=results)
        return mapped(*inputs.values())

    return program


def wrap_block(name: str, function: Any, case: Case) -> Wrapped:
    """Output and gradients of every device; each returns its own share of the gradients of leaves that are whole."""
    axis, rows, shapes = tensor_of(case), others_of(case) or None, layer_of(case)
    block = P(rows, axis)
    results = {"values": block, "gradients": {"params": _held_specs(shapes, case), "x": block}}

    def local(params, x, key, upstream):
        key = jax.random.wrap_key_data(key[0])

        def run(params, x):
            y = function(params, x, key, case.sizes["dropout"] / 100, *_given(case), axis)
            if not hasattr(y, "shape"):
                raise Mismatch(f"{name} returned {forms.describe(y)}, expected what it adds to x and x, like x")
            forms.same_shapes(name, {"y": y}, {"y": x}, case)
            return varying(y, case.mesh)

        values, back = jax.vjp(run, varying(params, case.mesh), x)
        of_params, of_x = back(upstream)
        return {"values": values, "gradients": {"params": _hold(of_params), "x": of_x}}

    in_specs = {"params": tensor_specs(shapes, axis), "x": block, "key": P(rows), "upstream": block}
    x = jax.ShapeDtypeStruct((rows_of(case), case.sizes["seq"], case.sizes["width"]), np.float32)
    key = jax.ShapeDtypeStruct((groups_of(case), 2), np.uint32)
    inputs = {"params": shapes, "x": x, "key": key, "upstream": x}
    roles = {"params": "state", "key": "key"}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, roles)


def _tokens(case: Case, *first: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*first, rows_of(case), case.sizes["seq"]), np.int32)


def wrap_embed(function: Any, case: Case) -> Wrapped:
    """Activations and gradients of every device; each returns its own share of the positions' gradient."""
    axis, rows, shapes = tensor_of(case), others_of(case) or None, params_of(case)["embed"]
    block, name = P(rows, axis), "vocab_parallel_embed"
    results = {"values": block, "gradients": _held_specs(shapes, case)}
    expected = (case.sizes["rows"], case.sizes["seq"] // parts_of(case), case.sizes["width"])

    def local(params, tokens, upstream):
        def run(params):
            x = function(params, tokens, axis)
            if not hasattr(x, "shape"):
                raise Mismatch(f"{name} returned {forms.describe(x)}, expected activations of this device's rows")
            forms.same_shapes(name, {"x": x}, {"x": jax.ShapeDtypeStruct(expected, np.float32)}, case)
            return varying(x, case.mesh)

        values, back = jax.vjp(run, varying(params, case.mesh))
        return {"values": values, "gradients": _hold(back(upstream)[0])}

    in_specs = {"params": tensor_specs(shapes, axis), "tokens": P(rows), "upstream": block}
    tokens = _tokens(case)
    upstream = jax.ShapeDtypeStruct((*tokens.shape, case.sizes["width"]), np.float32)
    inputs = {"params": shapes, "tokens": tokens, "upstream": upstream}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, {"params": "state"})


def wrap_loss(function: Any, case: Case) -> Wrapped:
    """Loss and gradients of every device; each returns its own share of the gradient of the norm."""
    axis, others, shapes = tensor_of(case), others_of(case), params_of(case)["head"]
    rows, name = others or None, "vocab_parallel_loss"
    results = {"values": P((*others, axis)), "gradients": {"params": _held_specs(shapes, case), "x": P(rows, axis)}}

    def local(params, x, targets, upstream):
        def run(params, x):
            loss = function(params, x, targets, _given(case)[0], axis)
            if not hasattr(loss, "shape") or loss.shape != ():
                raise Mismatch(f"{name} returned {forms.describe(loss)}, expected a scalar, the mean over all tokens")
            return upstream * loss, loss

        differentiated = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)
        (_, loss), (of_params, of_x) = differentiated(varying(params, case.mesh), x)
        return {"values": varying(loss, case.mesh)[None], "gradients": {"params": _hold(of_params), "x": of_x}}

    in_specs = {"params": tensor_specs(shapes, axis), "x": P(rows, axis), "targets": P(rows), "upstream": P()}
    targets = _tokens(case)
    x = jax.ShapeDtypeStruct((*targets.shape, case.sizes["width"]), np.float32)
    upstream = jax.ShapeDtypeStruct((), np.float32)
    inputs = {"params": shapes, "x": x, "targets": targets, "upstream": upstream}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, {"params": "state"})


def wrap_step(function: Any, case: Case) -> Wrapped:
    """The step over so many batches; every holder of a leaf returns its copy, so that copies which drift are seen."""
    axis, others, shapes = tensor_of(case), others_of(case), params_of(case)
    rows, specs, held = others or None, tensor_specs(shapes, axis), _held_specs(shapes, case)
    results = {"values": {"loss": P((*others, axis)), "params": held}, "gradients": held}

    def local(params, batch, key, learning_rate):
        key = jax.random.wrap_key_data(key)

        def one(params, step):
            number, part = step
            own, rate = jax.random.fold_in(key, number), case.sizes["dropout"] / 100
            parallel = bool(case.sizes["parallel"])
            found = function(params, specs, part, own, rate, parallel, *others, axis, learning_rate)
            return varying(forms.state_and_loss("tp_transformer_step", "params", found, params, case), case.mesh)

        before = varying(params, case.mesh)
        if case.sizes["steps"] == 1:
            after, loss = one(before, (0, jax.tree.map(lambda leaf: leaf[0], batch)))
            losses = loss[None]
        else:
            after, losses = lax.scan(one, before, (np.arange(case.sizes["steps"], dtype=np.int32), batch))
        gradients = jax.tree.map(lambda old, new: (old - new) / learning_rate, before, after)
        return {"values": {"loss": losses[None], "params": _hold(after)}, "gradients": _hold(gradients)}

    in_specs = {"params": specs, "batch": P(None, rows), "key": P(), "learning_rate": P()}
    tokens = _tokens(case, case.sizes["steps"])
    inputs = {
        "params": shapes,
        "batch": {"inputs": tokens, "targets": tokens},
        "key": jax.ShapeDtypeStruct((2,), np.uint32),
        "learning_rate": jax.ShapeDtypeStruct((), np.float32),
    }
    roles = {"params": "state", "key": "key"}
    return Wrapped(_on_mesh(local, case, in_specs, results), inputs, in_specs, results, roles)


def _of_block(name: str) -> Wrapping:
    signature = "(params, x, key, rate, gather_matmul, matmul_scatter, axis_name)"
    return Wrapping(name, signature, lambda function, case: wrap_block(name, function, case))


WRAPPINGS = (
    _of_block(SEQUENTIAL),
    _of_block(PARALLEL),
    Wrapping("vocab_parallel_embed", "(params, tokens, axis_name)", wrap_embed),
    Wrapping("vocab_parallel_loss", "(params, x, targets, gather_matmul, axis_name)", wrap_loss),
    Wrapping(
        "tp_transformer_step",
        "(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate)",
        wrap_step,
    ),
)
