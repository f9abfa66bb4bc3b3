"""An odd folder costs one row, and a course may be anywhere: all others are graded, booked, paged and exported."""

import csv
import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from autograder.contract.verdict import NEEDS_HUMAN, PASS, REFUSED
from autograder.grading.nbgrader import pools, submissions
from autograder.grading.nbgrader.batch_test import FakeGrader, fake, grade, verdicts
from autograder.grading.nbgrader.conftest import hand_in
from autograder.grading.nbgrader.course import open_gradebook, open_ledger
from autograder.grading.nbgrader.export import canvas_csv, grades_csv, overview
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.names import name_problem, student_name
from autograder.grading.nbgrader.submissions import misplaced
from autograder.grading.outside import sandbox

__all__ = ["fake"]  # a fixture

NFD, NFC, LATIN = "Zoe\u0308", "Zo\u00eb", "Jos\udce9"
FINE = (NFD, NFC, "O'Brien", "ADA", "ada", "نور 🦊 d’A", "-x", "Doe, J. (2)  b", "n" * 240)
ODD = {
    LATIN: r"Jos\xe9",
    "tab\tand\nline": r"tab\tand\nline",
    "right\u202eleft": r"right\u202eleft",
    "ends ": r"ends\x20",
    "..up": "..up",
    "star*": r"star\*",
    "back\\slash": r"back\\slash",
}


def test_names_of_odd_folders_are_written_out_and_never_the_same():
    assert {name: student_name(name) for name in (*FINE, *ODD)} == {**dict(zip(FINE, FINE, strict=True)), **ODD}
    written = [student_name(name) for name in (LATIN, r"Jos\xe9", "a ", r"a\x20", "a\n", r"a\n")]
    assert len({*written}) == len(written) and all(name.isprintable() and name.encode() for name in written)
    problems = {LATIN: "is not UTF-8", "": "is empty", "x\0y": "has the control character U+0000"}
    assert {name: name_problem(name) for name in problems} == problems


@pytest.mark.long
def test_one_odd_folder_costs_one_row(course, tmp_path, monkeypatch):
    for student in (*FINE, *ODD):
        hand_in(course, student)
    submitted = course / "submitted"
    (submitted / "stray.ipynb").write_text("a notebook for which nobody made a folder")
    (submitted / "file").mkdir()
    (submitted / "file" / "fsdp").write_text("")
    os.mkfifo(submitted / "pipe")
    (submitted / "nowhere").symlink_to(tmp_path / "not there")
    (submitted / "loop").symlink_to("loop")
    hand_in(course, "closed")
    hand_in(course, "waits").unlink()
    os.mkfifo(submitted / "waits" / "fsdp" / "fsdp.ipynb")
    hand_in(course, "talks").unlink()
    monkeypatch.chdir(submitted / "talks" / "fsdp")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("fsdp.ipynb")
    hand_in(course, "odd names").rename(submitted / "odd names" / "fsdp" / "\udce9\n.ipynb")
    (submitted / ".DS_Store").write_text("")
    (submitted / ".ipynb_checkpoints").mkdir()
    iterdir = Path.iterdir

    def refused(path):
        if path == submitted / "closed" / "fsdp":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refused)

    reports = grade(course)
    people = {*ODD.values(), "file", "closed"}
    refusals = {"nowhere", "loop", "waits", "talks"}
    assert {name for name, report in reports.items() if verdicts(report) == {PASS}} == {*FINE, "odd names"}
    assert {name for name, report in reports.items() if verdicts(report) == {NEEDS_HUMAN}} == people
    assert {name for name, report in reports.items() if verdicts(report) == {REFUSED}} == refusals
    messages = {name: reports[name].functions[0].message for name in (*people, *refusals)}
    assert "is not UTF-8, which nbgrader cannot handle; rename it" in messages[r"Jos\xe9"]
    assert "has RIGHT-TO-LEFT OVERRIDE, which" in messages[r"right\u202eleft"]
    assert "fsdp is not a folder" in messages["file"]
    stray = {path: why for path, why in misplaced(course).items() if "in no student's folder" in why}
    assert {*stray} == {"submitted/stray.ipynb", "submitted/pipe"}
    assert "submitted/closed cannot be read (Permission denied)" in messages["closed"]
    assert not any("not in the gradebook" in note for report in reports.values() for note in report.notes)

    with open_gradebook(course) as book:
        known = {str(student.id) for student in book.students}
    assert known == {*FINE, "odd names", *refusals, *people - {*ODD.values()}}
    pages, without = write_feedback(course, "fsdp")
    assert {page.parent.parent.name for page in pages} >= {*FINE} and {*without} == {*ODD.values()}
    rows = {row["student"].removeprefix("'"): row for row in csv.DictReader(grades_csv(course, ["fsdp"]).splitlines())}
    assert {name for name, row in rows.items() if row["score"] == "18.0"} == {*FINE, "odd names"}
    assert {*people, *refusals} <= {*rows} and canvas_csv(course, ["fsdp"], {}).encode()
    states = {row["student"]: row for row in overview(course, "fsdp")}
    assert states[r"Jos\xe9"]["state"] == "needs a person" and "differs only in case" in states["ADA"]["why"]
    assert json.dumps([*states.values()], ensure_ascii=False).encode()

    calls = FakeGrader.calls
    assert [*grade(course, only=["Zoe\u0308", "o'brien"])] == ["O'Brien", NFD] and FakeGrader.calls == calls
    (submitted / LATIN).rename(submitted / "José")
    assert verdicts(grade(course)["José"]) == {PASS}
    with open_ledger(course) as ledger:
        assert ledger.entry("fsdp", r"Jos\xe9") is None


