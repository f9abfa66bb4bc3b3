"""A class over a term: points, written answers, people and dates change, nothing is lost, and each change is undone."""

import csv
import grp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from autograder.contract.task import load
from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PASS, REFUSED, Fact, Kind, Result
from autograder.grading.nbgrader import batch, people, points, pools, register
from autograder.grading.nbgrader.batch_test import FakeGrader, fake, grade, verdicts
from autograder.grading.nbgrader.conftest import POINTS, WHERE, booked, cell, file_and_book, hand_in, report
from autograder.grading.nbgrader.course import open_gradebook, release, secret
from autograder.grading.nbgrader.export import canvas_csv, grades_csv, gradescope_csv, moodle_csv, overview
from autograder.grading.nbgrader.feedback import prose, write_feedback
from autograder.grading.nbgrader.feedback_test import Page, asks_for_nothing
from autograder.grading.nbgrader.group import require_group
from autograder.grading.nbgrader.late import renew_penalties
from autograder.grading.nbgrader.new_course import due_dates, init_course
from autograder.grading.nbgrader.page import _slug, next_step
from autograder.grading.nbgrader.report import class_report, report_csv, report_page
from autograder.grading.nbgrader.rosters import read_students
from autograder.grading.nbgrader.settings import CourseError, read_settings
from autograder.grading.nbgrader.submissions import misplaced
from autograder.grading.nbgrader.uploads import collect, feedback_zip
from autograder.grading.outside import sandbox
from autograder.release.notebook import ROOT
from course.curriculum import CHAPTERS

__all__ = ["fake"]  # a fixture
MARCH = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ROSTER = [{"id": "ada", "section": "A"}, {"id": "bob", "section": "B"}, {"id": "cleo", "section": "A"}]


def change(folder, due=None, chapters=(), students=(), points=None, drop=(), withdraw=(), **settings):
    dates = {} if due is None else {"fsdp": due}
    more = {"points": points, "drop": drop, "withdraw": withdraw}
    return init_course(folder, chapters=[*chapters], due=dates, settings=settings, students=[*students], **more)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class") / "course"
    change(folder, MARCH, ["fsdp"], ROSTER, late_per_day=10.0, vary=False)
    return folder


@pytest.fixture
def course(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "course"))


def edit(course, act):
    path = course / "source" / "fsdp" / "fsdp.ipynb"
    notebook = nbformat.read(path, as_version=4)
    act(notebook)
    nbformat.write(notebook, path)


def exported(course):
    renew_penalties(course, "fsdp")
    return {row["student"]: row for row in csv.DictReader(grades_csv(course, ["fsdp"]).splitlines())}


def question(course, student):
    with open_gradebook(course) as gradebook:
        grade, comment = (find("question", *WHERE, student) for find in (gradebook.find_grade, gradebook.find_comment))
        return grade.auto_score, grade.needs_manual_grade, comment.auto_comment


def states(course):
    return {row["student"]: row for row in overview(course, "fsdp")}


def test_points_scale_without_another_grading_and_go_back(course):
    hand_in(course, "ada")
    grade(course)
    assert exported(course)["ada"]["score"] == "18.0"
    change(course, points={"fsdp.fsdp_loss": 10.0, "fsdp.question": 4.0})
    released = (course / "release" / "fsdp" / "fsdp.ipynb").read_text()
    assert "; 10 points.*" in released and read_settings(course).points == {
        "fsdp.fsdp_loss": 10.0,
        "fsdp.question": 4.0,
    }
    assert states(course)["ada"]["state"] == "not in the gradebook yet"
    assert (grade(course)["ada"].points, grade(course)["ada"].max_points) == (23.0, 23.0)
    row = exported(course)["ada"]
    assert (row["score"], row["max_score"], row["points fsdp_loss"]) == ("23.0", "27.0", "10.0")
    people.undo(course, register.log(course)[-1].number)
    grade(course)
    assert exported(course)["ada"]["score"] == "18.0" and read_settings(course).points == {}


