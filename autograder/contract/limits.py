"""Facts whose limit is what the reference or the naive version takes: memory and time at a realistic size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autograder.contract.facts import bytes_text, plain
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact

# A forward and a backward pass are 3/4 of a step that recomputes every activation, a little less where the first
# layer's input needs no gradient.
LEAST_WORK = 0.7
REFERENCE, NAIVE = "reference", "naive"
_CHANGES = (
    "the program changes with its sizes: {}. It must be the same operations on larger arrays: decide by the arguments "
    "you are given, not by how large arrays are, and cut them into as many parts at every size."
)


@dataclass(frozen=True)
class _Look:
    """What a fact reads off the evidence: a figure, and where and what to say if it is too large."""

    measured: float
    unit: str
    show: Callable[[float], str]
    line: str
    message: str


def temporaries_within(
    evidence: Evidence | None, references: dict[str, Any], ratio: float, hint: str, **how: Any
) -> Fact:
    """Live temporaries are at most ``ratio`` times the reference's; ``how`` as for ``within``."""

    def look(e: Evidence) -> _Look:
        largest = next(iter(e.memory.alive), None)
        said = f"at the peak {bytes_text(e.memory.temporaries)} bytes of temporaries live at once, {{times}}"
        if largest:
            shape = "x".join(map(str, largest.shape))
            said += f"; the largest is a {largest.dtype}[{shape}] of {bytes_text(largest.bytes)} bytes"
        return _Look(e.memory.temporaries, "bytes", bytes_text, largest.line if largest else "", f"{said}. {hint}")

    return within("live temporaries", "temporaries", look, evidence, references, ratio, **how)


def temporaries_at_most(
    evidence: Evidence | None, references: dict[str, Any], most: Callable[[Case], int], hint: str, *, weight: float = 1
) -> Fact:
    """Live temporaries of the realistic size are at most so many bytes, by a closed form of its sizes."""
    name, figure = "live temporaries", "temporaries"
    if evidence is None or (bar := _incomparable(evidence, references, figure, REFERENCE)):
        return _unjudged(name, evidence, "" if evidence is None else bar, weight)
    held, limit = evidence.memory.temporaries, most(evidence.case)
    largest = next(iter(evidence.memory.alive), None)
    message, line = "", ""
    if held > limit:
        message = f"at the peak {bytes_text(held)} bytes of temporaries live at once, {bytes_text(limit)} are allowed"
        if largest:
            shape = "x".join(map(str, largest.shape))
            message += f"; the largest is a {largest.dtype}[{shape}] of {bytes_text(largest.bytes)} bytes"
        message, line = f"{message}. {hint}", largest.line if largest else ""
    return Fact(name, held <= limit, bytes_text(held), bytes_text(limit), "bytes",
                *_known(references[figure], bytes_text), evidence.case.name, line, message, weight)  # fmt: skip


# --8<-- [start:flops_within]
def flops_within(evidence: Evidence | None, references: dict[str, Any], ratio: float, hint: str, **how: Any) -> Fact:
    """FLOPs of matrix products are at most ``ratio`` times the reference's; ``how`` as for ``within``."""

    def look(e: Evidence) -> _Look:
        said = f"a device computes {_flops(e.costs.flops)} FLOPs, {{times}}. {hint}"
        return _Look(e.costs.flops, "FLOPs", _flops, e.line, said)

    return within("FLOPs", "flops", look, evidence, references, ratio, **how)


# --8<-- [end:flops_within]


def largest_within(
    evidence: Evidence | None,
    references: dict[str, Any],
    most: Callable[[Case], int],
    hint: str,
    *,
    weight: float = 1,
    least: float = LEAST_WORK,
) -> Fact:
    """No temporary of the realistic size has more than so many elements, at any moment; ``least`` as for ``within``."""
    name = "largest temporary"
    if evidence is None or (bar := _incomparable(evidence, references, "temporaries", REFERENCE, least)):
        return _unjudged(name, evidence, "" if evidence is None else bar, weight)
    largest, limit = evidence.memory.largest, most(evidence.case)
    elements = evidence.memory.largest_numbers
    message, line = "", ""
    if largest and elements > limit:
        shape = "x".join(map(str, largest.shape))
        message = f"a {largest.dtype}[{shape}] is held at some moment, {elements:,} elements. {hint}"
        line = largest.line
    return Fact(name, elements <= limit, f"{elements:,}", f"{limit:,}", "elements", case=evidence.case.name, line=line,
                message=message, weight=weight)  # fmt: skip


