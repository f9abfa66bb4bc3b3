"""Facts about functions that return plain data, and decoding of their answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.facts import case_fact, worst
from autograder.contract.task import Case, Evidence
from autograder.contract.value_tasks import MAX_NESTING, Refusal, depth_of, show
from autograder.contract.verdict import Direction, Fact, Kind, Unit

# Far beyond any size, count or index in a correct answer.
LARGEST = 2**53


def decode(values: np.ndarray) -> Any:
    """Decode an answer from ``encode``; None if it is invalid: not finite, beyond ``LARGEST``, or forged."""
    try:
        text = values.tobytes().rstrip(b"\0")
        plain = json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_number)
        return _from_plain(plain) if depth_of(plain) <= MAX_NESTING else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def is_answer(values: np.ndarray) -> bool:
    """Return True if ``decode`` returns the actual answer, since None may also be an answer."""
    return decode(values) is not None or values.tobytes().rstrip(b"\0") == b"null"


def answer_matches(evidence: list[Evidence], explain: Callable[[Case[Any], Any], str]) -> Fact:
    """Require the correct answer in every case; ``explain`` interprets a wrong one without revealing the right one."""

    def look(e: Evidence) -> Fact:
        measured, expected = decode(e.measured["values"]), decode(e.expected["values"])
        message = ""
        if measured != expected or not is_answer(e.measured["values"]):
            message = f"your answer is {show(measured)}. {_or_none(explain, e.case, measured) or ''}".strip()
        return case_fact(e, "values", Kind.VALUES, message, show(measured), "the right answer")

    return worst([look(e) for e in evidence])


def every_answer_matches(
    evidence: list[Evidence],
    questions: Callable[[Case[Any]], Sequence[Any]],
    right: Callable[[Case[Any], Any, Any], bool],
    explain: Callable[[Case[Any], Any, Any], str],
    picture: Callable[[Case[Any], tuple[Any, ...]], str] = lambda *_: "",
) -> Fact:
    """Require a correct answer to every question of every case.

    Args:
        evidence: The cases.
        questions: The questions of a case, in order.
        right: Returns True for a correct answer to a question: ``(case, question, answer)``.
        explain: Interprets the first wrong answer of a case; takes the same arguments.
        picture: All answers to a known case, on separate lines, as from ``misplaced.grid``.
    """

    def look(e: Evidence) -> Fact:
        answers, queries = decode(e.measured["values"]), questions(e.case)
        answers = answers if isinstance(answers, tuple) and len(answers) == len(queries) else (None,) * len(queries)
        pairs = zip(queries, answers, strict=True)
        wrong = [(question, answer) for question, answer in pairs if not _or_none(right, e.case, question, answer)]
        message = (
            "" if queries and not wrong and is_answer(e.measured["values"]) else "this is not an answer to any question"
        )
        if wrong:
            message = _or_none(explain, e.case, *wrong[0]) or message
            message += "" if e.secret else _or_none(picture, e.case, answers) or ""
        details = {"direction": Direction.ALL, "unit": Unit.QUESTIONS}
        return case_fact(e, "values", Kind.VALUES, message, len(queries) - len(wrong), len(queries), **details)

    return worst([look(e) for e in evidence])


def _or_none(function: Callable[..., Any], *arguments: Any) -> Any:
    """Apply a contract's function to an answer; None if the answer is so odd that it raises."""
    try:
        return function(*arguments)
    except (ArithmeticError, ValueError, TypeError, LookupError, AttributeError, RecursionError, StopIteration):
        return None


def _number(text: str) -> int | float:
    number = float(text)
    if not abs(number) <= LARGEST:
        raise ValueError("no right answer holds such a number")
    return number if any(c in text for c in ".eE") else int(text)


def _from_plain(data: Any) -> Any:
    if isinstance(data, dict) and "refused" in data:
        return Refusal(data["refused"])
    if isinstance(data, dict):
        return P(*(tuple(e) if isinstance(e, list) else e for e in data["spec"]))
    return tuple(map(_from_plain, data)) if isinstance(data, list) else data
