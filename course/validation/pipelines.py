"""Pipelines over ``pipe``: plain or looped (breadth-first), idle ticks masked or skipped, with gradients or without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh
from course.program.export import export
from course.program.program import Program
from course.schedules import num_ticks

Params = dict[str, Any]


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer of the MLP, and of its activations.

    Attributes:
        width: Width of the activations.
        hidden: Width of the inner layer.
        rows: Rows of one microbatch on one device.
        dtype: Dtype of parameters and activations.
        norm: Whether the layer normalises its input, has biases, and is residual.
    """

    width: int = 512
    hidden: int = 2048
    rows: int = 256
    dtype: str = "float32"
    norm: bool = False


def pipeline(
    num_stages: int,
    num_microbatches: int,
    num_repeats: int = 1,
    *,
    layers_per_stage: int = 1,
    layer: Layer = Layer(),
    masked: bool = True,
    backward: bool = False,
    data: int = 1,
    platform: str = "cpu",
) -> Program:
    """A pipeline on the mesh ``{"data": data, "pipe": num_stages}``.

    Args:
        num_stages: Devices in the pipeline.
        num_microbatches: Parts of the batch, any number.
        num_repeats: Number of passes of a microbatch over each device; above 1 the pipeline is looped, breadth-first.
        layers_per_stage: Layers that a device computes in one tick.
        layer: Sizes of one layer.
        masked: Idle ticks compute and discard the result; else they are skipped with ``lax.cond``.
        backward: Gradients of every layer, averaged over ``data`` after the whole backward pass; else the outputs,
            ``[num_stages@pipe, num_microbatches, rows@data, width]``, of which only the last stage's count.
        data: Groups of devices that have the same layers and different rows.
        platform: ``cpu`` or ``cuda``.
    """
    mesh = {"data": data, "pipe": num_stages}
    weights = P(None, "pipe")
    rows = P(None, "data")
    stack = (num_repeats, num_stages, layers_per_stage)
    inputs = {
        "params": _shapes(layer, stack),
        "x": jax.ShapeDtypeStruct((num_microbatches, data * layer.rows, layer.width), jnp.dtype(layer.dtype)),
    }
    forward = partial(_forward, num_stages, num_microbatches, num_repeats, masked)
    body = partial(_gradients, forward, num_stages, data) if backward else partial(_outputs, forward)
    out_specs = {"gradients": weights} if backward else {"outputs": P("pipe", None, "data")}
    mapped = jax.shard_map(body, mesh=abstract_mesh(mesh), in_specs=(weights, rows), out_specs=out_specs)
    options: dict[str, Any] = {"mesh": mesh, "roles": {"params": "state"}, "platform": platform}
    return export(
        lambda params, x: mapped(params, x), inputs, {"params": weights, "x": rows}, out_specs=out_specs, **options
    )


def uva_pipeline(looped: bool, platform: str = "cpu") -> Program:
    """The pipeline that the UvA tutorials time on 8 A5000s: forward, backward and gradient synchronisation.

    Source: P. Lippe, "Training Models at Scale", part on looping pipelines, University of Amsterdam, 2024. An MLP of
    16 layers, width 2048, hidden 8192, float32, 2 stages, 4 groups of devices over ``data``. The source gives
    neither its batch at this size nor its optimizer's share; the batch is its default of 128 rows, so 4 rows per
    device in each of 8 microbatches. Its input and output layers and its dropout are left out: 0.3% of the FLOPs.
    """
    layer = Layer(2048, 8192, rows=4, norm=True)
    repeats, layers = (8, 1) if looped else (1, 8)
    return pipeline(2, 8, repeats, layers_per_stage=layers, layer=layer, backward=True, data=4, platform=platform)