def time_within(evidence: Evidence | None, references: dict[str, Any], ratio: float, hint: str, **how: Any) -> Fact:
    """The step that the timeline predicts is at most ``ratio`` times the reference's; ``how`` as for ``within``."""

    def look(e: Evidence) -> _Look:
        assert e.timeline
        first = e.timeline.critical[0]
        said = (
            f"on {e.timeline.machine} a step would take {_ms(e.timeline.seconds)} ms, {{times}}; "
            f"{_ms(first.seconds)} ms of the critical path are {plain(first.kind)}, {first.count} times. {hint}"
        )
        return _Look(e.timeline.seconds, f"ms on {e.timeline.machine}", _ms, first.line, said)

    return within("predicted time", "seconds", look, evidence, references, ratio, **how)


def bubble_is(
    evidence: Evidence | None,
    ticks: Callable[[Case], int],
    busy: Callable[[Case], int],
    tick_seconds: Callable[[Case], float],
    hint: str,
    *,
    within: float = 0.01,
    weight: float = 1,
) -> Fact:
    """The share of a forward pass in which the stages of a pipeline do nothing useful is what its schedule says.

    ``tick_seconds`` comes from model FLOPs, so idle ticks that compute something and idle ticks that compute nothing
    are the same. The pass takes time on ``Task.machine``, whose network must be free for the formula to hold.

    Args:
        evidence: Of the realistic size, of a forward pass; None if this check leaves it out.
        ticks: How many stage times the pass lasts, by the formula.
        busy: In how many of them a stage has work.
        tick_seconds: What a stage's useful work takes in one of them.
        hint: Where to look.
        within: The largest relative difference from the formula's bubble.
        weight: How much the fact counts.
    """
    name = "bubble"
    if evidence is None or evidence.difference:
        different = ("not comparable", _CHANGES.format(evidence.difference)) if evidence else ""
        return _unjudged(name, evidence, different, weight)
    if evidence.timeline is None:
        return _unjudged(name, evidence, "no time was predicted for this program", weight)
    if not evidence.timeline.seconds:
        return _unjudged(name, evidence, ("no time", f"the program takes no time at all. {hint}"), weight)
    case = evidence.case
    lasts = evidence.timeline.seconds / tick_seconds(case)
    form, found = 1 - busy(case) / ticks(case), 1 - busy(case) / lasts
    passed = bool(abs(found - form) <= within * max(form, within))
    message = "" if passed else (
        f"on a free network the forward pass takes as long as {lasts:.4g} ticks of one stage, and with "
        f"{busy(case)} in which each stage has work it should take {ticks(case)}. {hint}")  # fmt: skip
    return Fact(name, passed, f"{found:.4f}", f"{form:.4f}", "of the devices' time", case=case.name,
                line=evidence.line, message=message, weight=weight)  # fmt: skip


