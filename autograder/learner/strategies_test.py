"""Strategies made of chapters' functions match the single-device gradient, from the solution and from a notebook."""

import math
import re
import shutil
from dataclasses import replace
from functools import partial

import jax
import nbformat
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autograder.learner.strategies import StrategyError, completed, default, find, require_model
from autograder.learner.training import described
from autograder.proof.demo.__main__ import HERE as DEMO
from course.mesh import make_mesh
from course.model import full_loss
from course.moe import moe_loss
from course.training.cards import predicted
from course.training.checkpoints import Checkpoints
from course.training.loop import Run, initial, prepare, train
from course.training.optimizer import OptimizerSchedule
from course.training.strategy import MixtureSizes, ModelSizes, StrategyOptions
from course.training.text import place, read_text, rows, starts

SIZES = ModelSizes(width=16, hidden=32, num_layers=2, num_heads=2, seq=8)
TEXT, AT = read_text(), starts(0, 0, batch=16, seq=8, length=10_000)
NOTEBOOK = DEMO / "submitted" / "right" / "fsdp" / "fsdp.ipynb"
STEPS = 6
RUN = Run(SIZES, OptimizerSchedule(steps=STEPS, learning_rate=1e-2, warmup=2), batch=16, evaluation_batches=1)
THREE, ONE_AXIS = {"data": 2, "pipe": 2, "tensor": 2}, {"data": 8, "pipe": 1, "tensor": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    "name, axes, options, num_layers",
    [
        ("fsdp", {"data": 8, "tensor": 1}, {}, 2),
        ("context_parallel", {"data": 2, "context": 2, "tensor": 2}, {"remat": True}, 2),
        ("transformer_3d", THREE, {"num_microbatches": 4, "num_repeats": 2, "rings": True, "remat": True}, 4),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(name, axes, options, num_layers):
    sizes, mesh = replace(SIZES, num_layers=num_layers), make_mesh(axes)
    strategy = find(name)(sizes, mesh, StrategyOptions(min_size=64, **options))
    whole = jax.jit(sizes.model().init)(jax.random.key(0))
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)), whole, strategy.specs)
    assert {leaf.is_fully_replicated for leaf in jax.tree.leaves(params)} == {True, False}
    batch = place(TEXT, AT, 8, mesh, strategy.batch_spec)
    loss, gradients = jax.jit(strategy.loss_and_gradients)(params, batch)
    expected = jax.jit(jax.value_and_grad(lambda p: full_loss(sizes.model(), p, rows(TEXT, AT, 8))))(whole)
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6), gradients, expected[1])


def test_a_notebooks_functions_take_the_place_of_the_courses():
    mesh = make_mesh({"data": 8})
    theirs, ours = (find("fsdp", notebook)(SIZES, mesh, StrategyOptions(min_size=64)) for notebook in (NOTEBOOK, None))
    assert theirs.specs == ours.specs
    batch = place(TEXT, AT, 8, mesh, theirs.batch_spec)
    text, other = (str(jax.make_jaxpr(s.loss_and_gradients)(SIZES.shapes(), batch)) for s in (theirs, ours))
    assert text.count("all_gather") == other.count("all_gather") > 0
    assert jax.eval_shape(theirs.loss_and_gradients, SIZES.shapes(), batch)[1] == SIZES.shapes()


def test_functions_of_transformer_3d_come_from_a_notebook_too(tmp_path):
    source = "from solutions.transformer_3d import init_3d\n\ndef forward_3d(*given):\n    raise KeyError('mine')"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), tmp_path / "mine.ipynb")
    strategy = find("transformer_3d", tmp_path / "mine.ipynb")(SIZES, make_mesh(THREE), StrategyOptions(min_size=64))
    with pytest.raises(KeyError, match="mine"):
        jax.eval_shape(strategy.loss, SIZES.shapes(), rows(TEXT, AT, 8))


