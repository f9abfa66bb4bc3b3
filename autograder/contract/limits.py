"""Facts whose limit is what the reference or the naive baseline takes: memory and time at a realistic size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autograder.contract import facts
from autograder.contract.facts import plain, unmeasured
from autograder.contract.task import Case, Evidence, Judged
from autograder.contract.verdict import Fact, Kind, Limit, Unit, counted

# A forward and a backward pass are 3/4 of a step that recomputes every activation, a little less where the first
# layer's input needs no gradient.
LEAST_WORK = 0.7
REFERENCE, NAIVE = "reference", "naive"
_CHANGES = (
    "the program changes with its sizes: {}. It must be the same operations on larger arrays: decide by the arguments "
    "you are given, not by how large arrays are, and cut them into as many parts at every size."
)


def temporaries_within(judged: Judged, ratio: float, hint: str, **how: Any) -> Fact:
    """Live temporaries are at most ``ratio`` times the reference's; ``how`` as for ``_within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        return _at_the_peak(e, times, hint)

    return _within(
        "live temporaries",
        Kind.MEMORY,
        "temporaries",
        lambda e: e.memory.temporaries,
        look,
        judged,
        ratio,
        unit=Unit.BYTES,
        **how,
    )


def temporaries_at_most(judged: Judged, most: Callable[[Case[Any]], int], hint: str, *, weight: float = 1) -> Fact:
    """Live temporaries at scale have at most these bytes, by a closed form of the case."""
    name, figure, e = "live temporaries", "temporaries", judged.at_scale
    if barred := _barred(name, Kind.MEMORY, judged, figure, weight=weight):
        return barred
    assert e
    resident, limit = e.memory.temporaries, most(e.case)
    message, line = _at_the_peak(e, f"{limit:,.0f} are allowed", hint) if resident > limit else ("", "")
    known = {key: judged.references[figure].get(key) for key in (REFERENCE, NAIVE)}
    return facts.at(e, name, Kind.MEMORY, message, resident, limit, unit=Unit.BYTES, line=line, weight=weight, **known)


def _at_the_peak(e: Evidence, allowed: str, hint: str) -> tuple[str, str]:
    message, largest = f"at the peak {e.memory.temporaries:,.0f} bytes of temporaries live at once, {allowed}", None
    if e.memory.alive:
        largest = e.memory.alive[0]
        message += f"; the largest, {_array(largest)}, has {largest.bytes:,.0f} bytes"
    return f"{message}. {hint}", largest.line if largest else ""


def _array(temporary: Any) -> str:
    return f"{temporary.dtype}[{'x'.join(map(str, temporary.shape))}]"


# --8<-- [start:flops_within]
def flops_within(judged: Judged, ratio: float, hint: str, **how: Any) -> Fact:
    """FLOPs of matrix products are at most ``ratio`` times the reference's; ``how`` as for ``_within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        return f"a device computes {e.costs.flops:.4g} FLOPs, {times}. {hint}", e.line

    return _within("FLOPs", Kind.COMPUTE, "flops", lambda e: e.costs.flops, look, judged, ratio, unit=Unit.FLOPS, **how)


# --8<-- [end:flops_within]


def largest_within(
    judged: Judged, most: Callable[[Case[Any]], int], hint: str, *, weight: float = 1, least: float = LEAST_WORK
) -> Fact:
    """No temporary at scale has more elements than ``most`` says, at any moment; ``least`` as for ``_within``."""
    name, e = "largest temporary", judged.at_scale
    if barred := _barred(name, Kind.MEMORY, judged, "temporaries", least=least, weight=weight):
        return barred
    assert e
    largest, elements, limit = e.memory.largest, e.memory.largest_numbers, most(e.case)
    message, line = "", ""
    if largest and elements > limit:
        message = f"an array {_array(largest)} is held at some moment, {elements:,} elements. {hint}"
        line = largest.line
    return facts.at(e, name, Kind.MEMORY, message, elements, limit, unit=Unit.ELEMENTS, line=line, weight=weight)


def time_within(judged: Judged, ratio: float, hint: str, **how: Any) -> Fact:
    """The step that the timeline predicts is at most ``ratio`` times the reference's; ``how`` as for ``_within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        assert e.timeline
        first = e.timeline.critical[0]
        return (
            f"on {e.timeline.machine} a step would take {_ms(e.timeline.seconds)} ms, {times}; "
            f"{_ms(first.seconds)} ms of the critical path are {plain(first.kind)}, {counted(first.count, 'time')}. "
            f"{hint}"
        ), first.line

    return _within("predicted time", Kind.TIME, "seconds", _seconds, look, judged, ratio, **_MS, **how)


