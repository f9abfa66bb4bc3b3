"""Every student's state and grades: for the status table, and as CSV for a spreadsheet."""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from autograder.contract.verdict import NEEDS_HUMAN
from autograder.grading.nbgrader import register
from autograder.grading.nbgrader.course import has_gradebook, open_gradebook, open_ledger, require_course, students
from autograder.grading.nbgrader.late_penalty import MINUTE, days_begun
from autograder.grading.nbgrader.ledger import Entry, needs_human
from autograder.grading.nbgrader.names import same_name, similar_names
from autograder.grading.nbgrader.points import scaled, worth
from autograder.grading.nbgrader.settings import read_settings
from autograder.grading.nbgrader.submissions import Submission, find_submissions
from autograder.grading.nbgrader.uploads import marked_late
from autograder.release.converters import CHECK
from autograder.render import plain
from course.curriculum import CHAPTERS

NOTHING, WAITING, CHANGED, HUMAN = "nothing submitted", "not graded yet", "changed since graded", "needs a person"
BY_HAND = "waits for manual grading"
UNBOOKED, GRADED = "not in the gradebook yet", "graded"
STATES = (HUMAN, BY_HAND, WAITING, CHANGED, UNBOOKED, NOTHING, GRADED)
SHOWN = 3
UNDATED = "submission time unknown; counted as on time"
UNDATED_LATE = (
    "Canvas marks it as late and does not say by how much; counted as on time until the time is in timestamp.txt"
)
TWIN = "another name differs only in case, or in how letters are composed"
DANGEROUS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def overview(course: Path, assignment: str) -> list[dict[str, Any]]:
    """One row for each student the course knows: state, points and, if manual attention is needed, the reason."""
    require_course(course)
    handed_in = {submission.student: submission for submission in find_submissions(course, assignment)}
    with open_ledger(course) as ledger:
        entries = {entry.student: entry for entry in ledger.status(assignment)}
    booked = _booked(course, assignment)
    rows = []
    points = worth(read_settings(course), assignment)
    enrolled = register.values(course, register.ENROLLED)
    names = sorted({*students(course), *entries, *handed_in})
    alike, late = Counter(map(same_name, names)), marked_late(course, assignment)
    for student in names:
        submission, entry = handed_in.get(student), entries.get(student)
        booked_row = booked.get(student, {})
        changed = submission is not None and entry is not None and submission.digest != entry.submission
        state = NOTHING if submission is None and entry is None else CHANGED if changed else _state(entry)
        if state == GRADED and booked_row.get("waits"):
            state = BY_HAND
        if state == HUMAN and entry and entry.booked and booked_row and not booked_row["waits"]:
            state = GRADED  # a person has given the points that the grader could not
        report = entry.report if entry else None
        first = _why(entry) if state == HUMAN else _remedy(state, assignment)
        undated = (UNDATED_LATE if student in late else UNDATED) if booked_row.get("undated") else ""
        twin = TWIN if alike[same_name(student)] > 1 else ""
        notes = [*_roster_note(student, enrolled, handed_in), *_notes(submission, entry, undated, twin)]
        judged = scaled(report, points) if report else None
        so_far = judged.points if judged and state in (GRADED, BY_HAND, UNBOOKED) else None
        rows.append(
            {
                "chapter": assignment,
                "student": student,
                "state": state,
                "points": booked_row.get("points", so_far) if so_far is not None else None,
                "max_points": judged.max_points if judged else None,
                "days_late": booked_row.get("scores", {}).get("days_late", 0),
                "late_penalty": booked_row.get("scores", {}).get("late_penalty", 0.0),
                "why": "; ".join(filter(None, [first, *notes])),
                "notes": [note for note in (first, *notes) if note],
                "denied": _denied(entry),
            }
        )
    return rows


