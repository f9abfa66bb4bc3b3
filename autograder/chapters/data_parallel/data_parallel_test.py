"""The contract of ``data_parallel``: what its oracles average, and messages for wrong keys."""

import jax
import numpy as np
import pytest

from autograder.chapters.data_parallel import CONTRACT
from autograder.chapters.draws import draw_masked
from autograder.contract.task import Evidence, TaskEvidence
from autograder.contract.task import named as by_name
from course.program import Costs, Memory

TASKS = {task.name: task for task in CONTRACT.tasks}
KEYS, SYNC = TASKS["fold_key_over_axes"], TASKS["sync_gradients"]


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
    gradients, expected = inputs["gradients"], SYNC.oracle(inputs, case)["values"]
    np.testing.assert_allclose(
        expected["norm"]["scale"][3, 1], gradients["norm"]["scale"].mean((0, 1), np.float64), rtol=1e-6
    )
    np.testing.assert_allclose(
        expected["up"]["bias"][2, 1], gradients["up"]["bias"][:, 1].mean(0, np.float64), rtol=1e-6
    )
    np.testing.assert_array_equal(expected["flat"], gradients["flat"])
    np.testing.assert_array_equal(expected["grid"], gradients["grid"])


@pytest.mark.parametrize(("devices", "seq"), [(8, 0), (3, 5), (2, 0), (1, 5)])
def test_devices_hold_different_numbers_of_valid_rows_and_one_of_several_has_none(devices, seq):
    sizes = TASKS["train_step_dp"].cases[0].sizes.replace(seq=seq, vocab=7)
    mask = draw_masked(np.random.default_rng(0), sizes, 8 * devices, devices)["mask"]
    counts = mask.reshape(devices, -1).sum(1)
    assert mask.shape == ((8 * devices, seq) if seq else (8 * devices,))
    assert len({*counts}) == devices and (counts.min() == 0) == (devices > 2)
    assert 0 < counts.sum() < mask.size


def key_evidence(change, secret=True):
    case = KEYS.cases[0]
    expected = by_name(KEYS.oracle(KEYS.draw(np.random.default_rng(3), case), case))
    rng = np.random.default_rng(4)
    good = {n: np.repeat(rng.integers(0, 2**32, (4, 1, 2), np.uint32), 2, 1) for n in expected}
    change(good, expected)
    costs, memory = Costs(0, 0, 0, (), {}), Memory(0, 0, 0, 0, ())
    return Evidence(case, (), (), good, expected, costs, memory, "mine:1", secret=secret)


def test_keys_that_differ_over_the_named_axis_alone_pass():
    assert KEYS.facts(TaskEvidence([key_evidence(lambda good, _: None)], None, {}))[0].passed


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize(
    ("wrong", "excerpt"),
    [
        (
            lambda k, e: k["values/first"].__setitem__((2, 1, 0), 5),
            "(data 2, tensor 0) and (data 2, tensor 1) hold different",
        ),
        (lambda k, e: k["values/first"].__setitem__(3, k["values/first"][1]), "(data 3, tensor 0) hold the same key"),
        (lambda k, e: k["values/first"].__setitem__(0, e["values/first"][0]), "(data 0, tensor 0) still holds the key"),
        (lambda k, e: k["values/second"].__setitem__(1, k["values/first"][2]), "the same key as this run gives"),
    ],
)
def test_message_for_wrong_keys_names_devices_and_no_number(wrong, excerpt, secret):
    evidence = key_evidence(wrong, secret)
    fact = KEYS.facts(TaskEvidence([evidence], None, {}))[0]
    assert fact.passed is False
    assert excerpt in fact.message
    text = f"{fact.measured_text} {fact.limit_text} {fact.message}"
    numbers = {
        str(v) for side in (evidence.measured, evidence.expected) for a in side.values() for v in a.flat if v > 9
    }
    assert not [number for number in numbers if number in text]
