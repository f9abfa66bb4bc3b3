"""Alternative implementations of ``tp_transformer``: each must pass every fact."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from course.model import drop, rms_norm
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.data_parallel import fold_key_over_axes
from solutions.tp_transformer import (
    parallel_transformer_block,
    tp_transformer_block,
    vocab_parallel_embed,
    vocab_parallel_loss,
)


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
    """Masks as factors; the attention weights are recomputed in the backward pass."""
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))

    def mask(key):
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

    x = x + attention(rms_norm(params["attention_norm"], x)) * mask(first)
    return x + feed_forward(rms_norm(params["mlp"]["norm"], x)) * mask(second)


def with_the_mlp_first(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Kernels stacked in the opposite order, and slices where the reference splits."""
    qkv = params["attention"]["qkv"]["kernel"]
    width, _, heads, size = qkv.shape
    up, down = params["up"], params["down"]
    hidden = up["bias"].size
    rows = gather_matmul(rms_norm(params["norm"], x), jnp.hstack([up["kernel"], qkv.reshape(width, -1)]), axis_name)
    columns = rows[..., hidden:].reshape(*rows.shape[:2], 3, heads, size)
    mixed = jax.nn.dot_product_attention(*(columns[:, :, i] for i in range(3)), is_causal=True)
    features = jnp.dstack(
        [
            jax.nn.gelu(rows[..., :hidden] + up["bias"]).reshape(-1, rows.shape[1], hidden),
            mixed.reshape(*rows.shape[:2], -1),
        ]
    )
    out = jnp.vstack([down["kernel"], params["attention"]["out"]["kernel"].reshape(-1, width)])
    added = matmul_scatter(features, out, axis_name) + down["bias"]
    return x + drop(added, rate, jax.random.fold_in(key, lax.axis_index(axis_name)))


