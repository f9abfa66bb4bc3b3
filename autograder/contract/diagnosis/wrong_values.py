"""Sentences on why a result is wrong, if its numbers reveal the cause; none contains a value of an array."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import jax.numpy as jnp
import numpy as np

from autograder.contract.case import Case
from autograder.contract.comparing import difference, is_under
from autograder.contract.diagnosis import dropout
from autograder.contract.diagnosis.factors import FEW, ROUNDED, distinct, factor, ratios
from autograder.contract.diagnosis.layout import layout
from autograder.contract.diagnosis.misplaced import where
from autograder.contract.sentence import About, Sentence
from autograder.contract.task import Evidence
from autograder.contract.text import join_words, short


def explain_values(e: Evidence, leaf: str, tolerance: float, every: Sequence[Evidence] = ()) -> Sentence:
    """Describe in a sentence what all wrong elements of a leaf have in common; empty if nothing.

    Args:
        e: The case that is described.
        leaf: The name of one of its results.
        tolerance: The allowed error, relative to the largest element.
        every: All cases, which may distinguish causes that this one alone does not.
    """
    measured, expected = (side[leaf].astype(np.float64) for side in (e.measured, e.expected))
    scale, errors = float(np.max(np.abs(expected), initial=0)), np.abs(measured - expected)
    if not scale:
        return Sentence()
    if not np.any(measured):
        return Sentence("All of it is zero." if measured.size > 1 else "It is zero.")
    right = errors <= tolerance * scale
    if by_factor := factor(measured, expected, e.case, ratios(e, leaf, every), [x.case for x in every]):
        return by_factor
    if not np.issubdtype(e.expected[leaf].dtype, np.floating):
        # Small integers agree by chance, so moved parts would be found where nothing has moved.
        return Sentence(
            _unwritten(measured, right) or _offset(measured - expected, right) or _at_one_place(e, leaf, right)
        )
    whereabouts = where(e, leaf, tolerance * scale)
    cause = (
        _unwritten(measured, right)
        or _first_step(e, leaf, right)
        or next(filter(None, (_off_by_an_input(x, leaf) for x in every or [e])), Sentence())
        or _elsewhere(measured, expected, tolerance * scale, e.case)
        or _alike(measured, expected, tolerance * scale, e.case)
        or _unrounded(measured, expected, right)
        or _rounded((measured - expected) / scale, expected)
        or _never_used(e, leaf)
        or (dropout.as_dropped(e, expected, right, tolerance * scale) if dropout.drops(e) else "")
        or (dropout.mixed(right) if dropout.drops(e) and not dropout.fails_without(every, tolerance) else "")
        or ("" if whereabouts or not np.any(expected[right]) else _at_one_place(e, leaf, right))
    )
    return (cause if isinstance(cause, Sentence) else Sentence(cause)).then(whereabouts)


def exchanged(e: Evidence, leaf: str, tolerance: float) -> str:
    """Report two results that have each other's values."""
    group, _, inner = leaf.partition("/")

    def near(measured: np.ndarray | None, expected: np.ndarray) -> bool:
        return difference(measured, expected) <= tolerance * float(np.max(np.abs(expected), initial=0))

    for other, expected in e.expected.items() if inner else ():
        if other == leaf or not is_under(other, group) or near(e.expected[leaf], expected):
            continue
        if near(e.measured.get(leaf), expected) and near(e.measured.get(other), e.expected[leaf]):
            names = f"`{inner}` and `{other.partition('/')[2]}`"
            return f"{names} have each other's values: in which order are they returned?"
    return ""


def explain_leaves(e: Evidence, wrong: Sequence[str], every: Sequence[str], *, asks: bool = True) -> str:
    """Name the wrong leaves of a case if there are several and others are right, and what they have in common.

    ``asks`` is False if the message already asks something else.
    """
    if len(wrong) < 2:
        return ""
    if len(wrong) == len(every):
        return f"{'Both' if len(every) == 2 else f'All {len(every)}'} leaves are wrong here."
    names = [leaf.partition("/")[2] for leaf in wrong]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    common = _in_common(e, wrong, every, asks)
    return f"{len(names)} of {len(every)} leaves are wrong here: {', '.join(names[:4])}{more}. {common}".strip()


