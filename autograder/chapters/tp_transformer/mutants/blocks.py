"""Wrong answers for ``tp_transformer_block``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.tp_transformer.mutants.names import GATHERED, GRADIENTS, NORM, REDUCED, SCATTERED, WRONG
from autograder.proof.mutants import mutant
from course.model import drop, rms_norm
from solutions.data_parallel import fold_key_over_axes
from solutions.tp_transformer import attend, tp_transformer_block


def own_keys(key, axis_name) -> Any:
    """As the reference makes them: one for what attention adds, and one for what the MLP adds."""
    return jax.random.split(fold_key_over_axes(key, (axis_name,)))


def _block(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, *, keys: Any = own_keys, mix: Any = attend,
           bias: Any = lambda bias, axis_name: bias, feed: Any = lambda before, after: after):  # fmt: skip
    """The reference's block with parts to replace."""
    attention, mlp = params["attention"], params["mlp"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    first, second = keys(key, axis_name)
    y = rms_norm(params["attention_norm"], x)
    qkv = gather_matmul(y, attention["qkv"]["kernel"].reshape(width, -1), axis_name)
    y = matmul_scatter(mix(qkv, num_heads), attention["out"]["kernel"].reshape(-1, width), axis_name)
    after = x + drop(y, rate, first)
    y = rms_norm(mlp["norm"], feed(x, after))
    hidden = gather_matmul(y, mlp["up"]["kernel"], axis_name) + mlp["up"]["bias"]
    y = matmul_scatter(jax.nn.gelu(hidden), mlp["down"]["kernel"], axis_name)
    return after + drop(y + bias(mlp["down"]["bias"], axis_name), rate, second)


def drops_the_same_on_every_device(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """All parts of a sequence lose elements at the same places."""
    return _block(params, x, key, rate, gather_matmul, matmul_scatter, axis_name,
                  keys=lambda key, _: jax.random.split(key))  # fmt: skip


def drops_the_same_twice(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """One key for attention and for the MLP."""
    return _block(params, x, key, rate, gather_matmul, matmul_scatter, axis_name,
                  keys=lambda key, axis_name: (own_keys(key, axis_name)[0],) * 2)  # fmt: skip


def adds_the_bias_on_every_device(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Before the sum, so that it is counted once for each device."""
    return _block(params, x, key, rate, gather_matmul, matmul_scatter, axis_name,
                  bias=lambda bias, axis_name: bias * lax.axis_size(axis_name))  # fmt: skip


def feeds_the_mlp_what_came_in(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """What attention adds reaches the output, and not the MLP."""
    return _block(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, feed=lambda before, after: before)


def takes_heads_before_q_k_and_v(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Reads the columns as heads of q, k and v each, where they are q of all heads, then k, then v."""

    def mix(qkv, num_heads):
        columns = qkv.reshape(*qkv.shape[:-1], num_heads, 3, -1)
        return attend(jnp.swapaxes(columns, -3, -2).reshape(qkv.shape), num_heads)

    return _block(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, mix=mix)


def forgets_the_gradient_of_the_norms(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    frozen = {**params, "attention_norm": jax.tree.map(lax.stop_gradient, params["attention_norm"])}
    return tp_transformer_block(frozen, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def gathers_for_q_k_and_v_apart(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """Three products of the same rows, each with a gather of its own."""

    def thrice(x, kernel, axis_name):
        if kernel.shape[1] == params["mlp"]["up"]["bias"].size:
            return gather_matmul(x, kernel, axis_name)
        parts = [gather_matmul(x, part, axis_name) for part in jnp.split(kernel, 3, axis=1)]
        return jnp.concatenate(parts, axis=-1)

    return tp_transformer_block(params, x, key, rate, thrice, matmul_scatter, axis_name)


def sums_and_keeps_its_rows(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """An all-reduce of whole activations, of which each device then takes its part."""

    def summed(x, kernel, axis_name):
        rows = x.shape[-2] // lax.axis_size(axis_name)
        return lax.dynamic_slice_in_dim(lax.psum(x @ kernel, axis_name), lax.axis_index(axis_name) * rows, rows, -2)

    return tp_transformer_block(params, x, key, rate, gather_matmul, summed, axis_name)


TASK = "tp_transformer_block"
MUTANTS = (
    mutant(TASK, drops_the_same_on_every_device, *WRONG),
    mutant(TASK, drops_the_same_twice, *WRONG),
    mutant(TASK, adds_the_bias_on_every_device, *WRONG),
    mutant(TASK, feeds_the_mlp_what_came_in, *WRONG),
    mutant(TASK, takes_heads_before_q_k_and_v, *WRONG),
    mutant(TASK, forgets_the_gradient_of_the_norms, GRADIENTS, NORM),
    mutant(TASK, gathers_for_q_k_and_v_apart, GATHERED, SCATTERED),
    mutant(TASK, sums_and_keeps_its_rows, GATHERED, SCATTERED, REDUCED),
)
