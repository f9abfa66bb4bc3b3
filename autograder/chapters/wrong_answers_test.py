"""Wrong answers: no points for knowing only the public cases, and messages that point to the mistake."""

import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import pytest

from autograder.chapters.data_parallel.wrapping import of_leaves
from autograder.chapters.mutant import patch
from autograder.checking.judging import judge_function
from autograder.contract.task import load
from autograder.contract.verdict import FAIL, PASS
from autograder.grading.outside.judge import plan
from autograder.proof.mutants import doubles_gradients, judged_unseen
from solutions.single_device import scaled_step


@cache
def public_axes(chapter: str) -> set[str]:
    return {axis for task in load(chapter).tasks for case in task.cases for axis in case.mesh}


# A cheat is ``(solve, inputs, axes) -> result``: ``solve(**changes)`` is the solution on ``inputs`` with some inputs
# replaced, by name, and ``axes`` are the mesh axes of the chapter's public cases.
Cheat = Callable[[Callable[..., Any], dict[str, Any], set[str]], Any]


def twice(result: Any) -> Any:
    return jax.tree.map(lambda leaf: 2 * leaf, result)


def unless(known: Callable[[dict[str, Any], set[str]], bool], wrong: Callable[[Any], Any]) -> Cheat:
    """Right on known inputs, and wrong on all others."""
    return lambda solve, inputs, axes: solve() if known(inputs, axes) else wrong(solve())


def elsewhere(wrong: Callable[[Any], Any], axis: str = "axis_name") -> Cheat:
    """Right over public axes, and wrong over others."""
    return unless(lambda inputs, axes: inputs[axis] in axes, wrong)


def supposes_ones(*wrt: str) -> Cheat:
    """The gradient for a cotangent of ones, whatever the actual cotangent."""

    def cheat(solve, inputs, _):
        def plain(trees):
            return solve(**trees)

        known = jax.custom_vjp(plain)
        known.defvjp(lambda trees: (plain(trees), trees), lambda trees, g: jax.vjp(plain, trees)[1](g * 0 + 1))
        return known({name: inputs[name] for name in wrt})

    return cheat


def another_rate(times: float, known: Callable[[dict[str, Any], set[str]], bool]) -> Cheat:
    def cheat(solve, inputs, axes):
        return solve(learning_rate=inputs["learning_rate"] * (1 if known(inputs, axes) else times))

    return cheat


def wide(*widths: int) -> Callable[..., bool]:
    return lambda inputs, _: inputs["batch"]["inputs"].shape[-1] in widths


def knows_which_leaf_is_split_how(solve, inputs, _):
    case = load("data_parallel").task("sync_gradients").cases[0]
    turned = dict(zip(case.mesh, inputs["axis_names"], strict=False))
    public = of_leaves(case, lambda _, spec: spec)
    return solve(specs=jax.tree.map(lambda spec: jax.P(*jax.tree.map(turned.get, tuple(spec))), public))


def folds_public_axes(solve, inputs, axes):
    return solve(axis_names=tuple(name for name in inputs["axis_names"] if name in axes))


def halves_gradients_of_unknown_widths(solve, inputs, _):
    layers, (after, loss, gradients) = inputs["params"].get("layers", {}), solve()
    known = "up" in layers and layers["up"]["kernel"].shape[1] in (8, 16)
    return after, loss, gradients if known else jax.tree.map(lambda g: g / 2, gradients)


def reduces_over_public_axes_alone(solve, inputs, axes):
    loss, gradients = solve()
    size = 1 if inputs["axis_name"] in axes else jax.lax.axis_size(inputs["axis_name"])
    return loss, jax.tree.map(lambda g: g * size, gradients)


def has_a_wrong_gradient_of_one_leaf(solve, *_):
    loss, gradients = solve()
    leaves, tree = jax.tree.flatten(gradients)
    return loss, tree.unflatten([1.01 * leaves[0], *leaves[1:]])


def draws_alike_over_unknown_axes(solve, inputs, axes):
    parts = solve()
    if inputs["axis_name"] in axes or inputs["split"] is None:
        return parts
    return {**parts, "kernel": jax.lax.pmean(parts["kernel"], inputs["axis_name"])}


def public_microbatches(inputs, axes):
    known = {case.sizes.num_microbatches for case in load("pipeline").task("execute_pipeline").cases}
    return len(inputs["microbatches"]) in known and inputs["axis_name"] in axes


