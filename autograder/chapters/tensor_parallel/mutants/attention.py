"""Wrong answers for ``tp_attention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.tensor_parallel.mutants.dense import all_reduces_and_slices, scaled_back
from autograder.chapters.tensor_parallel.mutants.names import FORWARD, GATHERED, GRADIENTS, OTHERS, SCATTERED, WRONG
from autograder.proof.mutants import mutant
from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense, tp_attention


def _in(kernel: Any, x: Any, axis_name: str) -> Any:
    """One of q, k and v: ``[batch, seq, heads/axis, head_dim]``."""
    y = column_parallel_dense({"kernel": kernel.reshape(kernel.shape[0], -1)}, x, axis_name)
    return y.reshape(*y.shape[:2], *kernel.shape[1:])


def _attention(params, x, axis_name, *, attend: Any = None, out: Any = row_parallel_dense) -> Any:
    """The reference with parts to replace."""
    qkv = _in(params["qkv"]["kernel"], x, axis_name)
    q, k, v = (qkv[:, :, i] for i in range(3))
    mixed = attend(q, k, v) if attend else jax.nn.dot_product_attention(q, k, v, is_causal=True)
    kernel = params["out"]["kernel"]
    return out({"kernel": kernel.reshape(-1, kernel.shape[-1])}, mixed.reshape(*mixed.shape[:2], -1), axis_name)


def gathers_for_q_k_and_v_apart(params, x, axis_name):
    kernel, out = params["qkv"]["kernel"], params["out"]["kernel"]
    q, k, v = (_in(kernel[:, i], x, axis_name) for i in range(3))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    flat = {"kernel": out.reshape(-1, out.shape[-1])}
    return row_parallel_dense(flat, mixed.reshape(*mixed.shape[:2], -1), axis_name)


def looks_ahead(params, x, axis_name):
    return _attention(params, x, axis_name, attend=jax.nn.dot_product_attention)


def looks_at_its_own_rows_only(params, x, axis_name):
    """Each part of the sequence by itself, as if it were a sequence."""
    part = jnp.arange(x.shape[1] * lax.axis_size(axis_name)) // x.shape[1]

    def attend(q, k, v):
        mask = (part[:, None] == part)[None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)

    return _attention(params, x, axis_name, attend=attend)


def takes_heads_for_q_k_and_v(params, x, axis_name):
    """Reads the columns of the kernel in the order (heads, 3, head_dim)."""
    kernel = params["qkv"]["kernel"]
    width, three, heads, head_dim = kernel.shape
    turned = jnp.swapaxes(kernel.reshape(width, heads, three, head_dim), 1, 2)
    return _attention({**params, "qkv": {"kernel": turned}}, x, axis_name)


def has_one_head_a_device(params, x, axis_name):
    """Right where there are as many heads as devices."""
    one = {"qkv": {"kernel": params["qkv"]["kernel"][:, :, :1]}, "out": {"kernel": params["out"]["kernel"][:1]}}
    return _attention(one, x, axis_name)


def gathers_all_heads_between(params, x, axis_name):
    """Makes the heads whole before the last layer, and takes its own out of them again."""

    def attend(q, k, v):
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        whole = lax.all_gather(mixed, axis_name, axis=2, tiled=True)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * q.shape[2], q.shape[2], 2)

    return _attention(params, x, axis_name, attend=attend)


def all_reduces_at_the_end(params, x, axis_name):
    return _attention(params, x, axis_name, out=all_reduces_and_slices)


def sums_the_output_kernels_gradient(params, x, axis_name):
    kernel = scaled_back(params["out"]["kernel"], lax.axis_size(axis_name))
    return tp_attention({**params, "out": {"kernel": kernel}}, x, axis_name)


def keeps_keys_from_learning(params, x, axis_name):
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, lax.stop_gradient(k), v, is_causal=True)

    return _attention(params, x, axis_name, attend=attend)


TASK, FIRST, SHORT = "tp_attention", "data=2 x tensor=4", "tensor=2, 6 heads, forward"
MUTANTS = (
    mutant(TASK, gathers_for_q_k_and_v_apart, FORWARD, GATHERED, SCATTERED, shown_by=(FIRST, SHORT)),
    mutant(TASK, looks_ahead, *WRONG),
    mutant(TASK, looks_at_its_own_rows_only, *WRONG),
    mutant(TASK, takes_heads_for_q_k_and_v, *WRONG),
    mutant(TASK, has_one_head_a_device, *WRONG),
    mutant(TASK, gathers_all_heads_between, FORWARD, GATHERED, SCATTERED, shown_by=(FIRST, SHORT)),
    mutant(TASK, all_reduces_at_the_end, FORWARD, GATHERED, SCATTERED, OTHERS, shown_by=(FIRST, SHORT)),
    mutant(TASK, sums_the_output_kernels_gradient, GRADIENTS),
    mutant(TASK, keeps_keys_from_learning, GRADIENTS),
)
