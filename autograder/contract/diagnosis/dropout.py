"""Wrong results that dropout explains: masks that agree by chance, or that are right while the rest is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from autograder.contract.comparing import is_right
from autograder.contract.diagnosis.factors import FEW
from autograder.contract.sentence import About, Sentence
from autograder.contract.task import Evidence

# Elements of dropout masks agree by chance: two masks of rate r agree on r² + (1 - r)² of their elements.
_BY_CHANCE = (0.1, 0.95)
RIGHT_MASKS = "What is dropped is right, so the masks are right, too; what is not dropped is wrong."
KEYS = "is each mask drawn in the specified shape, and from the specified key: of which device, microbatch and layer?"
# With at least this many dropped elements, a statement about masks is more than chance.
_ENOUGH = 8


def question(
    cause: Sentence, hint: str, wrong: Iterable[Evidence], right: Iterable[Evidence], nothing_right: bool
) -> Sentence:
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
        return Sentence(hint.strip())
    wrong_drops, right_drops = (list(map(drops, cases)) for cases in (wrong, right))
    only = all(wrong_drops) and not all(right_drops)
    if About.MASKS in cause.about:
        return Sentence("It is right in every case without dropout." if only else "")
    if only and not any(right_drops):
        return Sentence(f"It is right in every case without dropout and wrong with it: {KEYS}")
    if only:
        return Sentence(f"It is right in every case without dropout: {KEYS} {hint}".strip())
    if {About.ROUNDING, About.SUM_OR_MEAN, About.ADDED} & {*cause.about}:
        return Sentence()
    if all(wrong_drops) and not right_drops and not cause and nothing_right:
        return Sentence(f"{hint.strip()} There is dropout in every case here: {KEYS}".strip(), (About.ALWAYS_DROPS,))
    return Sentence(hint.strip())


def drops(e: Evidence) -> bool:
    """Return True if the function is given a key, for dropout."""
    return bool(getattr(e.case.sizes, "dropout", 0)) and any(leaf.name.split("/")[0] == "key" for leaf in e.inputs)


def fails_without(every: Sequence[Evidence], tolerance: float) -> bool:
    """Return True if anything is wrong in a case without dropout, which no mask explains."""
    return any(not is_right(e, leaf, tolerance) for e in every if not drops(e) for leaf in e.expected)


def as_dropped(e: Evidence, expected: np.ndarray, right: np.ndarray, near: float) -> Sentence:
    """Report that exactly the dropped elements are right: dropping leaves zero or an input."""
    for before in (np.zeros(()), *(a for a in e.drawn.values() if a.shape == expected.shape)):
        dropped, mixed = np.abs(expected - before) <= near, np.ones(expected.shape, bool)
        for dim, size in enumerate(expected.shape if expected.ndim > 1 else ()):
            if size >= FEW:  # a row that nothing reads is entirely zero; dropout leaves something in each row
                mixed &= ~np.all(dropped, axis=dim, keepdims=True)
        dropped, same = dropped[mixed], right[mixed]
        if np.sum(dropped) >= _ENOUGH and np.sum(dropped & same) > 0.99 * np.sum(dropped | same):
            return Sentence(RIGHT_MASKS, (About.RIGHT_MASKS,))
    return Sentence()


def mixed(right: np.ndarray) -> Sentence:
    """Report right and wrong elements mixed along every dim with errors, as two dropout masks agree by chance."""
    wrong = (np.any(~right, axis=tuple(d for d in range(right.ndim) if d != dim)) for dim in range(right.ndim))
    right = right[np.ix_(*map(np.flatnonzero, wrong))]
    share, dims = float(np.mean(right)), [dim for dim in range(right.ndim) if right.shape[dim] > 1]
    if not dims or not _BY_CHANCE[0] < share < _BY_CHANCE[1]:
        return Sentence()
    lines = (np.mean(right, axis=tuple(other for other in range(right.ndim) if other != dim)) for dim in dims[-2:])
    if not all(np.mean((line > 0) & (line < 1)) > 0.5 for line in lines):
        return Sentence()
    text = f"{share:.0%} of its elements are right, here and there, as two masks of dropout agree by chance: {KEYS}"
    return Sentence(text, (About.MASKS,))
