"""Wrong answers for ``init_dense``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.tensor_parallel.mutants.names import COMMUNICATION, SCALE, VALUES
from autograder.proof.mutants import mutant
from solutions.data_parallel import fold_key_over_axes


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


def draws_whole_leaves_apart(key, d_in, d_out, axis_name, split):
    """Folds the key for what is not split, too."""
    return _draw(key, d_in, d_out, axis_name, split, folded=(axis_name,))


def draws_apart_along_every_axis(key, d_in, d_out, axis_name, split):
    """Folds over the whole mesh: devices that hold copies of one part draw different ones."""
    every = tuple(jax.sharding.get_abstract_mesh().axis_names)
    return _draw(key, d_in, d_out, axis_name, split, folded=every if split else ())


def ignores_the_key(key, d_in, d_out, axis_name, split):
    return _draw(jax.random.key(0), d_in, d_out, axis_name, split)


def sends_whole_leaves_round(key, d_in, d_out, axis_name, split):
    """The first device draws what is not split, and tells the others."""
    found = _draw(key, d_in, d_out, axis_name, split)
    if split:
        return found
    first = lax.axis_index(axis_name) == 0
    return jax.tree.map(lambda leaf: lax.psum(jnp.where(first, leaf, 0), axis_name), found)


TASK = "init_dense"
MUTANTS = (
    mutant(TASK, counts_its_own_inputs, SCALE),
    mutant(TASK, does_not_scale, SCALE),
    mutant(TASK, draws_the_same_part_everywhere, VALUES),
    mutant(TASK, draws_whole_leaves_apart, VALUES),
    mutant(TASK, draws_apart_along_every_axis, VALUES),
    mutant(TASK, ignores_the_key, VALUES),
    mutant(TASK, sends_whole_leaves_round, COMMUNICATION),
)