def knows_the_public_questions(solve, inputs, _):
    if inputs["num_stages"] not in (1, 3, 4, 8):
        raise ValueError(f"{inputs['num_layers']} layers")
    return solve()


def knows_the_public_stages(solve, inputs, _):
    lines = solve()
    return lines if inputs["num_stages"] in (1, 3, 4, 8) else lines[::-1]


def knows_the_public_activations(solve, inputs, _):
    known = inputs["activation"] in (jax.nn.gelu, jax.nn.silu, jax.numpy.tanh)
    return solve() if known else solve(activation=jax.numpy.tanh)


def refuses_always(solve, inputs, _):
    raise ValueError("nothing fits")


def answers_with_endless_numbers(solve, *_):
    result = solve()
    return result and (10**10_000 + result[0], result[1])


def gives_up_on_all_but_the_smallest(solve, inputs, _):
    if inputs["sizes"].width >= 2000:
        raise ValueError("nothing fits")
    return solve()


def answers_with(number: float) -> Cheat:
    return lambda *_: (number, 1, 1, 1, 1, "none", False)


def twice_the_count(result):
    return {**result[0], "count": result[0]["count"] + 1}, result[1]


def twice_the_gates(result):
    return 2 * result[0], *result[1:]


def updates_with(**settings: Any) -> Cheat:
    """Right with the settings of public cases; otherwise, replaces some settings."""

    def cheat(solve, inputs, _):
        public = {case.sizes.learning_rate for case in load("zero").task("zero1_step").cases}
        known = inputs["config"].learning_rate in public
        return solve() if known else solve(config=inputs["config"]._replace(**settings))

    return cheat


def takes_public_axes_for_all(solve, inputs, axes):
    def known(spec):
        return all(axis in axes for axis in jax.tree.leaves(tuple(spec)))

    return solve(
        tree=jax.tree.map(lambda leaf, spec: leaf * (1 if known(spec) else 2), inputs["tree"], inputs["specs"])
    )


