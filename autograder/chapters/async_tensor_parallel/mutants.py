"""Wrong answers for ``async_tensor_parallel``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import vary_alike
from solutions.async_tensor_parallel import (
    async_tp_mlp,
    bidirectional_matmul_scatter,
    matmul_ring_scatter,
    ring_gather_matmul,
)


def gathers_then_multiplies(x, kernel, axis_name):
    """The synchronous version: the naive way, in memory and in time."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel


def to_next(size):
    return [(i, (i + 1) % size) for i in range(size)]


def _gather(x, kernel, axis_name, *, turned=1, late=False, rounds=0):
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    x, kernel = vary_alike(x, kernel)

    def place(whole, chunk, step):
        at = (index - turned * step) % size * length
        return lax.dynamic_update_slice_in_dim(whole, chunk @ kernel, at, -2)

    def pass_on(carry, step):
        whole, chunk = carry
        coming = lax.ppermute(chunk, axis_name, to_next(size))
        return (place(whole, coming, step + 1) if late else place(whole, chunk, step), coming), None

    empty = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[1]), x.dtype), x)[0]
    begun = place(empty, x, 0) if late else empty
    (whole, last), _ = lax.scan(pass_on, (begun, x), jnp.arange(size - 1 + rounds))
    return whole if late or rounds else place(whole, last, size - 1)


def multiplies_what_has_just_arrived(x, kernel, axis_name):
    """Each step sends, waits, and multiplies what came."""
    return _gather(x, kernel, axis_name, late=True)


def places_in_the_other_order(x, kernel, axis_name):
    return _gather(x, kernel, axis_name, turned=-1)


def multiplies_in_bfloat16(x, kernel, axis_name):
    return ring_gather_matmul(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), axis_name).astype(x.dtype)


def forgets_the_kernels_gradient(x, kernel, axis_name):
    return ring_gather_matmul(x, lax.stop_gradient(kernel), axis_name)


def multiplies_then_scatters(x, kernel, axis_name):
    """The synchronous version: the naive way, in memory and in time."""
    return lax.psum_scatter(x @ kernel, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


def _scatter(x, kernel, axis_name, *, first=-1, add_first=False, rounds=0):
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size

    def own(number):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, -2) @ kernel

    def pass_on(partial_sum, step):
        if add_first:
            return lax.ppermute(partial_sum + own(index - step), axis_name, to_next(size)), None
        return lax.ppermute(partial_sum, axis_name, to_next(size)) + own(index + first - step), None

    if add_first:
        nothing = vary_alike(jnp.zeros((*x.shape[:-2], length, kernel.shape[1]), x.dtype), x)[0]
        return lax.scan(pass_on, nothing, jnp.arange(1, size))[0] + own(index)
    return lax.scan(pass_on, own(index + first), jnp.arange(1, size + rounds))[0]


def adds_before_it_sends(x, kernel, axis_name):
    """Each transfer waits for the product of its own step."""
    return _scatter(x, kernel, axis_name, add_first=True)


def begins_with_its_own_rows(x, kernel, axis_name):
    """A finished sum lies one device too far."""
    return _scatter(x, kernel, axis_name, first=0)


def takes_the_mean(x, kernel, axis_name):
    return matmul_ring_scatter(x, kernel, axis_name) / lax.axis_size(axis_name)


def without_a_gradient(x, kernel, axis_name):
    return lax.stop_gradient(matmul_ring_scatter(x, kernel, axis_name))


def one_way_alone(x, kernel, axis_name):
    return ring_gather_matmul(x, kernel, axis_name)


def both_halves_the_same_way(x, kernel, axis_name):
    """Two rings of half of the features, and both turn the same way."""
    (left, right), (top, bottom) = jnp.split(x, 2, -1), jnp.split(kernel, 2)
    return ring_gather_matmul(left, top, axis_name) + ring_gather_matmul(right, bottom, axis_name)


def turned(axis_name, by):
    size = lax.axis_size(axis_name)
    return [(i, (i + by) % size) for i in range(size)]


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


def _scatter_in_both_ways(x, kernel, axis_name, *, begin=(-1, 1), by=(-1, 1), add_first=False):
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
    return _scatter_in_both_ways(x, kernel, axis_name, add_first=True)


def takes_the_same_rows_for_both(x, kernel, axis_name):
    """What goes the other way round needs its rows in the other order."""
    return _scatter_in_both_ways(x, kernel, axis_name, begin=(-1, -1), by=(-1, -1))


def without_any_gradient(x, kernel, axis_name):
    return lax.stop_gradient(bidirectional_matmul_scatter(x, kernel, axis_name))


def _mlp(params, x, axis_name, gather, scatter):
    hidden = jax.nn.gelu(gather(x, params["up"]["kernel"], axis_name) + params["up"]["bias"])
    return scatter(hidden, params["down"]["kernel"], axis_name) + params["down"]["bias"]