def test_a_source_with_other_points_or_with_a_test_cell_is_refused_before_release_and_grading(course):
    def dearer(notebook):
        cell(notebook, "check-fsdp_loss").metadata.nbgrader.points = 10

    def tested(notebook):
        own = {"grade_id": "mine", "points": 1, "grade": True, "solution": False, "locked": True, "task": False}
        own |= {"schema_version": 3, "cell_type": "code"}
        notebook.cells.append(new_code_cell("assert True", metadata={"nbgrader": own}))

    hand_in(course, "ada")
    edit(course, dearer)
    for attempt in (change, grade, lambda course: release(course, "fsdp")):
        with pytest.raises(CourseError, match=r"fsdp_loss is worth 10 points, and the course says 5.*--points fsdp.fs"):
            attempt(course)
    change(course, points={"fsdp.fsdp_loss": 10.0})
    edit(course, tested)
    for attempt in (change, lambda course: release(course, "fsdp")):
        with pytest.raises(CourseError, match="has the test cell 'mine', which official grading cannot judge"):
            attempt(course)

    def mine(notebook):
        own = notebook.cells.pop()
        own.source = "answer = 1"
        return own

    def answered(notebook):
        notebook.cells[-1].metadata.nbgrader |= {"solution": True, "locked": False}

    edit(course, answered)
    release(course, "fsdp")
    hand_in(course, "bob", lambda notebook: notebook.cells.append(mine(notebook)))
    assert grade(course)["bob"].points == 23.0
    assert exported(course)["bob"]["max_score"] == "26.0", "a question of the instructor's own waits for a person"
    assert states(course)["bob"]["state"] == "waits for manual grading"


def test_a_test_cell_that_was_released_all_the_same_waits_for_a_person(course, monkeypatch):
    def tested(notebook):
        own = {"grade_id": "mine", "points": 1, "grade": True, "solution": False, "locked": True, "task": False}
        notebook.cells.append(
            new_code_cell("1", metadata={"nbgrader": {**own, "schema_version": 3, "cell_type": "code"}})
        )

    edit(course, tested)
    with monkeypatch.context() as before:
        before.setattr(points, "require_agreement", lambda *_, **__: None)
        release(course, "fsdp")
    hand_in(course, "ada")
    grade(course)
    assert states(course)["ada"]["state"] == "waits for manual grading" and exported(course)["ada"]["score"] == "18.0"


@pytest.mark.parametrize("how", ["id", "place", "inside", "gone"])
def test_an_answer_without_metadata_is_found_or_a_person_is_asked(course, how):
    def strip(notebook):
        at = next(n for n, each in enumerate(notebook.cells) if each.id == "question")
        for number, each in enumerate(notebook.cells):
            each.metadata = {}
            each.id = each.id if how == "id" else f"cell-{number}"
        if how == "inside":
            notebook.cells[at - 1].source += "\n\n" + notebook.cells.pop(at).source
        if how == "gone":
            notebook.cells.append(notebook.cells.pop(at))

    hand_in(course, "ada", strip, answer="Because L*W.")
    grade(course)
    score, waits, comment = question(course, "ada")
    assert (score, waits) == (None, True) and "Because L*W." in str(booked(course, "ada").cells)
    found = cell(booked(course, "ada"), "question").source
    assert found.endswith("Because L*W.") if how != "gone" else "a person looks for the answer" in comment


def test_an_answer_that_was_left_empty_is_no_answer(course):
    hand_in(course, "ada")
    grade(course)
    assert question(course, "ada") == (0.0, False, "No response.")


@pytest.mark.parametrize(
    "text",
    [
        "L*W*H/n and a*b",
        "n<m and m>k",
        "x**2 + y**2",
        "__init__",
        r"\(x*y*z\)",
        "$L*W*H$",
        "2 * n",
        "a_i*b_i",
    ],
)
def test_a_formula_arrives_as_it_was_typed(text):
    shown = str(prose(f"so {text} bytes")).removeprefix("<p>").removesuffix("</p>\n")
    assert shown.replace("&lt;", "<").replace("&gt;", ">") == f"so {text} bytes"


@pytest.mark.parametrize("data", [b"", b"  \n", b'{"cells": [', '{"cells": "\xe9"}'.encode("latin-1"), b"[]"])
def test_a_damaged_upload_waits_for_a_person_and_their_points_settle_it(course, data):
    hand_in(course, "ada").write_bytes(data)
    judged = grade(course)["ada"]
    assert verdicts(judged) == {NEEDS_HUMAN} and "the upload is damaged" in judged.functions[0].message
    assert states(course)["ada"]["state"] == "needs a person"
    with open_gradebook(course) as gradebook:
        for given in gradebook.find_submission_notebook(*WHERE, "ada").grades:
            given.manual_score, given.needs_manual_grade = 1.0, False
        gradebook.db.commit()
    grade(course)
    assert states(course)["ada"]["state"] == "graded" and states(course)["ada"]["points"] == 5.0
    assert exported(course)["ada"]["score"] == "6.0"


