"""The contract of ``data_parallel``: its oracles against central differences, its limits, and what it tells people."""

import jax
import numpy as np
import pytest

from autograder.chapters.data_parallel import CONTRACT
from autograder.chapters.data_parallel.wrapping import of_leaves
from autograder.contract.task import Evidence, Judged, references
from autograder.contract.task import named as by_name
from autograder.contract.verdict import FAIL
from autograder.proof.central_differences import check
from autograder.proof.mutants import judged_unseen
from course.program import Costs, Memory
from solutions.data_parallel import fold_key_over_axes, overlapped_gradients, sync_gradients, train_step_dp

TASKS = {task.name: task for task in CONTRACT.tasks}
KEYS, SYNC = TASKS["fold_key_over_axes"], TASKS["sync_gradients"]


@pytest.mark.parametrize("place", ["data=8", "pipe=4 x tensor=2", "data=2"])
def test_gradients_of_the_oracles_equal_central_differences_of_their_losses(place):
    check(TASKS["train_step_dp"], place, "params", lambda values, _: values["losses"][0])
    check(
        TASKS["overlapped_gradients"], place, "params", lambda values, _: values, one=lambda gradient, _: gradient[-1]
    )


def test_oracle_of_the_step_is_three_steps_along_its_gradients():
    task = TASKS["train_step_dp"]
    inputs = task.draw(np.random.default_rng(0), task.cases[0])
    expected = task.oracle(inputs, task.cases[0])
    still = {**inputs, "batches": jax.tree.map(lambda a: np.repeat(a[:1], 3, 0), inputs["batches"])}
    losses = task.oracle(still, task.cases[0])["values"]["losses"]
    assert losses[0] == expected["values"]["losses"][0]
    assert losses[0] > losses[1] > losses[2], "the same batch three times: its loss falls"


def test_mean_of_sync_gradients_is_over_the_named_and_replicated_axes_alone():
    case = SYNC.cases[0]
    inputs = SYNC.draw(np.random.default_rng(0), case)
    given, expected = inputs["gradients"], SYNC.oracle(inputs, case)["values"]
    np.testing.assert_allclose(
        expected["norm"]["scale"][3, 1], given["norm"]["scale"].mean((0, 1), np.float64), rtol=1e-6
    )
    np.testing.assert_allclose(expected["up"]["bias"][2, 1], given["up"]["bias"][:, 1].mean(0, np.float64), rtol=1e-6)
    np.testing.assert_array_equal(expected["flat"], given["flat"])
    np.testing.assert_array_equal(expected["grid"], given["grid"])


def key_evidence(change, secret=True):
    case = KEYS.cases[0]
    expected = by_name(KEYS.oracle(KEYS.draw(np.random.default_rng(3), case), case))
    rng = np.random.default_rng(4)
    good = {n: np.repeat(rng.integers(0, 2**32, (4, 1, 2), np.uint32), 2, 1) for n in expected}
    change(good, expected)
    costs, memory = Costs(0, 0, 0, (), {}), Memory(0, 0, 0, 0, ())
    return Evidence(case, (), (), good, expected, costs, memory, "mine:1", secret=secret)


def test_keys_that_differ_over_the_named_axis_alone_pass():
    assert KEYS.facts(Judged([key_evidence(lambda good, _: None)], None, {}))[0].passed


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda k, e: k["values/first"].__setitem__((2, 1, 0), 5),
            "data 2, tensor 0 and data 2, tensor 1 hold different",
        ),
        (lambda k, e: k["values/first"].__setitem__(3, k["values/first"][1]), "data 3, tensor 0 hold the same key"),
        (lambda k, e: k["values/first"].__setitem__(0, e["values/first"][0]), "data 0, tensor 0 still holds the key"),
        (lambda k, e: k["values/second"].__setitem__(1, k["values/first"][2]), "the same key as this run gives"),
    ],
)
def test_wrong_keys_are_told_which_devices_and_no_number(wrong, said, secret):
    evidence = key_evidence(wrong, secret)
    fact = KEYS.facts(Judged([evidence], None, {}))[0]
    assert fact.passed is False
    assert said in fact.message
    text = f"{fact.measured_text} {fact.limit_text} {fact.message}"
    numbers = {
        str(v) for side in (evidence.measured, evidence.expected) for a in side.values() for v in a.flat if v > 9
    }
    assert not [number for number in numbers if number in text]


def test_limits_separate_reference_and_naive_by_more_than_15_percent():
    known = references("data_parallel")
    exposed = known["overlapped_gradients"]["exposed"]
    assert exposed["reference"] * 1.15 < 0.35 * exposed["naive"] < exposed["naive"] / 1.15
    temporaries = known["train_step_dp"]["temporaries"]
    assert temporaries["naive"] > 1.15 * 1.5 * temporaries["reference"]


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def folds_public_axes(key, axis_names):
    return fold_key_over_axes(key, tuple(name for name in axis_names if name in PUBLIC_AXES))


def knows_which_leaf_is_split_how(gradients, specs, axis_names):
    case = SYNC.cases[0]
    public = of_leaves(case, lambda _, spec: spec)
    turned = dict(zip(case.mesh, axis_names, strict=False))
    specs = jax.tree.map(lambda s: jax.P(*jax.tree.map(turned.get, tuple(s))), public)
    return sync_gradients(gradients, specs, axis_names)


def halves_gradients_of_unknown_widths(params, batch, model, axis_name, num_microbatches, learning_rate):
    known = params["layers"]["up"]["kernel"].shape[1] in (8, 16) if "up" in params["layers"] else False
    after, loss, gradients = train_step_dp(params, batch, model, axis_name, num_microbatches, learning_rate)
    return after, loss, gradients if known else jax.tree.map(lambda g: g / 2, gradients)


def reduces_over_public_axes_alone(params, batch, model, axis_name, num_microbatches):
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    size = jax.lax.axis_size(axis_name)
    return loss, gradients if axis_name in PUBLIC_AXES else jax.tree.map(lambda g: g * size, gradients)


def has_a_wrong_gradient_of_one_leaf(params, batch, model, axis_name, num_microbatches):
    loss, gradients = overlapped_gradients(params, batch, model, axis_name, num_microbatches)
    leaves, tree = jax.tree.flatten(gradients)
    return loss, tree.unflatten([1.01 * leaves[0], *leaves[1:]])


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("fold_key_over_axes", folds_public_axes),
        ("sync_gradients", knows_which_leaf_is_split_how),
        ("train_step_dp", halves_gradients_of_unknown_widths),
        ("overlapped_gradients", reduces_over_public_axes_alone),
        ("overlapped_gradients", has_a_wrong_gradient_of_one_leaf),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("data_parallel", task, function, seed=3)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")
