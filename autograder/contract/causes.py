"""Sentences on why a result is wrong, if its numbers or bytes reveal the cause; none contains a value of an array."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from autograder.contract.case import Case
from autograder.contract.task import Evidence
from autograder.contract.verdict import LATER_LOSSES, listed
from autograder.contract.whereabouts import where
from course.program import Collective, Leaf

# If nearly all elements are off by less than this fraction of the largest, the formula is right and rounding differs.
ROUNDED = 1e-2
# With at least this many distinct numbers, a leaf is an array rather than a loss on each device.
FEW = 4
# Elements of dropout masks agree by chance: two masks of rate r agree on r² + (1 - r)² of their elements.
_BY_CHANCE = (0.1, 0.95)
ROUNDING = "All of it is off by a little"
KEYS = "is each mask drawn in the specified shape, and from the specified key: of which device, microbatch and layer?"
_NARROW = {"bf16": 2, "f16": 2}


def of_values(e: Evidence, leaf: str, tolerance: float) -> str:
    """Describe in a sentence what all wrong elements of a leaf have in common; empty if nothing."""
    measured, expected = (side[leaf].astype(np.float64) for side in (e.measured, e.expected))
    scale, errors = float(np.max(np.abs(expected), initial=0)), np.abs(measured - expected)
    if not scale:
        return ""
    if not np.any(measured):
        return "All of it is zero." if measured.size > 1 else "It is zero."
    right = errors <= tolerance * scale
    if factor := _factor(measured, expected, e.case):
        return factor
    whereabouts = where(e, leaf, tolerance * scale)
    cause = (
        _unwritten(measured, right)
        or _first_step(leaf, right)
        or _elsewhere(measured, expected, tolerance * scale)
        or _alike(measured, expected, tolerance * scale, e.case)
        or _rounded((measured - expected) / scale, expected)
        or (_masked(right) if _drops(e) else "")
        or ("" if whereabouts or not np.any(expected[right]) else _at_one_place(right))
    )
    return f"{cause} {whereabouts}".strip()


def question(cause: str, hint: str, wrong: Iterable[Evidence], right: Iterable[Evidence], nothing_right: bool) -> str:
    """The question to ask about a wrong leaf: about keys if dropout separates wrong from right cases, else the hint.

    Args:
        cause: From ``of_values``.
        hint: The contract's default question.
        wrong: Cases in which any leaf is wrong.
        right: All other cases that have this leaf; a single-device case proves nothing if a multi-device one is wrong.
        nothing_right: True if no leaf, and no element of this one, is right, as when different units are dropped.
    """
    wrong, several = list(wrong), lambda e: math.prod(e.case.mesh.values()) > 1
    right = [e for e in right if several(e) or not all(map(several, wrong))]
    dropped, kept = (list(map(_drops, cases)) for cases in (wrong, right))
    if all(dropped) and kept and not any(kept):
        return f"It is right in every case without dropout and wrong with it: {KEYS}"
    if KEYS in cause or cause.startswith(ROUNDING):
        return ""
    unsure = all(dropped) and not kept and not cause and nothing_right
    more = f"There is dropout in every case here: {KEYS}" if unsure else ""
    return f"{hint.strip()} {more}".strip()


def _drops(e: Evidence) -> bool:
    """Return True if the function is given a key, for dropout."""
    return bool(getattr(e.case.sizes, "dropout", 0)) and any(leaf.name.split("/")[0] == "key" for leaf in e.inputs)


def of_leaves(wrong: Sequence[str], every: Sequence[str]) -> str:
    """Name the wrong leaves of a case if there are several and others are right."""
    if len(wrong) < 2:
        return ""
    if len(wrong) == len(every):
        return f"{'Both' if len(every) == 2 else f'All {len(every)}'} leaves are wrong here."
    names = [leaf.partition("/")[2] for leaf in wrong]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"Wrong here are {len(names)} of {len(every)} leaves: {', '.join(names[:4])}{more}."


def times(ratio: float) -> str:
    """A ratio in words; one near 1 is expressed as a difference."""
    if abs(ratio - 1) < ROUNDED:
        return f"off by {abs(ratio - 1):.2g} of what it should be"
    return f"{ratio:.4g} times what it should be"


def having(size: float, case: Case[Any]) -> str:
    """The quantities of a case with that size: axes, alone or combined, or the number of microbatches; may be empty."""
    mesh = case.mesh
    axes = [axis for axis in mesh if mesh[axis] > 1]
    found = [
        some
        for count in range(1, len(axes) + 1)
        for some in combinations(axes, count)
        if abs(math.prod(mesh[axis] for axis in some) / size - 1) < 1e-3
    ]
    alone = [some[0] for some in found if len(some) == 1]
    together = [listed(map(repr, some)) for some in found if len(some) > 1]
    matches = [f"axis {' or '.join(map(repr, alone))} has that size"] if alone else []
    matches += [f"axes {', or '.join(together)} together have that size"] if together else []
    if abs(getattr(case.sizes, "num_microbatches", 0) / size - 1) < 1e-3:
        matches.append("there are as many microbatches")
    return ", or ".join(matches)


def _factor(measured: np.ndarray, expected: np.ndarray, case: Case[Any]) -> str:
    """The common factor that the whole leaf is off by, which is the strongest hint at the cause.

    Any two numbers differ by some factor, so for losses, on any number of devices, it must equal a size of the case.
    """
    ratio, scale = float(np.sum(measured * expected) / np.sum(np.square(expected))), float(np.max(np.abs(expected)))
    if abs(ratio) < 1e-6 or np.max(np.abs(measured - ratio * expected)) > min(1e-3, abs(ratio - 1) / 10) * scale:
        return ""
    single = _distinct(expected) < FEW
    whole = "It" if single else "All of it"
    if larger := having(ratio, case) if ratio > 1 else "":
        return f"{whole} is {ratio:.4g} times too large, and {larger}: sum or mean?"
    if smaller := having(1 / ratio, case) if 0 < ratio < 1 else "":
        return f"{whole} is {1 / ratio:.4g} times too small, and {smaller}: mean or sum?"
    if abs(ratio + 1) < 1e-3:
        return f"{whole} has the opposite sign."
    return "" if single else f"All of it is {ratio:.4g} times what it should be."


def _distinct(expected: np.ndarray) -> int:
    """The approximate number of distinct values."""
    return len(np.unique(np.round(expected / np.max(np.abs(expected)), 4)))


def _unwritten(measured: np.ndarray, right: np.ndarray) -> str:
    """Report that every wrong element is zero, if some elements are right."""
    if np.all(right) or np.any(measured[~right]) or not np.any(measured[right]):
        return ""
    return "Wherever it is wrong it is zero: which part is never written, or never arrives?"


def _first_step(leaf: str, right: np.ndarray) -> str:
    """Report losses of several steps of which only the first is right."""
    if leaf.rpartition("/")[2] != "losses" or right.ndim != 1 or not right[0]:
        return ""
    return f"{LATER_LOSSES}, and later ones follow from the update: look at gradients and update first."


def _elsewhere(measured: np.ndarray, expected: np.ndarray, near: float) -> str:
    if measured.size < 3 or np.max(np.abs(np.sort(measured, axis=None) - np.sort(expected, axis=None))) > near:
        return ""
    return "All its numbers are right, and not in their places: in which order do parts come, and from whom?"


def _alike(measured: np.ndarray, expected: np.ndarray, near: float, case: Case[Any]) -> str:
    """Report parts along the first dim that are all equal: the mean or the sum of the expected parts."""
    length = measured.shape[0] if measured.ndim else 1
    for count in sorted({math.prod(case.mesh.values()), *case.mesh.values()}, reverse=True):
        if count < 2 or length % count:
            continue
        found, wanted = (a.reshape(count, -1) for a in (measured, expected))
        if np.max(np.abs(found - found[0])) > near or np.max(np.abs(wanted - wanted[0])) <= near:
            continue
        for word, together in (("mean", np.mean), ("sum", np.sum)):
            if np.max(np.abs(found[0] - together(wanted, axis=0))) <= near:
                return (
                    f"Its {count} parts along dim 0 are all the same, the {word} of what they should be: "
                    "should every device have its own?"
                )
    return ""


def not_finite(e: Evidence, measured: np.ndarray) -> str:
    """Report how much of a leaf is infinite or NaN, and where a mask may be the cause."""
    nan, infinite = int(np.sum(np.isnan(measured))), int(np.sum(np.isinf(measured)))
    counts = [f"{number:,} {what}" for number, what in ((nan, "NaN"), (infinite, "infinite")) if number]
    masked = any(leaf.name.endswith("mask") for leaf in e.inputs)
    asks = " The mask may be 0 everywhere on a device: what is divided by what counts there?" if masked and nan else ""
    if nan and not masked and hasattr(e.case.sizes, "num_microbatches"):
        asks = " Is anything that a stage computes in an idle tick used? Zero times NaN is NaN: leave it out."
    if measured.size == 1:
        return f"is {'NaN' if nan else 'infinite'}.{asks}"
    return f"{' and '.join(counts)} of {measured.size:,} elements.{asks}"


def _masked(right: np.ndarray) -> str:
    """Report right and wrong elements mixed along every dim with errors, as two dropout masks agree by chance."""
    wrong = (np.any(~right, axis=tuple(d for d in range(right.ndim) if d != dim)) for dim in range(right.ndim))
    right = right[np.ix_(*map(np.flatnonzero, wrong))]
    share, dims = float(np.mean(right)), [dim for dim in range(right.ndim) if right.shape[dim] > 1]
    if not dims or not _BY_CHANCE[0] < share < _BY_CHANCE[1]:
        return ""
    lines = (np.mean(right, axis=tuple(other for other in range(right.ndim) if other != dim)) for dim in dims[-2:])
    if not all(np.mean((line > 0) & (line < 1)) > 0.5 for line in lines):
        return ""
    return f"{share:.0%} of its elements are right, here and there, as two masks of dropout agree by chance: {KEYS}"


def _rounded(errors: np.ndarray, expected: np.ndarray) -> str:
    """Report small errors of both signs nearly everywhere."""
    sizes, up = np.abs(errors), float(np.mean(errors > 0))
    worst = float(np.max(sizes))
    if worst > ROUNDED or np.mean(sizes > worst / 100) < 0.5 or not 0.1 < up < 0.9 or _distinct(expected) < FEW:
        return ""
    return (
        f"{ROUNDING}, at most {worst:.1g} of the largest element: is something of lower precision, "
        "or by a formula that is only nearly the specified one?"
    )


def _at_one_place(right: np.ndarray) -> str:
    """Report the indices of a dim that contain all wrong elements, if few or contiguous; uses the best such dim."""
    found = []
    for dim in range(right.ndim):
        others = tuple(other for other in range(right.ndim) if other != dim)
        wrong = np.flatnonzero(~np.all(right, axis=others))
        if len(wrong) < right.shape[dim] and (len(wrong) < 5 or wrong[-1] - wrong[0] < len(wrong)):
            found.append((len(wrong) / right.shape[dim], dim, wrong))
    if not found:
        return ""
    _, dim, wrong = min(found, key=lambda one: one[:2])
    which = f"{wrong[0]} to {wrong[-1]}" if len(wrong) > 4 else listed(map(str, wrong))
    places = f"index {which} is" if len(wrong) == 1 else f"indices {which} are"
    return f"Along dim {dim}, of {right.shape[dim]}, only {places} wrong."


def of_few_bytes(sent: Sequence[Collective], low: float, inputs: Iterable[Leaf]) -> str:
    """Suggest why too few bytes are sent: a dtype narrower than any input's, else a question."""
    given = {leaf.dtype for leaf in inputs}
    narrow = [c for c in sent if c.dtype in _NARROW and not given & {"float16", "bfloat16"}]
    wide = sum(c.total_bytes * (4 / _NARROW[c.dtype] if c.dtype in _NARROW else 1) for c in sent)
    if narrow and wide >= low * (1 - 1e-4):
        most = max(narrow, key=lambda c: c.total_bytes)
        return (
            f"{array(most)} has numbers of {_NARROW[most.dtype]} bytes, and in float32 it would be {wide:,.0f} "
            "bytes: which dtype should travel?"
        )
    return "is something never sent, or by another collective?"


