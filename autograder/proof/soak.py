"""``make soak``: a class graded while its grader, workers and sandboxes are killed at random, then once uninterrupted.

Nothing may be lost, doubled or different from an undisturbed grading, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import psutil

from autograder.commands.terminal import FAULT, bar, out
from autograder.contract.verdict import Report
from autograder.grading.nbgrader.course import make_course, open_gradebook, open_ledger
from autograder.grading.nbgrader.export import grades_csv
from autograder.proof.demo import CHAPTER, numbered

KEPT = Path(__file__).with_suffix(".json")
# The demo's class, repeated: mostly submissions that are graded in a second or two.
CLASS = ("partial", "raises", "partial", "hostile", "partial", "summed", "partial", "raises", "partial", "right")
# Average time between two kills: long enough for an occasional verdict.
PAUSE_S = 2.5
# One in this many submissions is damaged: not JSON, truncated, under another name, or missing.
DAMAGED = 25


@dataclass
class Outcome:
    """The figures of a soak.

    Attributes:
        submissions: Size of the class.
        kills: Number of killed processes, by kind.
        runs: Number of starts of the grader.
        lost: Students without a verdict or without their row in the gradebook.
        doubled: Students with more than one of either.
        different: Students whose verdict or score differs from the undisturbed grading, and the difference.
        left: Processes and folders that outlived the grader that created them.
    """

    submissions: int
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.lost or self.doubled or self.different or self.left)

    def to_json(self) -> dict[str, Any]:
        """The figures as plain data."""
        return {**vars(self), "kills": dict(self.kills)}


def make_class(folder: Path, size: int) -> Path:
    """A course folder with ``size`` submissions, no two the same, some of them damaged."""
    course = make_course(folder, [CHAPTER])
    for number in range(size):
        path = course / "submitted" / f"student{number:03}" / CHAPTER / f"{CHAPTER}.ipynb"
        path.parent.mkdir(parents=True)
        text = numbered(CLASS[number % len(CLASS)], number)
        damage, kind = divmod(number + 1, DAMAGED)
        if kind == 0 and damage % 4 == 1:
            path.write_text("not a notebook")
        elif kind == 0 and damage % 4 == 2:
            path.write_text(text[: len(text) // 2])
        elif kind == 0 and damage % 4 == 3:
            path.with_name("handed in.ipynb").write_text(text)
        elif kind != 0:
            path.write_text(text)
    return course


def start(course: Path, workers: int, *options: str) -> subprocess.Popen[bytes]:
    """``meshcraft grade`` as a separate process."""
    command = [sys.executable, "-m", "autograder.cli", "grade", CHAPTER, "--course", str(course), "--json", *options]
    quiet = subprocess.DEVNULL
    return subprocess.Popen([*command, "--workers", str(workers)], stdout=quiet, stderr=quiet, start_new_session=True)


def disturb(course: Path, workers: int, kills: int, dice: random.Random, outcome: Outcome, update: Any) -> None:
    """Restart the grader until this many of its processes have been killed; graded classes are graded again."""
    again: tuple[str, ...] = ()
    while (done := sum(outcome.kills.values())) < kills:
        grader = start(course, workers, *again)
        outcome.runs += 1
        whole: dict[int, psutil.Process] = {}
        while grader.poll() is None and done < kills:
            time.sleep(dice.expovariate(1 / PAUSE_S))
            family = _family(grader.pid)
            whole |= {process.pid: process for process in family}
            # Kill the grader itself less often: if it restarted every time, it would never reach the end.
            below = [process for process in family if process.pid != grader.pid]
            chosen = family[:1] if dice.random() < 0.1 else below
            victim = dice.choice(chosen) if chosen else None
            if victim is not None and grader.poll() is None:
                name = _name(victim, grader.pid)
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
                    outcome.kills[name] += 1
            done = sum(outcome.kills.values())
            update("kills", done, kills)
        if done >= kills and grader.poll() is None:
            grader.send_signal(signal.SIGKILL)
            outcome.kills["grader"] += 1
        again = ("--again",) if grader.wait() in (0, FAULT) else again
        outcome.left += _outlived(whole)


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        head = psutil.Process(pid)
        return [head, *head.children(recursive=True)]
    return []


def _name(process: psutil.Process, head: int) -> str:
    with suppress(psutil.Error):
        words = " ".join(process.cmdline())
        if process.pid == head:
            return "grader"
        for part, name in (("spawn_main", "worker"), ("resource_tracker", "worker"), ("bwrap", "sandbox")):
            if part in words:
                return name
        if "autograder.grading.inside.tracer" in words:
            parent = process.parent()
            child = parent is not None and "autograder.grading.inside.tracer" in " ".join(parent.cmdline()[:4])
            return "submission" if child else "tracer"
        if "autograder.grading.inside.executor" in words:
            return "executor"
    return "other"


def _outlived(processes: dict[int, psutil.Process]) -> list[str]:
    _, alive = psutil.wait_procs([*processes.values()], timeout=10)
    left = []
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            left.append(f"process {' '.join(process.cmdline())[:100]}")
            process.kill()
    return left


def judged(course: Path) -> dict[str, Report]:
    """Every student's verdict."""
    with open_ledger(course) as ledger:
        return {entry.student: entry.report for entry in ledger.status(CHAPTER) if entry.report and entry.booked}


