"""Alternative implementations of ``pipeline``: each must pass every fact."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
from jax import lax

from course.model import layer_key
from solutions.pipeline import execute_pipeline, pipeline_loss, pipeline_tick, split_microbatches


def by_split(batch, num_microbatches):
    """A list of equal parts, stacked again."""

    def parts(leaf):
        if leaf.shape[0] % num_microbatches != 0:
            raise ValueError(f"batch of {leaf.shape[0]} is no multiple of {num_microbatches}")
        return jnp.stack(jnp.split(leaf, num_microbatches))

    return jax.tree.map(parts, batch)


def by_slices(batch, num_microbatches):
    """``lax.map`` over the microbatch index."""
    leaves, tree = jax.tree.flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves}
    for size in sizes:
        if size % num_microbatches:
            raise ValueError(f"{num_microbatches} microbatches of {size} rows would not be equally large")
    (size,) = {size // num_microbatches for size in sizes}

    def part(number):
        return [lax.dynamic_slice_in_dim(leaf, number * size, size) for leaf in leaves]

    return tree.unflatten(lax.map(part, jnp.arange(num_microbatches)))


def with_cond(stage, microbatches, arrived, tick, axis_name):
    """Idle stages do nothing, and the first stage picks its input in a branch."""
    number, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
    count = microbatches.shape[0]
    microbatch = tick - number
    x = lax.cond(
        number == 0,
        lambda: lax.dynamic_index_in_dim(microbatches, jnp.minimum(tick, count - 1), keepdims=False),
        lambda: arrived,
    )
    busy = (microbatch >= 0) & (microbatch < count)
    y = lax.cond(busy, lambda x: stage(x, microbatch), lambda x: x, x)
    return y, lax.ppermute(y, axis_name, [(i, (i + 1) % size) for i in range(size)])


def with_zeros_when_idle(stage, microbatches, arrived, tick, axis_name):
    """Zeroes garbage immediately."""
    number, last = lax.axis_index(axis_name), lax.axis_size(axis_name) - 1
    count = microbatches.shape[0]
    entering = jnp.take(microbatches, tick, axis=0, mode="clip")
    y = stage(lax.select(jnp.broadcast_to(number == 0, arrived.shape), entering, arrived), tick - number)
    busy = jnp.logical_and(tick >= number, tick < number + count)
    y = jnp.where(busy, y, jnp.zeros_like(y))
    return y, lax.ppermute(y, axis_name, perm=list(zip(range(last), range(1, last + 1), strict=True)))


def unrolled(stage, microbatches, axis_name):
    """A Python loop over ticks, and a list of the last stage's outputs."""
    stages, outputs = lax.axis_size(axis_name), []
    arrived = jnp.zeros_like(microbatches[0])
    for tick in range(microbatches.shape[0] + stages - 1):
        y, arrived = pipeline_tick(stage, microbatches, arrived, jnp.int32(tick), axis_name)
        if tick >= stages - 1:
            outputs.append(y)
    return jnp.stack(outputs)


def with_the_last_tick_apart(stage, microbatches, axis_name):
    """The scan feeds the microbatches, and nothing is sent after the last tick."""
    stages, number = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chain = [(i, i + 1) for i in range(stages - 1)]
    feed = jnp.concatenate([microbatches, jnp.zeros_like(microbatches, shape=(stages - 1, *microbatches.shape[1:]))])

    def compute(arrived, tick, entering):
        return stage(jnp.where(number == 0, entering, arrived), tick - number)

    def step(arrived, inputs):
        y = compute(arrived, *inputs)
        return lax.ppermute(y, axis_name, chain), y

    ticks = jnp.arange(feed.shape[0])
    arrived, outputs = lax.scan(step, jnp.zeros_like(microbatches[0]), (ticks[:-1], feed[:-1]))
    y = compute(arrived, ticks[-1], feed[-1])
    return jnp.concatenate([outputs, y[None]])[stages - 1 :]


def share_of(model, axis_name):
    """Number of layers per stage: a helper from another cell."""
    stages = lax.axis_size(axis_name)
    if model.num_layers % stages != 0:
        raise ValueError(f"num_layers={model.num_layers} is not divisible by the {stages} stages of {axis_name!r}")
    return model.num_layers // stages


