from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from course.model import Model, rms_norm
from solutions.data_parallel import fold_key_over_axes

PyTree = Any


def init_dense(key: jax.Array, d_in: int, d_out: int, axis_name: str, split: str | None) -> PyTree:
    """A dense layer's first parameters, each device's own part of them. Runs inside ``shard_map``.

    Args:
        key: The same on every device.
        d_in: Inputs of the whole layer.
        d_out: Outputs of the whole layer.
        axis_name: The mesh axis.
        split: What the devices of ``axis_name`` share out: ``"columns"`` of the kernel, its ``"rows"``, or None.

    Returns:
        ``{"kernel": ..., "bias": ...}``: ``[d_in, d_out/axis]`` and ``[d_out/axis]`` for columns, ``[d_in/axis,
        d_out]`` and ``[d_out]`` for rows, ``[d_in, d_out]`` and ``[d_out]`` for None.
    """
    size, scale = lax.axis_size(axis_name), d_in**-0.5
    if split == "columns":
        d_out //= size
    elif split == "rows":
        d_in //= size
    if split is not None:
        key = fold_key_over_axes(key, (axis_name,))
    return {"kernel": scale * jax.random.normal(key, (d_in, d_out)), "bias": jnp.zeros(d_out)}


def column_parallel_dense(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """A dense layer whose outputs are split over an axis; gathers the rows. Runs inside ``shard_map``.

    Args:
        params: ``{"kernel": [d_in, d_out/axis], "bias": [d_out/axis]}``, or without a bias.
        x: This device's rows, ``[..., rows/axis, d_in]``.
        axis_name: The mesh axis.

    Returns:
        All rows of this device's outputs, ``[..., rows, d_out/axis]``.
    """
    y = lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ params["kernel"]
    return y + params["bias"] if "bias" in params else y


def row_parallel_dense(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """A dense layer whose inputs are split over an axis; sums and scatters the rows. Runs inside ``shard_map``.

    Args:
        params: ``{"kernel": [d_in/axis, d_out], "bias": [d_out]}``, or without a bias; the bias is the same on every
            device.
        x: All rows of this device's inputs, ``[..., rows, d_in/axis]``.
        axis_name: The mesh axis.

    Returns:
        This device's rows of all outputs, ``[..., rows/axis, d_out]``.
    """
    y = lax.psum_scatter(x @ params["kernel"], axis_name, scatter_dimension=x.ndim - 2, tiled=True)
    return y + params["bias"] if "bias" in params else y


def tp_mlp(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """Two dense layers with a GELU between, ``[..., rows/axis, width]`` to the same. Runs inside ``shard_map``.

    Args:
        params: ``{"up": ..., "down": ...}``, as for ``column_parallel_dense`` and ``row_parallel_dense``.
        x: This device's rows, ``[..., rows/axis, width]``.
        axis_name: The mesh axis over which the hidden features are split.

    Returns:
        This device's rows, like ``x``.
    """
    return row_parallel_dense(
        params["down"], jax.nn.gelu(column_parallel_dense(params["up"], x, axis_name)), axis_name
    )


def tp_attention(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """Causal self-attention, its heads split over an axis. Runs inside ``shard_map``.

    Args:
        params: ``{"qkv": {"kernel": [width, 3, num_heads/axis, head_dim]}, "out": {"kernel": [num_heads/axis,
            head_dim, width]}}``.
        x: This device's part of each sequence, ``[batch, seq/axis, width]``.
        axis_name: The mesh axis over which the heads are split.

    Returns:
        This device's part of each sequence, like ``x``.
    """
    kernel, out = params["qkv"]["kernel"], params["out"]["kernel"]
    width, _, num_heads, head_dim = kernel.shape
    qkv = column_parallel_dense({"kernel": kernel.reshape(width, -1)}, x, axis_name)
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, num_heads, head_dim), 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return row_parallel_dense(
        {"kernel": out.reshape(-1, width)}, mixed.reshape(*mixed.shape[:2], -1), axis_name
    )


def tp_train_step(
    params: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    data_axis: str,
    tensor_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """One step of SGD of the course's MLP on ``data`` x ``tensor``. Runs inside ``shard_map``.

    Args:
        params: This device's part, all leaves varying over both axes: under ``layers`` ``up`` and ``down`` are split
            over ``tensor_axis`` as for ``tp_mlp``, with a leading dim of layers; everything else is whole.
        specs: The ``PartitionSpec`` of each leaf, which names ``tensor_axis`` where it is split.
        batch: This device's rows, ``inputs`` and ``targets``, ``[batch/(data * tensor), ...]``.
        model: The model's pure functions; its ``embed`` and ``loss`` work on any rows.
        data_axis: The mesh axis along which all parameters are the same.
        tensor_axis: The mesh axis along which hidden features are split.
        learning_rate: A scalar.

    Returns:
        ``(params, loss)``: updated, and the mean loss over all rows, the same on every device.
    """

    def layer(x, weights):
        return x + tp_mlp(weights, rms_norm(weights["norm"], x), tensor_axis), None

    def loss_of(params):
        x = model.embed(params["embed"], batch["inputs"])
        x, _ = lax.scan(layer, x, params["layers"])
        return model.loss(params["head"], x, batch["targets"])

    def mean(gradient, spec):
        if tensor_axis in spec:
            return lax.pmean(gradient, data_axis) / lax.axis_size(tensor_axis)
        return lax.pmean(gradient, (data_axis, tensor_axis))

    loss, gradients = jax.value_and_grad(loss_of)(params)
    gradients = jax.tree.map(mean, gradients, specs)
    updated = jax.tree.map(lambda leaf, gradient: leaf - learning_rate * gradient, params, gradients)
    return updated, lax.pmean(loss, (data_axis, tensor_axis))
