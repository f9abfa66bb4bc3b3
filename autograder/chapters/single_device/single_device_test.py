"""The contract of ``single_device`` measures with right rulers: oracles, tolerances and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autograder.chapters.single_device import CONTRACT
from autograder.chapters.single_device.alternatives import with_products_without_batch_dims
from autograder.chapters.single_device.memory import TOLERANCE
from autograder.chapters.single_device.mutants import MUTANTS
from autograder.chapters.single_device.wrapping import STEPS, halves_loss, model_loss
from autograder.contract.case_builders import model_of, params_of
from autograder.contract.task import references
from autograder.contract.verdict import FAIL
from autograder.proof.mutants import doubles_gradients, forgets_what_flows_back, judged_unseen, patch
from autograder.release.reference_metrics import look
from course.model import full_loss
from solutions import single_device as solutions

TASKS = {task.name: task for task in CONTRACT.tasks}
WRONG = {mutant.name: mutant.function for mutant in MUTANTS}


def difference_at_the_largest(value_of, leaf, gradient, step):
    """The gradient's largest element, and the central difference of ``value_of`` there."""
    at = np.unravel_index(np.argmax(np.abs(gradient)), gradient.shape)
    shift = np.zeros_like(leaf)
    shift[at] = step
    return gradient[at], (value_of(leaf + shift) - value_of(leaf - shift)) / (2 * step)


def check_every_leaf(task, case, trees, gradients, value_of, step=2e-3, rel=1e-2):
    """Each leaf of ``gradients`` against central differences of ``value_of``, which takes a tree like ``trees``."""
    for path, gradient in jax.tree.leaves_with_path(gradients):
        leaf = dict(jax.tree.leaves_with_path(trees))[path]

        def moved(new, path=path):
            return value_of(jax.tree.map_with_path(lambda p, x: new if p == path else x, trees))

        exact, difference = difference_at_the_largest(moved, leaf, gradient, step)
        assert exact == pytest.approx(difference, rel=rel), (task, case.name, path)


@pytest.mark.parametrize("name", ["mixed_precision_loss", "accumulate_gradients"])
def test_oracles_of_losses_equal_central_differences(name):
    task = TASKS[name]
    for case in task.cases:
        inputs = task.draw(np.random.default_rng(0), case)
        expected = task.oracle(inputs, case)

        def loss(params, inputs=inputs, case=case):
            return float(task.oracle({**inputs, "params": params}, case)["values"]) * float(inputs.get("upstream", 1))

        check_every_leaf(name, case, inputs["params"], expected["gradients"], loss, step=1e-2, rel=2e-2)


@pytest.mark.parametrize("name", ["scan_layers", "remat_layers"])
def test_oracles_of_stacks_equal_central_differences(name):
    task = TASKS[name]
    for case in task.cases:
        inputs = task.draw(np.random.default_rng(0), case)
        expected = task.oracle(inputs, case)["gradients"]

        def value(trees, inputs=inputs, case=case):
            given = {**inputs, "params": trees["layers"], "inputs": trees["x"]}
            return float(np.vdot(np.float64(task.oracle(given, case)["values"]), np.float64(inputs["upstream"])))

        trees = {"layers": inputs["params"], "x": inputs["inputs"]}
        check_every_leaf(name, case, trees, expected, value, step=1e-2, rel=2e-2)


def test_oracle_of_chunked_attention_equals_central_differences_and_jaxs_own_attention():
    task = TASKS["chunked_attention"]
    for case in task.cases:
        inputs = task.draw(np.random.default_rng(0), case)
        expected = task.oracle(inputs, case)

        def value(trees, inputs=inputs, case=case):
            found = task.oracle({**inputs, **trees}, case)["values"]
            return float(np.vdot(np.float64(found), np.float64(inputs["upstream"])))

        trees = {name: inputs[name].astype(np.float64) for name in "qkv"}
        check_every_leaf(task.name, case, trees, expected["gradients"], value, step=1e-3)
        own = jax.nn.dot_product_attention(*(jnp.asarray(inputs[name]) for name in "qkv"), is_causal=True)
        assert np.max(np.abs(own - expected["values"])) < TOLERANCE / 4 * np.max(np.abs(expected["values"]))


