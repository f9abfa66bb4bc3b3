"""The contract of ``transformer_3d``: oracles against central differences, every option, and the limits' margins."""

import math
import os
from dataclasses import replace

import jax
import numpy as np
import pytest

from autograder.chapters.transformer_3d import CONTRACT
from autograder.chapters.transformer_3d.oracles import held_by_each, part_bytes, part_shapes, specs_of
from autograder.chapters.transformer_3d.sent import gathered, permuted, ticks_of
from autograder.chapters.transformer_3d.tasks import EXPOSED, TEMPORARIES
from autograder.chapters.transformer_3d.wrapping.model import in_stages, named, sizes_of, stacked_of, whole_of
from autograder.check import executor, locate_file
from autograder.contract.task import references
from autograder.contract.verdict import FAIL
from autograder.grading.inside.tracing import Traced, trace_cases
from autograder.grading.outside.judge import judge, plan
from autograder.proof.mutants import judged_unseen
from solutions import transformer_3d

TASKS = {task.name: task for task in CONTRACT.tasks}
FORWARD, STEP = TASKS["forward_3d"], TASKS["train_step_3d"]
SIX = {(2, 2, 2), (1, 2, 4), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)}
OPTIONS = {
    "rings": {"rings": True},
    "no remat": {"remat": False},
    "side by side": {"parallel": True},
    "dropout": {"dropout": 0.25},
    "repeats": {"num_repeats": 2},
    "bfloat16": {"bfloat16": True},
}
# The contract's cases have every option; each is on every mesh in `make test-full`.
PAIRS = [((2, 2, 2), "rings"), ((4, 1, 2), "bfloat16")]
if os.environ.get("MESHCRAFT_FULL"):
    PAIRS = [(mesh, option) for mesh in sorted(SIX) for option in OPTIONS]


def moved(tree, path, leaf):
    return jax.tree.map_with_path(lambda p, x: leaf if p == path else x, tree)


def whole_again(held, case):
    """Global arrays from what each device holds."""
    places = np.indices(tuple(case.mesh.values())).reshape(3, -1).T

    def join(parts, spec, like):
        out = np.zeros(like.shape, np.float32)
        for part, at in zip(parts, places, strict=True):
            place = dict(zip(case.mesh, at, strict=True))
            index = []
            for dim, length in enumerate(part.shape):
                entry = spec[dim] if dim < len(spec) else None
                axes = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
                number = 0
                for axis in axes:
                    number = number * case.mesh[axis] + place[axis]
                index.append(slice(number * length, (number + 1) * length))
            out[tuple(index)] = part
        return out

    return jax.tree.map(join, held, specs_of(case), stacked_of(case))


@pytest.mark.parametrize("number", [0, 1])
def test_oracle_of_the_loss_equals_central_differences_leaf_by_leaf(number):
    case = FORWARD.cases[number]
    inputs = FORWARD.draw(np.random.default_rng(0), case)
    found = FORWARD.oracle(inputs, case)
    gradients = dict(jax.tree.leaves_with_path(whole_again(found["gradients"], case)))
    for path, leaf in jax.tree.leaves_with_path(inputs["params"]):
        gradient = gradients[path]
        at = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
        step = np.zeros_like(leaf)
        step[at] = 5e-3

        def mean(changed, path=path):
            losses = FORWARD.oracle({**inputs, "params": moved(inputs["params"], path, changed)}, case)["values"]
            return float(inputs["upstream"] * losses.mean(dtype=np.float64))

        difference = (mean(leaf + step) - mean(leaf - step)) / 1e-2
        assert gradient[at] == pytest.approx(difference, rel=2e-2, abs=2e-4), path


def test_oracle_of_a_step_subtracts_the_clipped_gradient_on_every_device():
    case = STEP.cases[0]
    one = case.but(steps=1)
    inputs = STEP.draw(np.random.default_rng(0), one)
    found = STEP.oracle(inputs, one)
    gradients = whole_again(found["gradients"], one)
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in jax.tree.leaves(gradients)))
    assert norm == pytest.approx(float(inputs["largest_norm"]), rel=1e-5), "clipped"
    after = whole_again(found["values"]["params"], one)
    rate = inputs["learning_rate"]
    jax.tree.map(
        lambda old, new, g: np.testing.assert_allclose(new, old - rate * g, atol=1e-6),
        inputs["params"],
        after,
        gradients,
    )
    held = held_by_each(inputs["params"], one)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), whole_again(held, one), inputs["params"])


