"""Zip files of three systems in and out, and work in folders of other names."""

import zipfile

import pytest

from autograder.grading.nbgrader.conftest import change, hand_in
from autograder.grading.nbgrader.settings import CourseError
from autograder.grading.nbgrader.submissions import misplaced
from autograder.grading.nbgrader.uploads import collect, feedback_zip


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


def test_zip_files_of_three_systems_become_submissions_and_nothing_in_them_is_dropped(term, tmp_path):
    change(term, students=[{"id": "bob", "first_name": "Bob", "last_name": "Kahn", "lms_user_id": "102"}])
    canvas = {"kahnbob_LATE_102_9_fsdp-1.ipynb": "1", "kahnbo_999_9_fsdp.ipynb": "2", "kahnbob_102_8_notes.txt": "3"}
    got = collect(term, "fsdp", archive(tmp_path / "canvas.zip", canvas))
    assert (got.new, got.late, got.others) == (["bob"], ["bob"], 1)
    assert got.aside == {"kahnbo_999_9_fsdp.ipynb": "nobody on the list of students is called kahnbo; is it bob?"}
    assert [path.read_text() for path in (term / ".meshcraft" / "unmatched" / "fsdp").iterdir()] == ["2"]

    moodle = {"Bob Kahn_77_assignsubmission_file_/../../x.ipynb": "4", "cleo_78_assignsubmission_file_fsdp.ipynb": "5"}
    got = collect(term, "fsdp", archive(tmp_path / "moodle.zip", moodle))
    assert (got.new, got.replaced) == (["cleo"], ["bob"]) and got.aside == {}
    assert [path.read_text() for path in (term / ".meshcraft" / "earlier" / "fsdp").iterdir()] == ["1"]
    pages = [term / "feedback" / "bob" / "fsdp" / "fsdp.html"]
    pages[0].parent.mkdir(parents=True)
    pages[0].write_text("page")
    assert feedback_zip(term, "fsdp", pages, tmp_path / "out.zip") == 1
    with zipfile.ZipFile(tmp_path / "out.zip") as made:
        assert made.namelist() == ["Bob Kahn_77_assignsubmission_file_/x.html"]

    files = {
        "assignment_1_export/submission_metadata.yml": GRADESCOPE,
        "assignment_1_export/submission_1/hw.ipynb": "6",
    }
    got = collect(term, "fsdp", archive(tmp_path / "gradescope.zip", files))
    assert got.replaced == ["bob"] and (term / "submitted/bob/fsdp/fsdp.ipynb").read_text() == "6"
    assert (term / "submitted/bob/fsdp/timestamp.txt").read_text() == "2026-03-02 11:00:00 UTC"
    assert {path.name for path in (term / "submitted").iterdir()} == {"bob", "cleo"}
    for bad, says in (({"x.ipynb": ""}, "has no notebook as Canvas"), (None, "cannot be read as a zip file")):
        path = archive(tmp_path / "bad.zip", bad) if bad else tmp_path / "none.zip"
        with pytest.raises(CourseError, match=says):
            collect(term, "fsdp", path)


def test_work_in_a_folder_of_another_name_is_named_with_the_chapter_that_it_may_be(term):
    hand_in(term, "ada")
    for name in ("FSDP", "fsdpp", "homework", ".ipynb_checkpoints"):
        (term / "submitted" / "bob" / name).mkdir(parents=True)
    (term / "submitted" / "bob" / "fsdp.ipynb").write_text("{}")
    (term / "submitted" / "bob" / "notes.txt").write_text("")
    found = misplaced(term)
    where = {path.rpartition("/")[2]: why.rpartition("/bob/")[2] for path, why in found.items()}
    assert where == {"FSDP": "fsdp/", "fsdpp": "fsdp/", "homework": "CHAPTER/", "fsdp.ipynb": "fsdp/"}
