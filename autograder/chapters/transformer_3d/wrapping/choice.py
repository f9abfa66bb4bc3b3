"""What ``choose_mesh`` is asked, and the form of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from autograder.contract import answers, forms
from autograder.contract.answers import Refusal
from autograder.contract.wrapping import Case, Mismatch, Wrapped
from course.budget import Sizes
from course.machine import Machine
from course.machines import MACHINES
from course.planning import Choice, estimator

# Bytes of all answers of a case as text.
MOST = 4096
WIDER, LARGER = (1, 4, 16), (1, 8, 32)
Question = tuple[Sizes, int]


def machine_of(case: Case) -> Machine:
    """Where the steps of a case run."""
    return MACHINES[case.sizes["machine"]]


def questions(case: Case) -> list[Question]:
    """Models of three widths with batches of three sizes: some leave data to split, some do not, some fit nowhere."""
    s = case.sizes
    return [
        (Sizes(s["layers"], k * s["width"], k * s["heads"], s["vocab"], s["seq"]), n * s["batch"])
        for k in WIDER
        for n in LARGER
    ]


def wrap_choice(function: Callable[..., Any], case: Case) -> Wrapped:
    """The answers to all questions: choices, and what was refused."""

    def every():
        machine, found = machine_of(case), []
        for sizes, batch in questions(case):
            estimate = estimator(sizes, machine, batch)
            found.append(answers.asked(function, sizes, machine.num_devices, batch, estimate))
        if all(answer is None for answer in found):
            raise Mismatch("choose_mesh returned None every time (is a return missing?), expected a Choice")
        return tuple(_formed(answer) for answer in found)

    return answers.wrap_answer("choose_mesh", every, None, case.mesh, MOST)


def _formed(answer: Any) -> Any:
    """A choice as plain numbers and a text.

    Raises:
        Mismatch: It is no choice.
    """
    if answer is None or isinstance(answer, Refusal):
        return answer
    if not isinstance(answer, tuple) or len(answer) != len(Choice._fields):
        fields = ", ".join(Choice._fields)
        raise Mismatch(f"choose_mesh returned {forms.describe(answer)}, expected a Choice({fields})")
    *counts, remat, fsdp = answer
    plain = (int(n) if isinstance(n, np.integer) else n for n in counts)
    return (*plain, remat, int(fsdp))
