"""Single-device models, written in ``flax.nnx`` and used as three pure functions: the oracles of every chapter.

Parameters are plain nested dicts of arrays, ``{"embed": ..., "layers": ..., "head": ...}``. The layers are
stacked: each leaf under ``layers`` has a leading dim ``num_layers``, ready for ``jax.lax.scan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Params = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model as pure functions.

    Attributes:
        num_layers: The leading dim of every leaf under ``params["layers"]``.
        init: ``key -> params``.
        embed: ``(params["embed"], inputs) -> x``: the first activations, ``[batch, ..., width]``.
        layer: ``(one layer's params, x, key=None) -> x`` of the same shape. With a key, and if the model was made
            with a dropout rate above 0, parts of what the layer adds are dropped; without a key, nothing is dropped.
            Several keys apply to the same number of parts of the sequence: see ``drop``.
        loss: ``(params["head"], x, targets, mask=None) -> scalar``: the mean over the rows given, or their tokens.
            With a mask ``[batch]``, or ``[batch, seq]`` of tokens, the mean is over those with a 1 instead of a 0; it
            is 0 if there are none.
    """

    num_layers: int
    init: Callable[[jax.Array], Params]
    embed: Callable[[Params, jax.Array], jax.Array]
    layer: Callable[..., jax.Array]
    loss: Callable[..., jax.Array]


# --8<-- [start:full_loss]
def full_loss(
    model: Model, params: Params, batch: Mapping[str, jax.Array | np.ndarray], key: jax.Array | None = None
) -> jax.Array:
    """The model's loss on one device, computed directly: every chapter's oracle.

    Args:
        model: The model.
        params: Its full parameters.
        batch: ``inputs`` and ``targets``, each ``[batch, ...]``, and a ``mask`` if not all rows or tokens count.
        key: For dropout: layer ``i`` is given ``fold_in(key, i)``.
    """

    def step(x, layer):
        return model.layer(layer[0], x, layer[1]), None

    keys = None if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(model.num_layers))
    x = model.embed(params["embed"], jnp.asarray(batch["inputs"]))
    x, _ = jax.lax.scan(step, x, (params["layers"], keys))
    return model.loss(params["head"], x, *(jnp.asarray(batch[name]) for name in ("targets", "mask") if name in batch))


# --8<-- [end:full_loss]


# --8<-- [start:layer_key]
def layer_key(key: jax.Array, microbatch: jax.Array | int, layer: jax.Array | int) -> jax.Array:
    """The dropout key of one layer for one microbatch, independent of the number of devices and the order of compute.

    A batch in microbatches then has the loss ``mean over m of full_loss(model, params, batch[m], fold_in(key, m))``.

    Args:
        key: The batch's key.
        microbatch: Index of the microbatch in the batch.
        layer: Index of the layer in the model.
    """
    return jax.random.fold_in(jax.random.fold_in(key, microbatch), layer)


# --8<-- [end:layer_key]


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout: zero a fraction ``rate`` of the elements and scale up the others; a no-op without a key.

    Several keys, ``[parts]``, apply to equal parts of ``x`` ``[..., seq, width]`` along ``seq``, one key per part,
    as on devices that each have one part.
    """
    if key is None or rate == 0:
        return x
    if key.ndim:
        parts = x.reshape(*x.shape[:-2], key.size, -1, x.shape[-1])
        drop_parts = jax.vmap(lambda part, key: drop(part, rate, key), in_axes=(-3, 0), out_axes=-3)
        return drop_parts(parts, key).reshape(x.shape)
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def split_key(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split one key, or each of several, into two: ``[]`` or ``[parts]``."""
    keys = jax.random.split(key) if key.ndim == 0 else jax.vmap(jax.random.split, out_axes=1)(key)
    return keys[0], keys[1]


def rms_norm(params: Params, x: jax.Array) -> jax.Array:
    """Apply ``nnx.RMSNorm`` with the given parameters: ``{"scale": [width]}``, ``x`` ``[..., width]``."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * params["scale"]


def split_heads(attention: Params, num_heads: int) -> Params:
    """The parameters of ``Attention`` with a separate heads dim, ready to be split over devices.

    Args:
        attention: ``{"qkv": {"kernel": [..., width, 3 * width]}, "out": {"kernel": [..., width, width]}}``; leading
            dims, such as that of stacked layers, are kept.
        num_heads: Number of heads that the width is divided into.

    Returns:
        ``{"qkv": {"kernel": [..., width, 3, num_heads, head_dim]}, "out": {"kernel": [..., num_heads, head_dim,
        width]}}``.
    """
    qkv, out = attention["qkv"]["kernel"], attention["out"]["kernel"]
    *stacked, width, _ = out.shape
    split = num_heads, width // num_heads
    return {
        "qkv": {"kernel": qkv.reshape(*stacked, width, 3, *split)},
        "out": {"kernel": out.reshape(*stacked, *split, width)},
    }


class MLPLayer(nnx.Module):
    """Residual layer: ``x + down(gelu(up(norm(x))))``."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.dropout = dropout
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return x + drop(self.down(jax.nn.gelu(self.up(self.norm(x)))), self.dropout, key)


