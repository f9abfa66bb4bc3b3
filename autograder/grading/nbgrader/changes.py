"""The changes that `meshcraft init` makes to settings, due dates and the roster, as they are logged."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autograder.contract.text import count_of
from autograder.grading.nbgrader import course, register
from autograder.grading.nbgrader.due_dates import due_dates
from autograder.grading.nbgrader.register import DUE, ENROLLED, PERSON, SETTING, Key
from autograder.grading.nbgrader.rosters import COLUMNS, SECTION
from autograder.grading.nbgrader.settings import Settings, read_settings
from autograder.render import few

FIELDS = COLUMNS[1:]


def state(folder: Path) -> dict[Key, Any]:
    """The current settings, due dates and students' names, in the form in which changes are logged."""
    settings = json.loads(json.dumps(asdict(read_settings(folder) if folder.is_dir() else Settings())))
    dates = {(DUE, name): date and date.isoformat() for name, date in due_dates(folder).items()}
    return {(SETTING, name): value for name, value in settings.items()} | dates | _people(folder)


def _people(folder: Path) -> dict[Key, Any]:
    if not (folder / "gradebook.db").exists():
        return {}
    with course.open_gradebook(folder) as gradebook:
        return {
            (PERSON, str(student.id)): {field: getattr(student, field) or None for field in FIELDS}
            for student in gradebook.students
        }


def log_changes(
    folder: Path,
    before: Mapping[Key, Any],
    students: list[dict[str, str]],
    withdraw: Collection[str],
    undoes: int,
) -> None:
    """Log what differs from the state ``before``, and record who is enrolled."""
    enrolled = register.values(folder, ENROLLED)
    now = state(folder)
    previous = {which: before.get(which) for which in now}
    parts = [part for which, value in now.items() for part in _differences(which, previous[which], value)]
    people: dict[Key, Any] = {}
    for row in students:
        old = enrolled.get(row["id"], {}).get(SECTION, "")
        section = row.get(SECTION) or old
        people[ENROLLED, row["id"]] = {SECTION: section, "left": False}
        parts += [f"{row['id']}: section {old} → {section}"] if old not in ("", section) else []
    for student in withdraw:
        people[ENROLLED, student] = {SECTION: "", **enrolled.get(student, {}), "left": True}
    joined = [row["id"] for row in students if enrolled.get(row["id"], {"left": True})["left"]]
    parts += [f"{count_of(len(joined), 'student')} enrolled: {few(joined)}"] if joined else []
    parts += [f"left the course: {few([*withdraw])}"] if withdraw else []
    register.record(folder, "; ".join(parts) or "the roster was completed", {**now, **people}, previous, undoes)


def _differences(which: Key, old: Any, new: Any) -> list[str]:
    """The differences between two values in words; a student's data that was missing before does not count."""
    subject, name = which
    if subject == PERSON:
        fields = [field for field in FIELDS if (old or {}).get(field) not in (None, new[field])]
        return [f"{name}: {field.replace('_', ' ')} {old[field]} → {_as_text(new[field])}" for field in fields]
    title = name.replace("_", " ") if subject == SETTING else f"{name} due"
    return [f"{title}: {_as_text(old)} → {_as_text(new)}"] if old != new else []


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = [f"{name} {_as_text(each)}" for name, each in value.items()]
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return "none" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)
