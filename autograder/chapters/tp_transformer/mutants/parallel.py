"""Wrong answers for ``parallel_transformer_block``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.tp_transformer.mutants.names import GATHERED, GRADIENTS, NORM, SCATTERED, TIME, VALUES, WRONG
from autograder.proof.mutants import mutant
from course.model import drop, rms_norm
from solutions.data_parallel import fold_key_over_axes
from solutions.tp_transformer import attend, parallel_transformer_block


def _own(key, axis_name) -> Any:
    return fold_key_over_axes(key, (axis_name,))


def _apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, *, waits=False):
    """Each with a gather and a scatter of its own; ``waits`` has the MLP begin when attention has ended."""
    attention = params["attention"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    out = attention["out"]["kernel"].reshape(-1, width)
    kernels = attention["qkv"]["kernel"].reshape(width, -1), params["up"]["kernel"]
    y = rms_norm(params["norm"], x)
    if waits:
        added = matmul_scatter(attend(gather_matmul(y, kernels[0], axis_name), num_heads), out, axis_name)
        y, added = lax.optimization_barrier((y, added))
        hidden = jax.nn.gelu(gather_matmul(y, kernels[1], axis_name) + params["up"]["bias"])
        y = added + matmul_scatter(hidden, params["down"]["kernel"], axis_name) + params["down"]["bias"]
        return x + drop(y, rate, _own(key, axis_name))
    qkv, hidden = (gather_matmul(y, kernel, axis_name) for kernel in kernels)
    hidden = jax.nn.gelu(hidden + params["up"]["bias"])
    y = matmul_scatter(attend(qkv, num_heads), out, axis_name)
    y = y + matmul_scatter(hidden, params["down"]["kernel"], axis_name)
    return x + drop(y + params["down"]["bias"], rate, _own(key, axis_name))


def one_after_the_other(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """The right numbers in the order of the other block: the MLP begins when all that attention adds is there."""
    return _apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, waits=True)


def gathers_twice(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """The right numbers, with a gather and a scatter for attention and another pair for the MLP."""
    return _apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def drops_the_same_on_every_device(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    y = parallel_transformer_block(params, x, key, 0.0, gather_matmul, matmul_scatter, axis_name) - x
    return x + drop(y, rate, key)


def adds_the_bias_on_every_device(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    down = {**params["down"], "bias": params["down"]["bias"] * lax.axis_size(axis_name)}
    return parallel_transformer_block({**params, "down": down}, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def rounds_to_bfloat16(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    def rounded(x, kernel, axis_name):
        return gather_matmul(x.astype(jnp.bfloat16), kernel.astype(jnp.bfloat16), axis_name).astype(jnp.float32)

    return parallel_transformer_block(params, x, key, rate, rounded, matmul_scatter, axis_name)


def forgets_the_gradient_of_the_bias(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    down = {**params["down"], "bias": lax.stop_gradient(params["down"]["bias"])}
    return parallel_transformer_block({**params, "down": down}, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def leaves_the_norm_out(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """The values of a norm with a scale, and no gradient through its root mean square."""
    y = lax.stop_gradient(lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6))

    def normed(_, kernel, axis_name):
        return gather_matmul(x * y * params["norm"]["scale"], kernel, axis_name)

    return parallel_transformer_block(params, x, key, rate, normed, matmul_scatter, axis_name)


TASK = "parallel_transformer_block"
MUTANTS = (
    mutant(TASK, one_after_the_other, GATHERED, SCATTERED, TIME),
    mutant(TASK, gathers_twice, GATHERED, SCATTERED),
    mutant(TASK, drops_the_same_on_every_device, *WRONG),
    mutant(TASK, adds_the_bias_on_every_device, *WRONG),
    mutant(TASK, rounds_to_bfloat16, VALUES, GRADIENTS, NORM, GATHERED, SCATTERED),
    mutant(TASK, forgets_the_gradient_of_the_bias, GRADIENTS, NORM),
    mutant(TASK, leaves_the_norm_out, GRADIENTS, NORM),
)
