"""The ledger: every verdict of a course, in one SQLite file. It is authoritative; the gradebook is derived from it.

A verdict is filed under a key, the hash of everything it depends on (`keys`). A write is one transaction, which is on
disk when the call returns.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autograder.contract.verdict import NEEDS_HUMAN, Report

TRIES = 3
SCHEMA = """
CREATE TABLE IF NOT EXISTS verdict (key TEXT PRIMARY KEY, report TEXT NOT NULL, recorded REAL NOT NULL);
CREATE TABLE IF NOT EXISTS fault (key TEXT PRIMARY KEY, count INTEGER NOT NULL, message TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS current (
    assignment TEXT NOT NULL, student TEXT NOT NULL, key TEXT NOT NULL, submission TEXT NOT NULL, booked TEXT,
    PRIMARY KEY (assignment, student)
);
CREATE TABLE IF NOT EXISTS attempt (
    assignment TEXT NOT NULL, student TEXT NOT NULL, submission TEXT NOT NULL, key TEXT NOT NULL, seen REAL NOT NULL,
    PRIMARY KEY (assignment, student, submission)
);
CREATE TABLE IF NOT EXISTS spent (key TEXT PRIMARY KEY, seconds REAL NOT NULL);
"""
REMEDIES = (
    ("locked", "another program uses it; wait, or end that program, and run the same command again"),
    ("full", "the disk is full; free some space and run the same command again; nothing recorded so far is lost"),
    ("readonly", "it cannot be written; make the course folder writable for you and run the same command again"),
    ("unable to open", "make sure that the course folder exists and that you can write to it"),
    ("disk i/o", "the disk reports an error; check that it is not full, then run the same command again"),
    ("not a database", "the file is damaged; restore it from a backup, or move it away and grade again"),
    ("malformed", "the file is damaged; restore it from a backup, or move it away and grade again"),
)


class LedgerError(Exception):
    """The ledger cannot be read or written; the message names the file, the cause and the remedy."""


@dataclass(frozen=True)
class Entry:
    """One student's current submission, as recorded in the ledger."""

    assignment: str
    student: str
    key: str
    submission: str
    report: Report | None
    booked: bool


class Ledger:
    """The verdicts stored at ``path``; usable as a context manager.

    Raises:
        LedgerError: From every method, when the file cannot be read or written.
    """

    def __init__(self, path: Path, *, wait: float = 10.0):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LedgerError(f"no folder for the ledger {path}: {error}; make the course folder writable") from error
        with self._explained():
            self._db = sqlite3.connect(path, timeout=wait, isolation_level=None)
        try:
            with self._explained():
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=FULL")
                self._db.executescript(SCHEMA)
        except LedgerError:
            self._db.close()
            raise

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def get(self, key: str, student: str = "") -> Report | None:
        """The verdict under that key, with that student's name; None if there is none."""
        with self._explained():
            row = self._db.execute("SELECT report FROM verdict WHERE key = ?", (key,)).fetchone()
        return replace(Report.from_json(json.loads(row[0])), student=student) if row else None

    def record(self, key: str, report: Report) -> None:
        """File the verdict, and clear the key's faults."""
        text = json.dumps(replace(report, student="").to_json(), sort_keys=True)
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO verdict VALUES (?, ?, ?)", (key, text, time.time()))
            self._db.execute("DELETE FROM fault WHERE key = ?", (key,))

    def fault(self, key: str, message: str) -> int:
        """Record that the grader failed on this key; return the number of failures so far.

        After ``TRIES`` faults the submission needs a person.
        """
        with self._transaction():
            (row,) = self._db.execute(
                "INSERT INTO fault VALUES (?, 1, ?) ON CONFLICT (key) DO UPDATE SET count = count + 1, "
                "message = excluded.message RETURNING count",
                (key, message),
            ).fetchall()
        return row[0]

    def submit(self, assignment: str, student: str, key: str, submission: str) -> None:
        """Record which submission of a student counts; a new one is not yet in the gradebook."""
        with self._transaction():
            self._db.execute(
                "INSERT INTO current VALUES (?, ?, ?, ?, NULL) ON CONFLICT (assignment, student) "
                "DO UPDATE SET key = excluded.key, submission = excluded.submission, booked = NULL "
                "WHERE key <> excluded.key OR submission <> excluded.submission",
                (assignment, student, key, submission),
            )

            self._db.execute(
                "INSERT INTO attempt VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET key = excluded.key",
                (assignment, student, submission, key, time.time()),
            )

    def took(self, key: str, seconds: float) -> None:
        """Record how long the grading took."""
        with self._transaction():
            self._db.execute("INSERT OR REPLACE INTO spent VALUES (?, ?)", (key, seconds))

    def seconds(self, assignment: str | None = None) -> dict[str, list[float]]:
        """The seconds that grading each current submission took, by assignment."""
        with self._explained():
            rows = self._db.execute(
                "SELECT assignment, seconds FROM current JOIN spent ON spent.key = current.key "
                "WHERE ?1 IS NULL OR assignment = ?1 ORDER BY assignment, student",
                (assignment,),
            ).fetchall()
        by_assignment: dict[str, list[float]] = {}
        for name, seconds in rows:
            by_assignment.setdefault(name, []).append(seconds)
        return by_assignment

    def attempts(self, assignment: str) -> dict[str, list[tuple[float, Report | None]]]:
        """The times when each student's different submissions were first seen, in order, and their verdicts."""
        with self._explained():
            rows = self._db.execute(
                "SELECT student, seen, report FROM attempt LEFT JOIN verdict ON verdict.key = attempt.key "
                "WHERE assignment = ? ORDER BY student, seen",
                (assignment,),
            ).fetchall()
        by_student: dict[str, list[tuple[float, Report | None]]] = {}
        for student, seen, text in rows:
            by_student.setdefault(student, []).append((seen, Report.from_json(json.loads(text)) if text else None))
        return by_student

    def forget(self, assignment: str, students: Iterable[str]) -> None:
        """Drop these students' current submissions; the verdicts stay under their keys."""
        with self._transaction():
            rows = [(assignment, student) for student in students]
            self._db.executemany("DELETE FROM current WHERE assignment = ? AND student = ?", rows)

    def booked(self, assignment: str, student: str, report: Report | None) -> None:
        """Record that the gradebook has this report; None means that it must be booked again."""
        with self._transaction():
            self._db.execute(
                "UPDATE current SET booked = ? WHERE assignment = ? AND student = ?",
                (report and _print_of(report), assignment, student),
            )

    def entry(self, assignment: str, student: str) -> Entry | None:
        """The student's current submission; None if there is none."""
        return next((entry for entry in self.status(assignment) if entry.student == student), None)

    def status(self, assignment: str | None = None) -> list[Entry]:
        """Every student's current submission, in order of assignment and student."""
        with self._explained():
            rows = self._db.execute(
                "SELECT assignment, student, current.key, submission, report, booked FROM current "
                "LEFT JOIN verdict ON verdict.key = current.key "
                "WHERE ?1 IS NULL OR assignment = ?1 ORDER BY assignment, student",
                (assignment,),
            ).fetchall()
        return [_entry(*row) for row in rows]

    def ask(self, tables: str, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """Query other tables in this file, which are created if they are missing; return the rows."""
        with self._explained():
            self._db.executescript(tables)
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def writing(self, tables: str) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """One transaction over other tables in this file; yields the function that executes a statement."""
        with self._explained():
            self._db.executescript(tables)
        with self._transaction():
            yield self._db.execute

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._explained():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            todo = remedy(str(error)) or "check the disk, then run it again"
            raise LedgerError(f"the ledger {self.path}: {error}; {todo}") from error


def remedy(message: str) -> str:
    """The remedy for an SQLite error; empty if none is known."""
    return next((text for word, text in REMEDIES if word in message.lower()), "")


def needs_human(report: Report) -> bool:
    """Return True if any function of the report still waits for a person."""
    return any(result.verdict == NEEDS_HUMAN for result in report.functions)


def _entry(assignment: str, student: str, key: str, submission: str, text: str | None, booked: str | None) -> Entry:
    report = replace(Report.from_json(json.loads(text)), student=student) if text else None
    done = report is not None and booked == _print_of(report)
    return Entry(assignment, student, key, submission, report, done)


def _print_of(report: Report) -> str:
    return hashlib.sha256(json.dumps(report.to_json(), sort_keys=True).encode()).hexdigest()