def _in_common(e: Evidence, wrong: Sequence[str], every: Sequence[str], asks: bool) -> str:
    """Describe what tells wrong leaves from right ones: split leaves, or a part of the tree; empty if neither."""
    if set(wrong) == {leaf for leaf in every if _is_split(e, leaf)}:
        question = ": which part does each device take, or get?" if asks else "."
        return f"These are exactly the leaves that are split over devices{question}"
    right = [leaf for leaf in every if leaf not in wrong]
    whole = len(_path_of(every))
    under, only = "They are exactly those under `{}`.", "Only those under `{}` are right."
    for group, others, text in ((wrong, right, under), (right, wrong, only)):
        path = _path_of(group)
        if len(group) > 1 and len(path) > whole and not any(leaf.split("/")[: len(path)] == path for leaf in others):
            return text.format("/".join(path[1:]))
    return ""


def _path_of(leaves: Sequence[str]) -> list[str]:
    """The path, as a list of names, that all of these leaves share."""
    levels = zip(*(leaf.split("/")[:-1] for leaf in leaves), strict=False)
    return [names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels)]


def _is_split(e: Evidence, leaf: str) -> bool:
    """Return True if the function takes this leaf, of parameters, gradients or a state, in parts."""
    inner = leaf.partition("/")[2]
    tree, _, rest = inner.partition("/")
    path = rest if tree in {input_leaf.name.partition("/")[0] for input_leaf in e.inputs} else inner
    return any(any(input_leaf.spec) for input_leaf in e.inputs if path and f"/{input_leaf.name}".endswith(f"/{path}"))


def _unwritten(measured: np.ndarray, right: np.ndarray) -> str:
    """Report that every wrong element is zero, if some elements are right."""
    if np.all(right) or np.any(measured[~right]) or not np.any(measured[right]):
        return ""
    return "Wherever it is wrong it is zero: which part is never written, or never arrives?"


def _offset(off: np.ndarray, right: np.ndarray) -> str:
    """Report integers that are all off by the same number."""
    offsets = np.unique(off[~right])
    if len(offsets) != 1 or off.size < 2:
        return ""
    wrong = int(np.sum(~right))
    which = f"All {wrong:,} that are wrong are" if wrong > 1 else "The one that is wrong is"
    which = which if np.any(right) else "All of it is"
    return f"{which} {abs(offsets[0]):g} too {'large' if offsets[0] > 0 else 'small'}."


def _first_step(e: Evidence, leaf: str, right: np.ndarray) -> Sentence:
    """Report losses of several steps, along the last dim, if only the first is right."""
    name, steps = leaf.rpartition("/")[2], getattr(e.case.sizes, "steps", 0)
    of_steps = name == "losses" or (name == "loss" and steps > 1 and right.shape[-1:] == (steps,))
    if not of_steps or not right.ndim or not np.all(right[..., 0]):
        return Sentence()
    text = "The loss of step 0 is right, and later ones follow from the update: look at gradients and update first."
    return Sentence(text, (About.LATER_LOSSES,))


