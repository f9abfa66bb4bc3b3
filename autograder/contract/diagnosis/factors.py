"""Wrong results that are all off by one factor: the factor, and the sizes of the case that are equal to it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from autograder.contract.case import Case
from autograder.contract.sentence import About, Sentence
from autograder.contract.task import Evidence
from autograder.contract.text import join_words, short

# Sums in another order, narrow dtypes and approximations are off by less than this fraction of the largest element.
ROUNDED = 4e-3
# With at least this many distinct numbers, a leaf is an array rather than a loss on each device.
FEW = 4
# Other counts that a mean may be taken over, named if no axis has that size.
_COUNTS = {
    "rows": "there are as many rows",
    "k": "every token has as many choices",
    "num_experts": "there are as many experts",
    "tokens": "there are as many tokens",
}
# Axes of the same role in different cases.
_ROLES = {"replica": "data", "stage": "pipe", "model": "tensor"}


def times(ratio: float) -> str:
    """A ratio in words; one near 1 is expressed as a difference."""
    if abs(ratio - 1) < 1e-2:
        return f"off by {abs(ratio - 1):.2g} times what it should be"
    return f"{short(ratio)} times what it should be"


def having(
    size: float, case: Case[Any], others: Iterable[tuple[Case[Any], float]] = (), every: Iterable[Case[Any]] = ()
) -> str:
    """The quantities of a case with that size: axes, alone or combined, or the number of microbatches; may be empty.

    ``others`` are cases with the size that the same quantity must have there; a quantity that differs in any of them is
    left out, unless that leaves nothing. Axes that most cases of ``every`` have come first: the function is about them.
    """
    mesh, others, every = case.mesh, list(others), list(every)
    axes = [axis for axis in mesh if mesh[axis] > 1]
    known = [
        group
        for count in range(1, len(axes) + 1)
        for group in combinations(axes, count)
        if abs(math.prod(mesh[axis] for axis in group) / size - 1) < 1e-3
    ]
    groups = [
        group for group in known if all(abs(_together(group, x) / other_size - 1) < 1e-3 for x, other_size in others)
    ]
    microbatches = abs(getattr(case.sizes, "num_microbatches", 0) / size - 1) < 1e-3
    as_many = microbatches and all(abs(x.sizes.num_microbatches / other_size - 1) < 1e-3 for x, other_size in others)
    if not groups and not as_many:
        groups, as_many = known, microbatches
    alone = sorted(
        (group[0] for group in groups if len(group) == 1),
        key=lambda axis: sum(_together([axis], other) == 1 for other in every),
    )
    together = [join_words(map(repr, group)) for group in groups if len(group) > 1]
    matches = [f"axis {' or '.join(map(repr, alone))} has that size"] if alone else []
    matches += [f"axes {', or '.join(together)} together have that size"] if together else []
    if as_many:
        matches.append("there are as many microbatches")
    for name, text in _COUNTS.items():
        if not matches and abs(getattr(case.sizes, name, 0) / size - 1) < 1e-3:
            matches.append(text)
    return ", or ".join(matches)


def factor(
    measured: np.ndarray,
    expected: np.ndarray,
    case: Case[Any],
    others: Sequence[tuple[Case[Any], float]],
    every: Sequence[Case[Any]],
) -> Sentence:
    """Describe the one factor that the whole leaf is off by, since that says most about the cause.

    Any two numbers differ by some factor, so for losses, on any number of devices, it must equal a size of the case.
    """
    ratio = _ratio(measured, expected)
    if not ratio or np.max(np.abs(measured - ratio * expected)) > abs(ratio - 1) / 10 * np.max(np.abs(expected)):
        return Sentence()
    single = distinct(expected) < FEW
    whole = "It" if single else "All of it"
    if larger := having(ratio, case, others, every) if ratio > 1 else "":
        text = f"{whole} is {short(ratio)} times too large, and {larger}: sum or mean?"
        return Sentence(text, (About.SUM_OR_MEAN,))
    if smaller := having(1 / ratio, case, [(x, 1 / r) for x, r in others], every) if 0 < ratio < 1 else "":
        text = f"{whole} is {short(1 / ratio)} times too small, and {smaller}: mean or sum?"
        return Sentence(text, (About.SUM_OR_MEAN,))
    if abs(ratio + 1) < 1e-3:
        return Sentence(f"{whole} has the opposite sign.")
    return Sentence("" if single else f"All of it is {short(ratio)} times what it should be.")


def ratios(e: Evidence, leaf: str, every: Iterable[Evidence]) -> list[tuple[Case[Any], float]]:
    """The common factor of a leaf in each case that has one; it is 1 if the leaf is right with the same choices."""
    with_leaf = [e for e in every if leaf in e.measured and leaf in e.expected]
    sides = [(e.case, *(side[leaf].astype(np.float64) for side in (e.measured, e.expected))) for e in with_leaf]
    pairs = [(case, _ratio(a, b)) for case, a, b in sides if a.shape == b.shape]
    return [(x, r) for x, r in pairs if r and (abs(r - 1) > 1e-3 or _choices(x) == _choices(e.case))]


def distinct(expected: np.ndarray) -> int:
    """The approximate number of distinct values."""
    return len(np.unique(np.round(expected / np.max(np.abs(expected)), 4)))


def _together(axes: Iterable[str], case: Case[Any]) -> int:
    """The number of places on axes with the same roles in another case, whose mesh may name them differently."""
    sizes = {_ROLES.get(axis, axis): size for axis, size in case.mesh.items()}
    return math.prod(sizes.get(_ROLES.get(axis, axis), 1) for axis in axes)


def _ratio(measured: np.ndarray, expected: np.ndarray) -> float:
    """The common factor that a whole leaf is off by; 0 if there is none."""
    scale = float(np.max(np.abs(expected), initial=0))
    if not scale:
        return 0
    ratio = float(np.sum(measured * expected) / np.sum(np.square(expected)))
    off = np.max(np.abs(measured - ratio * expected))
    return 0 if abs(ratio) < 1e-6 or not off <= min(1e-3, max(abs(ratio - 1) / 10, 2e-5)) * scale else ratio


def _choices(case: Case[Any]) -> dict[str, Any]:
    """The entries of a case's sizes that are choices, such as whether something is split, or in which order."""
    return {name: value for name, value in vars(case.sizes).items() if isinstance(value, bool | str)}
