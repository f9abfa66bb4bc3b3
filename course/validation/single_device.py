"""The training step of the six runs on one A5000 that the UvA tutorials publish, written from their description.

Source: P. Lippe, "Training Models at Scale", part 1.2 (single-GPU Transformer), University of Amsterdam, 2024: a
pre-norm Transformer with biases, MLP before attention, learned positions, causal mask, dropout 0.1 after each
block, softmax and loss in float32, parameters in float32, Adam, all state donated. 155,877,376 parameters.

The source draws its dropout masks with threefry, which is a custom call on GPUs that no analysis can read. Here the
bits come from a hash of a counter, elementwise and the same on every platform; the masks that the backward pass keeps
are as large as the source's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course import budget
from course.program.export import export
from course.program.program import Program

Params = dict[str, Any]


@dataclass(frozen=True)
class PublishedRun:
    """One published run.

    Attributes:
        name: Name in tables.
        dtype: Compute dtype of the layers.
        scan: Whether the layers are one scan instead of unrolled.
        remat: The parts recomputed in the backward pass: ``MLP``, ``Attn``, ``Block``.
        num_microbatches: Microbatches over which gradients are accumulated in a scan; 1 for none.
        peak: Published bytes at the peak.
        seconds: Published seconds per step.
    """

    name: str
    dtype: str
    scan: bool
    remat: tuple[str, ...]
    num_microbatches: int
    peak: float
    seconds: float


RUNS = (
    PublishedRun("float32, scan", "float32", True, (), 4, 20.6e9, 2.1),
    PublishedRun("bfloat16, scan", "bfloat16", True, (), 4, 14.6e9, 1.1),
    PublishedRun("bfloat16, unrolled", "bfloat16", False, (), 4, 8.8e9, 0.73),
    PublishedRun("bfloat16, scan, remat of MLP and attention", "bfloat16", True, ("MLP", "Attn"), 4, 3.9e9, 0.91),
    PublishedRun("bfloat16, scan, remat of the block", "bfloat16", True, ("Block",), 4, 3.8e9, 0.96),
    PublishedRun("bfloat16, scan, remat, no accumulation", "bfloat16", True, ("MLP", "Attn"), 1, 6.2e9, 0.86),
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of the Transformer; the defaults are the source's."""

    num_layers: int = 12
    width: int = 1024
    num_heads: int = 8
    vocabulary: int = 2048
    sequence: int = 512
    batch: int = 64
    dropout: float = 0.1

    @property
    def model_flops(self) -> float:
        """FLOPs that the model needs per step: ``6 N + 12 L d s`` per token, ``N`` the weights of matmuls."""
        weights = self.num_layers * 12 * self.width**2 + self.vocabulary * self.width
        sizes = budget.Sizes(
            self.num_layers, self.width, self.num_heads, self.vocabulary, self.sequence, parameters=weights
        )
        return float(self.batch * self.sequence * budget.flops_per_token(sizes))


def single_device(run: PublishedRun, sizes: Sizes = Sizes(), platform: str = "cpu") -> Program:
    """The training step of one run, exported from shapes alone, on a mesh of one device.

    Inputs are ``state`` (parameters, Adam's moments and count, donated), ``key`` (donated) and ``batch``.
    """
    params = parameters(sizes)
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.sequence), jnp.int32)
    state = {"params": params, "mu": params, "nu": params, "count": jax.ShapeDtypeStruct((), jnp.int32)}
    inputs: dict[str, Any] = {"state": state, "key": jax.ShapeDtypeStruct((), jnp.uint32)}
    inputs["batch"] = {"inputs": tokens, "targets": tokens}
    options: dict[str, Any] = {"mesh": {"data": 1}, "roles": {"state": "state", "key": "key"}, "platform": platform}
    options |= {"donate": ("state", "key"), "out_specs": {name: P() for name in ("state", "key", "loss", "correct")}}
    return export(partial(_train_step, run, sizes), inputs, dict.fromkeys(inputs, P()), **options)


def parameters(sizes: Sizes) -> Params:
    """Shapes of the parameters, each leaf under ``layers`` with a leading dim ``num_layers``."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def dense(rows: int, columns: int, *stack: int) -> Params:
        return {"kernel": leaf(*stack, rows, columns), "bias": leaf(*stack, columns)}

    def norm(*stack: int) -> Params:
        return {"scale": leaf(*stack, sizes.width), "bias": leaf(*stack, sizes.width)}

    width, layers = sizes.width, sizes.num_layers
    mlp = {"norm": norm(layers), "up": dense(width, 4 * width, layers), "down": dense(4 * width, width, layers)}
    attention = {"norm": norm(layers), "qkv": dense(width, 3 * width, layers), "out": dense(width, width, layers)}
    return {
        "embed": leaf(sizes.vocabulary, width),
        "positions": leaf(sizes.sequence, width),
        "layers": {"mlp": mlp, "attention": attention},
        "norm": norm(),
        "head": dense(width, sizes.vocabulary),
    }


def _layer_norm(params: Params, x: jax.Array) -> jax.Array:
    """Statistics and scaling in float32, the result in the dtype of ``x``."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean))
    scale = lax.rsqrt(variance + 1e-6) * params["scale"]
    return ((wide - mean) * scale + params["bias"]).astype(x.dtype)


