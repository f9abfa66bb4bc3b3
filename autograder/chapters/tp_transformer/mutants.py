"""Wrong answers for ``tp_transformer``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import cross_entropy, drop, rms_norm
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.data_parallel import fold_key_over_axes
from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense
from solutions.tp_transformer import (
    attend,
    parallel_transformer_block,
    tp_transformer_block,
    tp_transformer_step,
    vocab_parallel_embed,
    vocab_parallel_loss,
)


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


def feeds_the_mlp_what_came_in(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """What attention adds reaches the output, and not the MLP."""
    return _block(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, feed=lambda before, after: before)


def forgets_the_gradient_of_the_norms(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    frozen = {**params, "attention_norm": jax.tree.map(lax.stop_gradient, params["attention_norm"])}
    return tp_transformer_block(frozen, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def sums_and_keeps_its_rows(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    """An all-reduce of whole activations, of which each device then takes its part."""

    def summed(x, kernel, axis_name):
        rows = x.shape[-2] // lax.axis_size(axis_name)
        return lax.dynamic_slice_in_dim(lax.psum(x @ kernel, axis_name), lax.axis_index(axis_name) * rows, rows, -2)

    return tp_transformer_block(params, x, key, rate, gather_matmul, summed, axis_name)


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


def drops_the_same_on_every_device_in_parallel(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    y = parallel_transformer_block(params, x, key, 0.0, gather_matmul, matmul_scatter, axis_name) - x
    return x + drop(y, rate, key)


def adds_the_bias_on_every_device(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    down = {**params["down"], "bias": params["down"]["bias"] * lax.axis_size(axis_name)}
    return parallel_transformer_block({**params, "down": down}, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def forgets_the_gradient_of_the_bias(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    down = {**params["down"], "bias": lax.stop_gradient(params["down"]["bias"])}
    return parallel_transformer_block({**params, "down": down}, x, key, rate, gather_matmul, matmul_scatter, axis_name)


def known_rows(params, tokens, axis_name) -> Any:
    """This device's rows of its own tokens, zero for all others."""
    table = params["token"]
    local = tokens - lax.axis_index(axis_name) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    return jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)


def _scatter(rows, axis_name) -> Any:
    return lax.psum_scatter(rows, axis_name, scatter_dimension=1, tiled=True)


def spreads_rows_over_all_positions(params, tokens, axis_name):
    """The offset in a table that is longer than the sequence."""
    x = _scatter(known_rows(params, tokens, axis_name), axis_name)
    start = lax.axis_index(axis_name) * (params["position"].shape[0] // lax.axis_size(axis_name))
    return x + lax.dynamic_slice_in_dim(params["position"], start, x.shape[1])


def adds_positions_before_the_sum(params, tokens, axis_name):
    """All devices add them, and the scatter adds the devices up."""
    return _scatter(known_rows(params, tokens, axis_name) + params["position"][: tokens.shape[1]], axis_name)


def _positions(params, length, axis_name) -> Any:
    return lax.dynamic_slice_in_dim(params["position"], lax.axis_index(axis_name) * length, length)


def sums_and_keeps_its_rows_in_embed(params, tokens, axis_name):
    """An all-reduce of all rows, of which each device then takes its part."""
    every = lax.psum(known_rows(params, tokens, axis_name), axis_name)
    rows = every.shape[1] // lax.axis_size(axis_name)
    x = lax.dynamic_slice_in_dim(every, lax.axis_index(axis_name) * rows, rows, 1)
    return x + _positions(params, rows, axis_name)


def gathers_the_table(params, tokens, axis_name):
    table = lax.all_gather(params["token"], axis_name, tiled=True)
    rows = tokens.shape[1] // lax.axis_size(axis_name)
    own = lax.dynamic_slice_in_dim(tokens, lax.axis_index(axis_name) * rows, rows, 1)
    return table[own] + _positions(params, rows, axis_name)


def forgets_the_gradient_of_positions(params, tokens, axis_name):
    return vocab_parallel_embed({**params, "position": lax.stop_gradient(params["position"])}, tokens, axis_name)


def logits_of(params, x, gather_matmul, axis_name) -> Any:
    return gather_matmul(rms_norm(params["norm"], x), params["out"]["kernel"], axis_name) + params["out"]["bias"]


def gathers_logits(params, x, targets, gather_matmul, axis_name):
    """Every device has all logits, and each computes the whole loss."""
    logits = logits_of(params, x, gather_matmul, axis_name)
    every = lax.all_gather(logits, axis_name, axis=logits.ndim - 1, tiled=True)
    return lax.pmean(cross_entropy(every, targets), axis_name)


def types_the_loss_as_each_devices_own(params, x, targets, gather_matmul, axis_name):
    """The right number, which every device differentiates."""
    return as_varying(vocab_parallel_loss(params, x, targets, gather_matmul, axis_name), axis_name)


def _highest(logits, axis_name) -> Any:
    return lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), axis_name)


