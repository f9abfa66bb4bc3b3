"""Closed forms that several chapters' contracts share. They are answers: no sandbox shows them."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from course.program.program import path_name


def split_spec(shape: tuple[int, ...], size: int, min_size: int, axis: str | tuple[str, ...], skip: int = 0) -> P:
    """The spec of a leaf that is split as the chapter ``fsdp`` does it: its largest dim that ``size`` divides.

    Args:
        shape: Of the whole leaf.
        size: Of the axis.
        min_size: Leaves with fewer elements stay whole.
        axis: The axis's name, or those of several that split one dim together.
        skip: So many of the first dims are never split: those that stack layers.
    """
    dims = [d for d in range(skip, len(shape)) if shape[d] % size == 0]
    if math.prod(shape) < min_size or not dims:
        return P()
    largest = max(dims, key=lambda d: (shape[d], -d))
    return P(*[None] * largest, axis)


def as_given(specs: Any) -> dict[str, Any]:
    """A tree of specs as plain data, by the leaf's path: ``Task.given`` of a function that is given them."""
    return {"specs": {path_name("", path): list(spec) for path, spec in jax.tree.leaves_with_path(specs)}}


def ring(devices: int, size: float) -> float:
    """What each of ``devices`` sends in an all-reduce of ``size`` bytes, or in a scatter and a gather of them."""
    return 2 * (devices - 1) / devices * size


def reduced_once(stages: int, pipelines: int, ends: int, layers: int) -> tuple[float, float]:
    """The least and the most bytes that a device all-reduces in a step of pipelines beside each other.

    Args:
        stages: Of a pipeline.
        pipelines: How many there are.
        ends: Bytes of embedding and head, whose gradient each stage has a share of.
        layers: Bytes of one stage's layers.

    Returns:
        Embedding and head over all devices at once, and no single numbers; and over the stages, then over the
        pipelines, with the loss in both and how much counts in the latter.
    """
    together = ring(stages * pipelines, ends) + ring(pipelines, layers)
    return together, ring(stages, ends + 4) + ring(pipelines, ends + 8 + layers)