def test_a_person_who_overrules_points_is_seen_in_status_and_refusals_of_the_sandbox_too(course):
    hand_in(course, "ada", answer="x")
    denied = Result("shard_params", 2.0, 2.0, PASS, denied=("socket(AF_INET)",))
    assert file_and_book(course, {"ada": report(denied)}) == {}
    with open_gradebook(course) as gradebook:
        given: Any = gradebook.find_grade("check-shard_params", *WHERE, "ada")
        given.manual_score = 0.5
        gradebook.db.commit()
    row = states(course)["ada"]
    assert (row["points"], row["denied"]) == (16.5, ["socket(AF_INET)"]) and "the sandbox refused socket" in row["why"]


def test_an_extension_before_handing_in_counts_and_a_section_has_one_together(course):
    people.extend(course, "fsdp", people.chosen(course, "fsdp", [], "A"), 24)
    for student in ("ada", "bob"):
        hand_in(course, student, stamp="2026-03-02 11:00:00 UTC")
    grade(course)
    rows = exported(course)
    assert (rows["ada"]["late_penalty"], rows["bob"]["late_penalty"]) == ("0.0", "1.8")
    people.extend(course, "fsdp", ["bob"], 24)
    assert exported(course)["bob"]["late_penalty"] == "0.0"
    people.undo(course, register.log(course)[-1].number)
    assert exported(course)["bob"]["late_penalty"] == "1.8"
    with pytest.raises(CourseError, match="no student nobody"):
        people.chosen(course, "fsdp", ["nobody"], "")
    with pytest.raises(CourseError, match="no student is in the section 'C'; there are: A, B"):
        people.chosen(course, "fsdp", [], "C")


def test_a_few_minutes_late_cost_nothing_within_the_grace_period(course):
    hand_in(course, "ada", stamp="2026-03-01 12:06:00 UTC")
    grade(course)
    assert exported(course)["ada"]["late_penalty"] == "1.8"
    change(course, late_grace=15.0)
    assert exported(course)["ada"]["late_penalty"] == "0.0"
    assert "up to 15 minutes late count as on time" in (course / "release" / "fsdp" / "fsdp.ipynb").read_text()


def test_who_is_not_on_the_roster_is_flagged_and_who_left_keeps_the_work(course):
    for student in ("ada", "bobb", "stranger"):
        hand_in(course, student)
    change(course, withdraw=["ada"])
    grade(course)
    rows = states(course)
    assert "not on the list of students, which has bob" in rows["bobb"]["why"]
    assert "not on the list" in rows["stranger"]["why"] and "has left the course" in rows["ada"]["why"]
    assert "ada" not in canvas_csv(course, ["fsdp"], {}) and exported(course)["ada"]["score"] == "18.0"
    with open_gradebook(course) as gradebook:
        gradebook.remove_student("bobb")
    assert "bobb" in canvas_csv(course, ["fsdp"], {}), "and no traceback"
    change(course, students=[{"id": "stranger"}])
    assert "not on the list" not in states(course)["stranger"]["why"]


def test_no_chapter_is_added_by_grading_and_one_is_dropped_and_taken_back(course):
    hand_in(course, "ada")
    with pytest.raises(CourseError, match="collectives is not in this course, which has fsdp"):
        batch.grade_course(course, "collectives", level="bubblewrap")
    change(course, drop=["fsdp"])
    with pytest.raises(CourseError, match="fsdp was dropped from this course"):
        grade(course)
    people.undo(course, register.log(course)[-1].number)
    assert grade(course)["ada"].points == 18.0


def test_a_change_is_undone_only_while_nothing_later_depends_on_it(course):
    people.extend(course, "fsdp", ["ada"], 24)
    first = register.log(course)[-1].number
    people.extend(course, "fsdp", ["ada"], 48)
    with pytest.raises(CourseError, match=rf"is now 48, no longer 24; undo change {first + 1} first"):
        people.undo(course, first)
    people.undo(course, first + 1)
    people.undo(course, first)
    assert register.values(course, register.EXTENSION) == {}
    with pytest.raises(CourseError, match="was undone already, by change"):
        people.undo(course, first)
    change(course, MARCH + timedelta(days=1))
    people.undo(course, register.log(course)[-1].number)
    assert due_dates(course) == {"fsdp": MARCH} and "2026-03-01" in (course / "release/fsdp/fsdp.ipynb").read_text()


