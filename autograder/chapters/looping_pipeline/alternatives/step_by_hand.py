"""``looping_train_step`` with a backward pass of one's own: the same schedule, with everything turned round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import as_varying
from course.model import layer_key


def by_hand(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Gradients of all repeats in one buffer, each reduced beside the backward ticks of the repeat before it."""
    layers, count = params["layers"], num_microbatches
    repeats, each = jax.tree.leaves(layers)[0].shape[:2]
    size, index = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    period, key = max(count, size), jax.random.fold_in(key, lax.axis_index(data_axis))
    ticks = (repeats - 1) * period + count + size - 1
    ahead = [(i, (i + 1) % size) for i in range(size)]
    back = [(there, here) for here, there in ahead]

    def stage(weights, x, microbatch, repeat):
        for j in range(each):
            number = (repeat * size + index) * each + j
            weights_j = jax.tree.map(lambda leaf, j=j: leaf[j], weights)
            x = model.layer(weights_j, x, layer_key(key, microbatch, number))
        return x

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
        (of_waiting, of_arrived, found), (t, x) = carry, tick
        busy, microbatch, repeat = place(t)
        upstream = lax.ppermute(of_arrived, pipe_axis, back)
        last = (index == size - 1) & (repeat == repeats - 1)
        upstream = jnp.where(busy, jnp.where(last, of_outputs[microbatch], upstream), 0)
        of_weights, of_x = jax.vjp(lambda w, x: stage(w, x, microbatch, repeat), weights_of(repeat), x)[1](upstream)
        found = jax.tree.map(lambda g, one: g.at[repeat].add(one), found, of_weights)
        of_waiting = of_waiting.at[microbatch].add(jnp.where(index == 0, of_x, 0))
        comes, slot = lands(t)
        of_arrived = jnp.where(index == 0, jnp.where(comes, of_waiting[slot], 0), of_x)
        of_waiting = of_waiting.at[slot].set(jnp.where(comes, 0, of_waiting[slot]))
        return (of_waiting, of_arrived, found), None

    def total(gradients):
        return jax.tree.map(lambda g: as_varying(lax.psum(g, data_axis), data_axis), gradients)

    x, embed_back = jax.vjp(lambda embed: model.embed(embed, batch["inputs"]), params["embed"])
    cut = x.reshape(count, -1, *x.shape[1:])
    _, (inputs, outputs) = lax.scan(forward, (cut, jnp.zeros_like(cut[0])), jnp.arange(ticks))

    def loss_of(head, outputs):
        rows = outputs.reshape(-1, *outputs.shape[2:])
        loss = model.loss(head, rows, batch["targets"]) / lax.axis_size(data_axis)
        return jnp.where(index == size - 1, loss, 0)

    loss, (of_head, of_outputs) = jax.value_and_grad(loss_of, argnums=(0, 1))(params["head"], outputs[-count:])
    start = (repeats - 1) * period
    carry = jnp.zeros_like(cut), jnp.zeros_like(cut[0]), jax.tree.map(jnp.zeros_like, layers)
    carry, _ = lax.scan(backward, carry, (jnp.arange(start, ticks), inputs[start:]), reverse=True)
    done = []
    for repeat in reversed(range(repeats - 1)):
        done.append(total(jax.tree.map(lambda g, r=repeat: g[r + 1], carry[2])))
        some = slice(repeat * period, (repeat + 1) * period)
        carry, _ = lax.scan(backward, carry, (jnp.arange(ticks)[some], inputs[some]), reverse=True)
    done.append(total(jax.tree.map(lambda g: g[0], carry[2])))

    of_layers = jax.tree.map(lambda *each: jnp.stack(each), *reversed(done))
    ends = {"embed": embed_back(carry[0].reshape(x.shape))[0], "head": of_head}
    ends = jax.tree.map(lambda g: lax.psum(g, (pipe_axis, data_axis)), ends)
    gradients = {"embed": ends["embed"], "layers": of_layers, "head": ends["head"]}
    updated = jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)
    return updated, lax.psum(loss, (pipe_axis, data_axis))


ALTERNATIVES = (by_hand,)
