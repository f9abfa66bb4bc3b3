"""Wrong answers for ``tensor_parallel``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.model import rms_norm
from solutions.data_parallel import fold_key_over_axes
from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense, tp_attention, tp_mlp


def _draw(key, d_in, d_out, axis_name, split, *, scale: Any = None, folded: Any = None) -> Any:
    """The reference with parts to replace; ``scale`` is given the local shape and the whole number of inputs."""
    n = lax.axis_size(axis_name)
    shape = d_in // (n if split == "rows" else 1), d_out // (n if split == "columns" else 1)
    folded = ((axis_name,) if split else ()) if folded is None else folded
    size = d_in**-0.5 if scale is None else scale(shape, d_in)
    kernel = size * jax.random.normal(fold_key_over_axes(key, folded), shape)
    return {"kernel": kernel, "bias": jnp.zeros(shape[1])}


def counts_its_own_inputs(key, d_in, d_out, axis_name, split):
    """Scales by the fan-in of the part: what every library does that is handed a part as if it were a layer."""
    return _draw(key, d_in, d_out, axis_name, split, scale=lambda shape, _: shape[0] ** -0.5)


def does_not_scale(key, d_in, d_out, axis_name, split):
    return _draw(key, d_in, d_out, axis_name, split, scale=lambda *_: 1.0)


def draws_the_same_part_everywhere(key, d_in, d_out, axis_name, split):
    """One key for all devices: the parts of the kernel are copies of each other."""
    return _draw(key, d_in, d_out, axis_name, split, folded=())


def ignores_the_key(key, d_in, d_out, axis_name, split):
    return _draw(jax.random.key(0), d_in, d_out, axis_name, split)


def sends_whole_leaves_round(key, d_in, d_out, axis_name, split):
    """The first device draws what is not split, and tells the others."""
    found = _draw(key, d_in, d_out, axis_name, split)
    if split:
        return found
    first = lax.axis_index(axis_name) == 0
    return jax.tree.map(lambda leaf: lax.psum(jnp.where(first, leaf, 0), axis_name), found)


def biased(params: Any, y: Any) -> Any:
    return y + params["bias"] if "bias" in params else y


def gathers_the_kernel(params, x, axis_name):
    """Sends weights in place of rows, computes all features of its own rows, and turns the split round at the end."""
    whole = lax.all_gather(params["kernel"], axis_name, axis=1, tiled=True)
    y = lax.all_to_all(x @ whole, axis_name, x.ndim - 1, x.ndim - 2, tiled=True)
    return biased(params, y)


def gathers_for_each_half_of_its_columns(params, x, axis_name):
    halves = jnp.split(params["kernel"], [params["kernel"].shape[1] // 2], axis=1)
    y = jnp.concatenate([column_parallel_dense({"kernel": half}, x, axis_name) for half in halves], -1)
    return biased(params, y)


def forgets_the_bias(params, x, axis_name):
    return column_parallel_dense({"kernel": params["kernel"]}, x, axis_name)


def scaled_back(x: Any, factor: float) -> Any:
    """``x``, whose gradient is multiplied on its way back."""
    return factor * x + lax.stop_gradient((1 - factor) * x)


def averages_the_inputs_gradient(params, x, axis_name):
    return column_parallel_dense(params, scaled_back(x, 1 / lax.axis_size(axis_name)), axis_name)


def lets_no_gradient_through(params, x, axis_name):
    return column_parallel_dense(params, lax.stop_gradient(x), axis_name)


def scatter_rows(y: Any, axis_name: str) -> Any:
    return lax.psum_scatter(y, axis_name, scatter_dimension=y.ndim - 2, tiled=True)


def adds_the_bias_before_the_sum(params, x, axis_name):
    """Every device adds it, and then all of them are added up."""
    return scatter_rows(biased(params, x @ params["kernel"]), axis_name)


def own_rows(y: Any, axis_name: str) -> Any:
    """This device's rows of what every device has."""
    rows = y.shape[-2] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(y, lax.axis_index(axis_name) * rows, rows, y.ndim - 2)


def all_reduces_and_slices(params, x, axis_name):
    """Gives all rows to every device, and keeps its own."""
    y = lax.psum(x @ params["kernel"], axis_name)
    return biased(params, own_rows(y, axis_name))


def averages(params, x, axis_name):
    return biased(params, scatter_rows(x @ params["kernel"], axis_name) / lax.axis_size(axis_name))


