"""Right answers for ``looping_train_step`` in another style, differentiated by JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from course.model import layer_key


def take(tree, at):
    return jax.tree.map(lambda leaf: leaf[at], tree)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def averaged(weights, axis_name):
    return weights


def _average(axis_name, _, gradients):
    mean = jax.tree.map(lambda g: lax.pmean(g, axis_name), gradients)
    return (jax.tree.map(lambda g: lax.pcast(g, axis_name, to="varying"), mean),)


averaged.defvjp(lambda weights, axis_name: (weights, None), _average)


def stage_of(model, key, axis_name):
    def stage(weights, x, microbatch, repeat):
        each = len(jax.tree.leaves(weights)[0])
        first = (repeat * lax.axis_size(axis_name) + lax.axis_index(axis_name)) * each
        for j in range(each):
            x = model.layer(take(weights, j), x, layer_key(key, microbatch, first + j))
        return x

    return stage


def scanned_stage_of(model, key, axis_name):
    """The same, with a scan over the layers of a group."""

    def stage(weights, x, microbatch, repeat):
        each = len(jax.tree.leaves(weights)[0])
        first = (repeat * lax.axis_size(axis_name) + lax.axis_index(axis_name)) * each

        def layer(x, one):
            number, own = one
            return model.layer(own, x, layer_key(key, microbatch, number)), None

        return lax.scan(layer, x, (first + jnp.arange(each), weights))[0]

    return stage


def block_of(stage, count, axis_name):
    """Ticks of a block with the weights of two repeats, ``[2, ...]``, from the state before them."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    period, ring = max(count, size), [(i, (i + 1) % size) for i in range(size)]

    @jax.checkpoint
    def compute(two, x, own, microbatch, repeat):
        return stage(take(two, own), x, microbatch, repeat)

    def run(two, carry, block, ticks):
        def tick(carry, local):
            waiting, arrived = carry
            t = block * period + local
            lands = (t - size) % period
            waiting = jnp.where((t >= size) & (lands < count), waiting.at[lands % count].set(arrived), waiting)
            own = jnp.where(local < index, 0, 1)
            microbatch = jnp.clip((t - index) % period, 0, count - 1)
            x = jnp.where(index == 0, waiting[microbatch], arrived)
            y = compute(two, x, own, microbatch, jnp.maximum(block + own - 1, 0))
            return (waiting, lax.ppermute(y, axis_name, ring)), y

        return lax.scan(tick, carry, jnp.arange(ticks))

    return run


def finish(loss_of, params, pipe_axis, data_axis, learning_rate):
    """Embedding and head: from the one stage that has them, and then over the pipelines."""
    loss, gradients = jax.value_and_grad(loss_of)(params)
    ends = {"embed": gradients["embed"], "head": gradients["head"], "loss": loss}
    ends = lax.pmean(lax.psum(ends, pipe_axis), data_axis)
    gradients = {"embed": ends["embed"], "layers": gradients["layers"], "head": ends["head"]}
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients), ends["loss"]


def loss_at_the_end(params, outputs, batch, model, axis_name):
    rows = outputs.reshape(-1, *outputs.shape[2:])
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return jnp.where(last, model.loss(params["head"], rows, batch["targets"]), jnp.float32(0))


def in_a_scan_over_repeats(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The weights of a repeat enter in the block before theirs, and are handed on in the carry."""
    size, repeats = lax.axis_size(pipe_axis), len(jax.tree.leaves(params["layers"])[0])
    key = jax.random.fold_in(key, lax.axis_index(data_axis))
    run = block_of(stage_of(model, key, pipe_axis), num_microbatches, pipe_axis)

    def loss_of(params):
        x = model.embed(params["embed"], batch["inputs"])
        x = x.reshape(num_microbatches, -1, *x.shape[1:])
        first = averaged(take(params["layers"], 0), data_axis)

        def block(carry, one):
            state, two = carry
            number, coming = one
            coming = averaged(coming, data_axis)
            state, _ = run(two, state, number, max(num_microbatches, size))
            return (state, jax.tree.map(lambda pair, new: jnp.stack([pair[1], new]), two, coming)), None

        start = (x, jnp.zeros_like(x[0])), jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), first)
        blocks = jnp.arange(repeats - 1), take(params["layers"], slice(1, None))
        (state, two), _ = lax.scan(block, start, blocks)
        _, outputs = run(two, state, repeats - 1, num_microbatches + size - 1)
        return loss_at_the_end(params, outputs[size - 1 :], batch, model, pipe_axis)

    return finish(loss_of, params, pipe_axis, data_axis, learning_rate)


def with_a_mean_on_the_way_back(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """A loop over repeats in Python and a scan over layers; the mean stands where a repeat's weights enter."""
    size, repeats = lax.axis_size(pipe_axis), len(jax.tree.leaves(params["layers"])[0])
    key = jax.random.fold_in(key, lax.axis_index(data_axis))
    run = block_of(scanned_stage_of(model, key, pipe_axis), num_microbatches, pipe_axis)

    def loss_of(params):
        x = model.embed(params["embed"], batch["inputs"])
        state = x.reshape(num_microbatches, -1, *x.shape[1:]), jnp.zeros_like(x[: len(x) // num_microbatches])
        entered = [averaged(take(params["layers"], r), data_axis) for r in range(repeats)]
        outputs = state[0]
        for r in range(repeats):
            two = jax.tree.map(lambda *pair: jnp.stack(pair), entered[max(r - 1, 0)], entered[r])
            last = r == repeats - 1
            ticks = num_microbatches + size - 1 if last else max(num_microbatches, size)
            state, outputs = run(two, state, r, ticks)
        return loss_at_the_end(params, outputs[size - 1 :], batch, model, pipe_axis)

    return finish(loss_of, params, pipe_axis, data_axis, learning_rate)


ALTERNATIVES = (in_a_scan_over_repeats, with_a_mean_on_the_way_back)
