"""Facts about functions, and results of functions and submissions: measurements, and the points that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

import msgspec

from autograder.contract.sentence import About
from autograder.contract.text import binary_units, join_words, short

PASS, PARTIAL, FAIL = "pass", "partial", "fail"
STUDENT_ERROR, LIMIT_EXCEEDED, REFUSED, NEEDS_HUMAN = "student_error", "limit_exceeded", "refused", "needs_human"
NOT_MEASURED = "not measured"
# At this multiple of a limit or above, a loop probably runs too often, which makes values wrong as well.
MUCH_MORE = 1.25
# A difference of a smaller share of bytes comes from a few single numbers, a loss or a count.
FEW_BYTES = 0.02


class Kind(StrEnum):
    """The subject of a fact. Without the right form, values, gradients and tools nothing else counts."""

    FORM = "form"
    VALUES = "values"
    GRADIENTS = "gradients"
    TOOLS = "tools"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    TIME = "time"
    COMPUTE = "compute"
    PROGRAM = "program"

    @property
    def required(self) -> bool:
        return self in _WRONG


# The largest share of points for a correct answer that misses the point of its exercise.
SHARE_WITHOUT_A_CORE_FACT = 0.5
_WRONG = {
    Kind.FORM: "results of the wrong structure",
    Kind.VALUES: "wrong values",
    Kind.GRADIENTS: "wrong gradients",
    Kind.TOOLS: "collectives that are not allowed",
}


class Unit(StrEnum):
    """The unit of a fact's numbers; the value is its display text. ``Fact.of`` completes some: a machine, a dtype."""

    COUNT = ""
    BYTES = "bytes"
    ELEMENTS = "elements"
    OPERATIONS = "operations"
    LEAVES = "leaves"
    QUESTIONS = "answers"
    CHOICES = "choices"
    STEPS = "steps"
    FLOPS = "FLOPs"
    MILLISECONDS = "ms"
    RELATIVE = "relative"
    DEVICE_TIME = "of the devices' time"
    BEST_CHOICE = "of the best choice's"
    ONE_DEVICE = "times a single device's"
    REFERENCE = "times the reference's"
    COLLECTIVES = "of collectives"
    PRODUCTS = "products"
    DTYPE = "of"


# Number formats by unit; all others are written as whole numbers or with six digits.
_WRITTEN = {
    Unit.BYTES: ",.0f",
    Unit.MILLISECONDS: ".4g",
    Unit.RELATIVE: ".2g",
    Unit.DEVICE_TIME: ".4f",
    Unit.BEST_CHOICE: ".1%",
    Unit.ONE_DEVICE: ".3f",
    Unit.REFERENCE: ".3f",
    Unit.COLLECTIVES: ".2f",
}


class Direction(StrEnum):
    """The direction in which ``Fact.limit`` bounds the measured number."""

    AT_MOST = "at most"
    AT_LEAST = "at least"
    EXACTLY = "exactly"
    BETWEEN = "between"
    ALL = "all of"
    MOST = "most of"


