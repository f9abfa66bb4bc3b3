"""Facts of a function, functions of a submission: what is measured, and the points that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

PASS, PARTIAL, FAIL = "pass", "partial", "fail"
STUDENT_ERROR, LIMIT_EXCEEDED, REFUSED, NEEDS_HUMAN = "student_error", "limit_exceeded", "refused", "needs_human"
NOT_MEASURED = "not measured"
# From this multiple of a limit on, a loop that runs too often is likely, which makes values wrong as well.
MUCH_MORE = 1.25
WHICH_DTYPE = "which dtype should travel?"
LATER_LOSSES = "The loss of step 0 is right"


class Kind(StrEnum):
    """What a fact is about. Without the right form, values and gradients nothing else counts."""

    FORM = "form"
    VALUES = "values"
    GRADIENTS = "gradients"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    TIME = "time"
    COMPUTE = "compute"
    PROGRAM = "program"

    @property
    def required(self) -> bool:
        return self in (Kind.FORM, Kind.VALUES, Kind.GRADIENTS)


# The most that an answer may earn which is right and misses the point of its exercise.
MISSES_THE_POINT = 0.5
_WRONG = {Kind.FORM: "results of another form", Kind.VALUES: "wrong values", Kind.GRADIENTS: "wrong gradients"}


class Unit(StrEnum):
    """Of a fact's numbers; the value is how people read it. ``Fact.of`` completes some: a machine, a dtype."""

    COUNT = ""
    BYTES = "bytes"
    ELEMENTS = "elements"
    OPERATIONS = "operations"
    LEAVES = "leaves"
    QUESTIONS = "questions"
    CHOICES = "choices"
    STEPS = "steps"
    FLOPS = "FLOPs"
    MILLISECONDS = "ms"
    RELATIVE = "relative"
    DEVICE_TIME = "of the devices' time"
    BEST_CHOICE = "of the best choice's"
    ONE_DEVICE = "of one device's"
    REFERENCE = "times the reference's"
    COLLECTIVES = "of collectives"
    PRODUCTS = "products"
    DTYPE = "of"


LARGE, UNITS = 10**7, ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
# How each unit's numbers are written; others as whole numbers, or with six digits.
_WRITTEN = {
    Unit.BYTES: ",.0f",
    Unit.FLOPS: ".4g",
    Unit.MILLISECONDS: ".4g",
    Unit.RELATIVE: ".2g",
    Unit.DEVICE_TIME: ".4f",
    Unit.BEST_CHOICE: ".1%",
    Unit.ONE_DEVICE: ".3f",
    Unit.REFERENCE: ".3f",
    Unit.COLLECTIVES: ".2f",
}


