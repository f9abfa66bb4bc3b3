"""Wrong answers for ``train_step_dp``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import full_loss
from solutions.data_parallel import train_step_dp


def _varying(tree: Any, axis_name: str) -> Any:
    return jax.tree.map(lambda leaf: as_varying(leaf, axis_name), tree)


def _cut(batch: Any, count: int) -> Any:
    return jax.tree.map(lambda rows: rows.reshape(count, -1, *rows.shape[1:]), batch)


def _accumulated(params: Any, parts: Any, model: Any, axis_name: str, each: Any = lambda found: found) -> Any:
    """Sums of loss and gradient over the parts, before any mean."""

    def add(total, part):
        found = jax.value_and_grad(lambda p: full_loss(model, p, part))(params)
        return jax.tree.map(lambda t, f: t + as_varying(f, axis_name), total, each(found)), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(add, _varying(nothing, axis_name), parts)[0]


def _update(params: Any, gradients: Any, learning_rate: float) -> Any:
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)


def lets_autodiff_reduce(params, batch, model, axis_name, num_microbatches, learning_rate):
    """Replicated parameters: autodiff sums over the devices in every microbatch."""

    def add(total, part):
        loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, part))(params)
        return (total[0] + loss, jax.tree.map(jnp.add, total[1], gradients)), None

    nothing = (as_varying(jnp.zeros(()), axis_name), jax.tree.map(jnp.zeros_like, params))
    (loss, total), _ = lax.scan(add, nothing, _cut(batch, num_microbatches))
    count = num_microbatches * lax.axis_size(axis_name)
    gradients = jax.tree.map(lambda g: g / count, total)
    return _update(params, gradients, learning_rate), lax.pmean(loss / num_microbatches, axis_name), gradients


def keeps_autodiffs_sum(params, batch, model, axis_name, num_microbatches, learning_rate):
    """The same without the division: a ``pmean`` of what is equal everywhere changes nothing."""
    _, loss, gradients = lets_autodiff_reduce(params, batch, model, axis_name, num_microbatches, learning_rate)
    gradients = jax.tree.map(lambda g: g * lax.axis_size(axis_name), gradients)
    return _update(params, gradients, learning_rate), loss, gradients


def averages_every_microbatch(params, batch, model, axis_name, num_microbatches, learning_rate):
    """The reduction written by hand, in the wrong place."""
    parts, own = _cut(batch, num_microbatches), _varying(params, axis_name)

    def add(total, part):
        loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, part))(own)
        return (total[0] + loss, jax.tree.map(jnp.add, total[1], lax.pmean(gradients, axis_name))), None

    nothing = (as_varying(jnp.zeros(()), axis_name), jax.tree.map(jnp.zeros_like, params))
    (loss, total), _ = lax.scan(add, nothing, parts)
    gradients = jax.tree.map(lambda g: g / num_microbatches, total)
    return _update(params, gradients, learning_rate), lax.pmean(loss / num_microbatches, axis_name), gradients


def averages_every_microbatchs_loss(params, batch, model, axis_name, num_microbatches, learning_rate):
    """Four bytes in each microbatch, to have something to print."""
    own, parts = _varying(params, axis_name), _cut(batch, num_microbatches)
    loss, total = _accumulated(own, parts, model, axis_name, lambda f: (lax.pmean(f[0], axis_name), f[1]))
    gradients = jax.tree.map(lambda g: lax.pmean(g / num_microbatches, axis_name), total)
    # All devices hold the same sum; one of them says so to those that do not know.
    alone = jnp.where(lax.axis_index(axis_name) == 0, loss, jnp.zeros_like(loss))
    return _update(params, gradients, learning_rate), lax.psum(alone, axis_name) / num_microbatches, gradients


def sums_over_devices(params, batch, model, axis_name, num_microbatches, learning_rate):
    _, loss, gradients = train_step_dp(params, batch, model, axis_name, num_microbatches, learning_rate)
    gradients = jax.tree.map(lambda g: g * lax.axis_size(axis_name), gradients)
    return _update(params, gradients, learning_rate), loss, gradients


def forgets_the_mean_over_microbatches(params, batch, model, axis_name, num_microbatches, learning_rate):
    _, loss, gradients = train_step_dp(params, batch, model, axis_name, num_microbatches, learning_rate)
    gradients = jax.tree.map(lambda g: g * num_microbatches, gradients)
    return _update(params, gradients, learning_rate), loss, gradients


def divides_by_eight(params, batch, model, axis_name, num_microbatches, learning_rate):
    """A hard-coded device count."""
    loss, total = _accumulated(_varying(params, axis_name), _cut(batch, num_microbatches), model, axis_name)
    gradients = jax.tree.map(lambda g: lax.psum(g, axis_name) / (8 * num_microbatches), total)
    return _update(params, gradients, learning_rate), lax.pmean(loss / num_microbatches, axis_name), gradients


def uses_the_first_microbatch_only(params, batch, model, axis_name, num_microbatches, learning_rate):
    few = jax.tree.map(lambda rows: rows[: rows.shape[0] // num_microbatches], batch)
    return train_step_dp(params, few, model, axis_name, 1, learning_rate)


def takes_all_rows_at_once(params, batch, model, axis_name, num_microbatches, learning_rate):
    """Accumulation left out: the same numbers, and all activations at once."""
    return train_step_dp(params, batch, model, axis_name, 1, learning_rate)


def averages_parameters(params, batch, model, axis_name, num_microbatches, learning_rate):
    """Each device steps by itself and the models are averaged: the same for plain SGD, and for no other optimizer."""
    loss, total = _accumulated(_varying(params, axis_name), _cut(batch, num_microbatches), model, axis_name)
    own = _update(_varying(params, axis_name), jax.tree.map(lambda g: g / num_microbatches, total), learning_rate)
    new = lax.pmean(own, axis_name)
    # What it would log: the change of the parameters.
    moved = jax.tree.map(jnp.subtract, params, new)
    return new, lax.pmean(loss / num_microbatches, axis_name), moved


def updates_after_each_microbatch(params, batch, model, axis_name, num_microbatches, learning_rate):
    """Each device goes its own way within a step, and the models are averaged at its end."""
    own = _varying(params, axis_name)

    def one(params, part):
        loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, part))(params)
        return _update(params, gradients, learning_rate), loss

    new, losses = lax.scan(one, own, _cut(batch, num_microbatches))
    total = jax.tree.map(lambda p, n: (p - n) / (learning_rate * num_microbatches), own, new)
    gradients = lax.pmean(total, axis_name)
    return _update(params, gradients, learning_rate), lax.pmean(jnp.mean(losses), axis_name), gradients


def reports_one_devices_loss(params, batch, model, axis_name, num_microbatches, learning_rate):
    """Logs what the first device sees."""
    loss, total = _accumulated(_varying(params, axis_name), _cut(batch, num_microbatches), model, axis_name)
    gradients = jax.tree.map(lambda g: lax.pmean(g / num_microbatches, axis_name), total)
    alone = jnp.where(lax.axis_index(axis_name) == 0, loss / num_microbatches, jnp.zeros_like(loss))
    return _update(params, gradients, learning_rate), lax.psum(alone, axis_name), gradients


def never_synchronises(params, batch, model, axis_name, num_microbatches, learning_rate):
    loss, total = _accumulated(_varying(params, axis_name), _cut(batch, num_microbatches), model, axis_name)
    gradients = jax.tree.map(lambda g: g / num_microbatches, total)
    return _update(params, gradients, learning_rate), loss / num_microbatches, gradients


def scatters_and_gathers(params, batch, model, axis_name, num_microbatches, learning_rate):
    """An all-reduce in two halves, the second of them a masked sum."""
    loss, total = _accumulated(_varying(params, axis_name), _cut(batch, num_microbatches), model, axis_name)
    n, i = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def mean(g):
        if g.shape == () or g.shape[-1] % n:
            return lax.pmean(g / num_microbatches, axis_name)
        part = lax.psum_scatter(g, axis_name, scatter_dimension=g.ndim - 1, tiled=True) / (n * num_microbatches)
        empty = jnp.zeros_like(g)
        placed = lax.dynamic_update_slice_in_dim(empty, part, i * part.shape[-1], g.ndim - 1)
        return lax.psum(placed, axis_name)

    gradients = jax.tree.map(mean, total)
    return _update(params, gradients, learning_rate), lax.pmean(loss / num_microbatches, axis_name), gradients


TASK = "train_step_dp"
VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
COUNT, SENT, OTHERS = "all-reduces", "all-reduce bytes", "other collectives"
TEMPORARIES = "live temporaries"

MUTANTS = (
    mutant(TASK, takes_all_rows_at_once, TEMPORARIES),
    mutant(TASK, lets_autodiff_reduce, COUNT, SENT),
    mutant(TASK, keeps_autodiffs_sum, VALUES, GRADIENTS, NORM, COUNT, SENT),
    mutant(TASK, averages_every_microbatch, COUNT, SENT),
    mutant(TASK, averages_every_microbatchs_loss, COUNT, SENT),
    mutant(TASK, sums_over_devices, VALUES, GRADIENTS, NORM),
    mutant(TASK, forgets_the_mean_over_microbatches, VALUES, GRADIENTS, NORM),
    mutant(TASK, divides_by_eight, VALUES, GRADIENTS, NORM, shown_by=("pipe=4 x tensor=2",)),
    mutant(TASK, uses_the_first_microbatch_only, VALUES, GRADIENTS, NORM, TEMPORARIES),
    mutant(TASK, averages_parameters, GRADIENTS, NORM),
    mutant(TASK, updates_after_each_microbatch, VALUES, GRADIENTS, NORM),
    mutant(TASK, reports_one_devices_loss, VALUES),
    mutant(TASK, never_synchronises, VALUES),
    mutant(TASK, scatters_and_gathers, OTHERS),
)
