"""Wrong answers for ``tp_mlp``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.tensor_parallel.mutants.dense import (
    adds_the_bias_before_the_sum,
    all_reduces_and_slices,
    biased,
    gathers_for_each_half_of_its_columns,
    scaled_back,
    scatter_rows,
)
from autograder.chapters.tensor_parallel.mutants.names import (
    FORWARD,
    GATHERED,
    GRADIENTS,
    OTHERS,
    SCATTERED,
    TIME,
    WRONG,
)
from autograder.proof.mutants import mutant
from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense, tp_mlp


def _mlp(params, x, axis_name, *, up: Any = column_parallel_dense, down: Any = row_parallel_dense,
         between: Any = jax.nn.gelu) -> Any:  # fmt: skip
    return down(params["down"], between(up(params["up"], x, axis_name)), axis_name)


def gathers_the_weights(params, x, axis_name):
    """Rows stay where they are, and all weights come to them, as in FSDP."""
    up = lax.all_gather(params["up"]["kernel"], axis_name, axis=1, tiled=True)
    bias = lax.all_gather(params["up"]["bias"], axis_name, tiled=True)
    down = lax.all_gather(params["down"]["kernel"], axis_name, tiled=True)
    return jax.nn.gelu(x @ up + bias) @ down + params["down"]["bias"]


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


def sends_its_rows_in_two_halves(params, x, axis_name):
    """Each half of its rows by itself, there and back: twice as many collectives of half the size."""
    halves = jnp.split(x, 2, axis=-2)
    return jnp.concatenate([tp_mlp(params, half, axis_name) for half in halves], -2)


def multiplies_a_few_rows_at_a_time(params, x, axis_name):
    """Eight blocks of rows, one after the other: both kernels are read for each, and both gradients added up."""
    rows = lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)
    blocks = jnp.moveaxis(rows.reshape(*rows.shape[:-2], 8, -1, rows.shape[-1]), -3, 0)

    def features(block):
        return jax.nn.gelu(biased(params["up"], block @ params["up"]["kernel"])) @ params["down"]["kernel"]

    y = jnp.moveaxis(lax.map(features, blocks), 0, -3).reshape(rows.shape)
    return biased(params["down"], scatter_rows(y, axis_name))


def adds_its_bias_on_every_device(params, x, axis_name):
    return _mlp(params, x, axis_name, down=adds_the_bias_before_the_sum)


def uses_another_activation(params, x, axis_name):
    return _mlp(params, x, axis_name, between=jax.nn.relu)


def activates_before_the_bias(params, x, axis_name):
    def up(params, x, axis_name):
        return biased(params, jax.nn.gelu(column_parallel_dense({"kernel": params["kernel"]}, x, axis_name)))

    return _mlp(params, x, axis_name, up=up, between=lambda h: h)


def divides_the_gradient(params, x, axis_name):
    """Backward, the input's gradient is averaged, though every device's features have their own part in it."""
    return tp_mlp(params, scaled_back(x, 1 / lax.axis_size(axis_name)), axis_name)


def learns_in_its_weights_alone(params, x, axis_name):
    return tp_mlp(params, lax.stop_gradient(x), axis_name)


TASK, FIRST, SHORT = "tp_mlp", "data=2 x tensor=4", "tensor=4, forward"
MUTANTS = (
    mutant(TASK, gathers_the_weights, FORWARD, GATHERED, SCATTERED, TIME, shown_by=(FIRST, SHORT)),
    mutant(TASK, gathers_the_hidden_features, FORWARD, GATHERED, SCATTERED, TIME, shown_by=(FIRST, SHORT)),
    mutant(TASK, all_reduces_at_the_end, FORWARD, GATHERED, SCATTERED, OTHERS, TIME, shown_by=(FIRST, SHORT)),
    mutant(TASK, gathers_its_input_twice, FORWARD, GATHERED, SCATTERED, shown_by=(FIRST, SHORT)),
    mutant(TASK, sends_its_rows_in_two_halves, FORWARD, shown_by=(SHORT,)),
    mutant(TASK, multiplies_a_few_rows_at_a_time, TIME),
    mutant(TASK, adds_its_bias_on_every_device, *WRONG),
    mutant(TASK, uses_another_activation, *WRONG),
    mutant(TASK, activates_before_the_bias, *WRONG),
    mutant(TASK, divides_the_gradient, GRADIENTS),
    mutant(TASK, learns_in_its_weights_alone, GRADIENTS, SCATTERED),
)
