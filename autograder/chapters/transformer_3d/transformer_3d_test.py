"""The contract of ``transformer_3d``: oracles in parts, options on every mesh, closed forms, and choices of a mesh."""

import math
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autograder.chapters.transformer_3d import CONTRACT
from autograder.chapters.transformer_3d.alternatives import ALTERNATIVES
from autograder.chapters.transformer_3d.choose_mesh import CHOOSE_MESH, best, choice_facts
from autograder.chapters.transformer_3d.communication import gathered, permuted, ticks_of
from autograder.chapters.transformer_3d.layouts import part_bytes, parts_of_each_device, specs_of
from autograder.chapters.transformer_3d.mutants import MUTANTS
from autograder.chapters.transformer_3d.wrapping import MOST, axes_of, in_stages, named, questions, sizes_of, stacked_of
from autograder.contract import value_facts, value_tasks, wrapping
from autograder.contract.case_builders import params_by_head
from autograder.contract.task import TaskEvidence
from autograder.contract.value_tasks import Refusal
from autograder.contract.wrapping import Mismatch
from autograder.proof.central_differences import check, places, returned
from autograder.proof.mutants import judged_on, judged_unseen
from course.mesh import make_mesh
from solutions import transformer_3d

TASKS = {task.name: task for task in CONTRACT.tasks}
FORWARD, STEP = TASKS["forward_3d"], TASKS["train_step_3d"]
PARTS = [TASKS[name] for name in ("whole_weights", "stage_3d", "layers_3d")]
SIX = {(2, 2, 2), (1, 2, 4), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)}
OPTIONS = {
    "rings": {"rings": True},
    "no remat": {"remat": False},
    "parallel": {"parallel": True},
    "dropout": {"dropout": 0.25},
    "repeats": {"num_repeats": 2},
    "bfloat16": {"bfloat16": True},
}
# The contract's cases cover every option; `make test-full` runs each on every mesh.
TWO = ((2, 2, 2), "rings"), ((4, 1, 2), "bfloat16")
PAIRS = places(*TWO, *(pair for pair in product(sorted(SIX), OPTIONS) if pair not in TWO), least=2)


def test_cases_have_every_pair_of_options():
    def options(case):
        s, (_, stages, _) = case.sizes, sizes_of(case)
        deep, uneven = s.num_layers > stages * s.num_repeats, s.num_microbatches % stages > 0
        return s.rings, s.remat, s.parallel, s.dropout > 0, s.num_repeats > 1, s.bfloat16, deep, uneven

    all_options = [options(case) for case in FORWARD.cases]
    for first, second in combinations(range(8), 2):
        assert len({(flags[first], flags[second]) for flags in all_options}) == 4, (first, second)
    assert all(any(3 in case.mesh.values() for case in task.cases) for task in (FORWARD, *PARTS))


def whole_again(device_parts, case, part=None):
    """Global arrays reassembled from each device's parts, of all parameters or of a subset."""
    mesh, likes = make_mesh(case.mesh), (specs_of(case), stacked_of(case))

    def join(parts, spec, like):
        whole, index = np.zeros(like.shape, np.float32), NamedSharding(mesh, spec).devices_indices_map(like.shape)
        for part, device in zip(parts, mesh.devices.flat, strict=True):
            whole[index[device]] = part
        return whole

    return jax.tree.map(join, device_parts, *(tree[part] if part else tree for tree in likes))


def joined(device_parts, case):
    """Activations of all microbatches, joined from the devices of stage 0."""
    data, pipe, tensor = axes_of(case)
    order = {axis: i for i, axis in enumerate(case.mesh)}
    by_place = device_parts.reshape(*case.mesh.values(), *device_parts.shape[1:]).transpose(
        order[pipe], order[data], order[tensor], *range(3, 3 + device_parts.ndim - 1)
    )[0]
    return np.concatenate([np.concatenate(list(rows), axis=-2) for rows in by_place], axis=1)


