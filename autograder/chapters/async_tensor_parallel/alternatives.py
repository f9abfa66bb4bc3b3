"""Alternative implementations of ``async_tensor_parallel``: each must pass every fact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import vary_alike


def turned(axis_name, by):
    size = lax.axis_size(axis_name)
    return [(i, (i + by) % size) for i in range(size)]


def downwards(x, kernel, axis_name):
    """Rows travel to lower places, a ``fori_loop`` runs the ring, and JAX derives the backward pass."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    x, kernel = vary_alike(x, kernel)

    def put(whole, chunk, owner):
        return lax.dynamic_update_slice_in_dim(whole, chunk @ kernel, owner % size * length, -2)

    def turn(step, carry):
        whole, chunk = carry
        return put(whole, chunk, index + step), lax.ppermute(chunk, axis_name, turned(axis_name, -1))

    whole = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[-1])), x)[0]
    whole, last = lax.fori_loop(0, size - 1, turn, (whole, x))
    return put(whole, last, index - 1)


def unrolled(x, kernel, axis_name):
    """A Python loop that sends before it multiplies."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    whole = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[-1]), x.dtype), x, kernel)[0]
    for step in range(size):
        coming = lax.ppermute(x, axis_name, turned(axis_name, 1)) if step < size - 1 else x
        whole = lax.dynamic_update_slice_in_dim(whole, x @ kernel, (index - step) % size * length, -2)
        x = coming
    return whole


def matmul_ring_scatter_downwards(x, kernel, axis_name):
    """Sums travel to lower places, a ``fori_loop`` runs the ring, and JAX derives the backward pass."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size

    def of(owner):
        return lax.dynamic_slice_in_dim(x, owner % size * length, length, -2) @ kernel

    def turn(step, total):
        return of(index + 1 + step) + lax.ppermute(total, axis_name, turned(axis_name, -1))

    return lax.fori_loop(1, size, turn, of(index + 1))


def matmul_ring_scatter_unrolled(x, kernel, axis_name):
    return scattered(x, kernel, axis_name, unroll=True)


def rows_in_one_product(x, kernel, axis_name):
    """Half of the rows in each direction, joined for one product with the whole kernel."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    half = length // 2
    x, kernel = vary_alike(x, kernel)

    def put(whole, upper, lower, step):
        product = jnp.concatenate([upper, lower], -2) @ kernel
        first, second = (index - step) % size * length, (index + step) % size * length + half
        whole = lax.dynamic_update_slice_in_dim(whole, product[..., :half, :], first, -2)
        return lax.dynamic_update_slice_in_dim(whole, product[..., half:, :], second, -2)

    def turn(carry, step):
        whole, upper, lower = carry
        coming = (
            lax.ppermute(upper, axis_name, turned(axis_name, 1)),
            lax.ppermute(lower, axis_name, turned(axis_name, -1)),
        )
        return (put(whole, upper, lower, step), *coming), None

    empty = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[1])), x)[0]
    (whole, upper, lower), _ = lax.scan(turn, (empty, x[..., :half, :], x[..., half:, :]), jnp.arange(size - 1))
    return put(whole, upper, lower, size - 1)


def features_unrolled(x, kernel, axis_name):
    """Half of the features in each direction in a Python loop, added to zeros with ``at``."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    halves, parts = jnp.split(x, 2, -1), jnp.split(kernel, 2)
    whole = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[1])), x, kernel)[0]
    for step in range(size):
        coming = halves
        if step < size - 1:
            coming = [lax.ppermute(h, axis_name, turned(axis_name, by)) for h, by in zip(halves, (1, -1), strict=True)]
        for half, part, owner in zip(halves, parts, (index - step, index + step), strict=True):
            at = owner % size * length
            before = lax.dynamic_slice_in_dim(whole, at, length, -2)
            whole = lax.dynamic_update_slice_in_dim(whole, before + half @ part, at, -2)
        halves = coming
    return whole


def sums_of_rows(x, kernel, axis_name):
    """Half of the rows in each direction, computed in one product with the whole kernel."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size
    half = length // 2

    def own(step):
        starts = (index - step) % size * length, (index + step) % size * length + half
        product = jnp.concatenate([lax.dynamic_slice_in_dim(x, at, half, -2) for at in starts], -2) @ kernel
        return product[..., :half, :], product[..., half:, :]

    def turn(sums, step):
        upper, lower = own(step)
        above = lax.ppermute(sums[0], axis_name, turned(axis_name, 1))
        below = lax.ppermute(sums[1], axis_name, turned(axis_name, -1))
        return (above + upper, below + lower), None

    sums, _ = lax.scan(turn, own(1), jnp.arange(2, size + 1))
    return jnp.concatenate(sums, -2)


def sums_of_features_unrolled(x, kernel, axis_name):
    """Half of the features in each direction in a Python loop; the kernel is split into halves once."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length, (left, right) = x.shape[-2] // size, jnp.split(kernel, 2, -1)

    def of(owner, part):
        return lax.dynamic_slice_in_dim(x, owner % size * length, length, -2) @ part

    up, down = of(index - 1, left), of(index + 1, right)
    for step in range(2, size + 1):
        up, down = (
            lax.ppermute(up, axis_name, turned(axis_name, 1)),
            lax.ppermute(down, axis_name, turned(axis_name, -1)),
        )
        up, down = up + of(index - step, left), down + of(index + step, right)
    return jnp.concatenate([up, down], -1)


