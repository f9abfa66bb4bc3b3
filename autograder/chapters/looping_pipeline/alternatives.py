"""Alternative implementations of ``looping_pipeline``: each must pass every fact."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from course.mesh import as_varying
from course.model import layer_key


def layers_by_reshaping(stage, num_stages, num_repeats, num_layers):
    try:
        numbers = np.arange(num_layers).reshape(num_repeats, num_stages, -1)
    except ValueError as error:
        raise ValueError(f"{num_layers} layers do not fit into {num_repeats} x {num_stages} equal groups") from error
    return tuple(map(tuple, numbers[:, stage].tolist()))


def layers_one_by_one(stage, num_stages, num_repeats, num_layers):
    """Assigns layers one by one, and checks that all stages got equally many."""
    each = -(-num_layers // (num_stages * num_repeats))
    own = [[] for _ in range(num_repeats)]
    for layer in range(num_layers):
        repeat, place = divmod(layer // each, num_stages)
        if place == stage:
            own[repeat].append(layer)
    if each * num_stages * num_repeats != num_layers:
        message = "{} layers, {} stages and {} repeats: some stage would get more than another"
        raise ValueError(message.format(num_layers, num_stages, num_repeats))
    return own


def position_by_search(tick, stage, num_stages, num_microbatches, num_repeats):
    """Searches all microbatches and repeats for the current one."""
    for repeat in range(num_repeats):
        for microbatch in range(num_microbatches):
            if repeat * max(num_stages, num_microbatches) + microbatch + stage == tick:
                return microbatch, repeat
    return None


def position_by_walking_back(tick, stage, num_stages, num_microbatches, num_repeats):
    """Walks back from stage to stage, then from repeat to repeat."""
    if tick < 0:
        return None
    if stage > 0:
        return position_by_walking_back(tick - 1, stage - 1, num_stages, num_microbatches, num_repeats)
    if tick < num_microbatches:
        return (tick, 0) if num_repeats else None
    wait = num_stages if num_stages > num_microbatches else num_microbatches
    before = position_by_walking_back(tick - wait, 0, num_stages, num_microbatches, num_repeats - 1)
    return before and (before[0], before[1] + 1)


def around(axis_name):
    size = lax.axis_size(axis_name)
    return [(i, (i + 1) % size) for i in range(size)]


def skipping_idle_ticks(stage, microbatches, num_repeats, axis_name):
    """A counted loop that computes only where there is work, and writes results into a separate buffer."""
    count, size, index = len(microbatches), lax.axis_size(axis_name), lax.axis_index(axis_name)
    period = max(count, size)

    def tick(t, carry):
        waiting, arrived, outputs = carry
        repeat, microbatch = jnp.divmod(t - index, period)
        busy = (repeat >= 0) & (repeat < num_repeats) & (microbatch < count)
        place = jnp.where(busy, microbatch, 0)
        first = (index == 0) & (repeat == 0)
        x = jnp.where(first, microbatches[place], jnp.where(index == 0, waiting[t % period], arrived))
        y = lax.cond(busy, lambda: stage(x, place, repeat), lambda: x)
        outputs = jnp.where(busy, outputs.at[place].set(y), outputs)
        arrived = lax.ppermute(y, axis_name, around(axis_name))
        # It comes back to stage 0 at the next tick, and is used a whole number of periods after its first tick.
        return waiting.at[(t + 1 - size) % period].set(arrived), arrived, outputs

    zeros = jnp.zeros_like(microbatches[0])
    waiting = jnp.zeros_like(microbatches, shape=(period, *zeros.shape))
    ticks = (num_repeats - 1) * period + count + size - 1
    # A counted loop of known length can be differentiated.
    return lax.fori_loop(0, ticks, tick, (waiting, zeros, jnp.zeros_like(microbatches)))[2]


def repeat_by_repeat(stage, microbatches, num_repeats, axis_name):
    """A scan over repeats around one over ticks; the last stage's late outputs follow after both."""
    count, size, index = len(microbatches), lax.axis_size(axis_name), lax.axis_index(axis_name)
    period = max(count, size)

    def one_tick(carry, t):
        waiting, arrived = carry
        lands = (t - size) % period
        buffer = jnp.where((t >= size) & (jnp.arange(count) == lands)[:, None, None], arrived, waiting)
        repeat, microbatch = jnp.divmod(jnp.maximum(t - index, 0), period)
        microbatch = jnp.minimum(microbatch, count - 1)
        x = lax.select(index == 0, lax.dynamic_index_in_dim(buffer, microbatch, keepdims=False), arrived)
        y = stage(x, microbatch, jnp.minimum(repeat, num_repeats - 1))
        return (buffer, lax.ppermute(y, axis_name, around(axis_name))), y

    def block(carry, repeat):
        return lax.scan(one_tick, carry, repeat * period + jnp.arange(period))[0], None

    carry = microbatches, jnp.zeros_like(microbatches[0])
    carry, _ = lax.scan(block, carry, jnp.arange(num_repeats - 1))
    last = (num_repeats - 1) * period + jnp.arange(count + size - 1)
    return lax.scan(one_tick, carry, last)[1][size - 1 :]


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

        def layer(x, numbered_layer):
            number, own = numbered_layer
            return model.layer(own, x, layer_key(key, microbatch, number)), None

        return lax.scan(layer, x, (first + jnp.arange(each), weights))[0]

    return stage


