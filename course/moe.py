"""A decoder whose MLP is a mixture of experts, on a single device: the oracle of the chapter ``expert_parallel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from course.model import Attention, Head, Params, TokenEmbedding, cross_entropy, pure_functions, rms_norm


# --8<-- [start:model]
@dataclass(frozen=True)
class MoEModel:
    """A mixture-of-experts decoder as pure functions.

    Attributes:
        num_layers: The leading dim of every leaf under ``params["layers"]``.
        num_experts: Number of routed experts in a layer.
        k: Number of routed experts that a token is sent to.
        balance: Weight of the load-balancing loss, the mean over layers.
        z: Weight of the router's z-loss, the mean over layers.
        init: ``key -> params``.
        embed: ``(params["embed"], tokens) -> x``: ``[batch, seq] -> [batch, seq, width]``.
        attend: ``(one layer's params, x) -> (x, normed)``: ``x`` with attention added, and the input of the router and
            the experts.
        loss: ``(params["head"], x, targets) -> scalar``: the mean over the tokens given.
    """

    num_layers: int
    num_experts: int
    k: int
    balance: float
    z: float
    init: Callable[[jax.Array], Params]
    embed: Callable[[Params, jax.Array], jax.Array]
    attend: Callable[[Params, jax.Array], tuple[jax.Array, jax.Array]]
    loss: Callable[[Params, jax.Array, jax.Array], jax.Array]


# --8<-- [end:model]


# --8<-- [start:mlp]
def expert_mlp(weights: Params, x: jax.Array) -> jax.Array:
    """Apply one expert, ``[tokens, width] -> [tokens, width]``, or several at once along a leading dim of both inputs.

    It has no biases, so an empty place, all zeros, gives zeros.
    """
    return jax.nn.gelu(x @ weights["up"]) @ weights["down"]


# --8<-- [end:mlp]


# --8<-- [start:layer]
def moe(params: Params, x: jax.Array, k: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The layer on one device: every expert computes all tokens, and only those that it serves count.

    Args:
        params: ``router``: ``kernel`` ``[width, experts]`` and ``bias`` ``[experts]``; ``experts``: ``up`` and
            ``down``, ``[experts, ...]``; ``shared``: ``up`` and ``down``.
        x: ``[tokens, width]``.
        k: Number of experts that a token chooses.
        capacity: Number of places an expert has: it serves the first tokens that choose it, and drops the others.

    Returns:
        ``(y, logits)``: ``[tokens, width]`` and the router's ``[tokens, experts]``.
    """
    logits = x @ params["router"]["kernel"]
    gates = jax.nn.softmax(logits)
    chosen = jax.lax.top_k(gates + params["router"]["bias"], k)[1]

    def add_expert(y, each):
        expert, weights = each
        chose_it = (chosen == expert).any(axis=-1)
        served = chose_it & (jnp.cumsum(chose_it) <= capacity)
        gate = jnp.where(served, jnp.take(gates, expert, axis=-1), 0)
        return y + gate[:, None] * expert_mlp(weights, x), None

    numbered_experts = jnp.arange(logits.shape[-1]), params["experts"]
    y, _ = jax.lax.scan(add_expert, expert_mlp(params["shared"], x), numbered_experts)
    return y, logits


# --8<-- [end:layer]


# --8<-- [start:balance]
def balance_and_z(logits: jax.Array, bias: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two losses of a router over all tokens, and the share of choices that each expert got.

    Args:
        logits: ``[tokens, experts]``.
        bias: ``[experts]``.
        k: Number of experts that a token chooses.
    """
    num_experts, gates = logits.shape[-1], jax.nn.softmax(logits)
    chosen = jax.lax.top_k(gates + bias, k)[1]
    load = jnp.mean(chosen.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=logits.dtype)
    balance = num_experts * jnp.sum(load * gates.mean(0))
    return balance, jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2), load


# --8<-- [end:balance]


# --8<-- [start:loss]
def moe_loss(
    model: MoEModel, params: Params, batch: Mapping[str, jax.Array | np.ndarray], capacity: int, groups: int = 1
) -> jax.Array:
    """The whole loss on one device.

    Args:
        model: The model.
        params: Its full parameters.
        batch: ``inputs`` and ``targets``, tokens ``[batch, seq]``.
        capacity: Number of places an expert has for each group.
        groups: Number of equal groups of rows that compete for places separately, as those of different devices do.
    """

    def step(x, layer):
        x, normed = model.attend(layer, x)
        grouped = normed.reshape(groups, -1, normed.shape[-1])
        y, logits = jax.vmap(lambda tokens: moe(layer["moe"], tokens, model.k, capacity))(grouped)
        logits = logits.reshape(-1, model.num_experts)
        return x + y.reshape(x.shape), balance_and_z(logits, layer["moe"]["router"]["bias"], model.k)[:2]

    x = model.embed(params["embed"], jnp.asarray(batch["inputs"]))
    x, (balance, z) = jax.lax.scan(step, x, params["layers"])
    loss = model.loss(params["head"], x, jnp.asarray(batch["targets"]))
    return loss + model.balance * balance.mean() + model.z * z.mean()


# --8<-- [end:loss]


def moe_transformer(
    *,
    width: int,
    hidden: int,
    num_layers: int,
    num_heads: int,
    num_experts: int,
    k: int,
    vocab: int,
    max_seq: int,
    balance: float = 0.01,
    z: float = 0.001,
) -> MoEModel:
    """A decoder whose layers have ``num_experts`` routed experts and a shared one, each with ``hidden`` features."""
    embed_init, embed = pure_functions(lambda rngs: TokenEmbedding(vocab, max_seq, width, rngs=rngs))
    attention_init, attention = pure_functions(lambda rngs: Attention(width, num_heads, rngs=rngs))
    head_init, head = pure_functions(lambda rngs: Head(width, vocab, rngs=rngs))
    draw = nnx.initializers.lecun_normal(batch_axis=0)

    def layer_init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 6)
        up, down = (width, hidden), (hidden, width)
        norm = {"scale": jnp.ones(width)}
        return {
            "attention": attention_init(keys[0]),
            "attention_norm": norm,
            "norm": norm,
            "moe": {
                "router": {"kernel": draw(keys[1], (1, width, num_experts))[0], "bias": jnp.zeros(num_experts)},
                "experts": {"up": draw(keys[2], (num_experts, *up)), "down": draw(keys[3], (num_experts, *down))},
                "shared": {"up": draw(keys[4], (1, *up))[0], "down": draw(keys[5], (1, *down))[0]},
            },
        }

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, 3)
        layers = jax.vmap(layer_init)(jax.random.split(keys[1], num_layers))
        return {"embed": embed_init(keys[0]), "layers": layers, "head": head_init(keys[2])}

    def attend(layer: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + attention(layer["attention"], rms_norm(layer["attention_norm"], x))
        return x, rms_norm(layer["norm"], x)

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        return cross_entropy(head(params, x), targets)

    return MoEModel(num_layers, num_experts, k, balance, z, init, embed, attend, loss)
