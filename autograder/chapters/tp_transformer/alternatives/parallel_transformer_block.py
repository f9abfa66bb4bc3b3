"""Right answers for ``parallel_transformer_block`` in another style."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from course.model import drop, rms_norm
from solutions.data_parallel import fold_key_over_axes


def with_the_mlp_first(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Kernels stacked the other way round, and slices where the reference splits."""
    qkv = params["attention"]["qkv"]["kernel"]
    width, _, heads, size = qkv.shape
    up, down = params["up"], params["down"]
    hidden = up["bias"].size
    rows = gather_matmul(rms_norm(params["norm"], x), jnp.hstack([up["kernel"], qkv.reshape(width, -1)]), axis_name)
    columns = rows[..., hidden:].reshape(*rows.shape[:2], 3, heads, size)
    mixed = jax.nn.dot_product_attention(*(columns[:, :, i] for i in range(3)), is_causal=True)
    both = jnp.dstack([
        jax.nn.gelu(rows[..., :hidden] + up["bias"]).reshape(-1, rows.shape[1], hidden),
        mixed.reshape(*rows.shape[:2], -1),
    ])  # fmt: skip
    out = jnp.vstack([down["kernel"], params["attention"]["out"]["kernel"].reshape(-1, width)])
    added = matmul_scatter(both, out, axis_name) + down["bias"]
    return x + drop(added, rate, jax.random.fold_in(key, lax.axis_index(axis_name)))


def with_attention_by_einsum(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Scores, mask and softmax written out; the mask of the dropout as a factor."""
    kernel = params["attention"]["qkv"]["kernel"]
    width, _, heads, size = kernel.shape
    columns = 3 * heads * size
    joined = jnp.concatenate((kernel.reshape(width, columns), params["up"]["kernel"]), -1)
    rows = gather_matmul(rms_norm(params["norm"], x), joined, axis_name)
    batch, seq, _ = rows.shape
    qkv = rows[:, :, :columns].reshape(batch, seq, 3, heads, size)
    scores = jnp.einsum("bqhd,bkhd->bhqk", qkv[:, :, 0], qkv[:, :, 1]) / math.sqrt(size)
    future = jnp.arange(seq)[:, None] < jnp.arange(seq)
    weights = jax.nn.softmax(jnp.where(future, jnp.finfo(scores.dtype).min, scores))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, qkv[:, :, 2]).reshape(batch, seq, -1)
    hidden = jax.nn.gelu(rows[:, :, columns:] + params["up"]["bias"])
    kernels = params["attention"]["out"]["kernel"].reshape(-1, width), params["down"]["kernel"]
    added = matmul_scatter(jnp.concatenate((mixed, hidden), -1), jnp.concatenate(kernels), axis_name)
    key = fold_key_over_axes(key, (axis_name,))
    kept = jax.random.bernoulli(key, 1 - rate, x.shape).astype(x.dtype)
    return x + (added + params["down"]["bias"]) * kept / (1 - rate)


def with_attention_recomputed(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Neither attention weights nor the hidden features are kept for the backward pass."""
    attention = params["attention"]
    width, _, heads, size = attention["qkv"]["kernel"].shape
    own = 3 * heads * size

    @jax.checkpoint
    def inside(rows, bias):
        q, k, v = (part.reshape(*rows.shape[:2], heads, size) for part in jnp.split(rows[..., :own], 3, axis=-1))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*rows.shape[:2], -1)
        return jnp.concatenate([mixed, jax.nn.gelu(rows[..., own:] + bias)], axis=-1)

    into = jnp.concatenate([attention["qkv"]["kernel"].reshape(width, -1), params["up"]["kernel"]], axis=1)
    back = jnp.concatenate([attention["out"]["kernel"].reshape(-1, width), params["down"]["kernel"]], axis=0)
    rows = gather_matmul(rms_norm(params["norm"], x), into, axis_name)
    added = matmul_scatter(inside(rows, params["up"]["bias"]), back, axis_name)
    return x + drop(added + params["down"]["bias"], rate, fold_key_over_axes(key, (axis_name,)))


ALTERNATIVES = (with_the_mlp_first, with_attention_by_einsum, with_attention_recomputed)
