"""The contract of ``fsdp`` is not fooled: right answers of any style pass, each mutant fails what it names."""

import re

import jax
import numpy as np
import pytest

from autograder.chapters.fsdp import CONTRACT
from autograder.chapters.fsdp.alternatives import ALTERNATIVES
from autograder.chapters.fsdp.mutants import MUTANTS
from autograder.check import check_function
from autograder.contract.task import references, trace
from autograder.contract.verdict import FAIL
from autograder.proof import alternatives as variants
from autograder.proof.alternatives.rewrites import rewritten
from autograder.proof.central_differences import check
from autograder.proof.mutants import doubles_gradients, forgets_what_flows_back, judged_unseen
from course.machines import machine
from course.program import parse, timeline
from solutions.fsdp import fsdp_loss, fsdp_train_step, gather_params, hybrid_shard_step

# How much longer than the reference's the step may take.
SLOWER = 1.15
TASKS = {task.name: task for task in CONTRACT.tasks}
WRONG = {mutant.name: mutant.function for mutant in MUTANTS}


def judged(task, function, *, full=False):
    own = function.__code__.co_filename
    return check_function("fsdp", TASKS[task], function, lambda file: "mine" if file == own else None, full=full)


def failed(result):
    """The facts that cost points; those of weight 0 are advice."""
    return {fact.name for fact in result.facts if fact.passed is False and fact.weight}


@pytest.mark.parametrize("task", TASKS)
def test_mechanical_rewrites_change_no_program(task):
    for function in ALTERNATIVES[task]:
        changed = rewritten(function)
        assert changed.__code__ is not function.__code__
        same = variants.operations("fsdp", task, changed) == variants.operations("fsdp", task, function)
        assert same, function.__name__


def test_bad_gather_is_told_leaf_mesh_values_and_line():
    result = judged("gather_params", WRONG["sums_gradients"])
    (fact,) = [fact for fact in result.facts if not fact.passed]
    assert result.verdict == FAIL
    assert fact.line == "mine:1"
    assert "leaf at_limit on mesh data=8" in fact.message
    assert re.search(r"measured -?[\d.]+, expected -?[\d.]+ at \[\d, \d\]", fact.message)
    assert "8 times too large, and axis 'data' has that size" in fact.message


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
    def one(gradient, leaf):
        return gradient if gradient.shape == leaf.shape else gradient.mean(0)  # whole leaves: each device's own

    check(TASKS["fsdp_loss"], place, "shards", lambda values, inputs: inputs["upstream"] * values, one=one)


STEPS = [
    ("fsdp_train_step", "data=8"),
    ("fsdp_train_step", "data=2"),
    ("hybrid_shard_step", "replica=2 x data=4"),
    ("hybrid_shard_step", "replica=4 x data=1"),
]


@pytest.mark.parametrize(("name", "place"), STEPS)
def test_oracle_of_a_step_equals_central_differences_of_its_loss(name, place):
    task = TASKS[name]

    def one(gradient, leaf):
        copies = gradient if gradient.shape != leaf.shape else gradient[None]
        assert all(np.array_equal(copy, copies[0]) for copy in copies), "copies differ"
        return copies[0]

    check(task, place, "shards", lambda values, _: values["loss"], one=one)
    case = next(case for case in task.cases if case.name == place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)
    trees = (found["values"]["shards"], inputs["shards"], found["gradients"])
    for after, leaf, gradient in zip(*map(jax.tree.leaves, trees), strict=True):
        expected = leaf - inputs["learning_rate"] * one(gradient, leaf)
        np.testing.assert_allclose(one(after, leaf), expected, rtol=0, atol=1e-6)


def test_oracle_of_three_steps_is_that_of_one_step_three_times():
    task = TASKS["fsdp_train_step"]
    case = next(case for case in task.cases if case.sizes.steps == 3)
    inputs = task.draw(np.random.default_rng(1), case)
    found = task.oracle(inputs, case)["values"]
    one, shards = case.but(steps=1), inputs["shards"]
    for i in range(3):
        batch = {name: rows[i : i + 1] for name, rows in inputs["batch"].items()}
        after = task.oracle({**inputs, "shards": shards, "batch": batch}, one)["values"]
        assert after["loss"][0, 0] == pytest.approx(found["loss"][0, i], rel=1e-5)
        shards = jax.tree.map(lambda old, new: new if new.shape == old.shape else new[0], shards, after["shards"])
    for found_leaf, leaf in zip(jax.tree.leaves(found["shards"]), jax.tree.leaves(shards), strict=True):
        np.testing.assert_allclose(found_leaf if found_leaf.shape == leaf.shape else found_leaf[0], leaf, atol=2e-6)


@pytest.mark.parametrize("name", ["fsdp_train_step", "hybrid_shard_step"])
def test_an_update_is_large_enough_to_read_the_gradient_off_it(name):
    for case in TASKS[name].cases:
        inputs = TASKS[name].draw(np.random.default_rng(2), case)
        found = TASKS[name].oracle(inputs, case)
        pairs = zip(jax.tree.leaves(found["gradients"]), jax.tree.leaves(inputs["shards"]), strict=True)
        for gradient, before in pairs:
            assert inputs["learning_rate"] * np.max(np.abs(gradient)) > 0.005 * np.max(np.abs(before)), case.name


def test_limits_on_time_and_temporaries_separate_the_step_from_naive_ones_by_more_than_15_percent():
    known = references("fsdp")["fsdp_train_step"]
    assert known["seconds"]["naive"] > 1.15 * SLOWER * known["seconds"]["reference"]
    assert known["temporaries"]["naive"] > 1.15 * 1.15 * known["temporaries"]["reference"]
    task = TASKS["fsdp_train_step"]
    assert task.at_scale
    program = trace(task, WRONG["prefetches_forward_only"], task.at_scale[0], lambda _: None)
    half = timeline(parse(program), machine(task.machine)).seconds
    assert half > 1.15 * known["seconds"]["reference"] and half > 1.04 * SLOWER * known["seconds"]["reference"]


def test_limit_on_temporaries_separates_reference_and_naive_by_more_than_15_percent():
    known = references("fsdp")["fsdp_loss"]["temporaries"]
    assert known["naive"] > 1.15 * 1.15 * known["reference"]


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def gathers_rightly_over_public_axes(shards, specs, axis_name):
    whole = gather_params(shards, specs, axis_name)
    return whole if axis_name in PUBLIC_AXES else doubles_gradients(whole)


def loses_what_flows_back(shards, specs, batch, model, axis_name):
    return forgets_what_flows_back(lambda shards: fsdp_loss(shards, specs, batch, model, axis_name), shards)


def steps_rightly_at_public_widths(shards, specs, batch, model, axis_name, learning_rate):
    known = batch["inputs"].shape[-1] == 8
    return fsdp_train_step(shards, specs, batch, model, axis_name, learning_rate * (1 if known else 1.01))


def confuses_axes_of_unknown_names(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    after, loss = hybrid_shard_step(shards, specs, batch, model, axis_name, replica_axis, learning_rate)
    return after, loss if replica_axis in PUBLIC_AXES else 2 * loss


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("gather_params", gathers_rightly_over_public_axes),
        ("fsdp_loss", loses_what_flows_back),
        ("fsdp_train_step", steps_rightly_at_public_widths),
        ("hybrid_shard_step", confuses_axes_of_unknown_names),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("fsdp", task, function, seed=3)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")