def _off_by_an_input(e: Evidence, leaf: str) -> Sentence:
    """Report a result whose rows are all off by a multiple of one vector among the inputs, such as a bias."""
    measured, expected = e.measured.get(leaf), e.expected.get(leaf)
    if measured is None or expected is None or measured.shape != expected.shape or expected.ndim < 2:
        return Sentence()
    if not np.all(np.isfinite(measured)) or not expected.size:
        return Sentence()
    rows = (measured.astype(np.float64) - expected).reshape(-1, expected.shape[-1])
    vectors = {n: np.asarray(v) for n, v in e.drawn.items() if np.shape(v) == rows.shape[1:] and len(v) >= FEW}
    for name, vector in vectors.items():
        if name.rpartition("/")[2] == leaf.rpartition("/")[2]:
            continue  # a moment of `bias`, say, is a multiple of its gradient
        times = float(np.sum(rows[0] * vector) / max(float(np.sum(np.square(vector, dtype=np.float64))), 1e-30))
        if abs(times) <= ROUNDED or np.max(np.abs(rows - times * vector)) > ROUNDED * np.max(np.abs(rows)):
            continue
        many = f"Every row is off by {short(times)} times `{name}`"
        text = f"{many}: is it added on each device before a sum, or once after it?"
        if abs(times + 1) < ROUNDED:
            text = f"Every row lacks `{name}`: where is it added?"
        if abs(times - 1) < ROUNDED:
            text = f"Every row is off by `{name}`, which is added once too often: where should it be added?"
        return Sentence(text, (About.ADDED,))
    return Sentence()


def _elsewhere(measured: np.ndarray, expected: np.ndarray, near: float, case: Case[Any]) -> str:
    if measured.size < 3 or np.max(np.abs(measured - expected)) < 10 * near:  # too small to be a misplacement
        return ""
    if np.max(np.abs(np.sort(measured, axis=None) - np.sort(expected, axis=None))) > near:
        return ""
    alone = math.prod(case.mesh.values()) == 1
    order = "in what order should they be" if alone else "in what order do the parts come, from which devices"
    return f"All its numbers are right, but in the wrong places: {order}?"


def _alike(measured: np.ndarray, expected: np.ndarray, near: float, case: Case[Any]) -> str:
    """Report parts along the first dim that are all equal: the mean or the sum of the expected parts."""
    length = measured.shape[0] if measured.ndim else 1
    for count in sorted({math.prod(case.mesh.values()), *case.mesh.values()}, reverse=True):
        if count < 2 or length % count:
            continue
        parts, expected_parts = (a.reshape(count, -1) for a in (measured, expected))
        if np.max(np.abs(parts - parts[0])) > near or np.max(np.abs(expected_parts - expected_parts[0])) <= near:
            continue
        for word, together in (("mean", np.mean), ("sum", np.sum)):
            if np.max(np.abs(parts[0] - together(expected_parts, axis=0))) <= near:
                return (
                    f"Its {count} parts along dim 0 are all the same, the {word} of what they should be: "
                    "should every device have its own?"
                )
    return ""


def not_finite(e: Evidence, measured: np.ndarray) -> Sentence:
    """Report how much of a leaf is infinite or NaN, and a mask that may be the cause."""
    nan, infinite = int(np.sum(np.isnan(measured))), int(np.sum(np.isinf(measured)))
    named = (nan, "NaN"), (infinite, "infinite")
    counts = [f"{number:,} {'is' if number == 1 else 'are'} {name}" for number, name in named if number]
    masked = any(leaf.name.endswith("mask") for leaf in e.inputs)
    asks = ""
    if masked and nan:
        asks = "The mask may be 0 everywhere on a device: what is divided by the unmasked count there?"
    if nan and not masked and hasattr(e.case.sizes, "num_microbatches"):
        asks = "Is anything that a stage computes in an idle tick used? Zero times NaN is NaN: leave it out."
    if getattr(e.case.sizes, "large", False):
        asks = "Inputs are large here, and exp(89) is infinite in float32: what is subtracted before an exponential?"
    text = f"of {measured.size:,} elements, {' and '.join(counts)}."
    if measured.size == 1:
        text = f"it is {'NaN' if nan else 'infinite'}."
    return Sentence(text, (About.NOT_FINITE,) if asks else ()).then(asks)


def _unrounded(measured: np.ndarray, expected: np.ndarray, right: np.ndarray) -> str:
    """Report wrong elements that are right once they are rounded to bfloat16."""
    values, expected_values = (a[~right].astype(np.float32) for a in (measured, expected))
    low = values.astype(jnp.bfloat16).astype(np.float32)
    if not values.size or np.any(low != expected_values):
        return ""
    return "These float32 numbers should have been rounded to bfloat16: where, and in which dtype, are they sent?"


