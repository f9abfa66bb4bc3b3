"""Wrong answers for ``parallel_transformer_block``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.mutants import mutant
from autograder.mutants.tp_transformer.names import GATHERED, GRADIENTS, NORM, SCATTERED, TIME, VALUES, WRONG
from course.model import drop, rms_norm
from solutions.data_parallel import fold_key_over_axes
from solutions.tp_transformer import attend, parallel_transformer_block


def _own(key, axis_name) -> Any:
    return fold_key_over_axes(key, (axis_name,))


def _apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, *, gathers=2, scatters=2, waits=False):
    """Attention and MLP, each with a gather or a scatter of its own, or both with one."""
    attention = params["attention"]
    width, _, num_heads, head_dim = attention["qkv"]["kernel"].shape
    out = attention["out"]["kernel"].reshape(-1, width)
    kernels = attention["qkv"]["kernel"].reshape(width, -1), params["up"]["kernel"]
    y = rms_norm(params["norm"], x)
    if waits:
        added = matmul_scatter(attend(gather_matmul(y, kernels[0], axis_name), num_heads), out, axis_name)
        y, added = lax.optimization_barrier((y, added))
        hidden = jax.nn.gelu(gather_matmul(y, kernels[1], axis_name) + params["up"]["bias"])
        y = added + matmul_scatter(hidden, params["down"]["kernel"], axis_name) + params["down"]["bias"]
        return x + drop(y, rate, _own(key, axis_name))
    if gathers == 2:
        qkv, hidden = (gather_matmul(y, kernel, axis_name) for kernel in kernels)
    else:
        both = gather_matmul(y, jnp.concatenate(kernels, axis=1), axis_name)
        qkv, hidden = both[..., : 3 * num_heads * head_dim], both[..., 3 * num_heads * head_dim :]
    mixed, hidden = attend(qkv, num_heads), jax.nn.gelu(hidden + params["up"]["bias"])
    if scatters == 2:
        y = matmul_scatter(mixed, out, axis_name) + matmul_scatter(hidden, params["down"]["kernel"], axis_name)
    else:
        back = jnp.concatenate([out, params["down"]["kernel"]])
        y = matmul_scatter(jnp.concatenate([mixed, hidden], axis=-1), back, axis_name)
    return x + drop(y + params["down"]["bias"], rate, _own(key, axis_name))


def one_after_the_other(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """The right numbers in the order of the other block: the MLP begins when all that attention adds is there."""
    return _apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, waits=True)


def gathers_twice(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """The right numbers, with a gather and a scatter for attention and another pair for the MLP."""
    return _apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def scatters_twice(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """One gather, and two scatters of what is added at once."""
    return _apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, gathers=1)


def drops_the_same_on_every_device(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    y = parallel_transformer_block(params, x, key, 0.0, gather_matmul, matmul_scatter, axis_name) - x
    return x + drop(y, rate, key)


def splits_the_key(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """As if something were dropped twice."""
    y = parallel_transformer_block(params, x, key, 0.0, gather_matmul, matmul_scatter, axis_name) - x
    return x + drop(y, rate, jax.random.split(_own(key, axis_name))[0])


def drops_what_comes_in(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """The residual too, which nobody can make up for."""
    y = parallel_transformer_block(params, x, key, 0.0, gather_matmul, matmul_scatter, axis_name)
    return drop(y, rate, _own(key, axis_name))


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
    mutant(TASK, scatters_twice, GATHERED, SCATTERED),
    mutant(TASK, drops_the_same_on_every_device, *WRONG),
    mutant(TASK, splits_the_key, *WRONG),
    mutant(TASK, drops_what_comes_in, *WRONG),
    mutant(TASK, adds_the_bias_on_every_device, *WRONG),
    mutant(TASK, rounds_to_bfloat16, VALUES, GRADIENTS, NORM, GATHERED, SCATTERED),
    mutant(TASK, forgets_the_gradient_of_the_bias, GRADIENTS, NORM),
    mutant(TASK, leaves_the_norm_out, GRADIENTS, NORM),
)