class Attention(nnx.Module):
    """Causal self-attention; ``[batch, seq, width] -> [batch, seq, width]``."""

    def __init__(self, width: int, num_heads: int, *, rngs: nnx.Rngs):
        if width % num_heads:
            raise ValueError(f"width {width} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, seq, width = x.shape
        split = (batch, seq, 3, self.num_heads, width // self.num_heads)
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(split), 2, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.reshape(batch, seq, width))


class TransformerLayer(nnx.Module):
    """Pre-norm decoder layer: attention, then MLP, each added to its input."""

    def __init__(self, width: int, hidden: int, num_heads: int, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.dropout = dropout
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, num_heads, rngs=rngs)
        self.mlp = MLPLayer(width, hidden, dropout, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        keys = (None, None) if key is None else split_key(key)
        return self.mlp(x + drop(self.attention(self.attention_norm(x)), self.dropout, keys[0]), keys[1])


class ParallelLayer(nnx.Module):
    """Decoder layer with one norm: attention and MLP have the same input, and both outputs are added at once."""

    def __init__(self, width: int, hidden: int, num_heads: int, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.dropout = dropout
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = Attention(width, num_heads, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        y = self.norm(x)
        return x + drop(self.attention(y) + self.down(jax.nn.gelu(self.up(y))), self.dropout, key)


class TokenEmbedding(nnx.Module):
    """Token plus learned position: ``[batch, seq] -> [batch, seq, width]``."""

    def __init__(self, vocab: int, max_seq: int, width: int, *, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(width**-0.5)
        self.token = nnx.Param(draw(rngs.params(), (vocab, width)))
        self.position = nnx.Param(draw(rngs.params(), (max_seq, width)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.token[...][tokens] + self.position[...][: tokens.shape[1]]


class Head(nnx.Module):
    """Final norm and projection to the outputs."""

    def __init__(self, width: int, num_outputs: int, *, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.out = nnx.Linear(width, num_outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.norm(x))


# --8<-- [start:mean_of]
def mean_of(losses: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The mean of the losses that count; both ``[...]``, and the mask has ones and zeros. It is 0 if none count."""
    return jnp.mean(losses) if mask is None else jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)


# --8<-- [end:mean_of]


def squared_error(outputs: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean over rows of half the squared distance; both ``[batch, num_outputs]``."""
    return 0.5 * mean_of(jnp.sum((outputs - targets) ** 2, axis=-1), mask)


def cross_entropy(logits: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean negative log-likelihood of integer ``targets`` ``[...]`` under ``logits`` ``[..., vocab]``."""
    log_probs = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    chosen = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
    return -mean_of(chosen if mask is None else chosen[..., 0], mask)


def mlp(*, width: int, hidden: int, num_layers: int, num_inputs: int, num_outputs: int, dropout: float = 0.0) -> Model:
    """A residual MLP for regression: ``inputs`` ``[batch, num_inputs]``, ``targets`` ``[batch, num_outputs]``."""
    return _model(
        num_layers,
        lambda rngs: nnx.Linear(num_inputs, width, rngs=rngs),
        lambda rngs: MLPLayer(width, hidden, dropout, rngs=rngs),
        lambda rngs: Head(width, num_outputs, rngs=rngs),
        squared_error,
    )


def transformer(
    *,
    width: int,
    hidden: int,
    num_layers: int,
    num_heads: int,
    vocab: int,
    max_seq: int,
    dropout: float = 0.0,
    parallel: bool = False,
) -> Model:
    """A decoder-only Transformer: ``inputs`` and ``targets`` are integer tokens ``[batch, seq]``.

    With ``parallel``, attention and MLP of a layer run in parallel: see ``ParallelLayer``.
    """
    layer = ParallelLayer if parallel else TransformerLayer
    return _model(
        num_layers,
        lambda rngs: TokenEmbedding(vocab, max_seq, width, rngs=rngs),
        lambda rngs: layer(width, hidden, num_heads, dropout, rngs=rngs),
        lambda rngs: Head(width, vocab, rngs=rngs),
        cross_entropy,
    )


def _model(num_layers: int, make_embed, make_layer, make_head, loss_of) -> Model:
    embed_init, embed = pure_functions(make_embed)
    layer_init, layer = pure_functions(make_layer)
    head_init, head = pure_functions(make_head)

    def init(key: jax.Array) -> Params:
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        return {
            "embed": embed_init(embed_key),
            "layers": jax.vmap(layer_init)(jax.random.split(layers_key, num_layers)),
            "head": head_init(head_key),
        }

    def loss(params: Params, x: jax.Array, targets: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return loss_of(head(params, x), targets, mask)

    return Model(num_layers, init, embed, layer, loss)


def pure_functions(make: Callable[[nnx.Rngs], nnx.Module]):
    """Turn an nnx module into ``init(key) -> params`` and ``apply(params, x, ...)``."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init(key: jax.Array) -> Params:
        _, state = nnx.split(make(nnx.Rngs(key)))
        return nnx.to_pure_dict(state)

    def apply(params: Params, *arguments: Any, **named: Any) -> jax.Array:
        return nnx.merge(graph, params)(*arguments, **named)

    return init, apply


def heads_apart(params: Params, num_heads: int) -> Params:
    """The parameters of a Transformer, with those of its attention as returned by ``split_heads``."""
    layers = params["layers"]
    return {**params, "layers": {**layers, "attention": split_heads(layers["attention"], num_heads)}}
