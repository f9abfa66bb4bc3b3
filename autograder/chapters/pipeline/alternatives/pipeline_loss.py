"""Right answers for ``pipeline_loss`` in another style."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from course.model import layer_key
from solutions.pipeline import execute_pipeline, split_microbatches


def share_of(model, axis_name):
    """How many layers a stage has: a helper from another cell."""
    stages = lax.axis_size(axis_name)
    if model.num_layers % stages != 0:
        raise ValueError(f"num_layers={model.num_layers} is not divisible by the {stages} stages of {axis_name!r}")
    return model.num_layers // stages


def through_all_stages(params, x, key, model, num_microbatches, axis_name):
    """A Python loop over the layers of a stage; every layer computed again in the backward pass."""
    share, number = share_of(model, axis_name), lax.axis_index(axis_name)
    run = jax.checkpoint(lambda weights, x, key: model.layer(weights, x, key))

    def stage(x, microbatch):
        for j in range(share):
            weights = jax.tree.map(lambda leaf: leaf[j], params["layers"])  # noqa: B023
            x = run(weights, x, layer_key(key, microbatch, number * share + j))
        return x

    return execute_pipeline(stage, split_microbatches(x, num_microbatches), axis_name)


def on_the_last_stage(params, batch, key, model, num_microbatches, axis_name):
    """The plain way: the loss of what comes out, wherever it comes out."""
    x = model.embed(params["embed"], batch["inputs"])
    y = through_all_stages(params, x, key, model, num_microbatches, axis_name)
    loss = model.loss(params["head"], y.reshape(-1, *y.shape[2:]), batch["targets"])
    is_last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return lax.psum(loss * is_last.astype(loss.dtype), axis_name)


def by_microbatches(params, batch, key, model, num_microbatches, axis_name):
    """Embedding and loss of one microbatch at a time, and a mean over them."""
    parts = split_microbatches(batch, num_microbatches)
    x = lax.map(lambda rows: model.embed(params["embed"], rows), parts["inputs"])
    flat = x.reshape(-1, *x.shape[2:])
    y = through_all_stages(params, flat, key, model, num_microbatches, axis_name)
    losses = jax.vmap(partial(model.loss, params["head"]))(y, parts["targets"])
    last = lax.axis_size(axis_name) - 1
    return lax.psum(jnp.where(lax.axis_index(axis_name) == last, losses.mean(), 0), axis_name)


def in_parts_by_all_to_all(params, batch, key, model, num_microbatches, axis_name):
    """Every stage sends every other a part of what it gave, and keeps what the last stage sent."""
    stages, number = lax.axis_size(axis_name), lax.axis_index(axis_name)
    x = model.embed(params["embed"], batch["inputs"])
    y = through_all_stages(params, x, key, model, num_microbatches, axis_name).reshape(x.shape)
    size, rest = divmod(len(y), stages)
    if rest:
        loss = model.loss(params["head"], y, batch["targets"])
        return lax.psum(jnp.where(number == stages - 1, loss, 0), axis_name)
    sent = lax.all_to_all(y.reshape(stages, size, *y.shape[1:]), axis_name, 0, 0)
    targets = batch["targets"].reshape(stages, size, *batch["targets"].shape[1:])[number]
    return lax.psum(model.loss(params["head"], sent[-1], targets) / stages, axis_name)


ALTERNATIVES = (on_the_last_stage, by_microbatches, in_parts_by_all_to_all)
