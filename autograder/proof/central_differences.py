"""Check an oracle's gradients against central differences of its loss."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
import pytest

from autograder.contract.task import Case, Task


def places(*every: Any, least: int = 1) -> tuple[Any, ...]:
    """Cases on which an oracle is checked: the first ``least`` of these, or all if ``MESHCRAFT_FULL`` is set."""
    return every if os.environ.get("MESHCRAFT_FULL") else every[:least]


def case_of(task: Task, place: str) -> Case[Any]:
    """The task's first case whose name begins with ``place``."""
    return next(case for case in task.cases if case.name.startswith(place))


def realistic(task: Task) -> Case[Any]:
    """The task's case of realistic size."""
    assert task.at_scale
    return task.at_scale[0]


def summed(gradient: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    """The gradient of a whole leaf from the shares ``[..., *leaf.shape]`` that devices have of it."""
    return gradient.reshape(-1, *leaf.shape).sum(0)


def same(copies: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    """One of the copies ``[..., *leaf.shape]``, which must be equal."""
    copies = copies.reshape(-1, *leaf.shape)
    assert all(np.array_equal(copy, copies[0]) for copy in copies), "copies differ"
    return copies[0]


def returned(values: Any, inputs: dict[str, Any]) -> float:
    """The inner product of the values and their cotangents."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(inputs["upstream"]), strict=True)
    return sum(float(np.vdot(np.float64(value), upstream)) for value, upstream in pairs)


def check(
    task: Task,
    place: str,
    wrt: str | tuple[str, ...],
    loss: Callable[[Any, dict[str, Any]], Any] = returned,
    gradients: Callable[[Any], Any] = lambda gradients: gradients,
    one: Callable[[np.ndarray, np.ndarray], np.ndarray] = summed,
    *,
    step: float = 5e-3,
    rel: float = 1e-2,
    least: float = 1e-4,
    double: bool = False,
) -> None:
    """Compare the largest element of each leaf's gradient with a central difference of ``loss``.

    Args:
        task: The task whose oracle is checked.
        place: Prefix of the name of one of its cases.
        wrt: The perturbed input, or several.
        loss: ``(values, inputs) ->`` the scalar, or the array whose mean is taken, that the oracle differentiates.
        gradients: Converts the oracle's results to a tree like the input, or a dict of such trees for several inputs.
        one: ``(gradient, leaf) ->`` the gradient in the leaf's shape, if each device has a copy or a share.
        step: Perturbation of elements in each direction.
        rel: The largest relative error.
        least: The largest absolute error, if that is larger.
        double: Compute the oracle in float64, which permits a ``step`` so small that no token of a mixture of experts
            changes its expert.
    """
    case = case_of(task, place)
    inputs = task.draw(np.random.default_rng(0), case)
    if double:
        inputs = jax.tree.map(lambda x: np.float64(x) if np.result_type(x) == np.float32 else x, inputs)
    tree = inputs[wrt] if isinstance(wrt, str) else {name: inputs[name] for name in wrt}
    leaves = dict(jax.tree.leaves_with_path(tree))

    def moved(path: Any, at: Any, by: float) -> float:
        leaf = np.array(leaves[path])
        leaf[at] += by
        perturbed = jax.tree.map_with_path(lambda p, x: leaf if p == path else x, tree)
        changed = {**inputs, **({wrt: perturbed} if isinstance(wrt, str) else perturbed)}
        return float(np.mean(loss(task.oracle(changed, case)["values"], changed), dtype=np.float64))

    with ExitStack() as stack:
        if double:
            stack.enter_context(jax.enable_x64(True))
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
        gradient_leaves = jax.tree.leaves_with_path(gradients(task.oracle(inputs, case)["gradients"]))
        assert {path for path, _ in gradient_leaves} == set(leaves)
        for path, gradient in gradient_leaves:
            gradient = one(gradient, leaves[path])
            at = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
            difference = (moved(path, at, step) - moved(path, at, -step)) / (2 * step)
            assert gradient[at] == pytest.approx(difference, rel=rel, abs=least), path
