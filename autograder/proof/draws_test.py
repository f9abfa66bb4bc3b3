"""``make draws`` finds answers that are wrong, or nearly wrong, on what a course draws."""

import jax
import pytest

from autograder.contract.task import load
from autograder.proof import draws
from solutions import data_parallel


def test_a_reference_keeps_far_from_its_limits_and_a_wrong_answer_does_not(monkeypatch):
    task = load("data_parallel").task("sync_gradients")
    outcome = draws.drawn("data_parallel", task, 2)
    assert outcome.failed == [] and 0 < outcome.share < draws.ROOM and "course" in outcome.where
    right = data_parallel.sync_gradients

    def wrong(gradients, specs, axis_names):
        return jax.tree.map(lambda g: 1.001 * g, right(gradients, specs, axis_names))

    monkeypatch.setattr(data_parallel, "sync_gradients", wrong)
    failed = draws.drawn("data_parallel", task, 1).failed
    assert failed and all(sentence.endswith("(course 0)") for sentence in failed)


@pytest.mark.parametrize(("share", "status"), [(0.4, 0), (0.6, 1)])
def test_an_error_of_more_than_half_of_its_limit_is_reported(monkeypatch, capsys, share, status):
    monkeypatch.setattr(draws, "drawn", lambda *_: draws.Draws(share, "gradients in 'unseen', course 3"))
    assert draws.main(["data_parallel"]) == status
    assert ("sync_gradients: gradients in 'unseen', course 3: 0.60" in capsys.readouterr().out) is bool(status)


@pytest.mark.parametrize(("arguments", "message"), [(["fsd"], "no chapter 'fsd'"), (["--courses", "0"], "at least 1")])
def test_unknown_chapters_and_no_courses_are_refused(capsys, arguments, message):
    with pytest.raises(SystemExit):
        draws.main(arguments)
    assert message in capsys.readouterr().err
