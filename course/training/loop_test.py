"""The loop and its checkpoints: the same losses on every mesh, after an interruption, and after a change of mesh."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from course.mesh import make_mesh
from course.training.checkpoints import CheckpointError, Checkpoints, differences
from course.training.loop import Diverged, Run, baseline, initial, prepare, train
from course.training.optimizer import OptimizerSchedule
from course.training.strategy import MixtureSizes, ModelSizes, StrategyOptions, compiler

STEPS = 8
RUN = Run(
    ModelSizes(width=16, hidden=32, num_layers=1, num_heads=2, seq=8),
    OptimizerSchedule(steps=STEPS, learning_rate=1e-2, warmup=2),
    batch=16,
    evaluate_every=5,
    evaluation_batches=2,
)


@pytest.fixture(scope="module")
def trainers():
    prepared = {}

    def of(**axes):
        key = tuple(axes.items())
        if key not in prepared:
            mesh = make_mesh(axes)
            prepared[key] = prepare(RUN, compiler(RUN.sizes, mesh, StrategyOptions(min_size=64)), mesh)
        return prepared[key]

    return of


def run(trainer, **options):
    events = []
    initial_state = options.pop("state", None)
    state, done = train(
        trainer, initial(trainer) if initial_state is None else initial_state, tell=events.append, **options
    )
    return state, done, events


def losses(events, kind="step"):
    return {event["step"]: event["loss"] for event in events if event["event"] == kind}


@pytest.mark.long
def test_losses_and_evaluations_are_the_same_on_one_device_and_on_eight(trainers):
    (_, done, one), (state, _, eight) = run(trainers(data=1)), run(trainers(data=4, tensor=2))
    assert done == STEPS and list(losses(one)) == [*range(1, STEPS + 1)]
    assert list(losses(one, "evaluation")) == [5, STEPS]
    for kind in ("step", "evaluation"):
        np.testing.assert_allclose([*losses(one, kind).values()], [*losses(eight, kind).values()], atol=1e-4)
    assert losses(one)[STEPS] < losses(one)[1] - 0.5
    assert not state["optimizer"][1][0].mu["layers"]["mlp"]["up"]["kernel"].is_fully_replicated


def test_a_run_goes_on_from_a_checkpoint_bit_by_bit_and_on_another_mesh(trainers, tmp_path):
    trainer, other = trainers(data=4, tensor=2), trainers(data=1)
    _, _, whole = run(trainer)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        _, done, first = run(
            trainer,
            save=lambda step, state: checkpoints.save(step, state, RUN),
            save_every=3,
            stop=lambda step: step == 4,
        )
    assert done == 4
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest() == 4 and checkpoints.run() == RUN
        _, _, rest = run(trainer, state=checkpoints.restore(trainer), done=4)
        assert losses(first) | losses(rest) == losses(whole)
        _, _, elsewhere = run(other, state=checkpoints.restore(other), done=4)
        np.testing.assert_allclose([*losses(elsewhere).values()], [*losses(rest).values()], atol=1e-4)


def test_a_dense_run_and_a_mixture_differ_in_what_only_one_of_them_has():
    mixture = replace(RUN, sizes=MixtureSizes(16, 32, 1, 2, 8, num_experts=4, k=2, capacity_factor=1.0))
    absent = "num_experts is absent there and 4 here, k is absent there and 2 here"
    assert differences(RUN, mixture).startswith(absent) and differences(mixture, RUN).count("absent here") == 3


@pytest.mark.parametrize("count", [0, -1])
def test_an_evaluation_has_at_least_one_batch(count):
    with pytest.raises(ValueError, match=f"evaluation_batches is {count}, and it must be at least 1"):
        replace(RUN, evaluation_batches=count)


def test_unusable_checkpoints_are_refused_with_the_reason(trainers, tmp_path):
    trainer = trainers(data=1)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"no checkpoint in .*--resume"):
            checkpoints.restore(trainer)
        checkpoints.save(3, initial(trainer), Run(ModelSizes(width=32), RUN.schedule))
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="width is 32 there and 16 here, hidden is 512 there and 32"):
            checkpoints.restore(trainer)
    for path in (tmp_path / "3" / "run").rglob("*"):
        path.unlink()
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="step 3 cannot be read"):
        checkpoints.run()


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(trainers):
    trainer, saved = trainers(data=1), []
    state = initial(trainer)
    state["params"] = jax.tree.map(lambda leaf: leaf * math.nan, state["params"])
    with pytest.raises(Diverged, match="nan at step 1"):
        train(trainer, state, save=lambda step, _: saved.append(step), save_every=1)
    assert not saved


def test_a_batch_that_does_not_divide_is_refused_before_anything_is_compiled():
    mesh = make_mesh({"data": 8})
    strategy = compiler(RUN.sizes, mesh, StrategyOptions())
    with pytest.raises(ValueError, match="batch 16 is not divisible by data=8 x 4 microbatches = 32"):
        prepare(RUN, strategy, mesh, num_microbatches=4)


def test_the_baseline_predicts_the_bytes_that_an_evaluation_does():
    assert baseline(RUN) != baseline(Run(RUN.sizes, RUN.schedule, batch=16))
    assert 2.3 < baseline(Run()) < 2.6


def test_runs_survive_json_and_invalid_ones_are_refused():
    assert Run.from_json(RUN.to_json()) == RUN
    with pytest.raises(ValueError, match="batch is 0"):
        Run(batch=0)
