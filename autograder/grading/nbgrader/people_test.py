"""Extensions, late joiners, leavers, assistants and requests; each change can be undone."""

import json
from datetime import timedelta

import pytest

from autograder.grading.nbgrader import batch, people, register
from autograder.grading.nbgrader.batch_test import fake, grade
from autograder.grading.nbgrader.conftest import MARCH, POINTS, change, exported, hand_in, states
from autograder.grading.nbgrader.course import open_gradebook
from autograder.grading.nbgrader.due_dates import due_dates
from autograder.grading.nbgrader.export import canvas_csv, without_score
from autograder.grading.nbgrader.rosters import read_students
from autograder.grading.nbgrader.settings import CourseError

__all__ = ["fake"]  # a fixture


def test_an_extension_before_handing_in_counts_and_a_section_has_one_together(term):
    people.extend(term, "fsdp", people.chosen(term, [], "A"), 24)
    for student in ("ada", "bob"):
        hand_in(term, student, stamp="2026-03-02 11:00:00 UTC")
    grade(term)
    rows = exported(term)
    assert (rows["ada"]["late_penalty"], rows["bob"]["late_penalty"]) == ("0.0", "1.8")
    people.extend(term, "fsdp", ["bob"], 24)
    assert exported(term)["bob"]["late_penalty"] == "0.0"
    people.undo(term, register.log(term)[-1].number)
    assert exported(term)["bob"]["late_penalty"] == "1.8"
    with pytest.raises(CourseError, match=r"no student bobb; is it bob\?"):
        people.chosen(term, ["bobb"], "")
    with pytest.raises(CourseError, match="no student nobody"):
        people.chosen(term, ["nobody"], "")
    with pytest.raises(CourseError, match="no student is in the section 'C'; there are: A, B"):
        people.chosen(term, [], "C")


def test_a_new_upload_without_a_time_does_not_keep_the_earlier_ones(term):
    path = hand_in(term, "ada", stamp="2026-03-02 11:00:00 UTC")
    grade(term)
    assert states(term)["ada"]["days_late"] == 1
    path.with_name("timestamp.txt").unlink()
    hand_in(term, "ada", answer="another")
    grade(term)
    assert "submission time unknown" in states(term)["ada"]["why"]


def test_a_chapter_that_the_course_does_not_have_is_refused(term, meshcraft):
    refused = meshcraft("request", "zero", "ada", "--text", "why?", "--course", str(term), status=2)
    assert "zero is not in this course, which has fsdp" in refused.err


def test_a_changed_name_and_section_are_logged_and_can_be_undone(term):
    change(term, students=[{"id": "ada", "first_name": "Ada"}])
    change(term, students=[{"id": "ada", "first_name": "Augusta", "section": "B"}])
    assert register.log(term)[-1].sentence == "ada: first name Ada → Augusta; ada: section A → B"
    people.undo(term, register.log(term)[-1].number)
    with open_gradebook(term) as gradebook:
        assert str(gradebook.find_student("ada").first_name) == "Ada"
    assert register.values(term, register.ENROLLED)["ada"]["section"] == "A"


@pytest.mark.long
def test_a_lost_gradebook_is_an_error_until_grading_has_made_a_new_one(term, meshcraft):
    hand_in(term, "ada")
    grade(term)
    source = term / "source" / "fsdp" / "fsdp.ipynb"
    source.write_text(source.read_text().replace("# Fully", "# Our own: fully"))
    before = source.read_text()
    (term / "gradebook.db").unlink()
    for command in ("status", "export", "feedback", "readers"):
        error = meshcraft(command, "fsdp", "--course", str(term), status=2).err
        assert "gradebook.db is missing" in error and "restore it from a backup" in error
        assert not (term / "gradebook.db").exists()
    with open_gradebook(term, create=True) as gradebook:
        gradebook.update_or_create_assignment("fsdp")  # as after grading another chapter, or `init`
    grade(term)
    assert exported(term)["ada"]["score"] == "18.0" and source.read_text() == before


def test_new_points_say_what_is_still_old(term, meshcraft):
    err = meshcraft("init", str(term), "--points", "fsdp_loss=9").err
    assert "run `meshcraft grade`" in err and "students have the earlier notebook" in err


