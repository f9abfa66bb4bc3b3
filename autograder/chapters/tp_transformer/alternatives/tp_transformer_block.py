"""Right answers for ``tp_transformer_block`` in another style."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from course.model import drop, rms_norm
from solutions.data_parallel import fold_key_over_axes


def with_attention_by_einsum(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Scores, mask and softmax written out."""
    kernel, out = params["attention"]["qkv"]["kernel"], params["attention"]["out"]["kernel"]
    width, _, heads, size = kernel.shape
    keys = jax.random.split(jax.random.fold_in(key, lax.axis_index(axis_name)))

    normed = rms_norm(params["attention_norm"], x)
    qkv = gather_matmul(normed, kernel.reshape(width, 3 * heads * size), axis_name)
    batch, seq, _ = qkv.shape
    q, k, v = (part.reshape(batch, seq, heads, size) for part in jnp.split(qkv, 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(size)
    seen = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, heads * size)
    x = x + drop(matmul_scatter(mixed, out.reshape(heads * size, width), axis_name), rate, keys[0])

    up, down = params["mlp"]["up"], params["mlp"]["down"]
    inner = jax.nn.gelu(up["bias"] + gather_matmul(rms_norm(params["mlp"]["norm"], x), up["kernel"], axis_name))
    return x + drop(down["bias"] + matmul_scatter(inner, down["kernel"], axis_name), rate, keys[1])


def with_masks_by_hand_and_attention_recomputed(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Masks as factors; the attention weights are not kept for the backward pass."""
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))

    def kept(key):
        return jax.random.bernoulli(key, 1 - rate, x.shape).astype(x.dtype) / (1 - rate)

    @jax.checkpoint
    def mix(qkv):
        heads = params["attention"]["qkv"]["kernel"].shape[2]
        columns = qkv.reshape(*qkv.shape[:2], 3, heads, -1)
        mixed = jax.nn.dot_product_attention(columns[:, :, 0], columns[:, :, 1], columns[:, :, 2], is_causal=True)
        return mixed.reshape(*qkv.shape[:2], -1)

    def attention(y):
        inner = params["attention"]
        width = y.shape[-1]
        qkv = gather_matmul(y, inner["qkv"]["kernel"].reshape(width, -1), axis_name)
        return matmul_scatter(mix(qkv), inner["out"]["kernel"].reshape(-1, width), axis_name)

    def feed_forward(y):
        inner = params["mlp"]
        hidden = jax.nn.gelu(gather_matmul(y, inner["up"]["kernel"], axis_name) + inner["up"]["bias"])
        return matmul_scatter(hidden, inner["down"]["kernel"], axis_name) + inner["down"]["bias"]

    x = x + attention(rms_norm(params["attention_norm"], x)) * kept(first)
    return x + feed_forward(rms_norm(params["mlp"]["norm"], x)) * kept(second)


def one_head_after_the_other(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """``lax.map`` over this device's heads; norms by hand."""

    def norm(scale, x):
        return x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale

    kernel, out = params["attention"]["qkv"]["kernel"], params["attention"]["out"]["kernel"]
    width = x.shape[-1]
    own = jax.random.fold_in(key, lax.axis_index(axis_name))
    keys = jax.random.split(own, 2)
    qkv = gather_matmul(norm(params["attention_norm"]["scale"], x), kernel.reshape(width, -1), axis_name)
    columns = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, *kernel.shape[2:]), 3, 0)

    def head(part):
        return jax.nn.dot_product_attention(*(part[:, :, i, None] for i in range(3)), is_causal=True)[:, :, 0]

    mixed = jnp.moveaxis(lax.map(head, columns), 0, 2).reshape(*qkv.shape[:2], -1)
    x += drop(matmul_scatter(mixed, out.reshape(-1, width), axis_name), rate, keys[0])
    mlp = params["mlp"]
    hidden = gather_matmul(norm(mlp["norm"]["scale"], x), mlp["up"]["kernel"], axis_name)
    added = matmul_scatter(jax.nn.gelu(hidden + mlp["up"]["bias"]), mlp["down"]["kernel"], axis_name)
    return x + drop(added + mlp["down"]["bias"], rate, keys[1])


ALTERNATIVES = (with_attention_by_einsum, with_masks_by_hand_and_attention_recomputed, one_head_after_the_other)
