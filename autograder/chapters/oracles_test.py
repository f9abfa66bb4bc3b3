"""Oracles are right: their gradients match their losses, and their steps subtract them."""

from itertools import combinations
from typing import Any

import jax
import numpy as np
import pytest

from autograder.chapters.collectives.rings import CASES, MEANING
from autograder.chapters.transformer_3d.wrapping import sizes_of
from autograder.contract.case_builders import groups_of, parts_of, pipe_of, stages_of
from autograder.contract.task import Task, load
from autograder.proof.central_differences import check, places, returned, same


def task_of(name: str) -> Task:
    chapter, task = name.split(".")
    return load(chapter).task(task)


def weighted(values, inputs):
    """Each device's loss, times its cotangent."""
    return np.asarray(inputs.get("upstream", 1) * values)


def of_each_pipeline(values, inputs):
    """Like ``weighted``, for results in which every stage of a pipeline returns its loss."""
    upstream = inputs["upstream"]
    return returned(values.reshape(len(upstream), -1)[:, 0], inputs)


def of_the_last_stage(values, inputs):
    return returned(values[-1], inputs)


def last_stages_sum(values, _):
    """The sum of the pipelines' losses; all stages but the last have zeros."""
    return np.sum(values)


def of_ticks(values, inputs):
    """Results are ``[stage, tick, ...]``, and cotangents ``[tick, stage, ...]``."""
    return returned({name: np.moveaxis(value, 0, 1) for name, value in values.items()}, inputs)


def quadratic(values, inputs):
    return returned(values.astype(np.float64) ** 2 / 2, inputs)


def mean_or_own(gradient, leaf):
    """The mean for split leaves, and each device's own gradient for whole ones."""
    return gradient if gradient.shape == leaf.shape else gradient.mean(0)


def of_all_tokens(values, inputs):
    """Both losses, times their cotangents and the number of devices, whose gradients are averaged."""
    return len(values["bias"]) * np.vdot((values["balance"], values["z"]), inputs["upstream"])