def exposed_within(
    evidence: Evidence | None,
    references: dict[str, Any],
    ratio: float,
    hint: str,
    *,
    gains: bool = False,
    **how: Any,
) -> Fact:
    """Communication that nothing hides is at most ``ratio`` times the reference's; ``how`` as for ``within``.

    With ``gains`` the step must be shorter than the naive version's too, by a quarter of what may be hidden: work that
    only fills the wait is no gain.
    """

    def look(e: Evidence) -> _Look:
        assert e.timeline
        axes = ", ".join(f"{axis} {_ms(seconds)} ms" for axis, seconds in e.timeline.exposed.items())
        said = (
            f"on {e.timeline.machine} devices compute nothing for {_ms(e.timeline.exposed_seconds)} ms while a "
            f"transfer goes on ({axes}), {{times}}. {hint}"
        )
        sent = next((piece.line for piece in e.timeline.critical if piece.stream != "compute"), "")
        return _Look(e.timeline.exposed_seconds, f"ms on {e.timeline.machine}", _ms, sent or e.line, said)

    fact = within("exposed communication", "exposed", look, evidence, references, ratio, **how)
    plain = references.get("seconds", {}).get(NAIVE)
    if not fact.passed or not gains or plain is None:
        return fact
    assert evidence and evidence.timeline
    took, least = evidence.timeline.seconds, (1 - ratio) * references["exposed"][NAIVE] / 4
    if plain - took >= least:
        return fact
    message = (
        f"hardly any communication is exposed, but on {evidence.timeline.machine} a step takes {_ms(took)} ms and the "
        f"naive version's {_ms(plain)} ms: work that only fills the wait is no gain. {hint}"
    )
    return replace(fact, passed=False, line=evidence.line, message=message)


def spent_within(
    evidence: Evidence | None, references: dict[str, Any], ratio: float, axis: str, hint: str, **how: Any
) -> Fact:
    """What a step takes longer for its communication over ``axis`` is at most ``ratio`` times the reference's.

    Counted is the step less the same step with free links on that axis: of a pipeline, whose devices wait for many
    reasons, this is what hiding that communication could still win. ``Task.spent_on`` must name the axis.
    """
    name = f"exposed over {axis}"
    if evidence is not None and evidence.spent is None:
        return _unjudged(name, evidence, "nobody timed this program without that communication", how.get("weight", 1))

    def look(e: Evidence) -> _Look:
        assert e.timeline and e.spent is not None
        said = (
            f"on {e.timeline.machine} a step takes {_ms(e.timeline.seconds)} ms, and {_ms(e.spent)} ms less if sending "
            f"over {axis!r} took no time, {{times}}. {hint}"
        )
        return _Look(e.spent, f"ms on {e.timeline.machine}", _ms, e.line, said)

    return within(name, "spent", look, evidence, references, ratio, **how)


def within(
    name: str,
    figure: str,
    look: Callable[[Evidence], _Look],
    evidence: Evidence | None,
    references: dict[str, Any],
    ratio: float,
    *,
    weight: float = 1,
    than: str = REFERENCE,
    least: float = LEAST_WORK,
) -> Fact:
    """A figure of the realistic size is at most ``ratio`` times what the reference, or the naive version, has.

    Args:
        name: Of the fact.
        figure: Its name among the references.
        look: Reads it off the evidence.
        evidence: Of the realistic size; None if this check leaves it out.
        references: What was measured of the task's reference and naive versions.
        ratio: The limit.
        weight: How much the fact counts, 0 for advice.
        than: ``reference`` or ``naive``.
        least: The share of the reference's FLOPs below which a part of the work must have been left out.
    """
    if evidence is None or (bar := _incomparable(evidence, references, figure, than, least)):
        return _unjudged(name, evidence, "" if evidence is None else bar, weight)
    found, against = look(evidence), references[figure][than]
    passed = found.measured <= ratio * against
    times = f"{found.measured / against:.2f} times the {than}'s" if against else f"and the {than}'s is 0"
    message, line = ("", "") if passed else (found.message.replace("{times}", times), found.line)
    figures = (
        found.show(found.measured),
        found.show(ratio * against),
        found.unit,
        *_known(references[figure], found.show),
    )
    return Fact(name, passed, *figures, evidence.case.name, line, message, weight)


def _incomparable(
    evidence: Evidence, references: dict[str, Any], figure: str, than: str, least: float = LEAST_WORK
) -> str | tuple[str, str]:
    """Why the realistic size cannot be compared with the reference; empty if it can.

    A text alone is a reason for which nothing is measured, two are a failure: what was measured, and the message.
    """
    if evidence.difference:
        return "not comparable", _CHANGES.format(evidence.difference)
    if than not in references.get(figure, {}) or not references.get("flops"):
        return f"the {than} version has not been measured with this version of jax"
    work = references["flops"]["reference"]
    if evidence.costs.flops < least * work:
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


def _flops(number: float) -> str:
    return f"{number:.4g}"
