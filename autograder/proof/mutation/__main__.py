"""Mechanical mistakes in every reference, judged by its contract, to find those that no fact rejects.

Outcomes are logged as they come, and the same command resumes where it was stopped, if contract, solution and
grader are unchanged. Results are kept in ``autograder/proof/mutation/CHAPTER.json``, where a person explains why
each survivor is not a wrong answer. Exit status 1 if a survivor has no such ``why`` or a record is stale, 3 if a
solution does not pass its own contract.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.markup import escape

from autograder.commands.terminal import FAULT, USAGE, bar, complain, print_json, show, table
from autograder.contract.task import Task, load
from autograder.grading.nbgrader.keys import contract_hash
from autograder.proof.mutation.records import judged_again, keep, read, recorded, stale
from autograder.proof.mutation.survey import BROKEN, EQUAL, Outcome, ReferenceFails, mutations_of, survey
from autograder.proof.outcome_log import logged
from course.curriculum import CHAPTERS, ROOT

# Number of mutations to judge per function, counting only those whose behaviour differs from the solution's.
WANTED = 42


def _log(chapter: str, task: Task) -> Path:
    """The log file of outcomes; a separate file for each version of their inputs."""
    solution = (ROOT / "solutions" / f"{chapter}.py").read_text()
    version = hashlib.sha256(f"{contract_hash(chapter)}{solution}".encode()).hexdigest()[:12]
    return ROOT / "build" / "mutation" / f"{chapter}-{task.name}-{version}.jsonl"


def run(
    chapter: str, task: Task, wanted: int, until: float, again: bool, progress: Callable[[str, int, int], None]
) -> bool:
    """Survey one function and keep the results; return whether there was time for all of it.

    Args:
        chapter: The chapter's name.
        task: Its task.
        wanted: Number of mutations with different behaviour to judge.
        until: Time to stop at, by ``time.monotonic``.
        again: Judge only those that have survived before.
        progress: Called with the function, the number judged, and the total.
    """
    log, before = _log(chapter, task), read(chapter).get(task.name)
    known: dict[str, Outcome] = {outcome.name: outcome for outcome in logged(log, Outcome)}
    outcomes, done = [], 0
    only = {survivor.name for survivor in before.survivors} if again and before else None
    wanted = wanted if only is None else len(only)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        for outcome in survey(chapter, task, known, only) if wanted else ():
            if outcome.name not in known:
                file.write(msgspec.json.encode(outcome).decode() + "\n")
                file.flush()
            outcomes.append(outcome)
            done += outcome.result not in (BROKEN, EQUAL)
            progress(task.name, done, wanted)
            if done == wanted:
                break
            if time.monotonic() > until:
                return False
    if only is not None and before:
        keep(chapter, task.name, judged_again(outcomes, before))
    else:
        keep(chapter, task.name, recorded(outcomes, len(mutations_of(chapter, task)), before))
    progress(task.name, done, done or 1)
    return True


def report(chapters: list[str]) -> int:
    """Print each function's score and the unexplained survivors; return 1 if there are any, or a record is stale."""
    scores = table(*"function judged rejected by explained unexplained".split(), right=("judged", "rejected"))
    problems = []
    for chapter in chapters:
        records = read(chapter)
        judged, killed = sum(r.judged for r in records.values()), sum(r.killed for r in records.values())
        scores.add_row(f"[bold]{chapter}", str(judged), f"{killed / judged:.1%}" if judged else "")
        for name, record in records.items():
            kinds = ", ".join(f"{kind} {count}" for kind, count in record.rejected.items())
            unexplained = len(record.unexplained)
            explained = len(record.survivors) - unexplained
            scores.add_row(
                f"  {name}", str(record.judged), str(record.killed), kinds, f"{explained or ''}", f"{unexplained or ''}"
            )
            problems += [f"{chapter}, {text}" for text in record.unexplained]
        missing = [f"{task.name} has no record" for task in load(chapter).tasks if task.name not in records]
        command = f"make mutation ARGS='--chapter {chapter}'"
        problems += [f"{chapter}, {text}; run {command}" for text in (*missing, *stale(chapter))]
    show(scores, *map(escape, problems))
    return int(bool(problems))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutation", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--chapter", action="append", choices=[entry.name for entry in CHAPTERS], metavar="CHAPTER")
    parser.add_argument("--function", help="only this function")
    parser.add_argument("--mutants", type=int, default=WANTED, help=f"how many to judge of each (default {WANTED})")
    parser.add_argument("--survivors", action="store_true", help="judge again only those that survived")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time; run it again to resume")
    parser.add_argument("--report", action="store_true", help="show what is recorded, and judge nothing")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    chapters = options.chapter or [entry.name for entry in CHAPTERS]
    tasks = [(chapter, task) for chapter in chapters for task in load(chapter).tasks]
    tasks = [(chapter, task) for chapter, task in tasks if options.function in (None, task.name)]
    if not tasks:
        complain(f"{', '.join(chapters)}: no function is called {options.function!r}")
        return USAGE
    until, failed = time.monotonic() + options.seconds, False
    with bar() as progress:
        for chapter, task in () if options.report else tasks:
            try:
                if not run(chapter, task, options.mutants, until, options.survivors, progress):
                    complain(f"stopped after {options.seconds:g} s; the same command resumes")
                    break
            except ReferenceFails as error:
                complain(error)
                failed = True
    if options.json:
        print_json({chapter: msgspec.to_builtins(read(chapter)) for chapter in chapters})
        return FAULT if failed else 0
    return FAULT if failed else report(chapters)


if __name__ == "__main__":
    sys.exit(main())
