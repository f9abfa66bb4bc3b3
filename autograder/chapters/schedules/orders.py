"""``one_f_one_b``, ``interleaved`` and ``zero_bubble``: orders as text, judged by their cost."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from autograder.chapters.schedules.wrapping import MOST, OrderSizes
from autograder.contract import value_facts, value_tasks
from autograder.contract.case import UNSEEN
from autograder.contract.facts import unmeasured
from autograder.contract.task import Case, Task, TaskEvidence
from autograder.contract.text import count_of
from autograder.contract.value_tasks import Refusal, show
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings
from course.schedules import Costs, Measured, Schedule, family, measure, run, text_of, written

Question = tuple[int, ...]
# All three passes have the same length, so a whole backward pass, which is two of them, takes twice as long.
PASSES = Costs(1, 1, 1)
FOLLOW = "Draw it with schedule_svg(written(lines)) and follow one stage: "


@dataclass(frozen=True)
class Order:
    """Limits on the cost of an order.

    Attributes:
        name: Its name in the course's family of schedules.
        seconds: The longest permitted step for a question.
        in_flight: The most parts of microbatches in flight on a stage: ``(stage, *question)``.
        slow: The hint if a step takes longer.
        full: The hint if more is in flight.
    """

    name: str
    seconds: Callable[..., float]
    in_flight: Callable[..., int]
    slow: str
    full: str


ORDERS = {
    "one_f_one_b": Order(
        "1f1b",
        lambda stages, count: 3 * (count + stages - 1),
        lambda stage, stages, count: min(stages - stage, count),
        "where is it idle in the middle of the step, and had it started enough microbatches by then?",
        "which microbatch does it begin that could wait for the backward pass of an earlier one?",
    ),
    "interleaved": Order(
        "interleaved",
        lambda stages, count, repeats: 3 * (count + (stages - 1) / repeats),
        lambda stage, stages, count, repeats: min(
            2 * (stages - stage - 1) + (repeats - 1) * stages + 1, repeats * count
        ),
        "in which order do parts and microbatches come, forward and backward, and what does the stage wait for?",
        "how many forward passes come before its first backward pass?",
    ),
    "zero_bubble": Order(
        "zero_bubble",
        lambda stages, count: 3 * count + stages - 1 if count >= stages else 3 * (count + stages - 1),
        lambda stage, stages, count: min(stages, count),
        "where is it idle although it still has a W that it could run, or where does a W delay an I?",
        "how many microbatches have had their F but not yet their W? Which W could come earlier, or which F later?",
    ),
}


def refused(name: str, question: Question) -> bool:
    """Return True if a ``ValueError`` is the right answer."""
    return name == "interleaved" and bool(question[1] % question[0])


def questions(case: Case[OrderSizes]) -> list[Question]:
    """Questions with fewer and with more microbatches than stages, and 2 to 4 repeats if the case has repeats."""
    stages, most = case.sizes.num_stages, case.sizes.most
    if case.sizes.num_repeats == 1:
        counts = sorted({1, 2, stages, stages + 1, 2 * stages - 1, most} - set(range(most + 1, 3 * stages)))
        return [(stages, count) for count in counts]
    counts = {1, 2, max(1, most // stages)}
    even = [
        (stages, n * stages, repeats)
        for repeats, n in zip((2, 3, case.sizes.num_repeats), sorted(counts), strict=False)
    ]
    odd = [(stages, count, 2) for count in (stages + 1, 2 * stages - 1, most) if count % stages]
    return even + odd


def lines_of(schedule: Schedule) -> tuple[str, ...]:
    """A schedule as text."""
    return tuple(" ".join(text_of(action, schedule.num_repeats) for action in order) for order in schedule.orders)


def known(name: str, question: Question) -> Any:
    """A right answer."""
    if refused(name, question):
        return Refusal(f"{question[1]} microbatches, {question[0]} stages")
    return lines_of(family(ORDERS[name].name, *question))


def problem(name: str, question: Question, answer: Any) -> str:
    """Explain why the answer is not a valid order for the question; empty if it is."""
    stages, count, repeats = (*question, 1)[:3]
    if refused(name, question):
        if not isinstance(answer, Refusal):
            groups = f"{count_of(count, 'microbatch', 'microbatches')} cannot go round in groups of {stages}"
            return f"{groups}: raise a ValueError instead of returning lines."
        names_both = {str(stages), str(count)} <= set(re.findall(r"\d+", answer.message))
        return "" if names_both else f"A ValueError is right; its message must name both numbers, {count} and {stages}."
    if isinstance(answer, Refusal):
        return "These sizes have a valid order: return it instead of raising a ValueError."
    if not isinstance(answer, tuple) or not all(isinstance(line, str) for line in answer):
        return "Expected a tuple with a line of text for each stage."
    microbatches = {int(number) for number in re.findall(r"\b[A-Z](\d+)", " ".join(answer))}
    if beyond := sorted(number for number in microbatches if number >= count):
        return f"There is no microbatch {beyond[0]}: they are numbered from 0, and there {_are(count)}."
    try:
        schedule = written(answer, name="this order")
        run(schedule, PASSES)
    except ValueError as error:
        text = f"{error}."
        text = text if len(text) <= 300 else f"{text[:300].rpartition('; ')[0] or text[:300]}; …"
        return text[:1].upper() + text[1:]
    actual = (schedule.num_stages, schedule.num_microbatches, schedule.num_repeats)
    if actual != (stages, count, repeats):
        names = ("stage", "stages"), ("microbatch", "microbatches"), ("repeat", "repeats")
        actual_text, question_text = (
            ", ".join(count_of(size, *words) for size, words in zip(sizes, names, strict=True))
            for sizes in (actual, (stages, count, repeats))
        )
        return f"These lines have {actual_text}; the question was about {question_text}."
    return ""


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {count_of(count, 'microbatch', 'microbatches')}"


def no_order(name: str, question: Question, answer: Any) -> str:
    """Like ``problem``, but empty if a ``ValueError`` is the right answer."""
    return "" if refused(name, question) else problem(name, question, answer)


def cost(answer: tuple[str, ...]) -> Measured:
    """The cost of a valid order."""
    return measure(run(written(answer), PASSES))


def too_slow(name: str, question: Question, answer: Any) -> str:
    """Explain why a step of a valid order takes too long; empty if it does not."""
    if refused(name, question):
        return ""
    took, least = cost(answer).time, ORDERS[name].seconds(*question)
    if took <= least + 1e-6:
        return ""
    message = f"A step takes {took:g}, and {least:g} is enough."
    for stage, line in enumerate(answer):
        begun = len(list(takewhile(lambda word: word.startswith("F"), line.split())))
        if begun > ORDERS[name].in_flight(stage, *question):
            early = f"Stage {stage} begins with {begun} forward passes"
            return f"{message} {early}: which of them could come after its first backward pass?"
    return f"{message} {FOLLOW}{ORDERS[name].slow}"


def too_full(name: str, question: Question, answer: Any) -> str:
    """Explain where a valid order has too much in flight; empty if it does not."""
    if refused(name, question):
        return ""
    repeats = (*question, 1)[2]
    for stage, most in enumerate(cost(answer).activations):
        limit = ORDERS[name].in_flight(stage, *question)
        if round(most * repeats) > limit:
            parts = "parts of microbatches" if repeats > 1 else "microbatches"
            enough = f"{limit} {'is' if limit == 1 else 'are'} enough"
            message = f"Stage {stage} has {round(most * repeats)} {parts} in flight at once, and {enough}."
            return f"{message} {FOLLOW}{ORDERS[name].full}"
    return ""


def _shown(answer: Any) -> str:
    text = f"{show(answer)}."
    return text if len(text) <= 160 else f"{text[:160].rpartition(' ')[0]} …"


def _facts(name: str) -> Callable[[TaskEvidence], list[Fact]]:
    def fact(evidence: TaskEvidence, title: str, kind: Kind, why: Callable[..., str], weight: float) -> Fact:
        def right(_: Case[Any], question: Question, answer: Any) -> bool:
            return not why(name, question, answer)

        def explain(_: Case[Any], question: Question, answer: Any) -> str:
            stages, count, repeats = (*question, 1)[:3]
            question_text = f"for {count_of(stages, 'stage')} and {count_of(count, 'microbatch', 'microbatches')}"
            question_text += f" with {count_of(repeats, 'repeat')}" if repeats > 1 else ""
            return f"{question_text} your answer is {_shown(answer)} {why(name, question, answer)}"

        answers_fact = value_facts.every_answer_matches(evidence.cases, questions, right, explain)
        return replace(answers_fact, name=title, kind=kind, weight=weight)

    def facts_of(evidence: TaskEvidence) -> list[Fact]:
        values = fact(evidence, "values", Kind.VALUES, problem, 1)
        costs = (("bubble", Kind.TIME, too_slow, 2), ("in flight", Kind.MEMORY, too_full, 2))
        if fact(evidence, "values", Kind.VALUES, no_order, 1).passed:
            return [values, *(fact(evidence, *cost) for cost in costs)]
        why = "an order that is not valid has no cost"
        return [values, *(unmeasured(title, kind, why, weight) for title, kind, _, weight in costs)]

    return facts_of


def _task(name: str, points: float, point: Sequence[str], cases: Sequence[tuple[int, int, int]]) -> Task:
    def case(stages: int, most: int, repeats: int, title: str = "", quick: bool = False) -> Case[OrderSizes]:
        title = title or f"{count_of(stages, 'stage')}, up to {count_of(most, 'microbatch', 'microbatches')}"
        return Case(title, {"pipe": stages}, OrderSizes(num_stages=stages, most=most, num_repeats=repeats), quick)

    def unseen(rng: np.random.Generator) -> Case[OrderSizes]:
        stages, most = int(rng.choice([2, 5, 6, 7])), int(rng.integers(3, 17))
        return case(stages, most, int(rng.integers(2, 5)) if cases[0][2] > 1 else 1, UNSEEN)

    def oracle(_: Any, case: Case[OrderSizes]) -> dict[str, Any]:
        return {"values": value_tasks.encode(tuple(known(name, question) for question in questions(case)), MOST)}

    return Task(
        wrapping=wrappings("schedules")[name],
        kind="value",
        points=points,
        core_facts=tuple(point),
        cases=tuple(case(*sizes, quick=number < 2) for number, sizes in enumerate(cases)),
        unseen=unseen,
        draw=value_tasks.no_inputs,
        oracle=oracle,
        facts=_facts(name),
        given=lambda case: {"questions": questions(case)},
    )


_ONE_PART = ((4, 9, 1), (3, 8, 1), (8, 16, 1), (1, 3, 1))
ONE_F_ONE_B = _task("one_f_one_b", 1, ("in flight",), _ONE_PART)
INTERLEAVED = _task("interleaved", 2, ("bubble",), ((4, 9, 3), (3, 8, 4), (8, 16, 2), (1, 3, 2)))
ZERO_BUBBLE = _task("zero_bubble", 2, ("bubble",), _ONE_PART)
