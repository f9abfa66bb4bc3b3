"""A class is graded to the end, whatever students submit and whichever process dies, and no fault becomes a zero."""

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from autograder.contract.verdict import NEEDS_HUMAN, PASS, REFUSED
from autograder.grading.nbgrader import batch, pools, submissions
from autograder.grading.nbgrader.conftest import hand_in, report
from autograder.grading.nbgrader.course import CourseError, locked, open_ledger, secret, students
from autograder.grading.nbgrader.export import grades_csv, neutral, overview
from autograder.grading.nbgrader.submissions import find_submissions
from autograder.grading.outside import pipeline


class FakeGrader:
    """Passes whatever it can read, and fails in the way that the student's name requests."""

    calls = 0
    changes = False

    def __init__(self, chapter, **_):
        pass

    def close(self):
        pass

    def grade_notebook(self, notebook, student):
        FakeGrader.calls += 1
        if student == "broken":
            raise RuntimeError("the grader broke")
        return replace(report(), student=student, notes=("once more",) if FakeGrader.changes else ())


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(pipeline, "Grader", FakeGrader)
    monkeypatch.setattr(FakeGrader, "calls", 0)


def grade(course, **options):
    def threads(alone):
        return ThreadPoolExecutor(1 if alone else 2), 1 if alone else 2

    reports = batch.grade_course(course, "fsdp", level="bubblewrap", new_pool=threads, **options)
    return {report.student: report for report in reports}


def verdicts(report):
    return {result.verdict for result in report.functions}


def test_every_submission_gets_a_verdict_and_the_batch_goes_on(course):
    for student in ("ada", "zoe"):
        hand_in(course, student)
    hand_in(course, "bad").write_text("not JSON")
    hand_in(course, "empty").unlink()
    hand_in(course, "renamed", name="fsdp (1).ipynb")
    hand_in(course, "two", name="a.ipynb")
    hand_in(course, "two", name="b.ipynb")
    hand_in(course, "link").unlink()
    (course / "submitted" / "link" / "fsdp" / "fsdp.ipynb").symlink_to(course / ".meshcraft" / "secret")
    hand_in(course, "broken")
    (course / "submitted" / "eve").symlink_to(course / "submitted" / "ada")
    (course / "submitted" / "mia").mkdir()
    (course / "submitted" / "mia" / "fsdp").symlink_to(course / "submitted" / "ada" / "fsdp")
    (course / "submitted" / "idle").mkdir()
    reports = grade(course)
    assert {student: verdicts(report) for student, report in reports.items()} == {
        **{student: {PASS} for student in ("ada", "renamed", "zoe")},
        **{student: {REFUSED} for student in ("link", "eve", "mia")},
        **{student: {NEEDS_HUMAN} for student in ("bad", "broken", "empty", "two")},
    }
    assert FakeGrader.calls == 3 + 3 and "is a link" in reports["eve"].functions[0].message
    assert reports["bad"].functions[0].message.startswith("the upload is damaged: fsdp.ipynb is not a notebook")
    assert "failed 3 times" in reports["broken"].functions[0].message
    assert reports["renamed"].notes == ("handed in as fsdp (1).ipynb",)
    assert "found: a.ipynb, b.ipynb" in reports["two"].functions[0].message
    rows = {row["student"]: row["state"] for row in overview(course, "fsdp")}
    assert rows["idle"] == "nothing submitted" and rows["ada"] == "graded" and rows["broken"] == "needs a person"
    lines = {line.split(",")[1]: line for line in grades_csv(course, ["fsdp"]).splitlines()}
    assert lines["ada"].startswith("fsdp,ada,graded,18.0,20.0")
    assert lines["idle"] == "fsdp,idle,nothing submitted,,,,,,,,,,"
    assert lines["empty"] == "fsdp,empty,needs a person,,,,,,,,,,", "what nobody could judge is not a zero"


def test_what_has_a_verdict_is_not_graded_again_but_what_needs_a_person_is_tried(course):
    for student in ("ada", "broken"):
        hand_in(course, student)
    for calls in (1 + 3, 1 + 3 + 3):
        grade(course)
        assert FakeGrader.calls == calls
    hand_in(course, "ada", answer="better")
    grade(course)
    assert FakeGrader.calls == 1 + 3 + 3 + 1 + 3


