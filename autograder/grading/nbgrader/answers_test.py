"""Written answers and damaged uploads: nothing is lost, and unclear cases are left to a person."""

from copy import deepcopy
from typing import Any

import pytest

from autograder.contract.verdict import NEEDS_HUMAN, PASS, Result
from autograder.grading.nbgrader.batch_test import fake, grade, verdicts
from autograder.grading.nbgrader.conftest import WHERE, booked, cell, exported, file_and_book, hand_in, report, states
from autograder.grading.nbgrader.course import open_gradebook
from autograder.grading.nbgrader.feedback import prose

__all__ = ["fake"]  # a fixture


def question(term, student):
    with open_gradebook(term) as gradebook:
        grade, comment = (find("question", *WHERE, student) for find in (gradebook.find_grade, gradebook.find_comment))
        return grade.auto_score, grade.needs_manual_grade, comment.auto_comment


def strip(notebook, damage):
    """Remove what identifies the answer's cell, or move the answer, as some editors do."""
    at = next(n for n, each in enumerate(notebook.cells) if each.id == "question")
    for number, each in enumerate(notebook.cells):
        each.metadata = {}
        each.id = each.id if damage == "id" else f"cell-{number}"
    if damage == "inside":
        notebook.cells[at - 1].source += "\n\n" + notebook.cells.pop(at).source
    if damage == "gone":
        notebook.cells.append(notebook.cells.pop(at))


def test_an_answer_without_metadata_is_found_or_a_person_is_asked_and_an_empty_one_is_no_answer(term):
    for damage in ("id", "place", "inside", "gone"):
        hand_in(term, damage, lambda notebook, damage=damage: strip(notebook, damage), answer="Because L*W.")
    hand_in(term, "empty")
    grade(term)
    for damage in ("id", "place", "inside", "gone"):
        score, waits, comment = question(term, damage)
        assert (score, waits) == (None, True) and "Because L*W." in str(booked(term, damage).cells)
        source = cell(booked(term, damage), "question").source
        assert source.endswith("Because L*W.") if damage != "gone" else "a person will look for the answer" in comment
    assert question(term, "empty") == (0.0, False, "No response.")


@pytest.mark.parametrize(
    "text", ["L*W*H/n and a*b", "n<m and m>k", "x**2 + y**2", "__init__", r"\(x*y*z\)", "$L*W*H$", "2 * n", "a_i*b_i"]
)
def test_a_formula_arrives_as_it_was_typed(text):
    shown = str(prose(f"so {text} bytes")).removeprefix("<p>").removesuffix("</p>\n")
    assert shown.replace("&lt;", "<").replace("&gt;", ">") == f"so {text} bytes"


def test_a_damaged_upload_waits_for_a_person_and_their_points_settle_it(term):
    damaged = [b"", b"  \n", b'{"cells": [', '{"cells": "\xe9"}'.encode("latin-1"), b"[]"]
    ids = [f"s{number}" for number in range(len(damaged))]
    for student, data in zip(ids, damaged, strict=True):
        hand_in(term, student).write_bytes(data)
    for judged in grade(term).values():
        assert verdicts(judged) == {NEEDS_HUMAN} and "the upload is damaged" in judged.functions[0].message
    assert {states(term)[student]["state"] for student in ids} == {"needs a person"}
    with open_gradebook(term) as gradebook:
        for student in ids:
            for grade_row in gradebook.find_submission_notebook(*WHERE, student).grades:
                grade_row.manual_score, grade_row.needs_manual_grade = 1.0, False
        gradebook.db.commit()
    grade(term)
    settled, scores = states(term), exported(term)
    assert [(settled[s]["state"], settled[s]["points"]) for s in ids] == [("graded", 5.0)] * len(ids)
    assert [scores[student]["score"] for student in ids] == ["6.0"] * len(ids)


def test_of_copied_cells_the_last_counts_and_the_others_are_shown(term):
    def copy(notebook):
        again = deepcopy(cell(notebook, "question"))
        again.id, again.source = "again", "Because of the bytes."
        notebook.cells.append(again)

    hand_in(term, "ada", copy, answer="Because.")
    assert verdicts(grade(term)["ada"]) == {PASS}
    answers = [each.source for each in booked(term, "ada").cells if each.source.startswith("Because")]
    assert answers == ["Because.", "Because of the bytes."]
    assert cell(booked(term, "ada"), "question").source == "Because of the bytes."


def test_a_person_who_overrules_points_is_seen_in_status_and_refusals_of_the_sandbox_too(term):
    hand_in(term, "ada", answer="x")
    denied = Result("shard_params", 2.0, 2.0, PASS, denied=("socket(AF_INET)",))
    assert file_and_book(term, {"ada": report(denied)}) == {}
    with open_gradebook(term) as gradebook:
        grade_row: Any = gradebook.find_grade("check-shard_params", *WHERE, "ada")
        grade_row.manual_score = 0.5
        gradebook.db.commit()
    row = states(term)["ada"]
    assert (row["points"], row["denied"]) == (16.5, ["socket(AF_INET)"]) and "the sandbox refused socket" in row["why"]
