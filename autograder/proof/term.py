"""A scripted term of a class: every student's points are compared with a table that is computed without the grader.

Verdicts are given, not judged: each notebook states what share of the points it earns. The term tests everything around
the judging: roster, late work, extensions, resubmissions, wrong names, damaged files, points and chapters that change,
people's grades in formgrader, ``kill -9`` in every phase, and the exports. ``make term`` runs it for 120 students.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autograder.contract.task import load
from autograder.contract.verdict import FAIL, PARTIAL, PASS, Report, Result
from autograder.grading.nbgrader import late_penalty, people, uploads
from autograder.grading.nbgrader.batch import grade_course
from autograder.grading.nbgrader.course import open_gradebook
from autograder.grading.nbgrader.export import canvas_csv
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.nbgrader.rosters import read_students
from autograder.grading.outside import pipeline

CHAPTERS = ("fsdp", "collectives", "data_parallel", "pipeline")
DUE = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
PER_DAY, MOST, GRACE = 10.0, 50.0, 15.0
DEARER, POINTS = "fsdp.fsdp_loss", 10.0
KINDS = "punctual late extended again renamed minutes absent damaged leaves answers".split()
BY_HAND, ANSWER = 1.0, 1.5


class GivenGrader:
    """A stand-in for the grader: each function earns the share that the notebook's first cell states."""

    def __init__(self, chapter: str, **_: Any):
        self.chapter = chapter

    def close(self) -> None:
        pass

    def grade_notebook(self, notebook: Any, student: str) -> Report:
        match = re.search(r"share=([\d.]+)", notebook.everything[0].source)
        share = float(match[1]) if match else 0.0
        verdict = PASS if share == 1 else PARTIAL if share else FAIL
        tasks = load(self.chapter).tasks
        results = [Result(task.name, round(task.points * share, 2), float(task.points), verdict) for task in tasks]
        return Report(self.chapter, tuple(results), student=student, isolation="given")


def share_of(student: int, chapter: int) -> float:
    return (student * 7 + chapter * 3) % 5 / 4


def expected(student: int, chapter: int, dropped: str) -> float | None:
    """The points by the rules of the course, computed without the grader; None if there is no final grade."""
    name, kind = CHAPTERS[chapter], _kind(student)
    if name == dropped or kind == "leaves" or (kind == "absent" and chapter == 1):
        return None
    share = 1.0 if kind == "again" and chapter == 0 else share_of(student, chapter)
    total = 0.0
    for task in load(name).tasks:
        earned = BY_HAND if kind == "damaged" and chapter == 0 else round(task.points * share, 2)
        dearer = f"{name}.{task.name}" == DEARER and not (kind == "damaged" and chapter == 0)
        total += earned * POINTS / task.points if dearer else earned
    total += ANSWER if kind == "answers" else BY_HAND if kind == "damaged" and chapter == 0 else 0.0
    days = 2 if kind == "late" else 0
    return round(total * (1 - min(days * PER_DAY, MOST) / 100), 2)


Given = list[tuple[str, str, str, float]]