def test_only_those_who_are_named_are_graded(course, monkeypatch):
    for student in ("ada", "bob", "cleo"):
        hand_in(course, student)
    assert [*grade(course, only=["bob"])] == ["bob"]
    assert FakeGrader.calls == 1
    assert {row["student"]: row["state"] for row in overview(course, "fsdp")} == {
        "ada": "not graded yet",
        "bob": "graded",
        "cleo": "not graded yet",
    }
    with pytest.raises(CourseError, match="nothing was submitted by dora"):
        grade(course, only=["ada", "dora"])
    assert len(grade(course)) == 3 and FakeGrader.calls == 3
    with monkeypatch.context() as updated:
        updated.setattr(submissions, "contract_hash", lambda chapter: "another version of the course")
        with pytest.raises(CourseError, match="nothing was submitted by dora"):
            grade(course, only=["dora"])
    with open_ledger(course) as ledger:
        assert all(entry.report for entry in ledger.status("fsdp")), "a mistyped name takes nobody's verdict away"


def test_a_regrade_says_whether_it_is_the_same_and_a_fault_takes_no_verdict_away(course, monkeypatch):
    hand_in(course, "ada")
    grade(course)
    seen = []
    grade(course, only=["ada"], again=True, on_again=seen.append)
    assert FakeGrader.calls == 2 and seen[0].before == seen[0].after
    monkeypatch.setattr(FakeGrader, "changes", True)
    reports = grade(course, again=True, on_again=seen.append)
    assert seen[1].after.notes == ("once more",) == reports["ada"].notes != seen[1].before.notes
    monkeypatch.setattr(FakeGrader, "grade_notebook", lambda *_: 1 / 0)
    reports = grade(course, again=True, on_again=seen.append)
    assert verdicts(seen[2].after) == {NEEDS_HUMAN} and verdicts(reports["ada"]) == {PASS}


def test_a_file_that_changes_while_the_class_is_graded_waits_for_a_person_and_the_next_run(course, monkeypatch):
    path = hand_in(course, "ada")
    earlier_submissions = find_submissions(course, "fsdp")
    path.write_text(path.read_text() + " ")
    with monkeypatch.context() as patched:
        patched.setattr(batch, "find_submissions", lambda *_: earlier_submissions)
        reports = grade(course)
    assert verdicts(reports["ada"]) == {NEEDS_HUMAN} and FakeGrader.calls == 0
    assert verdicts(grade(course)["ada"]) == {PASS}


def test_a_worker_with_other_packages_refuses(course, monkeypatch):
    hand_in(course, "ada")
    monkeypatch.setattr(batch, "fingerprint", lambda chapter: "another")
    report = grade(course)["ada"]
    assert verdicts(report) == {NEEDS_HUMAN} and "has a different version of the course" in report.functions[0].message


