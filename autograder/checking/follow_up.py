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
        callee_result = judged(other)
        if result.verdict == PARTIAL and callee_result.missed:
            short = join_words(f"“{fact.name}”" for fact in callee_result.missed)
            first = f"{other.name}, which {result.name} calls, falls short of {short} on its own: begin with that."
            return replace(result, message=f"{first} check({other.name}) shows more.")
        if result.verdict == FAIL and (callee_result.wrong or not callee_result.facts):
            wrong = callee_result.wrong or "an error"
            first = f"{other.name}, which {result.name} calls, has {wrong} on its own, which may be the cause"
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
    result, quoted = replace(result, facts=facts), {}
    for line in {result.line, *(fact.line for fact in result.facts if not fact.passed)}:
        label, _, number = line.rpartition(":")
        if number.isdigit() and (source := text(label, int(number)).strip()):
            quoted[line] = source[:200]
    return replace(result, quoted=quoted)


def _differentiated(name: str, text: Callable[[str, int], str]) -> str:
    """The first line of a function's cell that takes a gradient, as ``cell:line``; empty for none."""
    lines = ((number, text(name, number)) for number in range(1, _LONGEST))
    return next((f"{name}:{number}" for number, line in lines if _GRADIENT.search(line)), "")


def next_step(chapter: str, result: Result, following: str) -> str:
    """The next step after a pass: the next function, and the profile if it is informative."""
    text = f"Next: {following}." if following else f"All functions of {chapter} pass."
    scaled = load(chapter).task(result.name).at_scale
    profile_hint = f" `meshcraft profile {chapter} {result.name}` shows where its time and memory go." if scaled else ""
    return text + profile_hint


def further_reading(chapter: str, results: Sequence[Result]) -> tuple[str, ...]:
    """Point to what explains failures: per function, the heading for its first failed fact, and a hint if unjudged.

    Facts ask a question if a function is wrong. If there is nothing to judge, the first hint asks instead: the hint for
    the function that raised an error, which may be another function of the chapter.
    """
    hinted = (contract_folder(chapter) / "hints.md").exists()
    notes = []
    for result in results:
        notes += [
            f"Read more about {result.name}: `{site_command(*place)}`" for place in load(chapter).places(result)[:1]
        ]
        if hinted and result.unjudged:
            raised = result.line.partition(":")[0]
            name = raised if raised in {task.name for task in load(chapter).tasks} else result.name
            notes.append(f"Hints for {name}: `meshcraft hint {chapter} {name}`")
    return tuple(notes)


def variant_notes(task: Task, variant: str) -> tuple[str, ...]:
    """The sentence of the course's variant, for the learner to see."""
    chosen_variant = task.variant(variant)
    return (f"{task.name}, in this course: {chosen_variant.sentence}",) if chosen_variant else ()


def limit_notes(name: str, factors: Mapping[str, float]) -> tuple[str, ...]:
    """The limits that this course changes, for the learner to see."""
    return tuple(
        f"{name}, in this course: the limit of “{fact}” is {factor:g} times the usual one"
        for fact, factor in factors.items()
    )


def with_facts(result: Result, facts: list[Fact]) -> Result:
    """Add facts to a result and conclude again; advice and unmeasured facts change neither points nor verdict."""
    again = conclude(result.name, result.max_points, [*result.facts, *facts])
    return replace(result, points=again.points, verdict=again.verdict, facts=again.facts)
