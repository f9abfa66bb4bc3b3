"""The contract of ``fsdp`` is not fooled: right answers of any style pass, each mutant fails what it names."""

import re

import jax
import numpy as np
import pytest

from autograder import variants
from autograder.chapters.fsdp import CONTRACT
from autograder.check import check_function
from autograder.contract import references
from autograder.facts import split_spec
from autograder.mutants.fsdp.parts import sums_gradients
from autograder.variants.fsdp import ALIKE, VARIANTS
from autograder.variants.rewrites import rewritten
from autograder.verdict import PARTIAL

TASKS = {task.name: task for task in CONTRACT.tasks}


def judged(task, function, *, full=False):
    own = function.__code__.co_filename
    return check_function("fsdp", TASKS[task], function, lambda file: "mine" if file == own else None, full=full)


def failed(result):
    """The facts that cost points; those of weight 0 are advice."""
    return {fact.name for fact in result.facts if fact.passed is False and fact.weight}


@pytest.mark.parametrize("task", ALIKE)
def test_every_function_has_twenty_other_styles_whose_programs_differ(task, record_property):
    counted = variants.count("fsdp", task, VARIANTS[task])
    record_property("constructions", counted.constructions)
    record_property("programs", counted.programs)
    print(f"{task}: {counted.constructions} constructions, {counted.programs} programs")
    assert min(counted.constructions, counted.programs) >= 20
    assert counted.alike == ALIKE[task], "these differ in Python only, and the list must say so"


@pytest.mark.parametrize("task", TASKS)
def test_mechanical_rewrites_change_no_program(task):
    for function in VARIANTS[task]:
        changed = rewritten(function)
        assert changed.__code__ is not function.__code__
        same = variants.operations("fsdp", task, changed) == variants.operations("fsdp", task, function)
        assert same, function.__name__


def test_bad_gather_is_told_leaf_mesh_values_and_line():
    result = judged("gather_params", sums_gradients)
    (fact,) = [fact for fact in result.facts if not fact.passed]
    assert result.verdict == PARTIAL
    assert fact.line == f"mine:{sums_gradients.__code__.co_firstlineno}"
    assert "leaf at_limit on mesh data=8" in fact.message
    assert re.search(r"measured -?[\d.]+, expected -?[\d.]+ at \[\d, \d\]", fact.message)
    assert "8 times too large, and axis 'data' has that size" in fact.message


def test_rule_takes_the_largest_divisible_dim_and_the_first_of_equals():
    assert split_spec((16, 32), 8, 64, "data") == jax.P(None, "data")
    assert split_spec((34, 16), 8, 64, "data") == jax.P(None, "data")
    assert split_spec((16, 16), 8, 64, "data") == jax.P("data")
    assert split_spec((7, 9, 5), 8, 64, "data") == jax.P()
    assert split_spec((8, 4), 8, 64, "data") == jax.P()
    assert split_spec((64, 16, 8), 8, 64, "data", skip=1) == jax.P(None, "data")


def test_oracle_of_gather_params_equals_central_differences():
    task = TASKS["gather_params"]
    case = task.cases[0]
    inputs = task.draw(np.random.default_rng(0), case)
    expected = task.oracle(inputs, case)["gradients"]["first"]
    upstream = inputs["upstream"]["first"]["kernel"].astype(np.float64)

    def what_flows_back(kernel):
        """The mean over devices of each device's own scalar, were it linear in the whole leaf."""
        return np.mean([np.vdot(g, kernel) for g in upstream])

    kernel, at = inputs["shards"]["first"]["kernel"].astype(np.float64), (3, 5)
    step = np.zeros_like(kernel)
    step[at] = 1e-3
    difference = (what_flows_back(kernel + step) - what_flows_back(kernel - step)) / 2e-3
    assert expected["kernel"][at] == pytest.approx(difference, rel=1e-6)


@pytest.mark.parametrize("place", ["data=8", "data=2"])
def test_oracle_of_fsdp_loss_equals_central_differences(place):
    task = TASKS["fsdp_loss"]
    case = next(case for case in task.cases if case.name == place)
    inputs = task.draw(np.random.default_rng(0), case)
    expected = task.oracle(inputs, case)["gradients"]["layers"]

    def loss(leaf, path):
        moved = jax.tree.map_with_path(lambda p, x: leaf if p == path else x, inputs["shards"])
        return np.mean(task.oracle({**inputs, "shards": moved}, case)["values"], dtype=np.float64)

    for path, gradient in jax.tree.leaves_with_path({"layers": expected}):
        leaf = dict(jax.tree.leaves_with_path(inputs["shards"]))[path]
        gradient = gradient if gradient.shape == leaf.shape else gradient.mean(0)  # whole leaves: each device's own
        at = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        step = np.zeros_like(leaf)
        step[at] = 5e-3
        difference = (loss(leaf + step, path) - loss(leaf - step, path)) / 1e-2
        assert gradient[at] == pytest.approx(difference, rel=5e-3), path


def test_limit_on_temporaries_separates_reference_and_naive_by_more_than_15_percent():
    known = references("fsdp")["fsdp_loss"]["temporaries"]
    assert known["naive"] > 1.15 * 1.15 * known["reference"]