def block_of(stage, count, axis_name):
    """Ticks of a block with the weights of two repeats, ``[2, ...]``, starting from a given state."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    period = max(count, size)

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
            return (waiting, lax.ppermute(y, axis_name, around(axis_name))), y

        return lax.scan(tick, carry, jnp.arange(ticks))

    return run


def finish(loss_of, params, pipe_axis, data_axis, learning_rate):
    """Take the step: add up the gradients of embedding and head over the stages, and average them over pipelines."""
    loss, gradients = jax.value_and_grad(loss_of)(params)
    ends = {"embed": gradients["embed"], "head": gradients["head"], "loss": loss}
    ends = lax.pmean(lax.psum(ends, pipe_axis), data_axis)
    gradients = {"embed": ends["embed"], "layers": gradients["layers"], "head": ends["head"]}
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients), ends["loss"]


def weight_of(batch, data_axis):
    """The valid count here relative to a pipeline's average."""
    counted = batch["mask"].sum()
    return counted / lax.pmean(counted, data_axis)


def loss_at_the_end(params, outputs, batch, model, axis_name):
    rows = outputs.reshape(-1, *outputs.shape[2:])
    last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return jnp.where(last, model.loss(params["head"], rows, batch["targets"], batch["mask"]), jnp.float32(0))


