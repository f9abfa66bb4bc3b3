"""``make demo``: build the exercise, grade the class, write gradebook and feedback pages, and say where they are."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from autograder.commands.grade import grade_table, unfinished
from autograder.commands.terminal import bar, complain, explained, out, spinner
from autograder.contract.verdict import Report
from autograder.grading.nbgrader.batch import grade_course
from autograder.grading.nbgrader.course import make_course
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.outside.sandbox import best_level
from autograder.proof.demo import CHAPTER, HERE
from autograder.release.notebook import build

STUDENTS = tuple(sorted(path.name for path in (HERE / "submitted").iterdir()))


def prepare(folder: Path, students: tuple[str, ...] = STUDENTS) -> Path:
    """A course folder with these students' submissions; an existing one is updated."""
    course = make_course(folder, [CHAPTER])
    for student in students:
        shutil.copytree(HERE / "submitted" / student, course / "submitted" / student, dirs_exist_ok=True)
    return course


def surprises(reports: list[Report], students: tuple[str, ...] = STUDENTS) -> list[str]:
    """Verdicts that differ from these students' required ones."""
    expected = json.loads((HERE / "expected.json").read_text())
    verdicts = {
        report.student: {result.name: [result.verdict, _failed(result)] for result in report.functions}
        for report in reports
    }
    return [
        f"{student}: expected {expected.get(student)}, found {verdicts.get(student)}"
        for student in sorted({*students, *verdicts})
        if expected.get(student) != verdicts.get(student)
    ]


def _failed(result) -> list[str]:
    return sorted(fact.name for fact in result.missed)


def main(folder: Path, workers: int) -> int:
    """Run the demo; return 0 if every verdict is the expected one."""
    with spinner("building the exercise"):
        (exercise,) = build([CHAPTER])
        course = prepare(folder)
    level = best_level(allow_unsafe="--unsafe-local" in sys.argv)
    with bar() as update:
        reports = grade_course(course, CHAPTER, workers=workers, level=level, on_progress=update)
    with spinner("writing feedback"):
        pages, failures = write_feedback(course, CHAPTER)
    out().print(grade_table(reports))
    out().print(
        f"\nexercise   {exercise}\ngradebook  {course / 'gradebook.db'}\nfeedback", markup=False, soft_wrap=True
    )
    for page in pages:
        out().print(f"  {page}", markup=False, soft_wrap=True)
    lab = f"cd {course} && {Path(sys.executable).parent / 'jupyter'} lab"
    out().print(f"grade the written question\n  {lab}\n  menu Nbgrader, Formgrader", markup=False, soft_wrap=True)
    problems = [*surprises(reports), *(f"no feedback for {student}: {why}" for student, why in failures.items())]
    problems += [f"{report.student} needs a person" for report in reports if unfinished(report)]
    for problem in problems:
        complain(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    with explained():
        sys.exit(main(Path("build/demo"), max(1, os.cpu_count() or 1)))
