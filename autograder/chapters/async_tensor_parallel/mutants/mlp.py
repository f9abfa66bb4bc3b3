"""Wrong answers for ``async_tp_mlp``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.async_tensor_parallel.mutants import rings
from autograder.proof.mutants import mutant
from course.mesh import vary_alike
from solutions.async_tensor_parallel import async_tp_mlp, matmul_ring_scatter, ring_gather_matmul


def _mlp(params, x, axis_name, gather, scatter):
    hidden = jax.nn.gelu(gather(x, params["up"]["kernel"], axis_name) + params["up"]["bias"])
    return scatter(hidden, params["down"]["kernel"], axis_name) + params["down"]["bias"]


def synchronous(params, x, axis_name):
    """What ``tp_mlp`` does: the naive way."""
    return _mlp(params, x, axis_name, rings.gathers_then_multiplies, rings.multiplies_then_scatters)


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
    gather = _forward_alone(ring_gather_matmul, rings.gathers_then_multiplies)
    return _mlp(params, x, axis_name, gather, _forward_alone(matmul_ring_scatter, rings.multiplies_then_scatters))


def gather(x, kernel, axis_name):
    """A ring with the derivative that JAX makes of it."""
    return rings._gather(x, kernel, axis_name)


def scatter(x, kernel, axis_name):
    """A ring with the derivative that JAX makes of it."""
    return rings._scatter(x, kernel, axis_name)


def leaves_the_derivative_to_jax(params, x, axis_name):
    """Little is exposed, and the backward pass adds to whole kernels' gradients in every step: slower than waiting."""
    return _mlp(params, x, axis_name, gather, scatter)


def waits_in_every_step(params, x, axis_name):
    """Only permutes, and transfers and products take turns."""
    return _mlp(params, x, axis_name, rings.multiplies_what_has_just_arrived, rings.adds_before_it_sends)


def adds_the_bias_on_every_device(params, x, axis_name):
    """Before the sum over devices, so that it counts as often as there are devices."""
    size = lax.axis_size(axis_name)
    return async_tp_mlp(params, x, axis_name) + (size - 1) * params["down"]["bias"]


def forgets_the_first_bias(params, x, axis_name):
    params = {**params, "up": {**params["up"], "bias": jnp.zeros_like(params["up"]["bias"])}}
    return async_tp_mlp(params, x, axis_name)


def divides_the_gradients_by_the_axis(params, x, axis_name):
    """As if a mean were wanted: the layer's own gradients are sums over its rows."""
    size = lax.axis_size(axis_name)
    small = jax.tree.map(lambda leaf: leaf / size + lax.stop_gradient(leaf * (1 - 1 / size)), params)
    return async_tp_mlp(small, x, axis_name)


_M = "async_tp_mlp"
_EXPOSED, _TIME, _SENT, _OTHERS = "exposed communication", "predicted time", "permute bytes", "other collectives"
MUTANTS = (
    mutant(_M, synchronous, _SENT, _OTHERS, _EXPOSED),
    mutant(_M, hides_the_forward_pass_alone, _SENT, _OTHERS, _EXPOSED),
    mutant(_M, leaves_the_derivative_to_jax, _TIME),
    mutant(_M, waits_in_every_step, _EXPOSED, _TIME),
    mutant(_M, adds_the_bias_on_every_device, "values", "gradients", "gradient norm"),
    mutant(_M, forgets_the_first_bias, "values", "gradients", "gradient norm"),
    mutant(_M, divides_the_gradients_by_the_axis, "gradients", "gradient norm"),
)
