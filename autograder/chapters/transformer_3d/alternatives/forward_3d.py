"""A right answer for ``forward_3d`` in another style: JAX derives everything but what enters and what is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.mesh import as_varying
from course.model import layer_key
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.tp_transformer import (
    gather_matmul,
    matmul_scatter,
    parallel_transformer_block,
    tp_transformer_block,
    vocab_parallel_embed,
    vocab_parallel_loss,
)


def dim_over(spec, axis):
    """Which dim a spec splits over an axis, or None."""
    for dim, entry in enumerate(spec):
        if entry == axis or (isinstance(entry, tuple) and axis in entry):
            return dim
    return None


def entering(spec, dtype, data_axis, others):
    """A leaf made whole; its gradient averaged over data, and summed over other axes on which it is whole."""
    dim = dim_over(spec, data_axis)
    shared = [axis for axis in others if dim_over(spec, axis) is None]

    @jax.custom_vjp
    def enter(part):
        if dim is None:
            return part
        return lax.all_gather(part.astype(dtype), data_axis, axis=dim, tiled=True).astype(part.dtype)

    def back(_, g):
        g = g / lax.axis_size(data_axis)
        if dim is not None:
            g = lax.psum_scatter(g, data_axis, scatter_dimension=dim, tiled=True)
        over_all = dim is None
        g = lax.psum(g, data_axis) if over_all else g
        for axis in shared:
            g = lax.psum(g, axis)
        for axis in (data_axis, *others):
            g = as_varying(g, axis)
        return (g,)

    enter.defvjp(lambda part: (enter(part), None), back)
    return enter


def with_ticks_that_recompute(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Each tick is checkpointed; layers written out; the loss on the last stage, one microbatch after the other."""
    stages, me = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    repeats, _, depth = params["layers"]["attention"]["out"]["kernel"].shape[:3]
    m = options.num_microbatches
    turn = max(m, stages)
    mine = jax.random.fold_in(key, lax.axis_index(data_axis))
    kind = parallel_transformer_block if options.parallel else tp_transformer_block
    send, bring = (ring_gather_matmul, matmul_ring_scatter) if options.rings else (gather_matmul, matmul_scatter)
    low = jnp.dtype(options.dtype)

    def into(x, kernel, axis):
        return send(x.astype(low), kernel.astype(low), axis).astype(jnp.float32)

    def out_of(x, kernel, axis):
        return bring(x.astype(low), kernel.astype(low), axis).astype(jnp.float32)

    def whole(tree, tree_specs):
        return jax.tree.map(
            lambda leaf, spec: entering(spec, low, data_axis, (pipe_axis, tensor_axis))(leaf), tree, tree_specs
        )

    def group(i):
        taken = jax.tree.map(lambda leaf: leaf[i], params["layers"])
        return whole(taken, jax.tree.map(lambda spec: type(spec)(*spec[1:]), specs["layers"]))

    def compute(before, now, x, late, microbatch, repeat):
        weights = jax.tree.map(lambda a, b: jnp.where(late, a, b), before, now)
        for j in range(depth):
            one = jax.tree.map(lambda leaf, j=j: leaf[0, j], weights)
            own = layer_key(mine, microbatch, (repeat * stages + me) * depth + j)
            x = kind(one, x, own, options.rate, into, out_of, tensor_axis)
        return x

    if options.remat:
        compute = jax.checkpoint(compute)

    tokens = batch["inputs"]
    x = vocab_parallel_embed(whole(params["embed"], specs["embed"]), tokens, tensor_axis)
    store = x.reshape(m, -1, *x.shape[1:])
    moving = jnp.zeros_like(store[0])
    now = group(0)
    before = now
    for repeat in range(repeats):
        following = group(repeat + 1) if repeat < repeats - 1 else now

        def tick(state, n, before=before, now=now, repeat=repeat):
            store, moving = state
            done = (n - stages) % turn
            came = (repeat * turn + n >= stages) & (done < m)
            at = jnp.where(done < m, done, m - 1)
            store = store.at[at].set(jnp.where(came, moving, store[at]))
            which = jnp.minimum((n - me) % turn, m - 1)
            late = n < me
            x = jnp.where(me == 0, store[which], moving)
            y = compute(before, now, x, late, which, jnp.maximum(repeat - late.astype(jnp.int32), 0))
            return (store, lax.ppermute(y, pipe_axis, [(i, (i + 1) % stages) for i in range(stages)])), y

        length = turn if repeat < repeats - 1 else m + stages - 1
        (store, moving), outputs = lax.scan(tick, (store, moving), jnp.arange(length))
        before, now = now, following

    head = whole(params["head"], specs["head"])

    @jax.checkpoint
    def loss_of(y, targets):
        return vocab_parallel_loss(head, y, targets, into, tensor_axis)

    def add(total, both):
        return total + loss_of(*both), None

    targets = batch["targets"].reshape(m, -1, tokens.shape[-1])
    start = jnp.float32(0)
    for axis in (data_axis, pipe_axis):
        start = as_varying(start, axis)
    total, _ = lax.scan(add, start, (outputs[-m:], targets))
    return lax.psum(jnp.where(me == stages - 1, total / m, 0), pipe_axis)


ALTERNATIVES = (with_ticks_that_recompute,)