def test_written_answers_are_divided_equally_and_late_ones_move_nobody(course):
    for student in ("ada", "bob", "cleo"):
        hand_in(course, student, answer="x")
    grade(course)
    first = people.assign_readers(course, "fsdp", ["tina", "tom"])
    assert sorted(map(len, first.values())) == [1, 2]
    hand_in(course, "dora", answer="x")
    grade(course)
    second = people.assign_readers(course, "fsdp", ["tina", "tom"])
    assert all({*first[name]} <= {*second[name]} for name in first) and sorted(map(len, second.values())) == [2, 2]
    assert sorted(people.numbers(course, "fsdp").values()) == [1, 2, 3, 4]


def test_a_request_for_a_regrade_is_kept_and_answered(course):
    with pytest.raises(CourseError, match="ada has not asked"):
        people.answer_regrade(course, "fsdp", "ada", "No.")
    people.ask_regrade(course, "fsdp", "ada", "The bytes are right.")
    people.answer_regrade(course, "fsdp", "ada", "They are not: two gathers.")
    (request,) = register.values(course, register.REQUEST).values()
    assert (request["text"], request["answer"]) == ("The bytes are right.", "They are not: two gathers.")


@pytest.mark.parametrize(
    ("text", "student"),
    [
        (
            'Student,ID,SIS User ID,SIS Login ID,Section\n"    Points Possible",,,,\n"Kahn, Bob",102,,bob,S1\n'
            '"Student, Test",1,,x,S1\n',
            {"id": "bob", "first_name": "Bob", "last_name": "Kahn", "lms_user_id": "102", "section": "S1"},
        ),
        (
            "First name,Last name,ID number,Email address,Groups\nBob,Kahn,77,bob@example.org,S1\n",
            {"id": "77", "first_name": "Bob", "last_name": "Kahn", "email": "bob@example.org", "section": "S1"},
        ),
        (
            "Name,SID,Email,Role,Sections\nBob Kahn,77,bob@example.org,Student,S1\nTina,1,t@example.org,TA,\n",
            {"id": "77", "first_name": "Bob", "last_name": "Kahn", "email": "bob@example.org", "section": "S1"},
        ),
        ("Vorname;Email\nBob;bob@example.org\n", {"id": "bob", "email": "bob@example.org"}),
    ],
)
def test_rosters_of_canvas_moodle_and_gradescope_are_read(tmp_path, text, student):
    path = tmp_path / "roster.csv"
    path.write_text(text)
    (row,) = read_students(path)
    assert {name: value for name, value in row.items() if value} == student
    assert json.dumps(row) and POINTS


def test_feedback_says_where_to_go_on_and_which_earlier_function_is_to_blame(course):
    def uses(notebook):
        cell(notebook, "fsdp_loss").source = "def fsdp_loss(*a):\n    return helper(*a)\n"
        cell(notebook, "gather_params").source = "def gather_params(*a):\n    pass\n"
        notebook.cells.append(new_code_cell("%%time\nx = (", id="odd"))
        notebook.cells.append(new_code_cell("def helper(*a):\n    return gather_params(*a)\n", id="helper"))

    change(course, site="https://example.org/meshcraft")
    hand_in(course, "ada", uses, answer="L*W & more")
    fact = Fact("gradients", Kind.GRADIENTS, False, 7, 2e-5)
    results = [Result(n, 0.0, POINTS[n], FAIL, (fact,)) for n in ("gather_params", "fsdp_loss")]
    assert file_and_book(course, {"ada": report(*results)}) == {}
    people.ask_regrade(course, "fsdp", "ada", "Why 7?")
    people.answer_regrade(course, "fsdp", "ada", "Eight devices, less one.")
    (page,), problems = write_feedback(course, "fsdp")
    text = page.read_text()
    assert problems == {} and text.index("What to do next") < text.index("gather_params</code></a>: ")
    assert "<code>fsdp_loss</code> uses <code>gather_params</code>, which is not right yet" in text
    assert "“gradients” is not met yet. After that, 1 more function." in text
    assert (
        'href="https://example.org/meshcraft/' in text and "A colleague proposes" in text and "L*W &amp; more" in text
    )
    assert "Why 7?" in text and "Eight devices, less one." in text and "model answer" not in text
    assert "passed; its facts" in text
    copy = booked(course, "ada")
    at = next(n for n, each in enumerate(copy.cells) if each.metadata.get("nbgrader", {}).get("grade_id") == "question")
    assert copy.cells[at - 1].source.startswith("**For graders: a model answer**\n\nKeeping the gathered weights")


