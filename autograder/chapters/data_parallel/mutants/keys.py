"""Wrong answers for ``fold_key_over_axes``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import as_varying


def keeps_the_key(key, axis_names):
    return key


def folds_in_the_first_axis_only(key, axis_names):
    return jax.random.fold_in(key, lax.axis_index(axis_names[0])) if axis_names else key


def adds_up_the_places(key, axis_names):
    """Devices (0, 1) and (1, 0) get the same."""
    total = sum((lax.axis_index(name) for name in axis_names), start=jnp.int32(0))
    return jax.random.fold_in(key, total)


def counts_an_axis_as_two(key, axis_names):
    """A number for each place with a hard-coded axis size: 2 * first + second."""
    place = jnp.int32(0)
    for name in axis_names[::-1]:
        place = place * 2 + lax.axis_index(name)
    return jax.random.fold_in(key, place) if axis_names else key


def adds_the_place_to_the_seed(key, axis_names):
    """Device 1 of one run has the key of device 0 of the next one."""
    data = jax.random.key_data(key)
    place = jnp.int32(0)
    for name in axis_names:
        place = place * lax.axis_size(name) + lax.axis_index(name)
    step = (place + bool(axis_names) * 1).astype(jnp.uint32)
    return jax.random.wrap_key_data(data + jnp.stack([jnp.zeros_like(step), step]))


def ignores_the_key(key, axis_names):
    return _fold(jax.random.key(0), axis_names)


def folds_in_every_axis_called_tensor_or_data(key, axis_names):
    """Hard-coded names: differs over ``tensor``, named or not."""
    for name in ("data", "tensor"):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


def splits_and_takes_the_place(key, axis_names):
    """The first device keeps the key, the others fold."""
    folded = _fold(key, axis_names)
    first = jnp.array(True)
    for name in axis_names:
        first &= lax.axis_index(name) == 0
        key = jax.random.wrap_key_data(as_varying(jax.random.key_data(key), name))
    return jax.random.wrap_key_data(jnp.where(first, jax.random.key_data(key), jax.random.key_data(folded)))


def gathers_keys_and_takes_its_own(key, axis_names):
    """The first axis' keys are collected from all devices before one is taken."""
    data = jax.random.key_data(_fold(key, axis_names))
    for name in axis_names:
        data = lax.dynamic_index_in_dim(lax.all_gather(data, name), lax.axis_index(name), keepdims=False)
    return jax.random.wrap_key_data(data)


def returns_bare_numbers(key, axis_names):
    return jax.random.key_data(_fold(key, axis_names))


def _fold(key, axis_names):
    for name in axis_names:
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


TASK, VALUES, COMMUNICATION = "fold_key_over_axes", "values", "communication"
BOTH = ("data=4 x tensor=2, over data and tensor",)

MUTANTS = (
    mutant(TASK, keeps_the_key, VALUES),
    mutant(TASK, folds_in_the_first_axis_only, VALUES, shown_by=BOTH),
    mutant(TASK, adds_up_the_places, VALUES, shown_by=BOTH),
    mutant(TASK, counts_an_axis_as_two, VALUES, shown_by=BOTH),
    mutant(TASK, adds_the_place_to_the_seed, VALUES),
    mutant(TASK, ignores_the_key, VALUES),
    mutant(TASK, folds_in_every_axis_called_tensor_or_data, VALUES),
    mutant(TASK, splits_and_takes_the_place, VALUES),
    mutant(TASK, gathers_keys_and_takes_its_own, COMMUNICATION),
    mutant(TASK, returns_bare_numbers, VALUES),
)
