"""An oracle is trusted once its gradients are those of its loss, by central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from autograder.contract.task import Task


def check(
    task: Task,
    place: str,
    wrt: str,
    loss: Callable[[dict[str, Any], dict[str, Any]], Any],
    gradients: Callable[[dict[str, Any]], Any] = lambda expected: expected["gradients"],
    one: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda gradient, leaf: gradient,
    *,
    seed: int = 0,
    step: float = 5e-3,
    rel: float = 1e-2,
    least: float = 1e-4,
) -> None:
    """Compare the largest element of each leaf's gradient with a central difference of ``loss``.

    Args:
        task: Whose oracle it is.
        place: The name of one of its cases.
        wrt: The input that is moved.
        loss: ``(values, inputs) ->`` the scalar that the oracle's gradients are of.
        gradients: Takes a tree like the input from what the oracle gives.
        one: ``(gradient, leaf) ->`` the gradient in the leaf's shape, where each device has a copy or a share.
        seed: Of the draw.
        step: How far elements are moved either way.
        rel: The largest relative error.
        least: The largest absolute error, where that is larger.
    """
    case = next(case for case in task.cases if case.name == place)
    inputs = task.draw(np.random.default_rng(seed), case)
    leaves = dict(jax.tree.leaves_with_path(inputs[wrt]))

    def moved(path: Any, at: Any, by: float) -> float:
        leaf = np.array(leaves[path])
        leaf[at] += by
        tree = jax.tree.map_with_path(lambda p, x: leaf if p == path else x, inputs[wrt])
        changed = {**inputs, wrt: tree}
        return float(np.mean(loss(task.oracle(changed, case)["values"], changed), dtype=np.float64))

    for path, gradient in jax.tree.leaves_with_path(gradients(task.oracle(inputs, case))):
        gradient = one(gradient, leaves[path])
        at = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        difference = (moved(path, at, step) - moved(path, at, -step)) / (2 * step)
        assert gradient[at] == pytest.approx(difference, rel=rel, abs=least), path
