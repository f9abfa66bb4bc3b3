"""Alternative implementations of ``single_device``: each must pass every fact."""

from __future__ import annotations

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

LOW, HIGH = jnp.bfloat16, jnp.float32


def _normed(scale, x):
    x = x.astype(HIGH)
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return (scale * x / jnp.sqrt(mean + 1e-6)).astype(LOW)


def _nll(logits, targets):
    """The loss as a difference of two terms, without ``log_softmax``."""
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def by_casting_kernels_first(params, batch, num_heads):
    """A tree of bfloat16 kernels, made at the start; norms and tables are unchanged."""
    kernels = ("qkv", "out", "up", "down")
    layers = [{n: a.astype(LOW) if n in kernels else a for n, a in layer.items()} for layer in params["layers"]]
    x = _residual_start(params, batch["inputs"])
    for layer in layers:
        x = x + _attention(layer, _normed(layer["attention_norm"], x), num_heads)
        x = x + jax.nn.gelu(_normed(layer["mlp_norm"], x) @ layer["up"]) @ layer["down"]
    logits = _normed(params["norm"], x) @ params["head"].astype(LOW)
    one_hot = jax.nn.one_hot(batch["targets"], logits.shape[-1], dtype=HIGH)
    return -jnp.mean(jnp.sum(one_hot * jax.nn.log_softmax(logits.astype(HIGH)), axis=-1))


def _residual_start(params, tokens):
    return (jnp.take(params["token"], tokens, axis=0) + params["position"][None, : tokens.shape[1]]).astype(LOW)


def _attention(layer, x, num_heads):
    """Heads before the sequence; scores divided before they are rounded."""
    rows, seq, width = x.shape
    head_dim = width // num_heads
    qkv = (x @ layer["qkv"]).reshape(rows, seq, 3, num_heads, head_dim).transpose(2, 0, 3, 1, 4)
    q, k, v = qkv
    scores = (q / np.float32(head_dim**0.5).astype(LOW)) @ k.swapaxes(-1, -2)
    future = jnp.arange(seq)[None, :] > jnp.arange(seq)[:, None]
    scores = jnp.where(future, -1e9, scores.astype(HIGH))
    exponentials = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    weights = exponentials / jnp.sum(exponentials, axis=-1, keepdims=True)
    mixed = weights.astype(LOW) @ v
    return mixed.transpose(0, 2, 1, 3).reshape(rows, seq, width) @ layer["out"]


def with_a_scan_over_layers(params, batch, num_heads):
    """The layers stacked and scanned over, each recomputed."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])

    @jax.checkpoint
    def step(x, layer):
        low = {name: a if name.endswith("norm") else a.astype(LOW) for name, a in layer.items()}
        x = x + _attention(low, _normed(low["attention_norm"], x), num_heads)
        return x + jax.nn.gelu(_normed(low["mlp_norm"], x) @ low["up"]) @ low["down"], None

    x, _ = lax.scan(step, _residual_start(params, batch["inputs"]), stacked)
    logits = _normed(params["norm"], x) @ params["head"].astype(LOW)
    return _nll(logits.astype(HIGH), batch["targets"])


def by_slicing_in_a_loop(loss_fn, params, batch, num_microbatches):
    """A ``fori_loop`` that slices out its microbatch."""
    rows = jax.tree.leaves(batch)[0].shape[0] // num_microbatches

    def step(i, total):
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i * rows, rows), batch)
        loss, gradients = jax.value_and_grad(loss_fn)(params, part)
        return total[0] + loss, jax.tree.map(lambda t, g: t + g, total[1], gradients)

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    loss, gradients = lax.fori_loop(0, num_microbatches, step, zeros)
    return loss / num_microbatches, jax.tree.map(lambda g: g / num_microbatches, gradients)


def by_a_loss_of_shares(loss_fn, params, batch, num_microbatches):
    """The loss includes the microbatch's share, and losses are stacked instead of added."""

    def share(params, part):
        return loss_fn(params, part) / num_microbatches

    def step(gradients, part):
        loss, new = jax.value_and_grad(share)(params, part)
        return jax.tree.map(jnp.add, gradients, new), loss

    parts = jax.tree.map(lambda leaf: jnp.reshape(leaf, (num_microbatches, -1, *leaf.shape[1:])), batch)
    gradients, losses = lax.scan(step, jax.tree.map(jnp.zeros_like, params), parts)
    return jnp.sum(losses), gradients


def with_a_remat_body(layer, stacked_params, x):
    """Recomputes each layer in the backward pass, which is neither required nor forbidden."""

    @jax.checkpoint
    def body(carry, params):
        return layer(params, carry), ()

    return lax.scan(body, x, stacked_params)[0]


