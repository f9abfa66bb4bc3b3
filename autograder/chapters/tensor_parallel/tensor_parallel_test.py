"""The contract of ``tensor_parallel``: the model's loss, and the layouts of the numbers drawn in ``init_dense``."""

import numpy as np
import pytest

from autograder.chapters.tensor_parallel import CONTRACT
from autograder.chapters.tensor_parallel.init import _mistakes, _scale
from autograder.contract.case_builders import model_of
from autograder.contract.task import Evidence
from course.model import full_loss

TASKS = {task.name: task for task in CONTRACT.tasks}


def test_loss_of_a_step_is_the_models():
    task, case = TASKS["tp_train_step"], TASKS["tp_train_step"].cases[0]
    inputs = task.draw(np.random.default_rng(1), case)
    loss = full_loss(model_of(case), inputs["params"], {name: rows[0] for name, rows in inputs["batch"].items()})
    assert float(loss) == pytest.approx(float(task.oracle(inputs, case)["values"]["loss"][0, 0]), rel=1e-5)


def test_first_cases_have_two_sizes_that_differ():
    assert all(task.cases[0].mesh == {"data": 2, "tensor": 4} for task in CONTRACT.tasks)


def drawn(kernel_of):
    """Evidence of an ``init_dense`` that drew these kernels: ``(split, which key, device) -> numbers``."""
    task = TASKS["init_dense"]
    case = task.cases[0]
    expected = task.oracle({}, case)["values"]
    measured = {}
    for name, tree in expected.items():
        split, which = name.rsplit("_", 1)
        kernels = [kernel_of(split, which, device) for device in range(8)]
        shape = tree["kernel"].shape
        measured[f"values/{name}/kernel"] = np.stack([k.reshape(-1)[: np.prod(shape[1:])] for k in kernels]).reshape(
            shape
        )
        measured[f"values/{name}/bias"] = tree["bias"]
    blank = dict.fromkeys(("inputs", "outputs", "costs", "memory"))
    return Evidence(case=case, measured=measured, expected={}, **blank)  # type: ignore[arg-type]


def numbers(*seed):
    size = TASKS["init_dense"].cases[0].sizes
    return np.random.default_rng(seed).standard_normal((size.d_in, size.d_out)).astype(np.float32) * size.d_in**-0.5


def test_drawn_numbers_are_judged_by_split_and_device():
    """Devices 0 to 3 are at place 0 of the data axis, and devices 4 to 7 hold copies of their parts."""
    keys = {"first": 0, "second": 1}

    def right(split, which, device):
        return numbers(keys[which], len(split), 0 if split == "whole" else device % 4)

    assert list(_mistakes(drawn(right))) == [] and _scale(drawn(right)).passed
    alike = next(_mistakes(drawn(lambda split, which, device: numbers(keys[which]))))
    assert "devices 0 and 1 along 'tensor' drew the same part" in alike
    apart = next(_mistakes(drawn(lambda split, which, device: numbers(keys[which], device % 4))))
    assert "the kernel that is not split differs between devices along 'tensor'" in apart
    copies = next(_mistakes(drawn(lambda split, which, device: numbers(keys[which], device))))
    assert "differs between devices along 'data'" in copies
    assert "two different keys" in next(_mistakes(drawn(lambda split, which, device: right(split, "first", device))))
    shifted_keys = next(
        _mistakes(drawn(lambda split, which, device: numbers(keys[which] + (split != "whole") * (device % 4))))
    )
    assert "device 1 along 'tensor' draws" in shifted_keys and "device 0 with the key of the next" in shifted_keys
    overlapping = next(
        _mistakes(drawn(lambda split, which, device: right(split, which, 0)[(split != "whole") * (device % 4) :]))
    )
    assert "devices 0 and 1 along 'tensor' drew the same part" in overlapping
    wide = _scale(drawn(lambda *args: 2 * right(*args)))
    assert not wide.passed and "times the standard deviation" in wide.message
