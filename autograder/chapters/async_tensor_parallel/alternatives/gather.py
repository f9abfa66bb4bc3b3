"""Right answers for ``ring_gather_matmul`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import vary_alike


def downwards(x, kernel, axis_name):
    """Rows travel to lower places, a ``fori_loop`` turns the ring, and the derivative is JAX's."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    to_previous = [(i, (i - 1) % size) for i in range(size)]
    x, kernel = vary_alike(x, kernel)

    def put(whole, chunk, owner):
        return lax.dynamic_update_slice_in_dim(whole, chunk @ kernel, owner % size * length, -2)

    def turn(step, carry):
        whole, chunk = carry
        return put(whole, chunk, index + step), lax.ppermute(chunk, axis_name, to_previous)

    whole = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[-1])), x)[0]
    whole, last = lax.fori_loop(0, size - 1, turn, (whole, x))
    return put(whole, last, index - 1)


def unrolled(x, kernel, axis_name):
    """A Python loop, that sends before it multiplies."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    to_next = [(i, (i + 1) % size) for i in range(size)]
    whole = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[-1]), x.dtype), x, kernel)[0]
    for step in range(size):
        coming = lax.ppermute(x, axis_name, to_next) if step < size - 1 else x
        whole = lax.dynamic_update_slice_in_dim(whole, x @ kernel, (index - step) % size * length, -2)
        x = coming
    return whole


def in_places_of_their_own(x, kernel, axis_name):
    """The result has a dim for devices until the end; one's own rows are multiplied before the loop."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]
    x, kernel = vary_alike(x, kernel)
    if size == 1:
        return x @ kernel

    def put(whole, chunk, step):
        product = jnp.einsum("...ri,io->...ro", chunk, kernel)[..., None, :, :]
        return lax.dynamic_update_slice_in_dim(whole, product, (index - step) % size, -3)

    def turn(carry, step):
        whole, chunk = carry
        return (put(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)), None

    empty = jnp.zeros((*x.shape[:-2], size, x.shape[-2], kernel.shape[-1]))
    begun = put(vary_alike(empty, x)[0], x, 0), lax.ppermute(x, axis_name, to_next)
    (whole, last), _ = lax.scan(turn, begun, jnp.arange(1, size - 1))
    return put(whole, last, size - 1).reshape(*x.shape[:-2], -1, kernel.shape[-1])


def gathered_again(x, kernel, axis_name):
    """The backward pass sends the rows round once more, and adds to the kernel's gradient in every step."""
    size = lax.axis_size(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    @jax.custom_vjp
    def product(x, kernel):
        return downwards(x, kernel, axis_name)

    def backward(saved, gradient):
        x, kernel = saved
        index, length = lax.axis_index(axis_name), x.shape[-2]

        def rows(number):
            return lax.dynamic_slice_in_dim(gradient, number % size * length, length, -2)

        def turn(carry, step):
            of_x, chunk, of_kernel = carry
            coming, below = lax.ppermute(chunk, axis_name, to_next), lax.ppermute(of_x, axis_name, to_next)
            of_kernel += jnp.einsum("...ri,...ro->io", chunk, rows(index - step))
            return (below + rows(index - 2 - step) @ kernel.T, coming, of_kernel), None

        begun = rows(index - 1) @ kernel.T, x, jnp.zeros_like(kernel)
        (of_x, last, of_kernel), _ = lax.scan(turn, begun, jnp.arange(size - 1))
        return of_x, of_kernel + jnp.einsum("...ri,...ro->io", last, rows(index + 1))

    product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), backward)
    return product(*vary_alike(x, kernel))


ALTERNATIVES = (downwards, unrolled, in_places_of_their_own, gathered_again)