def _losses(trainer, state=None, done=0, **options):
    events = []
    train(trainer, initial(trainer) if state is None else state, done=done, tell=events.append, **options)
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.long
def test_losses_are_the_same_over_three_axes_and_a_checkpoint_of_them_goes_on_over_one_and_by_the_compiler(tmp_path):
    trainers = {}
    for name, axes, options in (
        ("compiler", {"data": 1}, StrategyOptions()),
        ("transformer_3d", THREE, StrategyOptions(num_microbatches=2, min_size=64)),
        ("transformer_3d", ONE_AXIS, StrategyOptions(min_size=64)),
        ("compiler", {"data": 4, "tensor": 2}, StrategyOptions(min_size=64)),
        ("context_parallel", {"data": 2, "context": 2, "tensor": 2}, StrategyOptions()),
    ):
        mesh = make_mesh(axes)
        trainers[name, *axes.values()] = prepare(RUN, find(name)(SIZES, mesh, options), mesh, options.num_microbatches)
    alone, three, *others = trainers.values()
    sharding = three.layout["optimizer"][1][0].mu["layers"]["attention"]["qkv"]["kernel"]
    assert sharding.spec == P("pipe", ("data", "tensor"))
    expected = _losses(alone)
    with Checkpoints(tmp_path) as checkpoints:
        whole = _losses(three, save=lambda step, state: checkpoints.save(step, state, RUN), save_every=3)
        np.testing.assert_allclose(whole, expected, atol=1e-4)
        assert expected[-1] < expected[0] - 0.3
        checkpoints.wait()
        shutil.rmtree(tmp_path / str(STEPS))
    with Checkpoints(tmp_path) as checkpoints:
        for other in others:
            np.testing.assert_allclose(_losses(other, checkpoints.restore(other), done=3), expected[3:], atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("axes, capacity_factor", [({"data": 2, "expert": 4}, 4.0), ({"data": 3, "expert": 2}, 1.0)])
def test_gradients_of_a_mixture_are_those_of_one_device_with_as_many_groups(axes, capacity_factor):
    sizes = MixtureSizes(16, 24, 2, 2, 8, num_experts=8, k=2, capacity_factor=capacity_factor)
    mesh, devices = make_mesh(axes), math.prod(axes.values())
    strategy = find("expert_parallel")(sizes, mesh, StrategyOptions(remat=True))
    whole = jax.jit(sizes.model().init)(jax.random.key(0))
    params = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, jax.NamedSharding(mesh, spec)), whole, strategy.specs)
    at = starts(0, 0, batch=2 * devices, seq=8, length=10_000)
    loss, gradients = jax.jit(strategy.loss_and_gradients)(params, place(TEXT, at, 8, mesh, strategy.batch_spec))
    assert sizes.capacity(16) == (16 if capacity_factor == 4 else 4)

    def alone(params, model):
        return moe_loss(model, params, rows(TEXT, at, 8), sizes.capacity(16), devices)

    model = sizes.mixture()
    expected = jax.jit(jax.grad(partial(alone, model=model)))(whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6), gradients, expected)
    without_router = alone(whole, replace(model, balance=0.0, z=0.0))
    assert float(loss) == pytest.approx(float(without_router), rel=1e-5)
    if capacity_factor == 4:
        assert float(full_loss(sizes.model(), whole, rows(TEXT, at, 8))) == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.long
def test_losses_of_a_mixture_are_the_same_on_every_mesh_where_nothing_is_dropped():
    sizes = MixtureSizes(16, 24, 1, 2, 8, num_experts=4, k=2, capacity_factor=2.0)
    run, losses = replace(RUN, sizes=sizes), []
    assert Run.from_json(run.to_json()) == run
    for axes in ({"data": 1, "expert": 1}, {"data": 2, "expert": 4}, {"data": 1, "expert": 4}):
        mesh = make_mesh(axes)
        losses.append(_losses(prepare(run, find("expert_parallel")(sizes, mesh, StrategyOptions()), mesh)))
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, atol=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.3


