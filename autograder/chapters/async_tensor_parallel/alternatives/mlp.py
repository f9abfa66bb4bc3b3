"""Right answers for ``async_tp_mlp`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import vary_alike


def to_next(axis_name):
    size = lax.axis_size(axis_name)
    return [(i, (i + 1) % size) for i in range(size)]


def gathered(x, use, axis_name, *, unroll=False):
    """What ``use`` makes of each device's rows, in their order: a list of arrays of all rows."""
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]

    def put(wholes, chunk, step):
        at = (index - step) % size * length
        return [lax.dynamic_update_slice_in_dim(w, part, at, -2) for w, part in zip(wholes, use(chunk), strict=True)]

    def turn(carry, step):
        wholes, chunk = carry
        coming = lax.ppermute(chunk, axis_name, to_next(axis_name))
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
        return lax.ppermute(total, axis_name, to_next(axis_name)) + own(step), None

    total = own(1)
    if unroll:
        for step in range(2, size + 1):
            total, _ = turn(total, step)
        return total
    return lax.scan(turn, total, jnp.arange(2, size + 1))[0]


def unrolled(params, x, axis_name):
    """Python loops, and JAX's own derivative, which adds up a kernel's gradient where it is used."""
    up, down = params["up"], params["down"]
    (hidden,) = gathered(x, lambda chunk: [chunk @ up["kernel"]], axis_name, unroll=True)
    return scattered(jax.nn.gelu(hidden + up["bias"]), down["kernel"], axis_name, unroll=True) + down["bias"]


def with_one_derivative(params, x, axis_name):
    """Both layers in one custom derivative, which keeps all rows from the forward pass."""

    def activation(hidden, bias):
        return jax.nn.gelu(hidden + bias)

    def forward(params, x):
        up, down = params["up"], params["down"]
        hidden, rows = gathered(x, lambda chunk: [chunk @ up["kernel"], chunk], axis_name)
        y = scattered(activation(hidden, up["bias"]), down["kernel"], axis_name) + down["bias"]
        return y, (params, rows, hidden)

    def backward(saved, gradient):
        params, rows, hidden = saved
        up, down = params["up"], params["down"]
        active, transpose = jax.vjp(activation, hidden, up["bias"])
        of_active, gradients = gathered(gradient, lambda chunk: [chunk @ down["kernel"].T, chunk], axis_name)
        of_hidden, of_bias = transpose(of_active)
        of_x = scattered(of_hidden, up["kernel"].T, axis_name)
        of_params = {
            "up": {"kernel": jnp.einsum("...ri,...ro->io", rows, of_hidden), "bias": of_bias},
            "down": {
                "kernel": jnp.einsum("...ri,...ro->io", active, gradients),
                "bias": gradient.reshape(-1, gradient.shape[-1]).sum(0),
            },
        }
        return of_params, of_x

    layers = jax.custom_vjp(lambda params, x: forward(params, x)[0])
    layers.defvjp(forward, backward)
    return layers(params, x)


def gathering_again(params, x, axis_name):
    """Keeps this device's rows alone: the backward pass sends them round again, beside the gradients."""
    size, to = lax.axis_size(axis_name), to_next(axis_name)

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
    hidden = first(x, params["up"]["kernel"]) + params["up"]["bias"]
    return second(jax.nn.gelu(hidden), params["down"]["kernel"]) + params["down"]["bias"]


ALTERNATIVES = (unrolled, with_one_derivative, gathering_again)