def _shapes(layer: Layer, stack: tuple[int, ...]) -> Params:
    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*stack, *shape), jnp.dtype(layer.dtype))

    shapes = {"up": leaf(layer.width, layer.hidden), "down": leaf(layer.hidden, layer.width)}
    if layer.norm:
        shapes |= {"scale": leaf(layer.width), "shift": leaf(layer.width)}
        shapes |= {"up_bias": leaf(layer.hidden), "down_bias": leaf(layer.width)}
    return shapes


def _layer(params: Params, x: jax.Array) -> jax.Array:
    if "scale" not in params:
        return jax.nn.silu(x @ params["up"]) @ params["down"]
    centred = x - x.mean(-1, keepdims=True)
    normal = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    hidden = jax.nn.silu((normal * params["scale"] + params["shift"]) @ params["up"] + params["up_bias"])
    return x + hidden @ params["down"] + params["down_bias"]


def _stage(params: Params, x: jax.Array) -> jax.Array:
    """The layers of one stage in order; every leaf has a leading dim for them."""
    if len(params["up"]) == 1:
        return _layer(jax.tree.map(lambda leaf: leaf[0], params), x)
    return lax.scan(lambda x, layer: (_layer(layer, x), None), x, params)[0]


def _forward(
    num_stages: int, num_microbatches: int, num_repeats: int, masked: bool, params: Params, x: jax.Array
) -> jax.Array:
    """Outputs of this stage at the last ``num_microbatches`` ticks, ``[num_microbatches, rows, width]``.

    ``params`` has leading dims ``[num_repeats, layers]``. A microbatch that returns to stage 0 replaces
    its input, where it waits for its next repeat.
    """
    stage = lax.axis_index("pipe")
    period = max(num_microbatches, num_stages)

    def tick(carry, t):
        waiting, arrived = carry
        if num_repeats > 1:
            back = (t - num_stages) % period
            returned = (t >= num_stages) & (back < num_microbatches)
            slot = jnp.minimum(back, num_microbatches - 1)
            waiting = waiting.at[slot].set(jnp.where(returned, arrived, waiting[slot]))
        turn = t - stage
        microbatch, repeat = turn % period, turn // period
        active = (turn >= 0) & (microbatch < num_microbatches) & (repeat < num_repeats)
        first = waiting[jnp.minimum(microbatch, num_microbatches - 1)]
        x = jnp.where(stage == 0, first, arrived)
        turn_of_weights = jnp.clip(repeat, 0, num_repeats - 1) if num_repeats > 1 else 0
        layer_params = jax.tree.map(lambda leaf: leaf[turn_of_weights], params)
        y = (
            jnp.where(active, _stage(layer_params, x), x)
            if masked
            else lax.cond(active, _stage, lambda _, x: x, layer_params, x)
        )
        ring = [(i, (i + 1) % num_stages) for i in range(num_stages)]
        return (waiting, lax.ppermute(y, "pipe", ring)), y

    x = lax.pcast(x, "pipe", to="varying")
    ticks = jnp.arange(num_ticks(num_stages, num_microbatches, num_repeats))
    _, outputs = lax.scan(tick, (x, jnp.zeros_like(x[0])), ticks)
    return outputs[-num_microbatches:]


def _local(params: Params) -> Params:
    """Remove the dim over ``pipe``, which has size 1 on a device."""
    return jax.tree.map(lambda leaf: leaf[:, 0], params)


def _outputs(forward: Any, params: Params, x: jax.Array) -> Params:
    return {"outputs": forward(_local(lax.pcast(params, "data", to="varying")), x)[None]}


def _gradients(forward: Any, num_stages: int, data: int, params: Params, x: jax.Array) -> Params:
    def loss(params: Params) -> jax.Array:
        total = jnp.square(forward(_local(params), x)).mean()
        return jnp.where(lax.axis_index("pipe") == num_stages - 1, total, 0.0)

    gradients = jax.grad(loss)(lax.pcast(params, "data", to="varying"))
    return {"gradients": jax.tree.map(lambda leaf: lax.psum(leaf, "data") / data, gradients)}