def of_many_bytes(sent: Sequence[Collective], total: float, high: float) -> tuple[Collective, str]:
    """Name the collective that may be redundant, as a sentence: one that sends exactly the excess, else the largest."""
    excess, largest = total - high, max(sent, key=lambda c: c.total_bytes)
    for c in sorted(sent, key=lambda c: -c.wire_bytes):
        runs = round(excess / c.wire_bytes) if c.wire_bytes else 0
        twin = [other for other in sent if other is not c and (other.line, array(other)) == (c.line, array(c))]
        both = 2 * c.wire_bytes
        if len(twin) == 1 and twin[0].count == c.count > 1 and abs(excess - both) <= 1e-3 * excess:
            sends = f"the {array(c)} over {' and '.join(c.axes)} sends in 1 of its {c.count} runs forward"
            return c, (
                f"the {excess:,.0f} bytes too many are just what {sends} and 1 of {c.count} backward: does the loop "
                "make one step too many?"
            )
        if 1 <= runs <= c.count and abs(excess - runs * c.wire_bytes) <= 1e-3 * excess:
            how = f" in {runs} of its {c.count} runs" if c.count > 1 else ""
            over = " and ".join(c.axes)
            return c, f"the {excess:,.0f} bytes too many are just what the {array(c)} over {over} sends{how}"
    return largest, f"most of it is {described(largest)}{'.' if inserted(largest) else ''}{inserted(largest)}"


def inserted(c: Collective) -> str:
    """Why JAX has put a reduction into the backward pass of the course's model, which has none itself."""
    if c.kind != "all_reduce" or not c.line.startswith("course/"):
        return ""
    return (
        " JAX put these all-reduces into the backward pass, because the parameters are the same on all devices where "
        "they meet the data: see “Sums, means and what varies” of data_parallel"
    )


def array(c: Collective) -> str:
    """``all-gather of f32[8x4]``."""
    return f"{plain(c.kind)} of {c.dtype}[{'x'.join(map(str, c.shape))}]"


def described(c: Collective, *, article: bool = False) -> str:
    """The same with its axes and how often it runs."""
    before = "" if not article else "an " if c.kind.startswith("a") else "a "
    return f"{before}{array(c)} over {' and '.join(c.axes)}{f', {c.count} times' if c.count > 1 else ''}"


def plain(kind: str) -> str:
    """The name of a collective, or of a matrix product, in prose."""
    return "matmul" if kind == "dot_general" else kind.replace("_", "-").replace("collective-", "")
