"""Identify the origin of a wrong result's parts from its numbers; no message contains a number's value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, product

import numpy as np

from autograder.contract.diagnosis.factors import ROUNDED
from autograder.contract.diagnosis.layout import Layout, layout
from autograder.contract.task import Evidence
from autograder.contract.text import join_words

NOTHING, UNKNOWN = "only zeros", "something else"
# Limits on the parts of a device named in a sentence, and on the numbers compared.
_FEW, _COMPARED = 3, 10**7


def where(e: Evidence, name: str, near: float) -> str:
    """Describe in a sentence what the first wrong device holds instead; empty if its numbers do not reveal it.

    Args:
        e: The case.
        name: Name of a leaf of the results.
        near: Numbers that differ by no more than this are equal.
    """
    result_layout = layout(e, name)
    if result_layout is None:
        return ""  # the contract has combined the results of several devices
    for other in e.expected if name.startswith("gradients") else ():
        measured, expected = e.measured.get(other), e.expected[other]
        same = measured is not None and measured.shape == expected.shape
        if other.startswith("values") and not (same and np.max(np.abs(measured - expected), initial=0) <= near):
            return ""  # gradients follow from wrong values
    sides = result_layout.of(e.measured[name]), result_layout.of(e.expected[name])
    return _of_inputs(e, result_layout, *sides, near) or _of_results(result_layout, *sides, near)


def grid(yours: Sequence[Sequence[str]], right: Sequence[Sequence[str]], row: str, column: str, first: int = 0) -> str:
    """Two tables of short words, one below the other, that end a message: one line per row.

    Args:
        yours: The learner's rows.
        right: The expected rows.
        row: The name of a row: ``stage``.
        column: The name of a column: ``tick``.
        first: The number of the first column.
    """
    heads = [str(first + i) for i in range(len(right[0]))]
    width = max(len(cell) for line in (*yours, *right, heads) for cell in line)
    lines = []
    for title, rows in (("yours", yours), ("right", right)):
        names = [f"{title}: {column}", *(f"{row} {i}" for i in range(len(rows)))]
        for name, line in zip(names, [heads, *rows], strict=True):
            lines.append(f"\n  {name:>{7 + len(column)}}  {' '.join(f'{cell:>{width}}' for cell in line)}")
    return "".join(lines)


def _of_inputs(e: Evidence, result_layout: Layout, measured: np.ndarray, expected: np.ndarray, near: float) -> str:
    """Describe the result as chunks of an input, or sums of them, if a right result consists only of those."""
    back = result_layout.name.split("/")[0] == "gradients"
    for leaf in e.inputs:
        drawn = e.drawn.get(leaf.name)
        if drawn is None or drawn.shape != leaf.shape or back is not (leaf.name == "upstream"):
            continue
        input_layout = Layout(leaf, e.case.mesh)
        chunks = input_layout.of(drawn)
        alike = input_layout.devices == result_layout.devices and chunks.ndim == measured.ndim > 1
        if len(chunks) < 2 or not alike or chunks.shape[2:] != measured.shape[2:]:
            continue
        length, rest = divmod(max(chunks.shape[1], measured.shape[1]), len(result_layout.devices))
        if rest or not length or chunks.shape[1] % length or measured.shape[1] % length:
            continue
        measured_parts, expected_parts, own = (
            a.reshape(len(a), a.shape[1] // length, -1) for a in (measured, expected, chunks)
        )
        wrong = np.any(np.abs(measured_parts - expected_parts) > near, axis=2)
        device = int(np.argmax(np.any(wrong, axis=1)))
        places = [int(place) for place in np.flatnonzero(wrong[device])]
        labels, expected_labels = (
            [_label(side[device, at], own, result_layout.devices, near) for at in places]
            for side in (measured_parts, expected_parts)
        )
        if not all(expected_labels) or not any(labels):
            continue
        phrases = []
        for label, group in groupby(
            zip(places, labels, expected_labels, strict=True), lambda entry: entry[1] or UNKNOWN
        ):
            at, _, (belongs, *_) = zip(*group, strict=True)
            place = (
                f"{_numbered('place', at)} {'has' if len(at) == 1 else 'have'}"
                if measured_parts.shape[1] > 1
                else "has"
            )
            known = phrases or len(at) > 1 or label.startswith(belongs)
            phrases.append(f"{place} {label}" + ("" if known else f", where {belongs} belongs"))
        return _sentence(result_layout.devices[device], phrases, wrong, expected_parts)
    return ""


def _label(part: np.ndarray, own: np.ndarray, devices: Sequence[str], near: float) -> str:
    """Describe a part as a chunk of ``own [devices, places, ...]``, or a sum of several; empty if it is neither."""
    if np.max(np.abs(part)) <= near:
        return NOTHING
    for place in range(own.shape[1]):
        columns = own[:, place].T
        counts = (np.max(np.abs(columns - part[:, None]), axis=0) <= near).astype(int)
        if not counts.any() and len(part) > len(devices):
            counts = np.rint(np.linalg.lstsq(columns, part, rcond=None)[0]).astype(int)
        elif not counts.any():
            counts = np.ones(len(devices), int)
        if np.min(counts) < 0 or np.max(np.abs(columns @ counts - part)) > ROUNDED * np.max(np.abs(columns)):
            continue
        chunk = f"chunk {place}" if own.shape[1] > 1 else "the chunk"
        included, missing, repeated = (
            [device for device, n in zip(devices, counts, strict=True) if which(n)]
            for which in (lambda n: n > 0, lambda n: not n, lambda n: n > 1)
        )
        if len(included) == 1 and not repeated:
            return f"{chunk} of {included[0]}"
        summed = f"the sum of {chunk if own.shape[1] > 1 else 'the chunks'}"
        if missing:
            few = len(missing) < len(included)
            summed += f" {'without that of' if few else 'of only'} {join_words(missing if few else included)}"
        return summed + (f", with that of {join_words(repeated)} more than once" if repeated else "")
    return _mixture(part, own, devices)


def _mixture(part: np.ndarray, own: np.ndarray, devices: Sequence[str]) -> str:
    """Describe a sum of differently numbered chunks from every device, as in the steps of a ring; empty if none."""
    count, near = len(devices), ROUNDED * np.max(np.abs(own))
    for start, apart in product(range(count), range(1, count)) if own.shape[1] == count else ():
        of = [(start + apart * i) % count for i in range(count)]
        if np.max(np.abs(sum(own[i, place] for i, place in enumerate(of)) - part)) <= near:
            chunks = [f"chunk {place} of {device}" for place, device in zip(of, devices, strict=True)]
            return f"the sum of {join_words([*chunks[:_FEW], 'so on'] if count > _FEW else chunks)}"
    return ""


def _of_results(result_layout: Layout, measured: np.ndarray, expected: np.ndarray, near: float) -> str:
    """Describe misplaced parts of the result itself: all of a device's, or those at some first indices."""
    local = measured.shape[1:]
    for cut in range(len(local) + 1):
        count, size = math.prod(local[:cut]), math.prod(local[cut:])
        if (count == 1 and cut) or size < 2:
            continue
        measured_parts, expected_parts = (a.reshape(len(a), count, -1) for a in (measured, expected))
        wrong = np.any(np.abs(measured_parts - expected_parts) > near, axis=2)
        device = int(np.argmax(np.any(wrong, axis=1)))
        runs = _moved(measured_parts[device], expected_parts, wrong[device], device, near)
        if not runs:
            continue
        long = [dim for dim in range(cut) if local[dim] > 1]
        phrases = []
        for indices, other, homes in runs:
            have = "has" if len(indices) == 1 else "have"
            location = "" if other == device else f" on {result_layout.devices[other]}"
            if not long:
                phrases.append(f"has what belongs{location}")
            elif len(long) == 1:
                dim = "" if phrases else f" of dim {result_layout.local[long[0]]}"
                phrases.append(
                    f"{_numbered('index', indices)}{dim} {have} what belongs at {_numbered('index', homes)}{location}"
                )
            else:
                first, last = (list(map(int, np.unravel_index(run[0], local[:cut]))) for run in (indices, homes))
                phrases.append(f"index {first} has what belongs at index {last}{location}")
        return _sentence(result_layout.devices[device], phrases, wrong, expected_parts)
    return ""


