"""Points that change are rescaled, and notebooks that disagree with the course are refused."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell

from autograder.grading.nbgrader import people, points, register
from autograder.grading.nbgrader.batch_test import fake, grade
from autograder.grading.nbgrader.conftest import cell, change, exported, hand_in, states
from autograder.grading.nbgrader.course import release
from autograder.grading.nbgrader.settings import CourseError, read_settings

__all__ = ["fake"]  # a fixture


def edit(term, act):
    path = term / "source" / "fsdp" / "fsdp.ipynb"
    notebook = nbformat.read(path, as_version=4)
    act(notebook)
    nbformat.write(notebook, path)


def test_points_scale_without_another_grading_and_go_back(term):
    hand_in(term, "ada")
    grade(term)
    assert exported(term)["ada"]["score"] == "18.0"
    change(term, points={"fsdp.fsdp_loss": 10.0, "fsdp.question": 4.0})
    released = (term / "release" / "fsdp" / "fsdp.ipynb").read_text()
    assert "; 10 points.*" in released and read_settings(term).points == {"fsdp.fsdp_loss": 10.0, "fsdp.question": 4.0}
    assert states(term)["ada"]["state"] == "not in the gradebook yet"
    assert (grade(term)["ada"].points, grade(term)["ada"].max_points) == (23.0, 23.0)
    row = exported(term)["ada"]
    assert (row["score"], row["max_score"], row["points fsdp_loss"]) == ("23.0", "27.0", "10.0")
    people.undo(term, register.log(term)[-1].number)
    grade(term)
    assert exported(term)["ada"]["score"] == "18.0" and read_settings(term).points == {}


def test_a_source_with_other_points_or_with_a_test_cell_is_refused_before_release_and_grading(term):
    def raise_points(notebook):
        cell(notebook, "check-fsdp_loss").metadata.nbgrader.points = 10

    def tested(notebook):
        own = {"grade_id": "mine", "points": 1, "grade": True, "solution": False, "locked": True, "task": False}
        own |= {"schema_version": 3, "cell_type": "code"}
        notebook.cells.append(new_code_cell("assert True", metadata={"nbgrader": own}))

    hand_in(term, "ada")
    edit(term, raise_points)
    for attempt in (change, grade, lambda term: release(term, "fsdp")):
        with pytest.raises(CourseError, match=r"fsdp_loss is worth 10 points, and the course says 5.*--points fsdp.fs"):
            attempt(term)
    change(term, points={"fsdp.fsdp_loss": 10.0})
    edit(term, tested)
    for attempt in (change, lambda term: release(term, "fsdp")):
        with pytest.raises(CourseError, match="has the test cell 'mine', which official grading cannot judge"):
            attempt(term)

    def mine(notebook):
        own = notebook.cells.pop()
        own.source = "answer = 1"
        return own

    def answered(notebook):
        notebook.cells[-1].metadata.nbgrader |= {"solution": True, "locked": False}

    edit(term, answered)
    release(term, "fsdp")
    hand_in(term, "bob", lambda notebook: notebook.cells.append(mine(notebook)))
    assert grade(term)["bob"].points == 23.0
    assert exported(term)["bob"]["max_score"] == "26.0", "a question of the instructor's own waits for a person"
    assert states(term)["bob"]["state"] == "waits for manual grading"


def test_a_test_cell_that_was_released_all_the_same_waits_for_a_person(term, monkeypatch):
    def tested(notebook):
        own = {"grade_id": "mine", "points": 1, "grade": True, "solution": False, "locked": True, "task": False}
        notebook.cells.append(
            new_code_cell("1", metadata={"nbgrader": {**own, "schema_version": 3, "cell_type": "code"}})
        )

    edit(term, tested)
    with monkeypatch.context() as before:
        before.setattr(points, "require_agreement", lambda *_, **__: None)
        release(term, "fsdp")
    hand_in(term, "ada")
    grade(term)
    assert states(term)["ada"]["state"] == "waits for manual grading" and exported(term)["ada"]["score"] == "18.0"
