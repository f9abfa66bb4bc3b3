"""Wrong answers for ``overlapped_gradients``."""

from __future__ import annotations

from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import full_loss
from solutions.data_parallel import overlapped_gradients


def _cut(batch: Any, count: int) -> Any:
    return jax.tree.map(lambda rows: rows.reshape(count, -1, *rows.shape[1:]), batch)


def _accumulated(params: Any, parts: Any, model: Any, axis_name: str, loss_of: Any = full_loss) -> Any:
    def add(total, part):
        found = jax.value_and_grad(lambda p: loss_of(model, p, part))(params)
        return jax.tree.map(jnp.add, total, found), None

    nothing = (as_varying(jnp.zeros(()), axis_name), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(add, nothing, parts)[0]


def _met(axis_name: str, count: int) -> Any:
    """An identity whose gradient is the mean over devices of what arrives plus what was accumulated before."""

    @jax.custom_vjp
    def meet(params, before):
        return params

    def backward(before, gradient):
        synced = jax.tree.map(lambda g, b: lax.pmean((g + b) / count, axis_name), gradient, before)
        own = jax.tree.map(lambda g: lax.pcast(g, axis_name, to="varying"), synced)
        return own, jax.tree.map(jnp.zeros_like, before)

    meet.defvjp(lambda params, before: (params, before), backward)
    return meet


def _in_the_layers_own_iteration(params, batch, model, axis_name, count, *, scale=1, reduce_all=False):
    parts = _cut(batch, count)
    head, last = (jax.tree.map(lambda rows, c=c: rows[c], parts) for c in (slice(-1), -1))
    loss, total = _accumulated(params, head, model, axis_name)
    if reduce_all:
        total = jax.tree.map(lambda g: as_varying(lax.pmean(g, axis_name), axis_name), total)
    meet = _met(axis_name, count * scale)

    def loss_of(params):
        x = model.embed(meet(params["embed"], total["embed"]), last["inputs"])
        x, _ = lax.scan(lambda x, p: (model.layer(meet(*p), x), None), x, (params["layers"], total["layers"]))
        return model.loss(meet(params["head"], total["head"]), x, last["targets"])

    last_loss, gradients = jax.value_and_grad(loss_of)(params)
    return (loss + last_loss) / count, gradients


def reduces_after_the_backward_pass(params, batch, model, axis_name, num_microbatches):
    """Accumulates, and then synchronises: nothing is computed meanwhile."""
    loss, total = _accumulated(params, _cut(batch, num_microbatches), model, axis_name)
    gradients = jax.tree.map(lambda g: lax.pmean(g / num_microbatches, axis_name), total)
    return loss / num_microbatches, gradients


def reduces_one_bucket_at_the_end(params, batch, model, axis_name, num_microbatches):
    """The same as one flat array, whose parts have other shares of it at every size: those cannot be compared."""
    loss, total = _accumulated(params, _cut(batch, num_microbatches), model, axis_name)
    flat, back = jax.flatten_util.ravel_pytree(total)
    return loss / num_microbatches, back(lax.pmean(flat / num_microbatches, axis_name))


def reduces_in_the_layers_own_iteration(params, batch, model, axis_name, num_microbatches):
    """Layer by layer, but the sums are ready when the iteration has nothing left to compute."""
    return _in_the_layers_own_iteration(params, batch, model, axis_name, num_microbatches)


def reduces_every_microbatch(params, batch, model, axis_name, num_microbatches):
    """What was accumulated travels first, and the last microbatch's gradient after it."""
    return _in_the_layers_own_iteration(params, batch, model, axis_name, num_microbatches, reduce_all=True)


def overlaps_all_microbatches(params, batch, model, axis_name, num_microbatches):
    """Overlapped in every microbatch: hidden, and sent as often as there are microbatches."""

    def one(total, part):
        found = overlapped_gradients(params, part, model, axis_name, 1)
        return jax.tree.map(lambda t, f: t + as_varying(f, axis_name), total, found), None

    nothing = (as_varying(jnp.zeros(()), axis_name), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(one, nothing, _cut(batch, num_microbatches))
    return jax.tree.map(lambda t: t / num_microbatches, total)


def forgets_the_earlier_microbatches(params, batch, model, axis_name, num_microbatches):
    """Reduces the last microbatch's gradient and calls it the mean."""
    parts = _cut(batch, num_microbatches)
    losses = jnp.mean(lax.map(lambda part: full_loss(model, params, part), parts))
    last = jax.tree.map(lambda rows: rows[-1], parts)
    return losses, overlapped_gradients(params, last, model, axis_name, 1)[1]


def divides_by_microbatches_twice(params, batch, model, axis_name, num_microbatches):
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    return loss, jax.tree.map(lambda g: g / num_microbatches, gradients)


def sums_over_devices(params, batch, model, axis_name, num_microbatches):
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    return loss, jax.tree.map(lambda g: g * lax.axis_size(axis_name), gradients)


def shifts_layers_by_one(params, batch, model, axis_name, num_microbatches):
    """What was waiting is written beside the layer that computes, not beside its own."""
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    return loss, {**gradients, "layers": jax.tree.map(lambda g: jnp.roll(g, 1, 0), gradients["layers"])}


def forgets_to_reduce_the_ends(params, batch, model, axis_name, num_microbatches):
    """The loop over layers is overlapped; embedding and head are not in it, and stay each device's own."""
    loss, total = _accumulated(params, _cut(batch, num_microbatches), model, axis_name)
    own = jax.tree.map(lambda g: g / num_microbatches, total)
    return loss / num_microbatches, {**own, "layers": lax.pmean(own["layers"], axis_name)}


def averages_the_loss(params, batch, model, axis_name, num_microbatches):
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    return lax.pmean(loss, axis_name), gradients


def fills_the_wait_with_work(params, batch, model, axis_name, num_microbatches):
    """Computes the last microbatch again and again; the results are weighed with nothing."""
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    again = full_loss(model, params, batch)
    more = full_loss(model, jax.tree.map(lambda p: p * 1.5, params), batch)
    return loss + 0 * again + 0 * more, gradients


TASK = "overlapped_gradients"
VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
SENT, EXPOSED, TIME = "all-reduce bytes", "exposed communication", "predicted time"

MUTANTS = (
    mutant(TASK, reduces_after_the_backward_pass, EXPOSED),
    mutant(TASK, reduces_one_bucket_at_the_end, EXPOSED, TIME),
    mutant(TASK, reduces_in_the_layers_own_iteration, EXPOSED),
    mutant(TASK, reduces_every_microbatch, SENT, EXPOSED),
    mutant(TASK, overlaps_all_microbatches, SENT),
    mutant(TASK, forgets_the_earlier_microbatches, GRADIENTS, NORM),
    mutant(TASK, divides_by_microbatches_twice, GRADIENTS, NORM),
    mutant(TASK, sums_over_devices, GRADIENTS, NORM),
    mutant(TASK, shifts_layers_by_one, GRADIENTS),
    mutant(TASK, forgets_to_reduce_the_ends, GRADIENTS, NORM, SENT, EXPOSED),
    mutant(TASK, averages_the_loss, VALUES, SENT),
    mutant(TASK, fills_the_wait_with_work, EXPOSED, TIME),
)
