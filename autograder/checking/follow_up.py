"""Additions to a learner's verdict: the function at fault, quoted lines, further reading, the next step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autograder.contract.task import Task, load, site_command
from autograder.contract.text import join_words
from autograder.contract.verdict import FAIL, PARTIAL, Fact, Result, conclude
from course.curriculum import contract_folder

_GRADIENT, _LONGEST = re.compile(r"\b(value_and_grad|jax\.grad|grad|vjp)\("), 500


def blame_callee(chapter: str, result: Result, used: Mapping[str, str], judged: Callable[[Task], Result]) -> Result:
    """Name the callee at fault first, if a function that falls short calls another that does so on its own.

    Args:
        chapter: The chapter's name.
        result: The function's result.
        used: The names it uses, as returned by ``uses``.
        judged: Returns the judgement of another function of the chapter.
    """
    if result.verdict not in (FAIL, PARTIAL) or result.message or not result.facts:
        return result
    for other in [task for task in load(chapter).tasks if task.name in used and task.name != result.name]:
        found = judged(other)
        if result.verdict == PARTIAL and found.missed:
            short = join_words(f"“{fact.name}”" for fact in found.missed)
            first = f"{other.name}, which {result.name} calls, falls short of {short} by itself: begin with that."
            return replace(result, message=f"{first} check({other.name}) shows more.")
        if result.verdict == FAIL and (found.wrong or not found.facts):
            wrong = found.wrong or "an error"
            first = f"{other.name}, which {result.name} calls, has {wrong} by itself, which may be the cause"
            return replace(result, message=f"{first}: begin with that. check({other.name}) shows more.")
    return result


def quote_lines(result: Result, text: Callable[[str, int], str]) -> Result:
    """Add the source text of every learner line the result names; ``text`` maps ``cell:line`` to that text.

    Collectives that JAX inserts into the model's backward pass get the learner's line that takes the gradient.
    """
    facts = tuple(
        replace(fact, line=_differentiated(result.name, text) or fact.line) if fact.line.startswith("course/") else fact
        for fact in result.facts
    )
    result, found = replace(result, facts=facts), {}
    for line in {result.line, *(fact.line for fact in result.facts if not fact.passed)}:
        label, _, number = line.rpartition(":")
        if number.isdigit() and (source := text(label, int(number)).strip()):
            found[line] = source[:200]
    return replace(result, quoted=found)


def _differentiated(name: str, text: Callable[[str, int], str]) -> str:
    """The first line of a function's cell that takes a gradient, as ``cell:line``; empty for none."""
    lines = ((number, text(name, number)) for number in range(1, _LONGEST))
    return next((f"{name}:{number}" for number, line in lines if _GRADIENT.search(line)), "")


def next_step(chapter: str, result: Result, following: str) -> str:
    """The next step after a pass: the next function, and the profile if it is informative."""
    text = f"Next: {following}." if following else f"All functions of {chapter} pass."
    scaled = load(chapter).task(result.name).at_scale
    more = f" `meshcraft profile {chapter} {result.name}` shows where its time and memory go." if scaled else ""
    return text + more


def further_reading(chapter: str, results: Sequence[Result]) -> tuple[str, ...]:
    """What explains the failures: one heading per function, for its first failed fact, or a hint as well.

    Facts ask a question where a function is wrong. Where there is nothing to judge, the first hint asks instead: that
    of the function that raised an error, which may be another one of the chapter.
    """
    hinted = (contract_folder(chapter) / "hints.md").exists()
    notes = []
    for result in results:
        notes += [f"{result.name}: to read on, `{site_command(*place)}`" for place in load(chapter).places(result)[:1]]
        if hinted and result.unjudged:
            raised = result.line.partition(":")[0]
            name = raised if raised in {task.name for task in load(chapter).tasks} else result.name
            notes.append(f"{name}: where to look, `meshcraft hint {chapter} {name}`")
    return tuple(notes)


def variant_notes(task: Task, variant: str) -> tuple[str, ...]:
    """The sentence of the course's variant, for the learner to see."""
    found = task.variant(variant)
    return (f"{task.name}, in this course: {found.sentence}",) if found else ()


def limit_notes(name: str, factors: Mapping[str, float]) -> tuple[str, ...]:
    """The limits that this course changes, for the learner to see."""
    return tuple(
        f"{name}, in this course: the limit of “{fact}” is {factor:g} times the usual one"
        for fact, factor in factors.items()
    )


def with_facts(result: Result, facts: list[Fact]) -> Result:
    """Add facts to a result without changing its points or verdict, as advice and unmeasured facts do not."""
    again = conclude(result.name, result.max_points, [*result.facts, *facts])
    return replace(result, points=again.points, verdict=again.verdict, facts=again.facts)
