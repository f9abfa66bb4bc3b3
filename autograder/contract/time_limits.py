"""Facts about predicted time at a realistic size: a step's, its exposed communication's, and a pipeline's bubble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autograder.contract import facts
from autograder.contract.facts import unmeasured
from autograder.contract.limits import LEFT_OUT, NAIVE, REFERENCE, barred, different, within
from autograder.contract.task import Case, Evidence, TaskEvidence
from autograder.contract.text import count_of
from autograder.contract.verdict import Direction, Fact, Kind, Unit
from course.program.ir import plain_kind
from course.program.simulator import Piece

_MS: dict[str, Any] = {"unit": Unit.MILLISECONDS, "factor": 1e3}


def time_within(evidence: TaskEvidence, ratio: float, hint: str, **options: Any) -> Fact:
    """Limit the predicted step time to ``ratio`` times the reference's; ``options`` as for ``limits.within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        assert e.timeline
        known, sent = evidence.references, [piece for piece in e.timeline.critical if piece.stream != "compute"]
        extra_seconds, extra_exposed = (
            measured - known.get(figure, {}).get(REFERENCE, measured)
            for figure, measured in (("seconds", e.timeline.seconds), ("exposed", e.timeline.exposed_seconds))
        )
        # If a step takes longer because it waits, point to the transfer; if it multiplies no more than the reference,
        # to another computation.
        others = _besides_products(e)
        as_much = e.costs.flops <= 1.02 * known.get("flops", {}).get(REFERENCE, 0)
        waits = bool(sent) and extra_exposed > extra_seconds / 2 > 0
        first = sent[0] if waits else others[0] if as_much and others else e.timeline.critical[0]
        before = f"for {_ms(extra_exposed)} ms more than in the reference, nothing is computed; " if waits else ""
        before = before or ("besides the products, " if as_much and first.kind != "dot_general" else "")
        return (
            f"on {e.timeline.machine} a step would take {_ms(e.timeline.seconds)} ms, {times}; {before}"
            f"{_taken(first)}{_also(others[1:]) if first in others else ''}. {hint}"
        ), first.line

    return within("predicted time", Kind.TIME, "seconds", _seconds, look, evidence, ratio, **_MS, **options)


def _besides_products(e: Evidence) -> list[Piece]:
    """The computations on the critical path that are not products, the longest first."""
    assert e.timeline
    return [piece for piece in e.timeline.critical if piece.stream == "compute" and piece.kind != "dot_general"]


def _taken(piece: Piece) -> str:
    runs = count_of(piece.count, "run")
    return f"{plain_kind(piece.kind)} takes {_ms(piece.seconds)} ms of the critical path, in {runs}"


def _also(pieces: list[Piece]) -> str:
    """The next pieces with their lines: the longest is not always the one at fault."""
    return "".join([f"; {_taken(piece)} ({piece.line})" for piece in pieces if piece.line][:2])


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
    early: str = "which part is left out at this size?",
    within: float = 0.01,
    weight: float = 1,
    what: str = "forward pass",
    shorter: bool = False,
) -> Fact:
    """Require the bubble, the idle share of a pipeline's pass, to match its schedule.

    ``tick_seconds`` comes from model FLOPs, so an idle tick counts as idle whether or not it computes anything.
    The pass is timed on ``Task.machine``, whose network must be free for the formula to hold.

    Args:
        e: Evidence at scale, of such a pass; None if this check skips it.
        ticks: Duration of the pass in ticks, by the formula.
        busy: Number of ticks in which a stage has work.
        tick_seconds: Duration of a stage's useful work in one tick.
        hint: Where to look.
        drained: Ticks of the pass if its pipeline drained in between, and what ends before the next begins.
        early: Where to look if the pass is too short.
        within: The largest relative difference from the formula's bubble.
        weight: The fact's weight.
        what: The name of the pass.
        shorter: True if a shorter pass is also right, as long as it does all of the work.
    """
    name = "bubble"
    if e is None:
        return unmeasured(name, Kind.TIME, LEFT_OUT, weight)
    if e.structural_mismatch:
        return different(name, Kind.TIME, e, weight)
    if e.timeline is None:
        return unmeasured(name, Kind.TIME, "no time was predicted for this program", weight)
    if not e.timeline.seconds:
        return facts.case_fact(
            e, name, Kind.TIME, f"the program takes no time at all. {hint}", "no time", weight=weight
        )
    lasts = e.timeline.seconds / tick_seconds(e.case)
    form, measured = 1 - busy(e.case) / ticks(e.case), 1 - busy(e.case) / lasts
    message, least_ticks = "", busy(e.case) if shorter else ticks(e.case)
    off = measured - form if shorter and lasts >= (1 - within) * least_ticks else abs(measured - form)
    if off > within * max(form, within):
        message = f"with zero-cost communication the {what} takes as long as {lasts:.4g} ticks of one stage, "
        if lasts < least_ticks:
            message += f"and {'all of the work takes' if shorter else 'the schedule has'} {least_ticks}: {early}"
        else:
            part = drained[1] if drained and abs(lasts / drained[0](e.case) - 1) < within else ""
            message += f"{_idle_ticks(lasts, busy(e.case), ticks(e.case), part)}{hint}"
    direction, limit = (Direction.AT_MOST, (1 + within) * form) if shorter else (Direction.EXACTLY, form)
    details = {"direction": direction, "unit": Unit.DEVICE_TIME, "weight": weight}
    return facts.case_fact(e, name, Kind.TIME, message, measured, limit, **details)


