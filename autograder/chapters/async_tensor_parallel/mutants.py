"""Wrong answers for ``async_tensor_parallel``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.async_tensor_parallel.alternatives import gathered, scattered
from autograder.chapters.mutant import NUMBERS, WRONG, mutant, patch
from course.mesh import vary_alike
from solutions.async_tensor_parallel import (
    async_tp_mlp,
    bidirectional_gather_matmul,
    bidirectional_matmul_scatter,
    matmul_ring_scatter,
    ring_gather_matmul,
)


def gathers_then_multiplies(x, kernel, axis_name):
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel


def multiplies_then_scatters(x, kernel, axis_name):
    return lax.psum_scatter(x @ kernel, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


def one_way_alone(x, kernel, axis_name):
    return ring_gather_matmul(x, kernel, axis_name)


def one_way_scatter(x, kernel, axis_name):
    return matmul_ring_scatter(x, kernel, axis_name)


gather, scatter = partial(patch, ring_gather_matmul), partial(patch, matmul_ring_scatter)
both_gather, both_scatter = partial(patch, bidirectional_gather_matmul), partial(patch, bidirectional_matmul_scatter)
SYNCHRONOUS = ("other collectives", "permute bytes", "predicted time")
CUT_OFF = ("gradients", "permute bytes")
PRODUCT, JOINED = (
    "product(*vary_alike(x, kernel))",
    "jnp.concatenate(lax.scan(pass_on, sums, jnp.arange(1, size))[0], -1)",
)
JAX_DERIVES_GATHER = {PRODUCT: "ring(*vary_alike(x, kernel), keep=False)[0]"}
JAX_DERIVES_SCATTER = {PRODUCT: "ring(*vary_alike(x, kernel))"}
GATHERS_LATE = {
    "return (place(wholes, chunk, step), coming), None": "return (place(wholes, coming, step + 1), coming), None",
    "lax.scan(pass_on, (empty, x), ": "lax.scan(pass_on, (place(empty, x, 0), x), ",
    "return place(wholes, last, size - 1)": "return wholes",
}
SCATTERS_LATE = {
    "coming = lax.ppermute(partial_sum, axis_name, to_next)\n": "partial_sum = partial_sum + own(index - step)\n",
    "return coming + own(index - 1 - step), None": "return lax.ppermute(partial_sum, axis_name, to_next), None",
    "lax.scan(pass_on, own(index - 1), jnp.arange(1, size))[0]": (
        "lax.scan(pass_on, jnp.zeros_like(own(index)), jnp.arange(1, size))[0] + own(index)"
    ),
}


def straight_to_every_device(x, kernel, axis_name):
    """Whole chunks, each straight to its place: on a ring of links, most of them pass through other devices."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    whole = vary_alike(jnp.zeros((*x.shape[:-2], size * length, kernel.shape[-1]), x.dtype), x)[0]
    for by in range(size):
        chunk = lax.ppermute(x, axis_name, [(i, (i + by) % size) for i in range(size)]) if by else x
        whole = lax.dynamic_update_slice_in_dim(whole, chunk @ kernel, (index - by) % size * length, -2)
    return whole


def _mlp(params, x, axis_name, gather, scatter):
    hidden = jax.nn.gelu(gather(x, params["up"]["kernel"], axis_name) + params["up"]["bias"])
    return scatter(hidden, params["down"]["kernel"], axis_name) + params["down"]["bias"]


def synchronous(params, x, axis_name):
    """The naive baseline: the same collectives as ``tp_mlp``."""
    return _mlp(params, x, axis_name, gathers_then_multiplies, multiplies_then_scatters)


def _forward_alone(ring, plain):
    """A ring whose derivative is the synchronous version's."""

    def product(x, kernel, axis_name):
        function = jax.custom_vjp(lambda x, kernel: ring(x, kernel, axis_name))

        def backward(saved, gradient):
            return jax.vjp(lambda x, kernel: plain(x, kernel, axis_name), *saved)[1](gradient)

        function.defvjp(lambda x, kernel: (ring(x, kernel, axis_name), (x, kernel)), backward)
        return function(*vary_alike(x, kernel))

    return product


def hides_the_forward_pass_alone(params, x, axis_name):
    """Rings forward, and the synchronous version's collectives backward."""
    gather = _forward_alone(ring_gather_matmul, gathers_then_multiplies)
    return _mlp(params, x, axis_name, gather, _forward_alone(matmul_ring_scatter, multiplies_then_scatters))


def leaves_the_derivative_to_jax(params, x, axis_name):
    """Little communication is exposed, but each backward step adds to whole kernels' gradients: slower than waiting."""
    rings = gather("derived", JAX_DERIVES_GATHER), scatter("derived", JAX_DERIVES_SCATTER)
    return _mlp(params, x, axis_name, *(ring.function for ring in rings))


def keeps_every_product(params, x, axis_name):
    """Python loops, and JAX's own derivative: a kernel's gradient from each chunk of rows lives until all are added."""
    gather, scatter = partial(gathered, axis_name=axis_name, unroll=True), partial(scattered, unroll=True)
    return _mlp(params, x, axis_name, lambda x, kernel, _: gather(x, lambda chunk: [chunk @ kernel])[0], scatter)


