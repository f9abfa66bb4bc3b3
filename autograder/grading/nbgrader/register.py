"""The register: an instructor's decisions about people and dates, and a log of every change, which can be undone.

It is kept alongside the verdicts, in the ledger's file. A value belongs to a subject, such as ``extension``, and a
name, such as ``fsdp/ada``. Changes to settings, due dates and names, which are kept elsewhere, are logged here as well.
"""

from __future__ import annotations

import getpass
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autograder.grading.nbgrader.course import CourseError, open_ledger

EXTENSION, READER, REQUEST, ENROLLED = "extension", "reader", "request", "enrolled"
SETTING, DUE, PERSON = "setting", "due", "person"  # kept in course.toml and in the gradebook
TABLES = """
CREATE TABLE IF NOT EXISTS register (
    subject TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (subject, name)
);
CREATE TABLE IF NOT EXISTS change (
    number INTEGER PRIMARY KEY, at TEXT NOT NULL, who TEXT NOT NULL, sentence TEXT NOT NULL, items TEXT NOT NULL,
    undone_by INTEGER
);
"""
Key = tuple[str, str]  # subject and name


@dataclass(frozen=True)
class Change:
    """A logged change; ``before`` and ``after`` are values by subject and name, None where there is no value."""

    number: int
    at: str
    who: str
    sentence: str
    before: dict[Key, Any]
    after: dict[Key, Any]
    undone_by: int | None


def values(course: Path, subject: str) -> dict[str, Any]:
    """Every value of a subject, by name."""
    with open_ledger(course) as ledger:
        rows = ledger.ask(TABLES, "SELECT name, value FROM register WHERE subject = ? ORDER BY name", (subject,))
    return {name: json.loads(value) for name, value in rows}


def record(
    course: Path, sentence: str, new: Mapping[Key, Any], before: Mapping[Key, Any] | None = None, undoes: int = 0
) -> int:
    """Set values, or remove those that are None, and log the change; return its number, or 0 if nothing changes.

    Args:
        course: The course folder.
        sentence: The change in words.
        new: The new values.
        before: The earlier values of settings, due dates and names, which are kept elsewhere.
        undoes: The change that this one undoes.
    """
    with open_ledger(course) as ledger, ledger.writing(TABLES) as execute:
        old = dict(before or {})
        for subject, name in new:
            if (subject, name) not in old:
                rows = execute("SELECT value FROM register WHERE subject = ? AND name = ?", (subject, name)).fetchall()
                old[subject, name] = json.loads(rows[0][0]) if rows else None
        changed = {which: value for which, value in new.items() if old[which] != value}
        if not changed:
            return 0
        for (subject, name), value in changed.items():
            if subject in (SETTING, DUE, PERSON):
                continue
            if value is None:
                execute("DELETE FROM register WHERE subject = ? AND name = ?", (subject, name))
            else:
                execute("INSERT OR REPLACE INTO register VALUES (?, ?, ?)", (subject, name, json.dumps(value)))
        items = [[subject, name, old[subject, name], value] for (subject, name), value in changed.items()]
        row = (datetime.now(UTC).isoformat(timespec="seconds"), getpass.getuser(), sentence, json.dumps(items))
        number = execute("INSERT INTO change (at, who, sentence, items) VALUES (?, ?, ?, ?)", row).lastrowid
        if undoes:
            execute("UPDATE change SET undone_by = ? WHERE number = ?", (number, undoes))
        return int(number or 0)


def log(course: Path) -> list[Change]:
    """Every change so far, the latest last."""
    with open_ledger(course) as ledger:
        rows = ledger.ask(TABLES, "SELECT number, at, who, sentence, items, undone_by FROM change ORDER BY number", ())
    return [_change(*row) for row in rows]


def find_change(course: Path, number: int, now: Mapping[Key, Any]) -> Change:
    """Find a change that can be undone.

    Args:
        course: The course folder.
        number: Its number in the log.
        now: The current values of settings, due dates and names, which are kept elsewhere.

    Raises:
        CourseError: There is none, it was undone, or what it set has been changed since.
    """
    changes = {change.number: change for change in log(course)}
    change = changes.get(number)
    if change is None:
        raise CourseError(f"there is no change {number}; `meshcraft changes` lists those of this course")
    if change.undone_by:
        raise CourseError(f"change {number} was undone already, by change {change.undone_by}")
    for which, value in change.after.items():
        subject, name = which
        present = now[which] if which in now else values(course, subject).get(name)
        if present != value:
            later = [other.number for other in changes.values() if other.number > number and which in other.after]
            first = f"undo change {later[-1]} first" if later else "somebody changed it by hand; change it by hand, too"
            now_and_then = f"{subject} {name} is now {_shown(present)}, no longer {_shown(value)}"
            raise CourseError(f"change {number} cannot be undone: {now_and_then}; {first}")
    return change


def _shown(value: Any) -> str:
    return "not set" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _change(number: int, at: str, who: str, sentence: str, items: str, undone_by: int | None) -> Change:
    changed_items = json.loads(items)
    before = {(subject, name): old for subject, name, old, _ in changed_items}
    after = {(subject, name): new for subject, name, _, new in changed_items}
    return Change(number, at, who, sentence, before, after, undone_by)
