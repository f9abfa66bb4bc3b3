# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A Transformer over `data` x `tensor`

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from course.model import drop, rms_norm
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.data_parallel import fold_key_over_axes

PyTree = Any
Matmul = Callable[[jax.Array, jax.Array, str], jax.Array]


# %%
def attend(qkv: jax.Array, num_heads: int) -> jax.Array:
    """Causal attention of some heads: ``[batch, seq, 3 * num_heads * head_dim] -> [batch, seq, num_heads * head_dim]``."""
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, num_heads, -1), -3, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(*mixed.shape[:-2], -1)


# %%
def tp_transformer_block(
    params: PyTree,
    x: jax.Array,
    key: jax.Array,
    rate: float,
    gather_matmul: Matmul,
    matmul_scatter: Matmul,
    axis_name: str,
) -> jax.Array:
    """One layer of a Transformer, attention and then MLP. Runs inside ``shard_map``."""
    ### BEGIN SOLUTION
    attention, mlp = params["attention"], params["mlp"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))

    y = rms_norm(params["attention_norm"], x)
    qkv = gather_matmul(y, attention["qkv"]["kernel"].reshape(width, -1), axis_name)
    y = matmul_scatter(attend(qkv, num_heads), attention["out"]["kernel"].reshape(-1, width), axis_name)
    x = x + drop(y, rate, first)

    y = rms_norm(mlp["norm"], x)
    hidden = gather_matmul(y, mlp["up"]["kernel"], axis_name) + mlp["up"]["bias"]
    y = matmul_scatter(jax.nn.gelu(hidden), mlp["down"]["kernel"], axis_name) + mlp["down"]["bias"]
    return x + drop(y, rate, second)
    ### END SOLUTION


# %%
def parallel_transformer_block(
    params: PyTree,
    x: jax.Array,
    key: jax.Array,
    rate: float,
    gather_matmul: Matmul,
    matmul_scatter: Matmul,
    axis_name: str,
) -> jax.Array:
    """One layer of a Transformer, attention beside MLP. Runs inside ``shard_map``."""
    ### BEGIN SOLUTION
    qkv, out = params["attention"]["qkv"]["kernel"], params["attention"]["out"]["kernel"]
    width, _, num_heads, head_dim = qkv.shape

    y = rms_norm(params["norm"], x)
    into = jnp.concatenate([qkv.reshape(width, -1), params["up"]["kernel"]], axis=1)
    heads, hidden = jnp.split(gather_matmul(y, into, axis_name), [3 * num_heads * head_dim], axis=-1)
    both = jnp.concatenate([attend(heads, num_heads), jax.nn.gelu(hidden + params["up"]["bias"])], axis=-1)
    back = jnp.concatenate([out.reshape(-1, width), params["down"]["kernel"]])
    y = matmul_scatter(both, back, axis_name) + params["down"]["bias"]
    return x + drop(y, rate, fold_key_over_axes(key, (axis_name,)))
    ### END SOLUTION


# %%
def vocab_parallel_embed(params: PyTree, tokens: jax.Array, axis_name: str) -> jax.Array:
    """Token plus learned position. Runs inside ``shard_map``."""
    ### BEGIN SOLUTION
    table, position = params["token"], params["position"]
    index, own = lax.axis_index(axis_name), table.shape[0]
    local = tokens - index * own
    mine = (local >= 0) & (local < own)
    rows = jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)
    x = lax.psum_scatter(rows, axis_name, scatter_dimension=1, tiled=True)
    return x + lax.dynamic_slice_in_dim(position, index * x.shape[1], x.shape[1])
    ### END SOLUTION


# %%
def vocab_parallel_loss(
    params: PyTree, x: jax.Array, targets: jax.Array, gather_matmul: Matmul, axis_name: str
) -> jax.Array:
    """Mean cross-entropy with the vocabulary split. Runs inside ``shard_map``."""
    ### BEGIN SOLUTION
    kernel, bias = params["out"]["kernel"], params["out"]["bias"]
    logits = gather_matmul(rms_norm(params["norm"], x), kernel, axis_name) + bias
    highest = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), axis_name)
    total = lax.psum(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1), axis_name)

    local = targets - lax.axis_index(axis_name) * bias.size
    mine = (local >= 0) & (local < bias.size)
    found = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[..., None], axis=-1)[..., 0]
    right = lax.psum(jnp.where(mine, found, 0), axis_name)
    return jnp.mean(jnp.log(total) + highest - right)
    ### END SOLUTION


# %%
def tp_transformer_step(
    params: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    key: jax.Array,
    rate: float,
    parallel: bool,
    data_axis: str,
    tensor_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """One step of SGD of a Transformer on ``data`` x ``tensor``. Runs inside ``shard_map``."""
    ### BEGIN SOLUTION
    block = parallel_transformer_block if parallel else tp_transformer_block
    key = fold_key_over_axes(key, (data_axis,))

    def layer(x, numbered):
        number, weights = numbered
        own = jax.random.fold_in(key, number)
        return block(weights, x, own, rate, ring_gather_matmul, matmul_ring_scatter, tensor_axis), None

    def loss_of(params):
        x = vocab_parallel_embed(params["embed"], batch["inputs"], tensor_axis)
        num_layers = len(jax.tree.leaves(params["layers"])[0])
        x, _ = lax.scan(layer, x, (jnp.arange(num_layers), params["layers"]))
        return vocab_parallel_loss(params["head"], x, batch["targets"], ring_gather_matmul, tensor_axis)

    def whole(gradient, spec):
        shares = gradient if tensor_axis in spec else lax.psum(gradient, tensor_axis)
        return lax.pmean(shares, data_axis)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    gradients = jax.tree.map(whole, gradients, specs)
    updated = jax.tree.map(lambda leaf, gradient: leaf - learning_rate * gradient, params, gradients)
    return updated, lax.pmean(loss, data_axis)
    ### END SOLUTION
