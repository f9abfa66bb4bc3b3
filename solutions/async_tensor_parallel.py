# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Asynchronous tensor parallelism

# %%
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import vary_alike

PyTree = Any


# %%
def ring_gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """The rows of all devices times this device's kernel. Runs inside ``shard_map``.

    Args:
        x: This device's rows, ``[..., rows/axis, d_in]``.
        kernel: This device's columns, ``[d_in, d_out/axis]``.
        axis_name: The mesh axis to gather over, of any size.

    Returns:
        ``[..., rows, d_out/axis]``.
    """
    ### BEGIN SOLUTION
    size, length = lax.axis_size(axis_name), x.shape[-2]
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def ring(x, kernel, keep):
        """All rows' products; behind them all rows, if they are to be kept."""
        index = lax.axis_index(axis_name)

        def place(wholes, chunk, step):
            at = (index - step) % size * length
            parts = (chunk @ kernel, chunk)[: len(wholes)]
            return [lax.dynamic_update_slice_in_dim(w, p, at, -2) for w, p in zip(wholes, parts, strict=True)]

        def pass_on(carry, step):
            wholes, chunk = carry
            coming = lax.ppermute(chunk, axis_name, to_next)
            return (place(wholes, chunk, step), coming), None

        shapes = [(*x.shape[:-2], size * length, width) for width in (kernel.shape[1], x.shape[-1])[: 1 + keep]]
        empty = [vary_alike(jnp.zeros(shape, x.dtype), x)[0] for shape in shapes]
        (wholes, last), _ = lax.scan(pass_on, (empty, x), jnp.arange(size - 1))
        return place(wholes, last, size - 1)

    def forward(x, kernel):
        product, rows = ring(x, kernel, keep=True)
        return product, (rows, kernel)

    def backward(saved, gradient):
        rows, kernel = saved
        index = lax.axis_index(axis_name)

        def own(number):
            return lax.dynamic_slice_in_dim(gradient, number % size * length, length, -2) @ kernel.T

        def pass_on(partial_sum, step):
            return lax.ppermute(partial_sum, axis_name, to_next) + own(index - 1 - step), None

        of_x, _ = lax.scan(pass_on, own(index - 1), jnp.arange(1, size))
        return of_x, jnp.einsum("...ri,...ro->io", rows, gradient)

    product = jax.custom_vjp(lambda x, kernel: ring(x, kernel, keep=False)[0])
    product.defvjp(forward, backward)
    return product(*vary_alike(x, kernel))
    ### END SOLUTION