class Limit(StrEnum):
    """How ``Fact.limit`` bounds the measured number."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EXACTLY = "exactly"
    BETWEEN = "between"
    ALL = "all of"
    MOST = "most of"


# --8<-- [start:fact]
@dataclass(frozen=True)
class Fact:
    """One thing that was measured about a program, and what it had to be.

    Attributes:
        name: What a learner reads: ``all-gather bytes``.
        kind: What it is about; ``conclude`` gives no points where one of a required kind fails.
        passed: None where nothing was measured; such a fact is worth no points either way.
        measured: A number in ``unit``, or what was found instead of one (``missing``).
        limit: What it had to be, a pair where ``direction`` is ``BETWEEN``.
        direction: How ``limit`` bounds ``measured``.
        unit: Of all numbers here.
        of: What completes the unit: a machine, a dtype.
        reference: What the course's own solution measures.
        naive: What the naive baseline measures.
        interval: The least and the most that ``measured`` may be, where it is an estimate.
        case: Where it was measured.
        line: The learner's own, as ``cell:line``.
        message: What fell short, and a question that leads on.
        weight: How much the fact counts among its function's; 0 for advice.
        point: Whether the exercise is about it (``Task.point``): without it a function earns at most half.
    """

    name: str
    kind: Kind
    passed: bool | None
    measured: float | str | None = None
    limit: float | tuple[float, float] | str | None = None
    direction: Limit = Limit.AT_MOST
    unit: Unit = Unit.COUNT
    of: str = ""
    reference: float | None = None
    naive: float | None = None
    interval: tuple[float, float] | None = None
    case: str = ""
    line: str = ""
    message: str = ""
    weight: float = 1.0
    point: bool = False
    # --8<-- [end:fact]

    @property
    def amiss(self) -> int:
        """-1 where less was measured than the limit, 1 where more; 0 where it is met, or no number."""
        low, high = self.limit if isinstance(self.limit, tuple) else (self.limit, self.limit)
        if isinstance(self.measured, str) or isinstance(low, str) or isinstance(high, str):
            return 0
        if self.measured is None or low is None or high is None or self.passed:
            return 0
        return -1 if self.measured < low else int(self.measured > high)

    @property
    def excess(self) -> float:
        """What was measured as a multiple of the most that is allowed; infinite where nothing is."""
        most = self.limit[1] if isinstance(self.limit, tuple) else self.limit
        numbers = isinstance(self.measured, int | float) and isinstance(most, int | float) and most
        return self.measured / most if numbers else math.inf  # type: ignore[operator]

    @property
    def unit_text(self) -> str:
        """The unit as people read it: ``ms on 8xH100``."""
        join = {Unit.MILLISECONDS: f"ms on {self.of}", Unit.PRODUCTS: f"{self.of} x {self.of} products"}
        return (join.get(self.unit) or f"{self.unit} {self.of}") if self.of else str(self.unit)

    @property
    def measured_text(self) -> str:
        """What was measured, as people read it; empty where there is nothing."""
        return self.texts()[0]

    @property
    def limit_text(self) -> str:
        """What it had to be."""
        return self.texts()[1]

    def texts(self, write: Callable[[Any], str] | None = None) -> tuple[str, str, str, str]:
        """Measured, limit, reference and naive as people read them, each number as ``write`` has it."""
        write = write or self.write
        measured, limit = write(self.measured), ""
        if isinstance(self.limit, tuple):
            limit = " to ".join(dict.fromkeys(map(write, self.limit)))
        elif self.limit is not None:
            limit = write(self.limit)
        if self.interval:
            low, high = map(write, self.interval)
            measured = f"{'inconclusive: ' if self.passed is None else ''}{measured} ({low} to {high})"
        if self.direction in (Limit.ALL, Limit.MOST) and not isinstance(self.measured, str):
            measured, limit = (
                f"{measured} of {limit}",
                "most" if self.direction == Limit.MOST else f"{limit} of {limit}",
            )
        return measured, limit, write(self.reference), write(self.naive)

    def readable(self, number: float) -> str:
        """A number with its unit; a large number of bytes in MiB or GiB."""
        return (size(number) if self.unit == Unit.BYTES else "") or f"{self.write(number)} {self.unit_text}".strip()

    def write(self, number: Any) -> str:
        """A number in this fact's unit, as people read it."""
        if number is None or isinstance(number, str):
            return number or ""
        form = _WRITTEN.get(self.unit, ",.0f" if float(number).is_integer() or abs(number) >= 1000 else ".6g")
        return format(number, form)