def test_a_few_minutes_late_cost_nothing_within_the_grace_period(term):
    hand_in(term, "ada", stamp="2026-03-01 12:06:00 UTC")
    grade(term)
    assert (exported(term)["ada"]["late_penalty"], states(term)["ada"]["days_late"]) == ("1.8", 1)
    change(term, late_grace=15.0)
    assert (exported(term)["ada"]["late_penalty"], states(term)["ada"]["days_late"]) == ("0.0", 0)
    assert "up to 15 minutes late count as on time" in (term / "release" / "fsdp" / "fsdp.ipynb").read_text()


def test_who_is_not_on_the_roster_is_flagged_and_who_left_keeps_the_work(term):
    for student in ("ada", "bobb", "stranger"):
        hand_in(term, student)
    change(term, withdraw=["ada"])
    grade(term)
    rows = states(term)
    assert "not on the list of students; rename the folder if it is bob, or add them" in rows["bobb"]["why"]
    assert without_score(term, ["fsdp"]) == {}
    assert "not on the list" in rows["stranger"]["why"] and "has left the course" in rows["ada"]["why"]
    assert "ada" not in canvas_csv(term, ["fsdp"], {}) and exported(term)["ada"]["score"] == "18.0"
    with open_gradebook(term) as gradebook:
        gradebook.remove_student("bobb")
    assert "bobb" in canvas_csv(term, ["fsdp"], {}), "and no traceback"
    change(term, students=[{"id": "stranger"}])
    assert "not on the list" not in states(term)["stranger"]["why"]


def test_no_chapter_is_added_by_grading_and_one_is_dropped_and_taken_back(term):
    hand_in(term, "ada")
    with pytest.raises(CourseError, match="collectives is not in this course, which has fsdp"):
        batch.grade_course(term, "collectives", level="bubblewrap")
    change(term, drop=["fsdp"])
    with pytest.raises(CourseError, match="fsdp was dropped from this course"):
        grade(term)
    people.undo(term, register.log(term)[-1].number)
    assert grade(term)["ada"].points == 18.0


def test_a_change_is_undone_only_while_nothing_later_depends_on_it(term):
    people.extend(term, "fsdp", ["ada"], 24)
    first = register.log(term)[-1].number
    people.extend(term, "fsdp", ["ada"], 48)
    with pytest.raises(CourseError, match=rf"is now 48, no longer 24; undo change {first + 1} first"):
        people.undo(term, first)
    people.undo(term, first + 1)
    people.undo(term, first)
    assert register.values(term, register.EXTENSION) == {}
    with pytest.raises(CourseError, match="was undone already, by change"):
        people.undo(term, first)
    change(term, MARCH + timedelta(days=1))
    people.undo(term, register.log(term)[-1].number)
    assert due_dates(term) == {"fsdp": MARCH} and "2026-03-01" in (term / "release/fsdp/fsdp.ipynb").read_text()


def test_answers_cannot_be_divided_before_anything_is_graded(term, meshcraft):
    refused = meshcraft("readers", "fsdp", "--among", "tina", "--course", str(term), status=2)
    assert "no submission of fsdp is in the gradebook yet; `meshcraft grade fsdp` comes first" in refused.err


def test_written_answers_are_divided_equally_and_late_ones_move_nobody(term):
    for student in ("ada", "bob", "cleo"):
        hand_in(term, student, answer="x")
    grade(term)
    first = people.assign_readers(term, "fsdp", ["tina", "tom"])
    assert sorted(map(len, first.values())) == [1, 2]
    hand_in(term, "dora", answer="x")
    grade(term)
    second = people.assign_readers(term, "fsdp", ["tina", "tom"])
    assert all({*first[name]} <= {*second[name]} for name in first) and sorted(map(len, second.values())) == [2, 2]
    assert sorted(people.numbers(term, "fsdp").values()) == [1, 2, 3, 4]


def test_a_request_for_a_regrade_is_kept_and_answered(term):
    with pytest.raises(CourseError, match="ada has not asked"):
        people.answer_regrade(term, "fsdp", "ada", "No.")
    people.ask_regrade(term, "fsdp", "ada", "The bytes are right.")
    people.answer_regrade(term, "fsdp", "ada", "They are not: two gathers.")
    (request,) = register.values(term, register.REQUEST).values()
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
