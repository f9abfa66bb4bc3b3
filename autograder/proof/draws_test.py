"""``make draws`` finds answers that are wrong, or nearly wrong, on what a course draws."""

import jax

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
