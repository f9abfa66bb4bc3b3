"""Wrong answers for ``tp_transformer``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import jax
from jax import lax

from autograder.chapters.mutant import GRADIENTS, NUMBERS, WRONG, mutant, patch, there_and_back
from autograder.chapters.tp_transformer.wrapping import matmul_scatter_by_sum
from course.model import cross_entropy, drop, rms_norm
from solutions.data_parallel import fold_key_over_axes
from solutions.tp_transformer import (
    attend,
    parallel_transformer_block,
    tp_transformer_block,
    tp_transformer_step,
    vocab_parallel_embed,
    vocab_parallel_loss,
)


def sums_and_keeps_its_rows(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    return tp_transformer_block(params, x, key, rate, gather_matmul, matmul_scatter_by_sum, axis_name)


def one_after_the_other(params, x, key, rate, gather_matmul, matmul_scatter, axis_name) -> Any:
    """The right numbers in the other block's order: the MLP waits for attention's complete result."""
    qkv, out = params["attention"]["qkv"]["kernel"], params["attention"]["out"]["kernel"]
    width, _, num_heads, _ = qkv.shape
    y = rms_norm(params["norm"], x)
    heads = attend(gather_matmul(y, qkv.reshape(width, -1), axis_name), num_heads)
    y, added = lax.optimization_barrier((y, matmul_scatter(heads, out.reshape(-1, width), axis_name)))
    hidden = jax.nn.gelu(gather_matmul(y, params["up"]["kernel"], axis_name) + params["up"]["bias"])
    y = added + matmul_scatter(hidden, params["down"]["kernel"], axis_name) + params["down"]["bias"]
    return x + drop(y, rate, fold_key_over_axes(key, (axis_name,)))


def gathers_logits(params, x, targets, gather_matmul, axis_name):
    logits = gather_matmul(rms_norm(params["norm"], x), params["out"]["kernel"], axis_name) + params["out"]["bias"]
    all_logits = lax.all_gather(logits, axis_name, axis=logits.ndim - 1, tiled=True)
    return lax.pmean(cross_entropy(all_logits, targets), axis_name)


# More gathers and scatters: where sums replace them, these are the excess.
TWICE_AS_OFTEN = ("all-gather bytes", "all-reduce bytes", "reduce-scatter bytes")
TWO_AND_SUMS = ("tensor=4", "data=2 x tensor=2, all-reduces")
block, parallel = partial(patch, tp_transformer_block), partial(patch, parallel_transformer_block)
embed, loss, step = (partial(patch, f) for f in (vocab_parallel_embed, vocab_parallel_loss, tp_transformer_step))
SCATTERED_ROWS = "x = lax.psum_scatter(rows, axis_name, scatter_dimension=1, tiled=True)"
OWN_ROWS = "length = rows.shape[1] // lax.axis_size(axis_name)\n    x = "

WHOLE = step(
    "gathers_and_scatters_whole",
    {
        "ring_gather_matmul, matmul_ring_scatter, tensor_axis": "gather_matmul, matmul_scatter, tensor_axis",
        'batch["targets"], ring_gather_matmul': 'batch["targets"], gather_matmul',
    },
    *("bytes in one piece", "exposed communication", "predicted time"),
)
gathers_and_scatters_whole = WHOLE.function
keeps_all_logits = FunctionType(
    tp_transformer_step.__code__,
    {**tp_transformer_step.__globals__, "vocab_parallel_loss": gathers_logits},
    "keeps_all_logits",
)

MUTANTS = (
    block("drops_the_same_on_every_device", {"fold_key_over_axes(key, (axis_name,))": "key"}, *NUMBERS),
    block("drops_the_same_twice", {"drop(y, rate, second)": "drop(y, rate, first)"}, *NUMBERS),
    block(
        "forgets_the_gradient_of_the_norms",
        {'rms_norm(params["attention_norm"]': 'rms_norm(lax.stop_gradient(params["attention_norm"])'},
        *GRADIENTS,
    ),
    mutant(
        "tp_transformer_block", sums_and_keeps_its_rows, "all-gather bytes", "all-reduce bytes", "reduce-scatter bytes"
    ),
    mutant("parallel_transformer_block", one_after_the_other, *TWICE_AS_OFTEN, "predicted time", shown_by=TWO_AND_SUMS),
    parallel(
        "gathers_twice",
        {
            "jnp.split(gather_matmul(y, into, axis_name), [3 * num_heads * head_dim], axis=-1)": (
                "(gather_matmul(y, part, axis_name) for part in jnp.split(into, [3 * num_heads * head_dim], axis=1))"
            )
        },
        *TWICE_AS_OFTEN,
        shown_by=TWO_AND_SUMS,
    ),
    parallel("drops_the_same_on_every_device_in_parallel", {"fold_key_over_axes(key, (axis_name,))": "key"}, *NUMBERS),
    parallel(
        "adds_the_bias_on_every_device",
        {'params["down"]["bias"]': 'lax.axis_size(axis_name) * params["down"]["bias"]'},
        *NUMBERS,
    ),
    parallel(
        "forgets_the_gradient_of_the_bias",
        {'params["down"]["bias"]': 'lax.stop_gradient(params["down"]["bias"])'},
        *GRADIENTS,
    ),
    embed(
        "spreads_rows_over_all_positions",
        {"index * x.shape[1],": "index * (len(position) // lax.axis_size(axis_name)),"},
        *WRONG,
    ),
    embed(
        "adds_positions_before_the_sum",
        {
            "psum_scatter(rows,": "psum_scatter(rows + position[: tokens.shape[1]],",
            "return x + lax.dynamic_slice_in_dim(position, index * x.shape[1], x.shape[1])": "return x",
        },
        *NUMBERS,
    ),
    embed(
        "sums_and_keeps_its_rows_in_embed",
        {SCATTERED_ROWS: OWN_ROWS + "lax.dynamic_slice_in_dim(lax.psum(rows, axis_name), index * length, length, 1)"},
        *("all-gather bytes", "other collectives", "reduce-scatter bytes"),
    ),
    embed(
        "gathers_the_table",
        {
            SCATTERED_ROWS: OWN_ROWS + "lax.all_gather(table, axis_name, tiled=True)"
            "[lax.dynamic_slice_in_dim(tokens, index * length, length, 1)]"
        },
        *("all-gather bytes", "reduce-scatter bytes"),
    ),
    embed(
        "forgets_the_gradient_of_positions", {'params["position"]': 'lax.stop_gradient(params["position"])'}, *GRADIENTS
    ),
    mutant("vocab_parallel_loss", gathers_logits, "bytes sent", "largest temporary"),
    loss(
        "types_the_loss_as_each_devices_own",
        {
            "return jnp.mean(jnp.log(total) + highest - right)": (
                "return as_varying(jnp.mean(jnp.log(total) + highest - right), axis_name)"
            )
        },
        *GRADIENTS,
    ),
    loss("takes_off_the_mean_of_the_maxima", {"lax.pmax(": "lax.pmean("}, *NUMBERS),
    loss("averages_the_exponentials", {"total = lax.psum": "total = lax.pmean"}, "values"),
    loss("averages_the_targets_logits", {"right = lax.psum": "right = lax.pmean"}, *NUMBERS),
    loss(
        "gathers_by_itself",
        {
            'gather_matmul(rms_norm(params["norm"], x), kernel, axis_name)': (
                'lax.all_gather(rms_norm(params["norm"], x), axis_name, axis=1, tiled=True) @ kernel'
            )
        },
        "bytes sent",
        shown_by=("data=2 x tensor=2, all-reduces",),
    ),
    loss("forgets_the_gradient_of_the_norm", {'params["norm"]': 'lax.stop_gradient(params["norm"])'}, *GRADIENTS),
    WHOLE,
    mutant(
        "tp_transformer_step",
        keeps_all_logits,
        "activation bytes",
        "bytes in one piece",
        *("exposed communication", "largest temporary", "predicted time"),
    ),
    step(
        "forgets_the_ring_of_the_loss",
        {'batch["targets"], ring_gather_matmul': 'batch["targets"], gather_matmul'},
        "bytes in one piece",
    ),
    step("averages_shares", {"lax.psum(gradient, tensor_axis)": "lax.pmean(gradient, tensor_axis)"}, *NUMBERS),
    step("averages_twice", {"return updated,": "return lax.pmean(updated, data_axis),"}, "all-reduce bytes"),
    step("reports_the_loss_of_its_rows", {"lax.pmean(loss, data_axis)": "loss"}, "values"),
    block(
        "sends_what_it_adds_round",
        {"drop(y, rate, second)": there_and_back("drop(y, rate, second)", "axis_name")},
        "other collectives",
    ),
    parallel(
        "sends_what_it_adds_round",
        {"return x + ": f"y = {there_and_back('y', 'axis_name')}\n    return x + "},
        "other collectives",
    ),
    parallel(
        "sums_what_nobody_needs",
        {"return x + ": "y += 0 * lax.psum(y, axis_name)\n    return x + "},
        "all-reduce bytes",
    ),
)