def _moved(
    measured: np.ndarray, expected: np.ndarray, wrong: np.ndarray, device: int, near: float
) -> list[tuple[list[int], int, list[int]]]:
    """Runs of places that have what belongs at a run of places of some device: ``(these, that device, those)``."""
    places = [int(at) for at in np.flatnonzero(wrong) if np.max(np.abs(measured[at])) > near]
    runs: list[tuple[list[int], int, list[int]]] = []
    for at in places if len(places) * expected.size <= _COMPARED else []:
        same = np.argwhere(np.max(np.abs(expected - measured[at]), axis=2) <= near)
        if not len(same):
            continue
        other, place = map(int, min(same, key=lambda entry: entry[0] != device))
        if runs and (runs[-1][0][-1], runs[-1][1], runs[-1][2][-1]) == (at - 1, other, place - 1):
            runs[-1][0].append(at)
            runs[-1][2].append(place)
        else:
            runs.append(([at], other, [place]))
    return runs


def _numbered(noun: str, numbers: Sequence[int]) -> str:
    """``place 3``, or ``places 3 to 5`` for contiguous numbers; otherwise all are listed."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    row = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    plural = "indices" if noun == "index" else f"{noun}s"
    return f"{plural} {numbers[0]} to {numbers[-1]}" if row else f"{plural} {join_words(map(str, numbers))}"


def _sentence(device: str, phrases: Sequence[str], wrong: np.ndarray, right: np.ndarray) -> str:
    """Describe the contents of the first wrong device, and count the others.

    A device that has only zeros, where zeros are right, shows nothing and does not count.
    """
    more = f"; {len(phrases) - _FEW} more are wrong" if len(phrases) > _FEW else ""
    text = f"{'; '.join(phrases[:_FEW])}{more}."
    if text.startswith("has ") and device:
        verb = "have" if device.startswith("the devices") else "has"
        text = f"{device[0].upper()}{device[1:]} {verb}{text.removeprefix('has')}"
    else:
        text = f"On {device}, {text}" if device else f"Its {text}"
    amiss = np.any(wrong, axis=1)
    wrong_others, all_others = int(np.sum(amiss)) - 1, int(np.sum(amiss | np.any(right, axis=(1, 2)))) - 1
    if not all_others:
        return text
    if all_others == 1:
        return f"{text} The other device is {'wrong, too' if wrong_others else 'right'}."
    if wrong_others in (0, all_others):
        return f"{text} The other devices are {'wrong, too' if wrong_others else 'right'}."
    return (
        f"{text} Of the {all_others} other devices, {wrong_others} {'is' if wrong_others == 1 else 'are'} wrong, too."
    )