def _loss(params, x, targets, gather_matmul, axis_name, *, highest: Any = _highest, total: Any = lax.psum,
          right: Any = lax.psum):  # fmt: skip
    """The reference's loss with parts to replace."""
    logits = logits_of(params, x, gather_matmul, axis_name)
    own = logits.shape[-1]
    top = highest(logits, axis_name)
    added = total(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), axis_name)
    local = targets - lax.axis_index(axis_name) * own
    mine = (local >= 0) & (local < own)
    found = jnp.take_along_axis(logits, jnp.clip(local, 0, own - 1)[..., None], axis=-1)[..., 0]
    return jnp.mean(jnp.log(added) + top - right(jnp.where(mine, found, 0), axis_name))


def averages_the_exponentials(params, x, targets, gather_matmul, axis_name):
    """Off by the logarithm of the axis's size, which no gradient shows."""
    return _loss(params, x, targets, gather_matmul, axis_name, total=lax.pmean)


def averages_the_targets_logits(params, x, targets, gather_matmul, axis_name):
    return _loss(params, x, targets, gather_matmul, axis_name, right=lax.pmean)


def forgets_the_gradient_of_the_norm(params, x, targets, gather_matmul, axis_name):
    frozen = {**params, "norm": jax.tree.map(lax.stop_gradient, params["norm"])}
    return vocab_parallel_loss(frozen, x, targets, gather_matmul, axis_name)


def gather_matmul(x, kernel, axis_name) -> Any:
    return column_parallel_dense({"kernel": kernel}, x, axis_name)


def matmul_scatter(x, kernel, axis_name) -> Any:
    return row_parallel_dense({"kernel": kernel}, x, axis_name)


def _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate, *,
          travel: Any = (ring_gather_matmul, matmul_ring_scatter), loss_of: Any = vocab_parallel_loss,
          fold: Any = fold_key_over_axes, layer_key: Any = jax.random.fold_in, split: Any = lambda g, axis: g,
          shares: Any = lax.psum, groups: Any = lax.pmean, report: Any = lax.pmean):  # fmt: skip
    """The reference's step with parts to replace."""
    block = parallel_transformer_block if parallel else tp_transformer_block
    key = fold(key, (data_axis,))

    def layer(x, numbered):
        return block(numbered[1], x, layer_key(key, numbered[0]), rate, travel[0], travel[1], tensor_axis), None

    def whole_loss(params):
        x = vocab_parallel_embed(params["embed"], batch["inputs"], tensor_axis)
        numbers = jnp.arange(len(jax.tree.leaves(params["layers"])[0]))
        x, _ = lax.scan(layer, x, (numbers, params["layers"]))
        return loss_of(params["head"], x, batch["targets"], travel[0], tensor_axis)

    def whole(gradient, spec):
        return groups((split if tensor_axis in spec else shares)(gradient, tensor_axis), data_axis)

    loss, gradients = jax.value_and_grad(whole_loss)(params)
    gradients = jax.tree.map(whole, gradients, specs)
    updated = jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, gradients)
    return updated, report(loss, data_axis)


