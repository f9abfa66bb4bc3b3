"""The short form of the soak: a few submissions, a few kills."""

import json
from collections import Counter

import pytest

from autograder.proof.soak import Outcome, booked, compare, make_class, soak

pytestmark = pytest.mark.long


def test_killed_at_random_and_graded_on_gives_what_an_undisturbed_grading_gives(tmp_path):
    outcome = soak(tmp_path, size=2, kills=3, workers=2, seed=1, update=lambda *_: None)
    assert (outcome.lost, outcome.doubled, outcome.different, outcome.left) == ([], [], [], [])
    assert sum(outcome.kills.values()) >= 3 and outcome.runs >= 1
    assert json.loads(json.dumps(outcome.to_json()))["kills"] == dict(outcome.kills)
    assert booked(tmp_path / "disturbed") == Counter({f"student{number:03}": 1 for number in range(2)})


def test_a_class_that_was_not_graded_is_counted_as_lost(tmp_path):
    course = make_class(tmp_path / "course", 2)
    outcome = Outcome(2)
    compare(course, course, outcome)
    assert outcome.lost == ["student000", "student001"] and not outcome.clean
