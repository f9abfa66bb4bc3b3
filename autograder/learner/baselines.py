"""What stands beside a learner's function: the course's own solution, and the naive ways of doing the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from autograder.contract.task import Task

REFERENCE = "reference"
NOT_INSTALLED = "not part of this installation: it comes when the chapter is released"

Found = Callable[..., Any] | str


def solution(chapter: str, name: str) -> Found:
    """The course's own function, or why there is none."""
    return _of_module(f"solutions.{chapter}", lambda module: getattr(module, name))


def versions(chapter: str, task: Task) -> dict[str, Found]:
    """The reference and the naive ways by the name that people read, each a function or why there is none.

    A naive way is called after what it does: ``keeps gathered weights``. One task has two of them, one for memory and
    one for time, another has one or none.
    """
    ways = dict.fromkeys(name for name in (task.naive, task.slow) if name)
    naive = {name.replace("_", " "): _mutant(chapter, task.name, name) for name in ways}
    return {REFERENCE: solution(chapter, task.name), **naive}


def _mutant(chapter: str, task: str, name: str) -> Found:
    found = _of_module(
        f"autograder.chapters.{chapter}.mutants", lambda module: {(m.task, m.name): m for m in module.MUTANTS}
    )
    return found if isinstance(found, str) else found[task, name].function


def _of_module(name: str, what: Callable[[Any], Any]) -> Any:
    """Something of a module that an installation for students may lack; then a sentence that says so."""
    try:
        return what(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return NOT_INSTALLED