def gathers_and_scatters_whole(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """No rings: everybody waits while activations travel."""
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate,
                 travel=(gather_matmul, matmul_scatter))  # fmt: skip


def keeps_all_logits(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate,
                 loss_of=gathers_logits)  # fmt: skip


def averages_shares(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """The mean of what devices have of one gradient, where it is their sum."""
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate, shares=lax.pmean)


def averages_twice(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """The gradients, and then the updated parameters too, to be sure."""
    updated, loss = tp_transformer_step(
        params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate
    )
    return lax.pmean(updated, data_axis), loss


def reports_the_loss_of_its_rows(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate,
                 report=lambda loss, axis: loss)  # fmt: skip


MUTANTS = (
    mutant("tp_transformer_block", drops_the_same_on_every_device, "gradient norm", "gradients", "values"),
    mutant("tp_transformer_block", drops_the_same_twice, "gradient norm", "gradients", "values"),
    mutant("tp_transformer_block", feeds_the_mlp_what_came_in, "gradient norm", "gradients", "values"),
    mutant("tp_transformer_block", forgets_the_gradient_of_the_norms, "gradient norm", "gradients"),
    mutant(
        "tp_transformer_block", sums_and_keeps_its_rows, "all-gather bytes", "all-reduce bytes", "reduce-scatter bytes"
    ),
    mutant(
        "parallel_transformer_block", one_after_the_other, "all-gather bytes", "predicted time", "reduce-scatter bytes"
    ),
    mutant("parallel_transformer_block", gathers_twice, "all-gather bytes", "reduce-scatter bytes"),
    mutant(
        "parallel_transformer_block", drops_the_same_on_every_device_in_parallel, "gradient norm", "gradients", "values"
    ),
    mutant("parallel_transformer_block", adds_the_bias_on_every_device, "gradient norm", "gradients", "values"),
    mutant("parallel_transformer_block", forgets_the_gradient_of_the_bias, "gradient norm", "gradients"),
    mutant("vocab_parallel_embed", spreads_rows_over_all_positions, "gradients", "values"),
    mutant("vocab_parallel_embed", adds_positions_before_the_sum, "gradient norm", "gradients", "values"),
    mutant(
        "vocab_parallel_embed",
        sums_and_keeps_its_rows_in_embed,
        "all-gather bytes",
        "other collectives",
        "reduce-scatter bytes",
    ),
    mutant("vocab_parallel_embed", gathers_the_table, "all-gather bytes", "reduce-scatter bytes"),
    mutant("vocab_parallel_embed", forgets_the_gradient_of_positions, "gradient norm", "gradients"),
    mutant("vocab_parallel_loss", gathers_logits, "bytes sent", "largest temporary"),
    mutant("vocab_parallel_loss", types_the_loss_as_each_devices_own, "gradient norm", "gradients"),
    mutant("vocab_parallel_loss", averages_the_exponentials, "values"),
    mutant("vocab_parallel_loss", averages_the_targets_logits, "gradient norm", "gradients", "values"),
    mutant("vocab_parallel_loss", forgets_the_gradient_of_the_norm, "gradient norm", "gradients"),
    mutant("tp_transformer_step", gathers_and_scatters_whole, "exposed communication"),
    mutant("tp_transformer_step", keeps_all_logits, "activation bytes", "exposed communication", "largest temporary"),
    mutant("tp_transformer_step", averages_shares, "gradient norm", "gradients", "values"),
    mutant("tp_transformer_step", averages_twice, "all-reduce bytes"),
    mutant("tp_transformer_step", reports_the_loss_of_its_rows, "values"),
)
