"""The text that ships with the course, as batches of bytes: each a function of seed and step alone.

A resumed run, and every process of a run, therefore agree on a batch without communication, and each process
makes only the rows for its own devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TEXT = Path(__file__).resolve().parents[1] / "texts" / "shakespeare.txt"
VOCAB = 256
TRAINED_SHARE = 0.9

Batch = dict[str, jax.Array]


def read_text(path: Path = TEXT) -> np.ndarray:
    """The bytes of a text, ``[length]``, uint8."""
    return np.frombuffer(path.read_bytes(), np.uint8)


def split(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first nine tenths, for training, and the rest, for validation."""
    at = int(TRAINED_SHARE * len(text))
    return text[:at], text[at:]


def starts(seed: int, step: int, *, batch: int, seq: int, length: int) -> np.ndarray:
    """Start offsets in the text of the rows of a step's batch, ``[batch]``: drawn uniformly, with replacement.

    Args:
        seed: Seed of the run.
        step: Index of the step, from 0.
        batch: Rows over all devices.
        seq: Tokens in a row; its targets extend one further.
        length: Length of the text.

    Raises:
        ValueError: The text is too short for a row.
    """
    require_row(length, seq)
    return np.random.default_rng((seed, step)).integers(0, length - seq, batch)


def require_row(length: int, seq: int) -> None:
    """Raise ``ValueError`` for a text without a row of ``seq`` tokens and the token after it."""
    if length <= seq:
        raise ValueError(f"the text has {length:,} bytes, and a row takes {seq + 1:,}: use a shorter sequence")


def rows(text: np.ndarray, at: np.ndarray, seq: int) -> dict[str, np.ndarray]:
    """``inputs`` and ``targets``, ``[len(at), seq]``, int32: each target is the byte after its input."""
    tokens = text[at[:, None] + np.arange(seq + 1)].astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def place(text: np.ndarray, at: np.ndarray, seq: int, mesh: Mesh, spec: PartitionSpec) -> Batch:
    """The batch whose rows begin at ``at``, ``[batch, seq]``, laid out over the mesh.

    Args:
        text: The bytes.
        at: Start offsets of all rows, the same in every process.
        seq: Tokens in a row.
        mesh: The mesh, over any number of processes.
        spec: Layout of the rows; it may split only the first dim.
    """
    sharding = NamedSharding(mesh, spec)
    rows_between = cache(lambda first, last: rows(text, at[first:last], seq))

    def block(name: str):
        def of(index: Any) -> np.ndarray:
            first, last, _ = index[0].indices(len(at))
            return rows_between(first, last)[name]

        return jax.make_array_from_callback((len(at), seq), sharding, of)

    return {name: block(name) for name in ("inputs", "targets")}


def evaluation_starts(length: int, *, batch: int, seq: int, most: int | None = None) -> Iterator[np.ndarray]:
    """Start offsets of the rows of each batch of an evaluation: consecutive rows, whole batches only.

    Args:
        length: Length of the validation text.
        batch: Rows per batch.
        seq: Tokens in a row.
        most: Maximum number of batches; by default, all.

    Raises:
        ValueError: There are too few rows for one batch.
    """
    row_starts = np.arange(0, length - seq, seq)
    count = len(row_starts) // batch
    if not count:
        raise ValueError(
            f"the validation text has {len(row_starts):,} rows of {seq:,} tokens, and a batch takes {batch:,}: use a "
            "smaller batch or a shorter sequence"
        )
    yield from row_starts[: (count if most is None else min(count, most)) * batch].reshape(-1, batch)


def bigram_loss(trained: np.ndarray, held_out: np.ndarray, *, smoothing: float = 0.01) -> float:
    """The loss of a model that knows only the previous byte, on each byte of ``held_out``, in nats.

    Its probabilities are the counts of pairs in ``trained``, with ``smoothing`` added to each of the 65,536.

    Args:
        trained: Bytes to count in, ``[length]``.
        held_out: Bytes to predict, each from the previous one.
        smoothing: Count of a pair that never occurred.
    """
    pairs = trained[:-1].astype(np.int64) * VOCAB + trained[1:]
    counts = np.bincount(pairs, minlength=VOCAB**2).reshape(VOCAB, VOCAB) + smoothing
    log_probs = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(np.mean(log_probs[held_out[:-1], held_out[1:]]))