@pytest.mark.parametrize(("place", "wrt"), [(0, "params"), (1, "x"), (2, "x"), (2, "params")])
def test_oracles_of_its_parts_equal_central_differences(place, wrt):
    """Gradients of weights are of the mean over data; gradients of activations are of each pipeline's own rows."""
    task = PARTS[place]
    case = task.cases[1 if place == 0 else 0]
    mean = sizes_of(case)[0] if wrt == "params" else 1

    def loss(values, inputs):
        upstream = inputs["upstream"]
        if place == 1:  # values are the layers' contributions
            values = values + inputs["x"]
        if place == 2:
            upstream = parts_of_each_device(upstream, case, P(None, *(axes_of(case)[i] for i in (0, 2))))
        return returned(values, {"upstream": upstream}) / mean

    def gradients(results):
        if wrt == "params":
            return whole_again(results, case) if place == 0 else whole_again(results["layers"], case, "layers")
        return results["x"] if place == 1 else joined(results["x"], case)

    check(task, case.name, wrt, loss, gradients, rel=2e-2, least=2e-4)


@pytest.mark.parametrize("case", places(*FORWARD.cases[:2]), ids=lambda case: case.name)
def test_oracle_of_the_loss_equals_central_differences_leaf_by_leaf(case):
    def loss(values, inputs):
        return inputs["upstream"] * values

    check(FORWARD, case.name, "params", loss, lambda parts: whole_again(parts, case), rel=2e-2, least=2e-4)


def test_oracle_of_a_step_subtracts_the_clipped_gradient_on_every_device():
    case = STEP.cases[0]
    one_step = case.with_sizes(steps=1)
    inputs = STEP.draw(np.random.default_rng(1), one_step)
    result = STEP.oracle(inputs, one_step)
    gradients = whole_again(result["gradients"], one_step)
    norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in jax.tree.leaves(gradients)))
    assert norm == pytest.approx(float(inputs["largest_norm"]), rel=1e-5), "clipped"
    after, rate = whole_again(result["values"]["params"], one_step), inputs["learning_rate"]
    expected = jax.tree.map(lambda old, g: old - rate * g, inputs["params"], gradients)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), after, expected)
    device_parts = parts_of_each_device(inputs["params"], one_step)
    jax.tree.map(np.testing.assert_array_equal, whole_again(device_parts, one_step), inputs["params"])


def test_steps_are_taken_twenty_times_on_most_meshes():
    assert sum(case.sizes.steps == 20 for case in STEP.cases) >= 5


@pytest.mark.long
@pytest.mark.parametrize(("mesh", "option"), PAIRS)
def test_each_option_is_right_on_each_mesh(mesh, option):
    """20 steps of SGD, values and gradients leaf by leaf and the global norm; in bfloat16 the gradient, once."""
    task = FORWARD if option == "bfloat16" else STEP
    (like, *_) = [case for case in STEP.cases if sizes_of(case) == mesh and case.sizes.steps == 20]
    # Twice as deep: at the other cases' learning rate, 20 steps amplify rounding just beyond the limit.
    extra_sizes = {"num_layers": 2 * like.sizes.num_layers, "rate_scale": 0.3} if option == "repeats" else {}
    case = like.with_sizes(**{**OPTIONS[option], **extra_sizes, **({} if task is STEP else {"steps": 1})})
    cases = (task.cases[0], case) if option == "bfloat16" else (case,)
    result = judged_on("transformer_3d", task.name, getattr(transformer_3d, task.name), cases)
    by_name = {fact.name: fact for fact in result.facts}
    required = ("bfloat16 products",) if option == "bfloat16" else ("values", "gradients", "gradient norm")
    for name in required:
        assert by_name[name].passed, by_name[name]
    assert [fact for fact in by_name.values() if fact.passed is False] == []


def test_parts_have_the_bytes_of_the_closed_form_and_layers_come_in_order():
    case = TASKS["init_3d"].cases[0]
    mesh = make_mesh(case.mesh)
    parts = jax.tree.map(
        lambda leaf, spec: math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape)),
        stacked_of(case),
        specs_of(case),
    )
    assert 4 * sum(jax.tree.leaves(parts)) == sum(size for size, _, _ in part_bytes(case))
    numbers = np.arange(case.sizes.num_layers)
    tree = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), params_by_head(case))
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


