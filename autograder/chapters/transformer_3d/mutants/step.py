"""Wrong answers for ``train_step_3d``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.transformer_3d.mutants.names import SUMMED, VALUES, WRONG, but
from autograder.proof.mutants import mutant
from course.layout import along
from solutions.transformer_3d import forward_3d, train_step_3d


def _step(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm, *,
          norm_of: Any, prepare: Any = lambda gradients: gradients):  # fmt: skip
    """A step with a norm of its own."""
    axes = data_axis, pipe_axis, tensor_axis

    def loss_of(params):
        return forward_3d(params, specs, batch, key, options, *axes)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    gradients = prepare(gradients)
    rate = learning_rate * jnp.minimum(1, largest_norm / norm_of(gradients, specs, axes))
    return jax.tree.map(lambda part, g: part - rate * g, params, gradients), lax.pmean(loss, data_axis)


def _square(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def clips_by_its_own_norm(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
):
    """Each device by the norm of what it holds: their updates do not belong together."""
    return _step(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm,
                 norm_of=lambda gradients, specs, axes: jnp.sqrt(_square(gradients)))  # fmt: skip


def counts_copies(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """Sums the squares over all devices, those of copies as often as there are copies."""
    return _step(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm,
                 norm_of=lambda gradients, specs, axes: jnp.sqrt(lax.psum(_square(gradients), axes)))  # fmt: skip


def forgets_the_stages(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
):
    """The norm of each stage's gradients, with those of embedding and head on all of them."""

    def norm_of(gradients, specs, axes):
        over = data_axis, tensor_axis

        def square(g, spec):
            copies = [lax.axis_size(axis) for axis in over if axis not in along(spec, axis)]
            return jnp.sum(g**2) / jnp.prod(jnp.asarray(copies, g.dtype))

        return jnp.sqrt(lax.psum(sum(jax.tree.leaves(jax.tree.map(square, gradients, specs))), over))

    return _step(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm,
                 norm_of=norm_of)  # fmt: skip


def always_scales(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm):
    """To the largest norm also where the gradient is smaller."""

    class Unbounded:
        """``jax.numpy``, whose minimum is its second argument."""

        minimum = staticmethod(lambda _, ratio: ratio)

        def __getattr__(self, name):
            return getattr(jnp, name)

    changed = but(train_step_3d, jnp=Unbounded())
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm)


def averages_once_more(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
):
    """The updated copies, to be sure."""
    after, loss = train_step_3d(
        params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
    )

    def averaged(leaf, spec):
        axes = tuple(axis for axis in (data_axis, pipe_axis, tensor_axis) if axis not in along(spec, axis))
        for axis in axes:
            leaf = lax.pmean(leaf, axis)
        return leaf

    return jax.tree.map(averaged, after, specs), loss


def reports_the_loss_of_its_rows(
    params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
):
    after, _ = train_step_3d(
        params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis, learning_rate, largest_norm
    )
    return after, forward_3d(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


TASK = "train_step_3d"
_UNCLIPPED = ("data=2 x pipe=2 x tensor=2, 20 steps",)
MUTANTS = (
    mutant(TASK, clips_by_its_own_norm, *WRONG),
    mutant(TASK, counts_copies, *WRONG),
    mutant(TASK, forgets_the_stages, *WRONG),
    mutant(TASK, always_scales, *WRONG, shown_by=_UNCLIPPED),
    mutant(TASK, averages_once_more, SUMMED),
    mutant(TASK, reports_the_loss_of_its_rows, VALUES),
)