def test_the_anchors_of_links_are_those_of_the_site():
    slugify = pytest.importorskip("markdown.extensions.toc").slugify
    for chapter in CHAPTERS:
        for _, heading in load(chapter.name).read.values():
            assert _slug(heading) == slugify(heading, "-")


def test_what_comes_next_is_said_for_nothing_and_for_everything_right():
    right, wrong = (Result("f", points, 1.0, verdict) for points, verdict in ((1.0, PASS), (0.0, FAIL)))
    assert next_step("fsdp", [right]) == {"sentence": "Every function passes."}
    assert "Nothing has earned points yet" in next_step("fsdp", [wrong])["sentence"]
    assert "A person looks at" in next_step("fsdp", [replace(right, verdict=NEEDS_HUMAN)])["sentence"]


def act_as_assistant(course: str) -> None:
    """What an assistant does and cannot do in a shared course; the process becomes another user for good."""
    shared = Path(course)
    exported(shared)  # imports what is imported late
    os.setgroups([65534])
    os.setgid(1000)
    os.setuid(1000)
    with open_gradebook(shared) as gradebook:
        given: Any = gradebook.find_grade("question", *WHERE, "ada")
        given.manual_score, given.needs_manual_grade = 1.5, False
        gradebook.db.commit()
    assert exported(shared)["ada"]["score"] == "19.5"
    people.extend(shared, "fsdp", ["ada"], 24)
    with pytest.raises(CourseError, match=r"secret is for root alone, who grades"):
        secret(shared)
    with pytest.raises(CourseError, match="only root grades and changes this course"):
        grade(shared)
    with pytest.raises(PermissionError):
        (shared / ".meshcraft" / "secret").unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_an_assistant_of_the_group_reviews_and_exports_and_never_sees_the_secret(course):
    group = grp.getgrgid(65534).gr_name
    hand_in(course, "ada", answer="x")
    grade(course)
    change(course, group=group)
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        shared = Path(place) / "course"
        subprocess.run(["cp", "-a", course, shared], check=True)
        # A fresh process, which imports as root and then becomes the other user: this one has threads.
        code = f"from autograder.grading.nbgrader import class_test; class_test.act_as_assistant({str(shared)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert exported(shared)["ada"]["score"] == "19.5" and len(secret(shared)) == 32
        with pytest.raises(CourseError, match="this machine has no group 'nosuchgroup'"):
            require_group("nosuchgroup")


def archive(path, files):
    with zipfile.ZipFile(path, "w") as made:
        for name, text in files.items():
            made.writestr(name, text)
    return path


GRADESCOPE = """
:submission_1:
  :submitters:
  - :name: Bob Kahn
    :sid: bob
    :email: bob@example.org
  :created_at: 2026-03-02 11:00:00.000000000 Z
"""