def run(
    folder: Path,
    students: int,
    chapters: int,
    *,
    feedback: bool = True,
    enter: Callable[[Path, Given], None] | None = None,
) -> dict[str, Any]:
    """Play the term.

    Args:
        folder: An empty folder.
        students: The number of students.
        chapters: The number of chapters; the last of several is dropped during the term.
        feedback: Write a page for each student of one chapter, and be killed while doing so.
        enter: Enters the points that people give; by default, into the gradebook.

    Returns:
        The differences between the exported table and ``expected``, the phases in which a process was killed, and
        timings.
    """
    killed: list[str] = []
    course, names = folder / "course", CHAPTERS[:chapters]
    ids = [f"s{number:03}" for number in range(students)]
    due = {name: DUE + timedelta(weeks=week) for week, name in enumerate(names)}
    rules = {"late_per_day": PER_DAY, "late_at_most": MOST, "late_grace": GRACE, "vary": False}
    init_course(course, chapters=[*names], due=due, settings=rules, students=read_students(_roster(folder, ids)))
    extended = [each for number, each in enumerate(ids) if _kind(number) == "extended"]
    if extended:
        people.extend(course, names[0], extended, 48)
    half, first = students // 2, names[0]
    packed = _gradescope(folder, course, ids, due[first])
    _kill(killed, "collect", lambda: _collect_until(half, course, first, packed))
    collected = uploads.collect(course, first, packed)
    for number, student in enumerate(ids):
        for chapter, name in enumerate(names):
            _hand_in(course, student, number, chapter, due[name])
    for stage in ("grading", "gradebook"):
        _kill(killed, stage, lambda stage=stage: _grade(course, first, on_progress=_at_half(stage, _die)))
    timings = {"grading and booking": _timed(lambda: [_grade(course, name, interrupt=name != first) for name in names])}
    for number, student in enumerate(ids):
        if _kind(number) == "again":
            path = course / "submitted" / student / first / f"{first}.ipynb"
            _write(path, _text(course, student, first, 1.0), due[first])
    _grade(course, names[0])
    dropped = names[-1] if chapters > 1 else ""
    left = [each for number, each in enumerate(ids) if _kind(number) == "leaves"]
    drop = [dropped] if dropped else []
    init_course(
        course, chapters=[], due={}, settings={}, students=[], points={DEARER: POINTS}, drop=drop, withdraw=left
    )
    timings["booking changed points"] = _timed(lambda: _grade(course, names[0]))
    manual_points = _by_hand(ids, names)
    timings["points by hand, each"] = _timed(lambda: (enter or _enter)(course, manual_points)) / max(
        1, len(manual_points)
    )
    _kill(killed, "regrade", lambda: _grade(course, first, again=True, on_progress=_at_half("grading", _die)))
    _grade(course, first, again=True)
    people.ask_regrade(course, names[0], ids[0], "Why so few?")
    people.answer_regrade(course, names[0], ids[0], "Read the first fact.")
    remaining = [name for name in names if name != dropped]
    if feedback:
        _kill(killed, "feedback", lambda: write_feedback(course, first, _dies_after(half)))
        timings["a page of feedback"] = _timed(lambda: write_feedback(course, first)) / students
    _kill(killed, "export", lambda: _renew_until(half, course, first))
    for name in remaining:
        late_penalty.renew_penalties(course, name)
    exported = _exported(course, remaining)
    wrong = _differences(exported, ids, remaining, dropped)
    size = sum(path.stat().st_size for path in course.rglob("*") if path.is_file())
    final = sum(len(row) for row in exported.values())
    counts = {"collected": len(collected.new) + len(collected.same), "killed": killed}
    return counts | {
        "wrong": wrong,
        "compared": students * len(remaining),
        "final": final,
        "seconds": timings,
        "bytes": size,
    }


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill(killed: list[str], phase: str, action: Callable[[], object]) -> None:
    """Run a phase in a process that is killed in the middle of it, as the action arranges.

    Raises:
        RuntimeError: The process was not killed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about threads: the child uses none of its parent's
        process = multiprocessing.get_context("fork").Process(target=action)
        process.start()
    process.join()
    if process.exitcode != -signal.SIGKILL:
        raise RuntimeError(f"nothing was killed in {phase}: the process ended with {process.exitcode}")
    killed.append(phase)


def _dies_after(calls: int, function: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """Wrap the function so that it kills its process at the end of call number ``calls``."""
    number = itertools.count(1)

    def called(*arguments: Any) -> Any:
        result = function(*arguments)
        return _die() if next(number) == calls else result

    return called


def _at_half(stage: str, action: Callable[[], None]) -> Callable[[str, int, int], None]:
    """A progress callback that acts when half of a stage is done."""
    return lambda at, done, total: action() if at == stage and done == max(1, total // 2) else None


def _collect_until(calls: int, course: Path, name: str, packed: Path) -> None:
    uploads.put = _dies_after(calls, uploads.put)
    uploads.collect(course, name, packed)


def _renew_until(calls: int, course: Path, name: str) -> None:
    late_penalty.set_penalties = _dies_after(calls, late_penalty.set_penalties)
    late_penalty.renew_penalties(course, name)


def _differences(
    exported: dict[str, dict[str, float]], ids: list[str], names: list[str], dropped: str
) -> dict[str, Any]:
    """The exported and the expected points where they differ, by student and chapter."""
    wrong = {}
    for number, student in enumerate(ids):
        for chapter, name in enumerate(names):
            expected_points = expected(number, chapter, dropped)
            got = exported.get(student, {}).get(name)
            if (expected_points is None) != (got is None) or (
                got is not None and abs(got - (expected_points or 0.0)) > 0.011
            ):
                wrong[f"{student} {name} ({_kind(number)})"] = (got, expected_points)
    return wrong


def _roster(folder: Path, ids: list[str]) -> Path:
    """The roster as Canvas exports it."""
    path = folder / "canvas.csv"
    lines = ["Student,ID,SIS User ID,SIS Login ID,Section", '"    Points Possible",,,,']
    lines += [f'"Name{each}, First",{n + 100},,{each},{"AB"[n % 2]}' for n, each in enumerate(ids)]
    path.write_text("\n".join(lines) + "\n")
    return path


def _gradescope(folder: Path, course: Path, ids: list[str], due: datetime) -> Path:
    """The first chapter's submissions as Gradescope exports them, with their times."""
    name, path, about = CHAPTERS[0], folder / "submissions.zip", ""
    with zipfile.ZipFile(path, "w") as archive:
        for number, student in enumerate(ids):
            text = _text(course, student, name, share_of(number, 0), _kind(number) == "answers")
            about += f":submission_{number}:\n  :submitters:\n  - :name: {student}\n    :sid: {student}\n"
            about += f"  :created_at: {_time(number, 0, due):%Y-%m-%d %H:%M:%S}.000000000 Z\n"
            cut = text[:500] if _kind(number) == "damaged" else text
            archive.writestr(f"assignment_1_export/submission_{number}/work.ipynb", cut)
        archive.writestr(f"assignment_1_export/{uploads.METADATA}", about)
    return path


