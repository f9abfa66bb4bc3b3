"""``choose_mesh``: a choice for several models and batches on a machine, judged by the planner's predictions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from autograder.chapters.transformer_3d.wrapping import ANSWERED, MOST, Models, Question, machine_of, questions
from autograder.contract import value_facts, value_tasks
from autograder.contract.case import UNSEEN
from autograder.contract.facts import case_fact, worst
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.value_tasks import Refusal
from autograder.contract.verdict import Direction, Fact, Kind, Unit
from autograder.contract.wrapping import wrappings
from course.budget import Sizes
from course.machines import machine
from course.planning import COURSE, Choice, estimator, refusal
from course.planning.choices import settled
from course.planning.search import search

NOTHING = "Nothing fits here: raise ValueError"
PLACED, MEMORY, MFU = "every choice can be placed", "memory fits", "predicted MFU"
# The required fraction of the best choice's MFU.
NEAR = 0.95


@lru_cache(maxsize=256)
def best(sizes: Sizes, batch: int, where: str) -> tuple[float, Choice] | None:
    """The largest MFU of all choices that fit, and the choice that has it; None if nothing fits."""
    prediction = search(sizes, machine(where), batch, COURSE).best
    return prediction and (prediction.mfu, prediction.choice)


def _choice(answer: Any) -> Choice | None:
    """Convert an answer to a choice, if it has the form of one."""
    if not isinstance(answer, tuple) or len(answer) != ANSWERED or not isinstance(answer[5], str):
        return None
    return settled(Choice._make((*answer, "", 1, 1)), COURSE)


def _described(e: Evidence, question: Question, answer: Any) -> str:
    """The question and the answer in words, without anything drawn in secret."""
    if e.secret:
        return "one of the answers"
    sizes, batch = question
    choice = _choice(answer)
    shown = f"Choice{choice[:ANSWERED]}" if choice else value_tasks.show(answer)[:160]
    return f"for width {sizes.width}, {batch} sequences and {machine_of(e.case).name} your answer is {shown}, and it"


def _answered(e: Evidence) -> list[tuple[Question, Any]]:
    """Questions with their answers; None where a forged Program has none."""
    answers, all_questions = value_facts.decode(e.measured["values"]), questions(e.case)
    answers = (
        answers if isinstance(answers, tuple) and len(answers) == len(all_questions) else (None,) * len(all_questions)
    )
    return list(zip(all_questions, answers, strict=True))


def _placed(e: Evidence) -> Fact:
    """Require each answer to be a choice that can be placed, or a refusal if nothing fits."""
    messages = []
    for question, answer in _answered(e):
        sizes, batch = question
        choice, known = _choice(answer), best(sizes, batch, e.case.sizes.machine)
        if isinstance(answer, Refusal):
            if known is not None:
                messages.append(f"{_described(e, question, answer)} refuses, although there is a choice that fits.")
        elif choice is None:
            messages.append(f"{_described(e, question, answer)} is not a Choice. Raise ValueError if nothing fits.")
        elif why := refusal(sizes, machine_of(e.case).num_devices, batch, choice, COURSE):
            why = f": {why}" if known else f": {why}. {NOTHING}"
            messages.append(f"{_described(e, question, answer)} cannot be placed{'' if e.secret else why}.")
    return _fact(PLACED, e, messages, Kind.VALUES)


def _fits(e: Evidence) -> Fact:
    """Require at least one choice that can be placed, and each that can be to fit with the margin."""
    messages, estimates = [], _estimates(e)
    if not estimates:
        return case_fact(e, MEMORY, Kind.MEMORY, "no choice can be placed", "no choice", "all choices")
    for question, estimate in estimates:
        if not estimate.fits:
            needed, available = (1 + estimate.training.margin) * estimate.bytes / 1e9, estimate.memory / 1e9
            size = "" if e.secret else f": {needed:,.1f} GB with the margin, of {available:,.1f} GB"
            size = size if e.secret or best(*question, e.case.sizes.machine) else f"{size}. {NOTHING}"
            messages.append(f"{_described(e, question, estimate.choice[:ANSWERED])} does not fit{size}.")
    return _fact(MEMORY, e, messages, Kind.MEMORY)


def _fact(name: str, e: Evidence, messages: list[str], kind: Kind) -> Fact:
    count, options = len(questions(e.case)), {"direction": Direction.ALL, "unit": Unit.CHOICES}
    return case_fact(e, name, kind, messages[0] if messages else "", count - len(messages), count, **options)


def _estimates(e: Evidence) -> list[tuple[Question, Any]]:
    """The planner's predictions for each answer that can be placed."""
    estimates = []
    for question, answer in _answered(e):
        (sizes, batch), choice = question, _choice(answer)
        if choice is not None and not refusal(sizes, machine_of(e.case).num_devices, batch, choice, COURSE):
            estimates.append((question, estimator(sizes, machine_of(e.case), batch, COURSE)(choice)))
    return estimates


