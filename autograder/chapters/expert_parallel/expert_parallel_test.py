"""The contract of ``expert_parallel``: routing drops and breaks ties; the oracle is a sum over experts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autograder.chapters.expert_parallel import CONTRACT
from autograder.chapters.expert_parallel.mutants import MUTANTS
from autograder.chapters.expert_parallel.routing import places_of
from autograder.chapters.mutant import patch
from autograder.contract.verdict import PARTIAL, STUDENT_ERROR
from autograder.proof.mutants import judged
from course.moe import balance_and_z, expert_mlp, moe, moe_loss, moe_transformer
from solutions.expert_parallel import moe_layer

TASKS = {task.name: task for task in CONTRACT.tasks}


@pytest.mark.parametrize("case", TASKS["route"].cases[:2], ids=lambda case: case.name)
def test_drawn_tokens_tie_and_overflow(case):
    inputs = TASKS["route"].draw(np.random.default_rng(0), case)
    _, experts, places = places_of(inputs["logits"], inputs["bias"], case.sizes.k, case.sizes.capacity)
    scores = np.asarray(jax.nn.softmax(inputs["logits"])) + inputs["bias"]
    ties = sum(len(np.unique(row)) < len(row) for row in scores)
    assert ties > case.sizes.tokens // 4
    assert np.any(places == case.sizes.capacity)
    assert np.any(places < case.sizes.capacity)
    assert all(len(set(row)) == case.sizes.k for row in experts)


@pytest.mark.parametrize("name", ["moe_layer", "overlapped_moe"])
def test_layers_drop_tokens_and_keep_others_apart_from_ties(name):
    for case in TASKS[name].cases[1:3]:
        inputs = TASKS[name].draw(np.random.default_rng(0), case)
        logits = inputs["x"] @ inputs["params"]["router"]["kernel"]
        bias, s = inputs["params"]["router"]["bias"], case.sizes
        all_places = [places_of(part, bias, s.k, s.capacity)[2] for part in logits.reshape(-1, s.tokens, s.num_experts)]
        assert any(np.any(places == s.capacity) for places in all_places), case.name


def test_one_expert_chosen_by_all_is_a_plain_mlp_times_its_gate():
    keys = jax.random.split(jax.random.key(0), 6)
    weights = {"up": jax.random.normal(keys[0], (1, 4, 6)), "down": jax.random.normal(keys[1], (1, 6, 4))}
    shared = {"up": jnp.zeros((4, 6)), "down": jnp.zeros((6, 4))}
    router, x = {"kernel": jnp.zeros((4, 1)), "bias": jnp.zeros(1)}, jax.random.normal(keys[2], (5, 4))
    y, _ = moe({"router": router, "experts": weights, "shared": shared}, x, 1, 3)
    np.testing.assert_allclose(y[:3], expert_mlp(jax.tree.map(lambda w: w[0], weights), x[:3]), rtol=1e-6)
    assert not np.any(y[3:])


def test_balance_is_one_where_all_experts_are_equally_busy():
    logits = 9.0 * jnp.eye(4)
    balance, _, load = balance_and_z(jnp.concatenate([logits, logits]), jnp.zeros(4), 1)
    np.testing.assert_allclose((balance, *load), (1, *[0.25] * 4), rtol=1e-6)


@pytest.mark.parametrize("name", ["gathers_every_choice", "sums_over_devices_before_it_counts"])
def test_right_losses_that_send_too_much_lose_one_facts_share_and_not_half(name):
    result = judged("expert_parallel", next(one for one in MUTANTS if one.name == name), full=False)
    assert (result.verdict, result.points) == (PARTIAL, 2.5)
    assert "half of the points" not in result.reason


def test_a_transfer_without_tiles_is_an_error_with_the_remedy():
    tiled = "lax.all_to_all(sent, axis_name, split_axis=0, concat_axis=1, tiled=True)"
    cut = "sent.reshape(lax.axis_size(axis_name), -1, *sent.shape[1:])"
    untiled = f"(lambda y: y.reshape(y.shape[0], -1, y.shape[-1]))(lax.all_to_all({cut}, axis_name, 0, 1))"
    result = judged("expert_parallel", patch(moe_layer, "untiled", {tiled: untiled}, "values"), full=False)
    assert result.verdict == STUDENT_ERROR and "has a gradient only with tiled=True" in result.message


def test_groups_do_not_matter_where_nothing_is_dropped():
    sizes = {"width": 8, "hidden": 12, "num_layers": 2, "num_heads": 2, "num_experts": 4, "k": 2, "vocab": 16}
    model = moe_transformer(**sizes, max_seq=6)
    params, tokens = jax.jit(model.init)(jax.random.key(0)), jax.random.randint(jax.random.key(1), (4, 6), 0, 16)
    batch, loss = {"inputs": tokens, "targets": tokens}, jax.jit(partial(moe_loss, model), static_argnums=(2, 3))
    losses = [loss(params, batch, capacity, groups) for capacity, groups in ((24, 1), (12, 2), (6, 4))]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    assert not np.isclose(loss(params, batch, 2, 4), losses[0], rtol=1e-6)


def test_a_step_subtracts_its_gradient_which_is_large_enough_to_see_and_leaves_the_bias():
    for case in TASKS["moe_step"].cases:
        inputs = TASKS["moe_step"].draw(np.random.default_rng(2), case)
        result = TASKS["moe_step"].oracle(inputs, case)
        for (path, before), gradients in zip(
            jax.tree.leaves_with_path(inputs["params"]), jax.tree.leaves(result["gradients"]), strict=True
        ):
            largest = np.max(np.abs(inputs["learning_rate"] * gradients))
            bias = [entry.key for entry in path][-2:] == ["router", "bias"]
            assert largest == 0 if bias else largest > 0.02 * np.max(np.abs(before)), (case.name, path)