def _kind(number: int) -> str:
    return KINDS[number % len(KINDS)]


def _time(number: int, chapter: int, due: datetime) -> datetime:
    minutes = {"late": 30 * 60, "minutes": 10, "extended": 30 * 60 if chapter == 0 else -60}.get(_kind(number), -60)
    return due + timedelta(minutes=minutes)


def _hand_in(course: Path, student: str, number: int, chapter: int, due: datetime) -> None:
    """Put a submission in place, unless it was collected; some have another name."""
    kind, name = _kind(number), CHAPTERS[chapter]
    path = course / "submitted" / student / name / f"{name}.ipynb"
    if kind == "absent" and chapter == 1:
        return
    if chapter > 0:
        text = _text(course, student, name, share_of(number, chapter), kind == "answers")
        _write(path, text, _time(number, chapter, due))
    if kind == "renamed":
        path.rename(path.with_name("homework.ipynb"))


def _text(course: Path, student: str, name: str, share: float, answers: bool = False) -> str:
    """A notebook that states what share of the points it earns."""
    text = (course / "release" / name / f"{name}.ipynb").read_text()
    text = text.replace('"source": "', f'"source": "share={share} {student} ', 1)
    if text.count(f"share={share}") == 0:
        text = re.sub(r'("source": \[\s*")', rf"\g<1>share={share} {student} ", text, count=1)
    return text.replace("YOUR ANSWER HERE", "Because.") if answers else text


def _write(path: Path, text: str, when: datetime) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (path.parent / "timestamp.txt").write_text(f"{when:%Y-%m-%d %H:%M:%S} UTC")


