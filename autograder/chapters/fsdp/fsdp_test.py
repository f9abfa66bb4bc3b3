"""The contract of ``fsdp``: rewriting an answer changes no program, and gradients of gathered leaves are means."""

import numpy as np
import pytest

from autograder.chapters.fsdp import CONTRACT
from autograder.chapters.fsdp.alternatives import ALTERNATIVES
from autograder.chapters.fsdp.mutants import MUTANTS
from autograder.proof import alternatives as variants
from autograder.proof.alternatives.rewrites import rewritten
from autograder.proof.central_differences import places

TASKS = {task.name: task for task in CONTRACT.tasks}
WRONG = {mutant.name: mutant.function for mutant in MUTANTS}


@pytest.mark.parametrize("task", places("hybrid_shard_step", *(name for name in TASKS if name != "hybrid_shard_step")))
def test_mechanical_rewrites_change_no_program(task):
    for function in ALTERNATIVES[task]:
        changed = rewritten(function)
        assert changed.__code__ is not function.__code__
        same = variants.operations("fsdp", task, changed) == variants.operations("fsdp", task, function)
        assert same, function.__name__


def test_gradients_of_gather_params_are_means_over_devices():
    """A split leaf's gradient is the mean of the cotangents of the devices' copies."""
    task = TASKS["gather_params"]
    inputs = task.draw(np.random.default_rng(0), task.cases[0])
    expected = task.oracle(inputs, task.cases[0])["gradients"]["first"]["kernel"]
    upstream = inputs["upstream"]["first"]["kernel"]
    np.testing.assert_allclose(expected, upstream.mean(0, np.float64), rtol=1e-6, atol=1e-7)
