"""The recorded attacks, mutations and faults that the page on trust shows are complete, with the required results."""

from __future__ import annotations

import json

import pytest
from trust import FUZZ, LEFT_BEHIND, SOAK, controls, kept

from autograder.proof.attacks.fixtures import find_attacks

BACKENDS, USERS = ("bubblewrap", "landlock"), ("root", "a plain user")
AGAIN = "run: python -m autograder.proof.attacks --write (each backend, as root and as a user, once with --stock)"


def test_no_submission_was_lost_doubled_different_or_left_in_the_recorded_soak():
    soak = json.loads(SOAK.read_text())
    assert soak["submissions"] >= 200 and sum(soak["kills"].values()) >= 300, "run: make soak ARGS=--write"
    assert [soak[state] for state in LEFT_BEHIND] == [[]] * 4


def test_no_mutation_crashed_the_grader_or_earned_a_point_in_the_kept_campaign():
    campaign = json.loads(FUZZ.read_text())
    assert campaign["mutations"] >= 10_000, "run: make fuzz ARGS=--write"
    assert campaign["failures"] == [] and sum(campaign["verdicts"].values()) == campaign["mutations"]


def test_every_backend_was_run_as_root_and_as_a_plain_user():
    assert sorted(kept()["runs"]) == sorted(f"{backend}, {user}" for backend in BACKENDS for user in USERS), AGAIN


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("user", USERS)
def test_kept_run_has_every_attack_that_the_backend_claims_to_stop(backend, user):
    run = kept()["runs"][f"{backend}, {user}"]
    claimed = [attack for attack in find_attacks() if not attack.backends or backend in attack.backends]
    assert {row["name"]: row["expected"] for row in run["rows"]} == {a.name: a.verdict for a in claimed}, AGAIN
    short = [row for row in run["rows"] if row["found"] != row["expected"] or row["canaries"]]
    assert [row["name"] for row in short] == [] and run["left"] == []


def test_control_was_tried_on_every_attack_that_says_so():
    assert sorted(controls()) == sorted(attack.name for attack in find_attacks() if attack.control is True), AGAIN