def test_a_scheduler_that_does_not_answer_is_a_sentence(course, monkeypatch):
    hand_in(course, "ada")
    monkeypatch.setattr(pools, "CONNECT_SECONDS", 0.3)
    with pytest.raises(CourseError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:9 "):
        batch.grade_course(course, "fsdp", level="", scheduler="tcp://127.0.0.1:9")


def test_progress_says_how_many_of_how_many(course):
    hand_in(course, "ada")
    hand_in(course, "bob")
    steps = []
    grade(course, on_progress=lambda *step: steps.append(step))
    assert steps == [("grading", n, 2) for n in range(3)] + [("gradebook", n, 2) for n in (1, 2)]


def test_two_at_once_is_an_error_that_loses_nothing(course):
    hand_in(course, "ada")
    with locked(course), pytest.raises(CourseError, match=rf"being graded already \(process {os.getpid()}\)"):
        grade(course)
    assert verdicts(grade(course)["ada"]) == {PASS}


def test_a_lock_whose_holder_died_does_not_block(course):
    hold = "import sys, time; from pathlib import Path; from autograder.grading.nbgrader.course import locked\n"
    hold += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(course)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        with pytest.raises(CourseError, match=f"process {holder.pid}"):
            grade(course)
        holder.kill()
    grade(course)


def test_a_folder_with_only_submissions_becomes_a_course_and_no_other_does(tmp_path, course):
    hand_in(course, "ada")
    bare = tmp_path / "bare"
    shutil.copytree(course / "submitted", bare / "submitted")
    assert verdicts(grade(bare)["ada"]) == {PASS}
    assert {"source", "release", "gradebook.db", "nbgrader_config.py"} <= {path.name for path in bare.iterdir()}
    assert not list(bare.glob("source/**/*.py")) and students(bare) == ["ada"]
    for folder, sentence in ((tmp_path / "nowhere", "no course folder"), (tmp_path, "has no folder `submitted/`")):
        with pytest.raises(CourseError, match=sentence):
            grade(folder)


def test_the_secret_is_made_once_and_for_the_owner_alone(course):
    assert secret(course) == secret(course) and len(secret(course)) == 32
    assert (course / ".meshcraft" / "secret").stat().st_mode & 0o777 == 0o600
    (course / ".meshcraft" / "secret").write_bytes(b"short")
    with pytest.raises(CourseError, match="damaged"):
        secret(course)


def test_formulas_are_neutral_in_csv():
    values = ("=1+1", "+1", "-1", "@x", "\t=1", "＝1", "a\nb\x1b", "ada", -1.0)
    shown = ["'=1+1", "'+1", "'-1", "'@x", "'=1", "'＝1", "a b\ufffd", "ada", -1.0]
    assert [neutral(value) for value in values] == shown


DRIVER = """
    import os, random, signal, sys, time
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context
    from pathlib import Path
    from types import SimpleNamespace
    from autograder.contract.verdict import PASS, Report, Result

    POINTS = {"shard_params": 2.0, "gather_params": 3.0, "fsdp_loss": 5.0}
    POINTS |= {"fsdp_train_step": 5.0, "hybrid_shard_step": 3.0}

    class Grader:
        def __init__(self, chapter, *, secret, level, limits, variants=(), **chosen): pass
        def close(self): pass
        def grade_notebook(self, notebook, student):
            time.sleep(0.05)
            if student == "killer":
                os.kill(os.getpid(), signal.SIGKILL)
            share = len(student) / 10
            return Report("fsdp", tuple(Result(n, round(p * share, 2), p, PASS) for n, p in POINTS.items()))

    tasks = [SimpleNamespace(name=n, points=p) for n, p in POINTS.items()]
    contract = SimpleNamespace(load=lambda chapter: SimpleNamespace(tasks=tasks, question_points=2.0))
    contract.contract_files, contract.ChapterError = lambda chapter: [], LookupError
    root, none = Path.cwd(), lambda chapter: []
    sys.modules["autograder.grading.outside.workers"] = SimpleNamespace(ROOT=root, mounted=none, own_mounted=none)
    sys.modules["autograder.grading.outside.pipeline"] = SimpleNamespace(Grader=Grader, LIMITS=None)
    sys.modules["autograder.contract.task"] = contract
    import autograder.contract
    autograder.contract.task = contract
    import autograder.grading.outside
    autograder.grading.outside.pipeline = sys.modules["autograder.grading.outside.pipeline"]
    from autograder.grading.nbgrader import batch, pools, submissions
    def pool(alone):
        n = 1 if alone else 2
        return ProcessPoolExecutor(n, get_context("fork"), pools.start_worker, (os.getpid(),)), n
    print("started", flush=True)
    batch.grade_course(Path(sys.argv[1]), "fsdp", level="none", new_pool=pool)
"""


def drive(course):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(DRIVER), str(course)], stdout=subprocess.PIPE)


def outcome(course):
    with open_ledger(course) as ledger:
        entries = {entry.student: (entry.report, entry.booked) for entry in ledger.status("fsdp")}
    return entries, grades_csv(course, ["fsdp"])


@pytest.mark.long
def test_kill_9_in_the_middle_and_run_again_gives_the_grades_of_an_undisturbed_run(course, tmp_path):
    for student in ("a", "bb", "ccc", "dddd", "eeeee", "killer"):
        hand_in(course, student)
    disturbed = Path(shutil.copytree(course, tmp_path / "disturbed"))
    with drive(course) as calm:
        assert calm.wait() == 0
    dice = random.Random(0)
    for _ in range(2 if os.environ.get("MESHCRAFT_FULL") else 1):
        with drive(disturbed) as killed:
            assert killed.stdout and killed.stdout.readline() == b"started\n"
            time.sleep(dice.uniform(0.1, 1.2))
            killed.send_signal(signal.SIGKILL)
    with drive(disturbed) as last:
        assert last.wait() == 0
    entries, csv = outcome(course)
    assert outcome(disturbed) == (entries, csv)
    assert all(booked for _, booked in entries.values())
    assert {student for student, (report, _) in entries.items() if verdicts(report) == {NEEDS_HUMAN}} == {"killer"}
    assert "\nfsdp,ccc,graded,5.4,20.0" in csv
