"""What is added to a verdict for a learner: the function at fault, quoted lines, where to read, what is next."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autograder.contract.task import Task, load, site_command
from autograder.contract.verdict import FAIL, Fact, Result, conclude

_GRADIENT, _LONGEST = re.compile(r"\b(value_and_grad|jax\.grad|grad|vjp)\("), 500


def with_fault(chapter: str, result: Result, used: Mapping[str, str], judged: Callable[[Task], Result]) -> Result:
    """A wrong result, with the function that it calls and that is wrong by itself, if there is one, named first.

    Args:
        chapter: The chapter's name.
        result: Of a function.
        used: What ``uses`` says of it.
        judged: The judgement of another function of the chapter.
    """
    if result.verdict != FAIL or result.message or not result.facts:
        return result
    for other in [task for task in load(chapter).tasks if task.name in used and task.name != result.name]:
        found = judged(other)
        if found.reason or not found.facts:
            wrong = found.reason.partition(" earn")[0].lower() or "an error"
            first = f"{other.name}, which {result.name} calls, has {wrong} by itself: mend that first."
            return replace(result, message=f"{first} check({other.name}) says more.")
    return result


def with_quotes(result: Result, text: Callable[[str, int], str]) -> Result:
    """The result with the text of every line of the learner's that it names; ``text`` gives that of ``cell:line``.

    What JAX inserts into the backward pass of the course's model is put on the learner's line that takes the gradient.
    """
    facts = tuple(
        replace(fact, line=_differentiated(result.name, text) or fact.line) if fact.line.startswith("course/") else fact
        for fact in result.facts
    )
    result, found = replace(result, facts=facts), {}
    for line in {result.line, *(fact.line for fact in result.facts if not fact.passed)}:
        label, _, number = line.rpartition(":")
        if number.isdigit() and (said := text(label, int(number)).strip()):
            found[line] = said[:200]
    return replace(result, quoted=found)


def _differentiated(name: str, text: Callable[[str, int], str]) -> str:
    """The first line of a function's cell that takes a gradient, as ``cell:line``; empty for none."""
    lines = ((number, text(name, number)) for number in range(1, _LONGEST))
    return next((f"{name}:{number}" for number, line in lines if _GRADIENT.search(line)), "")


def way_on(chapter: str, result: Result, following: str) -> str:
    """What to do after a pass: the next function, and where a profile tells something, that."""
    text = f"Next: {following}." if following else f"All functions of {chapter} pass."
    scaled = load(chapter).task(result.name).at_scale
    more = f" `meshcraft profile {chapter} {result.name}` shows where its time and memory go." if scaled else ""
    return text + more


def reading(chapter: str, results: Sequence[Result]) -> tuple[str, ...]:
    """Where the pages explain what fell short: one heading a function, that of the first fact."""
    found = [(result.name, *load(chapter).places(result)[:1]) for result in results]
    return tuple(f"{name}: to read on, `{site_command(*place[0])}`" for name, *place in found if place)


def variant_notes(task: Task, variant: str) -> tuple[str, ...]:
    """What the course asks for instead of what is usual, for the learner to see."""
    found = task.variant(variant)
    return (f"{task.name}, in this course: {found.sentence}",) if found else ()


def with_facts(result: Result, facts: list[Fact]) -> Result:
    """Points and verdict with more facts; advice and facts that were not measured change neither."""
    again = conclude(result.name, result.max_points, [*result.facts, *facts])
    return replace(result, points=again.points, verdict=again.verdict, facts=again.facts)