def test_zip_files_of_three_systems_become_submissions_and_nothing_in_them_is_dropped(course, tmp_path):
    change(course, students=[{"id": "bob", "first_name": "Bob", "last_name": "Kahn", "lms_user_id": "102"}])
    canvas = {"kahnbob_LATE_102_9_fsdp-1.ipynb": "1", "kahnbo_999_9_fsdp.ipynb": "2", "kahnbob_102_8_notes.txt": "3"}
    got = collect(course, "fsdp", archive(tmp_path / "canvas.zip", canvas))
    assert (got.new, got.late, got.others) == (["bob"], ["bob"], 1)
    assert got.aside == {"kahnbo_999_9_fsdp.ipynb": "nobody on the list of students is called kahnbo; is it bob?"}
    assert [path.read_text() for path in (course / ".meshcraft" / "unmatched" / "fsdp").iterdir()] == ["2"]

    moodle = {"Bob Kahn_77_assignsubmission_file_/../../x.ipynb": "4", "cleo_78_assignsubmission_file_fsdp.ipynb": "5"}
    got = collect(course, "fsdp", archive(tmp_path / "moodle.zip", moodle))
    assert (got.new, got.replaced) == (["cleo"], ["bob"]) and got.aside == {}
    assert [path.read_text() for path in (course / ".meshcraft" / "earlier" / "fsdp").iterdir()] == ["1"]
    pages = [course / "feedback" / "bob" / "fsdp" / "fsdp.html"]
    pages[0].parent.mkdir(parents=True)
    pages[0].write_text("page")
    assert feedback_zip(course, "fsdp", pages, tmp_path / "out.zip") == 1
    with zipfile.ZipFile(tmp_path / "out.zip") as made:
        assert made.namelist() == ["Bob Kahn_77_assignsubmission_file_/x.html"]

    files = {
        "assignment_1_export/submission_metadata.yml": GRADESCOPE,
        "assignment_1_export/submission_1/hw.ipynb": "6",
    }
    got = collect(course, "fsdp", archive(tmp_path / "gradescope.zip", files))
    assert got.replaced == ["bob"] and (course / "submitted/bob/fsdp/fsdp.ipynb").read_text() == "6"
    assert (course / "submitted/bob/fsdp/timestamp.txt").read_text() == "2026-03-02 11:00:00 UTC"
    assert {path.name for path in (course / "submitted").iterdir()} == {"bob", "cleo"}
    for bad, says in (({"x.ipynb": ""}, "has no notebook as Canvas"), (None, "cannot be read as a zip file")):
        path = archive(tmp_path / "bad.zip", bad) if bad else tmp_path / "none.zip"
        with pytest.raises(CourseError, match=says):
            collect(course, "fsdp", path)


def test_grades_go_back_to_moodle_and_gradescope(course):
    change(course, students=[{"id": "bob", "first_name": "Bob", "last_name": "Kahn", "email": "bob@example.org"}])
    hand_in(course, "bob")
    grade(course)
    row = next(row for row in csv.DictReader(moodle_csv(course, ["fsdp"]).splitlines()) if row["Username"] == "bob")
    assert (row["Email address"], row["Fully sharded data parallelism"]) == ("bob@example.org", "18.0")
    row = next(row for row in csv.DictReader(gradescope_csv(course, ["fsdp"]).splitlines()) if row["SID"] == "bob")
    assert (row["Last Name"], row["fsdp"], row["fsdp - Max Points"]) == ("Kahn", "18.0", "20.0")


def test_the_report_says_which_fact_fails_with_which_message_and_who_waits(course, tmp_path):
    late = Fact("gradients", Kind.GRADIENTS, False, 7, 2e-5, case="data=8", message="8 times\ntoo <large>")
    failed = Result("gather_params", 0.0, 3.0, FAIL, (late,))
    stopped = Result("fsdp_loss", 0.0, 5.0, REFUSED, message="a loop until data says so")
    person = Result("shard_params", 0.0, 2.0, NEEDS_HUMAN, message="it broke")
    for student in ("ada", "bob", "cleo"):
        hand_in(course, student)
    file_and_book(course, {"ada": report(failed), "bob": report(failed, stopped), "cleo": report(person)})
    hand_in(course, "ada", answer="again")
    file_and_book(course, {"ada": report()})
    data = class_report(course, "fsdp", (course,))
    functions = {each["name"]: each for each in data["functions"]}
    assert functions["gather_params"]["facts"] == [
        {"name": "gradients", "failed": 1, "message": "8 times too <large>", "case": "data=8"}
    ]
    assert functions["gather_params"]["verdicts"] == {PASS: 2, FAIL: 1}
    assert functions["fsdp_loss"]["stopped"] == {"count": 1, "message": "a loop until data says so"}
    assert (data["attempts"]["by_number"], data["attempts"]["mean_gain"]) == ({"1": 2, "2": 1}, 3.0)
    why = {each["student"]: each["why"].partition(";")[0] for each in data["persons"]}
    assert why == {"ada": "formgrader", "cleo": "it broke"}
    assert (
        data["earlier"][0]["pass_share"]["gather_params"] == 0.6667 and sum(b["count"] for b in data["histogram"]) == 2
    )
    page = report_page(data)
    asks_for_nothing(Page(page))
    assert "8 times too &lt;large&gt;" in page and "67 % pass; 67 % in course" in page
    rows = [*csv.DictReader(report_csv(data).splitlines())]
    assert [row["message"] for row in rows if row["fact"]] == ["8 times too <large>"] and len(rows) == len(POINTS)
    with pytest.raises(CourseError, match="nothing of fsdp has been graded yet"):
        class_report(init_empty(tmp_path), "fsdp")