SINGLE = {"step": 1e-2, "rel": 2e-2, "least": 0}
STACK = {"gradients": lambda gradients: {"params": gradients["layers"], "inputs": gradients["x"]}, **SINGLE}
SPLIT = {
    "gradients": lambda gradients: {"x": gradients["x"], "weights": {name: gradients[name] for name in ("down", "up")}},
    "step": 1e-2,
}
LAYER = ("data=2 x tensor=4", "replica=2 x model=2"), ("params", "x"), {"step": 1e-2}
PRODUCT = ("data=2 x tensor=3", "tensor=8", "tensor=2 x data=4")
BLOCK = ("data=2 x tensor=2", "tensor=4"), ("params", "x"), {}
STACKED = ("data=2 x model=3", "tensor=4"), ("params", "x"), {"step": 1e-2}
HALF = tuple(case.name for case in CASES if case.sizes.backward and case.sizes.dtype == "float16")
RINGS = tuple(case.name for case in CASES if case.sizes.backward and case.name not in HALF)
TICKS = {
    "loss": of_ticks,
    "gradients": lambda gradients: {**gradients, "arrived": np.moveaxis(gradients["arrived"], 0, 1)},
}
SHARES = {"loss": lambda shares, _: np.sum(shares), "one": lambda gradient, leaf: same(gradient, leaf)}
ADAMW = {"loss": lambda values, _: values["loss"], "one": same}  # its steps do not subtract their gradients
FINE = {"step": 1e-4, "rel": 1e-3, "least": 1e-6, "double": True}
# A router's bias has no gradient.
ROUTED = {"loss": lambda values, _: values["loss"], "one": same, **FINE}
STEP, FAR = {"loss": lambda values, _: values["loss"], "one": same}, {"step": 2e-2, "rel": 2e-2}
MERGED = {"loss": lambda values, inputs: returned({"lse": values["lse"], "out": values["out"]}, inputs)}
SQUARED = {"loss": quadratic, "step": 1e-2}
PURE = ("pipe=3 x tensor=2", "data=8", "data=2")
LOOPED = ("data=2 x pipe=3", "pipe=4", "pipe=1")
# A task, the cases (only the first, except in `make test-full`), the perturbed inputs, and how to compare them.
GRADIENTS: list[tuple[str, tuple[str, ...], str | tuple[str, ...], dict[str, Any]]] = [
    *((f"collectives.{ring}", RINGS, "x", {"step": 1.0, "rel": 1e-5, "least": 1e-6}) for ring in MEANING),
    *((f"collectives.{ring}", HALF, "x", {"step": 1.0, "rel": 2e-3, "least": 2e-3}) for ring in MEANING),
    ("single_device.mixed_precision_loss", ("2 layers", "1 layer", "width 48"), "params", {"loss": weighted, **SINGLE}),
    ("single_device.accumulate_gradients", ("8 micro", "24 micro", "1 micro"), "params", {"loss": weighted, **SINGLE}),
    ("single_device.accumulate_gradients", ("3 microbatches of tokens",), "params", {"loss": weighted, **SINGLE}),
    ("single_device.scan_layers", ("24 layers", "48 layers", "1 layer"), ("params", "inputs"), STACK),
    ("single_device.scan_layers", ("3 layers with attention",), ("params", "inputs"), STACK),
    ("single_device.remat_layers", ("3 layers", "12 layers", "8 layers"), ("params", "inputs"), STACK),
    ("single_device.chunked_attention", ("3", "8", "1"), ("q", "k", "v"), {"step": 1e-3, "least": 0}),
    ("data_parallel.overlapped_gradients", PURE, "params", SHARES),
    ("data_parallel.train_step_dp", PURE, "params", {"loss": lambda values, _: values["losses"][0]}),
    ("fsdp.fsdp_loss", ("data=8", "data=2"), "shards", {"loss": weighted, "one": mean_or_own}),
    ("tensor_parallel.column_parallel_dense", *LAYER),
    ("tensor_parallel.row_parallel_dense", *LAYER),
    ("tensor_parallel.tp_mlp", *LAYER),
    ("tensor_parallel.tp_attention", *LAYER),
    ("async_tensor_parallel.ring_gather_matmul", PRODUCT, ("kernel", "x"), {"step": 1e-2}),
    ("async_tensor_parallel.matmul_ring_scatter", PRODUCT, ("kernel", "x"), {"step": 1e-2}),
    ("async_tensor_parallel.async_tp_mlp", PRODUCT, ("params", "x"), {"loss": quadratic, "step": 1e-2}),
    ("tp_transformer.tp_transformer_block", *BLOCK),
    ("tp_transformer.parallel_transformer_block", *BLOCK),
    ("tp_transformer.vocab_parallel_embed", ("data=2 x model=2", "tensor=4"), "params", {}),
    *((f"sequence_parallel.{name}", *STACKED) for name in ("sp_block", "selective_recompute")),
    ("sequence_parallel.ulysses_attention", ("tensor=8", "data=2 x model=3"), ("q", "k", "v"), {"step": 1e-2}),
    ("context_parallel.merge_attention", ("scores near zero", "scores near 90"), "partials", MERGED),
    (
        "context_parallel.ring_attention",
        ("data=2 x context=3", "context=8", "model=2"),
        ("q", "k", "v"),
        SQUARED | FINE,
    ),
    ("context_parallel.cp_transformer_step", ("data=2 x context=2", "data=1 x context=8"), "params", {**STEP, **FAR}),
    (
        "expert_parallel.balancing_loss",
        ("data=2 x expert=4", "pipe=3", "expert=5"),
        "logits",
        {"loss": of_all_tokens} | FINE,
    ),
    ("expert_parallel.dispatch", ("6 experts", "one choice", "all of 3"), "x", {}),
    ("expert_parallel.combine", ("6 experts", "one choice", "all of 3"), ("y", "gates"), {}),
    ("expert_parallel.moe_layer", ("expert=3 x data=2", "pipe=3", "expert=1"), ("params", "x"), FINE),
    ("pipeline.pipeline_tick", ("pipe=4", "pipe=1"), ("weights", "arrived", "microbatches"), TICKS),
    ("pipeline.execute_pipeline", ("data=2", "pipe=4"), ("weights", "microbatches"), {"loss": of_the_last_stage}),
    ("pipeline.pipeline_loss", ("data=2 x pipe=3", "pipe=4"), "params", {"loss": of_each_pipeline}),
    ("looping_pipeline.execute_looping_pipeline", LOOPED, ("layers", "microbatches"), {"loss": of_the_last_stage}),
    ("schedules.split_backward", ("gelu", "tanh"), ("weights", "x"), SPLIT),
    ("schedules.execute_schedule", ("data=2 x stage=3", "pipe=4", "pipe=1"), "weights", {"loss": last_stages_sum}),
    ("fsdp.fsdp_train_step", ("data=8", "data=2"), "shards", STEP),
    ("fsdp.hybrid_shard_step", ("replica=2 x data=4", "replica=4 x data=1"), "shards", STEP),
    ("zero.zero1_step", ("data=8", "node=4"), "params", ADAMW),
    ("zero.zero2_step", ("data=1", "node=4"), "params", ADAMW),
    ("tensor_parallel.tp_train_step", ("data=2 x tensor=4", "data=1 x tensor=1"), "params", STEP),
    ("tp_transformer.tp_transformer_step", ("data=2 x tensor=2", "data=2 x tensor=4"), "params", {**STEP, **FAR}),
    ("expert_parallel.moe_step", ("replica=3", "data=2 x expert=4", "data=1 x expert=8"), "params", ROUTED),
    ("pipeline.pipeline_train_step", ("data=2 x pipe=4, 6",), "params", STEP),
    ("looping_pipeline.looping_train_step", ("data=2 x pipe=3, 1", "pipe=2 x", "data=4 x pipe=2, 4"), "params", STEP),
]
# Steps of SGD whose oracle has copies of every leaf, and the input that they change.
STEPS = {
    name: wrt
    for name, _, wrt, comparison in GRADIENTS
    if isinstance(wrt, str) and comparison.get("loss") is STEP["loss"]
}


