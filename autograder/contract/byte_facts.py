"""Facts about bytes: what a device sends, with which collectives, and what it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from jax.sharding import PartitionSpec as P

from autograder.contract.diagnosis.sent_bytes import deficit_cause, described, excess_cause, inserted
from autograder.contract.facts import case_fact, worst
from autograder.contract.sentence import Sentence
from autograder.contract.task import Case, Evidence
from autograder.contract.text import count_of, distinct_bytes, format_bytes, join_words
from autograder.contract.verdict import FEW_BYTES, Direction, Fact, Kind, Unit
from course.program import Collective
from course.program.ir import plain_kind
from course.program.program import spec_of

# Closed forms of bytes may be fractional; the comparison with measured bytes allows for rounding only.
ROUNDING = 1e-4
_NEVER_SENT = "is something never sent, or sent by another collective?"

Form = Callable[[Evidence], float]


def bytes_sent(
    name: str,
    evidence: list[Evidence],
    kinds: str | Iterable[str] | None,
    expected: Form,
    *,
    times: tuple[float, float] = (1, 1),
    least: Form | None = None,
    axes: Callable[[Case[Any]], Iterable[str]] | None = None,
    over: Callable[[Case[Any]], str] | None = None,
    hint: str = "",
    few: Callable[[Evidence, float], str] = lambda *_: "",
    weight: float = 1,
) -> Fact:
    """Require the bytes sent per device to be between two multiples, ``times``, of the closed form.

    Args:
        name: The fact's name.
        evidence: The cases.
        kinds: Collectives that count, by StableHLO's name, ``all_reduce``; None for all.
        expected: The closed form of a case.
        times: The lowest and the highest multiple allowed.
        least: An alternative closed form for the lower limit.
        axes: Count only collectives over exactly these axes of a case.
        over: Count only collectives over this axis of a case, alone or with others.
        hint: A question that ends the message.
        few: Explains, given a case and the bytes sent in it, why they are too few; empty if that is not known.
        weight: The fact's weight.
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds if kinds is None else tuple(kinds)

    def look(e: Evidence) -> Fact:
        sent = [c for c in e.costs.collectives if kinds is None or c.kind in kinds]
        sent = [c for c in sent if axes is None or set(c.axes) == set(axes(e.case))]
        sent = [c for c in sent if over is None or over(e.case) in c.axes]
        total, form = sum(c.total_bytes for c in sent), expected(e)
        low, high = least(e) if least else form * times[0], form * times[1]
        sentence = Sentence()
        if not low * (1 - ROUNDING) <= total <= high * (1 + ROUNDING):
            by = f" by {' or '.join(map(plain_kind, kinds))}" if kinds and len(kinds) < 3 else ""
            by += f" over {over(e.case)!r}" if over else ""
            question = hint if total > high else ""
            sentence = _too_much_or_little(e, by, sent, total, low, high, few(e, total)).then(question)
        line = _many(e, sent, total, high)[0].line if sent and total > high else ""
        figures: dict[str, Any] = {"direction": Direction.BETWEEN, "unit": Unit.BYTES, "line": line, "weight": weight}
        return case_fact(
            e, name, Kind.COMMUNICATION, sentence.text, total, (low, high), about=sentence.about, **figures
        )

    return worst([look(e) for e in evidence], name, Kind.COMMUNICATION)


def bytes_at_most(
    name: str, evidence: list[Evidence], kinds: Iterable[str], most: Form, hint: str, *, of_wrapper: Form = lambda _: 0
) -> Fact:
    """Limit the bytes a device sends, over all these kinds of collectives together, to a closed form.

    Args:
        name: The fact's name.
        evidence: The cases that were run.
        kinds: Collective kinds, by their names in StableHLO.
        most: Upper limit in bytes per device.
        hint: A sentence appended to the message.
        of_wrapper: Those bytes that the wrapper itself sends, which do not count.
    """
    kinds = tuple(kinds)

    def look(e: Evidence) -> Fact:
        sent = [c for c in e.costs.collectives if c.kind in kinds]
        # Both are rounded, since a difference of thirds of bytes is not exact.
        total, limit = (round(x, 3) for x in (max(sum(c.total_bytes for c in sent) - of_wrapper(e), 0), most(e)))
        sentence, line = Sentence(), e.line
        if total > limit * (1 + 1e-9):
            line = _many(e, sent, total, limit)[0].line
            sentence = _too_much_or_little(e, "", sent, total, 0, limit).then(hint)
        details: dict[str, Any] = {"unit": Unit.BYTES, "line": line, "about": sentence.about}
        return case_fact(e, name, Kind.COMMUNICATION, sentence.text, total, limit, **details)

    return worst([look(e) for e in evidence], name, Kind.COMMUNICATION)