def leaves_the_bias_out(params, x, axis_name):
    return row_parallel_dense({"kernel": params["kernel"]}, x, axis_name)


def averages_the_features_gradient(params, x, axis_name):
    return row_parallel_dense(params, scaled_back(x, 1 / lax.axis_size(axis_name)), axis_name)


def gathers_the_weights(params, x, axis_name):
    """Rows stay where they are, and all weights come to them, as in FSDP."""
    up = lax.all_gather(params["up"]["kernel"], axis_name, axis=1, tiled=True)
    bias = lax.all_gather(params["up"]["bias"], axis_name, tiled=True)
    down = lax.all_gather(params["down"]["kernel"], axis_name, tiled=True)
    return jax.nn.gelu(x @ up + bias) @ down + params["down"]["bias"]


def _mlp(params, x, axis_name, *, up: Any = column_parallel_dense, down: Any = row_parallel_dense,
         between: Any = jax.nn.gelu) -> Any:  # fmt: skip
    return down(params["down"], between(up(params["up"], x, axis_name)), axis_name)


def gathers_the_hidden_features(params, x, axis_name):
    """Makes the hidden features whole between the layers, and takes its own out of them again."""

    def whole_and_own(h):
        whole = lax.all_gather(jax.nn.gelu(h), axis_name, axis=h.ndim - 1, tiled=True)
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * h.shape[-1], h.shape[-1], h.ndim - 1)

    return _mlp(params, x, axis_name, between=whole_and_own)


def all_reduces_at_the_end(params, x, axis_name):
    return _mlp(params, x, axis_name, down=all_reduces_and_slices)


def gathers_its_input_twice(params, x, axis_name):
    return _mlp(params, x, axis_name, up=gathers_for_each_half_of_its_columns)


def adds_its_bias_on_every_device(params, x, axis_name):
    return _mlp(params, x, axis_name, down=adds_the_bias_before_the_sum)


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


def looks_ahead(params, x, axis_name):
    return _attention(params, x, axis_name, attend=jax.nn.dot_product_attention)


def has_one_head_a_device(params, x, axis_name):
    """Right where there are as many heads as devices."""
    one = {"qkv": {"kernel": params["qkv"]["kernel"][:, :, :1]}, "out": {"kernel": params["out"]["kernel"][:1]}}
    return _attention(one, x, axis_name)


def all_reduces_at_the_end_in_attention(params, x, axis_name):
    return _attention(params, x, axis_name, out=all_reduces_and_slices)


def sums_the_output_kernels_gradient(params, x, axis_name):
    kernel = scaled_back(params["out"]["kernel"], lax.axis_size(axis_name))
    return tp_attention({**params, "out": {"kernel": kernel}}, x, axis_name)


def keeps_keys_from_learning(params, x, axis_name):
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, lax.stop_gradient(k), v, is_causal=True)

    return _attention(params, x, axis_name, attend=attend)


def loss_of(params: Any, batch: Any, model: Any, tensor_axis: str, block: Any = tp_mlp) -> Any:
    """The mean loss of this device's rows."""

    def layer(x, weights):
        return x + block(weights, rms_norm(weights["norm"], x), tensor_axis), None

    x, _ = lax.scan(layer, model.embed(params["embed"], batch["inputs"]), params["layers"])
    return model.loss(params["head"], x, batch["targets"])


def _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate, *, split: Any = None, whole: Any = None,
          report: Any = None, block: Any = tp_mlp) -> Any:  # fmt: skip
    """The reference's step with parts to replace: what becomes of a split leaf's gradient, and of a whole one's."""
    both = (data_axis, tensor_axis)
    split = split or (lambda g: lax.pmean(g, data_axis) / lax.axis_size(tensor_axis))
    whole = whole or (lambda g: lax.pmean(g, both))
    loss, gradients = jax.value_and_grad(loss_of)(params, batch, model, tensor_axis, block)
    mean = jax.tree.map(lambda g, spec: split(g) if tensor_axis in spec else whole(g), gradients, specs)
    updated = jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, mean)
    return updated, report(loss) if report else lax.pmean(loss, both)