# %%
def matmul_ring_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """This device's rows of the product, summed over the devices. Runs inside ``shard_map``.

    Args:
        x: All rows and this device's features, ``[..., rows, d_in/axis]``.
        kernel: This device's rows of the kernel, ``[d_in/axis, d_out]``.
        axis_name: The mesh axis to sum over, of any size.

    Returns:
        ``[..., rows/axis, d_out]``.
    """
    ### BEGIN SOLUTION
    size = lax.axis_size(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def ring(x, kernel):
        index, length = lax.axis_index(axis_name), x.shape[-2] // size

        def own(number):
            return lax.dynamic_slice_in_dim(x, number % size * length, length, -2) @ kernel

        def pass_on(partial_sum, step):
            coming = lax.ppermute(partial_sum, axis_name, to_next)
            return coming + own(index - 1 - step), None

        return lax.scan(pass_on, own(index - 1), jnp.arange(1, size))[0]

    def backward(saved, gradient):
        x, kernel = saved
        index, length = lax.axis_index(axis_name), gradient.shape[-2]

        def place(wholes, chunk, step):
            at, parts = (index - step) % size * length, (chunk @ kernel.T, chunk)
            return [lax.dynamic_update_slice_in_dim(w, p, at, -2) for w, p in zip(wholes, parts, strict=True)]

        def pass_on(carry, step):
            wholes, chunk = carry
            coming = lax.ppermute(chunk, axis_name, to_next)
            return (place(wholes, chunk, step), coming), None

        shape = (*x.shape[:-1], gradient.shape[-1])
        empty = [jnp.zeros_like(x), vary_alike(jnp.zeros(shape, x.dtype), x)[0]]
        (wholes, last), _ = lax.scan(pass_on, (empty, gradient), jnp.arange(size - 1))
        of_x, gradients = place(wholes, last, size - 1)
        return of_x, jnp.einsum("...ri,...ro->io", x, gradients)

    product = jax.custom_vjp(ring)
    product.defvjp(lambda x, kernel: (ring(x, kernel), (x, kernel)), backward)
    return product(*vary_alike(x, kernel))
    ### END SOLUTION


# %%
def bidirectional_gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Like ``ring_gather_matmul``, half of each chunk's features each way round. Runs inside ``shard_map``.

    Args:
        x: This device's rows, ``[..., rows/axis, d_in]``.
        kernel: This device's columns, ``[d_in, d_out/axis]``.
        axis_name: The mesh axis to gather over, of any size.

    Returns:
        ``[..., rows, d_out/axis]``.
    """
    ### BEGIN SOLUTION
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    to_next = [(i, (i + 1) % size) for i in range(size)]
    to_previous = [(i, (i - 1) % size) for i in range(size)]

    def place(whole, halves, step):
        for half, part, owner in zip(halves, jnp.split(kernel, 2), (index - step, index + step), strict=True):
            at = owner % size * length
            known = lax.dynamic_slice_in_dim(whole, at, length, -2)
            whole = lax.dynamic_update_slice_in_dim(whole, known + half @ part, at, -2)
        return whole

    def pass_on(carry, step):
        whole, (left, right) = carry
        coming = lax.ppermute(left, axis_name, to_next), lax.ppermute(right, axis_name, to_previous)
        return (place(whole, (left, right), step), coming), None

    x, kernel = vary_alike(x, kernel)
    empty = jnp.zeros((*x.shape[:-2], size * length, kernel.shape[-1]), x.dtype)
    halves = tuple(jnp.split(x, 2, -1))
    (whole, last), _ = lax.scan(pass_on, (vary_alike(empty, x)[0], halves), jnp.arange(size - 1))
    return place(whole, last, size - 1)
    ### END SOLUTION


# %%
def bidirectional_matmul_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Like ``matmul_ring_scatter``, half of each sum's features each way round. Runs inside ``shard_map``.

    Args:
        x: All rows and this device's features, ``[..., rows, d_in/axis]``.
        kernel: This device's rows of the kernel, ``[d_in/axis, d_out]``.
        axis_name: The mesh axis to sum over, of any size.

    Returns:
        ``[..., rows/axis, d_out]``.
    """
    ### BEGIN SOLUTION
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size
    to_next = [(i, (i + 1) % size) for i in range(size)]
    to_previous = [(i, (i - 1) % size) for i in range(size)]
    left, right = jnp.split(kernel, 2, -1)

    def own(number, part):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, -2) @ part

    def pass_on(sums, step):
        forth, back = lax.ppermute(sums[0], axis_name, to_next), lax.ppermute(sums[1], axis_name, to_previous)
        return (forth + own(index - 1 - step, left), back + own(index + 1 + step, right)), None

    sums = own(index - 1, left), own(index + 1, right)
    return jnp.concatenate(lax.scan(pass_on, sums, jnp.arange(1, size))[0], -1)
    ### END SOLUTION


# %%
def async_tp_mlp(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """The two dense layers of an MLP, in place of ``tp_mlp``. Runs inside ``shard_map``.

    Args:
        params: ``{"up": {"kernel": [width, hidden/axis], "bias": [hidden/axis]}, "down": {"kernel":
            [hidden/axis, width], "bias": [width]}}``.
        x: This device's rows, ``[..., rows/axis, width]``.
        axis_name: The mesh axis that features are split over, of any size.

    Returns:
        ``[..., rows/axis, width]``.
    """
    ### BEGIN SOLUTION
    hidden = ring_gather_matmul(x, params["up"]["kernel"], axis_name) + params["up"]["bias"]
    return matmul_ring_scatter(jax.nn.gelu(hidden), params["down"]["kernel"], axis_name) + params["down"]["bias"]
    ### END SOLUTION
