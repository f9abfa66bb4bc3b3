"""Wrong answers for ``expert_parallel``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import NUMBERS, WRONG, mutant, patch, there_and_back
from course.moe import expert_mlp
from solutions.expert_parallel import balancing_loss, combine, dispatch, moe_layer, moe_step, overlapped_moe, route


def _mask(weights, experts, places, num_experts, capacity):
    """``[tokens, experts, capacity]``: the weight of the choice that has this place."""
    chosen = weights[:, :, None] * jax.nn.one_hot(experts, num_experts)
    return jnp.einsum("tke,tkc->tec", chosen, jax.nn.one_hot(places, capacity))


def multiplies_by_a_one_hot_mask(x, experts, places, num_experts, capacity):
    """A matmul with a mask of tokens and places."""
    mask = _mask(jnp.ones(experts.shape), experts, places, num_experts, capacity)
    return jnp.einsum("tec,td->ecd", mask, x)


def multiplies_by_a_mask_of_gates(y, gates, experts, places):
    """A matmul with the gates in a mask of tokens and places."""
    return jnp.einsum("tec,ecd->td", _mask(gates, experts, places, *y.shape[:2]), y)


def multiplies_by_one_hot_masks(params, x, k, capacity, axis_name):
    """The whole layer by products with masks."""
    logits = x @ params["router"]["kernel"]
    gates, experts, places = route(logits, params["router"]["bias"], k, capacity)
    sent = multiplies_by_a_one_hot_mask(x, experts, places, logits.shape[1], capacity)
    received = lax.all_to_all(sent, axis_name, split_axis=0, concat_axis=1, tiled=True)
    computed = expert_mlp(params["experts"], received)
    returned = lax.all_to_all(computed, axis_name, split_axis=1, concat_axis=0, tiled=True)
    return expert_mlp(params["shared"], x) + multiplies_by_a_mask_of_gates(returned, gates, experts, places), logits


def gathers_every_place(params, x, k, capacity, axis_name):
    """Every device gets all places of all experts, and throws most of them away."""
    logits = x @ params["router"]["kernel"]
    gates, experts, places = route(logits, params["router"]["bias"], k, capacity)
    own, first = params["experts"]["up"].shape[0], lax.axis_index(axis_name) * params["experts"]["up"].shape[0]
    gathered = lax.all_gather(dispatch(x, experts, places, logits.shape[1], capacity), axis_name, axis=1, tiled=True)
    computed = expert_mlp(params["experts"], lax.dynamic_slice_in_dim(gathered, first, own))
    gathered = lax.all_gather(computed, axis_name, tiled=True)
    returned = lax.dynamic_slice_in_dim(gathered, lax.axis_index(axis_name) * capacity, capacity, axis=1)
    return expert_mlp(params["shared"], x) + combine(returned, gates, experts, places), logits


def waits_for_every_place(params, x, k, capacity, axis_name, num_chunks):
    """One transfer each way: the layer without chunks."""
    return moe_layer(params, x, k, capacity, axis_name)


router, balance, send, collect = (partial(patch, f) for f in (route, balancing_loss, dispatch, combine))
layer, overlapped, step = (partial(patch, f) for f in (moe_layer, overlapped_moe, moe_step))

# In route.
CHOICE = "lax.top_k(gates + bias, k)[1]"
RETURNED_GATES = "return jnp.take_along_axis(gates, experts, axis=1)"
FIRST_CHOICES_FIRST = """every = (experts.T.reshape(-1, 1) == jnp.arange(logits.shape[1])).astype(jnp.int32)
    earlier = (jnp.cumsum(every, axis=0) - every).reshape(k, *logits.shape)
    places = jnp.take_along_axis(earlier, experts.T[:, :, None], axis=2)[:, :, 0].T
    places = jnp.minimum(places, capacity)"""
PLACES = "places = jnp.minimum(jnp.take_along_axis(before, experts, axis=1), capacity)"

# In balancing_loss.
COUNTED = "lax.psum(jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts), axis=0), axes)"
MEAN_GATES = "jnp.mean(gates, axis=0)"

ALL_ROWS = "jnp.sum(lax.psum((experts.reshape(-1, 1) == jnp.arange(num_experts)).astype(jnp.int32), axes), axis=0)"

# In dispatch and combine.
ADDED = "empty.at[experts, places].add(x[:, None]"
# In moe_layer and overlapped_moe.
THERE = "lax.all_to_all(sent, axis_name, split_axis=0, concat_axis=1, tiled=True)"
SWAPPED = "lax.all_to_all({}, axis_name, split_axis=0, concat_axis=0, tiled=True)"
AGAIN = THERE.replace("sent", SWAPPED.format(SWAPPED.format("sent")))
MIXED = f"{SWAPPED.format('sent')}.reshape(-1, lax.axis_size(axis_name) * capacity, x.shape[1])"
ROUND = f"logits = {there_and_back('logits', 'axis_name')}"
SHARED = 'expert_mlp(params["shared"], x)'

# In moe_step.
EXPERTS = "lax.pmean(gradient, data_axis) / lax.axis_size(expert_axis)"
TWICE = "lax.pmean(as_varying(as_varying(lax.pmean(gradient, both), data_axis), expert_axis), both)"
MASKED = ("FLOPs", "live temporaries")
LATE = ("exposed communication", "predicted time")
REDUCED, TRAVELS, COUNT, OTHERS = "all-reduce bytes", "all-to-all bytes", "all-to-alls", "other collectives"

MUTANTS = (
    router(
        "gates_carry_no_gradient",
        {RETURNED_GATES: RETURNED_GATES.replace("(gates", "(lax.stop_gradient(gates)")},
        "gradients",
    ),
    router(
        "divides_by_the_gates_chosen",
        {
            RETURNED_GATES: "gates /= jnp.take_along_axis(gates, experts, axis=1).sum(1, keepdims=True)\n    "
            + RETURNED_GATES
        },
        *WRONG,
    ),
    router("multiplies_by_the_biased_gates", {CHOICE: f"{CHOICE}\n    gates = gates + bias"}, *WRONG),
    router("counts_the_token_itself", {" - chosen": ""}, "values"),
    router("is_never_full", {PLACES: PLACES.replace("jnp.minimum(", "").replace(", capacity)", "")}, "values"),
    router("serves_first_choices_first", {PLACES: FIRST_CHOICES_FIRST}, "values"),
    router("counts_in_8_bits", {".astype(jnp.int32)": ".astype(jnp.int8)"}, "values", shown_by=("700 tokens",)),
    router(
        "takes_the_softmax_without_its_maximum",
        {"jax.nn.softmax(logits)": "jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)"},
        *WRONG,
        shown_by=("5 tokens, large logits",),
    ),
    balance("balances_each_device", {COUNTED: COUNTED.removeprefix("lax.psum(").removesuffix(", axes)")}, *WRONG),
    balance("takes_gates_for_constants", {MEAN_GATES: "jnp.mean(lax.stop_gradient(gates), axis=0)"}, "gradients"),
    balance("forgets_the_number_of_experts", {"balance = num_experts * ": "balance = "}, *WRONG),
    balance("pulls_the_wrong_way", {"bias + rate": "bias - rate"}, "values"),
    balance(
        "moves_an_expert_with_its_share",
        {"jnp.sign(1 / num_experts - load)": "jnp.where(load < 1 / num_experts, 1.0, -1.0)"},
        "values",
        shown_by=("data=1 x expert=1",),
    ),
    balance(
        "gathers_every_choice",
        {COUNTED: "jnp.sum(lax.all_gather(experts, axes).reshape(-1, 1) == jnp.arange(num_experts), axis=0)"},
        OTHERS,
    ),
    balance("sums_over_devices_before_it_counts", {COUNTED: ALL_ROWS}, REDUCED),
    mutant("dispatch", multiplies_by_a_one_hot_mask, *MASKED),
    send("puts_dropped_tokens_into_the_last_place", {'"drop"': '"clip"'}, *WRONG),
    send("sends_the_first_choice_alone", {ADDED: "empty.at[experts[:, :1], places[:, :1]].add(x[:, None]"}, *WRONG),
    send("sends_no_gradient_back", {"add(x[": "add(lax.stop_gradient(x)["}, "gradients"),
    send("divides_by_the_choices", {"x[:, None]": "x[:, None] / experts.shape[1]"}, *WRONG),
    mutant("combine", multiplies_by_a_mask_of_gates, *MASKED),
    collect("forgets_the_gates", {"gates[:, :, None] * each": "each"}, *WRONG),
    collect("gives_gates_no_gradient", {"sum(gates": "sum(lax.stop_gradient(gates)"}, "gradients"),
    collect("gives_experts_no_gradient", {"each = y": "each = lax.stop_gradient(y)"}, "gradients"),
    collect("takes_the_last_place_for_a_dropped_choice", {'mode="fill", fill_value=0': 'mode="clip"'}, *WRONG),
    mutant("moe_layer", multiplies_by_one_hot_masks, *MASKED),
    mutant("moe_layer", gathers_every_place, TRAVELS, OTHERS, "live temporaries"),
    layer("forgets_the_shared_expert", {f"{SHARED} + ": ""}, *WRONG),
    layer("mixes_up_devices_and_experts", {THERE: MIXED}, *WRONG),
    layer("gives_the_router_no_gradient", {"route(logits": "route(lax.stop_gradient(logits)"}, "gradients"),
    layer("sends_tokens_once_more", {THERE: AGAIN}, TRAVELS),
    layer("sends_logits_round", {"    computed =": f"    {ROUND}\n    computed ="}, OTHERS),
    mutant("overlapped_moe", waits_for_every_place, COUNT, *LATE),
    overlapped("sends_every_chunk_once_more", {THERE: AGAIN}, TRAVELS, COUNT, *LATE),
    overlapped(
        "sends_a_chunk_for_each_place_up_to_four",
        {"capacity), num_chunks,": "capacity), min(capacity, 4),"},
        COUNT,
        shown_by=("expert=3 x data=2",),
    ),
    overlapped("puts_chunks_back_in_reverse", {"concatenate(returned": "concatenate(returned[::-1]"}, *WRONG),
    overlapped("forgets_the_shared_expert_in_chunks", {"return shared + ": "return "}, *WRONG),
    overlapped(
        "gives_the_router_no_gradient_in_chunks", {"route(logits": "route(lax.stop_gradient(logits)"}, "gradients"
    ),
    overlapped(
        "sends_logits_round_in_chunks",
        {"tiled=True) for y in computed]\n": f"tiled=True) for y in computed]\n    {ROUND}\n"},
        OTHERS,
    ),
    step(
        "averages_experts_over_both",
        {EXPERTS: "lax.pmean(gradient, both)"},
        *NUMBERS,
        REDUCED,
        shown_by=("data=1 x expert=8",),
    ),
    step("forgets_to_divide", {EXPERTS: "lax.pmean(gradient, data_axis)"}, *NUMBERS),
    step("forgets_the_copies", {EXPERTS: "gradient / lax.axis_size(expert_axis)"}, *NUMBERS, REDUCED),
    step("forgets_the_z_loss", {" + model.z * jnp.mean(z)": ""}, *NUMBERS),
    step(
        "weighs_the_z_loss_by_itself",
        {"model.z * jnp.mean(z)": "0.1 * jnp.mean(z)"},
        *NUMBERS,
        shown_by=("replica=3 x device=2",),
    ),
    step("returns_its_own_loss", {"return updated, lax.pmean(loss, both)": "return updated, loss"}, "values"),
    step("averages_twice", {"return lax.pmean(gradient, both)": f"return {TWICE}"}, REDUCED),
    step("sends_tokens_once_more_in_the_step", {THERE: AGAIN}, TRAVELS, inside=moe_layer),
    step(
        "sends_the_loss_round",
        {"lax.pmean(loss, both)": f"lax.pmean({there_and_back('loss', 'expert_axis')}, both)"},
        OTHERS,
    ),
)
