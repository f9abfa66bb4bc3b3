"""Alternative implementations of ``context_parallel``: each must pass every fact."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from course.attention import attend_chunks, attend_chunks_backward
from course.mesh import as_varying, vary_alike
from course.model import split_key
from solutions.context_parallel import layer_with, merge_attention, ring_attention


def by_softmax_of_two(first, second):
    """Two log-sum-exps are two scores: a softmax over them has the weights."""
    outs, lses = (jnp.stack(parts) for parts in zip(first, second, strict=True))
    seen = (lses > -jnp.inf).any(0)
    safe = jnp.where(seen, lses, 0)
    out = jnp.sum(jax.nn.softmax(safe, 0)[..., None] * outs, 0)
    return jnp.where(seen[..., None], out, 0), jnp.where(seen, jax.nn.logsumexp(safe, 0), -jnp.inf)


def by_a_large_negative_number(first, second):
    """Minus infinity becomes a number that no score reaches, and back."""
    lowest = -1e30
    a, b = jnp.maximum(first[1], lowest), jnp.maximum(second[1], lowest)
    share = jax.nn.sigmoid(b - a)[..., None]
    out = first[0] + share * (second[0] - first[0])
    lse = jnp.maximum(a, b) + jax.nn.softplus(-jnp.abs(a - b))
    unseen = jnp.maximum(a, b) <= lowest
    return jnp.where(unseen[..., None], 0, out), jnp.where(unseen, -jnp.inf, lse)


def that_starts_at_home(q, k, v, order, axis_name):
    """Own keys first, then a loop; sums of gradients visit the owner last, so keys travel one place ahead of them."""
    n, order = lax.axis_size(axis_name), [list(chunks) for chunks in order]

    def chunks_of(back):
        return jnp.array(order)[(lax.axis_index(axis_name) + n - back) % n]

    def forth(*arrays):
        return [lax.ppermute(x, axis_name, [(i, (i + 1) % n) for i in range(n)]) for x in arrays]

    @jax.custom_vjp
    def attend(q, k, v):
        return run(q, k, v)[0]

    def run(q, k, v):
        def body(step, carry):
            out, lse, k, v = carry
            coming = forth(k, v)
            block = attend_chunks(q, k, v, chunks_of(0), chunks_of(step))
            return *merge_attention((out, lse), block), *coming

        if n == 1:
            out, lse = attend_chunks(q, k, v, chunks_of(0), chunks_of(0))
        else:
            first = attend_chunks(q, k, v, chunks_of(0), chunks_of(0))
            out, lse, *last = lax.fori_loop(1, n - 1, body, (*first, *forth(k, v)))
            out, lse = merge_attention((out, lse), attend_chunks(q, last[0], last[1], chunks_of(0), chunks_of(n - 1)))
        return out, (q, k, v, out, lse)

    def back(saved, upstream):
        q, k, v, out, lse = saved

        def block(k, v, step):
            return attend_chunks_backward(q, k, v, out, lse, upstream, chunks_of(0), chunks_of(step))

        def body(step, carry):
            of_q, of_k, of_v, k, v = carry
            coming, sums = forth(k, v), forth(of_k, of_v)
            more = block(k, v, step)
            return of_q + more[0], sums[0] + more[1], sums[1] + more[2], *coming

        of_q, of_k, of_v, _, _ = lax.fori_loop(1, n, body, (*block(k, v, 0), *forth(k, v)))
        return of_q, *forth(of_k, of_v)

    attend.defvjp(run, back)
    return attend(*vary_alike(q, k, v))


def the_other_way_round(q, k, v, order, axis_name):
    """Everything travels to the previous device; keys and values as one array."""
    size = lax.axis_size(axis_name)
    to_previous = [(i, (i - 1) % size) for i in range(size)]

    def chunks_of(step):
        return jnp.array(order)[(lax.axis_index(axis_name) + step) % size]

    def send(x):
        return lax.ppermute(x, axis_name, to_previous)

    def forward(q, k, v):
        def add(merged, kv, step):
            return merge_attention(merged, attend_chunks(q, kv[0], kv[1], chunks_of(0), chunks_of(step)))

        def pass_on(carry, step):
            merged, kv = carry
            coming = send(kv)
            return (add(merged, kv, step), coming), None

        kv = jnp.stack([k, v])
        nothing = vary_alike(0 * q, jnp.full(q.shape[:-1], -jnp.inf), q)[:2]
        (merged, kv), _ = lax.scan(pass_on, (nothing, kv), jnp.arange(size - 1))
        out, lse = add(merged, kv, size - 1)
        return out, (q, k, v, out, lse)

    def backward(saved, upstream):
        q, k, v, out, lse = saved

        def own(kv, step):
            of_q, *of_kv = attend_chunks_backward(q, kv[0], kv[1], out, lse, upstream, chunks_of(0), chunks_of(step))
            return of_q, jnp.stack(of_kv)

        def pass_on(carry, step):
            of_q, kv, total = carry
            coming, arriving = send(kv), send(total)
            of_own_q, mine = own(kv, step)
            return (of_q + of_own_q, coming, arriving + mine), None

        kv = jnp.stack([k, v])
        of_q, total = own(kv, 0)
        (of_q, _, total), _ = lax.scan(pass_on, (of_q, send(kv), total), jnp.arange(1, size))
        of_k, of_v = send(total)
        return of_q, of_k, of_v

    attend = jax.custom_vjp(lambda *qkv: forward(*qkv)[0])
    attend.defvjp(forward, backward)
    return attend(*vary_alike(q, k, v))


def by_folding(num_devices):
    """The list of chunks, folded in the middle."""
    chunks = list(range(2 * num_devices))
    return list(zip(chunks[:num_devices], chunks[: num_devices - 1 : -1], strict=True))


def from_the_middle(num_devices):
    """The innermost pair on the first device, the larger number first."""
    return tuple((num_devices + device, num_devices - 1 - device) for device in range(num_devices))


def by_sums_of_losses(params, batch, model, order, key, rate, data_axis, context_axis, learning_rate):
    """Adds up losses, and divides loss and gradients by the number of tokens at the end."""
    mine, counted = jnp.take(jnp.array(order), lax.axis_index(context_axis), axis=0), jnp.sum(batch["mask"])
    length = batch["inputs"].shape[1] // mine.size
    place = jax.random.fold_in(key, lax.axis_index(data_axis))

    def body(weights, x, number):
        own = jax.random.fold_in(place, number)
        keys = split_key(jax.vmap(lambda chunk: jax.random.fold_in(own, chunk))(mine))
        return layer_with(lambda q, k, v: ring_attention(q, k, v, order, context_axis), weights, x, keys, rate)

    def summed(params):
        table, parts = params["embed"]["position"], []
        for chunk in mine:
            parts.append(lax.dynamic_slice_in_dim(table, chunk * length, length))
        x = params["embed"]["token"][batch["inputs"]] + jnp.concatenate(parts)
        for number in range(model.num_layers):
            weights = jax.tree.map(lambda leaf, number=number: leaf[number], params["layers"])
            x = jax.checkpoint(body)(weights, x, jnp.int32(number))
        return counted * model.loss(params["head"], x, batch["targets"], batch["mask"])

    loss, gradients = jax.value_and_grad(summed)(params)
    loss, counted, gradients = lax.psum((loss, counted, gradients), (data_axis, context_axis))
    scale = 1 / jnp.maximum(counted, 1)
    return jax.tree.map(lambda leaf, g: leaf - learning_rate * scale * g, params, gradients), loss * scale


def by_replicated_parameters(params, batch, model, order, key, rate, data_axis, context_axis, learning_rate):
    """One all-reduce at the end, of the gradient and the loss in one call; the mask's share is computed first."""
    axes = (context_axis, data_axis)
    own = batch["mask"].sum()
    share = own / jnp.maximum(lax.psum(own, axes), 1)
    chunks = jnp.array(order)[lax.axis_index(context_axis)]
    key = jax.random.fold_in(key, lax.axis_index(data_axis))
    offsets = jnp.arange(batch["inputs"].shape[1] // chunks.size)
    places = jnp.concatenate([chunk * offsets.size + offsets for chunk in chunks])

    def run(x, now):
        layer, number = now
        keys = [jax.random.fold_in(jax.random.fold_in(key, number), chunk) for chunk in chunks]
        attend = partial(ring_attention, order=order, axis_name=context_axis)
        return layer_with(attend, layer, x, split_key(jnp.stack(keys)), rate), None

    def loss_of(params):
        x = params["embed"]["token"][batch["inputs"]] + params["embed"]["position"][places]
        x, _ = lax.scan(jax.checkpoint(run), x, (params["layers"], jnp.arange(model.num_layers)))
        return share * model.loss(params["head"], x, batch["targets"], batch["mask"])

    mine, back = jax.vjp(loss_of, params)
    cotangent = jnp.ones(())
    for axis in axes:
        cotangent = as_varying(cotangent, axis)
    loss, (gradients,) = lax.psum((mine, back(cotangent)), axes)
    return jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, gradients), loss


ALTERNATIVES = {
    "merge_attention": (by_softmax_of_two, by_a_large_negative_number),
    "ring_attention": (the_other_way_round, that_starts_at_home),
    "zigzag_order": (by_folding, from_the_middle),
    "cp_transformer_step": (by_sums_of_losses, by_replicated_parameters),
}
