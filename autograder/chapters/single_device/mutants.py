"""Wrong answers for ``single_device``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from solutions.single_device import (
    accumulate_gradients,
    causal_softmax,
    cross_entropy,
    float32_loss,
    remat_layers,
    rms_norm,
    scan_layers,
)


def computes_in_float32(params, batch, num_heads):
    """No mixed precision at all."""
    return float32_loss(params, batch, num_heads)


LOW, HIGH = jnp.bfloat16, jnp.float32


@dataclass(frozen=True)
class How:
    """What each part of the Transformer computes in."""

    products: Any = LOW
    norms: Any = HIGH
    softmax: Any = HIGH
    loss: Any = HIGH
    flow: Any = LOW
    head: Any = LOW
    table: Any = HIGH
    scaled: bool = True
    preferred: bool = False
    softmax_of: Callable[[Any], Any] = causal_softmax
    norm_by: Callable[[Any, Any], Any] = rms_norm


def _loss(how: How, params: Any, batch: Any, num_heads: int) -> Any:
    def product(x, kernel, dtype=how.products):
        return x.astype(dtype) @ kernel.astype(dtype)

    def norm(scale, x):
        return how.norm_by(scale.astype(how.norms), x.astype(how.norms))

    tokens = batch["inputs"]
    table, position = params["token"].astype(how.table), params["position"].astype(how.table)
    x = (table[tokens] + position[: tokens.shape[1]]).astype(how.flow)
    for layer in params["layers"]:
        qkv = product(norm(layer["attention_norm"], x), layer["qkv"]).reshape(*tokens.shape, 3, num_heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(how.softmax)
        weights = how.softmax_of(scores * (q.shape[-1] ** -0.5 if how.scaled else 1.0)).astype(v.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + product(mixed.reshape(x.shape), layer["out"]).astype(how.flow)
        hidden = jax.nn.gelu(product(norm(layer["mlp_norm"], x), layer["up"]))
        x = x + product(hidden, layer["down"]).astype(how.flow)
    if how.preferred:
        normed, head = norm(params["norm"], x).astype(LOW), params["head"].astype(LOW)
        logits = jnp.einsum("bsd,dv->bsv", normed, head, preferred_element_type=HIGH)
    else:
        logits = product(norm(params["norm"], x), params["head"], how.head)
    return cross_entropy(logits.astype(how.loss), batch["targets"]).astype(HIGH)


def takes_softmax_in_bfloat16(params, batch, num_heads):
    return _loss(How(softmax=LOW), params, batch, num_heads)


def takes_loss_in_bfloat16(params, batch, num_heads):
    return _loss(How(loss=LOW), params, batch, num_heads)


def takes_norms_in_bfloat16(params, batch, num_heads):
    return _loss(How(norms=LOW), params, batch, num_heads)


def forgets_to_scale_scores(params, batch, num_heads):
    return _loss(How(scaled=False), params, batch, num_heads)


def _cut(batch: Any, parts: int) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:]), batch)


def _accumulated(loss_fn: Any, params: Any, parts: Any, unroll: Any = 1) -> Any:
    def step(total, part):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, part)), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(step, nothing, parts, unroll=unroll)[0]


def sums_microbatches(loss_fn, params, batch, num_microbatches):
    """A sum where a mean is asked for."""
    return _accumulated(loss_fn, params, _cut(batch, num_microbatches))


def divides_the_loss_only(loss_fn, params, batch, num_microbatches):
    loss, gradients = _accumulated(loss_fn, params, _cut(batch, num_microbatches))
    return loss / num_microbatches, gradients


def _divided(tree: Any, by: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf / by, tree)


def unrolls_the_scan(loss_fn, params, batch, num_microbatches):
    parts = _cut(batch, num_microbatches)
    return _divided(_accumulated(loss_fn, params, parts, unroll=num_microbatches), num_microbatches)


def differentiates_the_scanned_loss(loss_fn, params, batch, num_microbatches):
    """The gradient of a mean over microbatches: activations of all of them wait for the backward pass."""

    def mean_loss(params):
        def step(total, part):
            return total + loss_fn(params, part) / num_microbatches, None

        return lax.scan(step, jnp.zeros(()), _cut(batch, num_microbatches))[0]

    return jax.value_and_grad(mean_loss)(params)


def computes_the_loss_again(loss_fn, params, batch, num_microbatches):
    """One more forward pass of every microbatch, for the loss."""
    _, gradients = accumulate_gradients(loss_fn, params, batch, num_microbatches)

    def step(total, part):
        return total + loss_fn(params, part) / num_microbatches, None

    return lax.scan(step, jnp.zeros(()), _cut(batch, num_microbatches))[0], gradients


def _scan(layer: Any, stacked: Any, x: Any, wrap: Any = lambda f: f, **how: Any) -> Any:
    return lax.scan(wrap(lambda x, params: (layer(params, x), None)), x, stacked, **how)[0]


def unrolls_the_loop(layer, stacked_params, x):
    return _scan(layer, stacked_params, x, unroll=True)


def runs_backwards(layer, stacked_params, x):
    """The last layer comes first."""
    return _scan(layer, stacked_params, x, reverse=True)


def leaves_out_the_last_layer(layer, stacked_params, x):
    return _scan(layer, jax.tree.map(lambda leaf: leaf[:-1], stacked_params), x)


def cuts_gradients_between_layers(layer, stacked_params, x):
    return _scan(lambda params, x: layer(params, lax.stop_gradient(x)), stacked_params, x)


def stops_gradients(layer, stacked_params, x):
    return lax.stop_gradient(scan_layers(layer, stacked_params, x))


def keeps_everything(layer, stacked_params, x):
    """A scan without ``jax.checkpoint``."""
    return _scan(layer, stacked_params, x)


def keeps_every_product(layer, stacked_params, x):
    """Keeps the outputs of all matrix products, attention's squares among them."""
    return _scan(layer, stacked_params, x, partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable))


