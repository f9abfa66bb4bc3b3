"""Right answers for ``matmul_ring_scatter`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import vary_alike


def downwards(x, kernel, axis_name):
    """Sums travel to lower places, a ``fori_loop`` turns the ring, and the derivative is JAX's."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size
    to_previous = [(i, (i - 1) % size) for i in range(size)]

    def of(owner):
        return lax.dynamic_slice_in_dim(x, owner % size * length, length, -2) @ kernel

    def turn(step, total):
        return of(index + 1 + step) + lax.ppermute(total, axis_name, to_previous)

    return lax.fori_loop(1, size, turn, of(index + 1))


def unrolled(x, kernel, axis_name):
    """A Python loop over chunks that were cut apart beforehand."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]
    chunks = x.reshape(*x.shape[:-2], size, -1, x.shape[-1])

    def of(owner):
        return lax.dynamic_index_in_dim(chunks, owner % size, -3, keepdims=False) @ kernel

    total = of(index - 1)
    for step in range(2, size + 1):
        coming = lax.ppermute(total, axis_name, to_next)
        total = of(index - step) + coming
    return total


def product_carried_ahead(x, kernel, axis_name):
    """Each step adds a product that is there already, sends the sum, and computes the next product meanwhile."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size
    to_next = [(i, (i + 1) % size) for i in range(size)]
    x, kernel = vary_alike(x, kernel)

    def of(owner):
        return lax.dynamic_slice_in_dim(x, owner % size * length, length, -2) @ kernel

    def turn(carry, step):
        total, own = carry
        coming = lax.ppermute(total + own, axis_name, to_next)
        return (coming, of(index - 2 - step)), None

    nothing = vary_alike(jnp.zeros((*x.shape[:-2], length, kernel.shape[1])), x)[0]
    (total, own), _ = lax.scan(turn, (nothing, of(index - 1)), jnp.arange(size - 1))
    return total + own


def summed_in_every_step(x, kernel, axis_name):
    """A derivative of its own, that adds to the kernel's gradient while gradients of the rows go round."""
    size = lax.axis_size(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    @jax.custom_vjp
    def product(x, kernel):
        return downwards(x, kernel, axis_name)

    def backward(saved, gradient):
        x, kernel = saved
        index, length = lax.axis_index(axis_name), gradient.shape[-2]

        def use(of_x, of_kernel, chunk, step):
            at = (index - step) % size * length
            rows = lax.dynamic_slice_in_dim(x, at, length, -2)
            of_x = lax.dynamic_update_slice_in_dim(of_x, chunk @ kernel.T, at, -2)
            return of_x, of_kernel + jnp.einsum("...ri,...ro->io", rows, chunk)

        def turn(carry, step):
            coming = lax.ppermute(carry[2], axis_name, to_next)
            return (*use(carry[0], carry[1], carry[2], step), coming), None

        begun = jnp.zeros_like(x), jnp.zeros_like(kernel), gradient
        (of_x, of_kernel, last), _ = lax.scan(turn, begun, jnp.arange(size - 1))
        return use(of_x, of_kernel, last, size - 1)

    product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), backward)
    return product(*vary_alike(x, kernel))


ALTERNATIVES = (downwards, unrolled, product_carried_ahead, summed_in_every_step)
