"""Wrong answers for ``mixed_precision_loss``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autograder.proof.mutants import mutant
from solutions.single_device import causal_softmax, cross_entropy, float32_loss, mixed_precision_loss, rms_norm

LOW, HIGH = jnp.bfloat16, jnp.float32
FUNCTIONS, PRODUCTS, TEMPORARIES = "float32 functions and sums", "product dtypes", "live temporaries"


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


def computes_in_float32(params, batch, num_heads):
    """No mixed precision at all."""
    return float32_loss(params, batch, num_heads)


def computes_all_in_bfloat16(params, batch, num_heads):
    """Casts the parameters once, and everything else follows."""
    low = jax.tree.map(lambda leaf: leaf.astype(LOW), params)
    return float32_loss(low, batch, num_heads).astype(HIGH)


def takes_softmax_in_bfloat16(params, batch, num_heads):
    return _loss(How(softmax=LOW), params, batch, num_heads)


def takes_loss_in_bfloat16(params, batch, num_heads):
    return _loss(How(loss=LOW), params, batch, num_heads)


def takes_norms_in_bfloat16(params, batch, num_heads):
    return _loss(How(norms=LOW), params, batch, num_heads)


def sums_embedding_gradients_in_bfloat16(params, batch, num_heads):
    """Casts the table before it is indexed: the gradient of each token is summed in bfloat16."""
    return _loss(How(table=LOW), params, batch, num_heads)


def _softmax_by_tanh(scores):
    """``exp(x)`` is ``(1 + tanh(x / 2)) / (1 - tanh(x / 2))``, and below a limit nothing is left."""
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    half = jnp.tanh(jnp.maximum(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)), -7.0) / 2).astype(LOW)
    weights = jnp.where(seen, (1 + half) / (1 - half), 0).astype(LOW)
    return weights.astype(HIGH) / weights.astype(HIGH).sum(-1, keepdims=True)


def takes_exponentials_by_tanh(params, batch, num_heads):
    """No exponential is in bfloat16, since there is none."""
    return _loss(How(softmax_of=_softmax_by_tanh), params, batch, num_heads)


def _norm_by_products(scale, x):
    ones = jnp.ones((x.shape[-1], 1), LOW)
    squares = (jnp.square(x.astype(LOW)) @ ones).astype(HIGH) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(squares + 1e-6)


def sums_by_products_with_ones(params, batch, num_heads):
    """A product with ones is a sum, in the dtype that products have."""
    return _loss(How(norm_by=_norm_by_products), params, batch, num_heads)


def forgets_the_head(params, batch, num_heads):
    """One product of two float32 arrays is left, the largest."""
    return _loss(How(head=HIGH), params, batch, num_heads)


def asks_for_float32_logits(params, batch, num_heads):
    """``preferred_element_type`` spares a rounding forward; backward, a float32 gradient meets bfloat16 kernels."""
    return _loss(How(preferred=True), params, batch, num_heads)


def keeps_the_residual_in_float32(params, batch, num_heads):
    """Right but for what flows between layers, and all that is kept of the layers' inside is float32 too."""

    def rounded(x):
        return x.astype(LOW).astype(HIGH)

    low = jax.tree.map(rounded, params)
    return float32_loss(low, batch, num_heads)


def forgets_to_scale_scores(params, batch, num_heads):
    return _loss(How(scaled=False), params, batch, num_heads)


def lets_queries_see_the_future(params, batch, num_heads):
    return _loss(How(softmax_of=lambda scores: jax.nn.softmax(scores, axis=-1)), params, batch, num_heads)


def freezes_norms(params, batch, num_heads):
    """Norms are left out of the gradient by mistake."""
    frozen = [
        {name: jax.lax.stop_gradient(leaf) if leaf.ndim == 1 else leaf for name, leaf in layer.items()}
        for layer in params["layers"]
    ]
    return mixed_precision_loss({**params, "layers": frozen}, batch, num_heads)


TASK = "mixed_precision_loss"
MUTANTS = (
    mutant(TASK, computes_in_float32, PRODUCTS, TEMPORARIES),
    mutant(TASK, computes_all_in_bfloat16, FUNCTIONS),
    mutant(TASK, takes_softmax_in_bfloat16, FUNCTIONS),
    mutant(TASK, takes_loss_in_bfloat16, FUNCTIONS),
    mutant(TASK, takes_norms_in_bfloat16, FUNCTIONS),
    mutant(TASK, sums_embedding_gradients_in_bfloat16, FUNCTIONS),
    mutant(TASK, takes_exponentials_by_tanh, FUNCTIONS),
    mutant(TASK, sums_by_products_with_ones, FUNCTIONS),
    mutant(TASK, forgets_the_head, PRODUCTS),
    mutant(TASK, asks_for_float32_logits, PRODUCTS),
    mutant(TASK, keeps_the_residual_in_float32, PRODUCTS, TEMPORARIES),
    mutant(TASK, forgets_to_scale_scores, "values", "gradients"),
    mutant(TASK, lets_queries_see_the_future, "values", "gradients"),
    mutant(TASK, freezes_norms, "gradients"),
)
