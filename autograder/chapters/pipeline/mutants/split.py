"""Wrong answers for ``split_microbatches``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.pipeline.mutants.names import COMMUNICATION, UNEVEN_BATCH, VALUES
from autograder.proof.mutants import mutant
from solutions.pipeline import split_microbatches


def takes_every_nth_row(batch, num_microbatches):
    """Row ``i`` goes into microbatch ``i % num_microbatches``."""
    parts = split_microbatches(batch, num_microbatches)
    return jax.tree.map(lambda whole, part: _strided(whole, part.shape), batch, parts)


def _strided(leaf, shape):
    return jnp.swapaxes(leaf.reshape(shape[1], shape[0], *leaf.shape[1:]), 0, 1)


def turns_the_order_round(batch, num_microbatches):
    return jax.tree.map(lambda leaf: leaf[::-1], split_microbatches(batch, num_microbatches))


def drops_the_rest(batch, num_microbatches):
    """Rows that are left over are not in any microbatch."""

    def split(leaf):
        size = leaf.shape[0] // num_microbatches
        return leaf[: size * num_microbatches].reshape(num_microbatches, size, *leaf.shape[1:])

    return jax.tree.map(split, batch)


def fills_up_with_zeros(batch, num_microbatches):
    def split(leaf):
        size = -(-leaf.shape[0] // num_microbatches)
        missing = size * num_microbatches - leaf.shape[0]
        whole = jnp.pad(leaf, ((0, missing), *[(0, 0)] * (leaf.ndim - 1)))
        return whole.reshape(num_microbatches, size, *leaf.shape[1:])

    return jax.tree.map(split, batch)


def leaves_the_error_to_reshape(batch, num_microbatches):
    """What JAX says is a ``TypeError`` about shapes, far from the cause."""
    return jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), batch)


def refuses_without_a_number(batch, num_microbatches):
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % num_microbatches:
            raise ValueError("bad batch")
    return split_microbatches(batch, num_microbatches)


def gathers_to_pick_its_own(batch, num_microbatches):
    """Gathers the rows of a whole axis to pick its own out of them."""

    axis = jax.sharding.get_abstract_mesh().axis_names[0]

    def split(leaf):
        every = lax.all_gather(leaf, axis)
        return split_microbatches(every[lax.axis_index(axis)], num_microbatches)

    return jax.tree.map(split, batch)


MUTANTS = (
    mutant("split_microbatches", takes_every_nth_row, VALUES),
    mutant("split_microbatches", turns_the_order_round, VALUES),
    mutant("split_microbatches", drops_the_rest, UNEVEN_BATCH),
    mutant("split_microbatches", fills_up_with_zeros, UNEVEN_BATCH),
    mutant("split_microbatches", leaves_the_error_to_reshape, UNEVEN_BATCH),
    mutant("split_microbatches", refuses_without_a_number, UNEVEN_BATCH),
    mutant("split_microbatches", gathers_to_pick_its_own, COMMUNICATION),
)