def gathered(x, use, axis_name, *, unroll=False):
    """Results of ``use`` for each device's rows, in order: a list of arrays of all rows."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]

    def put(wholes, chunk, step):
        at = (index - step) % size * length
        return [lax.dynamic_update_slice_in_dim(w, part, at, -2) for w, part in zip(wholes, use(chunk), strict=True)]

    def turn(carry, step):
        wholes, chunk = carry
        coming = lax.ppermute(chunk, axis_name, turned(axis_name, 1))
        return (put(wholes, chunk, step), coming), None

    shapes = [(*x.shape[:-2], size * length, part.shape[-1]) for part in jax.eval_shape(use, x)]
    carry = [vary_alike(jnp.zeros(shape), x)[0] for shape in shapes], x
    if unroll:
        for step in range(size - 1):
            carry, _ = turn(carry, step)
    else:
        carry, _ = lax.scan(turn, carry, jnp.arange(size - 1))
    return put(*carry, size - 1)


def scattered(x, kernel, axis_name, *, unroll=False):
    """This device's rows of the product, summed over devices."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size

    def own(step):
        return lax.dynamic_slice_in_dim(x, (index - step) % size * length, length, -2) @ kernel

    def turn(total, step):
        return lax.ppermute(total, axis_name, turned(axis_name, 1)) + own(step), None

    total = own(1)
    if unroll:
        for step in range(2, size + 1):
            total, _ = turn(total, step)
        return total
    return lax.scan(turn, total, jnp.arange(2, size + 1))[0]


def async_tp_mlp_unrolled(params, x, axis_name):
    """Python loops in both passes, and a kernel's gradient from all rows at once."""

    def rows_in_place(x, kernel):
        return gathered(x, lambda chunk: [chunk @ kernel, chunk], axis_name, unroll=True)

    def first_forward(x, kernel):
        product, rows = rows_in_place(x, kernel)
        return product, (rows, kernel)

    def first_backward(saved, gradient):
        rows, kernel = saved
        of_x = scattered(gradient, kernel.T, axis_name, unroll=True)
        return of_x, jnp.einsum("...ri,...ro->io", rows, gradient)

    def second_backward(saved, gradient):
        x, kernel = saved
        of_x, gradients = rows_in_place(gradient, kernel.T)
        return of_x, jnp.einsum("...ri,...ro->io", x, gradients)

    first = jax.custom_vjp(lambda x, kernel: rows_in_place(x, kernel)[0])
    first.defvjp(first_forward, first_backward)
    second = jax.custom_vjp(lambda x, kernel: scattered(x, kernel, axis_name, unroll=True))
    second.defvjp(lambda x, kernel: (second(x, kernel), (x, kernel)), second_backward)
    hidden = first(*vary_alike(x, params["up"]["kernel"])) + params["up"]["bias"]
    return second(*vary_alike(jax.nn.gelu(hidden), params["down"]["kernel"])) + params["down"]["bias"]


def gathering_again(params, x, axis_name):
    """Keeps only this device's rows: the backward pass sends them round again, alongside the gradients."""
    size, to = lax.axis_size(axis_name), turned(axis_name, 1)

    @jax.custom_vjp
    def first(x, kernel):
        return gathered(x, lambda chunk: [chunk @ kernel], axis_name)[0]

    def first_backward(saved, gradient):
        x, kernel = saved
        index, length = lax.axis_index(axis_name), x.shape[-2]

        def put(rows, chunk, step):
            return lax.dynamic_update_slice_in_dim(rows, chunk, (index - step) % size * length, -2)

        def own(step):
            return lax.dynamic_slice_in_dim(gradient, (index - step) % size * length, length, -2) @ kernel.T

        def turn(carry, step):
            total, chunk, rows = carry
            coming, chunk = lax.ppermute(total, axis_name, to), lax.ppermute(chunk, axis_name, to)
            return (coming + own(step), chunk, put(rows, chunk, step - 1)), None

        empty = vary_alike(jnp.zeros((*x.shape[:-2], size * length, x.shape[-1])), x)[0]
        (of_x, _, rows), _ = lax.scan(turn, (own(1), x, put(empty, x, 0)), jnp.arange(2, size + 1))
        return of_x, jnp.einsum("...ri,...ro->io", rows, gradient)

    @jax.custom_vjp
    def second(x, kernel):
        return scattered(x, kernel, axis_name)

    def second_backward(saved, gradient):
        x, kernel = saved
        of_x, gradients = gathered(gradient, lambda chunk: [chunk @ kernel.T, chunk], axis_name)
        return of_x, jnp.einsum("...ri,...ro->io", x, gradients)

    first.defvjp(lambda x, kernel: (first(x, kernel), (x, kernel)), first_backward)
    second.defvjp(lambda x, kernel: (second(x, kernel), (x, kernel)), second_backward)
    hidden = first(*vary_alike(x, params["up"]["kernel"])) + params["up"]["bias"]
    return second(*vary_alike(jax.nn.gelu(hidden), params["down"]["kernel"])) + params["down"]["bias"]


ALTERNATIVES = {
    "ring_gather_matmul": (downwards, unrolled),
    "matmul_ring_scatter": (matmul_ring_scatter_downwards, matmul_ring_scatter_unrolled),
    "bidirectional_gather_matmul": (rows_in_one_product, features_unrolled),
    "bidirectional_matmul_scatter": (sums_of_rows, sums_of_features_unrolled),
    "async_tp_mlp": (async_tp_mlp_unrolled, gathering_again),
}
