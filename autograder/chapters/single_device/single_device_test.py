"""The contract of ``single_device`` measures correctly: oracles, tolerances and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autograder.chapters.single_device import CONTRACT
from autograder.chapters.single_device.memory import DEEP, SHALLOW, TOLERANCE, does_not_grow
from autograder.chapters.single_device.wrapping import STEPS, halves_loss, model_loss
from autograder.contract.case_builders import model_of, params_of
from autograder.contract.task import Evidence, TaskEvidence, load, references
from autograder.proof.central_differences import places
from autograder.proof.mutants import judged_on
from autograder.release.reference_metrics import look
from course.model import full_loss
from course.program import Costs, Memory
from solutions import single_device as solutions

TASKS = {task.name: task for task in CONTRACT.tasks}


@pytest.mark.parametrize("number", places(1, 0, 2))
def test_oracle_of_chunked_attention_is_jaxs_own_attention(number):
    task, case = TASKS["chunked_attention"], TASKS["chunked_attention"].cases[number]
    inputs = task.draw(np.random.default_rng(0), case)
    expected = task.oracle(inputs, case)["values"]
    own = jax.nn.dot_product_attention(*(jnp.asarray(inputs[name]) for name in "qkv"), is_causal=True)
    assert np.max(np.abs(own - expected)) < TOLERANCE / 4 * np.max(np.abs(expected))


def test_products_written_out_as_often_as_they_run_are_not_a_loop():
    cases = load("single_device").task("scan_layers").cases

    def judged(written):
        """The verdict on a program with this many products written in each case, which run once for each layer."""
        evidence = []
        for case in cases[:2]:
            costs = Costs(0, 0, 0, (), {"f32 x f32": case.sizes.num_layers}, written, written={"dot_general": written})
            evidence.append(Evidence(case, (), (), {}, {}, costs, Memory(0, 0, 0, 0, ())))
        return does_not_grow(TaskEvidence(evidence, None, {}), SHALLOW, DEEP, "depth", "").passed

    assert [judged(written) for written in (1, 8, 24, 25, 48)] == [True, True, True, False, False]


def test_oracle_of_scaled_step_follows_the_rules_by_hand():
    task = TASKS["scaled_step"]
    case, lowest, high = task.cases
    expected = {c.name: task.oracle(task.draw(np.random.default_rng(0), c), c) for c in task.cases}
    bits = np.log2(expected[case.name]["scale"])
    assert (list(bits), list(expected[case.name]["good_steps"])) == ([17, 18, 18, 17, 17, 18], [1, 0, 1, 0, 1, 0])
    bits = np.log2(expected[lowest.name]["scale"])
    assert (list(bits), list(expected[lowest.name]["good_steps"])) == ([0, 0, 0, 1, 0, 0], [0, 1, 2, 0, 0, 0])
    assert list(np.log2(expected[high.name]["scale"])) == [59, 58, 57, 56, 55, 54]


@pytest.mark.long
def test_bad_steps_have_a_finite_loss_and_good_ones_are_well_within_float16():
    task = TASKS["scaled_step"]
    for case in task.cases:
        inputs = task.draw(np.random.default_rng(0), case)
        expected = task.oracle(inputs, case)
        assert all(np.isfinite(loss) for loss in expected["losses"].values())
        scales = [float(inputs["scale"]), *map(float, expected["scale"])]
        for step in range(STEPS):
            batch = jax.tree.map(lambda a, step=step: a[step], inputs["batches"])

            def loss(params, batch=batch, case=case):
                return halves_loss(case.sizes.weight_bits)(params, batch)

            params = inputs["params"] if step == 0 else jax.tree.map(lambda a, s=step: a[s - 1], expected["values"])
            gradients = [np.abs(g).max() for g in jax.tree.leaves(jax.grad(loss)(params))]
            largest = np.max(gradients) * scales[step]
            if step in case.sizes.bad:
                assert not largest <= 4 * 65504
            else:
                assert largest < 65504 / (64 if case.sizes.weight_bits > 0 else 4)


def test_tolerance_of_mixed_precision_leaves_room_and_not_too_much():
    task = TASKS["mixed_precision_loss"]
    for case in (*places(*task.cases), *task.stretched()[1:]):
        step = jax.jit(jax.value_and_grad(lambda p, b, c=case: solutions.mixed_precision_loss(p, b, c.sizes.num_heads)))
        for seed in range(5):
            inputs = task.draw(np.random.default_rng(seed), case)
            expected = task.oracle(inputs, case)
            loss, gradients = step(inputs["params"], inputs["batch"])
            assert abs(loss - expected["values"]) < 2**-10 * expected["values"]
            pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected["gradients"]), strict=True)
            upstream = inputs["upstream"]
            worst = max(float(np.max(np.abs(upstream * a - b)) / np.max(np.abs(b))) for a, b in pairs)
            assert 2**-9 < worst < 2**-5


def test_mixed_precision_with_a_loop_over_heads_is_the_same_program_at_the_realistic_size():
    task = TASKS["mixed_precision_loss"]
    assert task.at_scale is not None
    large, small = task.at_scale[0], next(case for case in task.cases if case.name == task.at_scale[1])
    assert {case.sizes.num_heads for case in (small, large, *task.stretched())} == {large.sizes.num_heads}


def test_reference_of_accumulation_holds_one_microbatch_and_one_gradient():
    def one_microbatch(loss_fn, params, batch, num_microbatches):
        rows = jax.tree.leaves(batch)[0].shape[0] // num_microbatches
        return jax.value_and_grad(loss_fn)(params, jax.tree.map(lambda leaf: leaf[:rows], batch))

    at_scale = TASKS["accumulate_gradients"].at_scale
    assert at_scale
    case = at_scale[0]
    gradient = sum(4 * np.prod(leaf.shape) for leaf in jax.tree.leaves(params_of(case)))
    temporaries = look(TASKS["accumulate_gradients"], one_microbatch)["temporaries"]
    reference = references("single_device")["accumulate_gradients"]["temporaries"]["reference"]
    assert reference <= 1.15 * (temporaries + gradient)
    assert case.sizes.num_microbatches == 8


def test_float32_loss_of_the_notebook_is_the_oracles():
    task = TASKS["mixed_precision_loss"]
    for case in places(*task.cases):
        inputs = task.draw(np.random.default_rng(1), case)
        loss = solutions.float32_loss(inputs["params"], inputs["batch"], case.sizes.num_heads)
        assert loss == pytest.approx(task.oracle(inputs, case)["values"], rel=1e-5)


def test_loss_of_the_contract_is_the_models():
    case = TASKS["accumulate_gradients"].cases[0]
    inputs = TASKS["accumulate_gradients"].draw(np.random.default_rng(0), case)
    loss = model_loss(case)(inputs["params"], jax.tree.map(jnp.asarray, inputs["batch"]))
    assert loss == pytest.approx(float(full_loss(model_of(case), inputs["params"], inputs["batch"])), rel=1e-6)


def test_leaves_of_three_dims_are_cut_along_the_first_and_stay_whole_along_the_others():
    def flattens(loss_fn, params, batch, num_microbatches):
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), batch)
        return solutions.accumulate_gradients(loss_fn, params, rows, num_microbatches)

    tokens = TASKS["accumulate_gradients"].cases[2]
    assert judged_on("single_device", "accumulate_gradients", flattens, (tokens,)).points == 0


@pytest.mark.parametrize("number", [2, 4, 8])
def test_a_fixed_number_of_chunks_does_not_fit_every_case(number):
    def always_as_many(q, k, v, chunk):
        return solutions.chunked_attention(q, k, v, q.shape[1] // number)

    three = TASKS["chunked_attention"].cases[1]
    assert judged_on("single_device", "chunked_attention", always_as_many, (three,)).points == 0


def test_unseen_gradients_are_infinite_or_undefined_in_single_elements_of_any_leaf():
    task, places = TASKS["scaled_step"], set()
    for seed in range(12):
        case = task.unseen(np.random.default_rng(seed))
        inputs = task.draw(np.random.default_rng(seed), case)
        gradient = jax.jit(jax.grad(halves_loss(case.sizes.weight_bits)))
        for step in range(STEPS):
            gradients = gradient(inputs["params"], jax.tree.map(lambda a, step=step: a[step], inputs["batches"]))
            bad = {
                (path[0].key, path[1].key, kind, int(test(leaf).sum()))
                for path, leaf in jax.tree.leaves_with_path(gradients)
                for kind, test in (("infinite", np.isinf), ("undefined", np.isnan))
                if test(leaf).any()
            }
            assert len(bad) <= 1 and (not bad or step in case.sizes.bad)
            places |= bad
    assert {count for *_, count in places} == {1}
    assert len({(half, kind) for half, _, kind, _ in places}) == 4
    assert len({(half, leaf) for half, leaf, *_ in places}) >= 5
