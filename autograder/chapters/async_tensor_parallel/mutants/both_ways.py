"""Wrong answers for ``bidirectional_gather_matmul`` and ``bidirectional_matmul_scatter``."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from autograder.chapters.async_tensor_parallel.mutants import rings
from autograder.proof.mutants import mutant
from course.mesh import vary_alike
from solutions.async_tensor_parallel import bidirectional_matmul_scatter, matmul_ring_scatter, ring_gather_matmul


def turned(axis_name, by):
    size = lax.axis_size(axis_name)
    return [(i, (i + by) % size) for i in range(size)]


def one_way_alone(x, kernel, axis_name):
    return ring_gather_matmul(x, kernel, axis_name)


def both_halves_the_same_way(x, kernel, axis_name):
    """Two rings of half of the features, and both turn the same way."""
    (left, right), (top, bottom) = jnp.split(x, 2, -1), jnp.split(kernel, 2)
    return ring_gather_matmul(left, top, axis_name) + ring_gather_matmul(right, bottom, axis_name)


def places_both_halves_as_if_they_came_one_way(x, kernel, axis_name):
    """The second half comes from the devices behind, and is put where the first one belongs."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    x, kernel = vary_alike(x, kernel)

    def place(whole, halves, step):
        for half, part in zip(halves, jnp.split(kernel, 2), strict=True):
            at = (index - step) % size * length
            known = lax.dynamic_slice_in_dim(whole, at, length, -2)
            whole = lax.dynamic_update_slice_in_dim(whole, known + half @ part, at, -2)
        return whole

    def pass_on(carry, step):
        whole, halves = carry
        coming = tuple(lax.ppermute(h, axis_name, turned(axis_name, by)) for h, by in zip(halves, (1, -1), strict=True))
        return (place(whole, halves, step), coming), None

    halves = tuple(jnp.split(x, 2, -1))
    empty = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[1]), x.dtype), x)[0]
    (whole, last), _ = lax.scan(pass_on, (empty, halves), jnp.arange(size - 1))
    return place(whole, last, size - 1)


def gathers_both_ways_then_multiplies(x, kernel, axis_name):
    """The rows arrive from both sides, and nothing is multiplied until all are there."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    x, kernel = vary_alike(x, kernel)

    def place(wholes, halves, step):
        return [
            lax.dynamic_update_slice_in_dim(w, h, (index - way * step) % size * length, -2)
            for w, h, way in zip(wholes, halves, (1, -1), strict=True)
        ]

    def pass_on(carry, step):
        wholes, halves = carry
        coming = [lax.ppermute(h, axis_name, turned(axis_name, by)) for h, by in zip(halves, (1, -1), strict=True)]
        return (place(wholes, halves, step), coming), None

    halves = jnp.split(x, 2, -1)
    empty = [vary_alike(jnp.zeros((*x.shape[:-2], size * length, h.shape[-1]), x.dtype), x)[0] for h in halves]
    (wholes, last), _ = lax.scan(pass_on, (empty, halves), jnp.arange(size - 1))
    return jnp.concatenate(place(wholes, last, size - 1), -1) @ kernel


def one_way_scatter(x, kernel, axis_name):
    return matmul_ring_scatter(x, kernel, axis_name)


def two_sums_the_same_way(x, kernel, axis_name):
    left, right = jnp.split(kernel, 2, -1)
    both = matmul_ring_scatter(x, left, axis_name), matmul_ring_scatter(x, right, axis_name)
    return jnp.concatenate(both, -1)


def _scatter(x, kernel, axis_name, *, begin=(-1, 1), by=(-1, 1), add_first=False):
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length, parts = x.shape[-2] // size, jnp.split(kernel, 2, -1)

    def own(number, part):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, -2) @ part

    def send(sums):
        return [lax.ppermute(s, axis_name, turned(axis_name, way)) for s, way in zip(sums, (1, -1), strict=True)]

    def pass_on(sums, step):
        if add_first:
            return send([s + own(index + b * step, part) for s, b, part in zip(sums, by, parts, strict=True)]), None
        found = zip(send(sums), begin, by, parts, strict=True)
        return [s + own(index + at + b * step, part) for s, at, b, part in found], None

    if add_first:
        width = kernel.shape[1] // 2
        nothing = vary_alike(jnp.zeros((*x.shape[:-2], length, width), x.dtype), x)[0]
        sums = lax.scan(pass_on, [nothing, nothing], jnp.arange(1, size))[0]
        return jnp.concatenate([s + own(index, part) for s, part in zip(sums, parts, strict=True)], -1)
    first = [own(index + at, part) for at, part in zip(begin, parts, strict=True)]
    return jnp.concatenate(lax.scan(pass_on, first, jnp.arange(1, size))[0], -1)


def adds_both_before_it_sends(x, kernel, axis_name):
    """Every transfer waits for the products of its own step."""
    return _scatter(x, kernel, axis_name, add_first=True)


def takes_the_same_rows_for_both(x, kernel, axis_name):
    """What goes the other way round needs its rows in the other order."""
    return _scatter(x, kernel, axis_name, begin=(-1, -1), by=(-1, -1))


def swaps_the_halves(x, kernel, axis_name):
    result = bidirectional_matmul_scatter(x, kernel, axis_name)
    return jnp.concatenate(jnp.split(result, 2, -1)[::-1], -1)


def without_any_gradient(x, kernel, axis_name):
    return lax.stop_gradient(bidirectional_matmul_scatter(x, kernel, axis_name))


_G, _S = "bidirectional_gather_matmul", "bidirectional_matmul_scatter"
_TIME, _WAYS, _SENT, _OTHERS = "predicted time", "bytes each way", "permute bytes", "other collectives"
MUTANTS = (
    mutant(_G, rings.gathers_then_multiplies, _SENT, _WAYS, _OTHERS, _TIME),
    mutant(_G, one_way_alone, _WAYS),
    mutant(_G, both_halves_the_same_way, _WAYS),
    mutant(_G, places_both_halves_as_if_they_came_one_way, "values", "gradients"),
    mutant(_G, gathers_both_ways_then_multiplies, _TIME),
    mutant(_S, rings.multiplies_then_scatters, _SENT, _WAYS, _OTHERS, _TIME),
    mutant(_S, one_way_scatter, _WAYS),
    mutant(_S, two_sums_the_same_way, _WAYS),
    mutant(_S, adds_both_before_it_sends, _TIME),
    mutant(_S, takes_the_same_rows_for_both, "values", "gradients"),
    mutant(_S, swaps_the_halves, "values", "gradients"),
    mutant(_S, without_any_gradient, "gradients", _SENT),
)
