"""What a judgement says: facts of a function, functions of a submission. The same words everywhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

PASS, PARTIAL, FAIL = "pass", "partial", "fail"
STUDENT_ERROR, LIMIT_EXCEEDED, REFUSED, NEEDS_HUMAN = "student_error", "limit_exceeded", "refused", "needs_human"


class Kind(StrEnum):
    """What a fact is about: right numbers, without which nothing else counts, or what they may cost."""

    VALUES = "values"
    GRADIENTS = "gradients"
    BUDGET = "budget"


@dataclass(frozen=True)
class Fact:
    """One thing that was measured about a program, and what it had to be.

    ``passed`` is None where nothing was measured; such a fact is worth no points either way.
    ``line`` is the learner's own, as ``cell:line``; ``weight`` is how much the fact counts among its function's, 0
    for advice.
    """

    name: str
    passed: bool | None
    measured: float | str | None = None
    limit: float | str | None = None
    unit: str = ""
    reference: float | str | None = None
    naive: float | str | None = None
    case: str = ""
    line: str = ""
    message: str = ""
    weight: float = 1.0
    kind: Kind = Kind.BUDGET

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Fact:
        return cls(**{**data, "kind": Kind(data.get("kind", Kind.BUDGET))})


@dataclass(frozen=True)
class Result:
    """The judgement of one function.

    ``message`` explains a verdict that no single fact explains. ``timeline`` is the step at the realistic size in
    brief (``course.render``), where official grading has looked at one, and ``form`` says what the Program of the
    first case does, so that those that do the same are found.
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

    def to_json(self) -> dict[str, Any]:
        """Plain data; without ``timeline`` and ``form`` where there is none, as verdicts were written before them."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("timeline", "form")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        facts = tuple(map(Fact.from_json, data["facts"]))
        return cls(**{**data, "facts": facts, "denied": tuple(data["denied"])})


@dataclass(frozen=True)
class Report:
    """All functions of one submission or notebook."""

    chapter: str
    functions: tuple[Result, ...]
    student: str = ""
    isolation: str = ""
    notes: tuple[str, ...] = field(default=())

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
        return {**asdict(self), "functions": tuple(result.to_json() for result in self.functions)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        functions = tuple(Result.from_json(result) for result in data["functions"])
        return cls(**{**data, "functions": functions, "notes": tuple(data["notes"])})


def conclude(name: str, max_points: float, facts: list[Fact]) -> Result:
    """Points and verdict from facts: wrong values or gradients earn nothing, else each fact counts by its weight.

    A fact that was not measured counts neither way, nor does one of weight 0, which is advice.
    """
    counted = [fact for fact in facts if fact.passed is not None and fact.weight]
    passed = [fact for fact in counted if fact.passed]
    if not counted or any(fact.kind != Kind.BUDGET and not fact.passed for fact in counted):
        passed = []
    share = sum(fact.weight for fact in passed) / sum(fact.weight for fact in counted) if counted else 0.0
    points = round(max_points * share, 2)
    verdict = PASS if counted and len(passed) == len(counted) else PARTIAL if passed else FAIL
    return Result(name, points, max_points, verdict, tuple(facts))


def with_denied(result: Result, denied: tuple[str, ...]) -> Result:
    """The same result, listing the system calls that the sandbox refused and reported."""
    return replace(result, denied=denied)