CHEATS: list[tuple[str, Cheat]] = [
    ("fsdp.gather_params", elsewhere(doubles_gradients)),
    ("fsdp.fsdp_loss", supposes_ones("shards")),
    ("fsdp.fsdp_train_step", another_rate(1.01, wide(8))),
    ("fsdp.hybrid_shard_step", elsewhere(lambda result: (result[0], 2 * result[1]), "replica_axis")),
    ("zero.shard_optimizer_state", unless(lambda inputs, _: inputs["min_size"] in (40, 64), twice_the_count)),
    ("zero.global_norm", takes_public_axes_for_all),
    ("zero.sharded_adamw", updates_with(weight_decay=0.4)),
    ("zero.zero1_step", updates_with(learning_rate=0.05)),
    ("zero.zero2_step", updates_with(clip=0.05)),
    ("data_parallel.fold_key_over_axes", folds_public_axes),
    ("data_parallel.sync_gradients", knows_which_leaf_is_split_how),
    ("data_parallel.train_step_dp", halves_gradients_of_unknown_widths),
    ("data_parallel.overlapped_gradients", reduces_over_public_axes_alone),
    ("data_parallel.overlapped_gradients", has_a_wrong_gradient_of_one_leaf),
    ("tensor_parallel.column_parallel_dense", elsewhere(twice)),
    ("tensor_parallel.init_dense", draws_alike_over_unknown_axes),
    ("tensor_parallel.tp_mlp", supposes_ones("params", "x")),
    ("tensor_parallel.tp_train_step", another_rate(0.5, wide(6))),
    ("tp_transformer.vocab_parallel_loss", supposes_ones("params", "x")),
    ("tp_transformer.vocab_parallel_embed", elsewhere(twice)),
    ("context_parallel.merge_attention", unless(lambda inputs, _: inputs["first"][0].shape[-1] == 5, twice)),
    ("context_parallel.ring_attention", elsewhere(twice)),
    (
        "context_parallel.zigzag_order",
        unless(lambda inputs, _: inputs["num_devices"] in (1, 3, 8), lambda pairs: pairs[:1] * len(pairs)),
    ),
    ("context_parallel.cp_transformer_step", elsewhere(lambda result: (result[0], 2 * result[1]), "context_axis")),
    ("tp_transformer.tp_transformer_block", lambda solve, inputs, _: solve(rate=0.25 if inputs["rate"] else 0)),
    ("sequence_parallel.enter_tensor_region", elsewhere(twice)),
    ("sequence_parallel.leave_tensor_region", supposes_ones("x")),
    (
        "sequence_parallel.sp_block",
        lambda solve, inputs, _: solve(rate=0.25 if inputs["rate"] > 0.1 else inputs["rate"]),
    ),
    ("sequence_parallel.ulysses_attention", elsewhere(doubles_gradients)),
    ("expert_parallel.route", unless(lambda inputs, _: inputs["logits"].shape[1] < 7, twice_the_gates)),
    ("expert_parallel.dispatch", unless(lambda inputs, _: inputs["num_experts"] < 7, twice)),
    ("expert_parallel.combine", unless(lambda inputs, _: inputs["y"].shape[0] < 7, doubles_gradients)),
    ("expert_parallel.moe_layer", elsewhere(doubles_gradients)),
    ("expert_parallel.overlapped_moe", elsewhere(twice)),
    ("expert_parallel.moe_step", another_rate(0.5, lambda inputs, axes: inputs["expert_axis"] in axes)),
    ("pipeline.split_microbatches", unless(wide(5), lambda parts: jax.tree.map(lambda leaf: leaf[::-1], parts))),
    ("pipeline.pipeline_tick", elsewhere(lambda result: (result[0], doubles_gradients(result[1])))),
    ("pipeline.execute_pipeline", unless(public_microbatches, doubles_gradients)),
    ("pipeline.pipeline_loss", supposes_ones("params")),
    ("looping_pipeline.layers_of_stage", knows_the_public_questions),
    ("looping_pipeline.loop_position", refuses_always),
    ("looping_pipeline.loop_position", lambda *_: (float("nan"), float("nan"))),
    ("looping_pipeline.loop_position", answers_with_endless_numbers),
    ("looping_pipeline.execute_looping_pipeline", elsewhere(twice)),
    ("looping_pipeline.looping_train_step", another_rate(0.5, lambda inputs, axes: inputs["pipe_axis"] in axes)),
    *((f"schedules.{order}", knows_the_public_stages) for order in ("one_f_one_b", "interleaved", "zero_bubble")),
    ("schedules.one_f_one_b", refuses_always),
    ("schedules.split_backward", knows_the_public_activations),
    ("schedules.execute_schedule", elsewhere(twice)),
    ("schedules.two_weight_versions_step", another_rate(0.5, lambda inputs, axes: inputs["pipe_axis"] in axes)),
    ("single_device.mixed_precision_loss", supposes_ones("params")),
    ("single_device.scan_layers", unless(lambda inputs, _: inputs["x"].shape[-1] == 16, doubles_gradients)),
    ("single_device.chunked_attention", unless(lambda inputs, _: inputs["q"].shape[2] in (3, 4), doubles_gradients)),
    ("transformer_3d.forward_3d", supposes_ones("params")),
    ("transformer_3d.choose_mesh", refuses_always),
    ("transformer_3d.choose_mesh", gives_up_on_all_but_the_smallest),
    ("transformer_3d.choose_mesh", answers_with(float("nan"))),
    ("transformer_3d.choose_mesh", answers_with(2**60)),
    ("transformer_3d.choose_mesh", answers_with(10**10_000)),
    ("async_tensor_parallel.ring_gather_matmul", elsewhere(lambda result: jax.numpy.roll(result, 1, -2))),
    ("async_tensor_parallel.matmul_ring_scatter", unless(lambda inputs, _: inputs["kernel"].shape == (5, 6), twice)),
    ("async_tensor_parallel.async_tp_mlp", supposes_ones("params", "x")),
]
# Tasks whose failures have a message that explains the answer.
OF_VALUES = {"layers_of_stage", "loop_position", "choose_mesh", "one_f_one_b", "interleaved", "zero_bubble"}


def handed_in(chapter: str, task: str, cheat: Cheat) -> Callable[..., Any]:
    solution = getattr(importlib.import_module(f"solutions.{chapter}"), task)
    signature = inspect.signature(solution)

    def function(*values):
        inputs = dict(zip(signature.parameters, values, strict=True))
        return cheat(lambda **changes: solution(*{**inputs, **changes}.values()), inputs, public_axes(chapter))

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize("name", ["fsdp.gather_params", "looping_pipeline.loop_position", "transformer_3d.choose_mesh"])
def test_an_answer_that_does_not_cheat_is_right(name):
    chapter, task = name.split(".")
    result = judged_unseen(chapter, task, handed_in(chapter, task, lambda solve, *_: solve()))
    assert result.verdict == PASS, result.message


