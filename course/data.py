"""Deterministic batches: the same seed and step give the same numbers on every machine and mesh."""

from __future__ import annotations

import numpy as np


def regression_batch(seed: int, step: int, *, batch: int, num_inputs: int, num_outputs: int) -> dict[str, np.ndarray]:
    """``inputs`` ``[batch, num_inputs]`` and ``targets`` ``[batch, num_outputs]``, float32.

    The targets are a fixed smooth function of the inputs, so that a model can learn them.
    """
    inputs = np.random.default_rng((seed, step)).standard_normal((batch, num_inputs), np.float32)
    teacher = np.random.default_rng(seed).standard_normal((num_inputs, num_outputs), np.float32)
    return {"inputs": inputs, "targets": np.tanh(inputs @ teacher / np.float32(np.sqrt(num_inputs)))}


def token_batch(seed: int, step: int, *, batch: int, seq: int, vocab: int) -> dict[str, np.ndarray]:
    """``inputs`` and ``targets`` ``[batch, seq]``, int32: counting sequences with a random start and stride.

    The target at each position is the next token, which the two tokens before it determine.
    """
    rng = np.random.default_rng((seed, step))
    start = rng.integers(0, vocab, (batch, 1))
    stride = rng.integers(1, 4, (batch, 1))
    tokens = ((start + stride * np.arange(seq + 1)) % vocab).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
