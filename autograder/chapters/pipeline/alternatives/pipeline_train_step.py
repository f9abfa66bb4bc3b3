"""Right answers for ``pipeline_train_step`` in another style."""

from __future__ import annotations

from dataclasses import replace

import jax
import optax
from jax import lax

from solutions.pipeline import pipeline_loss


def over_all_devices_at_once(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Embedding and head over both axes in one sum, divided by the groups."""
    own = jax.random.fold_in(key, lax.axis_index(data_axis))
    groups = lax.axis_size(data_axis)
    run = jax.value_and_grad(lambda p: pipeline_loss(p, batch, own, model, num_microbatches, pipe_axis))
    loss, gradients = run(params)

    def update(path, leaf, gradient):
        axes = data_axis if path[0].key == "layers" else (pipe_axis, data_axis)
        return leaf - learning_rate * lax.psum(gradient, axes) / groups

    return jax.tree.map_with_path(update, params, gradients), lax.pmean(loss, data_axis)


def with_optax_and_layers_that_recompute(
    params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate
):
    """Layers computed again one by one; the gradient of the mean loss of all groups, and optax for the update."""
    layers = replace(model, layer=jax.checkpoint(model.layer))
    own = jax.random.fold_in(key, lax.axis_index(data_axis))

    def loss_of(params):
        return pipeline_loss(params, batch, own, layers, num_microbatches, pipe_axis)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    for name in ("embed", "head"):
        gradients[name] = lax.psum(gradients[name], pipe_axis)
    gradients = jax.tree.map(lambda g: lax.pmean(g, data_axis), gradients)
    optimizer = optax.sgd(learning_rate)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates), lax.pmean(loss, data_axis)


def with_vjp(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """``jax.vjp`` of the mean over groups, whose transpose divides by their number."""
    own = jax.random.fold_in(key, lax.axis_index(data_axis))

    def mean_loss(params):
        return lax.pmean(pipeline_loss(params, batch, own, model, num_microbatches, pipe_axis), data_axis)

    loss, back = jax.vjp(mean_loss, params)
    (gradients,) = back(jax.numpy.ones_like(loss))
    whole = {name: lax.psum(part, data_axis) for name, part in gradients.items()}
    whole = {name: part if name == "layers" else lax.psum(part, pipe_axis) for name, part in whole.items()}
    return jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, whole), loss


ALTERNATIVES = (over_all_devices_at_once, with_optax_and_layers_that_recompute, with_vjp)
