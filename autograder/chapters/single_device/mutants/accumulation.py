"""Wrong answers for ``accumulate_gradients``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from solutions.single_device import accumulate_gradients

VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
SIZE, TEMPORARIES, FLOPS = "program size", "live temporaries", "FLOPs"


def _cut(batch: Any, parts: int) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:]), batch)


def _accumulated(loss_fn: Any, params: Any, parts: Any, unroll: Any = 1) -> Any:
    def step(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(step, nothing, parts, unroll=unroll)[0]


def _divided(tree: Any, by: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf / by, tree)


def sums_microbatches(loss_fn, params, batch, num_microbatches):
    """A sum where a mean is asked for."""
    return _accumulated(loss_fn, params, _cut(batch, num_microbatches))


def divides_the_loss_only(loss_fn, params, batch, num_microbatches):
    loss, gradients = _accumulated(loss_fn, params, _cut(batch, num_microbatches))
    return loss / num_microbatches, gradients


def divides_by_eight(loss_fn, params, batch, num_microbatches):
    """A hard-coded number of microbatches."""
    return _divided(_accumulated(loss_fn, params, _cut(batch, num_microbatches)), 8)


def keeps_the_last_gradient(loss_fn, params, batch, num_microbatches):
    def step(carry, part):
        loss, gradients = jax.value_and_grad(loss_fn)(params, part)
        return (carry[0] + loss / num_microbatches, gradients), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(step, nothing, _cut(batch, num_microbatches))[0]


def leaves_out_the_last_microbatch(loss_fn, params, batch, num_microbatches):
    parts = jax.tree.map(lambda leaf: leaf[: max(1, num_microbatches - 1)], _cut(batch, num_microbatches))
    return _divided(_accumulated(loss_fn, params, parts), max(1, num_microbatches - 1))


def adds_up_in_bfloat16(loss_fn, params, batch, num_microbatches):
    """Saves half of the total's bytes, and loses what is small beside it."""

    def step(total, part):
        loss, gradients = jax.value_and_grad(loss_fn)(params, part)
        return (total[0] + loss, jax.tree.map(lambda t, g: t + g.astype(t.dtype), total[1], gradients)), None

    nothing = (jnp.zeros(()), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.bfloat16), params))
    (loss, total), _ = lax.scan(step, nothing, _cut(batch, num_microbatches))
    return _divided((loss, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), total)), num_microbatches)


def unrolls_the_microbatches(loss_fn, params, batch, num_microbatches):
    """A Python loop: as many copies of the forward and backward pass as there are microbatches."""
    parts = _cut(batch, num_microbatches)
    found = [
        jax.value_and_grad(loss_fn)(params, jax.tree.map(lambda leaf, i=i: leaf[i], parts))
        for i in range(num_microbatches)
    ]
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]) / num_microbatches, *found)


def unrolls_the_scan(loss_fn, params, batch, num_microbatches):
    parts = _cut(batch, num_microbatches)
    return _divided(_accumulated(loss_fn, params, parts, unroll=num_microbatches), num_microbatches)


def stacks_all_gradients(loss_fn, params, batch, num_microbatches):
    """Keeps one gradient a microbatch, and takes the mean at the end."""
    _, found = lax.scan(
        lambda carry, part: (carry, jax.value_and_grad(loss_fn)(params, part)), (), _cut(batch, num_microbatches)
    )
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found)


def differentiates_the_scanned_loss(loss_fn, params, batch, num_microbatches):
    """The gradient of a mean over microbatches: activations of all of them wait for the backward pass."""

    def mean_loss(params):
        def step(total, part):
            return total + loss_fn(params, part) / num_microbatches, None

        return lax.scan(step, jnp.zeros(()), _cut(batch, num_microbatches))[0]

    return jax.value_and_grad(mean_loss)(params)


def computes_all_at_once(loss_fn, params, batch, num_microbatches):
    """The gradient of the whole batch."""
    return jax.value_and_grad(loss_fn)(params, batch)


def maps_over_microbatches(loss_fn, params, batch, num_microbatches):
    """``vmap`` computes them side by side."""
    found = jax.vmap(lambda part: jax.value_and_grad(loss_fn)(params, part))(_cut(batch, num_microbatches))
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found)


def computes_the_loss_again(loss_fn, params, batch, num_microbatches):
    """One more forward pass of every microbatch, for the loss."""
    _, gradients = accumulate_gradients(loss_fn, params, batch, num_microbatches)

    def step(total, part):
        return total + loss_fn(params, part) / num_microbatches, None

    return lax.scan(step, jnp.zeros(()), _cut(batch, num_microbatches))[0], gradients


TASK = "accumulate_gradients"
MUTANTS = (
    mutant(TASK, sums_microbatches, VALUES, GRADIENTS, NORM),
    mutant(TASK, divides_the_loss_only, GRADIENTS, NORM),
    mutant(TASK, divides_by_eight, VALUES, GRADIENTS, NORM, shown_by=("2 microbatches",)),
    mutant(TASK, keeps_the_last_gradient, GRADIENTS, NORM),
    mutant(TASK, leaves_out_the_last_microbatch, VALUES, GRADIENTS, NORM),
    mutant(TASK, adds_up_in_bfloat16, GRADIENTS, NORM, TEMPORARIES),
    mutant(TASK, unrolls_the_microbatches, SIZE, TEMPORARIES, shown_by=("2 microbatches", "8 microbatches")),
    mutant(TASK, unrolls_the_scan, SIZE, TEMPORARIES, shown_by=("2 microbatches", "8 microbatches")),
    mutant(TASK, stacks_all_gradients, TEMPORARIES),
    mutant(TASK, differentiates_the_scanned_loss, TEMPORARIES),
    mutant(TASK, computes_all_at_once, TEMPORARIES),
    mutant(TASK, maps_over_microbatches, TEMPORARIES),
    mutant(TASK, computes_the_loss_again, FLOPS),
)
