"""The contract of ``tensor_parallel``: oracles against central differences, the limit's margin, the classic mistake."""

import jax
import numpy as np
import pytest

from autograder.chapters.tensor_parallel import CONTRACT
from autograder.chapters.tensor_parallel.alternatives import ALTERNATIVES
from autograder.chapters.tensor_parallel.init import _mistakes, _scale
from autograder.chapters.tensor_parallel.mutants import MUTANTS
from autograder.chapters.tensor_parallel.tasks import SLOWER
from autograder.contract.case_builders import groups_of, model_of, parts_of
from autograder.contract.task import Evidence, references, trace
from autograder.contract.verdict import FAIL
from autograder.proof.mutants import judged, judged_unseen
from autograder.release.reference_metrics import look
from course.model import full_loss
from course.program import costs, parse
from solutions.tensor_parallel import column_parallel_dense, init_dense, tp_mlp, tp_train_step

TASKS = {task.name: task for task in CONTRACT.tasks}
LAYERS = ("column_parallel_dense", "row_parallel_dense", "tp_mlp", "tp_attention")


def agrees(gradient, leaf, along, *, by=1e-2, rel=1e-2):
    """The largest element of a gradient is the difference of ``along(leaf)`` to both sides."""
    at = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
    step = np.zeros_like(leaf)
    step[at] = by
    difference = (along(leaf + step) - along(leaf - step)) / (2 * by)
    assert gradient[at] == pytest.approx(difference, rel=rel, abs=1e-4)


def moved(tree, path, leaf):
    return jax.tree.map_with_path(lambda p, x: leaf if p == path else x, tree)


@pytest.mark.parametrize("place", ["data=2 x tensor=4", "replica=2 x model=2"])
@pytest.mark.parametrize("name", LAYERS)
def test_oracle_of_a_layer_equals_central_differences_leaf_by_leaf(name, place):
    task = TASKS[name]
    case = next(case for case in task.cases if case.name.startswith(place))
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)["gradients"]

    def scalar(inputs):
        return float(np.vdot(task.oracle(inputs, case)["values"].astype(np.float64), inputs["upstream"]))

    agrees(found["x"], inputs["x"], lambda x: scalar({**inputs, "x": x}))
    gradients = dict(jax.tree.leaves_with_path(found["params"]))
    for path, leaf in jax.tree.leaves_with_path(inputs["params"]):

        def along(changed, path=path):
            return scalar({**inputs, "params": moved(inputs["params"], path, changed)})

        # The oracle has each place's gradient by itself: a change to the leaf meets the rows of all of them.
        size = groups_of(case)
        agrees(gradients[path].reshape(size, *leaf.shape).sum(0), leaf, along)


@pytest.mark.parametrize("place", ["data=2 x tensor=4", "data=1 x tensor=1"])
def test_oracle_of_a_step_equals_central_differences_of_its_loss_and_its_copies_are_equal(place):
    task = TASKS["tp_train_step"]
    case = next(case for case in task.cases if case.name == place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)
    gradients, after = (dict(jax.tree.leaves_with_path(t)) for t in (found["gradients"], found["values"]["params"]))
    for path, leaf in jax.tree.leaves_with_path(inputs["params"]):
        for copies in (gradients[path], after[path]):
            assert all(np.array_equal(copy, copies[0]) for copy in copies)
        gradient = gradients[path][0]
        np.testing.assert_allclose(after[path][0], leaf - inputs["learning_rate"] * gradient, rtol=0, atol=1e-6)
        assert inputs["learning_rate"] * np.max(np.abs(gradient)) > 0.005 * np.max(np.abs(leaf)), "too small to see"

        def along(changed, path=path):
            held = task.oracle({**inputs, "params": moved(inputs["params"], path, changed)}, case)
            return float(held["values"]["loss"].astype(np.float64).mean())

        agrees(gradient, leaf, along, by=5e-3)