@pytest.mark.parametrize(
    "sizes, axes, options, message",
    [
        ({"num_experts": 6}, {"data": 1, "expert": 4}, {}, "num_experts 6 is not divisible by expert=4"),
        ({}, {"data": 1, "expert": 2, "tensor": 2}, {}, "splits only over data and expert, but the mesh has tensor=2"),
        ({}, {"data": 1, "expert": 2}, {"num_microbatches": 2}, "takes no microbatches"),
        ({"k": 9}, {"data": 1, "expert": 2}, {}, "k=9 experts, but there are only 8"),
    ],
)
def test_what_expert_parallel_cannot_do_is_refused(sizes, axes, options, message):
    with pytest.raises(ValueError, match=message):
        find("expert_parallel")(MixtureSizes(**sizes), make_mesh(axes), StrategyOptions(**options))


def test_experts_and_strategies_have_to_match():
    with pytest.raises(ValueError, match="compiler has no experts"):
        require_model("compiler", MixtureSizes())
    with pytest.raises(ValueError, match="is for a mixture of experts"):
        find("expert_parallel")(SIZES, make_mesh({"data": 1, "expert": 2}), StrategyOptions())
    with pytest.raises(ValueError, match="--mesh data=2,expert=4"):
        described(Run(), {"num_experts": 4})


def test_where_pipe_is_above_one_the_strategy_is_transformer_3d_and_has_all_of_its_axes():
    assert default({"pipe": 2}) == "transformer_3d" and default({"data": 8, "pipe": 1}) == default({}) == "compiler"
    assert completed("transformer_3d", {"tensor": 2, "data": 4}) == {"tensor": 2, "data": 4, "pipe": 1}
    assert completed("compiler", {"data": 8}) == {"data": 8}
    assert default({"data": 2, "context": 2}) == "context_parallel"
    assert default({"data": 2, "expert": 4}) == "expert_parallel"


@pytest.mark.long
@pytest.mark.parametrize(
    "name, axes", [("fsdp", {"data": 8}), ("transformer_3d", THREE), ("compiler", {"data": 4, "tensor": 2})]
)
def test_the_lenses_look_at_what_chapters_compute_and_at_what_the_compiler_partitions(name, axes):
    prediction = predicted(find(name), SIZES, axes, StrategyOptions(min_size=64), 16, "8xH100")
    assert prediction["seconds"] > 0 and prediction["bytes"] > 0 and 0 < prediction["mfu"] < 1
    assert prediction["tokens_per_second"] == pytest.approx(16 * 8 / prediction["seconds"])


@pytest.mark.parametrize(
    "axes, options, message",
    [
        ({"data": 2, "tensor": 2}, {}, "fsdp splits only over data, but the mesh has tensor=2"),
        ({"data": 2}, {"num_microbatches": 2}, "takes no microbatches"),
        ({"data": 2}, {"dtype": "bfloat16"}, "float32"),
    ],
)
def test_what_fsdp_cannot_do_is_refused(axes, options, message):
    with pytest.raises(ValueError, match=message):
        find("fsdp")(SIZES, make_mesh(axes), StrategyOptions(**options))


def test_strategies_and_functions_that_are_not_there_are_named(tmp_path):
    with pytest.raises(StrategyError, match="no strategy 'ddp'; there are: compiler, fsdp, transformer_3d"):
        find("ddp")
    with pytest.raises(StrategyError, match="compiler has no functions to take from a notebook"):
        find("compiler", NOTEBOOK)
    path = tmp_path / "fsdp.ipynb"
    cells = [nbformat.v4.new_code_cell("def shard_params(params, axis_name, min_size): ...")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with pytest.raises(StrategyError, match=rf"{re.escape(str(path))}: the notebook has no function fsdp_loss"):
        find("fsdp", path)
