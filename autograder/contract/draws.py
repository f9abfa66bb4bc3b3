"""What contracts draw: the meshes of cases, those that nobody has seen, and the inputs. The sandbox never has it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.contract.cases import axis_size
from autograder.contract.task import Case
from course.data import regression_batch, token_batch

_LETTERS = list("abcdefghijklmnopqrstuvwxyz")

# Sizes that no power of two divides much, for functions that work for any.
ODD = ((3,), (5,), (6,), (3, 2))
_MODELS = (
    {"width": 24, "hidden": 40, "num_layers": 2, "features": 6, "rows": 12},
    {"width": 12, "hidden": 24, "num_layers": 4, "features": 10, "rows": 24},
    {"width": 12, "hidden": 20, "num_layers": 3, "num_heads": 3, "vocab": 24, "seq": 6, "rows": 12},
)


def axis_names(rng: np.random.Generator, count: int) -> list[str]:
    """Names of axes that no learner's code can have met: six letters each."""
    return ["".join(rng.choice(_LETTERS, 6)) for _ in range(count)]


def meshes(sizes: dict[str, int], two: dict[str, int] | None = None) -> tuple[Case, ...]:
    """The meshes that most functions are run on, two of them in a quick check; ``two`` are other sizes for ``data=2``.

    The first is the smallest that shows every fact.
    """
    return (
        Case("data=8", {"data": 8}, sizes, quick=True),
        Case("pipe=4 x tensor=2", {"pipe": 4, "tensor": 2}, sizes, quick=True),
        Case("data=2", {"data": 2}, two or sizes),
        Case("data=1", {"data": 1}, sizes),
    )


def unseen_mesh(rng: np.random.Generator, *sizes: tuple[int, ...]) -> dict[str, int]:
    """A mesh that learners have not seen, the axis to work over first: no name of its axes is known before.

    Args:
        rng: Draws it.
        sizes: Of the axes, to draw from, such as ``ODD``, in place of the usual powers of two.
    """
    every = sizes or ((4,), (2, 2), (2, 4), (4, 2), (8,))
    drawn = every[rng.integers(len(every))]
    return dict(zip(axis_names(rng, len(drawn)), drawn, strict=True))


def unseen_model(rng: np.random.Generator) -> dict[str, int]:
    """Sizes of a model and rows a device, none of them a public case's; one model in three is a Transformer."""
    return dict(_MODELS[rng.integers(len(_MODELS))])


def flows_back(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """What flows back into losses: further from one than any tolerance, so that nobody passes who takes it for one."""
    return np.asarray(rng.uniform(1.5, 3, shape), np.float32)


def draw_leaves(rng: np.random.Generator, tree: Any, scale: float = 1.0) -> Any:
    """Normal numbers in the shapes and dtypes of ``tree``."""
    return jax.tree.map(lambda s: np.asarray(scale * rng.standard_normal(s.shape), s.dtype), tree)


def batch_of(case: Case, seed: int) -> dict[str, np.ndarray]:
    """A batch with ``rows`` for each device of the axis."""
    s, rows = case.sizes, case.sizes["rows"] * axis_size(case)
    if "seq" in s:
        return token_batch(seed, 0, batch=rows, seq=s["seq"], vocab=s["vocab"])
    return regression_batch(seed, 0, batch=rows, num_inputs=s["features"], num_outputs=s["features"])
