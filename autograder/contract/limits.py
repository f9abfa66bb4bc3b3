"""Facts limited by the reference or the naive baseline: memory and time at a realistic size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from autograder.contract import facts
from autograder.contract.facts import unmeasured
from autograder.contract.task import Case, Evidence, TaskEvidence
from autograder.contract.text import count_of, distinct_bytes, format_bytes, short
from autograder.contract.verdict import Direction, Fact, Kind, Unit
from course.program.ir import plain_kind
from course.program.simulator import Piece

# A forward and backward pass is 3/4 of a step that recomputes every activation, slightly less if the first
# layer's input needs no gradient.
LEAST_WORK = 0.7
MOST_ARRAYS = 6
REFERENCE, NAIVE = "reference", "naive"
_CHANGES = (
    "the program changes with its sizes: {}. It must run the same operations on larger arrays: decide by the arguments "
    "you are given, not by how large arrays are, and cut them into the same number of parts at every size."
)


def temporaries_within(evidence: TaskEvidence, ratio: float, hint: str, **options: Any) -> Fact:
    """Limit live temporaries to ``ratio`` times the reference's; ``options`` as for ``_within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        return _at_the_peak(e, format_bytes(e.memory.temporaries), times, hint)

    return _within(
        "live temporaries",
        Kind.MEMORY,
        "temporaries",
        lambda e: e.memory.temporaries,
        look,
        evidence,
        ratio,
        unit=Unit.BYTES,
        **options,
    )


def temporaries_at_most(
    evidence: TaskEvidence, most: Callable[[Case[Any]], int], hint: str, *, weight: float = 1
) -> Fact:
    """Limit live temporaries at scale to this many bytes, a closed form of the case."""
    name, figure, e = "live temporaries", "temporaries", evidence.at_scale
    factor = evidence.factor(name)
    if barred := _barred(name, Kind.MEMORY, evidence, figure, weight=weight):
        return barred
    assert e
    at_peak, limit = e.memory.temporaries, factor * most(e.case)
    live, most_allowed = distinct_bytes(at_peak, limit)
    message, line = _at_the_peak(e, live, f"{most_allowed} are allowed", hint) if at_peak > limit else ("", "")
    known = {key: evidence.references[figure].get(key) for key in (REFERENCE, NAIVE)}
    return facts.case_fact(
        e, name, Kind.MEMORY, message, at_peak, limit, unit=Unit.BYTES, line=line, weight=weight, **known
    )


