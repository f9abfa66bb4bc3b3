"""A course of one chapter, released once, and common steps: submitting, filing verdicts, running commands."""

import csv
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from autograder import cli
from autograder.contract.task import load
from autograder.contract.verdict import PASS, Report, Result
from autograder.grading.nbgrader import booking
from autograder.grading.nbgrader.course import make_course, open_ledger
from autograder.grading.nbgrader.export import grades_csv, overview
from autograder.grading.nbgrader.keys import digest, key
from autograder.grading.nbgrader.late_penalty import renew_penalties
from autograder.grading.nbgrader.new_course import init_course

POINTS = {task.name: float(task.points) for task in load("fsdp").tasks}
WHERE = ("fsdp", "fsdp")  # the names of notebook and assignment
MARCH = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ROSTER = [{"id": "ada", "section": "A"}, {"id": "bob", "section": "B"}, {"id": "cleo", "section": "A"}]


@event.listens_for(Engine, "connect")
def do_not_wait_for_the_disk(connection, _):
    """Gradebooks of tests need not survive a power failure."""
    connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    return make_course(tmp_path_factory.mktemp("released") / "course", ["fsdp"])


@pytest.fixture
def course(released, tmp_path):
    return Path(shutil.copytree(released, tmp_path / "course"))


@pytest.fixture(scope="session")
def enrolled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("enrolled") / "course"
    change(folder, MARCH, ["fsdp"], ROSTER, late_per_day=10.0, vary=False)
    return folder


@pytest.fixture
def term(enrolled, tmp_path):
    """A course with a roster in two sections, a due date and a late penalty."""
    return Path(shutil.copytree(enrolled, tmp_path / "course"))


@pytest.fixture
def meshcraft(monkeypatch, capsys):
    """Run the command; return its exit status and output."""

    def run(*arguments, status=0):
        monkeypatch.setattr(sys, "argv", ["meshcraft", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert (ended.value.code or 0) == status, captured.err
        return SimpleNamespace(out=captured.out, err=captured.err)

    return run


def change(folder, due=None, chapters=(), students=(), points=None, drop=(), withdraw=(), **settings):
    """Do what ``meshcraft init`` does, with a due date only for ``fsdp``."""
    dates = {} if due is None else {"fsdp": due}
    options = {"points": points, "drop": drop, "withdraw": withdraw}
    return init_course(folder, chapters=[*chapters], due=dates, settings=settings, students=[*students], **options)


def exported(course):
    """The rows of the exported grades, by student."""
    renew_penalties(course, "fsdp")
    return {row["student"]: row for row in csv.DictReader(grades_csv(course, ["fsdp"]).splitlines())}


def states(course):
    """The rows of ``meshcraft status``, by student."""
    return {row["student"]: row for row in overview(course, "fsdp")}


def cell(notebook, name):
    return next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == name)


def hand_in(course, student, change=None, *, answer="", name="fsdp.ipynb", stamp=""):
    """Submit the released notebook under the student's name, after ``change``; return its path."""
    notebook = nbformat.read(course / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    notebook.cells[0].source += f" of {student!a}"
    if answer:
        cell(notebook, "question").source = answer
    if change:
        change(notebook)
    path = course / "submitted" / student / "fsdp" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    if stamp:
        (path.parent / "timestamp.txt").write_text(stamp)
    return path


def report(*results):
    """A report of these results, with full points for the other functions."""
    results_by_name = {result.name: result for result in results}
    functions = (results_by_name.get(name, Result(name, points, points, PASS)) for name, points in POINTS.items())
    return Report("fsdp", tuple(functions), isolation="bubblewrap")


def file_and_book(course, reports, again=True):
    """File a report for each student's notebook and book it as grading does; return the failures with reasons."""
    paths = {student: course / "submitted" / student / "fsdp" / "fsdp.ipynb" for student in reports}
    with open_ledger(course) as ledger:
        for student, path in paths.items():
            data = path.read_bytes()
            ledger.submit("fsdp", student, key(data, "contract"), digest(data))
            ledger.record(key(data, "contract"), reports[student])
            if again:
                ledger.booked("fsdp", student, None)
        booking.clean_half_made(course, ledger.status("fsdp"))
        return booking.book(course, "fsdp", ledger, paths)


def booked(course, student):
    """The autograded notebook."""
    return nbformat.read(course / "autograded" / student / "fsdp" / "fsdp.ipynb", as_version=4)
