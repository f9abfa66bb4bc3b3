"""Wrong answers for ``tp_transformer_step``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.tp_transformer.mutants.loss import gathers_logits
from autograder.chapters.tp_transformer.mutants.names import ACTIVATIONS, EXPOSED, LARGEST, REDUCED, VALUES, WRONG
from autograder.proof.mutants import mutant
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.data_parallel import fold_key_over_axes
from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense
from solutions.tp_transformer import (
    parallel_transformer_block,
    tp_transformer_block,
    tp_transformer_step,
    vocab_parallel_embed,
    vocab_parallel_loss,
)


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


def leaves_shares_where_they_are(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """Each device updates its copy of a norm by what it knows of the gradient."""
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate,
                 shares=lambda gradient, axis: gradient)  # fmt: skip


def averages_shares(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """The mean of what devices have of one gradient, where it is their sum."""
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate, shares=lax.pmean)


def divides_what_is_split(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """The rule for a loss that is each device's own mean, and means of shares: for this loss it is wrong twice."""
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate, shares=lax.pmean,
                 split=lambda gradient, axis: gradient / lax.axis_size(axis))  # fmt: skip


def drops_the_same_in_every_place(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """The places on the data axis have other rows and the same masks."""
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate,
                 fold=lambda key, axes: jax.random.fold_in(key, 0))  # fmt: skip


def averages_twice(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    """The gradients, and then the updated parameters too, to be sure."""
    updated, loss = tp_transformer_step(
        params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate
    )
    return lax.pmean(updated, data_axis), loss


def reports_the_loss_of_its_rows(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate):
    return _step(params, specs, batch, key, rate, parallel, data_axis, tensor_axis, learning_rate,
                 report=lambda loss, axis: loss)  # fmt: skip


TASK = "tp_transformer_step"
MUTANTS = (
    mutant(TASK, gathers_and_scatters_whole, EXPOSED),
    mutant(TASK, keeps_all_logits, EXPOSED, LARGEST, ACTIVATIONS),
    mutant(TASK, leaves_shares_where_they_are, *WRONG, REDUCED),
    mutant(TASK, averages_shares, *WRONG),
    mutant(TASK, divides_what_is_split, *WRONG),
    mutant(TASK, drops_the_same_in_every_place, *WRONG),
    mutant(TASK, averages_twice, REDUCED),
    mutant(TASK, reports_the_loss_of_its_rows, VALUES),
)