CHARACTERS = [
    "?",
    "%20",
    "100% $HOME ${x}",
    "#",
    "a b",
    "&",
    "ü",
    NFD,
    "'\"",
    "x:y",
    "[1]",
    "*",
    "{0}",
    ";~!",
    "`",
    "\\",
]
EVERY = ["".join(CHARACTERS)]


@pytest.mark.long
@pytest.mark.parametrize("name", CHARACTERS if os.environ.get("MESHCRAFT_FULL") else EVERY)
def test_a_course_may_be_in_any_folder_and_everything_stays_inside(tmp_path, monkeypatch, meshcraft, name):
    """init, grade, status, feedback and export, typed next to a folder with such a name."""
    monkeypatch.setattr(pools, "shared_pool", lambda workers: nullcontext(lambda alone: (ThreadPoolExecutor(1), 1)))
    monkeypatch.setattr(sandbox, "best_level", lambda **_: "bubblewrap")
    work = tmp_path / "work"
    folder = work / name / "my course"
    folder.parent.mkdir(parents=True)
    monkeypatch.chdir(work)

    result = meshcraft("init", str(folder), "--chapter", "fsdp", "--due", "2026-12-01T18:00", "--late-per-day", "10")
    assert result.out.startswith("course          my-course, in ")
    hand_in(folder, "ada", stamp="2026-12-03 12:00:00 UTC")
    meshcraft("grade", "fsdp", "--course", str(folder))
    assert "graded" in meshcraft("status", "--course", str(folder)).out
    assert meshcraft("feedback", "--course", str(folder)).out.strip() == str(folder / "feedback/ada/fsdp/fsdp.html")
    (row,) = csv.DictReader(meshcraft("export", "--course", str(folder)).out.splitlines())
    assert (row["state"], row["score"], row["late_penalty"]) == ("graded", "14.4", "3.6")
    assert [*work.iterdir()] == [folder.parent] and [*folder.parent.iterdir()] == [folder]
    expected_names = "autograded course.toml feedback gradebook.db nbgrader_config.py release source submitted"
    assert {path.name for path in folder.iterdir()} == {".meshcraft", *expected_names.split()}


def test_every_file_that_a_submission_may_be_is_found_without_a_traceback(course, monkeypatch):
    monkeypatch.setattr(submissions, "contract_hash", lambda chapter: "")
    folder = course / "submitted" / "x"
    for make in (lambda path: path.symlink_to("nowhere"), os.mkfifo, Path.touch, Path.mkdir):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        make(folder / "fsdp")
        (submission,) = submissions.find_submissions(course, "fsdp")
        assert submission.notebook is None and submission.problem and submission.verdict in (NEEDS_HUMAN, REFUSED)
