"""Closed forms shared by several chapters' contracts. They are answers, so no sandbox contains them."""

from __future__ import annotations

import math

from jax.sharding import PartitionSpec as P


def split_spec(shape: tuple[int, ...], size: int, min_size: int, axis: str | tuple[str, ...], skip: int = 0) -> P:
    """The spec of a leaf split as in the chapter ``fsdp``: along its largest dim that ``size`` divides.

    Args:
        shape: Shape of the whole leaf.
        size: Size of the axis.
        min_size: Leaves with fewer elements stay whole.
        axis: The axis's name, or the names of several that split one dim together.
        skip: Number of leading dims that are never split: those that stack layers.
    """
    dims = [d for d in range(skip, len(shape)) if shape[d] % size == 0]
    if math.prod(shape) < min_size or not dims:
        return P()
    largest = max(dims, key=lambda d: (shape[d], -d))
    return P(*[None] * largest, axis)


def all_reduce_bytes(devices: int, size: float) -> float:
    """Bytes that each of ``devices`` sends to all-reduce ``size`` bytes, or to reduce-scatter and all-gather them."""
    return 2 * (devices - 1) / devices * size


def reduced_once(stages: int, pipelines: int, ends: int, layers: int) -> tuple[float, float]:
    """The least and the most bytes that a device all-reduces in a step of parallel pipelines.

    Args:
        stages: Number of stages of a pipeline.
        pipelines: Number of pipelines.
        ends: Bytes of embedding and head; each stage has a share of their gradient.
        layers: Bytes of one stage's layers.

    Returns:
        The least reduces embedding and head over all devices at once, and no scalars. The most reduces them over the
        stages, then over the pipelines, with the loss in both, and the valid count in the latter.
    """
    least = all_reduce_bytes(stages * pipelines, ends) + all_reduce_bytes(pipelines, layers)
    return least, all_reduce_bytes(stages, ends + 4) + all_reduce_bytes(pipelines, ends + 8 + layers)