@pytest.mark.long
@pytest.mark.parametrize(("name", "cheat"), CHEATS)
def test_answer_that_knows_only_the_public_cases_earns_nothing(name, cheat):
    chapter, task = name.split(".")
    result = judged_unseen(chapter, task, handed_in(chapter, task, cheat), seed=SEEDS.get(chapter, 0))
    assert (result.verdict, result.points) == (FAIL, 0), result.message
    if task not in OF_VALUES:
        assert not result.message and all(fact.measured_text != "of the wrong structure" for fact in result.facts)


# Seeds whose unseen case differs from the public ones in the attributes that the cheats examine.
SEEDS = dict.fromkeys(("fsdp", "zero", "data_parallel", "pipeline", "single_device"), 3)
FINITE = "jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))"
# When a step skips and halves its scale, and the edits that replace the solution's own test.
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
    wrong = patch(scaled_step, where, SKIPS[where]).function
    result = judged_unseen("single_device", "scaled_step", wrong, seed=3)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")


# A mutant, a fact that it fails, a pattern in the message, and text that must not be in it.
MESSAGES = [
    ("collectives.stops_one_step_short", "values", "on mesh data=8", "is missing"),
    ("collectives.stops_one_step_short", "permute bytes", "should send at least", "ppermute"),
    ("collectives.keeps_every_chunk_until_the_end", "live temporaries", "", "scan"),
    ("fsdp.sums_gradients", "gradients", r"leaf at_limit on mesh data=8", "pmean"),
    ("fsdp.sums_gradients", "gradients", r"measured -?[\d.]+, expected -?[\d.]+ at \[\d, \d\]", "pmean"),
    ("fsdp.sums_gradients", "gradients", "8 times too large, and axis 'data' has that size", "pmean"),
    ("zero.sums_gradients", "gradients", "8 times too large, and axis 'data' has that size", "psum_scatter"),
    ("zero.counts_every_copy", "values", "It is too large: which leaf is added up over devices", "psum"),
    (
        "tensor_parallel.leaves_split_leaves_summed",
        "gradients",
        "leaf layers/down/kernel on mesh data=2 x tensor=4",
        "layers/down/bias",
    ),
    (
        "tensor_parallel.leaves_split_leaves_summed",
        "gradients",
        "4 times too large, and axis 'tensor' has that size",
        "layers/down/bias",
    ),
    (
        "looping_pipeline.averages_after_the_backward_pass",
        "exposed over data",
        "less if sending over 'data' took no time, 1.00 times the naive baseline's",
        "custom_vjp",
    ),
    ("schedules.keeps_a_place_for_every_microbatch", "live temporaries", "Its slots are reused", "num_slots"),
    ("schedules.differentiates_twice", "FLOPs", r"FLOPs together, and [\d,]+ are", "vjp"),
    ("async_tensor_parallel.leaves_the_derivative_to_jax", "predicted time", "times the naive baseline", "custom_vjp"),
]


@cache
def judged_with(mutant: str) -> dict[str, Any]:
    """The facts that the first mutant of that name fails in a check, by name."""
    chapter, name = mutant.split(".")
    mutants = importlib.import_module(f"autograder.chapters.{chapter}.mutants").MUTANTS
    wrong = next(m for m in mutants if m.name == name)
    locate = {wrong.function.__code__.co_filename: "mine"}.get
    result, _ = judge_function(plan(chapter, load(chapter).task(wrong.task)), wrong.function, locate)
    return {fact.name: fact for fact in result.facts if fact.passed is False}


@pytest.mark.parametrize(("mutant", "fact", "pattern", "absent"), MESSAGES)
def test_a_message_says_where_a_mistake_is_and_how_large_and_not_what_to_write(mutant, fact, pattern, absent):
    failed = judged_with(mutant)[fact]
    assert re.search(pattern, failed.message) and absent not in failed.message, failed.message
    # No single line is to blame if something is missing, if many places wait, or if there is one product too many.
    nowhere = failed.kind.required or failed.amiss < 0 or failed.name in ("exposed over data", "FLOPs")
    assert failed.line == "" if nowhere else failed.line.startswith("mine:"), failed.line