@dataclass(frozen=True)
class Result:
    """The judgement of one function.

    ``message`` explains a verdict that no single fact explains, and ``original`` is what Python or JAX said, where it
    says that in other words. ``quoted`` has the text of the lines that are named, on the learner's own machine.
    ``cases`` names those that it was judged on, where they are no secret. ``timeline`` is the step at scale in brief
    (``course.render``), where official grading has looked at one, and ``form`` says what the Program of the first case
    does, so that those that do the same are found.
    """

    name: str
    points: float
    max_points: float
    verdict: str
    facts: tuple[Fact, ...] = ()
    line: str = ""
    message: str = ""
    denied: tuple[str, ...] = ()
    timeline: dict[str, Any] | None = None
    form: str = ""
    original: str = ""
    quoted: dict[str, str] = field(default_factory=dict)
    cases: tuple[str, ...] = ()

    @property
    def missed(self) -> list[Fact]:
        """The facts that fell short and cost points."""
        return [fact for fact in self.facts if fact.passed is False and fact.weight]

    @property
    def reason(self) -> str:
        """Why it earns nothing, or at most half, whatever else is met; empty where each fact counts by its weight."""
        wrong = [_WRONG[kind] for kind in _WRONG if any(fact.kind == kind for fact in self.missed)]
        if wrong:
            return f"{' and '.join(wrong).capitalize()} earn nothing, whatever else is met. {self.together}".strip()
        point = [f"“{fact.name}”" for fact in self.missed if fact.point]
        return f"At most half of the points without {listed(point)}: the exercise is about that." if point else ""

    @property
    def together(self) -> str:
        """Which facts may fall short for one cause, and which of them to look at first; empty for none."""
        wrong = [fact for fact in self.missed if fact.kind in (Kind.VALUES, Kind.GRADIENTS)]
        sent = [f for f in self.missed if f.kind is Kind.COMMUNICATION and f.case in {fact.case for fact in wrong}]
        sent = sent if {fact.amiss for fact in sent} in ({-1}, {1}) else []
        names = [f"“{fact.name}”" for fact in (*wrong, *sent)]
        if len(names) < 2:
            return ""
        may = f"{listed(names)} may have one cause"
        if sent and sent[0].amiss < 0:
            return f"{may}: less is sent than should be. What is never sent?"
        if sent:
            asked = "Does a loop run too often, or is something reduced that should not be?"
            if any(fact.kind is Kind.VALUES for fact in wrong) and any(fact.excess < MUCH_MORE for fact in sent):
                asked = f"Begin with “{wrong[0].name}”."
            asked = "Which dtype should travel?" if all(WHICH_DTYPE in fact.message for fact in sent) else asked
            return f"{may}: more is sent than should be. {asked}"
        back = next((fact for fact in wrong if fact.kind is Kind.GRADIENTS), wrong[0])
        first = back if LATER_LOSSES in wrong[0].message else wrong[0]
        return f"{may}: begin with “{first.name}”."

    @property
    def not_started(self) -> bool:
        """True where it is still the stub that was handed out."""
        own = self.line.partition(":")[0] in ("", self.name)
        return self.verdict == STUDENT_ERROR and own and self.message.startswith(f"{self.name} is not written yet")

    @property
    def compared(self) -> str:
        """What a right answer measures where the reference measures something else; empty where it does not."""
        found = [
            f"{fact.name}: yours {fact.readable(fact.measured)}, the reference {fact.readable(fact.reference)}"
            for fact in self.facts
            if fact.reference and isinstance(fact.measured, int | float)
            if abs(fact.measured - fact.reference) > 0.01 * fact.reference
        ]
        text = "; ".join(found)
        return text[:1].upper() + text[1:] if self.verdict == PASS else ""

    def to_json(self) -> dict[str, Any]:
        """Plain data, to the letter what a result from ``from_json`` gives: figures are floats."""
        return msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(self), Result))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        """From ``to_json``; raises ``msgspec.ValidationError`` where it is no result."""
        return msgspec.convert(data, cls)


@dataclass(frozen=True)
class Report:
    """All functions of one submission or notebook."""

    chapter: str
    functions: tuple[Result, ...]
    student: str = ""
    isolation: str = ""
    notes: tuple[str, ...] = ()

    @property
    def points(self) -> float:
        return round(sum(result.points for result in self.functions), 2)

    @property
    def max_points(self) -> float:
        return sum(result.max_points for result in self.functions)

    @property
    def passed(self) -> bool:
        return all(result.verdict == PASS for result in self.functions)

    def to_json(self) -> dict[str, Any]:
        """Plain data, to the letter what a report from ``from_json`` gives: figures are floats."""
        return msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(self), Report))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """From ``to_json``; raises ``msgspec.ValidationError`` where it is no report."""
        return msgspec.convert(data, cls)


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, in the plural unless it is 1: ``1 other``, ``2,048 others``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(number: float) -> str:
    """A large number of bytes in the unit that people think in; "" for a small one."""
    if number < LARGE:
        return ""
    power = min(int(math.log2(number)) // 10, len(UNITS) - 1)
    return f"{number / 1024**power:.4g} {UNITS[power]}"


def listed(words: Iterable[str]) -> str:
    """``a, b and c``."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last


def conclude(name: str, max_points: float, facts: list[Fact]) -> Result:
    """Points and verdict from facts: each counts by its weight, but wrong values or gradients leave nothing.

    An answer that misses what the exercise is about keeps at most half. A fact that was not measured counts neither
    way, nor does one of weight 0, which is advice.
    """
    counted = [fact for fact in facts if fact.passed is not None and fact.weight]
    passed = [fact for fact in counted if fact.passed]
    if not counted or any(fact.kind.required and not fact.passed for fact in counted):
        passed = []
    share = sum(fact.weight for fact in passed) / sum(fact.weight for fact in counted) if counted else 0.0
    if any(fact.point and not fact.passed for fact in counted):
        share = min(share, MISSES_THE_POINT)
    points = round(max_points * share, 2)
    verdict = PASS if counted and len(passed) == len(counted) else PARTIAL if passed else FAIL
    return Result(name, points, max_points, verdict, tuple(facts))


def with_denied(result: Result, denied: tuple[str, ...]) -> Result:
    """The same result, listing the system calls that the sandbox refused and reported."""
    return replace(result, denied=denied)
