"""Mutants that show that each fact can fail: ``python -m autograder.proof.coverage [CHAPTER ...]``.

A mutant fails exactly the facts that it names, which ``make test-full`` verifies; so the table follows from the names.
"""

from __future__ import annotations

import importlib
import sys

from rich.console import Console
from rich.table import Column, Table

from autograder.chapters.mutant import Mutant
from autograder.contract.task import load
from course.curriculum import CHAPTERS

# Functions whose Programs take longest to trace and compile, mostly whole steps: `make test` judges them on fewer cases
# and by fewer mutants.
SLOWEST = {
    "train_step_dp",
    "pipeline_loss",
    "pipeline_train_step",
    "execute_looping_pipeline",
    "looping_train_step",
    "tp_transformer_step",
    "cp_transformer_step",
    "moe_step",
    "stage_3d",
    "layers_3d",
    "forward_3d",
    "train_step_3d",
}


def mutants(chapter: str) -> tuple[Mutant, ...]:
    """The mutants of a chapter.

    Raises:
        LookupError: No chapter has that name.
    """
    load(chapter)
    return tuple(importlib.import_module(f"autograder.chapters.{chapter}.mutants").MUTANTS)


def one_for_each_fact(chapter: str) -> list[Mutant]:
    """Mutants that together fail every (task, fact) pair that any fails; first those that fail most.

    A fact of one of the slowest functions that an earlier function of the chapter has, too, needs no mutant of it.
    """
    missing: set[tuple[str, str]] = set()
    for task in load(chapter).tasks:
        failed = {fact for mutant in mutants(chapter) if mutant.task == task.name for fact in mutant.fails}
        shown = {fact for _, fact in missing} if task.name in SLOWEST else set()
        missing |= {(task.name, fact) for fact in failed - shown}
    chosen = []
    while missing:
        best = max(mutants(chapter), key=lambda m: sum((m.task, fact) in missing for fact in m.fails))
        chosen.append(best)
        missing -= {(best.task, fact) for fact in best.fails}
    return chosen


def matrix(chapter: str) -> dict[tuple[str, str], list[str]]:
    """The names of the mutants that fail each (task, fact), task by task.

    It has every fact that counts for points: the test of references fails if a fact has no mutant.
    """
    shown: dict[tuple[str, str], list[str]] = {}
    for task in load(chapter).tasks:
        for mutant in (one for one in mutants(chapter) if one.task == task.name):
            for fact in sorted(mutant.fails):
                shown.setdefault((task.name, fact), []).append(mutant.name)
    return shown


def main(chapters: list[str]) -> None:
    """Print the table of each chapter."""
    for chapter in chapters or [entry.name for entry in CHAPTERS]:
        table = Table("function", "fact", Column("mutants that fail it", overflow="fold"), title=chapter)
        for (task, fact), names in matrix(chapter).items():
            table.add_row(task, fact, ", ".join(names))
        Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
