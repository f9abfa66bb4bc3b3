"""What dropout explains of wrong results: masks that agree by chance, or that are right where the rest is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from autograder.contract.comparing import is_right
from autograder.contract.diagnosis.factors import FEW
from autograder.contract.said import About, Said
from autograder.contract.task import Evidence

# Elements of dropout masks agree by chance: two masks of rate r agree on r² + (1 - r)² of their elements.
_BY_CHANCE = (0.1, 0.95)
RIGHT_MASKS = "What is dropped is right, so the masks are right, too; what is not dropped is wrong."
KEYS = "is each mask drawn in the specified shape, and from the specified key: of which device, microbatch and layer?"
# Dropped elements from which a statement about masks is more than chance.
_ENOUGH = 8


def question(cause: Said, hint: str, wrong: Iterable[Evidence], right: Iterable[Evidence], nothing_right: bool) -> Said:
    """The question to ask about a wrong leaf: about keys if dropout separates wrong from right cases, else the hint.

    Args:
        cause: From ``explain_values``.
        hint: The contract's default question.
        wrong: Cases in which any leaf is wrong.
        right: All other cases that have this leaf; a single-device case proves nothing if a multi-device one is wrong.
        nothing_right: True if no leaf, and no element of this one, is right, as when different units are dropped.
    """
    wrong, several = list(wrong), lambda e: math.prod(e.case.mesh.values()) > 1
    right = [e for e in right if several(e) or not all(map(several, wrong))]
    if About.RIGHT_MASKS in cause.about:
        return Said(hint.strip())
    dropped, kept = (list(map(drops, cases)) for cases in (wrong, right))
    only = all(dropped) and not all(kept)
    if About.MASKS in cause.about:
        return Said("It is right in every case without dropout." if only else "")
    if only and not any(kept):
        return Said(f"It is right in every case without dropout and wrong with it: {KEYS}")
    if only:
        return Said(f"It is right in every case without dropout: {KEYS} {hint}".strip())
    if {About.ROUNDING, About.SUM_OR_MEAN, About.ADDED} & {*cause.about}:
        return Said()
    if all(dropped) and not kept and not cause and nothing_right:
        return Said(f"{hint.strip()} There is dropout in every case here: {KEYS}".strip(), (About.ALWAYS_DROPS,))
    return Said(hint.strip())


def drops(e: Evidence) -> bool:
    """Return True if the function is given a key, for dropout."""
    return bool(getattr(e.case.sizes, "dropout", 0)) and any(leaf.name.split("/")[0] == "key" for leaf in e.inputs)


def without(every: Sequence[Evidence], tolerance: float) -> bool:
    """Whether anything is wrong in a case without dropout, which no mask explains."""
    return any(not is_right(e, leaf, tolerance) for e in every if not drops(e) for leaf in e.expected)


def as_dropped(e: Evidence, expected: np.ndarray, right: np.ndarray, near: float) -> Said:
    """Just those elements are right that are dropped, which leaves zero or an input."""
    for before in (np.zeros(()), *(a for a in e.drawn.values() if a.shape == expected.shape)):
        dropped, mixed = np.abs(expected - before) <= near, np.ones(expected.shape, bool)
        for dim, size in enumerate(expected.shape if expected.ndim > 1 else ()):
            if size >= FEW:  # a row that nothing reads is zero as a whole; dropout leaves something in each
                mixed &= ~np.all(dropped, axis=dim, keepdims=True)
        dropped, same = dropped[mixed], right[mixed]
        if np.sum(dropped) >= _ENOUGH and np.sum(dropped & same) > 0.99 * np.sum(dropped | same):
            return Said(RIGHT_MASKS, (About.RIGHT_MASKS,))
    return Said()


def masked(right: np.ndarray) -> Said:
    """Report right and wrong elements mixed along every dim with errors, as two dropout masks agree by chance."""
    wrong = (np.any(~right, axis=tuple(d for d in range(right.ndim) if d != dim)) for dim in range(right.ndim))
    right = right[np.ix_(*map(np.flatnonzero, wrong))]
    share, dims = float(np.mean(right)), [dim for dim in range(right.ndim) if right.shape[dim] > 1]
    if not dims or not _BY_CHANCE[0] < share < _BY_CHANCE[1]:
        return Said()
    lines = (np.mean(right, axis=tuple(other for other in range(right.ndim) if other != dim)) for dim in dims[-2:])
    if not all(np.mean((line > 0) & (line < 1)) > 0.5 for line in lines):
        return Said()
    text = f"{share:.0%} of its elements are right, here and there, as two masks of dropout agree by chance: {KEYS}"
    return Said(text, (About.MASKS,))