# --8<-- [start:fact]
@dataclass(frozen=True)
class Fact:
    """A measured property of a program, with its requirement.

    Attributes:
        name: The name learners see: ``all-gather bytes``.
        kind: Its subject; ``conclude`` gives no points if a fact of a required kind fails.
        passed: None if nothing was measured; such a fact has no effect on points.
        measured: A number in ``unit``, or a description instead (``missing``).
        limit: The required value, a pair if ``direction`` is ``BETWEEN``.
        direction: How ``limit`` bounds ``measured``.
        unit: The unit of all numbers here.
        of: Completes the unit: a machine, a dtype.
        reference: The figure of the course's own solution.
        naive: The figure of the naive baseline.
        interval: The bounds of ``measured``, if it is an estimate.
        case: The case in which it was measured.
        line: The learner's line, as ``cell:line``.
        message: The failure, with a question as a hint.
        about: What the message is about, where other sentences depend on it.
        weight: Its weight among the function's facts; 0 for advice.
        core: True if the exercise is about it (``Task.core_facts``): failing it limits the function to half its points.
    """

    name: str
    kind: Kind
    passed: bool | None
    measured: float | str | None = None
    limit: float | tuple[float, float] | str | None = None
    direction: Direction = Direction.AT_MOST
    unit: Unit = Unit.COUNT
    of: str = ""
    reference: float | None = None
    naive: float | None = None
    interval: tuple[float, float] | None = None
    case: str = ""
    line: str = ""
    message: str = ""
    about: tuple[About, ...] = ()
    weight: float = 1.0
    core: bool = False
    # --8<-- [end:fact]

    @property
    def amiss(self) -> int:
        """-1 if the measured number is below the limit, 1 if above; 0 if the limit is met or there is no number."""
        low, high = self.limit if isinstance(self.limit, tuple) else (self.limit, self.limit)
        if isinstance(self.measured, str) or isinstance(low, str) or isinstance(high, str):
            return 0
        if self.measured is None or low is None or high is None or self.passed:
            return 0
        return -1 if self.measured < low else int(not self.measured <= high)

    @property
    def nearly(self) -> bool:
        """True if bytes are so close to a limit that only single numbers can be missing, or redundant."""
        low, high = self.limit if isinstance(self.limit, tuple) else (self.limit, self.limit)
        if self.unit != Unit.BYTES or any(not isinstance(n, int | float) for n in (self.measured, low, high)):
            return False
        return low * (1 - FEW_BYTES) <= self.measured <= high * (1 + FEW_BYTES)  # type: ignore[operator]

    @property
    def excess(self) -> float:
        """The measured number as a multiple of the upper limit; infinite if that is 0."""
        most = self.limit[1] if isinstance(self.limit, tuple) else self.limit
        numbers = isinstance(self.measured, int | float) and isinstance(most, int | float) and most
        return self.measured / most if numbers else math.inf  # type: ignore[operator]

    @property
    def unit_text(self) -> str:
        """The unit for display: ``ms on 8xH100``."""
        join = {Unit.MILLISECONDS: f"ms on {self.of}", Unit.PRODUCTS: f"{self.of} x {self.of} products"}
        return (join.get(self.unit) or f"{self.unit} {self.of}") if self.of else str(self.unit)

    @property
    def measured_text(self) -> str:
        """The measurement for display; empty if there is none."""
        return self.texts()[0]

    @property
    def limit_text(self) -> str:
        """The requirement for display."""
        return self.texts()[1]

    def texts(self, write: Callable[[Any], str] | None = None) -> tuple[str, str, str, str]:
        """Measured, limit, reference and naive for display, each number formatted by ``write``."""
        write = write or self.write
        measured, limit = write(self.measured), ""
        if isinstance(self.limit, tuple):
            limit = " to ".join(dict.fromkeys(map(write, self.limit)))
        elif self.limit is not None:
            limit = write(self.limit)
        if self.interval:
            low, high = map(write, self.interval)
            measured = f"{'inconclusive: ' if self.passed is None else ''}{measured} ({low} to {high})"
        if self.direction in (Direction.ALL, Direction.MOST) and not isinstance(self.measured, str):
            measured, limit = (
                f"{measured} of {limit}",
                "most" if self.direction == Direction.MOST else f"{limit} of {limit}",
            )
        return measured, limit, write(self.reference), write(self.naive)

    def readable(self, number: float) -> str:
        """A number with its unit; a large number of bytes in MiB or GiB."""
        return (
            binary_units(number) if self.unit == Unit.BYTES else ""
        ) or f"{self.write(number)} {self.unit_text}".strip()

    def write(self, number: Any) -> str:
        """Format a number in this fact's unit for display."""
        if number is None or isinstance(number, str):
            return number or ""
        if self.unit == Unit.FLOPS:
            return short(number)
        form = _WRITTEN.get(self.unit, ",.0f" if float(number).is_integer() or abs(number) >= 1000 else ".6g")
        return format(number, form)


