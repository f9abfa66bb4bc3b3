"""Zip files from and for three systems, and work in folders with other names."""

import json
import zipfile

import pytest

from autograder.grading.nbgrader import uploads
from autograder.grading.nbgrader.conftest import change, file_and_book, hand_in, report, states
from autograder.grading.nbgrader.late_penalty import renew_penalties
from autograder.grading.nbgrader.settings import CourseError
from autograder.grading.nbgrader.submissions import misplaced
from autograder.grading.nbgrader.uploads import collect, feedback_zip, marked_late


def archive(path, files):
    with zipfile.ZipFile(path, "w") as zip_file:
        for name, text in files.items():
            zip_file.writestr(name, text)
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
    result = collect(term, "fsdp", archive(tmp_path / "canvas.zip", canvas))
    assert (result.new, result.late, result.others) == (["bob"], ["bob"], 1) and marked_late(term, "fsdp") == {"bob"}
    assert result.aside == {"kahnbo_999_9_fsdp.ipynb": "nobody on the list of students is called kahnbo; is it bob?"}
    (term / "submitted" / "bob" / "fsdp" / "timestamp.txt").write_text("2026-03-02 11:00:00 UTC")  # of this notebook
    assert [path.read_text() for path in (term / ".meshcraft" / "unmatched" / "fsdp").iterdir()] == ["2"]

    moodle = {"Bob Kahn_77_assignsubmission_file_/../../x.ipynb": "4", "cleo_78_assignsubmission_file_fsdp.ipynb": "5"}
    result = collect(term, "fsdp", archive(tmp_path / "moodle.zip", moodle))
    assert (result.new, result.replaced) == (["cleo"], ["bob"]) and result.aside == {}
    earlier_files = {path.suffix: path.read_text() for path in (term / ".meshcraft" / "earlier" / "fsdp").iterdir()}
    assert earlier_files == {".ipynb": "1", ".txt": "2026-03-02 11:00:00 UTC"} and marked_late(term, "fsdp") == set()
    assert not (term / "submitted" / "bob" / "fsdp" / "timestamp.txt").exists()
    pages = [term / "feedback" / "bob" / "fsdp" / "fsdp.html"]
    pages[0].parent.mkdir(parents=True)
    pages[0].write_text("page")
    assert feedback_zip(term, "fsdp", pages, tmp_path / "out.zip") == 1
    with zipfile.ZipFile(tmp_path / "out.zip") as zip_file:
        assert zip_file.namelist() == ["Bob Kahn_77_assignsubmission_file_/x.html"]

    files = {
        "assignment_1_export/submission_metadata.yml": GRADESCOPE,
        "assignment_1_export/submission_1/hw.ipynb": "6",
    }
    result = collect(term, "fsdp", archive(tmp_path / "gradescope.zip", files))
    assert result.replaced == ["bob"] and (term / "submitted/bob/fsdp/fsdp.ipynb").read_text() == "6"
    assert (term / "submitted/bob/fsdp/timestamp.txt").read_text() == "2026-03-02 11:00:00 UTC"
    assert {path.name for path in (term / "submitted").iterdir()} == {"bob", "cleo"}
    for bad, says in (({"x.ipynb": ""}, "has no notebook as Canvas"), (None, "read as a zip file or a folder")):
        path = archive(tmp_path / "bad.zip", bad) if bad else tmp_path / "none.zip"
        with pytest.raises(CourseError, match=says):
            collect(term, "fsdp", path)


def test_every_name_that_canvas_gives_is_matched_or_named_from_a_zip_file_and_from_its_folder(term, tmp_path):
    roster = [{"id": "bob", "lms_user_id": "102"}, {"id": "amy", "lms_user_id": "103"}]
    change(term, students=[*roster, {"id": "cleo", "lms_user_id": "104"}])
    names = {
        "kahnbob_102_8_fsdp.ipynb": "1",
        "van_der_lee_amy_LATE_103_9_my_own_7_8_fsdp-2.ipynb": "2",  # underscores in a name, numbers in the file's
        "late_cleo_104_10_fsdp.ipynb": "3",  # a name, not Canvas' mark
        "LATE_anon_x7Q2a_11_fsdp.ipynb": "4",
        "anon_b81zz_12_fsdp.ipynb": "5",
        "homework.ipynb": "6",
        "__MACOSX/._kahnbob_102_8_fsdp.ipynb": "7",
    }
    with zipfile.ZipFile(archive(tmp_path / "canvas.zip", names)) as zip_file:
        zip_file.extractall(tmp_path / "unpacked" / "submissions")
    (tmp_path / "unpacked" / "link_102_9_x.ipynb").symlink_to("/etc/passwd")
    packed = collect(term, "fsdp", tmp_path / "canvas.zip")
    assert (packed.new, packed.late) == (["bob", "amy", "cleo"], ["amy"])
    assert {name: why.partition(";")[0] for name, why in packed.aside.items()} == {
        "LATE_anon_x7Q2a_11_fsdp.ipynb": "Canvas hides the names of this assignment",
        "anon_b81zz_12_fsdp.ipynb": "Canvas hides the names of this assignment",
        "homework.ipynb": "Canvas, Moodle and Gradescope name no file like this",
    }
    assert (term / "submitted" / "amy" / "fsdp" / "fsdp.ipynb").read_text() == "2"
    again = collect(term, "fsdp", tmp_path / "unpacked")
    assert (sorted(again.same), again.new, again.late, len(again.aside)) == (["amy", "bob", "cleo"], [], ["amy"], 3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CourseError, match="has no notebook as Canvas"):
        collect(term, "fsdp", tmp_path / "empty")