def by_fori_loop(layer, stacked_params, x):
    """``fori_loop`` with a fixed trip count is a scan."""
    depth = jax.tree.leaves(stacked_params)[0].shape[0]

    def body(i, x):
        return layer(jax.tree.map(lambda leaf: leaf[i], stacked_params), x)

    return lax.fori_loop(0, depth, body, x)


def with_all_activations(layer, stacked_params, x):
    """Stacks every layer's output, and takes the last."""

    def body(x, params):
        x = layer(params, x)
        return x, x

    return lax.scan(body, x, stacked_params)[1][-1]


def with_products_without_batch_dims(layer, stacked_params, x):
    """Keeps dense layers' outputs, and recomputes attention's squares."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def body(x, params):
        return layer(params, x), None

    return lax.scan(body, x, stacked_params)[0]


def with_checkpoint_of_the_layer(layer, stacked_params, x):
    """``jax.checkpoint`` around the layer, not around the body; a scan needs no barrier against merging."""
    again = jax.checkpoint(layer, prevent_cse=False)
    return lax.scan(lambda x, params: (again(params, x), None), x, stacked_params)[0]


def remat_layers_by_fori_loop(layer, stacked_params, x):
    return by_fori_loop(jax.checkpoint(layer), stacked_params, x)


def by_branching(loss_fn, params, state, batch, learning_rate, growth_interval):
    """``lax.cond`` on whether all gradients are finite, unscaled in the branch that uses them."""
    scale = state["scale"]
    low = jax.tree.map(lambda p: p.astype(jnp.float16), params)
    loss, gradients = jax.value_and_grad(lambda p: loss_fn(p, batch) * scale)(low)
    finite = reduce(jnp.logical_and, (jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)))

    def good(_):
        count = state["good_steps"] + 1
        rate = learning_rate / scale
        new = jax.tree.map(lambda p, g: p - rate * g.astype(jnp.float32), params, gradients)
        grown = {"scale": scale * 2, "good_steps": jnp.zeros_like(count)}
        same = {"scale": scale, "good_steps": count}
        return new, jax.tree.map(lambda a, b: jnp.where(count == growth_interval, a, b), grown, same)

    def bad(_):
        return params, {"scale": jnp.maximum(scale * 0.5, 1.0), "good_steps": jnp.zeros_like(state["good_steps"])}

    return *lax.cond(finite, good, bad, None), loss / scale


def by_flattening(loss_fn, params, state, batch, learning_rate, growth_interval):
    """One vector for all gradients, which is finite exactly if the sum of its products with zero is zero."""

    def scaled(p):
        loss = loss_fn(jax.tree.map(lambda a: a.astype("float16"), p), batch)
        return state["scale"] * loss, loss

    (_, loss), gradients = jax.value_and_grad(scaled, has_aux=True)(params)
    flat, rebuild = ravel_pytree(gradients)
    finite = jnp.sum(0.0 * flat) == 0.0
    step = rebuild(jnp.where(finite, flat / state["scale"], 0.0))
    new = jax.tree.map(lambda p, g: p - learning_rate * g, params, step)
    count = (state["good_steps"] + 1) * finite.astype(jnp.int32)
    full = count == growth_interval
    factor = jnp.where(finite, jnp.where(full, 2.0, 1.0), 0.5)
    after = {"scale": jnp.maximum(1.0, state["scale"] * factor), "good_steps": count * (1 - full.astype(jnp.int32))}
    return new, after, loss


def with_queries_in_chunks_too(q, k, v, chunk):
    """Loops over chunks of queries outside and chunks of keys inside, with one pair of chunks at a time."""
    batch, seq, heads, dim = q.shape
    pieces = seq // chunk

    def cut(x):
        return x.reshape(batch, pieces, chunk, heads, dim).transpose(1, 0, 3, 2, 4)

    keys, values = cut(k), cut(v)

    @jax.checkpoint
    def inner(carry, piece, rows, i):
        largest, total, mixed = carry
        j, some_keys, some_values = piece
        scores = jnp.einsum("bhqd,bhkd->bhqk", rows, some_keys) / jnp.sqrt(jnp.float32(dim))
        places = jnp.arange(chunk)
        scores = jnp.where(i * chunk + places[:, None] >= j * chunk + places, scores, -1e30)
        now = jnp.maximum(largest, lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
        weights = jnp.exp(scores - now)
        shrink = jnp.exp(largest - now)
        total = shrink * total + weights.sum(axis=-1, keepdims=True)
        return now, total, shrink * mixed + weights @ some_values

    def outer(_, numbered_rows):
        i, rows = numbered_rows
        start = (
            jnp.full((batch, heads, chunk, 1), -1e30),
            jnp.zeros((batch, heads, chunk, 1)),
            jnp.zeros((batch, heads, chunk, dim)),
        )
        js = jnp.arange(pieces)
        carry, _ = lax.scan(lambda c, piece: (inner(c, piece, rows, i), None), start, (js, keys, values))
        return None, carry[2] / carry[1]

    _, outputs = lax.scan(outer, None, (jnp.arange(pieces), cut(q)))
    return outputs.transpose(1, 0, 3, 2, 4).reshape(q.shape)


def without_masked_chunks(q, k, v, chunk):
    """Queries in chunks, each with the keys that it may attend to: about half of the work."""
    seq, dim = q.shape[1], q.shape[3]
    outputs = []
    for end in range(chunk, seq + 1, chunk):

        @jax.checkpoint
        def attend(rows, keys, values, end=end):
            scores = jnp.einsum("bqhd,bkhd->bhqk", rows, keys) * dim**-0.5
            own = jnp.arange(end - chunk, end)
            weights = jax.nn.softmax(jnp.where(own[:, None] >= jnp.arange(end), scores, -jnp.inf), axis=-1)
            return jnp.einsum("bhqk,bkhd->bqhd", weights, values)

        outputs.append(attend(q[:, end - chunk : end], k[:, :end], v[:, :end]))
    return jnp.concatenate(outputs, axis=1)


def with_a_derivative_of_its_own(q, k, v, chunk):
    """As in FlashAttention: the residuals are the result and each query's log-sum-exp."""
    batch, seq, heads, dim = q.shape
    starts, places = jnp.arange(0, seq, chunk), jnp.arange(seq)

    def by_head(x):
        return x.transpose(0, 2, 1, 3)

    def cut(x):
        return by_head(x).reshape(batch, heads, seq // chunk, chunk, dim).transpose(2, 0, 1, 3, 4)

    def scores(q, keys, start):
        seen = places[:, None] >= start + places[:chunk]
        return jnp.where(seen, by_head(q) @ keys.swapaxes(2, 3) / np.float32(np.sqrt(dim)), -jnp.inf)

    def forward(q, k, v):
        def step(carry, piece):
            top, total, mixed = carry
            chunk_scores = scores(q, piece[1], piece[0])
            now = jnp.maximum(top, chunk_scores.max(-1, keepdims=True))
            weights, shrink = jnp.exp(chunk_scores - now), jnp.exp(top - now)
            total = total * shrink + weights.sum(-1, keepdims=True)
            return (now, total, mixed * shrink + weights @ piece[2]), None

        zeros = jnp.zeros((batch, heads, seq, 1))
        start = zeros - jnp.inf, zeros, jnp.zeros((batch, heads, seq, dim))
        (top, total, mixed), _ = lax.scan(step, start, (starts, cut(k), cut(v)))
        result = by_head(mixed / total)
        return result, (q, k, v, result, top + jnp.log(total))

    def backward(residuals, upstream):
        q, k, v, result, logsumexp = residuals
        upstream_by_head, of_totals = by_head(upstream), by_head((upstream * result).sum(-1, keepdims=True))

        def step(of_q, piece):
            start, keys, values = piece
            weights = jnp.exp(scores(q, keys, start) - logsumexp)
            of_scores = weights * (upstream_by_head @ values.swapaxes(2, 3) - of_totals) / np.float32(np.sqrt(dim))
            return of_q + of_scores @ keys, (
                of_scores.swapaxes(2, 3) @ by_head(q),
                weights.swapaxes(2, 3) @ upstream_by_head,
            )

        of_q, chunks = lax.scan(step, jnp.zeros((batch, heads, seq, dim)), (starts, cut(k), cut(v)))
        return by_head(of_q), *(x.transpose(1, 0, 3, 2, 4).reshape(q.shape) for x in chunks)

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(q, k, v)


ALTERNATIVES = {
    "mixed_precision_loss": (by_casting_kernels_first, with_a_scan_over_layers),
    "accumulate_gradients": (by_slicing_in_a_loop, by_a_loss_of_shares),
    "scan_layers": (with_a_remat_body, by_fori_loop, with_all_activations),
    "remat_layers": (with_products_without_batch_dims, with_checkpoint_of_the_layer, remat_layers_by_fori_loop),
    "scaled_step": (by_branching, by_flattening),
    "chunked_attention": (with_queries_in_chunks_too, without_masked_chunks, with_a_derivative_of_its_own),
}