def booked(course: Path) -> Counter[str]:
    """Rows of the gradebook by student; a duplicate grade adds a second row."""
    rows: Counter[str] = Counter()
    with open_gradebook(course) as gradebook:
        for submission in gradebook.assignment_submissions(CHAPTER):
            grades = [grade.name for notebook in submission.notebooks for grade in notebook.grades]
            rows[str(submission.student.id)] += max(Counter(grades).values(), default=0)
    return rows


def compare(course: Path, calm: Path, outcome: Outcome) -> None:
    """Compare the disturbed class with the undisturbed one."""
    students = sorted(path.name for path in (calm / "submitted").iterdir())
    reports, expected, rows = judged(course), judged(calm), booked(course)
    lines, expected_lines = (grades_csv(folder, [CHAPTER]).splitlines() for folder in (course, calm))
    scores = dict(zip(students, zip(lines[1:], expected_lines[1:], strict=True), strict=True))
    for student in students:
        if student not in reports or rows[student] == 0:
            outcome.lost.append(student)
        elif rows[student] > 1:
            outcome.doubled.append(student)
        elif reports[student] != expected[student] or scores[student][0] != scores[student][1]:
            outcome.different.append(f"{student}: {_difference(reports[student], expected[student])}")
    leftovers = [*(course / ".meshcraft" / "staging").glob("*/*"), *(course / ".meshcraft").glob("secret.*")]
    outcome.left += [f"folder {path.relative_to(course)}" for path in leftovers]


def _difference(report: Report, expected: Report) -> str:
    """The first function's field that differs, and its expected value."""
    for ours, theirs in zip(report.functions, expected.functions, strict=False):
        for name, value in ours.to_json().items():
            if value != theirs.to_json().get(name):
                return f"{ours.name} {name} {str(value)[:300]}, uninterrupted {str(theirs.to_json().get(name))[:300]}"
    return (
        f"{report.isolation} {report.notes}, uninterrupted {expected.isolation} {expected.notes}; or the exported score"
    )


def soak(folder: Path, size: int, kills: int, workers: int, seed: int, update: Any) -> Outcome:
    """Grade one class twice, once uninterrupted and once with ``kills`` processes killed, and compare."""
    course = make_class(folder / "disturbed", size)
    calm = Path(shutil.copytree(course, folder / "calm"))
    outcome = Outcome(size)
    disturb(course, workers, kills, random.Random(seed), outcome, update)
    for number, each in enumerate((course, calm), 1):
        update("uninterrupted", number - 1, 2)
        status = start(each, workers).wait()
        if status not in (0, FAULT):
            raise SystemExit(f"grading {each.name} uninterrupted ended with status {status}")
        update("uninterrupted", number, 2)
    compare(course, calm, outcome)
    return outcome


def main() -> None:
    """Run the soak, and print the figures; exit status 1 if any is not 0."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--submissions", type=int, default=200)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep the figures, which the page on trust shows")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, bar() as update:
        outcome = soak(Path(folder), options.submissions, options.kills, options.workers, options.seed, update)
    seconds = time.monotonic() - begin
    figures = {**outcome.to_json(), "seconds": round(seconds)}
    if options.write:
        versions = {"python": platform.python_version(), "jax": jax.__version__}
        KEPT.write_text(json.dumps({**figures, **versions}, indent=1, sort_keys=True) + "\n")
    if options.json:
        print(json.dumps(figures))
    else:
        by_kind = ", ".join(f"{count} {name}" for name, count in outcome.kills.most_common())
        out().print(f"{outcome.submissions} submissions, {outcome.runs} runs of the grader, {seconds / 60:.0f} minutes")
        out().print(f"{sum(outcome.kills.values())} killed: {by_kind}")
        for name in ("lost", "doubled", "different", "left"):
            items = getattr(outcome, name)
            out().print(f"{name:<10} {len(items)}  {', '.join(items[:5])}", markup=False)
    sys.exit(0 if outcome.clean else 1)


if __name__ == "__main__":
    main()