def test_oracle_of_scaled_step_follows_the_rules_by_hand():
    task = TASKS["scaled_step"]
    case, lowest, high = task.cases
    found = {c.name: task.oracle(task.draw(np.random.default_rng(0), c), c) for c in task.cases}
    bits = np.log2(found[case.name]["scale"])
    assert (list(bits), list(found[case.name]["good_steps"])) == ([17, 18, 18, 17, 17, 18], [1, 0, 1, 0, 1, 0])
    bits = np.log2(found[lowest.name]["scale"])
    assert (list(bits), list(found[lowest.name]["good_steps"])) == ([0, 0, 0, 1, 0, 0], [0, 1, 2, 0, 0, 1])
    assert list(np.log2(found[high.name]["scale"])) == [59, 58, 57, 56, 55, 54]


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
                return halves_loss(case)(params, batch)

            params = inputs["params"] if step == 0 else jax.tree.map(lambda a, s=step: a[s - 1], expected["values"])
            gradients = [np.abs(g).max() for g in jax.tree.leaves(jax.grad(loss)(params))]
            largest = np.max(gradients) * scales[step]
            if step in case.sizes.bad:
                assert not largest <= 4 * 65504
            else:
                assert largest < 65504 / 64


def test_tolerance_of_mixed_precision_leaves_room_and_not_too_much():
    task = TASKS["mixed_precision_loss"]
    for case in task.cases:
        step = jax.jit(jax.value_and_grad(lambda p, b, c=case: solutions.mixed_precision_loss(p, b, c.sizes.num_heads)))
        for seed in range(5):
            inputs = task.draw(np.random.default_rng(seed), case)
            expected = task.oracle(inputs, case)
            loss, gradients = step(inputs["params"], inputs["batch"])
            assert abs(loss - expected["values"]) < 2**-10 * expected["values"]
            pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected["gradients"]), strict=True)
            times = inputs["upstream"]
            worst = max(float(np.max(np.abs(times * a - b)) / np.max(np.abs(b))) for a, b in pairs)
            assert 2**-9 < worst < 2**-5


def measured(task, function):
    return look(TASKS[task], function)


def test_reference_of_accumulation_holds_one_microbatch_and_one_gradient():
    def one_microbatch(loss_fn, params, batch, num_microbatches):
        rows = jax.tree.leaves(batch)[0].shape[0] // num_microbatches
        return jax.value_and_grad(loss_fn)(params, jax.tree.map(lambda leaf: leaf[:rows], batch))

    analysed = TASKS["accumulate_gradients"].at_scale
    assert analysed
    case = analysed[0]
    gradient = sum(4 * np.prod(leaf.shape) for leaf in jax.tree.leaves(params_of(case)))
    one = measured("accumulate_gradients", one_microbatch)["temporaries"]
    reference = references("single_device")["accumulate_gradients"]["temporaries"]["reference"]
    assert reference <= 1.15 * (one + gradient)
    assert case.sizes.num_microbatches == 8


def test_limits_separate_good_from_naive_by_more_than_15_percent():
    known = references("single_device")

    def share(task, figure="temporaries"):
        return known[task][figure]["reference"] / known[task][figure]["naive"]

    assert share("mixed_precision_loss") * 1.15 < 0.7 < 1 / 1.15
    assert 1.15 * share("accumulate_gradients") < 1 / 1.15
    assert share("remat_layers") * 1.15 < 0.35
    assert measured("remat_layers", WRONG["keeps_every_product"])["temporaries"] > (
        1.15 * 0.35 * known["remat_layers"]["temporaries"]["naive"]
    )
    policy = measured("remat_layers", with_products_without_batch_dims)
    assert policy["temporaries"] * 1.15 < 0.35 * known["remat_layers"]["temporaries"]["naive"]
    assert share("remat_layers", "flops") < 4 / 3
    twice = measured("remat_layers", WRONG["checkpoints_twice"])["flops"]
    assert twice > 4 / 3 * known["remat_layers"]["flops"]["naive"]
    assert share("chunked_attention") * 1.15 < 0.4
    kept = measured("chunked_attention", WRONG["keeps_every_chunk"])
    assert kept["temporaries"] > 1.15 * 0.4 * known["chunked_attention"]["temporaries"]["naive"]
    assert share("chunked_attention", "flops") * 1.15 < 1.35


