"""A function worth 0 points in a course: it is not graded, and notebook, gradebook and feedback say so."""

import nbformat
import pytest

from autograder.contract.verdict import Report
from autograder.grading.nbgrader.bridge import UNGRADED
from autograder.grading.nbgrader.conftest import booked, cell, file_and_book, hand_in, report
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.jobs import verdict_for_all
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.nbgrader.settings import CourseError, read_settings
from autograder.grading.nbgrader.submissions import find_submissions

NAME = "hybrid_shard_step"


def changed(course, points, **settings):
    points_by_name = {f"fsdp.{name}": worth for name, worth in points.items()}
    return init_course(course, chapters=[], due={}, settings=settings, students=[], points=points_by_name)


def test_an_ungraded_function_is_named_in_the_notebook_and_earns_and_costs_nothing(course):
    hand_in(course, "ada")
    before = find_submissions(course, "fsdp")[0].key
    assert "fsdp.hybrid_shard_step: 0" in changed(course, {NAME: 0.0}, budget=240.0)["points"]
    assert find_submissions(course, "fsdp")[0].key != before, "all are judged again"
    released = nbformat.read(course / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    assert cell(released, f"check-{NAME}").metadata.nbgrader.points == 0
    assert sum("; not graded in this course.*" in each.source for each in released.cells) == 1
    graded = tuple(each for each in report().functions if each.name != NAME)
    assert file_and_book(course, {"ada": Report("fsdp", graded, isolation="bubblewrap")}) == {}
    (output,) = cell(booked(course, "ada"), f"check-{NAME}").outputs
    assert UNGRADED in output.data["text/html"]
    (page,), problems = write_feedback(course, "fsdp")
    assert not problems and UNGRADED in page.read_text()
    assert read_settings(course).budget == 240
    changed(course, {NAME: 3.0})
    again = nbformat.read(course / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    assert not any("not graded" in each.source for each in again.cells)
    assert find_submissions(course, "fsdp")[0].key == before


def test_a_chapter_without_graded_functions_is_refused_and_so_is_a_budget_of_nothing(course):
    no_points = dict.fromkeys((each.name for each in report().functions), 0.0)
    with pytest.raises(CourseError, match=r"no function of fsdp would be graded; --drop-chapter fsdp"):
        changed(course, no_points)
    with pytest.raises(CourseError, match=r"budget is 3; write at least 10 processor seconds"):
        changed(course, {}, budget=3.0)


def test_a_verdict_for_all_leaves_out_what_is_not_graded():
    whole = verdict_for_all("fsdp", "refused", "why", ungraded=(NAME,))
    assert [each.name for each in whole.functions] == [each.name for each in report().functions if each.name != NAME]
