"""Verdicts arrive in nbgrader's gradebook, whatever the submitted notebook contains."""

from copy import deepcopy
from dataclasses import replace

import nbformat
import pytest
from nbgrader import utils
from nbgrader.converters import Autograde

from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PARTIAL, PASS, STUDENT_ERROR, Report, Result
from autograder.grading.nbgrader import booking, bridge
from autograder.grading.nbgrader.conftest import POINTS, WHERE, booked, cell, file_and_book, hand_in, report
from autograder.grading.nbgrader.course import open_gradebook, open_ledger
from autograder.grading.nbgrader.keys import key
from autograder.release.converters import NbgraderError, course_config, run_nbgrader

FIRST, SECOND, THIRD, *_ = POINTS


def judged(verdict=PASS, points=2.0, **fields):
    return report(Result(FIRST, points, 2.0, verdict, **fields))


def grades(course, student):
    with open_gradebook(course) as gradebook:
        submission = gradebook.find_submission_notebook(*WHERE, student)
        return {
            grade.name: (grade.auto_score, grade.max_score, grade.needs_manual_grade) for grade in submission.grades
        }


def autograde(course, student, **options):
    config = course_config(course, "fsdp", student)
    bridge.configure(config, course)
    config.Autograde.update(options)
    run_nbgrader(Autograde, config)


def test_points_arrive_in_the_gradebook_and_an_answer_in_words_waits_for_a_person(course):
    rows = {
        "ada": (judged(), (2.0, 2.0, False)),
        "bob": (judged(PARTIAL, 0.67), (0.67, 2.0, False)),
        "cleo": (judged(FAIL, 0.0), (0.0, 2.0, False)),
        "dora": (judged(NEEDS_HUMAN, 0.0), (None, 2.0, True)),
        "eve": (judged(STUDENT_ERROR, 0.0, message="it is not JSON"), (0.0, 2.0, False)),
    }
    for student in rows:
        hand_in(course, student, answer="Because." if student == "ada" else "")
    (course / "submitted" / "eve" / "fsdp" / "fsdp.ipynb").write_text("{not json")
    assert file_and_book(course, {student: student_report for student, (student_report, _) in rows.items()}) == {}
    assert {name: grades(course, name)[f"check-{FIRST}"] for name in rows} == {n: each for n, (_, each) in rows.items()}
    assert grades(course, "ada")["question"][::2] == (None, True)
    assert grades(course, "bob")["question"][::2] == (0.0, False)


def test_a_cell_without_output_is_an_error_here_and_full_points_in_stock_nbgrader(released):
    notebook = nbformat.read(released / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    assert utils.determine_grade(cell(notebook, f"check-{FIRST}")) == (2.0, 2.0)
    with pytest.raises(bridge.BridgeError, match=f"no verdict for the cell check-{FIRST}"):
        bridge.write_verdicts(notebook, Report("fsdp", report().functions[1:]))
    with pytest.raises(bridge.BridgeError, match=r"worth 2\.0 points in the released notebook, its verdict says 3\.0"):
        bridge.write_verdicts(notebook, Report("fsdp", (Result(FIRST, 3.0, 3.0, PASS),)))


def test_nbgraders_own_autograde_takes_no_grade_from_nothing_and_none_from_an_old_verdict(course):
    path = hand_in(course, "ada")
    with pytest.raises(NbgraderError, match="no verdict for ada; run `meshcraft grade fsdp`"):
        autograde(course, "ada")
    assert not (course / "autograded" / "ada" / "fsdp").exists()
    file_and_book(course, {"ada": judged(PARTIAL, 1.0)})
    autograde(course, "ada", force=True)
    assert grades(course, "ada")[f"check-{FIRST}"] == (1.0, 2.0, False)
    path.write_text(path.read_text() + " ")
    with pytest.raises(NbgraderError, match="has changed since it was graded"):
        autograde(course, "ada", force=True)


def test_booking_again_changes_no_byte_and_removes_half_made_folders_alone(course):
    paths = {student: hand_in(course, student) for student in ("ada", "bob")}
    done = []
    with open_ledger(course) as ledger:
        file_and_book(course, {"ada": judged()})
        copy = course / "autograded" / "ada" / "fsdp" / "fsdp.ipynb"
        first, points = copy.read_bytes(), grades(course, "ada")
        assert booking.book(course, "fsdp", ledger, paths, done.append) == {} and done == []
        for notes in (("again",), ()):
            ledger.record(key(paths["ada"].read_bytes(), "contract"), replace(judged(), notes=notes))
        ledger.booked("fsdp", "ada", None)
        booking.book(course, "fsdp", ledger, paths, done.append)
        assert done == ["ada"] and copy.read_bytes() == first and grades(course, "ada") == points
        ledger.submit("fsdp", "bob", "key", "digest")
        half = course / "autograded" / "bob" / "fsdp"
        half.mkdir(parents=True)
        assert booking.clean_half_made(course, ledger.status("fsdp")) == [half] and copy.exists()


def test_tampered_notebooks_get_the_released_cells_and_points_and_no_other_file_is_copied(course):
    def tamper(notebook):
        cell(notebook, f"check-{FIRST}").metadata.nbgrader.points = 1000
        cell(notebook, f"check-{SECOND}").source = "print('nothing to see')"
        notebook.cells = [c for c in notebook.cells if c.id != f"check-{THIRD}"]
        twin, invented = deepcopy(cell(notebook, FIRST)), deepcopy(cell(notebook, f"check-{FIRST}"))
        twin.source, twin.id = "# the twin", "twin"
        invented.metadata.nbgrader.grade_id, invented.id = "check-invented", "invented"
        notebook.cells += [twin, invented]
        notebook.metadata.kernelspec = {"name": "bash", "display_name": "Bash", "language": "bash"}
        notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="mine")]

    folder = hand_in(course, "eve", tamper).parent
    (folder / "numpy.py").write_text("stolen = True")
    (folder / "secret.txt").symlink_to(course / ".meshcraft" / "secret")
    assert file_and_book(course, {"eve": judged()}) == {}
    max_points = {name: max_score for name, (_, max_score, _) in grades(course, "eve").items()}
    assert max_points == {**{f"check-{name}": points for name, points in POINTS.items()}, "question": 2.0}
    copy = booked(course, "eve")
    assert cell(copy, f"check-{SECOND}").source == f"check({SECOND})"
    assert cell(copy, FIRST).source == "# the twin" and copy.metadata.kernelspec.name == "python3"
    assert len(cell(copy, f"check-{FIRST}").outputs) == 1
    assert {len(c.outputs) for c in copy.cells if c.cell_type == "code" and not utils.is_grade(c)} == {0}
    assert [path.name for path in (course / "autograded" / "eve" / "fsdp").iterdir()] == ["fsdp.ipynb"]
