"""Wrong answers for ``vocab_parallel_embed``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from autograder.chapters.tp_transformer.mutants.names import GATHERED, GRADIENTS, NORM, OTHERS, SCATTERED, VALUES, WRONG
from autograder.proof.mutants import mutant
from solutions.tp_transformer import vocab_parallel_embed


def known_rows(params, tokens, axis_name) -> Any:
    """This device's rows of its own tokens, zero for all others."""
    table = params["token"]
    local = tokens - lax.axis_index(axis_name) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    return jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)


def _scatter(rows, axis_name) -> Any:
    return lax.psum_scatter(rows, axis_name, scatter_dimension=1, tiled=True)


def _positions(params, length, axis_name) -> Any:
    return lax.dynamic_slice_in_dim(params["position"], lax.axis_index(axis_name) * length, length)


def starts_at_position_zero(params, tokens, axis_name):
    """Every device gives its rows the first positions."""
    x = _scatter(known_rows(params, tokens, axis_name), axis_name)
    return x + params["position"][: x.shape[1]]


def spreads_rows_over_all_positions(params, tokens, axis_name):
    """The offset in a table that is longer than the sequence."""
    x = _scatter(known_rows(params, tokens, axis_name), axis_name)
    start = lax.axis_index(axis_name) * (params["position"].shape[0] // lax.axis_size(axis_name))
    return x + lax.dynamic_slice_in_dim(params["position"], start, x.shape[1])


def adds_positions_before_the_sum(params, tokens, axis_name):
    """All devices add them, and the scatter adds the devices up."""
    return _scatter(known_rows(params, tokens, axis_name) + params["position"][: tokens.shape[1]], axis_name)


def gives_something_for_every_token(params, tokens, axis_name):
    """Takes the nearest row that it has, instead of nothing, for a token of another device."""
    table = params["token"]
    local = tokens - lax.axis_index(axis_name) * table.shape[0]
    x = _scatter(table[jnp.clip(local, 0, table.shape[0] - 1)], axis_name)
    return x + _positions(params, x.shape[1], axis_name)


def sums_and_keeps_its_rows(params, tokens, axis_name):
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


TASK = "vocab_parallel_embed"
MUTANTS = (
    mutant(TASK, starts_at_position_zero, *WRONG),
    mutant(TASK, spreads_rows_over_all_positions, VALUES, GRADIENTS),
    mutant(TASK, adds_positions_before_the_sum, *WRONG),
    mutant(TASK, gives_something_for_every_token, *WRONG),
    mutant(TASK, sums_and_keeps_its_rows, GATHERED, SCATTERED, OTHERS),
    mutant(TASK, gathers_the_table, GATHERED, SCATTERED),
    mutant(TASK, forgets_the_gradient_of_positions, GRADIENTS, NORM),
)
