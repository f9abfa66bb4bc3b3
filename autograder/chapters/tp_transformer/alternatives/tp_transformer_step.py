"""Right answers for ``tp_transformer_step`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.tp_transformer import (
    parallel_transformer_block,
    tp_transformer_block,
    vocab_parallel_embed,
    vocab_parallel_loss,
)


def over_all_devices_at_once(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """Whole leaves over both axes in one sum; layers by a Python loop."""
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
    """Every layer again in the backward pass; optax for the update."""
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


ALTERNATIVES = (over_all_devices_at_once, with_layers_that_recompute)
