"""The class at a glance, and grades for three systems."""

import csv

import pytest

from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PASS, REFUSED, Fact, Kind, Result
from autograder.grading.nbgrader.batch_test import fake, grade
from autograder.grading.nbgrader.conftest import POINTS, change, file_and_book, hand_in, report
from autograder.grading.nbgrader.export import gradescope_csv, moodle_csv, without_score
from autograder.grading.nbgrader.feedback_test import Page, asks_for_nothing
from autograder.grading.nbgrader.report import class_report, report_csv, report_page
from autograder.grading.nbgrader.settings import CourseError

__all__ = ["fake"]  # a fixture


def test_grades_go_back_to_moodle_and_gradescope(term):
    change(term, students=[{"id": "bob", "first_name": "Bob", "last_name": "Kahn", "email": "bob@example.org"}])
    hand_in(term, "bob")
    grade(term)
    row = next(row for row in csv.DictReader(moodle_csv(term, ["fsdp"]).splitlines()) if row["Username"] == "bob")
    assert (row["Email address"], row["Fully sharded data parallelism"]) == ("bob@example.org", "18.0")
    row = next(row for row in csv.DictReader(gradescope_csv(term, ["fsdp"]).splitlines()) if row["SID"] == "bob")
    assert (row["Last Name"], row["fsdp"], row["fsdp - Max Points"]) == ("Kahn", "18.0", "20.0")


def test_the_report_says_which_fact_fails_with_which_message_and_who_waits(term, tmp_path):
    late = Fact("gradients", Kind.GRADIENTS, False, 7, 2e-5, case="data=8", message="8 times\ntoo <large>")
    failed = Result("gather_params", 0.0, 3.0, FAIL, (late,))
    stopped = Result("fsdp_loss", 0.0, 5.0, REFUSED, message="a loop until data says so")
    person = Result("shard_params", 0.0, 2.0, NEEDS_HUMAN, message="it broke")
    for student in ("ada", "bob", "cleo"):
        hand_in(term, student)
    file_and_book(term, {"ada": report(failed), "bob": report(failed, stopped), "cleo": report(person)})
    hand_in(term, "ada", answer="again")
    file_and_book(term, {"ada": report()})
    data = class_report(term, "fsdp", (term,))
    functions = {each["name"]: each for each in data["functions"]}
    assert functions["gather_params"]["facts"] == [
        {"name": "gradients", "failed": 1, "message": "8 times too <large>", "case": "data=8"}
    ]
    assert functions["gather_params"]["verdicts"] == {PASS: 2, FAIL: 1}
    shard = functions["shard_params"]
    assert (shard["mean_points"], shard["pass_share"]) == (2.0, 1.0), "cleo, who waits for a person, is no zero"
    assert without_score(term, ["fsdp"]) == {"needs a person": ["cleo"], "waits for manual grading": ["ada"]}
    assert functions["fsdp_loss"]["stopped"] == {"count": 1, "message": "a loop until data says so"}
    assert (data["attempts"]["by_number"], data["attempts"]["mean_gain"]) == ({"1": 2, "2": 1}, 3.0)
    why = {each["student"]: each["why"].partition(";")[0] for each in data["persons"]}
    assert why == {"ada": "formgrader", "cleo": "it broke"}
    assert (
        data["earlier"][0]["pass_share"]["gather_params"] == 0.6667 and sum(b["count"] for b in data["histogram"]) == 2
    )
    page = report_page(data)
    asks_for_nothing(Page(page))
    assert "8 times too &lt;large&gt;" in page and "67% pass; 67% in course" in page
    rows = [*csv.DictReader(report_csv(data).splitlines())]
    assert [row["message"] for row in rows if row["fact"]] == ["8 times too <large>"] and len(rows) == len(POINTS)
    with pytest.raises(CourseError, match="there is no course folder"):
        class_report(term, "fsdp", (tmp_path / "nowhere",))
    with pytest.raises(CourseError, match="nothing of fsdp has been graded in "):
        class_report(init_empty(tmp_path), "fsdp")


def init_empty(folder):
    (folder / "empty" / "submitted").mkdir(parents=True)
    return folder / "empty"


def test_a_function_that_nobody_has_a_verdict_on_has_no_mean(term):
    hand_in(term, "cleo")
    file_and_book(term, {"cleo": report(Result("shard_params", 0.0, 2.0, NEEDS_HUMAN, message="it broke"))})
    data = class_report(term, "fsdp", (term,))
    (shard,) = (each for each in data["functions"] if each["name"] == "shard_params")
    assert (shard["mean_points"], shard["pass_share"]) == (None, None)
    assert "not judged yet" in report_page(data) and report_csv(data)


def test_export_to_a_missing_folder_is_a_sentence(term, meshcraft, tmp_path):
    result = meshcraft("export", "fsdp", "--course", str(term), "--to", str(tmp_path / "no" / "x.csv"), status=2)
    assert f"there is no folder {tmp_path / 'no'}; make it first" in result.err