def _grade(course: Path, name: str, *, interrupt: bool = False, **options: Any) -> None:
    """Grade a chapter; with ``interrupt``, Ctrl-C is pressed once while grading and once while booking."""
    for stage in ("grading", "gradebook") if interrupt else ():
        with suppress(KeyboardInterrupt):
            _grade(course, name, on_progress=_at_half(stage, _interrupt))
    grade_course(course, name, level="given", new_pool=_threads, **options)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _threads(alone: bool) -> tuple[ThreadPoolExecutor, int]:
    return ThreadPoolExecutor(1), 1


def _by_hand(ids: list[str], names: tuple[str, ...]) -> Given:
    """Chapter, student, cell and points that an assistant gives: for answers, and for what could not be judged."""
    manual_points = []
    for number, student in enumerate(ids):
        kind = _kind(number)
        if kind == "answers":
            manual_points += [(name, student, "question", ANSWER) for name in names]
        if kind == "damaged":
            cells = [*(f"check-{task.name}" for task in load(names[0]).tasks), "question"]
            manual_points += [(names[0], student, cell, BY_HAND) for cell in cells]
    return manual_points


def _enter(course: Path, manual_points: Given) -> None:
    """Write points into the gradebook, as formgrader does."""
    with open_gradebook(course) as gradebook:
        for chapter, student, cell, points in manual_points:
            grade: Any = gradebook.find_grade(cell, chapter, chapter, student)
            grade.manual_score, grade.needs_manual_grade = points, False
        gradebook.db.commit()


def _exported(course: Path, names: list[str]) -> dict[str, dict[str, float]]:
    """The table that Canvas would import, read back."""
    columns = {name: f"{name} (1)" for name in names}
    rows = list(csv.DictReader(canvas_csv(course, names, columns).splitlines()))[1:]
    return {
        row["SIS Login ID"]: {name: float(row[head]) for name, head in columns.items() if row[head]} for row in rows
    }


def _timed(action: Any) -> float:
    begin = time.monotonic()
    action()
    return round(time.monotonic() - begin, 2)


def _browser() -> Callable[[Path, Given], None] | None:
    from autograder.proof.browser import CHROMIUM, give_points

    if CHROMIUM is None:
        print("no Chromium on this machine: points by hand go straight into the gradebook")
    return give_points if CHROMIUM else None


def main() -> None:
    """Play the long term and print what differs; exit status 1 if anything does."""
    parser = argparse.ArgumentParser(prog="python -m autograder.proof.term", description=__doc__)
    parser.add_argument("--students", type=int, default=120)
    parser.add_argument("--chapters", type=int, default=len(CHAPTERS))
    parser.add_argument("--no-feedback", dest="feedback", action="store_false", help="write no pages of feedback")
    parser.add_argument(
        "--no-browser", dest="browser", action="store_false", help="give points by hand without Chromium"
    )
    options = parser.parse_args()
    pipeline.Grader = GivenGrader  # type: ignore[misc]
    folder = Path(tempfile.mkdtemp(prefix="meshcraft-term-"))
    try:
        summary = run(
            folder,
            options.students,
            options.chapters,
            feedback=options.feedback,
            enter=_browser() if options.browser else None,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, (got, expected_points) in summary["wrong"].items():
        print(f"{name}: exported {got}, should be {expected_points}")
    print(f"{summary['compared'] - len(summary['wrong'])} of {summary['compared']} grades are as the table says")
    print(f"killed, and run again, in: {', '.join(summary['killed'])}")
    gradings = options.students * options.chapters
    print(f"{gradings} submissions on {os.cpu_count()} cores, {summary['bytes'] >> 20} MiB on disk")
    for label, seconds in summary["seconds"].items():
        print(f"  {label}: {seconds:.2f} s")
    sys.exit(1 if summary["wrong"] else 0)


if __name__ == "__main__":
    main()