def test_what_was_collected_before_an_interruption_is_still_marked_as_late(term, tmp_path, monkeypatch):
    change(term, students=[{"id": "bob", "lms_user_id": "102"}, {"id": "amy", "lms_user_id": "103"}])
    files = {f"x_LATE_{number}_9_fsdp.ipynb": str(number) for number in (102, 103)}
    put = uploads.put
    monkeypatch.setattr(uploads, "put", lambda *about: 1 / ("bob" in about) and put(*about))
    with pytest.raises(ZeroDivisionError):
        collect(term, "fsdp", archive(tmp_path / "canvas.zip", files))
    assert "bob" in marked_late(term, "fsdp") and (term / "submitted" / "bob" / "fsdp" / "fsdp.ipynb").is_file()


def notebook(*functions):
    return json.dumps({"cells": [{"cell_type": "code", "id": name, "source": ""} for name in functions]})


def test_notebooks_of_another_chapter_are_not_collected(term, tmp_path):
    change(term, students=[{"id": "bob", "lms_user_id": "102"}, {"id": "amy", "lms_user_id": "103"}])
    files = {"kahnbob_102_8_x.ipynb": notebook("shard_params"), "amy_103_9_x.ipynb": "not JSON"}
    path = archive(tmp_path / "canvas.zip", files)
    with pytest.raises(CourseError, match="no notebook in it is of collectives, and 1 of fsdp; nothing was collected"):
        collect(term, "collectives", path)
    assert [*(term / "submitted").iterdir()] == []
    files["amy_103_9_x.ipynb"] = notebook("ring_all_gather")
    result = collect(term, "collectives", archive(path, files))
    assert result.new == ["amy"] and result.aside == {
        "kahnbob_102_8_x.ipynb": "it is a notebook of fsdp, not of collectives"
    }


def test_a_mark_of_lateness_without_a_time_is_named_until_there_is_one(term, tmp_path):
    change(term, students=[{"id": "bob", "lms_user_id": "102"}])
    text = hand_in(term, "bob", answer="Because.").read_text()
    collect(term, "fsdp", archive(tmp_path / "canvas.zip", {"kahnbob_LATE_102_9_fsdp.ipynb": text}))
    file_and_book(term, {"bob": report()})
    row = states(term)["bob"]
    assert "Canvas marks it as late and does not say by how much" in row["why"] and row["late_penalty"] == 0
    (term / "submitted" / "bob" / "fsdp" / "timestamp.txt").write_text("2026-03-03 09:00:00 UTC")
    file_and_book(term, {"bob": report()})
    renew_penalties(term, "fsdp")
    row = states(term)["bob"]
    assert "Canvas" not in row["why"] and (row["days_late"], row["late_penalty"]) == (2, 3.6)


def test_work_in_a_folder_of_another_name_is_named_with_the_chapter_that_it_may_be(term):
    hand_in(term, "ada")
    for name in ("FSDP", "fsdpp", "homework", ".ipynb_checkpoints"):
        (term / "submitted" / "bob" / name).mkdir(parents=True)
    (term / "submitted" / "bob" / "fsdp.ipynb").write_text("{}")
    (term / "submitted" / "bob" / "notes.txt").write_text("")
    suggestions = misplaced(term)
    where = {path.rpartition("/")[2]: why.rpartition("/bob/")[2] for path, why in suggestions.items()}
    assert where == {"FSDP": "fsdp/", "fsdpp": "fsdp/", "homework": "CHAPTER/", "fsdp.ipynb": "fsdp/"}


def test_work_of_a_chapter_that_is_not_in_the_course_is_named_and_adds_no_rows(term, meshcraft):
    hand_in(term, "ada", name="homework.ipynb")
    (term / "submitted" / "ada" / "zero").mkdir()
    (term / "submitted" / "ada.ipynb").write_text("{}")
    (term / "submitted" / "ada" / "fsdp.zip").write_text("")
    result = meshcraft("status", "--course", str(term))
    assert {line.split()[0] for line in result.out.splitlines() if "   " in line} == {"chapter", "fsdp"}
    assert "\nhanded in as homework.ipynb: ada\n" in result.out, "at 80 columns, notes are below the table"
    assert "submitted/ada/zero: zero is not in this course" in result.err and "--chapter zero` adds it" in result.err
    assert "submitted/ada.ipynb: in no student's folder" in result.err
    assert "submitted/ada/fsdp.zip: not a chapter's folder, so it is not graded" in result.err
