"""The contract of ``pipeline``: oracles against central differences, bubbles and memory against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.pipeline import CONTRACT
from autograder.chapters.pipeline.model import FASTER, most_bytes
from autograder.chapters.pipeline.mutants import keeps_activations
from autograder.chapters.pipeline.schedule import stage_seconds, ticks_of
from autograder.contract.case_builders import stages_of
from autograder.contract.task import Case, references, trace
from autograder.contract.verdict import FAIL
from autograder.proof.mutants import doubles_gradients, forgets_what_flows_back, judged_unseen
from course.machines import machine
from course.mesh import abstract_mesh, as_varying
from course.program import ProgramError, bubble, costs, export, memory, parse, timeline
from solutions.pipeline import (
    execute_pipeline,
    pipeline_loss,
    pipeline_tick,
    pipeline_train_step,
    split_microbatches,
)

TASKS = {task.name: task for task in CONTRACT.tasks}
FREE = machine("free network")
BUBBLES = [(s, m) for s in (1, 2, 4, 8) for m in (1, 2, 4, 8, 16)]


def nowhere(_):
    return None


def case_of(name, place):
    return next(case for case in TASKS[name].cases if case.name.startswith(place))


def moved(tree, path, leaf):
    return jax.tree.map_with_path(lambda p, x: leaf if p == path else x, tree)


def agrees(gradient, leaf, along, *, by=5e-3, rel=1e-2):
    """The largest element of a gradient is the difference of ``along(leaf)`` to both sides."""
    at = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
    step = np.zeros_like(leaf)
    step[at] = by
    difference = (along(leaf + step) - along(leaf - step)) / (2 * by)
    assert gradient[at] == pytest.approx(difference, rel=rel, abs=1e-4)


@pytest.mark.parametrize("place", ["pipe=4", "pipe=1"])
def test_oracle_of_a_tick_equals_central_differences(place):
    task, case = TASKS["pipeline_tick"], case_of("pipeline_tick", place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)["gradients"]
    upstream = jax.tree.map(lambda a: np.moveaxis(a, 1, 0), inputs["upstream"])

    def along(name):
        def scalar(leaf):
            values = task.oracle({**inputs, name: leaf}, case)["values"]
            return sum(float(np.vdot(values[k], upstream[k])) for k in values)

        return scalar

    agrees(found["weights"], inputs["weights"], along("weights"))
    agrees(np.moveaxis(found["arrived"], 0, 1), inputs["arrived"], along("arrived"))
    agrees(found["microbatches"].sum(0), inputs["microbatches"], along("microbatches"))


@pytest.mark.parametrize("place", ["pipe=4", "data=2"])
def test_oracle_of_execute_pipeline_equals_central_differences(place):
    task, case = TASKS["execute_pipeline"], case_of("execute_pipeline", place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)["gradients"]

    def along(name):
        return lambda leaf: float(np.vdot(task.oracle({**inputs, name: leaf}, case)["values"][-1], inputs["upstream"]))

    stages = stages_of(case)
    weights = found["weights"].reshape(-1, stages, *found["weights"].shape[1:]).sum(0)
    agrees(weights, inputs["weights"], along("weights"))
    assert not found["microbatches"][1:].any()
    agrees(found["microbatches"][0], inputs["microbatches"], along("microbatches"))


@pytest.mark.parametrize("place", ["pipe=4", "data=2 x pipe=2"])
def test_oracle_of_the_loss_equals_central_differences_leaf_by_leaf(place):
    task, case = TASKS["pipeline_loss"], case_of("pipeline_loss", place)
    inputs = task.draw(np.random.default_rng(0), case)
    gradients = dict(jax.tree.leaves_with_path(task.oracle(inputs, case)["gradients"]))
    for path, leaf in jax.tree.leaves_with_path(inputs["params"]):

        def along(changed, path=path):
            found = task.oracle({**inputs, "params": moved(inputs["params"], path, changed)}, case)
            return float(
                np.vdot(found["values"].reshape(-1, stages_of(case))[:, 0].astype(np.float64), inputs["upstream"])
            )

        agrees(gradients[path].sum(0), leaf, along)


def test_oracle_of_a_step_equals_central_differences_of_its_loss_and_its_copies_are_equal():
    task, case = TASKS["pipeline_train_step"], case_of("pipeline_train_step", "data=2 x pipe=4, 6")
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

        agrees(gradient, leaf, along)


def test_oracle_of_three_steps_is_that_of_one_step_three_times():
    task, case = TASKS["pipeline_train_step"], case_of("pipeline_train_step", "data=1 x pipe=8")
    assert case.sizes.steps == 3
    inputs = task.draw(np.random.default_rng(1), case)
    found = task.oracle(inputs, case)["values"]
    one, params, key = case.but(steps=1), inputs["params"], inputs["key"]
    for i in range(3):
        own = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), i)))
        batch = {name: rows[i : i + 1] for name, rows in inputs["batch"].items()}
        loss, params = _step_with(one, params, batch, own, inputs["learning_rate"])
        assert loss == pytest.approx(found["loss"][0, i], rel=1e-5)
    for leaf, copies in zip(jax.tree.leaves(params), jax.tree.leaves(found["params"]), strict=True):
        np.testing.assert_allclose(copies[0], leaf, atol=2e-6)


def _step_with(case, params, batch, key, rate):
    """A step on one device with this very key, written apart from the oracle."""
    from autograder.contract.case_builders import model_of
    from course.model import full_loss

    model, parts = model_of(case), split_microbatches({k: v[0] for k, v in batch.items()}, case.sizes.num_microbatches)
    group = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), 0)

    def loss_of(params):
        numbers = jnp.arange(case.sizes.num_microbatches)
        one = lambda part, m: full_loss(model, params, part, jax.random.fold_in(group, m))  # noqa: E731
        return jax.vmap(one)(parts, numbers).mean()

    loss, gradients = jax.jit(jax.value_and_grad(loss_of))(params)
    return float(loss), jax.tree.map(lambda p, g: np.asarray(p - rate * g), params, gradients)


def test_steps_are_judged_on_six_meshes_with_microbatches_that_are_no_multiple_of_stages():
    found = {(*case.mesh.items(), case.sizes.num_microbatches) for case in TASKS["pipeline_train_step"].cases}
    assert len(found) >= 6
    cases = TASKS["pipeline_train_step"].cases
    assert any(c.sizes.num_microbatches % stages_of(c) and c.sizes.num_microbatches > stages_of(c) for c in cases)
    assert any(c.sizes.num_microbatches < stages_of(c) for c in cases)
    assert any(c.sizes.dropout for c in cases) and any(c.sizes.steps == 3 for c in cases)


def forward(stages, microbatches, stage_for=lambda stage, count: stage):
    """A forward pass at the size that bubbles are judged at; ``stage_for`` wraps a stage."""
    task = TASKS["execute_pipeline"]
    assert task.at_scale
    case = Case("", {"pipe": stages}, task.at_scale[0].sizes.but(num_microbatches=microbatches))

    def run(stage, blocks, axis_name):
        return execute_pipeline(stage_for(stage, microbatches), blocks, axis_name)

    return case, parse(trace(task, run, case, nowhere))


def skipping(stage, count):
    def only_real_work(x, microbatch):
        busy = (microbatch >= 0) & (microbatch < count)
        return lax.cond(busy, lambda x: stage(x, microbatch), lambda x: x, x)

    return only_real_work


@pytest.mark.parametrize(("stages", "microbatches"), BUBBLES)
def test_bubble_is_that_of_the_formula_within_one_percent(stages, microbatches):
    case, module = forward(stages, microbatches)
    useful = stages * microbatches * stage_seconds(case)
    form = (stages - 1) / (microbatches + stages - 1)
    assert ticks_of(case) == microbatches + stages - 1
    assert bubble(useful, stages, timeline(module, FREE).seconds) == pytest.approx(form, rel=0.01, abs=1e-6)


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 2), (8, 8)])
def test_idle_stages_that_skip_take_as_long_and_compute_less(stages, microbatches):
    case, masked = forward(stages, microbatches)
    _, idle = forward(stages, microbatches, skipping)
    assert timeline(idle, FREE).seconds == pytest.approx(timeline(masked, FREE).seconds)
    tick = stage_seconds(case) * 1e12
    assert costs(masked).flops == pytest.approx((microbatches + stages - 1) * tick)
    assert costs(idle).flops == pytest.approx(microbatches * tick)


def test_a_tick_has_one_permute_and_activations_are_never_gathered():
    _, module = forward(8, 5)
    kinds = {(c.kind, c.count) for c in costs(module).collectives}
    assert kinds == {("collective_permute", 12)}


def test_temporaries_grow_by_three_blocks_a_microbatch_and_stay_below_the_closed_form():
    task = TASKS["pipeline_train_step"]
    assert task.at_scale
    held = {}
    for count in (8, 32):
        case = task.at_scale[0].but(num_microbatches=count)
        program = trace(task, pipeline_train_step, case, nowhere)
        held[count] = memory(parse(program), program).temporaries
        assert 0.85 * most_bytes(case) < held[count] <= most_bytes(case)
    block = 4 * task.at_scale[0].sizes.rows * task.at_scale[0].sizes.width
    assert held[32] - held[8] == pytest.approx(3 * 24 * block, rel=0.01)


def test_without_recomputation_every_tick_keeps_what_its_layers_keep():
    task = TASKS["pipeline_train_step"]
    assert task.at_scale
    case = task.at_scale[0]
    program = trace(task, keeps_activations, case, nowhere)
    sizes, block = case.sizes, 4 * case.sizes.rows * case.sizes.width
    layers, inner = sizes.num_layers // 4, 4 * sizes.rows * sizes.hidden
    assert memory(parse(program), program).temporaries > ticks_of(case) * layers * (6 * inner + 2 * block)
    assert references("pipeline")["pipeline_train_step"]["temporaries"]["naive"] > 1.15 * most_bytes(case)


def test_a_loss_in_parts_is_faster_than_one_on_every_stage_by_more_than_the_limit():
    known = references("pipeline")["pipeline_loss"]["seconds"]
    assert known["reference"] < FASTER * known["naive"]
    assert known["naive"] > 1.15 * known["reference"]


def test_uneven_layers_and_batches_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="10 rows cannot be split into 4 equal microbatches"):
        split_microbatches({"inputs": np.zeros((10, 2))}, 4)


def test_a_replicated_parameter_inside_a_branch_is_found_before_it_hangs():
    """Its gradient is reduced where it is used, by the last stage alone: the others never come."""
    mesh = {"pipe": 4}

    def local(w, x):
        last = lax.axis_index("pipe") == 3

        def loss(w):
            value = lax.cond(last, lambda x: jnp.sum((x * w) ** 2), lambda x: jnp.sum(0 * x), x)
            return lax.psum(value, "pipe")

        return jax.grad(loss)(w)

    def program(w, x):
        return {"g": jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=(P(), P("pipe")), out_specs=P())(w, x)}

    inputs = {name: jax.ShapeDtypeStruct((8,), np.float32) for name in ("w", "x")}
    inputs["w"] = jax.ShapeDtypeStruct((2,), np.float32)
    found = export(program, inputs, {"w": P(), "x": P("pipe")}, mesh=mesh, out_specs={"g": P()})
    with pytest.raises(ProgramError, match="wait for each other forever"):
        costs(parse(found))


def test_a_tick_of_a_single_stage_sends_nothing():
    def local(x):
        y, sent = pipeline_tick(lambda x, m: 2 * x, as_varying(x, "pipe")[None], x, jnp.int32(0), "pipe")
        return {"y": y, "sent": sent}

    def program(x):
        return jax.shard_map(local, mesh=abstract_mesh({"pipe": 1}), in_specs=P("pipe"), out_specs=P("pipe"))(x)

    inputs, specs = {"x": jax.ShapeDtypeStruct((4,), np.float32)}, {"y": P("pipe"), "sent": P("pipe")}
    found = export(program, inputs, {"x": P("pipe")}, mesh={"pipe": 1}, out_specs=specs)
    assert costs(parse(found)).collectives == ()


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def splits_public_batches(batch, num_microbatches):
    parts = split_microbatches(batch, num_microbatches)
    public = batch["inputs"].shape[1] == 5
    return parts if public else jax.tree.map(lambda leaf: leaf[::-1], parts)


def ticks_on_public_axes(stage, microbatches, arrived, tick, axis_name):
    y, sent = pipeline_tick(stage, microbatches, arrived, tick, axis_name)
    return y, sent if axis_name in PUBLIC_AXES else doubles_gradients(sent)


def passes_public_microbatches(stage, microbatches, axis_name):
    known = len(microbatches) in {case.sizes.num_microbatches for case in TASKS["execute_pipeline"].cases}
    found = execute_pipeline(stage, microbatches, axis_name)
    return found if known and axis_name in PUBLIC_AXES else doubles_gradients(found)


def loses_what_flows_back(params, batch, key, model, num_microbatches, axis_name):
    def loss_of(params):
        return pipeline_loss(params, batch, key, model, num_microbatches, axis_name)

    return forgets_what_flows_back(loss_of, params)


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("split_microbatches", splits_public_batches),
        ("pipeline_tick", ticks_on_public_axes),
        ("execute_pipeline", passes_public_microbatches),
        ("pipeline_loss", loses_what_flows_back),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("pipeline", task, function, seed=3)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")
