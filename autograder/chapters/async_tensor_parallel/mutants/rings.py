"""Wrong answers for ``ring_gather_matmul`` and ``matmul_ring_scatter``."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import vary_alike
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul


def to_next(size):
    return [(i, (i + 1) % size) for i in range(size)]


def gathers_then_multiplies(x, kernel, axis_name):
    """The synchronous version: the naive way, in memory and in time."""
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel


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


def goes_all_the_way_round(x, kernel, axis_name):
    """One step more than there are neighbours: the last one brings back one's own rows."""
    return _gather(x, kernel, axis_name, rounds=1)


def gathers_in_a_ring_then_multiplies(x, kernel, axis_name):
    """Only permutes, and nothing is multiplied until all rows are there."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    x, kernel = vary_alike(x, kernel)

    def pass_on(carry, step):
        whole, chunk = carry
        whole = lax.dynamic_update_slice_in_dim(whole, chunk, (index - step) % size * length, -2)
        return (whole, lax.ppermute(chunk, axis_name, to_next(size))), None

    empty = vary_alike(jnp.zeros((*x.shape[:-2], size * length, x.shape[-1]), x.dtype), x)[0]
    (whole, last), _ = lax.scan(pass_on, (empty, x), jnp.arange(size - 1))
    return lax.dynamic_update_slice_in_dim(whole, last, (index + 1) % size * length, -2) @ kernel


def puts_the_products_in_order_at_the_end(x, kernel, axis_name):
    """Stacks the products as they come, and copies all of them."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    x, kernel = vary_alike(x, kernel)

    def pass_on(chunk, _):
        return lax.ppermute(chunk, axis_name, to_next(size)), chunk @ kernel

    last, found = lax.scan(pass_on, x, length=size - 1)
    found = jnp.concatenate([found, (last @ kernel)[None]])
    ordered = jnp.take(found, (index - jnp.arange(size)) % size, axis=0)
    return jnp.moveaxis(ordered, 0, -3).reshape(*x.shape[:-2], -1, kernel.shape[1])


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


def sends_whole_sums(x, kernel, axis_name):
    """Whole arrays go round, and each device keeps its rows of the result."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length, product = x.shape[-2] // size, x @ kernel

    def pass_on(carry, _):
        total, travelling = carry
        travelling = lax.ppermute(travelling, axis_name, to_next(size))
        return (total + travelling, travelling), None

    (total, _), _ = lax.scan(pass_on, (product, product), length=size - 1)
    return lax.dynamic_slice_in_dim(total, index * length, length, -2)


def multiplies_everything_then_goes_round(x, kernel, axis_name):
    """Only permutes, and all products are there before the first one travels."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length, product = x.shape[-2] // size, x @ kernel

    def own(number):
        return lax.dynamic_slice_in_dim(product, number % size * length, length, -2)

    def pass_on(partial_sum, step):
        return lax.ppermute(partial_sum, axis_name, to_next(size)) + own(index - 1 - step), None

    return lax.scan(pass_on, own(index - 1), jnp.arange(1, size))[0]


def knows_that_there_are_eight(x, kernel, axis_name):
    """A list of pairs written for eight devices."""
    size, index = 8, lax.axis_index(axis_name)
    length = x.shape[-2] // lax.axis_size(axis_name)

    def own(number):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, -2) @ kernel

    there = [(s, t) for s, t in to_next(size) if max(s, t) < lax.axis_size(axis_name)]

    def pass_on(partial_sum, step):
        return lax.ppermute(partial_sum, axis_name, there) + own(index - 1 - step), None

    return lax.scan(pass_on, own(index - 1), jnp.arange(1, size))[0]


def without_a_gradient(x, kernel, axis_name):
    return lax.stop_gradient(matmul_ring_scatter(x, kernel, axis_name))


_G, _S = "ring_gather_matmul", "matmul_ring_scatter"
_TIME, _HELD, _SENT, _OTHERS = "predicted time", "live temporaries", "permute bytes", "other collectives"
MUTANTS = (
    mutant(_G, gathers_then_multiplies, _SENT, _OTHERS, _TIME, _HELD),
    mutant(_G, multiplies_what_has_just_arrived, _TIME),
    mutant(_G, places_in_the_other_order, "values", "gradients"),
    mutant(_G, goes_all_the_way_round, _SENT),
    mutant(_G, gathers_in_a_ring_then_multiplies, _TIME, _HELD),
    mutant(_G, puts_the_products_in_order_at_the_end, _TIME, _HELD),
    mutant(_G, multiplies_in_bfloat16, "values", "gradients", _SENT, _HELD),
    mutant(_G, forgets_the_kernels_gradient, "gradients"),
    mutant(_S, multiplies_then_scatters, _SENT, _OTHERS, _TIME, _HELD),
    mutant(_S, adds_before_it_sends, _TIME),
    mutant(_S, begins_with_its_own_rows, "values", "gradients"),
    mutant(_S, takes_the_mean, "values", "gradients"),
    mutant(_S, sends_whole_sums, _SENT, _TIME, _HELD),
    mutant(_S, multiplies_everything_then_goes_round, _TIME, _HELD),
    mutant(_S, knows_that_there_are_eight, "values", "gradients", _SENT, shown_by=("data=2 x tensor=4",)),
    mutant(_S, without_a_gradient, "gradients", _SENT),
)
