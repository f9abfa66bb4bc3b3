"""The class of eight through the real pipeline, killed once on the way, and the hostile one through stock nbgrader."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autograder.contract.verdict import Report
from autograder.grading.nbgrader.course import make_course, open_gradebook, open_ledger, secret
from autograder.grading.outside.pipeline import Grader
from autograder.grading.outside.sandbox import best_level
from autograder.proof.attacks.stock import grade_as_nbgrader_does
from autograder.proof.demo import HERE
from autograder.proof.demo.__main__ import STUDENTS, prepare, surprises

pytestmark = pytest.mark.long

CANARY = "canary-3f9a1c"
FULL = bool(os.environ.get("MESHCRAFT_FULL"))
# The short form grades four of the class of eight; `make demo` grades them too.
CLASS = STUDENTS if FULL else ("hostile", "partial", "raises", "summed")


def meshcraft(*arguments, course):
    """Start the command as a separate process, with canaries where a submission may look for them."""
    return subprocess.Popen(
        [sys.executable, "-m", "autograder.cli", *arguments, "--course", str(course)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=course,
        env={**os.environ, "MESHCRAFT_SECRET_CANARY": CANARY},
        text=True,
    )


def judged(course):
    if not (course / ".meshcraft" / "ledger.sqlite").exists():
        return []
    with open_ledger(course) as ledger:
        return [entry.report for entry in ledger.status("fsdp") if entry.report]


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The class's course folder: graded, killed in the middle, and resumed."""
    course = prepare(tmp_path_factory.mktemp("demo") / "course", CLASS)
    (course / "canary.txt").write_text(CANARY)
    first = meshcraft("grade", "fsdp", "--workers", "2", course=course)
    while not judged(course) and first.poll() is None:
        time.sleep(0.2)
    assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGKILL)
    first.communicate()
    before = len(judged(course))
    rerun = meshcraft("grade", "fsdp", "--workers", "2", "--json", course=course)
    out, err = rerun.communicate()
    assert rerun.returncode == 0, err
    assert 0 < before < len(CLASS), "the kill came too late or too early to show anything"
    return course, [Report.from_json(report) for report in json.loads(out)["submissions"]], err


def test_every_submission_gets_its_expected_verdict(graded):
    _, reports, _ = graded
    assert surprises(reports, CLASS) == []
    points = {"different": 18, "kept": 7.5, "partial": 2, "replicated": 3.17, "right": 18, "summed": 2}
    assert {report.student: report.points for report in reports} == {name: points.get(name, 0) for name in CLASS}
    assert {report.isolation for report in reports} == {best_level()}


@pytest.mark.parametrize("student", ["partial", "raises", *(["right"] if FULL else [])])
def test_grade_after_a_kill_is_that_of_an_undisturbed_run(graded, student):
    course, reports, _ = graded
    resumed = next(report for report in reports if report.student == student)
    with Grader("fsdp", secret=secret(course), level=best_level()) as grader:
        undisturbed = grader.grade(course / "submitted" / student / "fsdp" / "fsdp.ipynb", student)
    assert json.dumps(undisturbed.to_json()) == json.dumps(resumed.to_json())


def test_second_run_grades_nothing_again(graded):
    course, reports, _ = graded
    rerun = meshcraft("grade", "fsdp", "--json", course=course)
    out, err = rerun.communicate()
    assert rerun.returncode == 0, err
    assert [Report.from_json(report) for report in json.loads(out)["submissions"]] == reports
    assert "grading" in err and "0/0" in err, err


def test_hostile_sees_no_canary_and_what_was_refused_is_listed(graded):
    course, reports, err = graded
    hostile = next(report for report in reports if report.student == "hostile")
    denied = [call for result in hostile.functions for call in result.denied]
    assert "socket(AF_INET)" in denied
    assert not [r for r in reports if r.student != "hostile" and any(f.denied for f in r.functions)]
    shown = json.dumps(hostile.to_json()) + err
    secret_text = repr(secret(course))[2:-1]
    solution = "return lax.dynamic_slice_in_dim(leaf, index * length"
    for canary in (CANARY, secret_text, solution, "I found"):
        assert canary not in shown


def test_raising_gets_its_own_line(graded):
    _, reports, _ = graded
    raises = next(report for report in reports if report.student == "raises")
    assert [result.line for result in raises.functions] == [
        "shard_params:14",
        *["gather_params:13"] * 2,
        "fsdp_train_step:24",
        "hybrid_shard_step:26",
    ]
    assert raises.functions[0].message.startswith("ValueError: max() ")  # the rest depends on Python's version


def test_gradebook_feedback_and_export_agree_with_the_verdicts(graded):
    course, reports, _ = graded
    written = meshcraft("feedback", "fsdp", course=course)
    assert written.communicate() and written.returncode == 0
    with open_gradebook(course) as gradebook:
        booked = {s.student.id: s.score for s in gradebook.assignment_submissions("fsdp")}
    assert booked == pytest.approx({report.student: report.points for report in reports})
    exported = meshcraft("export", "fsdp", course=course)
    rows = list(csv.DictReader(io.StringIO(exported.communicate()[0])))
    assert sorted(row["student"] for row in rows) == list(CLASS)
    for report in reports:
        page = (course / "feedback" / report.student / "fsdp" / "fsdp.html").read_text()
        assert CANARY not in page
        for fact in report.functions[0].facts:
            assert fact.name in page


def test_hostile_earns_full_points_from_stock_nbgrader(tmp_path):
    """The control: why official grading does not execute notebooks the way nbgrader does."""
    course = make_course(tmp_path / "stock", ["fsdp"])
    shutil.copytree(HERE / "submitted" / "hostile", course / "submitted" / "hostile")
    grade_as_nbgrader_does(course, "hostile")
    with open_gradebook(course) as gradebook:
        submission = gradebook.find_submission("fsdp", "hostile")
        assert submission.score == 18, "2 + 3 + 5 + 5 + 3 points for answers that are all wrong"


def test_a_course_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    file = Path(tmp_path / "course")
    file.write_text("not a folder")
    run = subprocess.run(
        [sys.executable, "-m", "autograder.cli", "grade", "fsdp", "--course", str(file)], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert str(file) in run.stderr.replace("\n", "")