@pytest.mark.parametrize(
    ("name", "place", "wrt", "comparison"),
    [(name, place, *rest) for name, cases, *rest in GRADIENTS for place in places(*cases)],
)
def test_gradients_equal_central_differences_leaf_by_leaf(name, place, wrt, comparison):
    check(task_of(name), place, wrt, **comparison)


@pytest.mark.parametrize(("name", "params"), STEPS.items())
def test_a_step_subtracts_its_gradient_which_is_large_enough_to_see_and_the_same_on_every_holder(name, params):
    task = task_of(name)
    for case in places(*sorted(task.cases, key=lambda case: -case.sizes.steps), least=2):
        inputs = task.draw(np.random.default_rng(2), case)
        expected, rate = task.oracle(inputs, case), inputs["learning_rate"]
        trees = (inputs[params], expected["gradients"], expected["values"][params])
        for leaf, gradients, after in zip(*map(jax.tree.leaves, trees), strict=True):
            gradient = same(gradients, leaf)
            np.testing.assert_allclose(same(after, leaf), leaf - rate * gradient, rtol=0, atol=2e-6, err_msg=case.name)
            assert rate * np.max(np.abs(gradient)) > 0.005 * np.max(np.abs(leaf)), case.name


@pytest.mark.parametrize("name", [name for name in STEPS if any(c.sizes.steps == 3 for c in task_of(name).cases)])
def test_three_steps_are_one_step_three_times(name):
    task, params = task_of(name), STEPS[name]
    case = next(case for case in task.cases if case.sizes.steps == 3)
    inputs = task.draw(np.random.default_rng(1), case)
    per_step = [key for key in ("batch", "key") if key in inputs and jax.tree.leaves(inputs[key])[0].ndim > 1]
    if "key" in inputs and "key" not in per_step:  # A step's key depends on its number, which is 0 here.
        case = case.with_sizes(dropout=0.0)
    expected, tree = task.oracle(inputs, case)["values"], inputs[params]
    for i in range(3):
        step_inputs = jax.tree.map(lambda rows, i=i: rows[i : i + 1], {key: inputs[key] for key in per_step})
        after = task.oracle({**inputs, **step_inputs, params: tree}, case.with_sizes(steps=1))["values"]
        assert after["loss"].ravel()[0] == pytest.approx(expected["loss"].reshape(-1, 3)[0, i], rel=1e-5)
        tree = jax.tree.map(same, after[params], tree)
    for leaf, three in zip(jax.tree.leaves(tree), jax.tree.leaves(expected[params]), strict=True):
        np.testing.assert_allclose(same(three, leaf), leaf, atol=2e-6)