class _AsJson:
    """A result or a report, as plain data and back."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data, with figures as floats, so that a copy from ``from_json`` gives the same data."""
        return msgspec.to_builtins(msgspec.convert(msgspec.to_builtins(self), type(self)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Build from ``to_json`` data; raises ``msgspec.ValidationError`` if it is invalid."""
        return msgspec.convert(data, cls)


@dataclass(frozen=True)
class Result(_AsJson):
    """The judgement of one function.

    ``message`` explains a verdict that no single fact explains, and ``original`` is the message of Python or JAX if
    ``message`` rephrases it. ``quoted`` has the text of the lines named, on the learner's own machine.
    ``cases`` names the cases it was judged on, unless they are secret; ``cases_left`` is the number of those that are
    judged once these pass. ``not_started`` says that it is still the released stub. ``timeline`` is a summary of the
    step at scale (``course.render``), if official grading analysed one, and ``form`` is a canonical form of the first
    case's Program, used to find equivalent ones. ``unreadable`` says that a person is needed because of what was
    submitted, which ``message`` describes, and not because of a fault of the grader.
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
    cases_left: int = 0
    not_started: bool = False
    unreadable: bool = False

    @property
    def missed(self) -> list[Fact]:
        """The facts that failed and cost points."""
        return [fact for fact in self.facts if fact.passed is False and fact.weight]

    @property
    def shown(self) -> tuple[Fact, ...]:
        """The facts for a learner: failed advice is left out until everything else passes."""
        return tuple(fact for fact in self.facts if fact.weight or fact.passed is not False or not self.missed)

    @property
    def reason(self) -> str:
        """The reason why it earns nothing, or at most half, whatever else passes; empty if facts count by weight."""
        if self.verdict == STUDENT_ERROR:
            return ""
        if self.wrong:
            return f"No points for {self.wrong}, whatever other limits are met. {self.together}".strip()
        point = [f"“{fact.name}”" for fact in self.missed if fact.core]
        half = f"At most half of the points without {join_words(point)}, which the exercise is about." if point else ""
        return f"{half} {self._costs}".strip()

    @property
    def wrong(self) -> str:
        """The errors that make everything else not count: ``wrong values and wrong gradients``; empty if none."""
        wrong = {kind: _WRONG[kind] for kind in _WRONG if any(fact.kind == kind for fact in self.missed)}
        values = [fact.name for fact in self.missed if fact.kind is Kind.VALUES]
        if values and "values" not in values:
            wrong[Kind.VALUES] = "wrong " + join_words(f"“{name}”" for name in values)
        return " and ".join(wrong.values())

    @property
    def _costs(self) -> str:
        """The points that each missed fact costs a partial answer; with the points left, they add up."""
        counted = sum(fact.weight for fact in self.facts if fact.passed is not None)
        if self.verdict != PARTIAL or not counted:
            return ""
        costs = [round(self.max_points * fact.weight / counted, 2) for fact in self.missed]
        # One of them also absorbs the rounding and, if the exercise is about it, the points that halving takes.
        bears = next((at for at, fact in enumerate(self.missed) if fact.core), 0)
        costs[bears] = round(costs[bears] + self.max_points - self.points - sum(costs), 2)
        each = [f"“{fact.name}” costs {cost:g}" for fact, cost in zip(self.missed, costs, strict=True)]
        points = "point" if self.max_points == 1 else "points"
        return f"{join_words(each)} of {self.max_points:g} {points}: {self.points:g} left."

    @property
    def together(self) -> str:
        """Facts that may have failed for the same reason, and which of them to examine first; empty if none."""
        wrong = [fact for fact in self.missed if fact.kind in (Kind.VALUES, Kind.GRADIENTS)]
        sent = [f for f in self.missed if f.kind is Kind.COMMUNICATION and f.case in {fact.case for fact in wrong}]
        sent = [fact for fact in sent if not fact.nearly]
        sent = sent if {fact.amiss for fact in sent} in ({-1}, {1}) else []
        names = [f"“{fact.name}”" for fact in (*wrong, *sent)]
        if len(names) < 2:
            return ""
        may = f"{join_words(names)} may have the same cause"
        back = next((fact for fact in wrong if fact.kind is Kind.GRADIENTS), wrong[0])
        first = back if {About.LATER_LOSSES, About.WRONG_GRADIENTS} & {*wrong[0].about} else wrong[0]
        if sent and sent[0].amiss < 0:
            return f"{may}: less is sent than should be. What is never sent?"
        if sent:
            question = "Does a loop run too often, or is something reduced that should not be?"
            if About.SUM_OR_MEAN in first.about or any(fact.excess < MUCH_MORE for fact in sent):
                question = f"Begin with “{first.name}”."
            question = "Which dtype should travel?" if all(About.DTYPE in fact.about for fact in sent) else question
            return f"{may}: more is sent than should be. {question}"
        return f"{may}: begin with “{first.name}”."

    @property
    def unjudged(self) -> bool:
        """True if there are no numbers to judge: the code raised an error, or its result is of another form."""
        other = bool(self.missed) and all(fact.kind is Kind.FORM for fact in self.missed)
        return other or (self.verdict == STUDENT_ERROR and not self.missed and not self.not_started)

    @property
    def compared(self) -> str:
        """The figures of a right answer that differ from the reference's; empty if none do."""
        comparisons = [
            f"{fact.name}: yours {fact.readable(fact.measured)}, the reference {fact.readable(fact.reference)}"
            for fact in self.facts
            if fact.reference and isinstance(fact.measured, int | float)
            if abs(fact.measured - fact.reference) > 0.01 * fact.reference
        ]
        text = "; ".join(comparisons)
        return text[:1].upper() + text[1:] if self.verdict == PASS else ""


@dataclass(frozen=True)
class Report(_AsJson):
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


def conclude(name: str, max_points: float, facts: list[Fact]) -> Result:
    """Compute points and verdict from facts: each counts by its weight, but wrong values or gradients earn nothing.

    An answer that misses the point of the exercise keeps at most half. Unmeasured facts and facts of weight 0, which
    are advice, do not count.
    """
    counted = [fact for fact in facts if fact.passed is not None and fact.weight]
    passed = [fact for fact in counted if fact.passed]
    if not counted or any(fact.kind.required and not fact.passed for fact in counted):
        passed = []
    share = sum(fact.weight for fact in passed) / sum(fact.weight for fact in counted) if counted else 0.0
    if any(fact.core and not fact.passed for fact in counted):
        share = min(share, SHARE_WITHOUT_A_CORE_FACT)
    points = round(max_points * share, 2)
    verdict = PASS if counted and len(passed) == len(counted) else PARTIAL if passed else FAIL
    return Result(name, points, max_points, verdict, each_message_once(facts))


def each_message_once(facts: Sequence[Fact]) -> tuple[Fact, ...]:
    """The facts, where a message that several have is that of the first; the others name it. Advice comes last."""
    first: dict[str, str] = {}
    for fact in sorted(facts, key=lambda fact: not fact.weight):
        first.setdefault(fact.message, fact.name)

    def once(fact: Fact) -> Fact:
        other = first[fact.message] if fact.message else fact.name
        return fact if other == fact.name else replace(fact, message=f"the same as for “{other}”")

    return tuple(map(once, facts))