def waits_in_every_step(params, x, axis_name):
    """Only permutes, but transfers and products alternate."""
    rings = gather("late", GATHERS_LATE | JAX_DERIVES_GATHER), scatter("late", SCATTERS_LATE | JAX_DERIVES_SCATTER)
    return _mlp(params, x, axis_name, *(ring.function for ring in rings))


MUTANTS = (
    mutant("ring_gather_matmul", gathers_then_multiplies, "live temporaries", *SYNCHRONOUS),
    gather("multiplies_what_has_just_arrived", GATHERS_LATE, "predicted time"),
    gather("places_in_the_other_order", {"(index - step) % size": "(index + step) % size"}, *WRONG),
    gather(
        "goes_round_powers_of_two",
        {"(index - step) % size": "(index - step & size - 1)"},
        *WRONG,
        shown_by=("data=2 x tensor=3",),
    ),
    gather(
        "multiplies_in_bfloat16",
        {PRODUCT: "product(*vary_alike(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16))).astype(x.dtype)"},
        *("gradients", "live temporaries", "permute bytes", "values"),
    ),
    gather(
        "forgets_the_kernels_gradient", {PRODUCT: "product(*vary_alike(x, lax.stop_gradient(kernel)))"}, "gradients"
    ),
    mutant("matmul_ring_scatter", multiplies_then_scatters, "live temporaries", *SYNCHRONOUS),
    scatter("adds_before_it_sends", SCATTERS_LATE, "predicted time"),
    scatter(
        "begins_with_its_own_rows",
        {"own(index - 1 - step)": "own(index - step)", "pass_on, own(index - 1)": "pass_on, own(index)"},
        "values",
    ),
    scatter("takes_the_mean", {PRODUCT: f"{PRODUCT} / size"}, *WRONG),
    scatter("without_a_gradient", {PRODUCT: f"lax.stop_gradient({PRODUCT})"}, *CUT_OFF),
    mutant("bidirectional_gather_matmul", gathers_then_multiplies, "bytes each way", *SYNCHRONOUS),
    mutant("bidirectional_gather_matmul", one_way_alone, "bytes each way"),
    mutant("bidirectional_gather_matmul", straight_to_every_device, "bytes each way"),
    both_gather(
        "both_halves_the_same_way",
        {
            "axis_name, to_previous)": "axis_name, to_next)",
            "(index - step, index + step)": "(index - step, index - step)",
        },
        "bytes each way",
    ),
    both_gather(
        "places_both_halves_as_if_they_came_one_way",
        {"(index - step, index + step)": "(index - step, index - step)"},
        *WRONG,
    ),
    both_gather(
        "gathers_both_ways_then_multiplies",
        {
            "jnp.split(kernel, 2)": "(0, x.shape[-1] // 2)",
            "known = lax.dynamic_slice_in_dim(whole, at, length, -2)\n": "start = *[0] * (x.ndim - 2), at, part\n",
            "lax.dynamic_update_slice_in_dim(whole, known + half @ part, at, -2)": (
                "lax.dynamic_update_slice(whole, half, start)"
            ),
            "kernel.shape[-1]), x.dtype)": "x.shape[-1]), x.dtype)",
            "return place(whole, last, size - 1)": "return place(whole, last, size - 1) @ kernel",
        },
        "predicted time",
    ),
    mutant("bidirectional_matmul_scatter", multiplies_then_scatters, "bytes each way", *SYNCHRONOUS),
    mutant("bidirectional_matmul_scatter", one_way_scatter, "bytes each way"),
    both_scatter(
        "adds_both_before_it_sends",
        {
            "forth, back =": "sums = sums[0] + own(index - step, left), sums[1] + own(index + step, right)\n"
            "        forth, back =",
            "(forth + own(index - 1 - step, left), back + own(index + 1 + step, right))": "(forth, back)",
            "sums = own(index - 1, left), own(index + 1, right)": "sums = (jnp.zeros_like(own(0, left)),) * 2",
            JOINED: f"{JOINED} + own(index, kernel)",
        },
        "predicted time",
    ),
    both_scatter(
        "takes_the_same_rows_for_both",
        {
            "own(index + 1 + step, right)": "own(index - 1 - step, right)",
            "own(index + 1, right)": "own(index - 1, right)",
        },
        *WRONG,
    ),
    both_scatter("without_any_gradient", {JOINED: f"lax.stop_gradient({JOINED})"}, *CUT_OFF),
    mutant("async_tp_mlp", synchronous, "exposed communication", "other collectives", "permute bytes"),
    mutant("async_tp_mlp", hides_the_forward_pass_alone, "exposed communication", "other collectives", "permute bytes"),
    mutant("async_tp_mlp", leaves_the_derivative_to_jax, "predicted time"),
    mutant("async_tp_mlp", keeps_every_product, "live temporaries"),
    mutant("async_tp_mlp", waits_in_every_step, "exposed communication", "predicted time"),
    patch(async_tp_mlp, "forgets_the_first_bias", {' + params["up"]["bias"]': ""}, *NUMBERS),
)
