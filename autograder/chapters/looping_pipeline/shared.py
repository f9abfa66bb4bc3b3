"""What the judges of ``looping_pipeline`` share: ticks, layers in order, and meshes that nobody has seen."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.contract.cases import stages_of
from autograder.contract.draws import axis_names
from autograder.contract.task import Case
from course.schedules import num_ticks


def unseen_mesh(rng: np.random.Generator, sizes: tuple[tuple[int, ...], ...]) -> dict[str, int]:
    """One of these meshes with names that learners have not seen, the axis of stages last."""
    some = sizes[rng.integers(len(sizes))]
    return dict(zip(axis_names(rng, len(some)), some, strict=True))


def ticks_of(case: Case) -> int:
    """Of a forward pass."""
    return num_ticks(stages_of(case), case.sizes["num_microbatches"], case.sizes["num_repeats"])


def in_a_row(layers: Any) -> Any:
    """Layers as one device has them, ``[num_layers, ...]``."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), layers)


def as_stages(layers: Any, case: Case) -> Any:
    """The other way."""
    stack = (case.sizes["num_repeats"], stages_of(case), case.sizes["layers_per_stage"])
    return jax.tree.map(lambda leaf: np.reshape(leaf, (*stack, *leaf.shape[1:])), layers)
