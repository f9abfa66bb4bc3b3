"""The comparison of whole runs; the runs themselves are ``make trials``."""

from autograder.proof.train_e2e import LIMIT, Trial, apart


def test_runs_are_apart_by_their_largest_difference_and_by_everything_where_steps_are_missing():
    assert apart({1: 2.0, 2: 1.0}, {1: 2.5, 2: 1.25}) == 0.5
    assert apart({1: 2.0, 2: 1.0}, {1: 2.0}) == float("inf")


def test_a_trial_holds_up_to_its_limit():
    assert Trial("same", LIMIT, LIMIT, "loss").passed
    assert (
        not Trial("other", float("inf"), LIMIT, "loss").passed and not Trial("no", float("nan"), LIMIT, "loss").passed
    )
