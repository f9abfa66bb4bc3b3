"""Mutants that show that each fact can fail: ``python -m autograder.proof.coverage [CHAPTER ...]``.

A mutant fails exactly the facts that it names, which ``make test-full`` verifies on every mesh; so the table follows
from the names.
"""

from __future__ import annotations

import importlib
import sys

from rich.console import Console
from rich.table import Table

from autograder.chapters.mutant import Mutant
from autograder.check import check_solution
from autograder.contract.task import load
from course.curriculum import CHAPTERS


def mutants(chapter: str) -> tuple[Mutant, ...]:
    """The mutants of a chapter.

    Raises:
        LookupError: No chapter has that name.
    """
    load(chapter)
    return tuple(importlib.import_module(f"autograder.chapters.{chapter}.mutants").MUTANTS)


def one_for_each_fact(chapter: str) -> list[Mutant]:
    """Mutants that together fail every (task, fact) pair that any fails; first those that fail most."""
    missing = {(mutant.task, fact) for mutant in mutants(chapter) for fact in mutant.fails}
    chosen = []
    while missing:
        best = max(mutants(chapter), key=lambda m: sum((m.task, fact) in missing for fact in m.fails))
        chosen.append(best)
        missing -= {(best.task, fact) for fact in best.fails}
    return chosen


def matrix(chapter: str) -> dict[tuple[str, str], list[str]]:
    """The names of the mutants that fail each (task, fact), for every fact that counts for points."""
    shown: dict[tuple[str, str], list[str]] = {}
    for result in check_solution(chapter, [task.name for task in load(chapter).tasks]).functions:
        shown |= {(result.name, fact.name): [] for fact in result.facts if fact.weight}
    for mutant in mutants(chapter):
        for fact in mutant.fails:
            shown.setdefault((mutant.task, fact), []).append(mutant.name)
    return shown


def main(chapters: list[str]) -> int:
    """Print the table; return 1 if a fact has no mutant."""
    unshown = 0
    for chapter in chapters or [entry.name for entry in CHAPTERS]:
        table = Table("function", "fact", "mutants that fail it", title=chapter, title_justify="left")
        for (task, fact), names in matrix(chapter).items():
            table.add_row(task, fact, ", ".join(names) or "[red]none[/red]")
            unshown += not names
        Console().print(table)
    return int(unshown > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