def checkpoints_twice(layer, stacked_params, x):
    """Around the loop and in it: every layer is computed three times."""
    return jax.checkpoint(lambda stacked, x: remat_layers(layer, stacked, x))(stacked_params, x)


def stops_gradients_of_remat(layer, stacked_params, x):
    return lax.stop_gradient(remat_layers(layer, stacked_params, x))


def leaves_out_the_last_of_twelve(layer, stacked_params, x):
    return remat_layers(layer, jax.tree.map(lambda leaf: leaf[:-1], stacked_params), x)


def _all_finite(gradients: Any) -> Any:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))


@dataclass(frozen=True)
class How_in_scaling:
    """What a step does differently."""

    dtype: Any = jnp.float16
    use_scale: bool = True
    unscale: bool = True
    factor: float = 2.0
    shrink: float = 0.5
    lowest: float = 1.0
    start_again: int = 0
    late: int = 0
    finite: Callable[[Any, Any], Any] = lambda gradients, loss: _all_finite(gradients)
    counts_on: bool = False
    never_starts_again: bool = False
    returns_scaled: bool = False
    skip: Callable[[Any, Any], Any] = lambda finite, gradient: finite


def _step(how: How_in_scaling, loss_fn, params, state, batch, learning_rate, growth_interval) -> Any:
    scale = state["scale"] if how.use_scale else jnp.ones(())

    def scaled_loss(params):
        loss = loss_fn(jax.tree.map(lambda leaf: leaf.astype(how.dtype), params), batch)
        return loss * scale, loss

    (scaled, loss), gradients = jax.value_and_grad(scaled_loss, has_aux=True)(params)
    gradients = jax.tree.map(lambda g: g / scale if how.unscale else g, gradients)
    finite = how.finite(gradients, loss)

    def updated(p, g):
        return jnp.where(how.skip(finite, g), p - learning_rate * g, p)

    params = jax.tree.map(updated, params, gradients)
    good = jnp.where(finite, state["good_steps"] + 1, state["good_steps"] if how.counts_on else how.start_again)
    grows = finite & (good >= growth_interval + how.late)
    bigger = jnp.where(grows, how.factor * state["scale"], state["scale"])
    new_scale = jnp.where(finite, bigger, jnp.maximum(how.shrink * state["scale"], how.lowest))
    good = good if how.never_starts_again else jnp.where(grows, 0, good)
    return params, {"scale": new_scale, "good_steps": good}, scaled if how.returns_scaled else loss


def casts_to_bfloat16(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How_in_scaling(dtype=jnp.bfloat16), loss_fn, params, state, batch, learning_rate, growth_interval)


def halves_below_one(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How_in_scaling(lowest=0.0), loss_fn, params, state, batch, learning_rate, growth_interval)


def grows_a_step_late(loss_fn, params, state, batch, learning_rate, growth_interval):
    """Off by one: only after more than ``growth_interval`` good steps."""
    return _step(How_in_scaling(late=1), loss_fn, params, state, batch, learning_rate, growth_interval)


def never_grows(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How_in_scaling(factor=1.0), loss_fn, params, state, batch, learning_rate, growth_interval)


def shrinks_to_a_tenth(loss_fn, params, state, batch, learning_rate, growth_interval):
    return _step(How_in_scaling(shrink=0.1), loss_fn, params, state, batch, learning_rate, growth_interval)