def _idle_ticks(lasts: float, busy: int, ticks: int, drained: str) -> str:
    least = ticks - busy
    message = (
        f"which has work in {busy} of them. The other {lasts - busy:.3g} do nothing useful, and {least} "
        f"{'is' if least == 1 else 'are'} enough. "
    )
    if drained:
        message += f"It is as long as if each {drained} ended on the last stage before the next began on the first. "
    return message


def time_gained(evidence: TaskEvidence, share: float, hint: str, *, weight: float = 1) -> Fact:
    """Require a step faster than the naive baseline's by a ``share`` of its exposed time; filling the wait is no gain.

    Args:
        evidence: The evidence, and the measured figures of the reference and the naive baselines.
        share: Fraction of the communication that the naive baseline exposes.
        hint: Where to look.
        weight: Weight of the fact.
    """
    name = "predicted time"
    if fact := barred(name, Kind.TIME, evidence, "exposed", NAIVE, weight=weight):
        return fact
    e, known, waited = evidence.at_scale, evidence.references["seconds"], evidence.references["exposed"][NAIVE]
    assert e and e.timeline
    took, most, message, line = e.timeline.seconds, known[NAIVE] - share * waited, "", ""
    if took > most:
        others = _besides_products(e)
        if e.timeline.exposed_seconds <= (1 - share) * waited and others:
            line = others[0].line
            hint = f"Its waiting is within the limit; besides the products, {_taken(others[0])}{_also(others[1:])}."
        message = (
            f"on {e.timeline.machine} a step takes {_ms(took)} ms, and the naive baseline takes {_ms(known[NAIVE])} "
            f"ms. Hiding the communication should save at least {share:.4g} times what the baseline exposes, and "
            f"work that only fills the wait saves nothing. {hint}"
        )
    shown = {key: 1e3 * known[key] for key in (REFERENCE, NAIVE) if key in known}
    details = {"unit": Unit.MILLISECONDS, "of": e.timeline.machine, "weight": weight, "line": line}
    return facts.case_fact(e, name, Kind.TIME, message, 1e3 * took, 1e3 * most, **details, **shown)


def exposed_within(evidence: TaskEvidence, ratio: float, hint: str, **options: Any) -> Fact:
    """Limit exposed communication to ``ratio`` times the reference's; ``options`` as for ``limits.within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        assert e.timeline
        axes = ", ".join(f"{axis} {_ms(seconds)} ms" for axis, seconds in e.timeline.exposed.items())
        sent = next((piece for piece in e.timeline.critical if piece.stream != "compute"), None)
        return (
            f"on {e.timeline.machine}, devices compute nothing for {_ms(e.timeline.exposed_seconds)} ms while a "
            f"transfer goes on ({axes}), {times}. {_longest_wait(e, sent)}{hint}"
        ), sent.line if sent else ""

    def exposed(e: Evidence) -> float:
        assert e.timeline
        return e.timeline.exposed_seconds

    return within("exposed communication", Kind.TIME, "exposed", exposed, look, evidence, ratio, **_MS, **options)


def _longest_wait(e: Evidence, sent: Piece | None) -> str:
    """Name the transfer that makes up most of the critical path, and how often a device runs it."""
    if sent is None:
        return ""
    runs = sum(c.count for c in e.costs.collectives if (c.kind, c.line) == (sent.kind, sent.line))
    often = f", which a device runs {runs} times" if runs > 1 else ""
    return f"The step waits longest for {plain_kind(sent.kind)}{often}: {_ms(sent.seconds)} ms of its critical path. "


def exposed_over_within(evidence: TaskEvidence, ratio: float, axis: str, hint: str, **options: Any) -> Fact:
    """Limit the step time added by communication over ``axis`` to ``ratio`` times the reference's.

    That is the step's time minus its time with free links on that axis. Devices of a pipeline wait for many reasons;
    this is what hiding that communication could still save. ``Task.exposed_axes`` must name the axis.
    """
    name = f"exposed over {axis}"
    if evidence.at_scale and evidence.at_scale.exposed is None:
        why = "this program was not timed without that communication"
        return unmeasured(name, Kind.TIME, why, options.get("weight", 1))

    def look(e: Evidence, times: str) -> tuple[str, str]:
        assert e.timeline
        return (
            f"on {e.timeline.machine} a step takes {_ms(e.timeline.seconds)} ms, and {_ms(e.exposed or 0)} ms less if "
            f"sending over {axis!r} took no time, {times}. {hint}"
        ), ""

    return within(name, Kind.TIME, "spent", lambda e: e.exposed or 0, look, evidence, ratio, **_MS, **options)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