def with_attention_recomputed(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Both attention weights and hidden features are recomputed in the backward pass."""
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


def by_one_hot_products(params, tokens, axis_name):
    """A matmul with one-hot rows, or zero rows for another device's tokens."""
    own = params["token"].shape[0]
    local = tokens - own * lax.axis_index(axis_name)
    rows = jax.nn.one_hot(local, own, dtype=params["token"].dtype) @ params["token"]
    x = lax.psum_scatter(rows, axis_name, scatter_dimension=1, tiled=True)
    starts = lax.axis_index(axis_name) * x.shape[1]
    return x + params["position"][starts + jnp.arange(x.shape[1])]


def with_positions_first(params, tokens, axis_name):
    """Each device adds the positions of its own rows before the sum, and zeros for all others."""
    table, index = params["token"], lax.axis_index(axis_name)
    local = tokens - index * table.shape[0]
    mine = ((local >= 0) & (local < table.shape[0])).astype(table.dtype)
    rows = jnp.take(table, jnp.clip(local, 0, table.shape[0] - 1), axis=0) * mine[..., None]
    seq = tokens.shape[1]
    holder = jnp.arange(seq) // (seq // lax.axis_size(axis_name))
    positions = jnp.where((holder == index)[:, None], params["position"][:seq], 0)
    return lax.psum_scatter(rows + positions, axis_name, scatter_dimension=1, tiled=True)


def with_parts_of_the_softmax(params, x, targets, gather_matmul, axis_name):
    """Each device's own ``logsumexp``, combined by one over all devices; a one-hot sum selects the targets."""
    out = params["out"]
    logits = gather_matmul(rms_norm(params["norm"], x), out["kernel"], axis_name) + out["bias"]
    part = jax.nn.logsumexp(logits, axis=-1)
    highest = lax.pmax(lax.stop_gradient(part), axis_name)
    whole = highest + jnp.log(lax.psum(jnp.exp(part - highest), axis_name))
    own = logits.shape[-1]
    chosen = targets[..., None] == lax.axis_index(axis_name) * own + jnp.arange(own)
    right = lax.psum(jnp.sum(jnp.where(chosen, logits, 0), axis=-1), axis_name)
    return jnp.mean(whole - right)


def every_device_for_its_own_rows(params, x, targets, gather_matmul, axis_name):
    """Sums are scattered: a device computes the loss of its part of each sequence, and the means are added up."""
    index, size, rows = lax.axis_index(axis_name), lax.axis_size(axis_name), x.shape[1]
    logits = gather_matmul(rms_norm(params["norm"], x), params["out"]["kernel"], axis_name) + params["out"]["bias"]
    highest = lax.pmax(lax.stop_gradient(logits.max(-1)), axis_name)
    local = targets - index * logits.shape[-1]
    hit = jax.nn.one_hot(local, logits.shape[-1], dtype=logits.dtype)
    sums = jnp.stack([jnp.exp(logits - highest[..., None]).sum(-1), (logits * hit).sum(-1)], axis=-1)
    own = lax.psum_scatter(sums, axis_name, scatter_dimension=1, tiled=True)
    top = lax.dynamic_slice_in_dim(highest, index * rows, rows, 1)
    return lax.psum(jnp.mean(jnp.log(own[..., 0]) + top - own[..., 1]) / size, axis_name)


def over_all_devices_at_once(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """Whole leaves over both axes in one sum; layers in a Python loop."""
    block = parallel_transformer_block if parallel else tp_transformer_block
    key = jax.random.fold_in(key, lax.axis_index(data_axis))
    rings = ring_gather_matmul, matmul_ring_scatter
    groups = lax.axis_size(data_axis)

    def loss_of(params):
        x = vocab_parallel_embed(params["embed"], batch["inputs"], tensor_axis)
        for i in range(params["layers"]["attention"]["out"]["kernel"].shape[0]):
            layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
            x = block(layer, x, jax.random.fold_in(key, i), rate, *rings, tensor_axis)
        return vocab_parallel_loss(params["head"], x, batch["targets"], rings[0], tensor_axis)

    def update(leaf, gradient, spec):
        axes = data_axis if tensor_axis in spec else (data_axis, tensor_axis)
        return leaf - learning_rate * lax.psum(gradient, axes) / groups

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(update, params, gradients, specs), lax.pmean(loss, data_axis)


def with_layers_that_recompute(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """Every layer is recomputed in the backward pass; optax for the update."""
    block = parallel_transformer_block if parallel else tp_transformer_block
    place = jax.random.fold_in(key, lax.axis_index(data_axis))

    @jax.checkpoint
    def layer(carry, weights):
        x, number = carry
        own = jax.random.fold_in(place, number)
        x = block(weights, x, own, rate, ring_gather_matmul, matmul_ring_scatter, tensor_axis)
        return (x, number + 1), None

    def loss_of(params):
        x = vocab_parallel_embed(params["embed"], batch["inputs"], tensor_axis)
        (x, _), _ = lax.scan(layer, (x, jnp.int32(0)), params["layers"])
        return vocab_parallel_loss(params["head"], x, batch["targets"], ring_gather_matmul, tensor_axis)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    shares = jax.tree.map(lambda g, spec: g if tensor_axis in spec else lax.psum(g, tensor_axis), gradients, specs)
    optimizer = optax.sgd(learning_rate)
    updates, _ = optimizer.update(lax.pmean(shares, data_axis), optimizer.init(params), params)
    return optax.apply_updates(params, updates), lax.pmean(loss, data_axis)


ALTERNATIVES = {
    "tp_transformer_block": (with_attention_by_einsum, with_masks_by_hand_and_attention_recomputed),
    "parallel_transformer_block": (with_the_mlp_first, with_attention_recomputed),
    "vocab_parallel_embed": (by_one_hot_products, with_positions_first),
    "vocab_parallel_loss": (with_parts_of_the_softmax, every_device_for_its_own_rows),
    "tp_transformer_step": (over_all_devices_at_once, with_layers_that_recompute),
}