def test_float32_loss_of_the_notebook_is_the_oracles():
    task = TASKS["mixed_precision_loss"]
    for case in task.cases:
        inputs = task.draw(np.random.default_rng(1), case)
        loss = solutions.float32_loss(inputs["params"], inputs["batch"], case.sizes.num_heads)
        assert loss == pytest.approx(task.oracle(inputs, case)["values"], rel=1e-5)


def test_loss_of_the_contract_is_the_models():
    case = TASKS["accumulate_gradients"].cases[0]
    inputs = TASKS["accumulate_gradients"].draw(np.random.default_rng(0), case)
    loss = model_loss(case)(inputs["params"], jax.tree.map(jnp.asarray, inputs["batch"]))
    assert loss == pytest.approx(float(full_loss(model_of(case), inputs["params"], inputs["batch"])), rel=1e-6)


def loses_what_flows_back(params, batch, num_heads):
    return forgets_what_flows_back(lambda params: solutions.mixed_precision_loss(params, batch, num_heads), params)


def scans_public_widths(layer, stacked_params, x):
    found = solutions.scan_layers(layer, stacked_params, x)
    return found if x.shape[-1] == 16 else doubles_gradients(found)


def attends_to_public_heads(q, k, v, chunk):
    found = solutions.chunked_attention(q, k, v, chunk)
    return found if q.shape[2:] in {(3, 10), (4, 10)} else doubles_gradients(found)


FINITE = "jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))"
# Where a step skips and halves its scale, and with what in place of the solution's own test.
SKIPS = {
    "where a target is far off": {
        "jnp.isfinite(g)": "jnp.abs(g) <= 1e6",
        "leaves(gradients)": 'leaves(batch["targets"])',
    },
    "where the first target of the second half is": {FINITE: 'batch["targets"]["second"][0, 0] <= 1e6'},
    "where one is infinite": {"jnp.isfinite(g)": "~jnp.isinf(g)"},
    "where one is NaN": {"jnp.isfinite(g)": "~jnp.isnan(g)"},
    "where the first element of a leaf is bad": {"jnp.isfinite(g)": "jnp.isfinite(g.ravel()[0])"},
}


@pytest.mark.parametrize("where", SKIPS)
def test_a_step_that_looks_for_some_bad_gradients_alone_earns_nothing(where):
    result = judged_unseen(
        "single_device", "scaled_step", patch(solutions.scaled_step, where, SKIPS[where]).function, seed=3
    )
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")


def test_unseen_gradients_are_infinite_or_undefined_in_single_elements_of_any_leaf():
    task, places = TASKS["scaled_step"], set()
    for seed in range(12):
        case = task.unseen(np.random.default_rng(seed))
        inputs = task.draw(np.random.default_rng(seed), case)
        gradient = jax.jit(jax.grad(halves_loss(case)))
        for step in range(STEPS):
            found = gradient(inputs["params"], jax.tree.map(lambda a, step=step: a[step], inputs["batches"]))
            bad = {
                (path[0].key, path[1].key, kind, int(test(leaf).sum()))
                for path, leaf in jax.tree.leaves_with_path(found)
                for kind, test in (("infinite", np.isinf), ("undefined", np.isnan))
                if test(leaf).any()
            }
            assert len(bad) <= 1 and (not bad or step in case.sizes.bad)
            places |= bad
    assert {count for *_, count in places} == {1}
    assert len({(half, kind) for half, _, kind, _ in places}) == 4
    assert len({(half, leaf) for half, leaf, *_ in places}) >= 5


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("mixed_precision_loss", loses_what_flows_back),
        ("scan_layers", scans_public_widths),
        ("chunked_attention", attends_to_public_heads),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("single_device", task, function, seed=3)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")
