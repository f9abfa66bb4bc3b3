"""Wrong answers for ``init_3d``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.transformer_3d.mutants.names import SENT, SPLIT, STATE, VALUES, but
from autograder.proof.mutants import mutant
from solutions.fsdp import shard_params
from solutions.transformer_3d import init_3d


def leaves_data_out(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Splits over stages and features alone."""
    return init_3d(params, num_repeats, 10**9, data_axis, pipe_axis, tensor_axis)


def leaves_features_out(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Splits over stages and data alone."""

    def whole(tree, axis_name):
        return jax.tree.map(lambda _: P(), tree)

    return but(init_3d, tensor_specs=whole)(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)


def splits_small_leaves_too(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    return init_3d(params, num_repeats, 0, data_axis, pipe_axis, tensor_axis)


def asks_the_whole_leaf_for_its_size(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """The limit is for a device's part; here it is held against the leaf before features are split."""

    def split(leaf, axis_name, limit):
        return shard_params(leaf, axis_name, limit // 2)

    return but(init_3d, shard_params=split)(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)


def takes_layers_in_a_row(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """A stage's layers follow each other, as without repeats."""
    stages = lax.axis_size(pipe_axis)

    def in_a_row(leaf):
        grid = leaf.reshape(stages, num_repeats, -1, *leaf.shape[1:])
        return jnp.swapaxes(grid, 0, 1).reshape(leaf.shape)

    moved = {**params, "layers": jax.tree.map(in_a_row, params["layers"])}
    return init_3d(moved, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)


def gives_every_place_the_first_part(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Of what is split over data, all hold the first part."""
    parts, specs = init_3d(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)

    def first(part, spec):
        named = any(data_axis in (entry if isinstance(entry, tuple) else (entry,)) for entry in spec)
        return lax.all_gather(part, data_axis)[0] if named else part

    return jax.tree.map(first, parts, specs), specs


def splits_the_first_dim(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """The first dim that is divisible, not the largest."""

    def first(leaf, axis_name, limit):
        fits = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % lax.axis_size(axis_name) == 0]
        return leaf, P(*[None] * fits[0], axis_name) if fits and leaf.size >= limit else P()

    return but(init_3d, shard_params=first)(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)


TASK = "init_3d"
MUTANTS = (
    mutant(TASK, leaves_data_out, SPLIT, STATE),
    mutant(TASK, leaves_features_out, SPLIT, STATE),
    mutant(TASK, splits_small_leaves_too, SPLIT, STATE),
    mutant(TASK, asks_the_whole_leaf_for_its_size, SPLIT, STATE),
    mutant(TASK, takes_layers_in_a_row, VALUES),
    mutant(TASK, gives_every_place_the_first_part, VALUES, SENT),
    mutant(TASK, splits_the_first_dim, SPLIT),
)