# --8<-- [start:classic]
def leaves_split_leaves_summed(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """The classic: a part's gradient is of the sum of all devices' losses, a copy's of their mean."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 split=lambda g: lax.pmean(g, data_axis))  # fmt: skip


def divides_copies_again(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Divides every leaf by the axis' size, averaged or not."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 whole=lambda g: lax.pmean(g, (data_axis, tensor_axis)) / lax.axis_size(tensor_axis))  # fmt: skip


def averages_parts_with_each_other(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """One mean over both axes for all leaves: different columns are added up."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 split=lambda g: lax.pmean(g, (data_axis, tensor_axis)))  # fmt: skip


def reports_its_own_loss(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 report=lambda loss: lax.pmean(loss, data_axis))  # fmt: skip


def all_reduces_in_every_layer(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Right, with layers that give all rows to every device and throw most of them away."""
    return _step(params, specs, batch, model, data_axis, tensor_axis, learning_rate,
                 block=all_reduces_at_the_end)  # fmt: skip


MUTANTS = (
    mutant("init_dense", counts_its_own_inputs, "initial scale"),
    mutant("init_dense", does_not_scale, "initial scale"),
    mutant("init_dense", draws_the_same_part_everywhere, "values"),
    mutant("init_dense", ignores_the_key, "values"),
    mutant("init_dense", sends_whole_leaves_round, "communication"),
    mutant(
        "column_parallel_dense", gathers_the_kernel, "all-gather bytes", "other collectives", "reduce-scatter bytes"
    ),
    mutant("column_parallel_dense", gathers_for_each_half_of_its_columns, "reduce-scatter bytes"),
    mutant("column_parallel_dense", forgets_the_bias, "gradients", "values"),
    mutant("column_parallel_dense", averages_the_inputs_gradient, "gradients"),
    mutant("column_parallel_dense", lets_no_gradient_through, "gradients", "reduce-scatter bytes"),
    mutant("row_parallel_dense", adds_the_bias_before_the_sum, "gradients", "values"),
    mutant(
        "row_parallel_dense", all_reduces_and_slices, "all-gather bytes", "other collectives", "reduce-scatter bytes"
    ),
    mutant("row_parallel_dense", averages, "gradients", "values"),
    mutant("row_parallel_dense", leaves_the_bias_out, "gradients", "values"),
    mutant("row_parallel_dense", averages_the_features_gradient, "gradients"),
    mutant(
        "tp_mlp",
        gathers_the_weights,
        "all-gather bytes",
        "collectives forward",
        "predicted time",
        "reduce-scatter bytes",
        shown_by=("data=2 x tensor=4", "tensor=4, forward"),
    ),
    mutant(
        "tp_mlp",
        gathers_the_hidden_features,
        "all-gather bytes",
        "collectives forward",
        "predicted time",
        "reduce-scatter bytes",
        shown_by=("data=2 x tensor=4", "tensor=4, forward"),
    ),
    mutant(
        "tp_mlp",
        all_reduces_at_the_end,
        "all-gather bytes",
        "collectives forward",
        "other collectives",
        "predicted time",
        "reduce-scatter bytes",
        shown_by=("data=2 x tensor=4", "tensor=4, forward"),
    ),
    mutant(
        "tp_mlp",
        gathers_its_input_twice,
        "all-gather bytes",
        "collectives forward",
        "reduce-scatter bytes",
        shown_by=("data=2 x tensor=4", "tensor=4, forward"),
    ),
    mutant("tp_mlp", adds_its_bias_on_every_device, "gradients", "values"),
    mutant("tp_attention", looks_ahead, "gradients", "values"),
    mutant("tp_attention", has_one_head_a_device, "gradients", "values"),
    mutant(
        "tp_attention",
        all_reduces_at_the_end_in_attention,
        "all-gather bytes",
        "collectives forward",
        "other collectives",
        "reduce-scatter bytes",
        shown_by=("data=2 x tensor=4", "tensor=2, 6 heads, forward"),
    ),
    mutant("tp_attention", sums_the_output_kernels_gradient, "gradients"),
    mutant("tp_attention", keeps_keys_from_learning, "gradients"),
    mutant("tp_train_step", leaves_split_leaves_summed, "gradient norm", "gradients", "values"),
    mutant("tp_train_step", divides_copies_again, "gradient norm", "gradients", "values"),
    mutant("tp_train_step", averages_parts_with_each_other, "all-reduce bytes", "gradient norm", "gradients", "values"),
    mutant("tp_train_step", reports_its_own_loss, "values"),
    mutant("tp_train_step", all_reduces_in_every_layer, "all-gather bytes", "all-reduce bytes", "reduce-scatter bytes"),
)