def test_oracle_of_three_steps_is_that_of_one_step_three_times():
    task = TASKS["tp_train_step"]
    case = next(case for case in task.cases if case.sizes.steps == 3)
    inputs = task.draw(np.random.default_rng(1), case)
    found, params = task.oracle(inputs, case)["values"], inputs["params"]
    one, model = case.but(steps=1), model_of(case)
    for i in range(3):
        batch = {name: rows[i : i + 1] for name, rows in inputs["batch"].items()}
        loss = full_loss(model, params, {name: rows[0] for name, rows in batch.items()})
        after = task.oracle({**inputs, "params": params, "batch": batch}, one)["values"]
        assert float(loss) == pytest.approx(float(found["loss"][0, i]), rel=1e-5)
        params = jax.tree.map(lambda copies: copies[0], after["params"])
    for leaf, copies in zip(jax.tree.leaves(params), jax.tree.leaves(found["params"]), strict=True):
        np.testing.assert_allclose(copies[0], leaf, atol=2e-6)


def test_steps_are_judged_on_the_six_meshes():
    shapes = {(groups_of(case), parts_of(case)) for case in TASKS["tp_train_step"].cases}
    assert shapes == {(1, 8), (2, 4), (4, 2), (8, 1), (1, 1), (2, 2)}
    assert all(task.cases[0].mesh == {"data": 2, "tensor": 4} for task in CONTRACT.tasks), "two sizes that differ"


def test_the_classic_is_told_by_leaf_factor_and_axis():
    (classic,) = [m for m in MUTANTS if m.name == "leaves_split_leaves_summed"]
    (fact,) = [fact for fact in judged("tensor_parallel", classic, full=False).facts if fact.name == "gradients"]
    assert "leaf layers/down/kernel on mesh data=2 x tensor=4" in fact.message
    assert "4 times too large, and axis 'tensor' has that size" in fact.message
    assert "layers/down/bias" not in fact.message


def test_limit_on_time_separates_right_answers_from_naive_ones_by_more_than_15_percent():
    known = references("tensor_parallel")["tp_mlp"]["seconds"]
    assert known["naive"] > 1.15 * SLOWER * known["reference"]
    slowest = max(look(TASKS["tp_mlp"], other)["seconds"] for other in ALTERNATIVES["tp_mlp"])
    assert slowest < 0.95 * SLOWER * known["reference"]


def test_what_travels_is_the_smallest_array():
    task = TASKS["tp_mlp"]
    assert task.at_scale
    case = task.at_scale[0]
    sizes = case.sizes
    sent = costs(parse(trace(task, tp_mlp, case, lambda _: None))).collectives
    rows = 4 * sizes.rows * sizes.width
    assert rows < min(4 * sizes.rows * sizes.hidden, 4 * sizes.width * sizes.hidden)
    assert sum(c.total_bytes for c in sent) == pytest.approx(4 * 7 / 8 * rows)


def drawn(kernel_of):
    """Evidence of an ``init_dense`` that gave these kernels: ``(split, which key, device) -> numbers``."""
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
    return np.random.default_rng(seed).standard_normal(64 * 96).astype(np.float32) / 8


def test_numbers_that_were_drawn_are_judged_by_who_should_hold_what():
    """Devices 0 to 3 stand at place 0 of the data axis, and devices 4 to 7 hold copies of theirs."""
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
    wide = _scale(drawn(lambda *where: 2 * right(*where)))
    assert not wide.passed and "times the standard deviation" in wide.message


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def doubles_over_unknown_axes(params, x, axis_name):
    return (1 if axis_name in PUBLIC_AXES else 2) * column_parallel_dense(params, x, axis_name)


def draws_alike_over_unknown_axes(key, d_in, d_out, axis_name, split):
    parts = init_dense(key, d_in, d_out, axis_name, split)
    if axis_name in PUBLIC_AXES or split is None:
        return parts
    return {**parts, "kernel": jax.lax.pmean(parts["kernel"], axis_name)}


def supposes_that_ones_flow_back(params, x, axis_name):
    def plain(params, x):
        return tp_mlp(params, x, axis_name)

    layers = jax.custom_vjp(plain)
    layers.defvjp(lambda *given: (plain(*given), given), lambda kept, g: jax.vjp(plain, *kept)[1](g * 0 + 1))
    return layers(params, x)


def steps_half_as_far_with_unknown_widths(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    rate = learning_rate if batch["inputs"].shape[-1] == 6 else learning_rate / 2
    return tp_train_step(params, specs, batch, model, data_axis, tensor_axis, rate)


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("column_parallel_dense", doubles_over_unknown_axes),
        ("init_dense", draws_alike_over_unknown_axes),
        ("tp_mlp", supposes_that_ones_flow_back),
        ("tp_train_step", steps_half_as_far_with_unknown_widths),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("tensor_parallel", task, function)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")
