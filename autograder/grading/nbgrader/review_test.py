"""Manual review shows exactly what was graded: both use one reader of a notebook's cells, whatever surrounds them."""

import json
import os

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autograder.grading.inside.intake import MAX_CELLS, MAX_CODE_CELLS, IntakeError, parse_notebook
from autograder.grading.nbgrader import booking
from autograder.grading.nbgrader.conftest import file_and_book, hand_in, report
from autograder.grading.nbgrader.course import open_ledger
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.restore import UNREADABLE, restore
from course.curriculum import ROOT

EXERCISE = ROOT / "exercises" / "fsdp" / "fsdp.ipynb"
RELEASE = nbformat.read(EXERCISE, as_version=4)
NAMES = [cell.metadata.nbgrader.grade_id for cell in RELEASE.cells if "nbgrader" in cell.metadata]
NUMBERS = st.integers(-9, 9) | st.sampled_from([float("nan"), float("-inf"), 10**20, 1e300])
TEXT = st.text(st.characters(), max_size=6) | st.sampled_from(["\ud800", "\x00", *NAMES, "code", "é", "e\u0301"])
ANY = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
GRADE_ID = st.fixed_dictionaries({"grade_id": st.sampled_from(NAMES) | ANY}, optional={"solution": ANY, "points": ANY})
METADATA = st.fixed_dictionaries({}, optional={"nbgrader": GRADE_ID | ANY, "meshcraft": ANY, "name": ANY}) | ANY
SOURCE = TEXT | st.lists(TEXT, max_size=3) | ANY
CELL = st.fixed_dictionaries(
    {"cell_type": st.sampled_from(["code", "markdown", "raw"]) | ANY, "source": SOURCE},
    optional={"id": ANY, "metadata": METADATA, "outputs": ANY, "attachments": ANY, "execution_count": ANY},
)
NOTEBOOK = st.fixed_dictionaries(
    {"cells": st.lists(CELL, max_size=6)}, optional={"metadata": ANY, "nbformat": ANY, "nbformat_minor": ANY}
)


@settings(max_examples=2000 if os.environ.get("MESHCRAFT_FULL") else 60, deadline=None, derandomize=True)
@given(NOTEBOOK)
def test_a_notebook_that_is_graded_is_reviewed_whole(content):
    try:
        graded = parse_notebook("x.ipynb", json.dumps(content).encode())
    except IntakeError as error:
        assert "is not text" in str(error) or "is not a cell" in str(error)
        return
    reviewed = restore(RELEASE, graded)
    nbformat.validate(reviewed)
    again = nbformat.reads(nbformat.writes(reviewed), as_version=4)
    shown = [cell.source for cell in again.cells if cell.cell_type == "code"]
    assert all(cell.source in shown for cell in graded.cells), "in the order in which they ran"
    places = [shown.index(cell.source) for cell in graded.cells if shown.count(cell.source) == 1]
    assert places == sorted(places)


def notebook(*cells):
    return json.dumps({"cells": [*cells]}).encode()


def code(source, **metadata):
    return {"cell_type": "code", "source": source, "metadata": metadata}


def test_code_in_a_check_cell_or_next_to_a_decoy_is_shown():
    hidden, real = "def shard_params(): ...  # in a locked cell", "def shard_params(): ...  # real"
    decoy = {"cell_type": "markdown", "source": "def shard_params(): ...  # decoy"}
    cells = [
        code(hidden, nbgrader={"grade_id": "check-shard_params"}),
        code(real, nbgrader={"grade_id": "shard_params"}),
        {**decoy, "metadata": {"nbgrader": {"grade_id": "shard_params"}}},
    ]
    reviewed = restore(RELEASE, parse_notebook("x", notebook(*cells))).cells
    assert [cell.source for cell in reviewed[:4]] == [hidden, "check(shard_params)", real, decoy["source"]]
    assert reviewed[2].metadata.nbgrader.grade_id == "shard_params" and reviewed[3].cell_type == "markdown"


def test_the_last_of_two_equal_keys_counts_for_the_grade_and_the_review():
    twice = b'{"cells": [{"cell_type": "markdown", "source": "shown", "cell_type": "code", "source": "ran"}]}'
    graded = parse_notebook("x", twice)
    assert [cell.source for cell in graded.cells] == ["ran"] == [restore(RELEASE, graded).cells[0].source]


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ([None], "cell 1 is not a cell"),
        ([code(["x", ["y"]])], "the source of cell 1 is not text"),
        ([{**code(7), "cell_type": "markdown"}], "the source of cell 1 is not text"),
        ([code("")] * (MAX_CODE_CELLS + 1), "has 1,001 code cells and at most 1,000"),
        ([{"cell_type": "raw"}] * (MAX_CELLS + 1), "has 10,001 cells and at most 10,000"),
    ],
)
def test_what_cannot_be_reviewed_is_not_graded(cells, says):
    with pytest.raises(IntakeError, match=says):
        parse_notebook("x", notebook(*cells))


def test_a_notebook_of_many_notes_is_ordinary_and_one_that_changed_after_it_was_graded_is_not_booked(course):
    def write_notes(notebook):
        notebook.cells += [nbformat.v4.new_markdown_cell(f"note {number}") for number in range(1500)]

    path = hand_in(course, "ada", write_notes)
    assert len(parse_notebook("x", path.read_bytes()).everything) > 1500
    assert file_and_book(course, {"ada": report()}) == {}
    copy = course / "autograded" / "ada" / "fsdp" / "fsdp.ipynb"
    assert "note 1499" in copy.read_text() and UNREADABLE not in copy.read_text()
    (page,), problems = write_feedback(course, "fsdp")
    assert problems == {} and page.exists()
    before = copy.read_bytes()
    path.write_text(path.read_text() + " ")
    with open_ledger(course) as ledger:
        ledger.booked("fsdp", "ada", None)
        problems = booking.book(course, "fsdp", ledger, {"ada": path})
    assert problems == {"ada": "BridgeError: fsdp.ipynb has changed since it was graded; run `meshcraft grade` again"}
    assert copy.read_bytes() == before
