"""One training step of a Transformer of about 1 billion parameters over ``data``, ``pipe`` and ``tensor``.

FSDP over ``data``: parameters and Adam's state are sharded, gathered in bfloat16 once a step, and their gradients
leave in one reduce-scatter a leaf. A pipeline of microbatches over ``pipe``. Heads, hidden features and vocabulary
over ``tensor``. Layers are computed again in the backward pass, and every stage takes its share of the loss.
"""

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
from course.validation.single_device import adam

Params = dict[str, Any]
# The dim of each leaf that FSDP shards, and the leaf's spec; layers are stacked over ``pipe``.
_FSDP_DIM = {"qkv": 1, "out": 3, "up": 1, "down": 2, "scale_1": None, "scale_2": None}
_SPECS = {
    "embed": P(None, "data"),
    "head": P("data", "tensor"),
    "layers": {
        "scale_1": P("pipe"),
        "scale_2": P("pipe"),
        "qkv": P("pipe", "data", None, "tensor"),
        "out": P("pipe", "tensor", None, "data"),
        "up": P("pipe", "data", "tensor"),
        "down": P("pipe", "tensor", "data"),
    },
}


@dataclass(frozen=True)
class Sizes3D:
    """Sizes of the step; ``microbatch`` counts sequences on one device."""

    num_layers: int = 16
    width: int = 2048
    num_heads: int = 16
    vocabulary: int = 32_000
    sequence: int = 1024
    num_microbatches: int = 8
    microbatch: int = 2


