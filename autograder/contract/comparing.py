"""What results are compared with: the scale of errors, what rounding may do, and shapes that a device sees."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from autograder.contract.diagnosis.misplaced import rank_of
from autograder.contract.task import Evidence


def is_under(leaf: str, prefix: str) -> bool:
    """Whether a leaf has that name, or is in the tree of that name."""
    return leaf == prefix or leaf.startswith(prefix + "/")


def difference(measured: np.ndarray | None, expected: np.ndarray) -> float:
    """The largest difference of two arrays; infinite if one is missing, or of another shape or dtype."""
    if measured is None or (measured.shape, measured.dtype) != (expected.shape, expected.dtype):
        return math.inf
    return float(np.max(np.abs(measured.astype(np.float64) - expected.astype(np.float64)), initial=0))


def is_right(e: Evidence, leaf: str, tolerance: float) -> bool:
    """Whether a leaf equals the oracle's up to ``tolerance`` and to what rounding may do."""
    return difference(e.measured.get(leaf), e.expected[leaf]) <= tolerance * scale_of(e, leaf) + rounding(e, leaf)


def rounding(e: Evidence, leaf: str) -> float:
    """How far apart two right gradients can be if they are read off updates, as (before - after) / learning rate.

    A step rounds each parameter to float32. Sums in different orders give gradients that differ in their last digits,
    and two such steps may round a parameter to neighbouring numbers: their updates are then one spacing apart. The
    spacing is that of the leaf's largest parameter, once for each step.
    """
    kind, _, inner = leaf.partition("/")
    if kind != "gradients" or "learning_rate" not in e.drawn or not np.any(e.expected[leaf]):
        return 0.0  # an update of zero changes nothing, and is read exactly
    after = [a for n, a in e.expected.items() if is_under(n, "values") and n.endswith(f"/{inner}") and a.size]
    largest = max((float(np.max(np.abs(a))) for a in after if a.shape == e.expected[leaf].shape), default=0.0)
    steps = getattr(e.case.sizes, "steps", 1)
    return steps * float(np.spacing(np.float32(largest))) / float(e.drawn["learning_rate"])


def scale_of(e: Evidence, leaf: str) -> float:
    """What a leaf's errors are relative to: its largest element; for a gradient of zero, the norm of all gradients.

    Such a gradient may be a sum of terms that cancel. Rounding then leaves a share of them, which grows as the root of
    their number does.
    """
    if is_under(leaf, "gradients") and not np.any(e.expected[leaf]):
        return max(norm(e, e.expected, "gradients"), 1e-30)
    return max(float(np.max(np.abs(e.expected[leaf]), initial=0)), 1e-30)


def norm(e: Evidence, arrays: Mapping[str, np.ndarray], prefix: str) -> float:
    """The norm over all leaves under ``prefix``, in which a leaf that all devices have counts once."""
    leaves = ((np.sum(np.square(a, dtype=np.float64)), n) for n, a in arrays.items() if is_under(n, prefix))
    return float(np.sqrt(sum(squares / _copies(e, name) for squares, name in leaves)))


def _copies(e: Evidence, leaf: str) -> int:
    """How many equal copies of a leaf there are, one from each device, along dims before its own; 1 if it is split."""
    rank, expected = rank_of(e, leaf), e.expected.get(leaf)
    if rank is None or expected is None or expected.ndim <= rank:
        return 1
    first = expected[(slice(1),) * (expected.ndim - rank)]
    count = math.prod(expected.shape[: expected.ndim - rank])
    return count if count and np.array_equal(expected, np.broadcast_to(first, expected.shape)) else 1


def shapes_on_a_device(e: Evidence, leaf: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a leaf on each device, where the learner sees it, and what it should be there.

    They are those of all devices together if the contract has put several devices' results into one array, or where a
    leaf has the right parts along another dim.
    """
    found, wanted = e.measured[leaf].shape, e.expected[leaf].shape
    output = next((output for output in e.outputs if output.name == leaf and output.shape == found), None)
    if output is None or len(found) != len(wanted):
        return found, wanted
    here, right = output.local_shape(e.case.mesh), replace(output, shape=wanted).local_shape(e.case.mesh)
    parts = [dim // local if local else 0 for dim, local in zip(found, here, strict=True)]
    if any(local * count != dim for local, count, dim in zip(right, parts, wanted, strict=True)):
        return found, wanted
    rank = rank_of(e, leaf)
    front = max(len(found) - rank, 0) if rank is not None else int(here[:1] == right[:1] == (1,) != found[:1])
    return (here[front:], right[front:]) if here[front:] != right[front:] else (found, wanted)