def through_all_stages(params, x, key, model, num_microbatches, axis_name):
    """A Python loop over the layers of a stage; every layer is recomputed in the backward pass."""
    share, number = share_of(model, axis_name), lax.axis_index(axis_name)
    run = jax.checkpoint(lambda weights, x, key: model.layer(weights, x, key))

    def stage(x, microbatch):
        for j in range(share):
            weights = jax.tree.map(lambda leaf: leaf[j], params["layers"])  # noqa: B023
            x = run(weights, x, layer_key(key, microbatch, number * share + j))
        return x

    return execute_pipeline(stage, split_microbatches(x, num_microbatches), axis_name)


def on_the_last_stage(params, batch, key, model, num_microbatches, axis_name):
    """The plain implementation: the loss of the outputs on the stage that has them."""
    x = model.embed(params["embed"], batch["inputs"])
    y = through_all_stages(params, x, key, model, num_microbatches, axis_name)
    loss = model.loss(params["head"], y.reshape(-1, *y.shape[2:]), batch["targets"], batch["mask"])
    is_last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return lax.psum(loss * is_last.astype(loss.dtype), axis_name)


def in_parts_by_all_to_all(params, batch, key, model, num_microbatches, axis_name):
    """Every stage sends every other a part of its output, and keeps what the last stage sent."""
    stages, number = lax.axis_size(axis_name), lax.axis_index(axis_name)
    x = model.embed(params["embed"], batch["inputs"])
    y = through_all_stages(params, x, key, model, num_microbatches, axis_name).reshape(x.shape)
    size, rest = divmod(len(y), stages)
    if rest:
        loss = model.loss(params["head"], y, batch["targets"], batch["mask"])
        return lax.psum(jnp.where(number == stages - 1, loss, 0), axis_name)
    sent = lax.all_to_all(y.reshape(stages, size, *y.shape[1:]), axis_name, 0, 0)
    targets, mask = (batch[name].reshape(stages, size, *batch[name].shape[1:])[number] for name in ("targets", "mask"))
    total = mask.sum() * model.loss(params["head"], sent[-1], targets, mask)
    return lax.psum(total, axis_name) / jnp.maximum(batch["mask"].sum(), 1)


def over_all_devices_at_once(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Sums gradients over the pipelines, those of embedding and head over both axes, and divides by the valid count."""
    own = jax.random.fold_in(key, lax.axis_index(data_axis))
    counted = jnp.sum(batch["mask"])
    total = lax.psum(counted, data_axis)
    run = jax.value_and_grad(lambda p: counted * pipeline_loss(p, batch, own, model, num_microbatches, pipe_axis))
    loss, gradients = run(params)

    def update(path, leaf, gradient):
        axes = data_axis if path[0].key == "layers" else (pipe_axis, data_axis)
        return leaf - learning_rate * lax.psum(gradient, axes) / total

    return jax.tree.map_with_path(update, params, gradients), lax.psum(loss, data_axis) / total


def with_optax_and_layers_that_recompute(
    params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate
):
    """Layers recomputed one by one; each group's gradient weighted in the mean, and optax for the update."""
    layers = replace(model, layer=jax.checkpoint(model.layer))
    own = jax.random.fold_in(key, lax.axis_index(data_axis))

    def loss_of(params):
        return pipeline_loss(params, batch, own, layers, num_microbatches, pipe_axis)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    for name in ("embed", "head"):
        gradients[name] = lax.psum(gradients[name], pipe_axis)
    counted = batch["mask"].sum() / lax.pmean(batch["mask"].sum(), data_axis)
    gradients = jax.tree.map(lambda g: lax.pmean(counted * g, data_axis), gradients)
    optimizer = optax.sgd(learning_rate)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates), lax.pmean(counted * loss, data_axis)


ALTERNATIVES = {
    "split_microbatches": (by_split, by_slices),
    "pipeline_tick": (with_cond, with_zeros_when_idle),
    "execute_pipeline": (unrolled, with_the_last_tick_apart),
    "pipeline_loss": (on_the_last_stage, in_parts_by_all_to_all),
    "pipeline_train_step": (over_all_devices_at_once, with_optax_and_layers_that_recompute),
}
