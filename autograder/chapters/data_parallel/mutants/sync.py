"""Wrong answers for ``sync_gradients``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from solutions.data_parallel import sync_gradients


def _open(spec: Any, axis_names: tuple[str, ...]) -> tuple[str, ...]:
    named = jax.tree.leaves(tuple(spec))
    return tuple(name for name in axis_names if name not in named)


def _each(gradients: Any, specs: Any, axis_names: tuple[str, ...], reduce: Any) -> Any:
    def sync(gradient, spec):
        axes = _open(spec, axis_names)
        return reduce(gradient, axes) if axes else gradient

    return jax.tree.map(sync, gradients, specs)


def averages_every_leaf(gradients, specs, axis_names):
    """Mixes parts of sharded leaves with each other."""
    return lax.pmean(gradients, axis_names)


def sums(gradients, specs, axis_names):
    return _each(gradients, specs, axis_names, lax.psum)


def leaves_everything(gradients, specs, axis_names):
    return gradients


def averages_leaves_that_are_whole_everywhere(gradients, specs, axis_names):
    """All or nothing: a leaf that is split over one axis is not averaged over the other either."""
    return jax.tree.map(lambda g, s: g if jax.tree.leaves(tuple(s)) else lax.pmean(g, axis_names), gradients, specs)


def overlooks_tuples_of_names(gradients, specs, axis_names):
    """``name in spec`` does not look into ``("data", "tensor")``."""

    def sync(gradient, spec):
        axes = tuple(name for name in axis_names if name not in spec)
        return lax.pmean(gradient, axes) if axes else gradient

    return jax.tree.map(sync, gradients, specs)


def one_axis_after_the_other(gradients, specs, axis_names):
    """Right means, and the leaf travels once for each axis."""

    def reduce(gradient, axes):
        for axis in axes:
            gradient = lax.pmean(gradient, axis)
        return gradient

    return _each(gradients, specs, axis_names, reduce)


def divides_by_all_devices(gradients, specs, axis_names):
    """A sum over the right axes, divided by the size of all that were named."""
    return _each(gradients, specs, axis_names, lambda g, axes: lax.psum(g, axes) / lax.axis_size(axis_names))


def averages_twice(gradients, specs, axis_names):
    """A mean of means is the same mean, at twice the bytes."""

    def reduce(gradient, axes):
        again = jax.tree.map(lambda g: lax.pcast(g, axes, to="varying"), lax.pmean(gradient, axes))
        return lax.pmean(again, axes)

    return _each(gradients, specs, axis_names, reduce)


def knows_one_axis_only(gradients, specs, axis_names):
    """``data`` is the only axis that it has heard of."""
    return sync_gradients(gradients, specs, tuple(name for name in axis_names if name == "data"))


def reduces_in_bfloat16(gradients, specs, axis_names):
    def reduce(gradient, axes):
        return lax.pmean(gradient.astype(jnp.bfloat16), axes).astype(gradient.dtype)

    return _each(gradients, specs, axis_names, reduce)


def joins_leaves_into_a_bucket(gradients, specs, axis_names):
    """One flat array for all leaves that need the same axes: as many bytes, fewer and larger messages, more copies."""
    leaves, tree = jax.tree.flatten(gradients)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(tree.flatten_up_to(specs)):
        groups.setdefault(_open(spec, axis_names), []).append(i)
    for axes, members in groups.items():
        if not axes:
            continue
        flat = lax.pmean(jnp.concatenate([leaves[i].ravel() for i in members]), axes)
        for i in members:
            part, flat = flat[: leaves[i].size], flat[leaves[i].size :]
            leaves[i] = part.reshape(leaves[i].shape)
    return tree.unflatten(leaves)


def gathers_and_averages(gradients, specs, axis_names):
    """Every device collects all gradients, and averages them for itself."""
    return _each(gradients, specs, axis_names, lambda g, axes: jnp.mean(lax.all_gather(g, axes), 0))


TASK = "sync_gradients"
VALUES, COUNT, SENT, OTHERS = "values", "all-reduces", "all-reduce bytes", "other collectives"

MUTANTS = (
    mutant(TASK, averages_every_leaf, VALUES, COUNT, SENT),
    mutant(TASK, sums, VALUES),
    mutant(TASK, leaves_everything, VALUES, COUNT, SENT),
    mutant(TASK, averages_leaves_that_are_whole_everywhere, VALUES, COUNT, SENT),
    mutant(TASK, overlooks_tuples_of_names, VALUES, COUNT, SENT),
    mutant(TASK, one_axis_after_the_other, COUNT, SENT),
    mutant(TASK, divides_by_all_devices, VALUES),
    mutant(TASK, averages_twice, COUNT, SENT),
    mutant(TASK, knows_one_axis_only, VALUES, COUNT, SENT),
    mutant(TASK, reduces_in_bfloat16, VALUES, SENT),
    mutant(TASK, joins_leaves_into_a_bucket, COUNT),
    mutant(TASK, gathers_and_averages, COUNT, SENT, OTHERS),
)
