"""The contract of ``tp_transformer``: oracles against central differences, masks, logits and the limits' margins."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autograder.chapters.tp_transformer import CONTRACT
from autograder.chapters.tp_transformer.mutants import gathers_logits
from autograder.chapters.tp_transformer.step import EXPOSED
from autograder.chapters.tp_transformer.tasks import FASTER, heads_together, keys_of_parts, part_of_logits
from autograder.chapters.tp_transformer.wrapping import is_split, params_of
from autograder.contract.case_builders import groups_of, model_of, parts_of, varying
from autograder.contract.task import references, trace
from autograder.contract.verdict import FAIL
from autograder.proof.mutants import judged_unseen
from course.model import drop
from course.program import memory, parse
from solutions import tp_transformer as solutions
from solutions.tp_transformer import tp_transformer_step, vocab_parallel_loss

TASKS = {task.name: task for task in CONTRACT.tasks}
BLOCKS = ("tp_transformer_block", "parallel_transformer_block")
SIX = {(1, 8), (2, 4), (4, 2), (8, 1), (1, 1), (2, 2)}


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


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("place", ["tensor=4", "data=2 x tensor=2"])
def test_oracle_of_a_block_equals_central_differences_leaf_by_leaf(name, place):
    task, case = TASKS[name], case_of(name, place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)["gradients"]

    def along(changed):
        return float(np.vdot(task.oracle({**inputs, **changed}, case)["values"], inputs["upstream"]))

    for path, gradient in jax.tree.leaves_with_path(found["params"]):
        leaf = dict(jax.tree.leaves_with_path(inputs["params"]))[path]
        change = lambda leaf, path=path: along({"params": moved(inputs["params"], path, leaf)})  # noqa: E731
        agrees(gradient.sum(0), leaf, change)
    agrees(found["x"], inputs["x"], lambda x: along({"x": x}))


@pytest.mark.parametrize("place", ["tensor=4", "data=2 x model=2"])
def test_oracle_of_the_embedding_is_what_a_table_gives(place):
    task, case = TASKS["vocab_parallel_embed"], case_of("vocab_parallel_embed", place)
    inputs = task.draw(np.random.default_rng(0), case)
    found, params = task.oracle(inputs, case), inputs["params"]
    plain = params["token"][inputs["tokens"]] + params["position"][: case.sizes.seq]
    np.testing.assert_allclose(found["values"], plain, rtol=1e-6)
    by_hand = np.zeros_like(params["token"])
    np.add.at(by_hand, inputs["tokens"], inputs["upstream"])
    np.testing.assert_allclose(found["gradients"]["token"].sum(0), by_hand, atol=1e-4)
    seen = found["gradients"]["position"].sum(0)
    np.testing.assert_allclose(seen[: case.sizes.seq], inputs["upstream"].sum(0), atol=1e-4)
    assert not seen[case.sizes.seq :].any()


@pytest.mark.parametrize("place", ["tensor=4", "data=4 x model=2"])
def test_oracle_of_the_loss_equals_central_differences_and_sums_in_float64(place):
    task, case = TASKS["vocab_parallel_loss"], case_of("vocab_parallel_loss", place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)
    x, head = np.float64(inputs["x"]), jax.tree.map(np.float64, inputs["params"])
    normed = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * head["norm"]["scale"]
    logits = normed @ head["out"]["kernel"] + head["out"]["bias"]
    assert np.abs(logits).min() > 100, "exp of them is no number of float32"
    right = np.take_along_axis(logits, inputs["targets"][..., None], -1)[..., 0]
    top = logits.max(-1)
    by_hand = np.log(np.exp(logits - top[..., None]).sum(-1)) + top - right
    assert found["values"].mean() == pytest.approx(by_hand.mean(), rel=1e-5)

    groups = len(found["values"]) // parts_of(case)

    def along(changed):
        losses = task.oracle({**inputs, **changed}, case)["values"]
        return float(inputs["upstream"] * losses.reshape(groups, -1)[:, 0].sum(dtype=np.float64))

    for path, gradient in jax.tree.leaves_with_path(found["gradients"]["params"]):
        leaf = dict(jax.tree.leaves_with_path(inputs["params"]))[path]
        change = lambda leaf, path=path: along({"params": moved(inputs["params"], path, leaf)})  # noqa: E731
        agrees(gradient.sum(0), leaf, change, by=2e-2, rel=2e-2)
    agrees(found["gradients"]["x"], inputs["x"], lambda x: along({"x": x}), by=5e-2, rel=2e-2)


@pytest.mark.parametrize("place", ["data=2 x tensor=2", "data=2 x tensor=4"])
def test_oracle_of_a_step_equals_central_differences_of_its_loss_and_its_copies_are_equal(place):
    task, case = TASKS["tp_transformer_step"], case_of("tp_transformer_step", place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)
    gradients, after = (dict(jax.tree.leaves_with_path(t)) for t in (found["gradients"], found["values"]["params"]))
    split = dict(jax.tree.leaves_with_path(is_split(params_of(case))))
    for path, leaf in jax.tree.leaves_with_path(inputs["params"]):
        for copies in (gradients[path], after[path]):
            every = copies.reshape(-1, *leaf.shape)
            assert len(every) == (2 if split[path] else 2 * parts_of(case))
            assert all(np.array_equal(copy, every[0]) for copy in every)
        gradient = gradients[path].reshape(-1, *leaf.shape)[0]
        updated = after[path].reshape(-1, *leaf.shape)[0]
        np.testing.assert_allclose(updated, leaf - inputs["learning_rate"] * gradient, rtol=0, atol=1e-6)
        assert inputs["learning_rate"] * np.max(np.abs(gradient)) > 0.005 * np.max(np.abs(leaf)), "too small to see"

        def along(changed, path=path):
            held = task.oracle({**inputs, "params": moved(inputs["params"], path, changed)}, case)
            return float(held["values"]["loss"].astype(np.float64).mean())

        agrees(gradient, leaf, along, by=2e-2, rel=2e-2)


def test_steps_are_judged_on_the_six_meshes_and_both_blocks():
    cases = TASKS["tp_transformer_step"].cases
    found = {(groups_of(case), parts_of(case)) for case in cases}
    assert found == SIX
    assert {case.sizes.parallel for case in cases} == {False, True}
    assert any(case.sizes.steps == 3 for case in cases) and any(case.sizes.dropout for case in cases)


def test_masks_differ_between_the_parts_of_a_sequence_and_are_each_parts_own():
    key, x = jax.random.key(3), jnp.ones((2, 12, 8))
    keys = keys_of_parts(key, 4)
    whole = drop(x, 0.5, keys)
    for number in range(4):
        part = slice(3 * number, 3 * number + 3)
        own = drop(x[:, part], 0.5, jax.random.fold_in(key, number))
        np.testing.assert_array_equal(whole[:, part], own)
    parts = np.split(np.asarray(whole), 4, axis=1)
    assert all(not np.array_equal(parts[0], other) for other in parts[1:])


def test_one_part_of_a_sequence_holds_no_more_than_its_part_of_the_logits():
    task = TASKS["vocab_parallel_loss"]
    assert task.at_scale
    case = task.at_scale[0]
    held = {}
    for function in (vocab_parallel_loss, gathers_logits):
        program = trace(task, function, case, lambda _: None)
        held[function] = memory(parse(program), program)
    largest, every = (int(np.prod(held[f].largest.shape)) for f in held)
    assert largest == part_of_logits(case) and every == parts_of(case) * part_of_logits(case)
    assert held[gathers_logits].temporaries > 4 * held[vocab_parallel_loss].temporaries


def test_limits_lie_between_reference_and_naive_version():
    known = references("tp_transformer")
    block, step = known["parallel_transformer_block"]["seconds"], known["tp_transformer_step"]["exposed"]
    assert 1.05 * block["reference"] < FASTER * block["naive"] and block["naive"] > 1.15 * block["reference"]
    assert 1.3 * step["reference"] < EXPOSED * step["naive"]
    assert (
        known["vocab_parallel_loss"]["temporaries"]["naive"]
        > 4 * known["vocab_parallel_loss"]["temporaries"]["reference"]
    )


def test_a_step_without_dropout_on_one_device_is_the_courses_own():
    from course.layout import tensor_specs
    from course.mesh import make_mesh
    from course.model import full_loss

    task = TASKS["tp_transformer_step"]
    case = case_of("tp_transformer_step", "data=1 x tensor=1").but(dropout=0.0)
    inputs = task.draw(np.random.default_rng(2), case)
    batch = {name: rows[0] for name, rows in inputs["batch"].items()}
    specs, key = tensor_specs(inputs["params"], "tensor"), jax.random.key(0)

    def local(params, batch):
        params = varying(params, case.mesh)
        return tp_transformer_step(params, specs, batch, key, 0.0, False, "data", "tensor", jnp.float32(1))[1]

    mesh, spec = make_mesh(case.mesh), jax.sharding.PartitionSpec
    step = jax.shard_map(local, mesh=mesh, in_specs=(specs, spec("data")), out_specs=spec())
    whole = {**inputs["params"], "layers": heads_together(inputs["params"]["layers"])}
    expected = full_loss(model_of(case), whole, batch)
    assert float(jax.jit(step)(inputs["params"], batch)) == pytest.approx(float(expected), rel=1e-5)


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def supposes_that_one_flows_back(params, x, targets, gather_matmul, axis_name):
    def plain(params, x):
        return vocab_parallel_loss(params, x, targets, gather_matmul, axis_name)

    loss = jax.custom_vjp(plain)
    loss.defvjp(lambda *given: (plain(*given), given), lambda kept, g: jax.vjp(plain, *kept)[1](g * 0 + 1))
    return loss(params, x)


def doubles_over_unknown_axes(params, tokens, axis_name):
    return (1 if axis_name in PUBLIC_AXES else 2) * solutions.vocab_parallel_embed(params, tokens, axis_name)


def drops_a_quarter_always(params, x, key, rate, gather_matmul, matmul_scatter, axis_name):
    return solutions.tp_transformer_block(params, x, key, 0.25 if rate else 0, gather_matmul, matmul_scatter, axis_name)


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("vocab_parallel_loss", supposes_that_one_flows_back),
        ("vocab_parallel_embed", doubles_over_unknown_axes),
        ("tp_transformer_block", drops_a_quarter_always),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("tp_transformer", task, function)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")
