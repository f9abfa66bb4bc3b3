"""The questions for ``choose_mesh``, and the form of its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autograder.contract.case import Case, Sizes
from autograder.contract.output_checks import describe
from autograder.contract.value_tasks import Refusal, answer_or_refusal, wrap_answer
from autograder.contract.wrapping import Mismatch, Wrapped
from course import budget
from course.machine import Machine
from course.machines import machine
from course.planning import COURSE, Choice, estimator

# Largest size in bytes of all answers of a case as text.
MOST = 4096
# An answer's fields: the course's own step has one schedule, and no other axes.
ANSWERED = Choice._fields.index("zero") + 1
WIDER, LARGER = (1, 4, 16), (1, 8, 32)
Question = tuple[budget.Sizes, int]


@dataclass(frozen=True, kw_only=True)
class Models(Sizes):
    """The questions for ``choose_mesh``: a machine, and the smallest of the models and batches."""

    machine: str
    layers: int = 8
    width: int = 1024
    heads: int = 8
    vocab: int = 16_384
    seq: int = 1024
    batch: int = 2


def machine_of(case: Case[Models]) -> Machine:
    """The machine on which the steps of a case run."""
    return machine(case.sizes.machine)


def questions(case: Case[Models]) -> list[Question]:
    """Models of three widths with batches of three sizes: some split the data, some do not, some fit nowhere."""
    s = case.sizes
    return [
        (budget.Sizes(s.layers, k * s.width, k * s.heads, s.vocab, s.seq), n * s.batch) for k in WIDER for n in LARGER
    ]


def wrap_choice(function: Callable[..., Any], case: Case[Models]) -> Wrapped:
    """The answers to all questions: choices, and refusals."""

    def all_answers():
        hardware, answers = machine_of(case), []
        for sizes, batch in questions(case):
            answers.append(
                answer_or_refusal(
                    function, sizes, hardware.num_devices, batch, estimator(sizes, hardware, batch, COURSE)
                )
            )
        if all(answer is None for answer in answers):
            raise Mismatch("choose_mesh returned None every time (is a return missing?), expected a Choice")
        return tuple(_formed(answer) for answer in answers)

    return wrap_answer("choose_mesh", all_answers, None, case, MOST)


def _formed(answer: Any) -> Any:
    """A choice as plain numbers and a text.

    Raises:
        Mismatch: It is not a choice.
    """
    if answer is None or isinstance(answer, Refusal):
        return answer
    rest = (COURSE.schedules[0], 1, 1)
    if not isinstance(answer, tuple) or answer[ANSWERED:] not in ((), ("", *rest[1:]), rest) or len(answer) < ANSWERED:
        fields = ", ".join(Choice._fields[:ANSWERED])
        raise Mismatch(f"choose_mesh returned {describe(answer)}, expected a Choice({fields})")
    *counts, remat, zero = answer[:ANSWERED]
    plain = (int(n) if isinstance(n, np.integer) else n for n in counts)
    return (*plain, remat, int(zero))