def _at_the_peak(e: Evidence, live: str, allowed: str, hint: str) -> tuple[str, str]:
    """The message, which ends with a table of live arrays, and the line of the largest array."""
    at_peak, alive = e.memory.temporaries, e.memory.alive
    message = f"at the peak {live} of temporaries are live at once, {allowed}"
    if not alive:
        return f"{message}. {hint}", ""
    message += f"; the largest, {_array(alive[0])}, takes {format_bytes(alive[0].bytes)}"
    ranked = sorted(Counter(alive).items(), key=lambda entry: -entry[0].bytes * entry[1])
    rows = [
        (format_bytes(array.bytes * count), f"{count} x {_array(array)}", _origin_of(array.kind), array.line)
        for array, count in ranked[:MOST_ARRAYS]
    ]
    if rest := at_peak - sum(array.bytes * count for array, count in ranked[:MOST_ARRAYS]):
        rows.append((format_bytes(rest), "smaller ones", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"  {size:>{widths[0]}}  {arrays:{widths[1]}}  {origin:{widths[2]}}  {line}".rstrip()
        for size, arrays, origin, line in rows
    )
    return "\n".join([f"{message}. {hint}".strip(), "  alive at the peak:", *lines]), alive[0].line


def _origin_of(kind: str) -> str:
    return "kept by a loop" if kind == "while" else plain_kind(kind)


def _array(temporary: Any) -> str:
    return f"{temporary.dtype}[{'x'.join(map(str, temporary.shape))}]"


# --8<-- [start:flops_within]
def flops_within(evidence: TaskEvidence, ratio: float, hint: str, **options: Any) -> Fact:
    """Limit the FLOPs of matrix products to ``ratio`` times the reference's; ``options`` as for ``_within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        return f"a device computes {short(e.costs.flops)} FLOPs, {times}. {hint}", ""

    return _within(
        "FLOPs", Kind.COMPUTE, "flops", lambda e: e.costs.flops, look, evidence, ratio, unit=Unit.FLOPS, **options
    )


# --8<-- [end:flops_within]


def largest_within(
    evidence: TaskEvidence, most: Callable[[Case[Any]], int], hint: str, *, weight: float = 1, least: float = LEAST_WORK
) -> Fact:
    """Limit the elements of every temporary at scale to ``most``; ``least`` as for ``_within``."""
    name, e = "largest temporary", evidence.at_scale
    factor = evidence.factor(name)
    if barred := _barred(name, Kind.MEMORY, evidence, "temporaries", least=least, weight=weight):
        return barred
    assert e
    largest, elements, limit = e.memory.largest, e.memory.largest_numbers, factor * most(e.case)
    message, line = "", ""
    if largest and elements > limit:
        message = f"at some point an array {_array(largest)} with {elements:,} elements is live. {hint}"
        line = largest.line
    return facts.case_fact(e, name, Kind.MEMORY, message, elements, limit, unit=Unit.ELEMENTS, line=line, weight=weight)


def time_within(evidence: TaskEvidence, ratio: float, hint: str, **options: Any) -> Fact:
    """Limit the predicted step time to ``ratio`` times the reference's; ``options`` as for ``_within``."""

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

    return _within("predicted time", Kind.TIME, "seconds", _seconds, look, evidence, ratio, **_MS, **options)


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
        return unmeasured(name, Kind.TIME, _LEFT_OUT, weight)
    if e.structural_mismatch:
        return _different(name, Kind.TIME, e, weight)
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
    if barred := _barred(name, Kind.TIME, evidence, "exposed", NAIVE, weight=weight):
        return barred
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
    """Limit exposed communication to ``ratio`` times the reference's; ``options`` as for ``_within``."""

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

    return _within("exposed communication", Kind.TIME, "exposed", exposed, look, evidence, ratio, **_MS, **options)


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

    return _within(name, Kind.TIME, "spent", lambda e: e.exposed or 0, look, evidence, ratio, **_MS, **options)


_MS: dict[str, Any] = {"unit": Unit.MILLISECONDS, "factor": 1e3}
_LEFT_OUT = "this check leaves the realistic size out"


def _within(
    name: str,
    kind: Kind,
    figure: str,
    measure: Callable[[Evidence], float],
    explain: Callable[[Evidence, str], tuple[str, str]],
    evidence: TaskEvidence,
    ratio: float,
    *,
    unit: Unit,
    factor: float = 1,
    weight: float = 1,
    than: str = REFERENCE,
    least: float = LEAST_WORK,
) -> Fact:
    """Limit a figure at scale to ``ratio`` times the reference's or the naive baseline's.

    Args:
        name: The fact's name.
        kind: The fact's kind.
        figure: Its name among the references.
        measure: Extracts the figure from the evidence.
        explain: Returns the message and line for an excessive figure, given its ratio in words.
        evidence: The evidence, and the measured references and naive baselines.
        ratio: The limit.
        unit: The display unit.
        factor: Conversion factor to ``unit``.
        weight: The fact's weight, 0 for advice.
        than: ``reference`` or ``naive``.
        least: The share of the reference's FLOPs below which part of the work must be missing.
    """
    ratio *= evidence.factor(name)
    if barred := _barred(name, kind, evidence, figure, than, least, weight):
        return barred
    e, known = evidence.at_scale, evidence.references[figure]
    assert e
    measured, against = measure(e), known[than]
    message, line = "", ""
    if measured > ratio * against:
        shares = (f"{measured / against:.{digits}f}" for digits in (2, 4, 9)) if against else ()
        many = next((share for share in shares if float(share) > ratio), "more than that")
        times = f"{many} times {_possessive(than)} (the limit is {ratio:g} times)" if against else ""
        if not weight and against:
            times = f"{many} times {_possessive(than)}; a good program reaches {ratio:g} times (this costs no points)"
        message, line = explain(e, times or f"and {_possessive(than)} is 0")
    shown = {key: factor * known[key] for key in (REFERENCE, NAIVE) if key in known}
    details = {
        "unit": unit,
        "of": e.timeline.machine if factor != 1 and e.timeline else "",
        "weight": weight,
        "line": line,
    }
    return facts.case_fact(e, name, kind, message, factor * measured, factor * ratio * against, **details, **shown)


def _barred(
    name: str,
    kind: Kind,
    evidence: TaskEvidence,
    figure: str,
    than: str = REFERENCE,
    least: float = LEAST_WORK,
    weight: float = 1,
) -> Fact | None:
    """Return the fact if the realistic size cannot be compared with the reference; None if it can."""
    e, known = evidence.at_scale, evidence.references
    if e is None:
        return unmeasured(name, kind, _LEFT_OUT, weight)
    if e.structural_mismatch:
        return _different(name, kind, e, weight)
    if than not in known.get(figure, {}) or not known.get("flops"):
        return unmeasured(name, kind, f"the {than} version has not been measured with this version of jax", weight)
    work = known["flops"]["reference"]
    if e.costs.flops < least * work:
        message = (
            f"at the realistic size the program computes {e.costs.flops:.3g} FLOPs, and the work takes {work:.3g}, "
            "including recomputation: is a part of the arrays left out there?"
        )
        return facts.case_fact(e, name, kind, message, "not comparable", weight=weight)
    return None


def _possessive(than: str) -> str:
    return "the naive baseline's" if than == NAIVE else f"the {than}'s"


def _different(name: str, kind: Kind, e: Evidence, weight: float) -> Fact:
    return facts.case_fact(e, name, kind, _CHANGES.format(e.structural_mismatch), "not comparable", weight=weight)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
