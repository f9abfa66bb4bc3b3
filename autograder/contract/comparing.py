"""Compare results: the scale of errors, the effect of rounding, and the shapes on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autograder.contract.diagnosis.layout import rank_of
from autograder.contract.task import Evidence


def is_under(leaf: str, prefix: str) -> bool:
    """Return True if a leaf has this name, or is in the tree with this name."""
    return leaf == prefix or leaf.startswith(prefix + "/")


def difference(measured: np.ndarray | None, expected: np.ndarray) -> float:
    """The largest difference between two arrays; infinite if one is missing, or their shapes or dtypes differ."""
    if measured is None or (measured.shape, measured.dtype) != (expected.shape, expected.dtype):
        return math.inf
    return float(np.max(np.abs(measured.astype(np.float64) - expected.astype(np.float64)), initial=0))


def is_right(e: Evidence, leaf: str, tolerance: float) -> bool:
    """Return True if a leaf equals the oracle's within ``tolerance`` and the effect of rounding."""
    return difference(e.measured.get(leaf), e.expected[leaf]) <= tolerance * scale_of(e, leaf) + rounding(e, leaf)


def rounding(e: Evidence, leaf: str) -> float:
    """The largest distance between two right gradients read off updates, as (before - after) / learning rate.

    A step rounds each parameter to float32. Sums in different orders give gradients that differ in their last digits,
    and two such steps can round a parameter to neighbouring numbers: their updates are then one spacing apart. The
    spacing at the leaf's largest parameter counts once for each step.
    """
    kind, _, inner = leaf.partition("/")
    if kind != "gradients" or "learning_rate" not in e.drawn or not np.any(e.expected[leaf]):
        return 0.0  # an update of zero changes nothing, and is read exactly
    after = [a for n, a in e.expected.items() if is_under(n, "values") and n.endswith(f"/{inner}") and a.size]
    largest = max((float(np.max(np.abs(a))) for a in after if a.shape == e.expected[leaf].shape), default=0.0)
    steps = getattr(e.case.sizes, "steps", 1)
    return steps * float(np.spacing(np.float32(largest))) / float(e.drawn["learning_rate"])


def scale_of(e: Evidence, leaf: str) -> float:
    """The scale of a leaf's errors: its largest element or, for a gradient of zero, the norm of all gradients.

    Such a gradient may be a sum of terms that cancel. Rounding then leaves a share of them, which grows as the square
    root of their number.
    """
    if is_under(leaf, "gradients") and not np.any(e.expected[leaf]):
        return max(norm(e, e.expected, "gradients"), 1e-30)
    return max(float(np.max(np.abs(e.expected[leaf]), initial=0)), 1e-30)


def norm(e: Evidence, arrays: Mapping[str, np.ndarray], prefix: str) -> float:
    """The norm over all leaves under ``prefix``; a leaf that all devices have counts once."""
    leaves = ((np.sum(np.square(a, dtype=np.float64)), n) for n, a in arrays.items() if is_under(n, prefix))
    return float(np.sqrt(sum(squares / _copies(e, name) for squares, name in leaves)))


def _copies(e: Evidence, leaf: str) -> int:
    """The number of equal copies of a leaf, one from each device, along dims before its own; 1 if it is split."""
    rank, expected = rank_of(e, leaf), e.expected.get(leaf)
    if rank is None or expected is None or expected.ndim <= rank:
        return 1
    first = expected[(slice(1),) * (expected.ndim - rank)]
    count = math.prod(expected.shape[: expected.ndim - rank])
    return count if count and np.array_equal(expected, np.broadcast_to(first, expected.shape)) else 1


def shapes_on_a_device(e: Evidence, leaf: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a leaf on each device, as the learner sees it, and the shape that it should have there.

    Both are shapes of all devices together if the contract has put several devices' results into one array, or if a
    leaf has the right parts along another dim.
    """
    measured, expected = e.measured[leaf].shape, e.expected[leaf].shape
    output = next((output for output in e.outputs if output.name == leaf and output.shape == measured), None)
    if output is None or len(measured) != len(expected):
        return measured, expected
    measured_local, expected_local = (
        output.local_shape(e.case.mesh),
        replace(output, shape=expected).local_shape(e.case.mesh),
    )
    parts = [dim // local if local else 0 for dim, local in zip(measured, measured_local, strict=True)]
    if any(local * count != dim for local, count, dim in zip(expected_local, parts, expected, strict=True)):
        return measured, expected
    rank = rank_of(e, leaf)
    front = (
        max(len(measured) - rank, 0)
        if rank is not None
        else int(measured_local[:1] == expected_local[:1] == (1,) != measured[:1])
    )
    return (
        (measured_local[front:], expected_local[front:])
        if measured_local[front:] != expected_local[front:]
        else (measured, expected)
    )
