"""The contract of ``pipeline``: bubbles and memory match their formulas."""

import pytest
from jax import lax

from autograder.chapters.pipeline import CONTRACT
from autograder.chapters.pipeline.model import most_bytes
from autograder.chapters.pipeline.schedule import stage_seconds, ticks_of
from autograder.contract.task import Case, references, trace
from course.machines import machine
from course.program import bubble, costs, memory, parse, timeline
from solutions.pipeline import execute_pipeline, pipeline_train_step

TASKS = {task.name: task for task in CONTRACT.tasks}
FREE = machine("free network")
BUBBLES = [(s, m) for s in (1, 2, 4, 8) for m in (1, 2, 4, 8, 16)]


def nowhere(_):
    return None


def forward(stages, microbatches, stage_for=lambda stage, count: stage):
    """A forward pass at the size used to judge bubbles; ``stage_for`` wraps a stage."""
    task = TASKS["execute_pipeline"]
    assert task.at_scale
    case = Case("", {"pipe": stages}, task.at_scale[0].sizes.replace(num_microbatches=microbatches))

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


def test_temporaries_grow_by_three_blocks_a_microbatch_and_stay_below_the_closed_form():
    task = TASKS["pipeline_train_step"]
    assert task.at_scale
    temporaries = {}
    for count in (8, 32):
        case = task.at_scale[0].with_sizes(num_microbatches=count)
        program = trace(task, pipeline_train_step, case, nowhere)
        temporaries[count] = memory(parse(program), program).temporaries
        assert 0.65 * most_bytes(case) < temporaries[count] < 0.85 * most_bytes(case)
    block = 4 * task.at_scale[0].sizes.rows * task.at_scale[0].sizes.width
    assert temporaries[32] - temporaries[8] == pytest.approx(3 * 24 * block, rel=0.01)
    naive = references("pipeline")["pipeline_train_step"]["temporaries"]["naive"]
    assert naive > 5 * most_bytes(task.at_scale[0])