def three_d_step(
    mesh: dict[str, int] | None = None,
    sizes: Sizes3D = Sizes3D(),
    platform: str = "cpu",
) -> Program:
    """The training step on ``mesh``, by default ``{"data": 2, "pipe": 2, "tensor": 2}``.

    Inputs: ``state`` (parameters, Adam's moments and count, donated) and ``tokens``,
    ``[data * num_microbatches * microbatch @data, sequence + 1]``.
    """
    mesh = mesh or {"data": 2, "pipe": 2, "tensor": 2}
    params = _shapes(sizes)
    rows = mesh["data"] * sizes.num_microbatches * sizes.microbatch
    state = {"params": params, "mu": params, "nu": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    specs = {"state": {"params": _SPECS, "mu": _SPECS, "nu": _SPECS, "count": P()}, "tokens": P("data")}
    inputs = {"state": state, "tokens": jax.ShapeDtypeStruct((rows, sizes.sequence + 1), jnp.int32)}
    out_specs = {"state": specs["state"], "loss": P()}
    mapped = jax.shard_map(
        partial(_step, sizes), mesh=abstract_mesh(mesh), in_specs=tuple(specs.values()), out_specs=out_specs
    )
    return export(
        lambda state, tokens: mapped(state, tokens),
        inputs,
        specs,
        mesh=mesh,
        out_specs=out_specs,
        roles={"state": "state"},
        donate=("state",),
        platform=platform,
    )


def _shapes(sizes: Sizes3D) -> Params:
    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layers, width, heads = sizes.num_layers, sizes.width, sizes.num_heads
    return {
        "embed": leaf(sizes.vocabulary, width),
        "head": leaf(width, sizes.vocabulary),
        "layers": {
            "scale_1": leaf(layers, width),
            "scale_2": leaf(layers, width),
            "qkv": leaf(layers, width, 3, heads, width // heads),
            "out": leaf(layers, heads, width // heads, width),
            "up": leaf(layers, width, 4 * width),
            "down": leaf(layers, 4 * width, width),
        },
    }


def _step(sizes: Sizes3D, state: Params, tokens: jax.Array) -> Params:
    def local_loss(params: Params) -> jax.Array:
        x = _pipeline(sizes, _gather(params), tokens)
        return _loss(sizes, x[0], x[1], tokens)

    loss, gradients = jax.value_and_grad(local_loss)(state["params"])
    return {"state": adam(state, gradients), "loss": lax.psum(loss, ("data", "pipe"))}


def _gather(params: Params) -> Params:
    """Whole leaves over ``data`` in bfloat16, varying over ``data`` and ``pipe`` so that gradients sum once."""

    def whole(leaf: jax.Array, dim: int | None) -> jax.Array:
        if dim is None:
            return lax.pcast(leaf, "data", to="varying")
        return lax.all_gather(leaf.astype(jnp.bfloat16), "data", axis=dim, tiled=True)

    layers = {name: whole(leaf, _FSDP_DIM[name]) for name, leaf in params["layers"].items()}
    ends = {"embed": whole(params["embed"], 1), "head": whole(params["head"], 0)}
    return {"layers": layers, **lax.pcast(ends, "pipe", to="varying")}


def _norm(scale: jax.Array | None, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)
    return (normal if scale is None else normal * scale).astype(x.dtype)


def _layer(params: Params, x: jax.Array) -> jax.Array:
    """``x`` is the same on all of ``tensor``; each block ends in one sum over it."""
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->cbshk", _norm(params["scale_1"], x), params["qkv"]), 0, 0)
    weights = jnp.einsum("bqhk,bshk->bhqs", q * q.shape[-1] ** -0.5, k).astype(jnp.float32)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, weights, -1e30)).astype(x.dtype)
    mixed = jnp.einsum("bhqs,bshk->bqhk", weights, v)
    x = x + lax.psum(jnp.einsum("bqhk,hkd->bqd", mixed, params["out"]), "tensor")
    hidden = jax.nn.gelu(_norm(params["scale_2"], x) @ params["up"])
    return x + lax.psum(hidden @ params["down"], "tensor")


def _stage(layers: Params, x: jax.Array) -> jax.Array:
    layer = jax.checkpoint(_layer, prevent_cse=False)
    return lax.scan(lambda x, params: (layer(params, x), None), x, layers)[0]


def _pipeline(sizes: Sizes3D, params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """This stage's share of the last stage's outputs, and the head they go through."""
    count, stage, num_stages = sizes.num_microbatches, lax.axis_index("pipe"), lax.axis_size("pipe")
    parts = tokens[:, :-1].reshape(count, sizes.microbatch, sizes.sequence)

    def tick(arrived, t):
        mine = params["embed"][parts[jnp.clip(t, 0, count - 1)]]
        y = _stage(params["layers"], jnp.where(stage == 0, mine, arrived))
        return lax.ppermute(y, "pipe", [(i, (i + 1) % num_stages) for i in range(num_stages)]), y

    start = jnp.zeros((sizes.microbatch, sizes.sequence, sizes.width), jnp.bfloat16)
    _, outputs = lax.scan(tick, lax.pcast(start, ("data", "pipe"), to="varying"), jnp.arange(count + num_stages - 1))
    last = jnp.where(stage == num_stages - 1, outputs[-count:], 0)
    return lax.psum_scatter(last, "pipe", tiled=True), params["head"]


def _loss(sizes: Sizes3D, x: jax.Array, head: jax.Array, tokens: jax.Array) -> jax.Array:
    """This device's part of the mean cross-entropy; the logits are split over ``tensor`` and never whole."""
    share = len(x)
    targets = tokens[:, 1:].reshape(sizes.num_microbatches, sizes.microbatch, sizes.sequence)
    targets = lax.dynamic_slice_in_dim(targets, lax.axis_index("pipe") * share, share)
    first = lax.axis_index("tensor") * head.shape[1]

    @partial(jax.checkpoint, prevent_cse=False)
    def one(x, targets):
        logits = (_norm(None, x) @ head).astype(jnp.float32)
        top = lax.pmax(lax.stop_gradient(logits).max(-1), "tensor")
        total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "tensor")
        here = jnp.arange(head.shape[1]) == (targets - first)[..., None]
        right = lax.psum(jnp.where(here, logits, 0).sum(-1), "tensor")
        return (jnp.log(total) + top - right).sum()

    zero = lax.pcast(jnp.zeros(()), ("data", "pipe"), to="varying")
    total, _ = lax.scan(lambda total, part: (total + one(*part), None), zero, (x, targets))
    return total / (tokens[:, 1:].size * lax.axis_size("data"))