def two_axes(case):
    return groups_of(case), parts_of(case)


TWO_AXES = {(1, 8), (2, 4), (4, 2), (8, 1), (1, 1), (2, 2)}
THREE_AXES = {(2, 2, 2), (1, 2, 4), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)}


@pytest.mark.parametrize(
    ("name", "sizes_of", "meshes"),
    [
        ("tensor_parallel.tp_train_step", two_axes, TWO_AXES - {(2, 2)} | {(2, 3)}),
        ("tp_transformer.tp_transformer_step", two_axes, TWO_AXES - {(4, 2)} | {(2, 3)}),
        ("transformer_3d.train_step_3d", sizes_of, THREE_AXES),
    ],
)
def test_steps_are_judged_on_the_six_meshes(name, sizes_of, meshes):
    assert {sizes_of(case) for case in task_of(name).cases} == meshes


@pytest.mark.parametrize("name", ["pipeline.pipeline_train_step", "looping_pipeline.looping_train_step"])
def test_steps_are_judged_with_microbatches_above_and_below_the_stages_and_no_multiple_of_them(name):
    cases = task_of(name).cases
    counts = {(stages_of(case), case.sizes.num_microbatches) for case in cases}
    assert len({(*case.mesh.items(), case.sizes.num_microbatches) for case in cases}) >= 6
    assert any(count > stages and count % stages for stages, count in counts)
    assert any(1 < count < stages for stages, count in counts)


def several_layers(case):
    """Select cases whose stages have several layers in each repeat; learners are not given such models."""
    return getattr(case.sizes, "layers_per_stage", 0) > 1 or getattr(case.sizes, "num_layers", 99) > stages_of(case)


CONDITIONS = {
    "dropout": lambda case: getattr(case.sizes, "dropout", 1) > 0,
    "several layers": several_layers,
    "fewer microbatches than stages": lambda case: case.sizes.num_microbatches < stages_of(case),
    "one microbatch": lambda case: case.sizes.num_microbatches == 1,
    "several pipelines": lambda case: groups_of(case, pipe_of) > 1,
    "an odd number of stages": lambda case: stages_of(case) > 1 and stages_of(case) % 2,
}


@pytest.mark.parametrize(
    "name",
    [
        "pipeline.execute_pipeline",
        "pipeline.pipeline_loss",
        "pipeline.pipeline_train_step",
        "looping_pipeline.execute_looping_pipeline",
        "looping_pipeline.looping_train_step",
    ],
)
def test_any_two_conditions_of_a_pipeline_meet_in_a_case(name):
    for one, other in combinations(CONDITIONS, 2):
        cases = [case.name for case in task_of(name).cases if CONDITIONS[one](case) and CONDITIONS[other](case)]
        assert cases, f"{one}, {other}"


OPTIONS = ("rings", "parallel", "bfloat16", "dropout", "remat")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("transformer_3d.forward_3d", OPTIONS),
        ("tp_transformer.tp_transformer_step", ("parallel", "dropout")),
        ("pipeline.pipeline_train_step", ("dropout",)),
        ("looping_pipeline.looping_train_step", ("dropout",)),
    ],
)
def test_cases_have_every_option(name, options):
    for option in options:
        assert {bool(getattr(case.sizes, option)) for case in task_of(name).cases} == {False, True}, option
    assert name == "transformer_3d.forward_3d" or any(case.sizes.steps == 3 for case in task_of(name).cases)
