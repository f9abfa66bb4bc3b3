"""Inputs of the functions of ``sequence_parallel``, and the form of their results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes, Sizes
from autograder.contract.case_builders import KEY, groups_of, others_of, params_by_head, parts_of, tensor_of
from autograder.contract.output_checks import same_shapes
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh
from course.layout import tensor_specs
from course.mesh import varying, varying_axes

ENTER, LEAVE = "enter_tensor_region", "leave_tensor_region"
BLOCK, SELECTIVE, ULYSSES = "sp_block", "selective_recompute", "ulysses_attention"


@dataclass(frozen=True, kw_only=True)
class Region(Sizes):
    """Activations ``[rows, seq, width]`` of each group of devices: in parts if ``split``, else whole."""

    rows: int
    seq: int
    width: int
    split: bool = True


@dataclass(frozen=True, kw_only=True)
class Stack(ModelSizes):
    """Layers of a Transformer, and the sequences of each group of devices.

    The ``attend`` that ``sp_block`` is passed returns ``gain`` times its attention, to tell it from any other.
    """

    rows: int
    gain: int = 1


@dataclass(frozen=True, kw_only=True)
class Heads(Sizes):
    """Attention of ``rows`` sequences on each group of devices, ``chunk`` queries at a time.

    With ``large``, the exponentials of scores overflow.
    """

    rows: int
    seq: int
    num_heads: int
    kv_heads: int
    head_dim: int
    chunk: int
    large: bool = False


def wrap_region(name: str, function: Any, case: Case[Region]) -> Wrapped:
    """Values and gradients, each device's own: ``[tensor, rows, seq or seq/tensor, width]``."""
    s, axis, others, n = case.sizes, tensor_of(case), others_of(case) or None, parts_of(case)
    shape, own = (s.rows * groups_of(case), s.seq, s.width), P(axis, others)
    outside = jax.ShapeDtypeStruct(shape, np.float32), P(others, axis) if s.split else P(others)
    inside = jax.ShapeDtypeStruct((n, *shape), np.float32), own
    input_array, output_array = (outside, inside) if name == ENTER else (inside, outside)
    like = jax.ShapeDtypeStruct((s.rows, s.seq // n if s.split and name == LEAVE else s.seq, s.width), np.float32)

    # The type matters if a whole sum is wanted: if it is typed as each device's own, all devices differentiate it.
    cast = tuple(case.mesh) if s.split or name == ENTER else others_of(case)

    def local(x, upstream):
        x, upstream = (a.reshape(s.rows, -1, s.width) for a in (x, upstream))

        def run(x):
            result = same_shapes(name, function(x, axis, s.split), like, case)
            if name == ENTER and not s.split and axis not in varying_axes(result):
                kind = f"an array that is typed as the same on every device of {axis!r}"
                raise Mismatch(f"{name} returned {kind}, expected one that varies over {axis!r}")
            return varying(result, cast)

        values, back = jax.vjp(run, x)
        (gradients,) = back(varying(upstream, varying_axes(values)))
        return {"values": varying(values, case.mesh)[None], "gradients": varying(gradients, case.mesh)[None]}

    inputs = {"x": input_array, "upstream": output_array}
    return on_mesh(local, case, inputs, {"values": own, "gradients": own})


def specs_of(case: Case[Stack]) -> Any:
    """Specs of the stacked layers' parameters."""
    return tensor_specs({"layers": params_by_head(case)["layers"]}, tensor_of(case))["layers"]


@partial(jax.checkpoint, static_argnums=1)
def attend(qkv: jax.Array, num_heads: int) -> jax.Array:
    """The attention passed to ``sp_block``: it does not save its scores, so they cannot make room for anything else."""
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, num_heads, -1), -3, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(*mixed.shape[:-2], -1)


def wrap_stack(name: str, function: Any, case: Case[Stack]) -> Wrapped:
    """A stack of layers, forward and backward; gradients of each group of devices, complete over the tensor axis."""
    s, axis, others = case.sizes, tensor_of(case), others_of(case)
    rows, specs, shapes = others or None, specs_of(case), params_by_head(case)["layers"]
    part, called = P(rows, axis), []
    x = jax.ShapeDtypeStruct((s.rows * groups_of(case), s.seq, s.width), np.float32)
    results = {"values": part, "gradients": {"params": jax.tree.map(lambda spec: P(rows, *spec), specs), "x": part}}

    def own_attend(qkv, num_heads):
        called.append(num_heads)
        return attend(qkv, num_heads) * s.gain if s.gain > 1 else attend(qkv, num_heads)

    extra_args = (own_attend,) if name == BLOCK else ()

    def local(params, x, key, upstream):
        key = jax.random.wrap_key_data(key)

        def run(params, x):
            def layer(x, numbered):
                number, weights = numbered
                y = same_shapes(
                    name, function(weights, x, jax.random.fold_in(key, number), s.dropout, *extra_args, axis), x, case
                )
                if extra_args and not called:
                    raise Mismatch(f"{name} did not call `attend`: it is the attention of this block")
                return varying(y, case.mesh), None

            return lax.scan(layer, x, (np.arange(s.num_layers, dtype=np.int32), params))[0]

        values, back = jax.vjp(run, varying(params, others), x)
        of_params, of_x = back(upstream)
        return {"values": values, "gradients": {"params": jax.tree.map(lambda g: g[None], of_params), "x": of_x}}

    inputs = {"params": (shapes, specs), "x": (x, part), "key": (KEY, P()), "upstream": (x, part)}
    return on_mesh(local, case, inputs, results, {"params": "state", "key": "key"})


def wrap_attention(function: Any, case: Case[Heads]) -> Wrapped:
    s, part = case.sizes, P(others_of(case) or None, tensor_of(case))

    def shape(heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((s.rows * groups_of(case), s.seq, heads, s.head_dim), np.float32)

    def local(q, k, v, upstream):
        def run(q, k, v):
            return same_shapes(ULYSSES, function(q, k, v, s.chunk, tensor_of(case)), q, case)

        values, back = jax.vjp(run, q, k, v)
        return {"values": values, "gradients": dict(zip("qkv", back(upstream), strict=True))}

    q, kv = shape(s.num_heads), shape(s.kv_heads)
    inputs = {name: (a, part) for name, a in (("q", q), ("k", kv), ("v", kv), ("upstream", q))}
    return on_mesh(local, case, inputs, {"values": part, "gradients": dict.fromkeys("qkv", part)})


WRAPPINGS = (
    *(Wrapping(name, "(x, axis_name, split)", partial(wrap_region, name), Region) for name in (ENTER, LEAVE)),
    Wrapping(BLOCK, "(params, x, key, rate, attend, axis_name)", partial(wrap_stack, BLOCK), Stack),
    Wrapping(SELECTIVE, "(params, x, key, rate, axis_name)", partial(wrap_stack, SELECTIVE), Stack),
    Wrapping(ULYSSES, "(q, k, v, chunk, axis_name)", wrap_attention, Heads),
)
