"""The contract of ``looping_pipeline``: its bubble, its schedule, and messages for wrong answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.looping_pipeline import CONTRACT, schedule
from autograder.chapters.looping_pipeline.mutants import MUTANTS
from autograder.chapters.looping_pipeline.tasks import in_a_row
from autograder.contract import value_tasks
from autograder.proof.central_differences import places
from course.machines import FREE_NETWORK
from course.mesh import abstract_mesh
from course.program import bubble, export, parse, timeline
from course.schedules import breadth_first, forwards, gpipe, run
from solutions.looping_pipeline import execute_looping_pipeline, layers_of_stage

TASKS = {task.name: task for task in CONTRACT.tasks}
SIZES = [(s, m, r) for r in (2, 1, 4) for s in (1, 2, 4, 8) for m in (1, 2, 4, 8, 16)]
ROWS, WIDTH = 32, 16


def looped_products(num_stages, num_microbatches, num_repeats):
    """A pipeline whose stages are one matmul each."""
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


@pytest.mark.parametrize("size", places(*SIZES, least=20), ids=str)
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
        layers_by_stage = [layers_of_stage(stage, stages, repeats, stages * repeats * each) for stage in range(stages)]
        order = [layer for repeat in range(repeats) for stage in layers_by_stage for layer in stage[repeat]]
        assert order == list(range(stages * repeats * each))
    with pytest.raises(ValueError, match="10 layers cannot be shared evenly by 4 stages in 2 repeats"):
        layers_of_stage(0, 4, 2, 10)


@pytest.mark.parametrize("name", ["layers_of_stage", "loop_position"])
def test_no_message_about_a_wrong_answer_has_the_right_one(name):
    task = TASKS[name]
    questions, means, right_answer = {
        "layers_of_stage": (schedule.layer_questions, schedule.layers_mean, lambda q: schedule.layers(*q)),
        "loop_position": (
            schedule.position_questions,
            schedule.positions_mean,
            lambda q: schedule.positions(*q[2:]).get(q[:2]),
        ),
    }[name]
    for mutant in MUTANTS:
        for case in task.cases if mutant.task == name else ():
            for question in questions(case):
                answer = value_tasks._formed(name, value_tasks.answer_or_refusal(mutant.function, *question), None)
                if answer != right_answer(question) and right_answer(question) is not None:
                    assert (
                        value_tasks.show(right_answer(question))
                        not in means(case, question, answer).partition("answer is")[2]
                    )


def test_layers_in_a_row_are_the_stages_layers_in_order():
    stacked = np.arange(2 * 4 * 3).reshape(2, 4, 3, 1)
    assert [layer for group in layers_of_stage(1, 4, 2, 24) for layer in group] == stacked[:, 1, :, 0].ravel().tolist()
    assert in_a_row({"leaf": stacked})["leaf"].ravel().tolist() == list(range(24))