def _rounded(errors: np.ndarray, expected: np.ndarray) -> Sentence:
    """Report small errors of both signs nearly everywhere."""
    sizes, up = np.abs(errors), float(np.mean(errors > 0))
    worst = float(np.max(sizes))
    if worst > ROUNDED or np.mean(sizes > worst / 100) < 0.5 or not 0.1 < up < 0.9 or distinct(expected) < FEW:
        return Sentence()
    text = f"All of it is off by a little, at most {worst:.1g} of the largest element: is something computed in lower "
    return Sentence(f"{text}precision, or by a formula that is only approximately the same?", (About.ROUNDING,))


def _never_used(e: Evidence, leaf: str) -> str:
    """Report a gradient that is zero throughout at some indices of a dim, on every device, and should not be."""
    leaf_layout = layout(e, leaf) if leaf.startswith("gradients") else None
    if leaf_layout is None:
        return ""
    measured, expected = (leaf_layout.of(side[leaf]) != 0 for side in (e.measured, e.expected))
    for dim in range(1, measured.ndim):
        others = tuple(other for other in range(measured.ndim) if other != dim)
        used, needed = np.any(measured, axis=others), np.any(expected, axis=others)
        if np.any(used) and np.any(needed & ~used):
            predicate = "zero throughout and should not be. Is what belongs there used, and does its gradient arrive?"
            return _along(np.logical_or(used, ~needed), 0, leaf_layout.local[dim - 1 :], predicate)
    return ""


def _at_one_place(e: Evidence, leaf: str, right: np.ndarray) -> str:
    """Locate the wrong elements: on some devices, or at few or contiguous indices of a device's own array."""
    leaf_layout = layout(e, leaf)
    if leaf_layout:
        own = leaf_layout.of(right) > 0
        wrong = np.any(~own, axis=tuple(range(1, own.ndim)))
        coordinates = [
            (axis, [i for i in range(size) if np.any(wrong[leaf_layout.coordinates(axis) == i])])
            for axis, size in e.case.mesh.items()
            if axis in leaf_layout.axes
        ]
        # A device that has only zeros, where zeros are right, shows nothing.
        used = np.any(leaf_layout.of(np.abs(e.expected[leaf])) > 0, axis=tuple(range(1, own.ndim)))
        many = {axis for axis, _ in coordinates if len(np.unique(leaf_layout.coordinates(axis)[used])) > 1}
        places = [f"{axis} {i[0]}" for axis, i in coordinates if len(i) == 1 and axis in many]
        devices_text = f"Only devices at {join_words(places)} are wrong." if places else ""
        return f"{devices_text} {_along(own[wrong], 1, leaf_layout.local)}".strip()
    return _along(right, 0, range(right.ndim))


def _along(right: np.ndarray, first: int, names: Sequence[int], predicate: str = "wrong.") -> str:
    """Name the wrong indices along the dim, from ``first`` on, where they are the smallest share."""
    candidates = []
    for dim in range(first, right.ndim):
        others = tuple(other for other in range(right.ndim) if other != dim)
        wrong = np.flatnonzero(~np.all(right, axis=others))
        if len(wrong) < right.shape[dim] and (len(wrong) < 5 or wrong[-1] - wrong[0] < len(wrong)):
            candidates.append((len(wrong) / right.shape[dim], dim, wrong))
    if not candidates:
        return ""
    _, dim, wrong = min(candidates, key=lambda candidate: candidate[:2])
    which = f"{wrong[0]} to {wrong[-1]}" if len(wrong) > 4 else join_words(map(str, wrong))
    places = f"index {which} is" if len(wrong) == 1 else f"indices {which} are"
    return f"Along dim {names[dim - first]} (of size {right.shape[dim]}), only {places} {predicate}"