def _seconds(e: Evidence) -> float:
    assert e.timeline
    return e.timeline.seconds


def bubble_is(
    e: Evidence | None,
    ticks: Callable[[Case[Any]], int],
    busy: Callable[[Case[Any]], int],
    tick_seconds: Callable[[Case[Any]], float],
    hint: str,
    *,
    drained: tuple[Callable[[Case[Any]], int], str] | None = None,
    within: float = 0.01,
    weight: float = 1,
    what: str = "forward pass",
    shorter: bool = False,
) -> Fact:
    """The share of a pass in which the stages of a pipeline do nothing useful is what its schedule says.

    ``tick_seconds`` comes from model FLOPs, so idle ticks that compute something and idle ticks that compute nothing
    are the same. The pass takes time on ``Task.machine``, whose network must be free for the formula to hold.

    Args:
        e: Evidence at scale, of such a pass; None if this check leaves it out.
        ticks: How many stage times the pass lasts, by the formula.
        busy: In how many of them a stage has work.
        tick_seconds: What a stage's useful work takes in one of them.
        hint: Where to look.
        drained: Ticks of the pass if its pipeline ran empty in between, and what then ends before the next one begins.
        within: The largest relative difference from the formula's bubble.
        weight: How much the fact counts.
        what: What the pass is called.
        shorter: Whether a pass that takes less time is right too, as long as it does all of the work.
    """
    name = "bubble"
    if e is None:
        return unmeasured(name, Kind.TIME, _LEFT_OUT, weight)
    if e.structural_mismatch:
        return _different(name, Kind.TIME, e, weight)
    if e.timeline is None:
        return unmeasured(name, Kind.TIME, "no time was predicted for this program", weight)
    if not e.timeline.seconds:
        return facts.at(e, name, Kind.TIME, f"the program takes no time at all. {hint}", "no time", weight=weight)
    lasts = e.timeline.seconds / tick_seconds(e.case)
    form, found = 1 - busy(e.case) / ticks(e.case), 1 - busy(e.case) / lasts
    message, least_ticks = "", busy(e.case) if shorter else ticks(e.case)
    off = found - form if shorter and lasts >= (1 - within) * least_ticks else abs(found - form)
    if off > within * max(form, within):
        idle, least = lasts - busy(e.case), ticks(e.case) - busy(e.case)
        message = (
            f"on a free network the {what} takes as long as {lasts:.4g} ticks of one stage, which has work in "
            f"{busy(e.case)} of them and is idle for {idle:.3g}; {counted(least, 'idle tick')} "
            f"{'is' if least == 1 else 'are'} enough. "
        )
        if drained and abs(lasts / drained[0](e.case) - 1) < within:
            message += (
                f"It is as long as if each {drained[1]} ended on the last stage before the next began on the first. "
            )
        message += hint
        if lasts < least_ticks:
            message = (
                f"on a free network the {what} takes as long as {lasts:.4g} ticks of one stage, and all "
                f"of the work takes {least_ticks}: which part is left out at this size?"
            )
    direction, limit = (Limit.AT_MOST, (1 + within) * form) if shorter else (Limit.EXACTLY, form)
    how = {"direction": direction, "unit": Unit.DEVICE_TIME, "weight": weight}
    return facts.at(e, name, Kind.TIME, message, found, limit, **how)


def exposed_within(judged: Judged, ratio: float, hint: str, *, gains: bool = False, **how: Any) -> Fact:
    """Communication that nothing hides is at most ``ratio`` times the reference's; ``how`` as for ``_within``.

    With ``gains`` the step must be shorter than the naive baseline's too, by a quarter of what may be hidden: work
    that only fills the wait is no gain.
    """

    def look(e: Evidence, times: str) -> tuple[str, str]:
        assert e.timeline
        axes = ", ".join(f"{axis} {_ms(seconds)} ms" for axis, seconds in e.timeline.exposed.items())
        sent = next((piece.line for piece in e.timeline.critical if piece.stream != "compute"), "")
        return (
            f"on {e.timeline.machine} devices compute nothing for {_ms(e.timeline.exposed_seconds)} ms while a "
            f"transfer goes on ({axes}), {times}. {hint}"
        ), sent or e.line

    def exposed(e: Evidence) -> float:
        assert e.timeline
        return e.timeline.exposed_seconds

    name, naive = "exposed communication", judged.references.get("seconds", {}).get(NAIVE)
    fact = _within(name, Kind.TIME, "exposed", exposed, look, judged, ratio, **_MS, **how)
    if not fact.passed or not gains or naive is None:
        return fact
    assert judged.at_scale and judged.at_scale.timeline
    took, least = judged.at_scale.timeline.seconds, (1 - ratio) * judged.references["exposed"][NAIVE] / 4
    if naive - took >= least:
        return fact
    message = (
        f"hardly any communication is exposed, but on {judged.at_scale.timeline.machine} a step takes {_ms(took)} ms "
        f"and the naive version's {_ms(naive)} ms: work that only fills the wait is no gain. {hint}"
    )
    return replace(fact, passed=False, line=judged.at_scale.line, message=message)


