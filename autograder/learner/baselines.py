"""Baselines for a learner's function: the course's own solution, and the naive baselines."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from autograder.contract.task import Task

REFERENCE = "reference"
NOT_INSTALLED = "not part of this installation: it comes when the chapter is released"

Version = Callable[..., Any] | str


def solution(chapter: str, name: str) -> Version:
    """The course's own function, or the reason it is missing."""
    return _of_module(f"solutions.{chapter}", lambda module: getattr(module, name))


def versions(chapter: str, task: Task) -> dict[str, Version]:
    """The reference and the naive baselines by display name, each a function or the reason it is missing.

    A baseline is named after its behaviour: ``keeps gathered weights``. A task has one for memory and one for time,
    the same for both, or none.
    """
    mutants = f"autograder.chapters.{chapter}.mutants"

    def mutant(name: str) -> Version:
        return _of_module(
            mutants, lambda module: {(m.task, m.name): m for m in module.MUTANTS}[task.name, name].function
        )

    naive = {name.replace("_", " "): mutant(name) for name in (task.naive_memory, task.naive_time) if name}
    return {REFERENCE: solution(chapter, task.name), **naive}


def _of_module(name: str, read: Callable[[Any], Any]) -> Any:
    """Read from a module that an installation for students may lack; if so, return a sentence that says so."""
    try:
        return read(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return NOT_INSTALLED
