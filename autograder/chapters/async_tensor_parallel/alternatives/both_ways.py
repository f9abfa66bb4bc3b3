"""Right answers for the two functions that go both ways, in another style."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from course.mesh import vary_alike


def turned(axis_name, by):
    size = lax.axis_size(axis_name)
    return [(i, (i + by) % size) for i in range(size)]


def rows_in_one_product(x, kernel, axis_name):
    """Half of the rows each way, joined for one product with the whole kernel."""
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


def rows_in_two_products(x, kernel, axis_name):
    """Half of the rows each way, each multiplied by itself."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    x, kernel = vary_alike(x, kernel)

    def put(whole, halves, step):
        for number, (half, way) in enumerate(zip(halves, (-1, 1), strict=True)):
            at = (index + way * step) % size * length + number * (length // 2)
            whole = lax.dynamic_update_slice_in_dim(whole, half @ kernel, at, -2)
        return whole

    def turn(step, carry):
        whole, (upper, lower) = carry
        coming = (
            lax.ppermute(upper, axis_name, turned(axis_name, 1)),
            lax.ppermute(lower, axis_name, turned(axis_name, -1)),
        )
        return put(whole, (upper, lower), step), coming

    empty = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[1])), x)[0]
    whole, halves = lax.fori_loop(0, size - 1, turn, (empty, tuple(jnp.split(x, 2, -2))))
    return put(whole, halves, size - 1)


def features_unrolled(x, kernel, axis_name):
    """Half of the features each way in a Python loop, added to zeros by ``at``."""
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
    """Half of the rows each way, computed in one product with the whole kernel."""
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
    """Half of the features each way in a Python loop; the kernel's halves are cut once."""
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


def two_rings_one_after_the_other(x, kernel, axis_name):
    """A whole ring for the left half of the features, and then one the other way for the right half."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size

    def ring(part, way):
        def of(step):
            return lax.dynamic_slice_in_dim(x, (index - way * step) % size * length, length, -2) @ part

        def turn(total, step):
            return lax.ppermute(total, axis_name, turned(axis_name, way)) + of(step), None

        return lax.scan(turn, of(1), jnp.arange(2, size + 1))[0]

    left, right = jnp.split(kernel, 2, -1)
    return jnp.concatenate([ring(left, 1), ring(right, -1)], -1)


GATHER = (rows_in_one_product, rows_in_two_products, features_unrolled)
SCATTER = (sums_of_rows, sums_of_features_unrolled, two_rings_one_after_the_other)