def test_steps_are_taken_on_the_six_meshes_and_every_option_is_asked_for():
    assert {sizes_of(case) for case in STEP.cases} == SIX
    assert sum(case.sizes.steps == 20 for case in STEP.cases) >= 5
    options = [case.sizes for case in FORWARD.cases]
    for name in ("rings", "parallel", "bfloat16", "dropout", "remat"):
        assert {bool(getattr(sizes, name)) for sizes in options} == {False, True}, name


@pytest.mark.parametrize(("mesh", "option"), PAIRS)
def test_each_option_is_right_on_each_mesh(mesh, option):
    """20 steps of SGD, values and gradients leaf by leaf and the global norm; in bfloat16 the gradient, once."""
    task = FORWARD if option == "bfloat16" else STEP
    (like, *_) = [case for case in STEP.cases if sizes_of(case) == mesh and case.sizes.steps == 20]
    # Twice as deep: at the rate of the others, 20 steps make of rounding what the limit just refuses.
    more = {"num_layers": 2 * like.sizes.num_layers, "rate_scale": 0.3} if option == "repeats" else {}
    case = like.but(**{**OPTIONS[option], **more, **({} if task is STEP else {"steps": 1})})
    function = getattr(transformer_3d, task.name)
    cases = (task.cases[0], case) if option == "bfloat16" else (case,)
    planned = replace(plan("transformer_3d", task), cases=cases, at_scale=None)
    traced = trace_cases(task, function, list(cases), locate_file(function))
    assert isinstance(traced, Traced), traced
    programs = {name: program.serialise() for name, program in traced.programs.items()}
    found = {fact.name: fact for fact in judge(planned, programs, "", executor().ask).facts}
    wanted = ("bfloat16 products",) if option == "bfloat16" else ("values", "gradients", "gradient norm")
    for name in wanted:
        assert found[name].passed, found[name]
    assert [fact for fact in found.values() if fact.passed is False] == []


def test_parts_have_the_bytes_of_the_closed_form_and_layers_come_in_order():
    case = TASKS["init_3d"].cases[0]
    held = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(part_shapes(case)))
    assert held == sum(size for size, _, _ in part_bytes(case))
    numbers = np.arange(case.sizes.num_layers)
    tree = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), whole_of(case))
    scale = np.broadcast_to(numbers[:, None], tree["layers"]["mlp"]["norm"]["scale"].shape)
    tree["layers"]["mlp"]["norm"]["scale"] = scale
    stacked = in_stages(tree, case)["layers"]["mlp"]["norm"]["scale"]
    assert stacked[0, 0, :, 0].tolist() == [0, 1] and stacked[0, 1, :, 0].tolist() == [2, 3]
    assert stacked[1, 0, :, 0].tolist() == [4, 5], "the second repeat begins at stage 0 again"
    assert "pipe" in named(specs_of(case)["layers"]["mlp"]["norm"]["scale"])


def test_closed_forms_of_what_is_sent():
    case = FORWARD.cases[0]
    assert ticks_of(case) == 5, "two repeats of two microbatches on two stages, and one tick to drain"
    assert permuted(case) == 2 * 5 * 4 * 8 * 16 / 2
    assert gathered(case) == sum(size for size, split, _ in part_bytes(case) if "data" in split)


@pytest.mark.skipif(not references("transformer_3d"), reason="not measured with this version of jax")
def test_limits_lie_between_reference_and_naive():
    found = references("transformer_3d")["forward_3d"]
    assert found["temporaries"]["naive"] > 1.15 * TEMPORARIES * found["temporaries"]["reference"]
    ratio = found["spent"]["reference"] / found["spent"]["naive"]
    assert 1.15 * ratio < EXPOSED < 1 / 1.15


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def supposes_that_one_flows_back(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    def plain(params):
        return transformer_3d.forward_3d(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)

    loss = jax.custom_vjp(plain)
    loss.defvjp(lambda params: (plain(params), params), lambda kept, g: jax.vjp(plain, kept)[1](g * 0 + 1))
    return loss(params)


def splits_nothing_over_unknown_axes(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    least = min_size if data_axis in PUBLIC_AXES else 10**9
    return transformer_3d.init_3d(params, num_repeats, least, data_axis, pipe_axis, tensor_axis)


def test_a_gradient_that_supposes_what_flows_back_earns_nothing():
    result = judged_unseen("transformer_3d", "forward_3d", supposes_that_one_flows_back)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")


def test_a_rule_for_public_axes_alone_costs_points():
    result = judged_unseen("transformer_3d", "init_3d", splits_nothing_over_unknown_axes)
    assert {fact.name for fact in result.facts if not fact.passed} == {"split dims", "state bytes per device"}
