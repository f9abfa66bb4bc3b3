"""Closed forms that several chapters' contracts share. They are answers: no sandbox shows them."""

from __future__ import annotations

import math

from jax.sharding import PartitionSpec as P


def split_spec(shape: tuple[int, ...], size: int, min_size: int, axis: str, skip: int = 0) -> P:
    """The spec of a leaf that is split as the chapter ``fsdp`` does it: its largest dim that ``size`` divides.

    Args:
        shape: Of the whole leaf.
        size: Of the axis.
        min_size: Leaves with fewer elements stay whole.
        axis: The axis's name.
        skip: So many of the first dims are never split: those that stack layers.
    """
    dims = [d for d in range(skip, len(shape)) if shape[d] % size == 0]
    if math.prod(shape) < min_size or not dims:
        return P()
    largest = max(dims, key=lambda d: (shape[d], -d))
    return P(*[None] * largest, axis)