def _dense(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["kernel"].astype(x.dtype) + params["bias"].astype(x.dtype)


def _hash(x: jax.Array) -> jax.Array:
    """Mix the bits of 32-bit counters with multiply and shift-xor rounds; the constant is Thomas Mueller's."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x045D9F3B)
    x = (x ^ (x >> 16)) * jnp.uint32(0x045D9F3B)
    return x ^ (x >> 16)


def _split(key: jax.Array, count: int) -> jax.Array:
    return _hash(key ^ _hash(lax.iota(jnp.uint32, count) + jnp.uint32(1)))


def _dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    if not rate:
        return x
    counter = lax.iota(jnp.uint32, x.size).reshape(x.shape)
    keep = _hash(key + counter) >= jnp.uint32(rate * 2**32)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def _mlp(sizes: Sizes, params: Params, key: jax.Array, x: jax.Array) -> jax.Array:
    x = jax.nn.gelu(_dense(params["up"], _layer_norm(params["norm"], x)))
    return _dropout(key, _dense(params["down"], x), sizes.dropout)


def _attention(sizes: Sizes, params: Params, key: jax.Array, x: jax.Array) -> jax.Array:
    batch, sequence, width = x.shape
    head = width // sizes.num_heads
    qkv = _dense(params["qkv"], _layer_norm(params["norm"], x))
    q, k, v = jnp.split(qkv.reshape(batch, sequence, sizes.num_heads, 3 * head), 3, axis=-1)
    q = (q * head**-0.5).astype(jnp.float32)
    weights = jnp.einsum("bqhd,bkhd->bhqk", q, k.astype(jnp.float32))
    mask = jnp.tril(jnp.ones((sequence, sequence), bool))
    weights = jax.nn.softmax(jnp.where(mask, weights, jnp.finfo(jnp.float32).min)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    return _dropout(key, _dense(params["out"], mixed), sizes.dropout)


def _block(run: PublishedRun, sizes: Sizes, params: Params, key: jax.Array, x: jax.Array) -> jax.Array:
    keys = _split(key, 2)
    mlp, attention = partial(_mlp, sizes), partial(_attention, sizes)
    x = x + _maybe_remat(mlp, "MLP" in run.remat)(params["mlp"], keys[0], x)
    return x + _maybe_remat(attention, "Attn" in run.remat)(params["attention"], keys[1], x)


def _maybe_remat(function: Callable[..., jax.Array], remat: bool) -> Callable[..., jax.Array]:
    return jax.checkpoint(function, prevent_cse=False) if remat else function


def _loss(run: PublishedRun, sizes: Sizes, params: Params, key: jax.Array, batch: Params) -> tuple[jax.Array, Params]:
    block = _maybe_remat(partial(_block, run, sizes), "Block" in run.remat)
    x = params["embed"].astype(run.dtype)[batch["inputs"]] + params["positions"].astype(run.dtype)
    keys = _split(key, sizes.num_layers)
    if run.scan:
        x, _ = lax.scan(lambda x, layer: (block(layer[0], layer[1], x), None), x, (params["layers"], keys))
    else:
        for i in range(sizes.num_layers):
            x = block(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), keys[i], x)
    logits = _dense(params["head"], _layer_norm(params["norm"], x)).astype(jnp.float32)
    right = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - right
    correct = (jnp.argmax(logits, -1) == batch["targets"]).sum()
    return losses.mean(), {"loss": losses.sum(), "correct": correct}


def _gradients(run: PublishedRun, sizes: Sizes, params: Params, key: jax.Array, batch: Params) -> tuple[Params, Params]:
    """Mean gradients over the microbatches and summed metrics."""
    slope = jax.grad(partial(_loss, run, sizes), has_aux=True)
    count = run.num_microbatches
    if count == 1:
        return slope(params, key, batch)
    parts = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)
    part = jax.tree.map(lambda leaf: leaf[0], parts)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(slope, params, key, part))

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, slope(params, *microbatch)), None

    (gradients, metrics), _ = lax.scan(add, zeros, (_split(key, count), parts))
    return jax.tree.map(lambda leaf: leaf / count, gradients), metrics


def _train_step(run: PublishedRun, sizes: Sizes, *, state: Params, key: jax.Array, batch: Params) -> Params:
    next_key, step_key = _split(key, 2)
    gradients, metrics = _gradients(run, sizes, state["params"], step_key, batch)
    return {"state": adam(state, gradients), "key": next_key, **metrics}


def adam(state: Params, gradients: Params, rate: float = 4e-4) -> Params:
    """One step of Adam (Kingma and Ba, 2015) with the usual constants on ``params``, ``mu``, ``nu`` and ``count``."""
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.999 * n + 0.001 * g * g, state["nu"], gradients)
    first, second = (1 - decay ** count.astype(jnp.float32) for decay in (0.9, 0.999))

    def update(parameter, m, n):
        return parameter - rate * (m / first) / (jnp.sqrt(n / second) + 1e-8)

    return {"params": jax.tree.map(update, state["params"], mu, nu), "mu": mu, "nu": nu, "count": count}