def counts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Count the rows of ``overview`` by state, the most urgent state first."""
    return {state: n for state in STATES if (n := sum(row["state"] == state for row in rows))}


def grades_csv(course: Path, assignments: list[str]) -> str:
    """The gradebook as CSV. A score is given only if there is one; ``state`` says why there is none."""
    rows = [row for assignment in assignments for row in _grades(course, assignment)]
    parts = list(dict.fromkeys(name for row in rows for name in row if name.startswith("points ")))
    return csv_text(["assignment", "student", "state", "score", "max_score", "late_penalty", "days_late", *parts], rows)


def canvas_csv(course: Path, assignments: list[str], columns: Mapping[str, str]) -> str:
    """The grades in Canvas's "Import grades" format: one row per student, one column per assignment.

    Canvas identifies a student by ``ID`` (nbgrader's lms_user_id), else by ``SIS Login ID`` (the student's id here),
    else by name; and a column by the number in brackets at its end, else by its whole name. A number is given only if
    a grade is final.

    Args:
        course: The course folder.
        assignments: The chapters.
        columns: The column title of each assignment; the chapter's title by default.
    """
    heads = _heads(assignments, columns)
    people, grades, worth = _final(course, assignments)
    enrolled = register.values(course, register.ENROLLED)
    rows: list[dict[str, Any]] = [
        {"Student": "    Points Possible", **{heads[name]: worth.get(name, "") for name in assignments}}
    ]
    for student, person in people.items():
        scores = {heads[name]: row["score"] for name, row in grades.get(student, {}).items()}
        identity = {"Student": _name(person) or student, "ID": _lms_id(person), "SIS Login ID": student}
        identity["Section"] = enrolled.get(student, {}).get("section", "")
        rows.append({**identity, **scores})
    return csv_text(["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *heads.values()], rows)


def scores(course: Path, assignment: str) -> dict[str, float]:
    """Every student's score in the gradebook, after the late penalty."""
    return {student: row["scores"]["score"] for student, row in _booked(course.resolve(), assignment).items()}


def penalties(course: Path, assignments: list[str]) -> dict[str, float]:
    """The points that lateness takes off each final grade, by student, and by chapter if there are several."""
    _, grades, _ = _final(course, assignments)
    return {
        f"{student} ({name})" if len(assignments) > 1 else student: row["late_penalty"]
        for student, rows in grades.items()
        for name, row in rows.items()
        if row["late_penalty"]
    }


def without_score(course: Path, assignments: list[str]) -> dict[str, list[str]]:
    """The students by state who have submitted something and have no final grade; also the chapter if several."""
    enrolled, by_state = register.values(course, register.ENROLLED), dict[str, list[str]]()
    for name in assignments:
        for row in overview(course, name):
            student = row["student"]
            if row["state"] not in (GRADED, NOTHING) and not enrolled.get(student, {}).get("left"):
                text = f"{student} ({name})" if len(assignments) > 1 else student
                by_state.setdefault(row["state"], []).append(text)
    return by_state


def moodle_csv(course: Path, assignments: list[str]) -> str:
    """The grades for Moodle's "Import from CSV", where each column is mapped to a field or a grade item."""
    people, grades, _ = _final(course, assignments)
    heads = _heads(assignments, {})
    rows = [
        {
            "Username": student,
            **_about(person, "First name", "Last name", "Email address"),
            **{heads[name]: row["score"] for name, row in grades.get(student, {}).items()},
        }
        for student, person in people.items()
    ]
    return csv_text(["Username", "First name", "Last name", "Email address", *heads.values()], rows)


def gradescope_csv(course: Path, assignments: list[str]) -> str:
    """The grades with the columns of Gradescope's own export, which has a score and a maximum per assignment."""
    people, grades, worth = _final(course, assignments)
    rows = [
        {
            "SID": student,
            **_about(person, "First Name", "Last Name", "Email"),
            **{name: row["score"] for name, row in grades.get(student, {}).items()},
            **{f"{name} - Max Points": worth.get(name, "") for name in assignments},
        }
        for student, person in people.items()
    ]
    heads = [head for name in assignments for head in (name, f"{name} - Max Points")]
    return csv_text(["First Name", "Last Name", "SID", "Email", *heads], rows)


def _heads(assignments: list[str], columns: Mapping[str, str]) -> dict[str, str]:
    """The column title of each assignment: the one given, else the chapter's title."""
    titles = {entry.name: entry.title for entry in CHAPTERS}
    return {name: columns.get(name) or titles.get(name, name) for name in assignments}


def _about(person: Any, *titles: str) -> dict[str, str]:
    """First name, last name and email address under these titles; empty where the gradebook does not know them."""
    values = (getattr(person, name, None) or "" for name in ("first_name", "last_name", "email"))
    return dict(zip(titles, values, strict=True))


def _final(course: Path, assignments: list[str]) -> tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any]]:
    """Students who have not left, the rows of their final grades by student and assignment, and each one's points."""
    grades: dict[str, dict[str, Any]] = {}
    for name in assignments:
        for row in _grades(course, name):
            final_rows = grades.setdefault(row["student"], {})
            if row["state"] == GRADED and "score" in row:
                final_rows[name] = row
    enrolled = register.values(course, register.ENROLLED)
    with open_gradebook(course) as gradebook:
        people = {str(student.id): student for student in gradebook.students}
        worth: dict[str, Any] = {str(each.name): each.max_score for each in gradebook.assignments}
        stay = [name for name in sorted({*people, *grades}) if not enrolled.get(name, {}).get("left")]
        for student in people.values():
            gradebook.db.expunge(student)
    return {name: people.get(name) for name in stay}, grades, worth