def test_a_rule_for_public_axes_alone_costs_points():
    public = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}

    def splits_nothing_over_unknown_axes(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
        least = min_size if data_axis in public else 10**9
        return transformer_3d.init_3d(params, num_repeats, least, data_axis, pipe_axis, tensor_axis)

    result = judged_unseen("transformer_3d", "init_3d", splits_nothing_over_unknown_axes)
    assert {fact.name for fact in result.facts if not fact.passed} == {"split dims", "state bytes per device"}


# choose_mesh: unseen models are legal, secrets are kept, and invalid choices are refused.


def answered(case, values, secret=False) -> Any:
    return SimpleNamespace(case=case, line="", secret=secret, measured={"values": values})


def facts_of(function, cases, secret=False):
    all_evidence = []
    for case in cases:
        with patch.object(wrapping, "abstract_mesh", make_mesh):
            values = np.asarray(CHOOSE_MESH.wrap(function, case).function(nothing=np.zeros((), np.uint8))["values"])
        assert len(values) == MOST
        all_evidence.append(answered(case, values, secret))
    return choice_facts(TaskEvidence(all_evidence, None, {}))


def failed_in(judged):
    return {fact.name for fact in judged if fact.passed is False}


@pytest.mark.parametrize("function", ALTERNATIVES["choose_mesh"], ids=lambda function: function.__name__)
def test_alternative_choices_pass_on_unseen_cases(function):
    unseen = [CHOOSE_MESH.unseen(np.random.default_rng(seed)) for seed in range(3)]
    assert failed_in(facts_of(function, unseen)) == set()


def test_the_oracle_s_own_choices_pass():
    for case in CHOOSE_MESH.cases:
        answers = value_facts.decode(CHOOSE_MESH.oracle({}, case)["values"])
        assert len(answers) == len(questions(case))
        judged = choice_facts(TaskEvidence([answered(case, CHOOSE_MESH.oracle({}, case)["values"])], None, {}))
        assert failed_in(judged) == set()


def test_cases_ask_for_all_that_can_be_chosen():
    known = [best(*question, case.sizes.machine) for case in CHOOSE_MESH.cases for question in questions(case)]
    chosen = [result[1] for result in known if result]
    assert {choice.remat for choice in chosen} == {"none", "block"} and {choice.fsdp for choice in chosen} == {
        False,
        True,
    }
    for axis in ("data", "pipe", "tensor", "microbatches"):
        assert len({getattr(choice, axis) for choice in chosen}) > 1, axis
    assert None in known


@pytest.mark.long
def test_messages_of_the_official_grade_reveal_nothing_drawn():
    secret = [CHOOSE_MESH.unseen(np.random.default_rng(7))]
    for mutant in (one for one in MUTANTS if one.task == "choose_mesh"):
        for fact in facts_of(mutant.function, secret, secret=True):
            assert not any(char.isdigit() for char in fact.message), fact.message


@pytest.mark.parametrize("answer", [(1, 2), "data", {"data": 8}, (8, 1, 1, 1, 1, None, True, 3)])
def test_an_invalid_choice_is_refused(answer):
    with pytest.raises(Mismatch, match="expected"):
        facts_of(lambda *_: answer, CHOOSE_MESH.cases[:1])


def test_a_forged_answer_passes_nothing():
    for values in (
        np.zeros(MOST, np.uint8),
        value_tasks.encode((1, 2, 3), MOST),
        value_tasks.encode((Refusal("x"),) * 9, MOST),
    ):
        judged = choice_facts(TaskEvidence([answered(CHOOSE_MESH.cases[0], values)], None, {}))
        assert {"every choice can be placed", "predicted MFU"} <= failed_in(judged)


def raises_always(*_):
    raise ValueError("nothing fits")


def test_where_nothing_is_placed_nothing_fits_and_nothing_is_fast():
    failed_names = failed_in(facts_of(raises_always, CHOOSE_MESH.cases[:1]))
    assert failed_names == {"every choice can be placed", "memory fits", "predicted MFU"}