def synchronous(params, x, axis_name):
    """What ``tp_mlp`` does: the naive way."""
    return _mlp(params, x, axis_name, gathers_then_multiplies, multiplies_then_scatters)


def gather(x, kernel, axis_name):
    """A ring with the derivative that JAX makes of it."""
    return _gather(x, kernel, axis_name)


def scatter(x, kernel, axis_name):
    """A ring with the derivative that JAX makes of it."""
    return _scatter(x, kernel, axis_name)


def _forward_alone(ring, plain):
    """A ring whose derivative is the synchronous version's."""

    def product(x, kernel, axis_name):
        function = jax.custom_vjp(lambda x, kernel: ring(x, kernel, axis_name))

        def forward(x, kernel):
            return ring(x, kernel, axis_name), (x, kernel)

        def backward(saved, gradient):
            return jax.vjp(lambda x, kernel: plain(x, kernel, axis_name), *saved)[1](gradient)

        function.defvjp(forward, backward)
        return function(*vary_alike(x, kernel))

    return product


def hides_the_forward_pass_alone(params, x, axis_name):
    """Rings forward, and backward the collectives of the synchronous version."""
    gather = _forward_alone(ring_gather_matmul, gathers_then_multiplies)
    return _mlp(params, x, axis_name, gather, _forward_alone(matmul_ring_scatter, multiplies_then_scatters))


def leaves_the_derivative_to_jax(params, x, axis_name):
    """Little is exposed, and the backward pass adds to whole kernels' gradients in every step: slower than waiting."""
    return _mlp(params, x, axis_name, gather, scatter)


def waits_in_every_step(params, x, axis_name):
    """Only permutes, and transfers and products take turns."""
    return _mlp(params, x, axis_name, multiplies_what_has_just_arrived, adds_before_it_sends)


def forgets_the_first_bias(params, x, axis_name):
    params = {**params, "up": {**params["up"], "bias": jnp.zeros_like(params["up"]["bias"])}}
    return async_tp_mlp(params, x, axis_name)


MUTANTS = (
    mutant(
        "ring_gather_matmul",
        gathers_then_multiplies,
        "live temporaries",
        "other collectives",
        "permute bytes",
        "predicted time",
    ),
    mutant("ring_gather_matmul", multiplies_what_has_just_arrived, "predicted time"),
    mutant("ring_gather_matmul", places_in_the_other_order, "gradients", "values"),
    mutant("ring_gather_matmul", multiplies_in_bfloat16, "gradients", "live temporaries", "permute bytes", "values"),
    mutant("ring_gather_matmul", forgets_the_kernels_gradient, "gradients"),
    mutant(
        "matmul_ring_scatter",
        multiplies_then_scatters,
        "live temporaries",
        "other collectives",
        "permute bytes",
        "predicted time",
    ),
    mutant("matmul_ring_scatter", adds_before_it_sends, "predicted time"),
    mutant("matmul_ring_scatter", begins_with_its_own_rows, "gradients", "values"),
    mutant("matmul_ring_scatter", takes_the_mean, "gradients", "values"),
    mutant("matmul_ring_scatter", without_a_gradient, "gradients", "permute bytes"),
    mutant(
        "bidirectional_gather_matmul",
        gathers_then_multiplies,
        "bytes each way",
        "other collectives",
        "permute bytes",
        "predicted time",
    ),
    mutant("bidirectional_gather_matmul", one_way_alone, "bytes each way"),
    mutant("bidirectional_gather_matmul", both_halves_the_same_way, "bytes each way"),
    mutant("bidirectional_gather_matmul", places_both_halves_as_if_they_came_one_way, "gradients", "values"),
    mutant("bidirectional_gather_matmul", gathers_both_ways_then_multiplies, "predicted time"),
    mutant(
        "bidirectional_matmul_scatter",
        multiplies_then_scatters,
        "bytes each way",
        "other collectives",
        "permute bytes",
        "predicted time",
    ),
    mutant("bidirectional_matmul_scatter", one_way_scatter, "bytes each way"),
    mutant("bidirectional_matmul_scatter", adds_both_before_it_sends, "predicted time"),
    mutant("bidirectional_matmul_scatter", takes_the_same_rows_for_both, "gradients", "values"),
    mutant("bidirectional_matmul_scatter", without_any_gradient, "gradients", "permute bytes"),
    mutant("async_tp_mlp", synchronous, "exposed communication", "other collectives", "permute bytes"),
    mutant("async_tp_mlp", hides_the_forward_pass_alone, "exposed communication", "other collectives", "permute bytes"),
    mutant("async_tp_mlp", leaves_the_derivative_to_jax, "predicted time"),
    mutant("async_tp_mlp", waits_in_every_step, "exposed communication", "predicted time"),
    mutant("async_tp_mlp", forgets_the_first_bias, "gradient norm", "gradients", "values"),
)
