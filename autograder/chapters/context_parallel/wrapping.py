"""Inputs of the functions of ``context_parallel``, and the form of their results."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
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
    groups_of,
    model_of,
    others_of,
    params_by_head,
)
from autograder.contract.output_checks import describe, same_shapes, state_and_loss, tuple_of
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh, sgd_steps
from course.mesh import varying


@dataclass(frozen=True, kw_only=True)
class Partials(Sizes):
    """Two partial results of attention, on one device; log-sum-exps are up to ``reach`` from zero."""

    queries: int
    num_heads: int
    head_dim: int
    reach: int = 0


@dataclass(frozen=True, kw_only=True)
class Heads(Sizes):
    """Attention over a context axis.

    Attributes:
        rows: Sequences of each group of devices.
        length: Tokens of a chunk.
        chunks: Chunks of a device: one in contiguous order, two in zigzag order, or any number if ``shuffled``.
        turn: The number of places by which devices' chunks are moved along the axis.
        shuffled: Whether chunks are in random order; ``turn`` is then the seed.
        large: Whether the exponentials of scores overflow.
        num_heads: Heads of the queries.
        num_kv_heads: Heads of the keys and values.
        head_dim: Features of a head.
        backward: Whether gradients are requested too.
    """

    rows: int
    length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    chunks: int = 2
    turn: int = 0
    shuffled: bool = False
    large: bool = False
    backward: bool = True


@dataclass(frozen=True, kw_only=True)
class Chunks(Sizes):
    """A sequence whose chunks have ``length`` tokens of ``width`` features."""

    length: int
    width: int


@dataclass(frozen=True, kw_only=True)
class StepSizes(ModelSizes):
    """A Transformer over ``data`` x ``context``; ``chunks`` of a device as for ``Heads``.

    Attributes:
        rows: Sequences at each place of the data axis.
        chunks: Chunks of a device.
        turn, shuffled: As for ``Heads``.
        steps: Number of steps.
        rate_scale: The factor of the drawn learning rate.
    """

    rows: int
    chunks: int = 2
    turn: int = 0
    shuffled: bool = False
    steps: int = 1
    rate_scale: float = 1.0


def context_of(case: Case[Any]) -> str:
    """The axis that sequences are split over: ``context`` if there is one, else the last."""
    return "context" if "context" in case.mesh else list(case.mesh)[-1]


def shards_of(case: Case[Any]) -> int:
    """The size of ``context_of``."""
    return case.mesh[context_of(case)]


def rows_of(case: Case[Any]) -> int:
    """Number of sequences in the whole batch."""
    return case.sizes.rows * groups_of(case, context_of)


def _block(case: Case[Any]) -> P:
    """The spec of ``[batch, seq, ...]``."""
    return P(others_of(case, context_of) or None, context_of(case))


def _order(case: Case[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, case.given["order"]))


def wrap_merge(function: Any, case: Case[Partials]) -> Wrapped:
    """Both results, and the gradients of both; minus infinity is returned as 0 and marked in ``lse_is_infinite``."""
    s = case.sizes
    lse = jax.ShapeDtypeStruct((s.queries, s.num_heads), np.float32)
    out = jax.ShapeDtypeStruct((*lse.shape, s.head_dim), np.float32)

    def local(partials, upstream):
        def merge(first, second):
            result = tuple_of("merge_attention", function(first, second), "out", "lse")
            expected = {"out": out, "lse": lse}
            same_shapes("merge_attention", dict(zip(expected, result, strict=True)), expected, case)
            unseen = result[1] == -jnp.inf
            return {"out": result[0], "lse": jnp.where(unseen, 0, result[1])}, unseen.astype(jnp.float32)

        first, second = ((partials[name]["out"], partials[name]["lse"]) for name in ("first", "second"))
        values, back, unseen = jax.vjp(merge, first, second, has_aux=True)
        gradients = [dict(zip(("out", "lse"), pair, strict=True)) for pair in back(upstream)]
        return {
            "values": {**values, "lse_is_infinite": unseen},
            "gradients": dict(zip(("first", "second"), gradients, strict=True)),
        }

    struct = {"out": out, "lse": lse}
    inputs = {"partials": ({"first": struct, "second": struct}, P()), "upstream": (struct, P())}
    return on_mesh(local, case, inputs, {"values": P(), "gradients": P()})


def wrap_ring(function: Any, case: Case[Heads]) -> Wrapped:
    """The result, and gradients of half of ``upstream`` times its square, so that the backward pass comes second."""
    s, axis, block = case.sizes, context_of(case), _block(case)
    seq = s.length * s.chunks * shards_of(case)

    def local(q, k, v, upstream=None):
        def attend(q, k, v):
            result = same_shapes("ring_attention", function(q, k, v, _order(case), axis), q, case)
            return varying(result, case.mesh)

        q, k, v = varying((q, k, v), case.mesh)
        if upstream is None:
            return {"values": attend(q, k, v)}
        values, back = jax.vjp(attend, q, k, v)
        return {"values": values, "gradients": dict(zip("qkv", back(upstream * values), strict=True))}

    q, k = (
        jax.ShapeDtypeStruct((rows_of(case), seq, heads, s.head_dim), np.float32)
        for heads in (s.num_heads, s.num_kv_heads)
    )
    inputs = {"q": (q, block), "k": (k, block), "v": (k, block)}
    if not s.backward:
        return on_mesh(local, case, inputs, {"values": block})
    return on_mesh(local, case, {**inputs, "upstream": (q, block)}, {"values": block, "gradients": block})


def checked_order(order: Any, devices: int) -> tuple[tuple[int, int], ...]:
    """Return ``order`` if it is a pair of chunk numbers for each device.

    Raises:
        Mismatch: It is not.
    """
    if isinstance(order, np.ndarray):
        order = order.tolist()
    pairs = isinstance(order, tuple | list) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in order)
    if not pairs:
        raise Mismatch(f"zigzag_order returned {describe(order)}, expected a tuple with a pair of integers per device")
    for number in (number for pair in order for number in pair):
        if not isinstance(number, Integral) or isinstance(number, bool):
            shown = describe(number) if hasattr(number, "dtype") else repr(number)  # an array may have no value yet
            raise Mismatch(f"zigzag_order gives {shown} as the number of a chunk, expected an integer")
    if len(order) != devices:
        raise Mismatch(f"zigzag_order({devices}) returned {len(order)} pairs, expected {devices}, one for each device")
    for device, pair in enumerate(order):
        for number in pair:
            if not 0 <= number < 2 * devices:
                raise Mismatch(
                    f"zigzag_order({devices}) gives chunk {number} to device {device}; "
                    f"the chunks are 0 to {2 * devices - 1}"
                )
    return tuple((int(first), int(second)) for first, second in order)


# --8<-- [start:products]
def wrap_order(function: Any, case: Case[Chunks]) -> Wrapped:
    """The products of causal attention in that order, without a softmax: for each chunk, the mean of its results.

    Every device is given all queries, keys and values, so that only these means are sent.
    """
    length, axis, devices = case.sizes.length, context_of(case), shards_of(case)

    def part(x, number):
        return lax.dynamic_slice_in_dim(x, number * length, length)

    def local(q, k, v):
        chunks = jnp.array(checked_order(function(devices), devices))[lax.axis_index(axis)]
        q, k, v, means, nothing = varying(
            (q, k, v, jnp.zeros((2 * devices, case.sizes.width)), jnp.zeros((length, case.sizes.width))), (axis,)
        )
        for own in chunks:
            queries = part(q, own)

            def add(mixed, number, own=own, queries=queries):
                def seen(mixed):
                    places = jnp.arange(length)
                    earlier = number * length + places <= (own * length + places)[:, None]
                    return mixed + jnp.where(earlier, queries @ part(k, number).T, 0) @ part(v, number)

                return lax.cond(number <= own, seen, lambda mixed: mixed, mixed), None

            mixed, _ = lax.scan(add, nothing, jnp.arange(2 * devices))
            known = lax.dynamic_slice_in_dim(means, own, 1)
            means = lax.dynamic_update_slice_in_dim(means, known + mixed.mean(0, keepdims=True), own, 0)
        return {"values": lax.psum(means, axis)}

    whole = jax.ShapeDtypeStruct((2 * devices * length, case.sizes.width), np.float32)
    return on_mesh(local, case, {name: (whole, P()) for name in "qkv"}, {"values": P()})


# --8<-- [end:products]


def data_of(case: Case[StepSizes]) -> str:
    """The axis that sequences are distributed over."""
    (axis,) = others_of(case, context_of)
    return axis


def wrap_step(function: Any, case: Case[StepSizes]) -> Wrapped:
    """The step over several batches; every device returns its copy, to detect copies that drift apart."""
    axes, shapes = (data_of(case), context_of(case)), params_by_head(case)
    results = {"values": {"loss": P(axes), "params": P(axes)}, "gradients": P(axes)}

    def local(params, batch, key, learning_rate):
        key = jax.random.wrap_key_data(key)

        def step(params, numbered):
            number, part = numbered
            own, rate, order = jax.random.fold_in(key, number), case.sizes.dropout, _order(case)
            result = function(params, part, model_of(case), order, own, rate, *axes, learning_rate)
            return varying(state_and_loss("cp_transformer_step", "params", result, params, case), axes)

        numbers = np.arange(case.sizes.steps, dtype=np.int32)
        after, losses, gradients = sgd_steps(step, varying(params, axes), (numbers, batch), learning_rate)
        after, gradients = jax.tree.map(lambda leaf: leaf[None], (after, gradients))
        return {"values": {"loss": losses[None], "params": after}, "gradients": gradients}

    batch = batch_shapes(case.sizes, rows_of(case), case.sizes.steps, masked=True)
    inputs = {
        "params": (shapes, P()),
        "batch": (batch, P(None, *axes)),
        "key": (KEY, P()),
        "learning_rate": (LEARNING_RATE, P()),
    }
    return on_mesh(local, case, inputs, results, {"params": "state", "key": "key"})


_STEP = "(params, batch, model, order, key, rate, data_axis, context_axis, learning_rate)"
WRAPPINGS = (
    Wrapping("merge_attention", "(first, second)", wrap_merge, Partials),
    Wrapping("ring_attention", "(q, k, v, order, axis_name)", wrap_ring, Heads),
    Wrapping("zigzag_order", "(num_devices)", wrap_order, Chunks),
    Wrapping("cp_transformer_step", _STEP, wrap_step, StepSizes),
)
