"""Who stands where: for the status table, and as CSV for a spreadsheet."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from autograder.grading.course import CourseError, open_ledger, students
from autograder.grading.ledger import Entry, needs_human
from autograder.grading.submissions import find_submissions
from autograder.notebook import nbgrader_quiet
from autograder.verdict import NEEDS_HUMAN

NOTHING, WAITING, CHANGED, HUMAN = "nothing handed in", "not graded yet", "changed since graded", "needs a person"
BY_HAND = "waits for grading by hand"
UNBOOKED, GRADED = "not in the gradebook yet", "graded"
DANGEROUS = ("=", "+", "-", "@", "\t", "\r")


def overview(course: Path, assignment: str) -> list[dict[str, Any]]:
    """One row for each student the course knows: state, points and, where a person is needed, why."""
    if not (course / "submitted").is_dir():
        raise CourseError(f"{course} has no folder `submitted/`; name a course folder with --course")
    handed_in = {submission.student: submission for submission in find_submissions(course, assignment)}
    with open_ledger(course) as ledger:
        entries = {entry.student: entry for entry in ledger.status(assignment)}
    booked = _booked(course, assignment)
    rows = []
    for student in sorted({*students(course, assignment), *entries}):
        submission, entry = handed_in.get(student), entries.get(student)
        changed = submission is not None and entry is not None and submission.digest != entry.submission
        state = NOTHING if submission is None and entry is None else CHANGED if changed else _state(entry)
        report = entry.report if entry else None
        by_hand = BY_HAND if state == GRADED and booked.get(student, {}).get("waits") else ""
        rows.append(
            {
                "chapter": assignment,
                "student": student,
                "state": state,
                "points": report.points if report and state in (GRADED, UNBOOKED) else None,
                "max_points": report.max_points if report else None,
                "why": _why(entry) if state == HUMAN else by_hand,
            }
        )
    return rows


def grades_csv(course: Path, assignments: list[str]) -> str:
    """The gradebook as CSV. A score stands only where there is one; ``state`` says why there is none."""
    text = io.StringIO()
    rows = [row for assignment in assignments for row in _grades(course, assignment)]
    parts = list(dict.fromkeys(name for row in rows for name in row if name.startswith("points ")))
    head = ["assignment", "student", "state", "score", "max_score", "late_penalty", *parts]
    writer = csv.DictWriter(text, head, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: neutral(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def neutral(value: object) -> object:
    """The value for a cell; text that a spreadsheet would take for a formula gets a quote before it."""
    return f"'{value}" if isinstance(value, str) and value.startswith(DANGEROUS) else value


def _state(entry: Entry | None) -> str:
    if entry is None or entry.report is None:
        return WAITING
    return HUMAN if needs_human(entry.report) else GRADED if entry.booked else UNBOOKED


def _why(entry: Entry | None) -> str:
    results = entry.report.functions if entry and entry.report else ()
    return next((result.message for result in results if result.verdict == NEEDS_HUMAN and result.message), "")


def _grades(course: Path, assignment: str) -> list[dict[str, Any]]:
    rows = {row["student"]: row for row in overview(course, assignment)}
    booked = _booked(course, assignment)
    return [
        {"assignment": assignment, "student": student, "state": row["state"], **_scores(row, booked.get(student))}
        for student, row in rows.items()
    ]


def _scores(row: dict[str, Any], booked: dict[str, Any] | None) -> dict[str, Any]:
    if booked is None or row["state"] not in (GRADED, CHANGED, HUMAN):
        return {}
    if row["state"] == GRADED and not booked["waits"]:
        return booked["scores"]
    missing = BY_HAND if row["state"] == GRADED else row["state"]
    return {**booked["scores"], "state": f"{missing} (score so far)"}


def _booked(course: Path, assignment: str) -> dict[str, dict[str, Any]]:
    """Each student's scores as nbgrader has them, manual ones included."""
    from nbgrader.api import Gradebook, MissingEntry

    if not (course / "gradebook.db").exists():
        return {}
    with nbgrader_quiet(), Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        try:
            found = gradebook.assignment_submissions(assignment)
        except MissingEntry:
            return {}
        return {str(each.student.id): _submission_scores(each) for each in found}


def _submission_scores(submission: Any) -> dict[str, Any]:
    grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
    penalty = submission.late_submission_penalty or 0.0
    scores = {"score": round(submission.score - penalty, 4), "max_score": submission.max_score, "late_penalty": penalty}
    for grade in grades:
        waits = grade.needs_manual_grade and grade.manual_score is None
        scores[f"points {grade.name.removeprefix('check-')}"] = "" if waits else grade.score
    return {"scores": scores, "waits": any(grade.needs_manual_grade for grade in grades)}
