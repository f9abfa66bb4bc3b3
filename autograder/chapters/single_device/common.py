"""A fact that several tasks of ``single_device`` share."""

from __future__ import annotations

from autograder.contract import facts
from autograder.contract.task import Evidence
from autograder.contract.verdict import Fact


def does_not_grow(cases: list[Evidence], small: str, large: str, what: str, hint: str) -> Fact:
    """The Program has as many operations in the case ``large`` as in ``small``, if both were looked at."""
    found = {e.case.name: e for e in cases}
    if small in found and large in found:
        return facts.same_program_size("program size", found[small], found[large], what, hint)
    return Fact("program size", None, "not measured", message=f"this check leaves out {small} or {large}")