def init_empty(folder):
    (folder / "empty" / "submitted").mkdir(parents=True)
    return folder / "empty"


def test_all_chapters_are_graded_in_one_run_and_one_that_cannot_be_stops_no_other(course, meshcraft, monkeypatch):
    def two_threads(workers):
        return nullcontext(lambda alone: (ThreadPoolExecutor(1), 1))

    monkeypatch.setattr(pools, "shared_pool", two_threads)
    monkeypatch.setattr(sandbox, "best_level", lambda **_: "bubblewrap")
    change(course, chapters=["collectives"])
    hand_in(course, "ada")
    shutil.copytree(course / "release" / "collectives", course / "submitted" / "ada" / "collectives")
    guess = meshcraft("grade", "--all", "--estimate", "--course", str(course))
    assert "2 gradings of 2 chapters, about 1 min with" in guess.err and "a rough guess" in guess.err
    path = course / "source" / "collectives" / "collectives.ipynb"
    text = path.read_text()
    path.write_text("cut off")
    done = meshcraft("grade", "--all", "--course", str(course), status=2)
    assert "collectives was not graded" in done.err and "18 of 18" in done.out
    path.write_text(text)
    change(course, points={"fsdp.fsdp_loss": 10.0})
    done = meshcraft("grade", "fsdp", "--course", str(course))
    assert "ada: fsdp 18 before, 23 now" in done.out
    assert "leave out fsdp, or leave out --all" in meshcraft("grade", "fsdp", "--all", status=2).err


def test_a_regrade_under_another_sandbox_is_the_same(course, meshcraft, monkeypatch):
    monkeypatch.setattr(pools, "shared_pool", lambda workers: nullcontext(lambda alone: (ThreadPoolExecutor(1), 1)))
    monkeypatch.setattr(sandbox, "best_level", lambda **_: "bubblewrap")
    hand_in(course, "ada")
    meshcraft("grade", "fsdp", "--course", str(course))
    judge = FakeGrader.grade_notebook
    monkeypatch.setattr(FakeGrader, "grade_notebook", lambda *given: replace(judge(*given), isolation="landlock"))
    again = meshcraft("grade", "fsdp", "--again", "--course", str(course)).out
    assert "1 of 1 graded again are the same" in again
    assert "judged under landlock now, and under bubblewrap before" in again


def test_workers_stay_for_the_next_chapter_and_dead_ones_are_replaced(monkeypatch):
    started = []

    class Workers(ThreadPoolExecutor):
        broken = False

        def submit(self, fn, /, *args, **kwargs):
            if self.broken:
                raise BrokenExecutor
            return super().submit(fn, *args, **kwargs)

    def start(workers):
        return lambda alone: (started.append(Workers(1)) or started[-1], workers)

    monkeypatch.setattr(pools, "local_pool", start)
    with pools.shared_pool(2) as pool:
        for _ in range(2):
            executor, width = pool(False)
            with executor:
                assert (executor.submit(len, "ab").result(), width) == (2, 2)
        assert len(started) == 1
        started[0].broken = True
        with pool(False)[0] as executor:
            assert executor.submit(len, "abc").result() == 3
        assert len(started) == 2


def test_export_to_a_missing_folder_is_a_sentence(course, meshcraft, tmp_path):
    ended = meshcraft("export", "fsdp", "--course", str(course), "--to", str(tmp_path / "no" / "x.csv"), status=2)
    assert f"there is no folder {tmp_path / 'no'}; make it first" in ended.err


def test_work_in_a_folder_of_another_name_is_named_with_the_chapter_that_it_may_be(course):
    hand_in(course, "ada")
    for name in ("FSDP", "fsdpp", "homework", ".ipynb_checkpoints"):
        (course / "submitted" / "bob" / name).mkdir(parents=True)
    (course / "submitted" / "bob" / "fsdp.ipynb").write_text("{}")
    (course / "submitted" / "bob" / "notes.txt").write_text("")
    found = misplaced(course)
    where = {path.rpartition("/")[2]: why.rpartition("/bob/")[2] for path, why in found.items()}
    assert where == {"FSDP": "fsdp/", "fsdpp": "fsdp/", "homework": "CHAPTER/", "fsdp.ipynb": "fsdp/"}
