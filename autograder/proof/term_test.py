"""The short form of the scripted term: one student of each kind, two chapters, kills, points in a real browser."""

import pytest

from autograder.grading.outside import pipeline
from autograder.proof.browser import CHROMIUM, give_points
from autograder.proof.term import KINDS, GivenGrader, run


@pytest.mark.long
def test_every_student_of_a_term_gets_what_the_rules_give(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "Grader", GivenGrader)
    summary = run(tmp_path, len(KINDS), 2, feedback=False, enter=give_points if CHROMIUM else None)
    assert summary["wrong"] == {} and (summary["compared"], summary["final"]) == (len(KINDS), len(KINDS) - 1)
    assert summary["killed"] == ["collect", "grading", "gradebook", "regrade", "export"]
    assert summary["collected"] == len(KINDS)