def times_sent(
    name: str, evidence: list[Evidence], kind: str, expected: Callable[[Evidence], int], hint: str, fewer: bool = False
) -> Fact:
    """Require an exact count of one kind of collective per device, counting each array and unrolling loops.

    With ``fewer``, a lower count is also allowed, since several leaves may travel as one array; bytes are another fact.
    """

    def look(e: Evidence) -> Fact:
        sent = [c for c in e.costs.collectives if c.kind == kind]
        count, required = sum(c.count for c in sent), expected(e)
        most = max(sent, key=lambda c: c.count, default=None)
        message = ""
        if not (count <= required if fewer else count == required):
            should = f"should run at most {required}" if fewer else f"should run {required}"
            message = f"{e.case.place} a device runs {count_of(count, plain_kind(kind))} and {should}"
            question = (inserted(most) if most else "") or hint
            message += f"; the most frequent is {described(most)}. {question}" if most else f". {hint}"
        direction = Direction.AT_MOST if fewer else Direction.EXACTLY
        details = {"direction": direction, "line": most.line if most else ""}
        return case_fact(e, name, Kind.COMMUNICATION, message, count, required, **details)

    return worst([look(e) for e in evidence], name, Kind.COMMUNICATION)


def only_collectives(
    name: str,
    evidence: list[Evidence],
    allowed: Iterable[str],
    over: Callable[[Case[Any]], str] | None = None,
    kind: Kind = Kind.COMMUNICATION,
) -> Fact:
    """Allow no collectives except the given ones; a group of one device counts as none.

    With ``over``, only collectives over this axis of a case, alone or with others, count. ``Kind.TOOLS`` is for
    exercises that another collective would do entirely: unless the fact holds, the function earns no points.
    """
    allowed = set(allowed)

    def look(e: Evidence) -> Fact:
        others = [c for c in e.costs.collectives if c.kind not in allowed and (not over or over(e.case) in c.axes)]
        message, line = "", ""
        if others:
            first = max(others, key=lambda c: c.total_bytes)
            line = first.line
            names = join_words(map(plain_kind, sorted(allowed))) if allowed else "none at all"
            message = (
                f"{e.case.place} there is {described(first, article=True)}; allowed here: {names}. "
                "What does each device need that it does not have?"
            )
        return case_fact(e, name, kind, message, sum(c.count for c in others), 0, line=line)

    return worst([look(e) for e in evidence], name, kind)


def state_bytes(cases: list[Evidence], expected: Callable[[Evidence], int], whole: Callable[[Evidence], int]) -> Fact:
    """Require the outputs, the state a device keeps, to have exactly the bytes of the closed form.

    Args:
        cases: The cases whose outputs are the state.
        expected: The closed form of a case: bytes on one device, the sum of ``resident_bytes``.
        whole: Bytes of the unsharded state.
    """
    name = "state bytes per device"

    def look(e: Evidence) -> Fact:
        resident, form = sum(part.local_bytes(e.case.mesh) for part in e.outputs), expected(e)
        message = ""
        if resident != form or not e.outputs:
            size, should, tree = distinct_bytes(resident, form, whole(e))
            message = f"{e.case.place} each device holds {size} and should hold {should}; the whole tree takes {tree}"
        details = {"direction": Direction.EXACTLY, "unit": Unit.BYTES, "naive": whole(e)}
        return case_fact(e, name, Kind.MEMORY, message, resident, form, **details)

    return worst([look(e) for e in cases], name, Kind.MEMORY)


def resident_bytes(shape: tuple[int, ...], spec: P, mesh: dict[str, int], itemsize: int = 4) -> int:
    """Bytes of an array on one device: its total, divided by the size of every axis that its spec names."""
    parts = math.prod(mesh[axis] for axes in spec_of(spec, len(shape)) for axis in axes)
    return itemsize * math.prod(shape) // parts


def _too_much_or_little(
    e: Evidence, by: str, sent: list[Collective], total: float, low: float, high: float, little: str = ""
) -> Sentence:
    """Describe what is sent, what should be, and why they differ; ``little`` is the default reason for too little."""
    sends, limit = distinct_bytes(total, low if total < low else high)
    where = f"{e.case.place} a device sends {sends}{by}"
    if total < low:
        if total >= low * (1 - FEW_BYTES):
            few = f"only {format_bytes(low - total)} are missing, about as much as a loss, a count or a small leaf"
            return Sentence(
                f"{where} and should send at least {limit}: {few}. "
                "Which of these is never sent, or sent over too few axes?"
            )
        cause = deficit_cause(sent, low, e.inputs, e.case) or Sentence(little or _NEVER_SENT)
        return Sentence(f"{where} and should send at least {limit}: {cause.text}", cause.about)
    many = _many(e, sent, total, high, low)[1]
    return Sentence(f"{where} and should send at most {limit}; {many.text}", many.about)


def _many(
    e: Evidence, sent: list[Collective], total: float, high: float, low: float = 0
) -> tuple[Collective, Sentence]:
    return excess_cause(sent, total, high, low, bfloat16=getattr(e.case.sizes, "bfloat16", False))
