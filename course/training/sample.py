"""Text from a trained model, byte by byte, on one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.model import Params
from course.training.strategy import ModelSizes
from course.training.text import VOCAB


def whole(params: Params, mesh: Mesh) -> Params:
    """The full parameters on this process's first device; every process of the run must call it."""
    gathered = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(params)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), gathered)


def sample(
    sizes: ModelSizes, params: Params, prompt: bytes, *, length: int, seed: int, temperature: float = 0.8
) -> bytes:
    """Continue a prompt with ``length`` bytes, each drawn from the predicted distribution.

    Args:
        sizes: Sizes of the model, which sees the last ``sizes.seq`` bytes.
        params: Its parameters, on one device.
        prompt: At least one byte.
        length: Number of bytes to add.
        seed: Seed of the draws.
        temperature: Divisor of the predicted log-probabilities.

    Raises:
        ValueError: The prompt is empty, or the temperature not positive.
    """
    if not prompt:
        raise ValueError("the prompt is empty, and the model needs a byte to continue: give it a newline")
    if not temperature > 0:
        raise ValueError(f"the temperature is {temperature:g}, and it must be positive")
    tokens = np.zeros(max(len(prompt) + length, sizes.seq), np.int32)
    tokens[: len(prompt)] = np.frombuffer(prompt, np.uint8)
    continued = _continue(sizes, params, tokens, len(prompt), length, seed, temperature)
    return bytes(np.asarray(continued[: len(prompt) + length]).astype(np.uint8))


@partial(jax.jit, static_argnames="sizes")
def _continue(
    sizes: ModelSizes, params: Params, tokens: jax.Array, first: int, length: int, seed: int, temperature: float
):
    model, key = sizes.model(), jax.random.key(seed)

    def predicted(window: jax.Array, at: jax.Array) -> jax.Array:
        """The log-probability of every byte after position ``at`` of ``window``, ``[vocab]``."""
        x = model.embed(params["embed"], window[None])
        x, _ = lax.scan(lambda x, layer: (model.layer(layer, x), None), x, params["layers"])
        activation = lax.dynamic_slice_in_dim(x, at, 1, axis=1)
        # A model exposes only its loss, so evaluate the loss of each byte in turn.
        return -jax.vmap(lambda byte: model.loss(params["head"], activation, byte[None, None]))(jnp.arange(VOCAB))

    def draw(i: jax.Array, tokens: jax.Array) -> jax.Array:
        start = jnp.maximum(i - sizes.seq, 0)
        log_probs = predicted(lax.dynamic_slice_in_dim(tokens, start, sizes.seq), i - 1 - start)
        byte = jax.random.categorical(jax.random.fold_in(key, i), log_probs / temperature)
        return tokens.at[i].set(byte.astype(tokens.dtype))

    return lax.fori_loop(first, first + length, draw, tokens)