def _near_the_best(e: Evidence) -> Fact:
    """Require each choice's MFU to be near that of the best one that fits."""
    least, message = 1.0, ""
    estimates = _estimates(e)
    for question, estimate in estimates:
        known = best(*question, e.case.sizes.machine)
        share = estimate.mfu / known[0] if known else 1.0
        if share < least:
            most = max(estimate.parts, key=lambda cause: estimate.parts[cause] * (cause != "computing"))
            detail = (
                f" {estimate.mfu:.1%} MFU, {share:.1%} of the best choice's. Besides computing, most time goes into: "
            )
            detail = "" if e.secret else f"{detail}{most}."
            described = _described(e, question, estimate.choice[:ANSWERED])
            least, message = share, f"{described} is slower than another choice that fits.{detail}"
    options: dict[str, Any] = {"limit": NEAR, "direction": Direction.AT_LEAST, "unit": Unit.BEST_CHOICE}
    if not estimates:
        return case_fact(e, MFU, Kind.TIME, "no choice can be placed", "no choice", **options)
    return case_fact(e, MFU, Kind.TIME, message if least < NEAR else "", least, **options)


def choice_facts(evidence: TaskEvidence) -> list[Fact]:
    return [worst([judge(e) for e in evidence.cases]) for judge in (_placed, _fits, _near_the_best)]


def _oracle(_: Any, case: Case[Models]) -> dict[str, Any]:
    known = (best(sizes, batch, case.sizes.machine) for sizes, batch in questions(case))
    plain = tuple(Refusal("nothing fits") if result is None else result[1][:ANSWERED] for result in known)
    return {"values": value_tasks.encode(plain, MOST)}


def _unseen(rng: np.random.Generator) -> Case[Models]:
    heads = int(rng.choice([4, 8, 16]))
    sizes = Models(
        machine=("8xA5000", "8xA100", "2x8xA100", "8xH100", "8xTPUv5e")[rng.integers(5)],
        layers=int(rng.choice([4, 6, 12])),
        heads=heads,
        width=64 * heads,
        batch=int(rng.choice([1, 2, 3])),
        seq=int(rng.choice([512, 1024])),
        vocab=int(rng.choice([8192, 24_576])),
    )
    return Case(UNSEEN, {"data": 1}, sizes)


CHOOSE_MESH = Task(
    wrapping=wrappings("transformer_3d")["choose_mesh"],
    kind="value",
    points=3,
    core_facts=("predicted MFU",),
    cases=(
        Case("8xA5000", {"data": 1}, Models(machine="8xA5000"), quick=True),
        Case("2x8xA100", {"data": 1}, Models(machine="2x8xA100"), quick=True),
        Case("8xH100", {"data": 1}, Models(machine="8xH100")),
        Case("8xTPUv5e, 12 layers", {"data": 1}, Models(machine="8xTPUv5e", layers=12, batch=1)),
    ),
    unseen=_unseen,
    draw=value_tasks.no_inputs,
    oracle=_oracle,
    facts=choice_facts,
)
