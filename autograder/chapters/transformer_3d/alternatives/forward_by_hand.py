"""A right answer for ``forward_3d`` in another style: the way back through the ticks written out, loss and all."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.layout import along
from course.mesh import as_varying, vary_alike
from course.model import layer_key
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.fsdp import gather_params
from solutions.tp_transformer import (
    gather_matmul,
    matmul_scatter,
    parallel_transformer_block,
    tp_transformer_block,
    vocab_parallel_embed,
    vocab_parallel_loss,
)


def finished(gradient, spec, data_axis, pipe_axis, tensor_axis):
    """A part's gradient: one sum over everything that the leaf is whole on."""
    over_data = along(spec, data_axis)
    size = lax.axis_size(data_axis)
    if data_axis in over_data:
        at = over_data.index(data_axis)
        gradient = lax.psum_scatter(gradient, data_axis, scatter_dimension=at, tiled=True)
    rest = tuple(a for a in (data_axis, pipe_axis, tensor_axis) if a not in along(spec, a))
    found = lax.psum(gradient / size, rest) if rest else gradient / size
    for axis in rest:
        found = as_varying(found, axis)
    return found


def with_the_way_back_written_out(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """One derivative for the whole pipeline, which keeps the inputs of all ticks in one array."""
    axes = data_axis, pipe_axis, tensor_axis
    size, place = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    repeats, _, depth = jax.tree.leaves(params["layers"])[0].shape[:3]
    m = options.num_microbatches
    period = max(m, size)
    every = (repeats - 1) * period + m + size - 1
    mine = jax.random.fold_in(key, lax.axis_index(data_axis))
    kind = parallel_transformer_block if options.parallel else tp_transformer_block
    gather, scatter = (ring_gather_matmul, matmul_ring_scatter) if options.rings else (gather_matmul, matmul_scatter)
    short = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}[options.dtype]

    def lowered(way):
        def multiply(x, kernel, axis):
            return way(x.astype(short), kernel.astype(short), axis).astype(x.dtype)

        return multiply

    def wholes(parts, tree):
        names = jax.tree.map(lambda spec: along(spec, data_axis), tree)
        light = jax.tree.map(lambda p, s: p.astype(short) if data_axis in s else p, parts, names)
        heavy = gather_params(light, names, data_axis)
        return jax.tree.map(lambda w, p: w.astype(p.dtype), heavy, parts)

    def completed(gradients, tree):
        return jax.tree.map(lambda g, s: finished(g, s, *axes), gradients, tree)

    def stage(weights, x, microbatch, repeat):
        for j in range(depth):
            layer = jax.tree.map(lambda w, j=j: w[0, j], weights)
            own = layer_key(mine, microbatch, (repeat * size + place) * depth + j)
            x = kind(layer, x, own, options.rate, lowered(gather), lowered(scatter), tensor_axis)
        return x

    of_repeat = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])

    def take(stack, i):
        return jax.tree.map(lambda leaf: leaf[i], stack)

    def plan(t):
        """What a tick works on, and where what arrives belongs."""
        own = jnp.maximum(t - place, 0)
        repeat = jnp.minimum(own // period, repeats - 1)
        microbatch = jnp.minimum((t - place) % period, m - 1)
        slot = (t - size) % period
        return microbatch, repeat, jnp.minimum(slot, m - 1), (t >= size) & (slot < m)

    def blocks():
        for b in range(repeats):
            start = b * period
            yield b, start, every - start if b == repeats - 1 else period

    def forward(stack, x):
        state, seen, outs = (x, jnp.zeros_like(x[0])), [], x
        held = {0: wholes(take(stack, 0), of_repeat)}
        for b, start, length in blocks():
            if b + 1 < repeats:
                held[b + 1] = wholes(take(stack, b + 1), of_repeat)
            pair = held.get(b - 1, held[b]), held[b]

            def tick(state, t, b=b, pair=pair):
                store, arrived = state
                microbatch, repeat, slot, comes = plan(t)
                store = store.at[slot].set(jnp.where(comes, arrived, store[slot]))
                y = jnp.where(place == 0, store[microbatch], arrived)
                weights = jax.tree.map(lambda old, new: jnp.where(repeat < b, old, new), *pair)
                z = stage(weights, y, microbatch, repeat)
                return (store, lax.ppermute(z, pipe_axis, [(i, (i + 1) % size) for i in range(size)])), (y, z)

            state, (inputs, outs) = lax.scan(tick, state, start + jnp.arange(length))
            seen.append(inputs)
            held.pop(b - 1, None)
        return outs[-m:], (stack, jnp.concatenate(seen))

    def backward(saved, of_outs):
        stack, seen = saved
        of_store, of_arrived = jnp.zeros_like(of_outs), jnp.zeros_like(of_outs[0])
        found, older, held = {}, None, {}
        for b, start, length in reversed(list(blocks())):
            for i in (b, b - 1):
                if i >= 0 and i not in held:
                    held[i] = wholes(take(stack, i), of_repeat)
            pair = held.get(b - 1, held[b]), held[b]
            zero = jax.tree.map(jnp.zeros_like, held[b])
            leaving = jnp.zeros((length, *of_outs.shape[1:]), of_outs.dtype)
            leaving = vary_alike(leaving, of_outs)[0]
            if b == repeats - 1:
                leaving = leaving.at[length - m :].set(of_outs)

            def tick(state, given, b=b, pair=pair):
                of_store, of_arrived, of_old, of_new = state
                t, y, of_z = given
                microbatch, repeat, slot, comes = plan(t)
                of_z = of_z + lax.ppermute(of_arrived, pipe_axis, [((i + 1) % size, i) for i in range(size)])
                weights = jax.tree.map(lambda old, new: jnp.where(repeat < b, old, new), *pair)
                _, pull = jax.vjp(lambda w, y: stage(w, y, microbatch, repeat), weights, y)
                of_w, of_y = pull(of_z)
                of_old = jax.tree.map(lambda a, g: a + jnp.where(repeat < b, g, 0), of_old, of_w)
                of_new = jax.tree.map(lambda a, g: a + jnp.where(repeat < b, 0, g), of_new, of_w)
                of_store = of_store.at[microbatch].add(jnp.where(place == 0, of_y, 0))
                taken = jnp.where(comes, of_store[slot], 0)
                of_store = of_store.at[slot].add(-taken)
                return (of_store, jnp.where(place == 0, 0, of_y) + taken, of_old, of_new), None

            state = of_store, of_arrived, zero, older or zero
            given = start + jnp.arange(length), seen[start : start + length], leaving
            (of_store, of_arrived, older, newer), _ = lax.scan(tick, state, given, reverse=True)
            if b == 0:
                newer = jax.tree.map(jnp.add, newer, older)
            found[b] = completed(newer, of_repeat)
            held.pop(b)
        return jax.tree.map(lambda *all_: jnp.stack(all_), *(found[b] for b in range(repeats))), of_store

    pipeline = jax.custom_vjp(lambda stack, x: forward(stack, x)[0])
    pipeline.defvjp(forward, backward)

    def ends(tree):
        enter = jax.custom_vjp(lambda part: wholes(part, specs[tree]))
        enter.defvjp(lambda part: (wholes(part, specs[tree]), ()), lambda _, g: (completed(g, specs[tree]),))
        return enter(params[tree])

    x = vocab_parallel_embed(ends("embed"), batch["inputs"], tensor_axis)
    outs = pipeline(params["layers"], x.reshape(m, -1, *x.shape[1:]))
    head, targets = ends("head"), batch["targets"].reshape(m, -1, batch["targets"].shape[-1])
    losses = [
        jax.checkpoint(lambda y, t: vocab_parallel_loss(head, y, t, lowered(gather), tensor_axis))(outs[i], targets[i])
        for i in range(m)
    ]
    mean = sum(losses) / m
    return lax.psum(mean * (place == size - 1).astype(mean.dtype), pipe_axis)


ALTERNATIVES = (with_the_way_back_written_out,)
