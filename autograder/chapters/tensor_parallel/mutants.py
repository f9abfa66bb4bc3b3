"""Wrong answers for ``tensor_parallel``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import NUMBERS, WRONG, mutant, patch, there_and_back
from autograder.chapters.tensor_parallel.tasks import FORWARD_ALONE
from solutions.tensor_parallel import (
    column_parallel_dense,
    init_dense,
    row_parallel_dense,
    tp_attention,
    tp_mlp,
    tp_train_step,
)

ALONE = ("tensor=6, parts alone",)


def draws_everything_and_keeps_its_part(key, d_in, d_out, axis_name, split):
    """The same layer on any number of devices, each of which draws all of it."""
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    kernel, bias = jax.random.normal(key, (d_in, d_out)) * d_in**-0.5, jnp.zeros(d_out)
    if split == "columns":
        part = d_out // n
        kernel, bias = (lax.dynamic_slice_in_dim(a, own * part, part, a.ndim - 1) for a in (kernel, bias))
    elif split == "rows":
        kernel = kernel.reshape(n, d_in // n, d_out)[own]
    return {"kernel": kernel, "bias": bias}


def draws_everything_and_takes_its_lines(key, d_in, d_out, axis_name, split):
    """The same, by a gather, which reads the selected elements from memory."""
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    kernel = jax.random.normal(key, (d_in, d_out)) * d_in**-0.5
    if split:
        lines = kernel.shape[split == "columns"] // n
        kernel = jnp.take(kernel, own * lines + jnp.arange(lines), axis=int(split == "columns"))
    return {"kernel": kernel, "bias": jnp.zeros(kernel.shape[1])}


def gathers_the_weights(params, x, axis_name):
    """Rows stay in place, and all weights are gathered, as in FSDP."""
    up = lax.all_gather(params["up"]["kernel"], axis_name, axis=1, tiled=True)
    bias = lax.all_gather(params["up"]["bias"], axis_name, tiled=True)
    down = lax.all_gather(params["down"]["kernel"], axis_name, tiled=True)
    return jax.nn.gelu(x @ up + bias) @ down + params["down"]["bias"]


def gathers_the_hidden_features(params, x, axis_name):
    """Gathers the hidden features between the layers, and slices its own out of them again."""
    h = column_parallel_dense(params["up"], x, axis_name)
    whole = lax.all_gather(jax.nn.gelu(h), axis_name, axis=h.ndim - 1, tiled=True)
    own = lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * h.shape[-1], h.shape[-1], h.ndim - 1)
    return row_parallel_dense(params["down"], own, axis_name)


def gradient_times(name: str, factor: str) -> str:
    """The text of a statement that multiplies the gradient of a variable."""
    return f"{name} = {factor} * {name} + lax.stop_gradient((1 - {factor}) * {name})\n    "


init, column, row = (partial(patch, f) for f in (init_dense, column_parallel_dense, row_parallel_dense))
mlp, attention, step = (partial(patch, f) for f in (tp_mlp, tp_attention, tp_train_step))

# In both dense layers.
BIASED = 'y + params["bias"] if "bias" in params else y'
AVERAGED_BACK = {"y = lax": gradient_times("x", "(1 / lax.axis_size(axis_name))") + "y = lax"}

# In column_parallel_dense.
ROWS = "lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)"
KERNEL_GATHERED = 'x @ lax.all_gather(params["kernel"], axis_name, axis=1, tiled=True)'
TURNED = f"lax.all_to_all({KERNEL_GATHERED}, axis_name, x.ndim - 1, x.ndim - 2, tiled=True)"
PRODUCT = f'{ROWS} @ params["kernel"]'
HALVES = 'jnp.array_split(params["kernel"], 2, axis=1)'
EACH_HALF = {PRODUCT: f"jnp.concatenate([{ROWS} @ half for half in {HALVES}], -1)"}

# In row_parallel_dense.
SCATTERED = 'lax.psum_scatter(x @ params["kernel"], axis_name, scatter_dimension=x.ndim - 2, tiled=True)'
SLICED = """lax.psum(x @ params["kernel"], axis_name)
    rows = x.shape[-2] // lax.axis_size(axis_name)
    y = lax.dynamic_slice_in_dim(y, lax.axis_index(axis_name) * rows, rows, y.ndim - 2)"""
ALL_REDUCED = {SCATTERED: SLICED}
BIAS_ADDED_UP = {'x @ params["kernel"]': 'x @ params["kernel"] + params.get("bias", 0)', BIASED: "y"}

# In tp_train_step.
MEAN_OF_PART = "lax.pmean(gradient, data_axis) / lax.axis_size(tensor_axis)"
MEAN_OF_COPY = "lax.pmean(gradient, (data_axis, tensor_axis))"

GATHERED, REDUCED, FORWARD = "all-gather bytes", "reduce-scatter bytes", "collectives forward"
OTHERS, SLOW = "other collectives", "predicted time"
BOTH_WAYS = ("data=2 x tensor=4", FORWARD_ALONE)

MUTANTS = (
    init("counts_its_own_inputs", {"scale * jax": "shape[0] ** -0.5 * jax"}, "initial scale"),
    init("draws_the_same_part_everywhere", {"(axis_name,)": "()"}, "values"),
    mutant("init_dense", draws_everything_and_keeps_its_part, "numbers drawn", shown_by=ALONE),
    mutant("init_dense", draws_everything_and_takes_its_lines, "largest temporary", "numbers drawn", shown_by=ALONE),
    init(
        "sends_the_key_round",
        {"split else key": "split else jax.random.wrap_key_data(lax.pmax(jax.random.key_data(key), axis_name))"},
        "communication",
    ),
    column("gathers_the_kernel", {PRODUCT: TURNED}, GATHERED, OTHERS, REDUCED),
    column("gathers_for_each_half_of_its_columns", EACH_HALF, REDUCED),
    column("forgets_the_bias", {BIASED: "y"}, *WRONG),
    column("averages_the_inputs_gradient", AVERAGED_BACK, "gradients"),
    column("lets_no_gradient_through", {"all_gather(x": "all_gather(lax.stop_gradient(x)"}, "gradients", REDUCED),
    row("adds_the_bias_before_the_sum", BIAS_ADDED_UP, *WRONG),
    row("all_reduces_and_slices", ALL_REDUCED, GATHERED, OTHERS, REDUCED),
    row("averages", {SCATTERED: f"{SCATTERED} / lax.axis_size(axis_name)"}, *WRONG),
    row("leaves_the_bias_out", {BIASED: "y"}, *WRONG),
    row("averages_the_features_gradient", AVERAGED_BACK, "gradients"),
    mutant("tp_mlp", gathers_the_weights, GATHERED, FORWARD, SLOW, REDUCED, shown_by=BOTH_WAYS),
    mutant("tp_mlp", gathers_the_hidden_features, GATHERED, FORWARD, SLOW, REDUCED, shown_by=BOTH_WAYS),
    mlp(
        "all_reduces_at_the_end",
        ALL_REDUCED,
        GATHERED,
        FORWARD,
        OTHERS,
        SLOW,
        REDUCED,
        shown_by=BOTH_WAYS,
        inside=row_parallel_dense,
    ),
    mlp(
        "gathers_its_input_twice",
        EACH_HALF,
        GATHERED,
        FORWARD,
        REDUCED,
        shown_by=BOTH_WAYS,
        inside=column_parallel_dense,
    ),
    mlp("adds_its_bias_on_every_device", BIAS_ADDED_UP, *WRONG, inside=row_parallel_dense),
    attention("looks_ahead", {", is_causal=True": ""}, *WRONG),
    attention(
        "lowers_the_scores_ahead_by_a_hundred",
        {", is_causal=True": ", bias=100 * (jnp.tri(q.shape[1]) - 1)[None, None]"},
        "values",
        shown_by=(FORWARD_ALONE,),
    ),
    attention(
        "has_one_head_a_device",
        {'["kernel"], params': '["kernel"][:, :, :1], params', '["out"]["kernel"]': '["out"]["kernel"][:1]'},
        *WRONG,
    ),
    attention(
        "all_reduces_at_the_end_in_attention",
        ALL_REDUCED,
        GATHERED,
        FORWARD,
        OTHERS,
        REDUCED,
        shown_by=("data=2 x tensor=4", FORWARD_ALONE),
        inside=row_parallel_dense,
    ),
    attention("keeps_keys_from_learning", {"(q, k, v,": "(q, lax.stop_gradient(k), v,"}, "gradients"),
    step("leaves_split_leaves_summed", {MEAN_OF_PART: "lax.pmean(gradient, data_axis)"}, *NUMBERS),
    step("averages_parts_with_each_other", {MEAN_OF_PART: MEAN_OF_COPY}, "all-reduce bytes", *NUMBERS),
    step("reports_its_own_loss", {"loss, (data_axis, tensor_axis)": "loss, data_axis"}, "values"),
    step("all_reduces_in_every_layer", ALL_REDUCED, GATHERED, "all-reduce bytes", REDUCED, inside=row_parallel_dense),
    step(
        "sends_the_loss_round",
        {
            "lax.pmean(loss, (data_axis, tensor_axis))": (
                f"lax.pmean({there_and_back('loss', 'tensor_axis')}, (data_axis, tensor_axis))"
            )
        },
        "other collectives",
    ),
)
