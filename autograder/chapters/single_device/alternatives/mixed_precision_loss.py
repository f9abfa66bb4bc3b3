"""Right answers for ``mixed_precision_loss`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOW, HIGH = jnp.bfloat16, jnp.float32


def _normed(scale, x):
    x = x.astype(HIGH)
    mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return (scale * x / jnp.sqrt(mean + 1e-6)).astype(LOW)


def _nll(logits, targets):
    """The loss as a difference of two terms, without ``log_softmax``."""
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


def in_one_piece(params, batch, num_heads):
    """All in one function; scores are scaled after the product, the loss is a difference of two terms."""
    rows, seq = batch["inputs"].shape
    x = (params["token"][batch["inputs"]] + params["position"][:seq]).astype(LOW)
    mask = jnp.tril(jnp.ones((seq, seq), bool))
    for layer in params["layers"]:
        qkv = _normed(layer["attention_norm"], x) @ layer["qkv"].astype(LOW)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        q, k, v = (a.reshape(rows, seq, num_heads, -1) for a in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(HIGH)
        scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, jnp.finfo(HIGH).min)
        weights = jax.nn.softmax(scores).astype(LOW)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + mixed @ layer["out"].astype(LOW)
        hidden = jax.nn.gelu(_normed(layer["mlp_norm"], x) @ layer["up"].astype(LOW))
        x = x + hidden @ layer["down"].astype(LOW)
    logits = (_normed(params["norm"], x) @ params["head"].astype(LOW)).astype(HIGH)
    return _nll(logits, batch["targets"])


def by_casting_kernels_first(params, batch, num_heads):
    """A tree of bfloat16 kernels, made at the start; norms and tables are left as they are."""
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
    """The layers stacked and scanned over, each computed again."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])

    @jax.checkpoint
    def step(x, layer):
        low = {name: a if name.endswith("norm") else a.astype(LOW) for name, a in layer.items()}
        x = x + _attention(low, _normed(low["attention_norm"], x), num_heads)
        return x + jax.nn.gelu(_normed(low["mlp_norm"], x) @ low["up"]) @ low["down"], None

    x, _ = lax.scan(step, _residual_start(params, batch["inputs"]), stacked)
    logits = _normed(params["norm"], x) @ params["head"].astype(LOW)
    return _nll(logits.astype(HIGH), batch["targets"])


def with_layers_computed_again(params, batch, num_heads):
    """``jax.checkpoint`` around each layer saves more than is asked for."""

    @jax.checkpoint
    def run(layer, x):
        low = {name: a if name.endswith("norm") else a.astype(LOW) for name, a in layer.items()}
        x = x + _attention(low, _normed(low["attention_norm"], x), num_heads)
        return x + jax.nn.gelu(_normed(low["mlp_norm"], x) @ low["up"]) @ low["down"]

    x = _residual_start(params, batch["inputs"])
    for layer in params["layers"]:
        x = run(layer, x)
    logits = _normed(params["norm"], x) @ params["head"].astype(LOW)
    return _nll(logits.astype(HIGH), batch["targets"])


ALTERNATIVES = (
    in_one_piece,
    by_casting_kernels_first,
    with_a_scan_over_layers,
    with_layers_computed_again,
)
