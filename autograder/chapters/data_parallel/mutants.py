"""Wrong answers for ``data_parallel``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import full_loss
from solutions.data_parallel import overlapped_gradients, train_step_dp


def keeps_the_key(key, axis_names):
    return key


def folds_in_the_first_axis_only(key, axis_names):
    return jax.random.fold_in(key, lax.axis_index(axis_names[0])) if axis_names else key


def ignores_the_key(key, axis_names):
    return _fold(jax.random.key(0), axis_names)


def _fold(key, axis_names):
    for name in axis_names:
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


def gathers_keys_and_takes_its_own(key, axis_names):
    """The first axis' keys are collected from all devices before one is taken."""
    data = jax.random.key_data(_fold(key, axis_names))
    for name in axis_names:
        data = lax.dynamic_index_in_dim(lax.all_gather(data, name), lax.axis_index(name), keepdims=False)
    return jax.random.wrap_key_data(data)


def returns_bare_numbers(key, axis_names):
    return jax.random.key_data(_fold(key, axis_names))


def averages_every_leaf(gradients, specs, axis_names):
    """Mixes parts of sharded leaves with each other."""
    return lax.pmean(gradients, axis_names)


def _open(spec: Any, axis_names: tuple[str, ...]) -> tuple[str, ...]:
    named = jax.tree.leaves(tuple(spec))
    return tuple(name for name in axis_names if name not in named)


def _each(gradients: Any, specs: Any, axis_names: tuple[str, ...], reduce: Any) -> Any:
    def sync(gradient, spec):
        axes = _open(spec, axis_names)
        return reduce(gradient, axes) if axes else gradient

    return jax.tree.map(sync, gradients, specs)


def sums(gradients, specs, axis_names):
    return _each(gradients, specs, axis_names, lax.psum)


def leaves_everything(gradients, specs, axis_names):
    return gradients


def averages_leaves_that_are_whole_everywhere(gradients, specs, axis_names):
    """All or nothing: a leaf that is split over one axis is not averaged over the other either."""
    return jax.tree.map(lambda g, s: g if jax.tree.leaves(tuple(s)) else lax.pmean(g, axis_names), gradients, specs)


def gathers_and_averages(gradients, specs, axis_names):
    """Every device collects all gradients, and averages them for itself."""
    return _each(gradients, specs, axis_names, lambda g, axes: jnp.mean(lax.all_gather(g, axes), 0))


def takes_all_rows_at_once(params, batch, model, axis_name, num_microbatches, learning_rate):
    """Accumulation left out: the same numbers, and all activations at once."""
    return train_step_dp(params, batch, model, axis_name, 1, learning_rate)


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


def uses_the_first_microbatch_only(params, batch, model, axis_name, num_microbatches, learning_rate):
    few = jax.tree.map(lambda rows: rows[: rows.shape[0] // num_microbatches], batch)
    return train_step_dp(params, few, model, axis_name, 1, learning_rate)


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


def _accumulated_in_overlap(params: Any, parts: Any, model: Any, axis_name: str, loss_of: Any = full_loss) -> Any:
    def add(total, part):
        found = jax.value_and_grad(lambda p: loss_of(model, p, part))(params)
        return jax.tree.map(jnp.add, total, found), None

    nothing = (as_varying(jnp.zeros(()), axis_name), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(add, nothing, parts)[0]


def reduces_after_the_backward_pass(params, batch, model, axis_name, num_microbatches):
    """Accumulates, and then synchronises: nothing is computed meanwhile."""
    loss, total = _accumulated_in_overlap(params, _cut(batch, num_microbatches), model, axis_name)
    gradients = jax.tree.map(lambda g: lax.pmean(g / num_microbatches, axis_name), total)
    return loss / num_microbatches, gradients


def reduces_one_bucket_at_the_end(params, batch, model, axis_name, num_microbatches):
    """The same as one flat array, whose parts have other shares of it at every size: those cannot be compared."""
    loss, total = _accumulated_in_overlap(params, _cut(batch, num_microbatches), model, axis_name)
    flat, back = jax.flatten_util.ravel_pytree(total)
    return loss / num_microbatches, back(lax.pmean(flat / num_microbatches, axis_name))


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
    loss, total = _accumulated_in_overlap(params, head, model, axis_name)
    if reduce_all:
        total = jax.tree.map(lambda g: as_varying(lax.pmean(g, axis_name), axis_name), total)
    meet = _met(axis_name, count * scale)

    def loss_of(params):
        x = model.embed(meet(params["embed"], total["embed"]), last["inputs"])
        x, _ = lax.scan(lambda x, p: (model.layer(meet(*p), x), None), x, (params["layers"], total["layers"]))
        return model.loss(meet(params["head"], total["head"]), x, last["targets"])

    last_loss, gradients = jax.value_and_grad(loss_of)(params)
    return (loss + last_loss) / count, gradients


def reduces_in_the_layers_own_iteration(params, batch, model, axis_name, num_microbatches):
    """Layer by layer, but the sums are ready when the iteration has nothing left to compute."""
    return _in_the_layers_own_iteration(params, batch, model, axis_name, num_microbatches)


def divides_by_microbatches_twice(params, batch, model, axis_name, num_microbatches):
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    return loss, jax.tree.map(lambda g: g / num_microbatches, gradients)


def averages_the_loss(params, batch, model, axis_name, num_microbatches):
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    return lax.pmean(loss, axis_name), gradients


MUTANTS = (
    mutant("fold_key_over_axes", keeps_the_key, "values"),
    mutant(
        "fold_key_over_axes",
        folds_in_the_first_axis_only,
        "values",
        shown_by=("data=4 x tensor=2, over data and tensor",),
    ),
    mutant("fold_key_over_axes", ignores_the_key, "values"),
    mutant("fold_key_over_axes", gathers_keys_and_takes_its_own, "communication"),
    mutant("fold_key_over_axes", returns_bare_numbers, "values"),
    mutant("sync_gradients", averages_every_leaf, "all-reduce bytes", "all-reduces", "values"),
    mutant("sync_gradients", sums, "values"),
    mutant("sync_gradients", leaves_everything, "all-reduce bytes", "all-reduces", "values"),
    mutant("sync_gradients", averages_leaves_that_are_whole_everywhere, "all-reduce bytes", "all-reduces", "values"),
    mutant("sync_gradients", gathers_and_averages, "all-reduce bytes", "all-reduces", "other collectives"),
    mutant("train_step_dp", takes_all_rows_at_once, "live temporaries"),
    mutant("train_step_dp", averages_every_microbatchs_loss, "all-reduce bytes", "all-reduces"),
    mutant("train_step_dp", sums_over_devices, "gradient norm", "gradients", "values"),
    mutant("train_step_dp", uses_the_first_microbatch_only, "gradient norm", "gradients", "live temporaries", "values"),
    mutant("train_step_dp", scatters_and_gathers, "other collectives"),
    mutant("overlapped_gradients", reduces_after_the_backward_pass, "exposed communication"),
    mutant("overlapped_gradients", reduces_one_bucket_at_the_end, "exposed communication", "predicted time"),
    mutant("overlapped_gradients", reduces_in_the_layers_own_iteration, "exposed communication"),
    mutant("overlapped_gradients", divides_by_microbatches_twice, "gradient norm", "gradients"),
    mutant("overlapped_gradients", averages_the_loss, "all-reduce bytes", "values"),
)
