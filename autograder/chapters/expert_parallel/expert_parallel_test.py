"""The oracle of ``expert_parallel``, and the margin of its limit."""

import numpy as np

from autograder.contract.task import load, references

TASK = load("expert_parallel").task("expert_parallel_mean")


def test_the_oracle_is_the_mean_over_all_rows():
    for case in TASK.cases:
        inputs = TASK.draw(np.random.default_rng(0), case)
        values = TASK.oracle(inputs, case)["values"]
        np.testing.assert_allclose(values[-1], np.sum(inputs["x"], 0) / len(inputs["x"]), rtol=1e-5, atol=1e-6)


def test_the_baseline_needs_much_more_memory_than_the_reference():
    figures = references("expert_parallel")["expert_parallel_mean"]["temporaries"]
    assert figures["naive"] > 1.15 * figures["reference"]
