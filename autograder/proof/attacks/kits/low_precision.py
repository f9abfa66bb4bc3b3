"""The loss in mixed precision, whose softmax and norm an attack brings along; ``LOW`` is what it must not use there."""

import jax
import jax.numpy as jnp

LOW, HIGH = jnp.bfloat16, jnp.float32


def attended(scores):
    """Where a query sees a key, and its scores less their maximum, at least -7: below, nothing is left in ``LOW``.

    At most 1 where it does not see it: the gradient of what is masked must be finite, too.
    """
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    largest = jax.lax.stop_gradient(jnp.where(seen, scores, -jnp.inf).max(-1, keepdims=True))
    return seen, jnp.clip(scores - largest, -7.0, 1.0)


def loss_with(params, batch, num_heads, softmax=causal_softmax, norm=rms_norm):
    def normed(scale, x):
        return norm(scale, x.astype(HIGH)).astype(LOW)

    tokens = batch["inputs"]
    x = (params["token"][tokens] + params["position"][: tokens.shape[1]]).astype(LOW)
    for layer in params["layers"]:
        low = {name: leaf.astype(LOW) for name, leaf in layer.items()}
        qkv = (normed(layer["attention_norm"], x) @ low["qkv"]).reshape(*tokens.shape, 3, num_heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(HIGH) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", softmax(scores).astype(LOW), v)
        x = x + mixed.reshape(x.shape) @ low["out"]
        x = x + jax.nn.gelu(normed(layer["mlp_norm"], x) @ low["up"]) @ low["down"]
    logits = normed(params["norm"], x) @ params["head"].astype(LOW)
    return cross_entropy(logits.astype(HIGH), batch["targets"])
