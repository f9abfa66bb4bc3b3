"""Rosters as Canvas, Moodle and Gradescope export them, and grades in the form that each of them imports.

The formats are those of the systems' documentation and, for Canvas, of its importer; see the guide page for what was
tried.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

from autograder.grading.nbgrader.names import name_problem
from autograder.grading.nbgrader.settings import CourseError

COLUMNS = ("id", "first_name", "last_name", "email", "lms_user_id")
SECTION = "section"
# The systems' names for each of our columns; the first one that a file has, and that is filled in, counts.
NAMES = {
    "id": ("id", "SIS Login ID", "Username", "SID", "ID number"),
    "first_name": ("first_name", "First name", "First Name"),
    "last_name": ("last_name", "Last name", "Surname", "Last Name"),
    "email": ("email", "Email address", "Email", "Email Address"),
    SECTION: (SECTION, "Section", "Groups", "Group", "Sections"),
}
FULL = ("Student", "Name", "Full name")  # "Last, First", or "First Last"
CANVAS_ID = "ID"
TEACHING = ("instructor", "ta", "reader", "teacher")


def read_students(path: Path) -> list[dict[str, str]]:
    """The rows of a roster: our columns, or those of an export from Canvas, Moodle or Gradescope.

    Raises:
        CourseError: It cannot be read, a row is invalid, or nothing identifies the students.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            text = file.read()
        separator = ";" if text.partition("\n")[0].count(";") > text.partition("\n")[0].count(",") else ","
        reader = csv.DictReader(text.splitlines(keepends=True), skipinitialspace=True, delimiter=separator)
        head = [name.strip() for name in reader.fieldnames or []]
        reader.fieldnames = head
        rows = [
            (reader.line_num, {name: (value or "").strip() for name, value in row.items() if name}) for row in reader
        ]
    except OSError as error:
        raise CourseError(f"the roster {path} cannot be read: {error.strerror}; name a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{path} cannot be read as CSV: {error}; save it as CSV in UTF-8") from None
    if head and not {*NAMES["id"], *NAMES["email"]} & {*head}:
        raise CourseError(
            f"{path} has the columns {', '.join(head)}; it needs the column id, and may have "
            f"{', '.join((*COLUMNS[1:], SECTION))}. Or it is an export of Canvas, Moodle or Gradescope with a login, a "
            "username, a number or an email address"
        )
    seen: dict[str, int] = {}
    students = []
    for line, row in rows:
        student = _student(row)
        if not any(row.values()) or row.get("Role", "").lower() in TEACHING or _is_heading(row):
            continue
        if odd := name_problem(student["id"]):
            raise CourseError(f"{path}, line {line}: the id {student['id']!r} cannot name a folder, it {odd}")
        if student["id"] in seen:
            raise CourseError(
                f"{path}, line {line}: {student['id']} is in line {seen[student['id']]} already; remove one"
            )
        seen[student["id"]] = line
        students.append(student)
    if not students:
        raise CourseError(f"{path} names no students; it needs a line of columns, and a line for each student")
    return students


def _is_heading(row: Mapping[str, str]) -> bool:
    """Canvas's line of possible points, its note on manual posting, and its test student."""
    name = row.get("Student", "")
    return "Student" in row and (not name or name.startswith("Points Possible") or name == "Student, Test")


def _student(row: Mapping[str, str]) -> dict[str, str]:
    student = {ours: next((row[name] for name in names if row.get(name)), "") for ours, names in NAMES.items()}
    student["id"] = student["id"] or student["email"].partition("@")[0]
    student["lms_user_id"] = row.get("lms_user_id", "") or (row.get(CANVAS_ID, "") if "Student" in row else "")
    whole = next((row[name] for name in FULL if row.get(name)), "")
    if whole and not student["last_name"]:
        last, comma, first = whole.partition(", ")
        *given_names, family = whole.split()
        student["first_name"], student["last_name"] = (first, last) if comma else (" ".join(given_names), family)
    return student
