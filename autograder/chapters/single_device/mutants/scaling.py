"""Wrong answers for ``scaled_step``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autograder.proof.mutants import mutant
from solutions.single_device import scaled_step

VALUES, LOSSES, SKIPPED, SCALE, GOOD = "values", "losses", "skipped steps", "scale", "good steps"
PRODUCTS = "product dtypes"


def _all_finite(gradients: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))


@dataclass(frozen=True)
class How:
    """What a step does differently."""

    dtype: Any = jnp.float16
    use_scale: bool = True
    unscale: bool = True
    factor: float = 2.0
    shrink: float = 0.5
    lowest: float = 1.0
    start_again: int = 0
    late: int = 0
    finite: Callable[[Any, Any], Any] = lambda gradients, loss: _all_finite(gradients)
    counts_on: bool = False
    never_starts_again: bool = False
    returns_scaled: bool = False
    skip: Callable[[Any, Any], Any] = lambda finite, gradient: finite


def _step(how: How, loss_fn, params, state, batch, learning_rate, growth_interval) -> Any:
    scale = state["scale"] if how.use_scale else jnp.ones(())

    def scaled_loss(params):
        loss = loss_fn(jax.tree.map(lambda leaf: leaf.astype(how.dtype), params), batch)
        return loss * scale, loss

    (scaled, loss), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(params)
    gradients = jax.tree.map(lambda g: g / scale if how.unscale else g, gradients)
    finite = how.finite(gradients, loss)

    def updated(p, g):
        return jnp.where(how.skip(finite, g), p - learning_rate * g, p)

    params = jax.tree.map(updated, params, gradients)
    good = jnp.where(finite, state["good_steps"] + 1, state["good_steps"] if how.counts_on else how.start_again)
    grows = finite & (good >= growth_interval + how.late)
    bigger = jnp.where(grows, how.factor * state["scale"], state["scale"])
    new_scale = jnp.where(finite, bigger, jnp.maximum(how.shrink * state["scale"], how.lowest))
    good = good if how.never_starts_again else jnp.where(grows, 0, good)
    return params, {"scale": new_scale, "good_steps": good}, scaled if how.returns_scaled else loss


def forgets_the_scale(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Small gradients become zero, or one of a few numbers."""
    return _step(How(use_scale=False), loss_fn, params, state, batch, learning_rate, growth_interval)


def keeps_the_scale_in_gradients(loss_fn, params, state, batch, learning_rate, growth_interval):
    """The scale stays in the gradients."""
    return _step(How(unscale=False), loss_fn, params, state, batch, learning_rate, growth_interval)


def casts_nothing(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Nothing is ever cast; an outlier then overflows nowhere."""
    return _step(How(dtype=jnp.float32), loss_fn, params, state, batch, learning_rate, growth_interval)


def casts_to_bfloat16(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How(dtype=jnp.bfloat16), loss_fn, params, state, batch, learning_rate, growth_interval)


def never_skips(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Knows that a gradient is bad, halves the scale, and updates all the same."""
    return _step(How(skip=lambda *_: True), loss_fn, params, state, batch, learning_rate, growth_interval)


def looks_at_the_loss_only(loss_fn, params, state, batch, learning_rate, growth_interval):
    """A loss can be finite where its gradient is not."""
    how = How(finite=lambda gradients, loss: jnp.isfinite(loss))
    return _step(how, loss_fn, params, state, batch, learning_rate, growth_interval)


def looks_at_the_first_leaf_only(loss_fn, params, state, batch, learning_rate, growth_interval):
    how = How(finite=lambda gradients, loss: jnp.all(jnp.isfinite(jax.tree.leaves(gradients)[0])))
    return _step(how, loss_fn, params, state, batch, learning_rate, growth_interval)


def skips_bad_elements_only(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Updates all that is finite, and half of the model moves."""
    how = How(skip=lambda finite, gradient: jnp.isfinite(gradient))
    return _step(how, loss_fn, params, state, batch, learning_rate, growth_interval)


def multiplies_bad_gradients_by_zero(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Zero times infinity is NaN."""
    new, state_after, loss = _step(How(skip=lambda *_: True), loss_fn, params, state, batch, 1.0, growth_interval)
    gradients = jax.tree.map(jnp.subtract, params, new)
    keep = _all_finite(gradients).astype(jnp.float32)
    return jax.tree.map(lambda p, g: p - learning_rate * keep * g, params, gradients), state_after, loss


def halves_below_one(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How(lowest=0.0), loss_fn, params, state, batch, learning_rate, growth_interval)


def grows_a_step_late(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Off by one: only after more than ``growth_interval`` good steps."""
    return _step(How(late=1), loss_fn, params, state, batch, learning_rate, growth_interval)


def goes_on_counting_after_a_bad_step(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Counts good steps, not good steps in a row."""
    return _step(How(counts_on=True), loss_fn, params, state, batch, learning_rate, growth_interval)


def grows_at_every_step_once_it_has_grown(loss_fn, params, state, batch, learning_rate, growth_interval):
    """The counter does not go back to zero when the scale grows."""
    return _step(How(never_starts_again=True), loss_fn, params, state, batch, learning_rate, growth_interval)


def never_grows(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How(factor=1.0), loss_fn, params, state, batch, learning_rate, growth_interval)


def shrinks_to_a_tenth(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How(shrink=0.1), loss_fn, params, state, batch, learning_rate, growth_interval)


def returns_the_scaled_loss(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How(returns_scaled=True), loss_fn, params, state, batch, learning_rate, growth_interval)


def rounds_parameters(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Keeps the parameters in float16 from step to step, also when a step is skipped."""
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float16).astype(jnp.float32), params)
    return scaled_step(loss_fn, low, state, batch, learning_rate, growth_interval)


TASK = "scaled_step"
MUTANTS = (
    mutant(TASK, forgets_the_scale, VALUES, LOSSES, SKIPPED, SCALE, GOOD),
    mutant(TASK, keeps_the_scale_in_gradients, VALUES, LOSSES, SCALE, GOOD),
    mutant(TASK, casts_nothing, VALUES, LOSSES, SKIPPED, SCALE, PRODUCTS),
    mutant(TASK, casts_to_bfloat16, VALUES, LOSSES, SKIPPED, SCALE, PRODUCTS),
    mutant(TASK, never_skips, VALUES, LOSSES, SKIPPED, SCALE, GOOD),
    mutant(TASK, looks_at_the_loss_only, VALUES, LOSSES, SKIPPED, SCALE, GOOD),
    mutant(TASK, looks_at_the_first_leaf_only, VALUES, LOSSES, SKIPPED, SCALE),
    mutant(TASK, skips_bad_elements_only, VALUES, LOSSES, SKIPPED),
    mutant(TASK, multiplies_bad_gradients_by_zero, VALUES, LOSSES, SKIPPED, SCALE, GOOD),
    mutant(TASK, halves_below_one, SCALE, shown_by=("scale of 1",)),
    mutant(TASK, grows_a_step_late, SCALE, GOOD),
    mutant(TASK, goes_on_counting_after_a_bad_step, SCALE, GOOD),
    mutant(TASK, grows_at_every_step_once_it_has_grown, SCALE, GOOD),
    mutant(TASK, never_grows, SCALE),
    mutant(TASK, shrinks_to_a_tenth, SCALE),
    mutant(TASK, returns_the_scaled_loss, LOSSES),
    mutant(TASK, rounds_parameters, SKIPPED),
)