def keeps_the_square(q, k, v, chunk):
    """Attention as it stands in books."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@dataclass(frozen=True)
class How_in_attention:
    """What differs from a right scan over chunks."""

    wrap: Callable[[Any], Any] = jax.checkpoint
    rescale_total: bool = True
    rescale_mixed: bool = True
    divide: bool = True
    maximum: bool = True
    scale: bool = True
    shift: int = 0
    causal: bool = True
    dtype: Any = jnp.float32
    loop: bool = False
    around: Callable[[Any], Any] = lambda f: f


def _attend(how: How_in_attention, q: Any, k: Any, v: Any, chunk: int) -> Any:
    batch, seq, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if how.scale else 1.0

    def cut(x):
        return jnp.moveaxis(x.reshape(batch, seq // chunk, chunk, num_heads, head_dim), 1, 0)

    def run(q, k, v):
        def step(carry, piece):
            largest, total, mixed = carry
            start, keys, values = piece
            scores = jnp.einsum("bqhd,bkhd->bhqk", (q * scale).astype(how.dtype), keys.astype(how.dtype))
            scores = scores.astype(jnp.float32)
            allowed = jnp.arange(seq)[:, None] >= start + jnp.arange(chunk) + how.shift
            scores = jnp.where(allowed, scores, -1e30) if how.causal else scores
            now = lax.stop_gradient(jnp.maximum(largest, scores.max(-1))) if how.maximum else largest
            weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
            total = total * (shrink if how.rescale_total else 1.0) + weights.sum(-1)
            mixed = mixed * (shrink[..., None] if how.rescale_mixed else 1.0)
            return (now, total, mixed + jnp.einsum("bhqk,bkhd->bhqd", weights, values)), None

        nothing = jnp.zeros((batch, num_heads, seq))
        start = (nothing - (1e30 if how.maximum else 0), nothing, jnp.zeros((batch, num_heads, seq, head_dim)))
        pieces = (jnp.arange(0, seq, chunk), cut(k), cut(v))
        if how.loop:
            carry = start
            for i in range(seq // chunk):
                carry, _ = step(carry, jax.tree.map(lambda leaf, i=i: leaf[i], pieces))
        else:
            carry, _ = lax.scan(how.wrap(step), start, pieces)
        _, total, mixed = carry
        return jnp.moveaxis(mixed / total[..., None] if how.divide else mixed, 1, 2)

    return how.around(run)(q, k, v)


def keeps_every_chunk(q, k, v, chunk):
    """In chunks, but what the backward pass needs of each is kept: stacked, it is the square."""
    return _attend(How_in_attention(wrap=lambda f: f), q, k, v, chunk)


def recomputes_twice(q, k, v, chunk):
    return _attend(How_in_attention(around=jax.checkpoint), q, k, v, chunk)


def recomputes_three_times(q, k, v, chunk):
    return _attend(How_in_attention(around=lambda f: jax.checkpoint(jax.checkpoint(f))), q, k, v, chunk)


def forgets_to_correct_the_sum(q, k, v, chunk):
    return _attend(How_in_attention(rescale_total=False), q, k, v, chunk)


MUTANTS = (
    mutant("mixed_precision_loss", computes_in_float32, "live temporaries", "product dtypes"),
    mutant("mixed_precision_loss", takes_softmax_in_bfloat16, "float32 functions and sums"),
    mutant("mixed_precision_loss", takes_loss_in_bfloat16, "float32 functions and sums"),
    mutant("mixed_precision_loss", takes_norms_in_bfloat16, "float32 functions and sums"),
    mutant("mixed_precision_loss", forgets_to_scale_scores, "gradients", "values"),
    mutant("accumulate_gradients", sums_microbatches, "gradient norm", "gradients", "values"),
    mutant("accumulate_gradients", divides_the_loss_only, "gradient norm", "gradients"),
    mutant(
        "accumulate_gradients",
        unrolls_the_scan,
        "live temporaries",
        "program size",
        shown_by=("2 microbatches", "8 microbatches"),
    ),
    mutant("accumulate_gradients", differentiates_the_scanned_loss, "live temporaries"),
    mutant("accumulate_gradients", computes_the_loss_again, "FLOPs"),
    mutant("scan_layers", unrolls_the_loop, "program size", shown_by=("2 layers", "8 layers")),
    mutant("scan_layers", runs_backwards, "gradient norm", "gradients", "values"),
    mutant("scan_layers", leaves_out_the_last_layer, "gradient norm", "gradients", "values"),
    mutant("scan_layers", cuts_gradients_between_layers, "gradient norm", "gradients"),
    mutant("scan_layers", stops_gradients, "gradient norm", "gradients"),
    mutant("remat_layers", keeps_everything, "live temporaries"),
    mutant("remat_layers", keeps_every_product, "live temporaries"),
    mutant("remat_layers", checkpoints_twice, "FLOPs"),
    mutant("remat_layers", stops_gradients_of_remat, "FLOPs", "gradient norm", "gradients", "live temporaries"),
    mutant("remat_layers", leaves_out_the_last_of_twelve, "gradient norm", "gradients", "values"),
    mutant("scaled_step", casts_to_bfloat16, "losses", "product dtypes", "scale", "skipped steps", "values"),
    mutant("scaled_step", halves_below_one, "scale", shown_by=("scale of 1",)),
    mutant("scaled_step", grows_a_step_late, "good steps", "scale"),
    mutant("scaled_step", never_grows, "scale"),
    mutant("scaled_step", shrinks_to_a_tenth, "scale"),
    mutant("chunked_attention", keeps_the_square, "largest temporary", "live temporaries"),
    mutant("chunked_attention", keeps_every_chunk, "largest temporary", "live temporaries"),
    mutant("chunked_attention", recomputes_twice, "FLOPs"),
    mutant("chunked_attention", recomputes_three_times, "FLOPs"),
    mutant("chunked_attention", forgets_to_correct_the_sum, "gradients", "values"),
)