def exposed_over_within(judged: Judged, ratio: float, axis: str, hint: str, **how: Any) -> Fact:
    """What a step takes longer for its communication over ``axis`` is at most ``ratio`` times the reference's.

    Counted is the step less the same step with free links on that axis: of a pipeline, whose devices wait for many
    reasons, this is what hiding that communication could still win. ``Task.exposed_axes`` must name the axis.
    """
    name = f"exposed over {axis}"
    if judged.at_scale and judged.at_scale.exposed is None:
        why = "this program was not timed without that communication"
        return unmeasured(name, Kind.TIME, why, how.get("weight", 1))

    def look(e: Evidence, times: str) -> tuple[str, str]:
        assert e.timeline
        return (
            f"on {e.timeline.machine} a step takes {_ms(e.timeline.seconds)} ms, and {_ms(e.exposed or 0)} ms less if "
            f"sending over {axis!r} took no time, {times}. {hint}"
        ), e.line

    return _within(name, Kind.TIME, "spent", lambda e: e.exposed or 0, look, judged, ratio, **_MS, **how)


_MS: dict[str, Any] = {"unit": Unit.MILLISECONDS, "factor": 1e3}
_LEFT_OUT = "this check leaves the realistic size out"


def _within(
    name: str,
    kind: Kind,
    figure: str,
    measure: Callable[[Evidence], float],
    explain: Callable[[Evidence, str], tuple[str, str]],
    judged: Judged,
    ratio: float,
    *,
    unit: Unit,
    factor: float = 1,
    weight: float = 1,
    than: str = REFERENCE,
    least: float = LEAST_WORK,
) -> Fact:
    """A figure at scale is at most ``ratio`` times what the reference, or the naive baseline, has.

    Args:
        name: Of the fact.
        kind: Of the fact.
        figure: Its name among the references.
        measure: Reads it off the evidence.
        explain: The message and the line of one that is too large, given how many times too large it is in words.
        judged: The evidence, and what was measured of the reference and the naive baselines.
        ratio: The limit.
        unit: What it is shown in.
        factor: What it is multiplied by to be in ``unit``.
        weight: How much the fact counts, 0 for advice.
        than: ``reference`` or ``naive``.
        least: The share of the reference's FLOPs below which a part of the work must have been left out.
    """
    if barred := _barred(name, kind, judged, figure, than, least, weight):
        return barred
    e, known = judged.at_scale, judged.references[figure]
    assert e
    found, against = measure(e), known[than]
    message, line = "", ""
    if found > ratio * against:
        times = f"{found / against:.2f} times the {than}'s, and {ratio:g} times is allowed" if against else ""
        message, line = explain(e, times or f"and the {than}'s is 0")
    shown = {key: factor * known[key] for key in (REFERENCE, NAIVE) if key in known}
    how = {"unit": unit, "of": e.timeline.machine if factor != 1 and e.timeline else "", "weight": weight, "line": line}
    return facts.at(e, name, kind, message, factor * found, factor * ratio * against, **how, **shown)


def _barred(
    name: str,
    kind: Kind,
    judged: Judged,
    figure: str,
    than: str = REFERENCE,
    least: float = LEAST_WORK,
    weight: float = 1,
) -> Fact | None:
    """The fact where the realistic size cannot be compared with the reference; None if it can."""
    e, known = judged.at_scale, judged.references
    if e is None:
        return unmeasured(name, kind, _LEFT_OUT, weight)
    if e.structural_mismatch:
        return _different(name, kind, e, weight)
    if than not in known.get(figure, {}) or not known.get("flops"):
        return unmeasured(name, kind, f"the {than} version has not been measured with this version of jax", weight)
    work = known["flops"]["reference"]
    if e.costs.flops < least * work:
        message = (
            f"at the realistic size the program computes {e.costs.flops:.3g} FLOPs, and the work takes {work:.3g} with "
            "its recomputation: is a part of the arrays left out there?"
        )
        return facts.at(e, name, kind, message, "not comparable", weight=weight)
    return None


def _different(name: str, kind: Kind, e: Evidence, weight: float) -> Fact:
    return facts.at(e, name, kind, _CHANGES.format(e.structural_mismatch), "not comparable", weight=weight)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
