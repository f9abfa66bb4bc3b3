"""Wrong answers for ``vocab_parallel_loss``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.tp_transformer.mutants.names import GRADIENTS, LARGEST, NORM, SENT, VALUES, WRONG
from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import cross_entropy, rms_norm
from solutions.tp_transformer import vocab_parallel_loss


def logits_of(params, x, gather_matmul, axis_name) -> Any:
    return gather_matmul(rms_norm(params["norm"], x), params["out"]["kernel"], axis_name) + params["out"]["bias"]


def _highest(logits, axis_name) -> Any:
    return lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), axis_name)


def _loss(params, x, targets, gather_matmul, axis_name, *, highest: Any = _highest, total: Any = lax.psum,
          right: Any = lax.psum):  # fmt: skip
    """The reference's loss with parts to replace."""
    logits = logits_of(params, x, gather_matmul, axis_name)
    own = logits.shape[-1]
    top = highest(logits, axis_name)
    added = total(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), axis_name)
    local = targets - lax.axis_index(axis_name) * own
    mine = (local >= 0) & (local < own)
    found = jnp.take_along_axis(logits, jnp.clip(local, 0, own - 1)[..., None], axis=-1)[..., 0]
    return jnp.mean(jnp.log(added) + top - right(jnp.where(mine, found, 0), axis_name))


def gathers_logits(params, x, targets, gather_matmul, axis_name):
    """Every device has all logits, and each computes the whole loss."""
    logits = logits_of(params, x, gather_matmul, axis_name)
    every = lax.all_gather(logits, axis_name, axis=logits.ndim - 1, tiled=True)
    return lax.pmean(cross_entropy(every, targets), axis_name)


def subtracts_nothing(params, x, targets, gather_matmul, axis_name):
    """``exp`` of logits as they are."""
    return _loss(params, x, targets, gather_matmul, axis_name,
                 highest=lambda logits, axis_name: jnp.zeros(logits.shape[:-1], logits.dtype))  # fmt: skip


def subtracts_its_own_maximum(params, x, targets, gather_matmul, axis_name):
    """Sums of exponentials that are not of the same scale."""
    return _loss(params, x, targets, gather_matmul, axis_name,
                 highest=lambda logits, _: lax.stop_gradient(jnp.max(logits, axis=-1)))  # fmt: skip


def types_the_loss_as_each_devices_own(params, x, targets, gather_matmul, axis_name):
    """The right number, which every device differentiates."""
    return as_varying(vocab_parallel_loss(params, x, targets, gather_matmul, axis_name), axis_name)


def averages_the_exponentials(params, x, targets, gather_matmul, axis_name):
    """Off by the logarithm of the axis's size, which no gradient shows."""
    return _loss(params, x, targets, gather_matmul, axis_name, total=lax.pmean)


def averages_the_targets_logits(params, x, targets, gather_matmul, axis_name):
    return _loss(params, x, targets, gather_matmul, axis_name, right=lax.pmean)


def adds_up_twice(params, x, targets, gather_matmul, axis_name):
    """The sum of the exponentials is sent once more, to be sure."""

    def total(sums, axis_name):
        return (lax.psum(sums, axis_name) + lax.psum(2 * sums, axis_name) / 2) / 2

    return _loss(params, x, targets, gather_matmul, axis_name, total=total)


def forgets_the_gradient_of_the_norm(params, x, targets, gather_matmul, axis_name):
    frozen = {**params, "norm": jax.tree.map(lax.stop_gradient, params["norm"])}
    return vocab_parallel_loss(frozen, x, targets, gather_matmul, axis_name)


TASK = "vocab_parallel_loss"
MUTANTS = (
    mutant(TASK, gathers_logits, LARGEST, SENT),
    mutant(TASK, subtracts_nothing, *WRONG),
    mutant(TASK, subtracts_its_own_maximum, *WRONG, SENT),
    mutant(TASK, types_the_loss_as_each_devices_own, GRADIENTS, NORM),
    mutant(TASK, averages_the_exponentials, VALUES),
    mutant(TASK, averages_the_targets_logits, *WRONG),
    mutant(TASK, adds_up_twice, SENT),
    mutant(TASK, forgets_the_gradient_of_the_norm, GRADIENTS, NORM),
)
