"""A course of one chapter, released once, and common steps: submitting, filing verdicts, running commands."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from autograder import cli
from autograder.contract.task import load
from autograder.contract.verdict import PASS, Report, Result
from autograder.grading.nbgrader import booking
from autograder.grading.nbgrader.course import make_course, open_ledger
from autograder.grading.nbgrader.ledger import digest, key

POINTS = {task.name: float(task.points) for task in load("fsdp").tasks}
WHERE = ("fsdp", "fsdp")  # the names of notebook and assignment


@pytest.fixture(scope="session")
def released(tmp_path_factory):
    return make_course(tmp_path_factory.mktemp("released") / "course", ["fsdp"])


@pytest.fixture
def course(released, tmp_path):
    return Path(shutil.copytree(released, tmp_path / "course"))


@pytest.fixture
def meshcraft(monkeypatch, capsys):
    """Run the command; return its exit status and output."""

    def run(*arguments, status=0):
        monkeypatch.setattr(sys, "argv", ["meshcraft", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == status, printed.err
        return SimpleNamespace(out=printed.out, err=printed.err)

    return run


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
    given = {result.name: result for result in results}
    functions = (given.get(name, Result(name, points, points, PASS)) for name, points in POINTS.items())
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