def with_a_mean_on_the_way_back(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """A Python loop over repeats and a scan over layers; the mean is taken where a repeat's weights enter."""
    size, repeats = lax.axis_size(pipe_axis), len(jax.tree.leaves(params["layers"])[0])
    key = jax.random.fold_in(key, lax.axis_index(data_axis))
    run = block_of(scanned_stage_of(model, key, pipe_axis), num_microbatches, pipe_axis)
    weight = weight_of(batch, data_axis)

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
        return weight * loss_at_the_end(params, outputs[size - 1 :], batch, model, pipe_axis)

    return finish(loss_of, params, pipe_axis, data_axis, learning_rate)


def by_hand(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Gradients of all repeats in one buffer, each reduction overlapping the backward ticks of the preceding repeat."""
    layers, count = params["layers"], num_microbatches
    repeats = len(jax.tree.leaves(layers)[0])
    size, index = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    period, key = max(count, size), jax.random.fold_in(key, lax.axis_index(data_axis))
    ticks = (repeats - 1) * period + count + size - 1
    ahead = around(pipe_axis)
    back = [(target, source) for source, target in ahead]
    weight = weight_of(batch, data_axis)

    stage = stage_of(model, key, pipe_axis)

    def place(t):
        turn = t - index
        busy = (turn >= 0) & (turn % period < count) & (turn < repeats * period)
        return busy, jnp.minimum(turn % period, count - 1), jnp.clip(turn // period, 0, repeats - 1)

    def lands(t):
        slot = (t - size) % period
        return (t >= size) & (slot < count), jnp.minimum(slot, count - 1)

    def weights_of(repeat):
        return jax.tree.map(lambda leaf: leaf[repeat], layers)

    def forward(carry, t):
        waiting, arrived = carry
        comes, slot = lands(t)
        waiting = waiting.at[slot].set(jnp.where(comes, arrived, waiting[slot]))
        _, microbatch, repeat = place(t)
        x = jnp.where(index == 0, waiting[microbatch], arrived)
        y = stage(weights_of(repeat), x, microbatch, repeat)
        return (waiting, lax.ppermute(y, pipe_axis, ahead)), (x, y)

    def backward(carry, tick):
        (of_waiting, of_arrived, totals), (t, x) = carry, tick
        busy, microbatch, repeat = place(t)
        upstream = lax.ppermute(of_arrived, pipe_axis, back)
        last = (index == size - 1) & (repeat == repeats - 1)
        upstream = jnp.where(busy, jnp.where(last, of_outputs[microbatch], upstream), 0)
        of_weights, of_x = jax.vjp(lambda w, x: stage(w, x, microbatch, repeat), weights_of(repeat), x)[1](upstream)
        totals = jax.tree.map(lambda g, new: g.at[repeat].add(new), totals, of_weights)
        of_waiting = of_waiting.at[microbatch].add(jnp.where(index == 0, of_x, 0))
        comes, slot = lands(t)
        of_arrived = jnp.where(index == 0, jnp.where(comes, of_waiting[slot], 0), of_x)
        of_waiting = of_waiting.at[slot].set(jnp.where(comes, 0, of_waiting[slot]))
        return (of_waiting, of_arrived, totals), None

    def total(gradients):
        return jax.tree.map(lambda g: as_varying(lax.psum(g, data_axis), data_axis), gradients)

    x, embed_back = jax.vjp(lambda embed: model.embed(embed, batch["inputs"]), params["embed"])
    cut = x.reshape(count, -1, *x.shape[1:])
    _, (inputs, outputs) = lax.scan(forward, (cut, jnp.zeros_like(cut[0])), jnp.arange(ticks))

    def loss_of(head, outputs):
        rows = outputs.reshape(-1, *outputs.shape[2:])
        loss = model.loss(head, rows, batch["targets"], batch["mask"]) * weight / lax.axis_size(data_axis)
        return jnp.where(index == size - 1, loss, 0)

    loss, (of_head, of_outputs) = jax.value_and_grad(loss_of, argnums=(0, 1))(params["head"], outputs[-count:])
    start = (repeats - 1) * period
    carry = jnp.zeros_like(cut), jnp.zeros_like(cut[0]), jax.tree.map(jnp.zeros_like, layers)
    carry, _ = lax.scan(backward, carry, (jnp.arange(start, ticks), inputs[start:]), reverse=True)
    done = []
    for repeat in reversed(range(repeats - 1)):
        done.append(total(jax.tree.map(lambda g, r=repeat: g[r + 1], carry[2])))
        window = slice(repeat * period, (repeat + 1) * period)
        carry, _ = lax.scan(backward, carry, (jnp.arange(ticks)[window], inputs[window]), reverse=True)
    done.append(total(jax.tree.map(lambda g: g[0], carry[2])))

    of_layers = jax.tree.map(lambda *each: jnp.stack(each), *reversed(done))
    ends = {"embed": embed_back(carry[0].reshape(x.shape))[0], "head": of_head}
    ends = jax.tree.map(lambda g: lax.psum(g, (pipe_axis, data_axis)), ends)
    gradients = {"embed": ends["embed"], "layers": of_layers, "head": ends["head"]}
    updated = jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)
    return updated, lax.psum(loss, (pipe_axis, data_axis))


ALTERNATIVES = {
    "layers_of_stage": (layers_by_reshaping, layers_one_by_one),
    "loop_position": (position_by_search, position_by_walking_back),
    "execute_looping_pipeline": (skipping_idle_ticks, repeat_by_repeat),
    "looping_train_step": (with_a_mean_on_the_way_back, by_hand),
}
