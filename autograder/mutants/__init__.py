"""Named wrong answers, each of which a fact must reject."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A wrong answer for a task, and exactly the facts that it must fail, on all meshes."""

    task: str
    function: Callable[..., Any]
    fails: frozenset[str]

    @property
    def name(self) -> str:
        return self.function.__name__


def mutant(task: str, function: Callable[..., Any], *fails: str) -> Mutant:
    return Mutant(task, function, frozenset(fails))
