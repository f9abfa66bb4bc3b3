"""The comparison of whole runs; the runs themselves are ``make trials``."""

import sys

import pytest

from autograder.proof.train_e2e import LIMIT, Runs, Trial, apart


def test_runs_are_apart_by_their_largest_difference_and_by_everything_where_steps_are_missing():
    assert apart({1: 2.0, 2: 1.0}, {1: 2.5, 2: 1.25}) == 0.5
    assert apart({1: 2.0, 2: 1.0}, {1: 2.0}) == float("inf")


def test_a_trial_holds_up_to_its_limit():
    assert Trial("same", LIMIT, LIMIT, "loss").passed
    assert (
        not Trial("other", float("inf"), LIMIT, "loss").passed and not Trial("no", float("nan"), LIMIT, "loss").passed
    )


def test_a_run_that_writes_many_errors_does_not_wait_until_they_are_read(tmp_path, monkeypatch):
    command = tmp_path / "command"
    command.write_text("#!/bin/sh\nhead -c 200000 /dev/zero | tr '\\0' x >&2\nexit 3\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    runs = Runs(tmp_path, [])
    with pytest.raises(RuntimeError, match=r"^noisy ended before step 1:\nx{2000}$"):
        runs.until("noisy", runs.start("noisy"), 1)
