"""The contract of ``tp_transformer``: the loss in float64, and masks of each part of a sequence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autograder.chapters.tp_transformer import CONTRACT
from autograder.chapters.tp_transformer.tasks import keys_of_parts
from autograder.contract.case_builders import parts_of
from autograder.proof.central_differences import case_of, check, places
from course.model import drop

TASKS = {task.name: task for task in CONTRACT.tasks}


@pytest.mark.parametrize("place", places("data=2 x model=3", "tensor=4", "tensor=8"))
def test_oracle_of_the_loss_equals_central_differences_and_sums_in_float64(place):
    task, case = TASKS["vocab_parallel_loss"], case_of(TASKS["vocab_parallel_loss"], place)
    inputs = task.draw(np.random.default_rng(0), case)
    result = task.oracle(inputs, case)
    x, head = np.float64(inputs["x"]), jax.tree.map(np.float64, inputs["params"])
    normed = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * head["norm"]["scale"]
    logits = normed @ head["out"]["kernel"] + head["out"]["bias"]
    right = np.take_along_axis(logits, inputs["targets"][..., None], -1)[..., 0]
    top = logits.max(-1)
    assert top.max() > 89 or top.min() < -104, "their exponential is not a float32 number"
    by_hand = np.log(np.exp(logits - top[..., None]).sum(-1)) + top - right
    assert result["values"].mean() == pytest.approx(by_hand.mean(), rel=1e-5)

    def loss(values, inputs):
        return inputs["upstream"] * values.reshape(-1, parts_of(case))[:, 0].sum(dtype=np.float64)

    if not case.sizes.reach:  # otherwise a small step moves logits far
        check(task, place, ("params", "x"), loss, step=5e-2, rel=2e-2)


def test_no_device_and_no_token_has_the_maximum_of_all():
    task = TASKS["vocab_parallel_loss"]
    for case in places(*(case for case in task.cases if case.sizes.reach), least=2):
        inputs, parts = task.draw(np.random.default_rng(0), case), max(2, parts_of(case))
        x, head = np.float64(inputs["x"]), jax.tree.map(np.float64, inputs["params"])
        normed = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * head["norm"]["scale"]
        logits = normed @ head["out"]["kernel"] + head["out"]["bias"]
        of_parts = logits.reshape(*x.shape[:2], parts, -1).max(-1)
        top = of_parts.max(-1)
        assert np.all((top[..., None] - of_parts).max((0, 1)) > 104), "each part is far below the maximum of a token"
        assert np.ptp(top) > 104 and np.max(top - of_parts.mean(-1)) > 89


def test_masks_differ_between_the_parts_of_a_sequence_and_are_each_parts_own():
    key, x = jax.random.key(3), jnp.ones((2, 12, 8))
    keys = keys_of_parts(key, 4)
    whole = drop(x, 0.5, keys)
    for number in range(4):
        part = slice(3 * number, 3 * number + 3)
        own = drop(x[:, part], 0.5, jax.random.fold_in(key, number))
        np.testing.assert_array_equal(whole[:, part], own)
    parts = np.split(np.asarray(whole), 4, axis=1)
    assert all(not np.array_equal(parts[0], other) for other in parts[1:])
