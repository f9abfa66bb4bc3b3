"""``make draws``: references judged on what the secrets of many courses draw, so that no right answer fails by chance.

An answer's rounding differs with its inputs. A limit that an unlucky draw comes close to would cost points that a
learner cannot explain, so each result must stay within half of its limit.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from autograder.checking.judging import locate_file
from autograder.contract.task import Task, load
from autograder.contract.verdict import Direction, Result, Unit
from autograder.grading.outside.judge import plan
from autograder.proof.mutants import Known, judgement
from course.curriculum import CHAPTERS

# The largest accepted error, as a share of its limit.
ROOM = 0.5


@dataclass
class Draws:
    """The outcome for a function.

    Attributes:
        share: The largest error, as a share of its limit; 0 if nothing is compared with a tolerance.
        where: The fact, the case and the course of that error.
        failed: Facts that failed, with the course.
    """

    share: float = 0.0
    where: str = ""
    failed: list[str] = field(default_factory=list)

    def add(self, result: Result, course: str) -> None:
        """Add the result on one course's inputs."""
        self.failed += [f"{result.message} ({course})"] if result.message else []
        for fact in result.facts:
            self.failed += [f"{fact.name}: {fact.message} ({course})"] if fact.passed is False else []
            if fact.unit is not Unit.RELATIVE or fact.direction is not Direction.AT_MOST:
                continue
            if isinstance(fact.measured, float) and isinstance(fact.limit, float) and fact.limit:
                share = fact.measured / fact.limit
                if share > self.share:
                    self.share, self.where = share, f"{fact.name} in {fact.case!r}, {course}"


def drawn(chapter: str, task: Task, courses: int) -> Draws:
    """Judge a function's reference, small sizes only, with the secrets of ``courses`` courses."""
    function, outcome = getattr(importlib.import_module(f"solutions.{chapter}"), task.name), Draws()
    known: Known = {}, {}
    for number in range(courses):
        course = f"course {number}"
        official = replace(plan(chapter, task, stretched=True, secret=course.encode()), at_scale=None)
        fixed, unseen = (replace(official, cases=cases) for cases in (official.cases[:-1], official.cases[-1:]))
        known = known[0], {}  # the same Programs, on this course's inputs
        outcome.add(judgement(fixed, function, locate_file(function), known), course)
        outcome.add(judgement(unseen, function, locate_file(function)), course)
    return outcome


def main(argv: list[str]) -> int:
    """Print a row for each function; return 1 if one fails, or comes closer to a limit than ``ROOM``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="chapters (default: all)")
    parser.add_argument("--courses", type=int, default=8, help="number of courses (default: 8)")
    options = parser.parse_args(argv)
    known = [entry.name for entry in CHAPTERS]
    if unknown := [name for name in options.chapters if name not in known]:
        parser.error(f"there is no chapter {unknown[0]!r}; there are: {', '.join(known)}")
    if options.courses < 1:
        parser.error(f"--courses is {options.courses}, and must be at least 1")
    console, close = Console(), []
    table = Table("function", "largest share of a limit", "where")
    for chapter in options.chapters or known:
        for task in load(chapter).tasks:
            with console.status(f"{chapter}.{task.name}"):
                outcome = drawn(chapter, task, options.courses)
            table.add_row(task.name, f"{outcome.share:.2f}" if outcome.where else "-", outcome.where)
            close += [f"{task.name}: {sentence}" for sentence in outcome.failed]
            close += [f"{task.name}: {outcome.where}: {outcome.share:.2f}"] if outcome.share > ROOM else []
    console.print(table, *close, sep="\n")
    return int(bool(close))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