def csv_text(head: list[str], rows: list[dict[str, Any]]) -> str:
    """Rows as CSV that a spreadsheet reads as text and numbers only; a missing column is left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, head, restval="", lineterminator="\n")
    writer.writerow({name: neutral(name) for name in head})
    writer.writerows({name: neutral(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _name(student: Any) -> str:
    return ", ".join(filter(None, [student.last_name, student.first_name])) if student else ""


def _lms_id(student: Any) -> str:
    return (student.lms_user_id or "") if student else ""


def neutral(value: object) -> object:
    """The value for a cell, on one line; text that a spreadsheet would parse as a formula is prefixed with a quote."""
    if not isinstance(value, str):
        return value
    text = plain(re.sub(r"[^\S ]+", " ", value).strip())
    return f"'{text}" if text.startswith(DANGEROUS) else text


def _state(entry: Entry | None) -> str:
    if entry is None or entry.report is None:
        return WAITING
    return HUMAN if needs_human(entry.report) else GRADED if entry.booked else UNBOOKED


def _why(entry: Entry | None) -> str:
    results = entry.report.functions if entry and entry.report else ()
    return next((result.message for result in results if result.verdict == NEEDS_HUMAN and result.message), "")


def _remedy(state: str, assignment: str) -> str:
    if state in (WAITING, CHANGED, UNBOOKED):
        return f"`meshcraft grade {assignment}`"
    return "formgrader" if state == BY_HAND else ""


def _roster_note(student: str, enrolled: Mapping[str, Any], handed_in: Collection[str]) -> list[str]:
    """A note on someone who is not on the list of students, and whose name without a submission is most similar."""
    if student in enrolled:
        return ["has left the course"] if enrolled[student]["left"] else []
    if not enrolled:
        return []
    matches = similar_names([student], (name for name in enrolled if name not in handed_in))
    rename = f"rename the folder if it is {matches[0]}, or " if matches else ""
    return [f"not on the list of students; {rename}add them with `meshcraft init . --students FILE`"]


def _notes(submission: Submission | None, entry: Entry | None, *extra_notes: str) -> list[str]:
    denied = _denied(entry)
    refused = f"the sandbox refused {', '.join(denied[:SHOWN])}{', …' if len(denied) > SHOWN else ''}" if denied else ""
    return [*filter(None, [submission.note if submission else "", *extra_notes, refused])]


def _denied(entry: Entry | None) -> list[str]:
    """The calls that the sandbox refused, in the order of the functions, without repetition."""
    results = entry.report.functions if entry and entry.report else ()
    return list(dict.fromkeys(call for result in results for call in result.denied))


def _grades(course: Path, assignment: str) -> list[dict[str, Any]]:
    rows = {row["student"]: row for row in overview(course, assignment)}
    booked = _booked(course, assignment)
    return [
        {"assignment": assignment, "student": student, "state": row["state"], **_scores(row, booked.get(student))}
        for student, row in rows.items()
    ]


def _scores(row: dict[str, Any], booked: dict[str, Any] | None) -> dict[str, Any]:
    if booked is None or row["state"] not in (GRADED, BY_HAND, CHANGED, HUMAN):
        return {}
    if row["state"] == HUMAN and not booked["scores"]["score"]:
        return {}  # a submission that waits for a person and has earned nothing yet is not a zero
    so_far = {} if row["state"] == GRADED else {"state": f"{row['state']} (score so far)"}
    return {**booked["scores"], **so_far}


def _booked(course: Path, assignment: str) -> dict[str, dict[str, Any]]:
    """Each student's scores in nbgrader, manual ones included."""
    if not has_gradebook(course):
        return {}
    with open_gradebook(course) as gradebook:
        submissions = gradebook.assignment_submissions(assignment)
        grace = read_settings(course).late_grace * MINUTE
        return {str(each.student.id): _submission_scores(each, grace) for each in submissions}


def _submission_scores(submission: Any, grace: float) -> dict[str, Any]:
    grades = [grade for notebook in submission.notebooks for grade in notebook.grades]
    penalty = round(submission.late_submission_penalty or 0.0, 4)
    scores = {"score": round(submission.score - penalty, 4), "max_score": submission.max_score, "late_penalty": penalty}
    late = submission.total_seconds_late
    scores["days_late"] = days_begun(late) if late > grace else 0
    for grade in grades:
        waits = grade.needs_manual_grade and grade.manual_score is None
        scores[f"points {grade.name.removeprefix(CHECK)}"] = "" if waits else grade.score
    return {
        "scores": scores,
        "points": round(sum(grade.score for grade in grades if grade.name.startswith(CHECK)), 2),
        "waits": any(grade.needs_manual_grade for grade in grades),
        "undated": submission.duedate is not None and submission.timestamp is None,
    }
