"""Facts whose limit is what the reference or the naive version takes: memory and time at a realistic size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autograder.contract import Evidence
from autograder.facts import bytes_text, plain
from autograder.verdict import Fact

# A forward and a backward pass are 3/4 of a step that recomputes every activation, a little less where the first
# layer's input needs no gradient.
LEAST_WORK = 0.7
REFERENCE, NAIVE = "reference", "naive"


def temporaries_within(
    evidence: Evidence | None,
    references: dict[str, Any],
    ratio: float,
    hint: str,
    *,
    weight: float = 1,
    than: str = REFERENCE,
) -> Fact:
    """Live temporaries of the realistic size are at most ``ratio`` times the reference's, or ``than`` the naive's."""
    name = "live temporaries"
    if evidence is None or (bar := _incomparable(evidence, references, "temporaries", than)):
        return _unjudged(name, evidence, "" if evidence is None else bar, weight)
    measured, limit = evidence.memory.temporaries, ratio * references["temporaries"][than]
    passed = measured <= limit
    message = line = ""
    if not passed:
        largest = evidence.memory.alive[0]
        line = largest.line
        shape = "x".join(map(str, largest.shape))
        message = (
            f"at the peak {bytes_text(measured)} bytes of temporaries live at once, {ratio * measured / limit:.2f} "
            f"times the {than}'s; the largest is a {largest.dtype}[{shape}] of {bytes_text(largest.bytes)} bytes. "
            f"{hint}"
        )
    known = _known(references["temporaries"], bytes_text)
    figures = bytes_text(measured), bytes_text(limit), "bytes", *known
    return Fact(name, passed, *figures, evidence.case.name, line, message, weight)


def time_within(
    evidence: Evidence | None,
    references: dict[str, Any],
    ratio: float,
    hint: str,
    *,
    weight: float = 1,
    than: str = REFERENCE,
) -> Fact:
    """The step that the timeline predicts takes at most ``ratio`` times the reference's, or ``than`` the naive's."""
    name = "predicted time"
    if evidence is None or (bar := _incomparable(evidence, references, "seconds", than)):
        return _unjudged(name, evidence, "" if evidence is None else bar, weight)
    assert evidence.timeline
    measured, limit = evidence.timeline.seconds, ratio * references["seconds"][than]
    passed = measured <= limit
    message = line = ""
    if not passed:
        first = evidence.timeline.critical[0]
        line = first.line
        message = (
            f"on {evidence.timeline.machine} a step would take {1e3 * measured:.4g} ms, {ratio * measured / limit:.2f} "
            f"times the {than}'s; {1e3 * first.seconds:.4g} ms of the critical path are {plain(first.kind)}, "
            f"{first.count} times. {hint}"
        )
    unit = f"ms on {evidence.timeline.machine}"
    known = _known(references["seconds"], _ms)
    return Fact(name, passed, _ms(measured), _ms(limit), unit, *known, evidence.case.name, line, message, weight)


def exposed_within(
    evidence: Evidence | None,
    references: dict[str, Any],
    ratio: float,
    hint: str,
    *,
    weight: float = 1,
    than: str = REFERENCE,
) -> Fact:
    """Communication that nothing hides is at most ``ratio`` times the reference's, or ``than`` the naive's."""
    name = "exposed communication"
    if evidence is None or (bar := _incomparable(evidence, references, "exposed", than)):
        return _unjudged(name, evidence, "" if evidence is None else bar, weight)
    assert evidence.timeline
    measured, limit = evidence.timeline.exposed_seconds, ratio * references["exposed"][than]
    passed = measured <= limit
    axes = ", ".join(f"{axis} {1e3 * seconds:.4g} ms" for axis, seconds in evidence.timeline.exposed.items())
    message = "" if passed else (
        f"on {evidence.timeline.machine} devices compute nothing for {1e3 * measured:.4g} ms while a transfer goes on "
        f"({axes}). {hint}")  # fmt: skip
    unit = f"ms on {evidence.timeline.machine}"
    known = _known(references["exposed"], _ms)
    return Fact(
        name, passed, _ms(measured), _ms(limit), unit, *known, evidence.case.name, evidence.line, message, weight
    )


def _incomparable(evidence: Evidence, references: dict[str, Any], figure: str, than: str) -> str | tuple[str, str]:
    """Why the realistic size cannot be compared with the reference; empty if it can.

    A text alone is a reason for which nothing is measured, two are a failure: what was measured, and the message.
    """
    if evidence.difference:
        return "not comparable", (
            f"the program changes with its sizes: {evidence.difference}. Decide by the arguments you are given, "
            "not by how large arrays are.")  # fmt: skip
    if than not in references.get(figure, {}) or not references.get("flops"):
        return f"the {than} version has not been measured with this version of jax"
    work = references["flops"]["reference"]
    if evidence.costs.flops < LEAST_WORK * work:
        return "not comparable", (
            f"at the realistic size the program computes {evidence.costs.flops:.3g} FLOPs, and the work takes "
            f"{work:.3g} with its recomputation: is a part of the arrays left out there?")  # fmt: skip
    return ""


def _unjudged(name: str, evidence: Evidence | None, bar: str | tuple[str, str], weight: float) -> Fact:
    if evidence is None:
        bar = "this check leaves the realistic size out"
    if isinstance(bar, str):
        return Fact(name, None, "not measured", message=bar, weight=weight)
    assert evidence
    measured, message = bar
    return Fact(name, False, measured, case=evidence.case.name, line=evidence.line, message=message, weight=weight)


def _known(figures: dict[str, float], show: Callable[[float], str]) -> tuple[str, str | None]:
    """What the reference measures, and the naive version if it was measured."""
    naive = figures.get("naive")
    return show(figures["reference"]), None if naive is None else show(naive)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
