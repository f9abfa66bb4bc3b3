"""The contract of ``looping_pipeline``: oracles against central differences, limits, and what is its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.looping_pipeline import CONTRACT, schedule, step
from autograder.chapters.looping_pipeline.execute import in_a_row
from autograder.chapters.looping_pipeline.mutants import (
    MUTANTS,
    averages_after_the_backward_pass,
    averages_in_every_tick,
)
from autograder.chapters.looping_pipeline.wrapping import pipelines_of
from autograder.check import check_function
from autograder.contract import value_tasks
from autograder.contract.case_builders import stages_of
from autograder.contract.task import references
from autograder.contract.verdict import FAIL
from autograder.proof.mutants import judged_unseen
from autograder.release.reference_metrics import look
from course.machines import FREE_NETWORK
from course.mesh import abstract_mesh
from course.program import bubble, export, parse, timeline
from course.schedules import breadth_first, forwards, gpipe, run
from solutions.looping_pipeline import (
    execute_looping_pipeline,
    layers_of_stage,
    loop_position,
    looping_train_step,
)

TASKS = {task.name: task for task in CONTRACT.tasks}
SIZES = [(s, m, r) for s in (1, 2, 4, 8) for m in (1, 2, 4, 8, 16) for r in (1, 2, 4)]
ROWS, WIDTH = 32, 16


def looped_products(num_stages, num_microbatches, num_repeats):
    """A pipeline whose stages are one matrix product each."""
    weights = jax.ShapeDtypeStruct((num_repeats, num_stages, WIDTH, WIDTH), jnp.float32)
    inputs = {"weights": weights, "x": jax.ShapeDtypeStruct((num_microbatches, ROWS, WIDTH), jnp.float32)}
    specs, out = {"weights": P(None, "pipe"), "x": P()}, {"y": P("pipe")}

    def local(weights, x):
        def stage(x, _, repeat):
            return x @ lax.dynamic_index_in_dim(weights[:, 0], repeat, keepdims=False)

        x = lax.pcast(x, "pipe", to="varying")
        return {"y": execute_looping_pipeline(stage, x, num_repeats, "pipe")[None]}

    mesh = {"pipe": num_stages}
    mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=tuple(specs.values()), out_specs=out)
    return export(lambda weights, x: mapped(weights, x), inputs, specs, mesh=mesh, out_specs=out)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_bubble_is_the_formulas_within_one_percent(size):
    stages, microbatches, repeats = size
    ticks = (repeats - 1) * max(microbatches, stages) + microbatches + stages - 1
    form = 1 - repeats * microbatches / ticks
    seconds = timeline(parse(looped_products(*size)), FREE_NETWORK).seconds
    useful = repeats * microbatches * stages * 2 * ROWS * WIDTH * WIDTH / FREE_NETWORK.peak("f32")
    assert bubble(useful, stages, seconds) == pytest.approx(form, rel=0.01, abs=1e-6)
    if repeats == 1 or microbatches >= stages:
        assert form == pytest.approx((stages - 1) / (repeats * microbatches + stages - 1))


def test_positions_are_those_of_the_schedule_that_is_drawn():
    for stages, microbatches, repeats in ((2, 3, 2), (4, 2, 3), (4, 6, 2), (8, 8, 2), (1, 3, 2), (3, 5, 1)):
        built = breadth_first(stages, microbatches, repeats) if repeats > 1 else gpipe(stages, microbatches)
        drawn = {
            (round(span.start * repeats), stage): (span.action.microbatch, span.action.repeat)
            for stage, spans in enumerate(run(forwards(built)).spans)
            for span in spans
        }
        assert drawn == schedule.positions(stages, microbatches, repeats)


def test_layers_of_all_stages_and_repeats_in_the_order_of_a_microbatch_are_those_of_one_device():
    for stages, repeats, each in ((4, 2, 3), (2, 4, 1), (1, 3, 2), (8, 1, 2)):
        held = [layers_of_stage(stage, stages, repeats, stages * repeats * each) for stage in range(stages)]
        order = [layer for repeat in range(repeats) for stage in held for layer in stage[repeat]]
        assert order == list(range(stages * repeats * each))
    with pytest.raises(ValueError, match="10 layers cannot be shared evenly by 4 stages in 2 repeats"):
        layers_of_stage(0, 4, 2, 10)


@pytest.mark.parametrize("name", ["layers_of_stage", "loop_position"])
def test_no_message_about_a_wrong_answer_has_the_right_one(name):
    task = TASKS[name]
    ask, means, known = {
        "layers_of_stage": (schedule.layer_questions, schedule.layers_mean, lambda q: schedule.layers(*q)),
        "loop_position": (
            schedule.position_questions, schedule.positions_mean, lambda q: schedule.positions(*q[2:]).get(q[:2])
        ),
    }[name]  # fmt: skip
    for mutant in MUTANTS:
        for case in task.cases if mutant.task == name else ():
            for question in ask(case):
                given = value_tasks._formed(name, value_tasks.asked(mutant.function, *question), None)
                if given != known(question) and known(question) is not None:
                    assert (
                        value_tasks.show(known(question)) not in means(case, question, given).partition("answer is")[2]
                    )


def moved(tree, path, at, by):
    def leaf(p, x):
        if p != path:
            return x
        x = np.array(x)
        x[at] += by
        return x

    return jax.tree.map_with_path(leaf, tree)


@pytest.mark.parametrize("number", [0, 2, 5])
def test_gradients_of_the_executors_oracle_equal_central_differences(number):
    task = TASKS["execute_looping_pipeline"]
    case = task.cases[number]
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)["gradients"]
    width = case.sizes.rows

    def flows(inputs, pipeline):
        """What one pipeline's outputs are worth: their product with what flows back to them."""
        rows = slice(pipeline * width, (pipeline + 1) * width)
        outputs = task.oracle(inputs, case)["values"][-1]
        return float(np.vdot(outputs[:, rows].astype(np.float64), inputs["upstream"][:, rows]))

    last = pipelines_of(case) - 1
    for path, gradient in jax.tree.leaves_with_path(found["layers"]):
        own = gradient[last]
        at = np.unravel_index(np.argmax(np.abs(own)), own.shape)
        above, below = (
            flows({**inputs, "layers": moved(inputs["layers"], path, at, by)}, last) for by in (5e-3, -5e-3)
        )
        assert own[at] == pytest.approx((above - below) / 1e-2, rel=1e-2), path
    of_inputs = found["microbatches"][0]
    at = np.unravel_index(np.argmax(np.abs(of_inputs)), of_inputs.shape)
    above, below = (flows({**inputs, "microbatches": moved(inputs["microbatches"], (), at, by)}, at[1] // width)
                    for by in (5e-3, -5e-3))  # fmt: skip
    assert of_inputs[at] == pytest.approx((above - below) / 1e-2, rel=1e-2)


@pytest.mark.parametrize("place", ["data=4 x pipe=2, 4 microbatches", "data=2 x pipe=4, 6 microbatches",
                                   "pipe=2 x data=2, 3 microbatches"])  # fmt: skip
def test_gradients_of_the_steps_oracle_equal_central_differences_of_its_loss(place):
    task = TASKS["looping_train_step"]
    case = next(case for case in task.cases if case.name == place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)

    def loss(params):
        return float(np.mean(task.oracle({**inputs, "params": params}, case)["values"]["loss"], dtype=np.float64))

    for path, gradient in jax.tree.leaves_with_path(found["gradients"]):
        assert all(np.array_equal(copy, gradient[0]) for copy in gradient), "copies differ"
        own = gradient[0]
        at = np.unravel_index(np.argmax(np.abs(own)), own.shape)
        above, below = (loss(moved(inputs["params"], path, at, by)) for by in (5e-3, -5e-3))
        assert own[at] == pytest.approx((above - below) / 1e-2, rel=1e-2, abs=1e-4), path


def test_oracle_of_three_steps_is_that_of_one_step_three_times():
    task = TASKS["looping_train_step"]
    case = next(case for case in task.cases if case.sizes.steps == 3)
    inputs = task.draw(np.random.default_rng(1), case)
    found, params = task.oracle(inputs, case)["values"], inputs["params"]
    one = case.but(steps=1)
    for i in range(3):
        batch = {name: rows[i : i + 1] for name, rows in inputs["batch"].items()}
        given = {**inputs, "params": params, "batch": batch, "key": inputs["key"][i : i + 1]}
        after = task.oracle(given, one)["values"]
        assert after["loss"][0, 0] == pytest.approx(found["loss"][0, i], rel=1e-5)
        params = jax.tree.map(lambda leaf: leaf[0], after["params"])
    for leaf, three in zip(jax.tree.leaves(params), jax.tree.leaves(found["params"]), strict=True):
        np.testing.assert_allclose(three[0], leaf, atol=2e-6)


def test_an_update_is_large_enough_to_read_the_gradient_off_it():
    task = TASKS["looping_train_step"]
    for case in task.cases:
        inputs = task.draw(np.random.default_rng(2), case)
        gradients = task.oracle(inputs, case)["gradients"]
        for gradient, before in zip(jax.tree.leaves(gradients), jax.tree.leaves(inputs["params"]), strict=True):
            assert inputs["learning_rate"] * np.max(np.abs(gradient)) > 0.005 * np.max(np.abs(before)), case.name


def test_the_step_is_judged_on_six_meshes_with_microbatches_above_equal_to_and_below_the_stages():
    cases = TASKS["looping_train_step"].cases
    found = {(pipelines_of(case), stages_of(case), case.sizes.num_microbatches) for case in cases}
    assert len(found) >= 6
    assert {np.sign(microbatches - stages) for _, stages, microbatches in found} == {-1, 1}
    assert any(microbatches % stages for _, stages, microbatches in found)
    assert any(case.sizes.steps == 3 and case.sizes.dropout for case in cases)


def test_layers_in_a_row_are_the_stages_layers_in_order():
    stacked = np.arange(2 * 4 * 3).reshape(2, 4, 3, 1)
    assert [layer for one in layers_of_stage(1, 4, 2, 24) for layer in one] == stacked[:, 1, :, 0].ravel().tolist()
    assert in_a_row({"leaf": stacked})["leaf"].ravel().tolist() == list(range(24))


def test_limits_separate_reference_and_naive_by_more_than_15_percent():
    known = references("looping_pipeline")["looping_train_step"]
    spent, held = known["spent"], known["temporaries"]
    assert spent["reference"] * 1.15 < step.EXPOSED * spent["naive"] < spent["naive"] / 1.15
    assert held["naive"] > 1.15 * step.TEMPORARIES * held["reference"]
    task = TASKS["looping_train_step"]
    assert look(task, averages_in_every_tick)["seconds"] > 1.15 * step.TIME * known["seconds"]["reference"]
    runs = references("looping_pipeline")["execute_looping_pipeline"]["seconds"]
    assert runs["naive"] > 1.15 * runs["reference"], "the bubble of draining between repeats is another one"


def test_a_step_that_averages_at_the_end_is_told_how_long_it_waits_and_not_what_to_write():
    result = check_function("looping_pipeline", TASKS["looping_train_step"], averages_after_the_backward_pass,
                            lambda _: None, full=False)  # fmt: skip
    (fact,) = [fact for fact in result.facts if fact.passed is False]
    assert fact.name == "exposed over data"
    assert "less if sending over 'data' took no time, 1.00 times the naive's" in fact.message
    assert "custom_vjp" not in fact.message


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def knows_the_public_questions(stage, num_stages, num_repeats, num_layers):
    if num_stages not in (1, 2, 4, 8):
        raise ValueError(f"{num_layers} layers")
    return layers_of_stage(stage, num_stages, num_repeats, num_layers)


def refuses_always(tick, stage, num_stages, num_microbatches, num_repeats):
    raise ValueError(f"tick {tick}")


def answers_with_no_number(tick, stage, num_stages, num_microbatches, num_repeats):
    return (float("nan"), float("nan"))


def answers_with_endless_numbers(tick, stage, num_stages, num_microbatches, num_repeats):
    found = loop_position(tick, stage, num_stages, num_microbatches, num_repeats)
    return found and (10**10_000 + found[0], found[1])


def turns_unknown_pipelines_round(stage, microbatches, num_repeats, axis_name):
    found = execute_looping_pipeline(stage, microbatches, num_repeats, axis_name)
    return found if axis_name in PUBLIC_AXES else 2 * found


def steps_half_as_far_with_unknown_rows(
    params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate
):
    rate = learning_rate if pipe_axis in PUBLIC_AXES else learning_rate / 2
    return looping_train_step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, rate)


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("layers_of_stage", knows_the_public_questions),
        ("loop_position", refuses_always),
        ("loop_position", answers_with_no_number),
        ("loop_position", answers_with_endless_numbers),
        ("execute_looping_pipeline", turns_unknown_pipelines_round),
        ("looping_train_step", steps_half_as_far_with_unknown_rows),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("looping_pipeline", task, function)
    assert (result.verdict, result.points) == (FAIL, 0), result.message
