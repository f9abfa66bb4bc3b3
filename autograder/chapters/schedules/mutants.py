"""Wrong answers for ``schedules``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from functools import partial

import jax

from autograder.chapters.mutant import NUMBERS, WRONG, mutant, patch, there_and_back
from solutions.schedules import (
    execute_schedule,
    interleaved,
    one_f_one_b,
    split_backward,
    two_weight_versions_step,
    zero_bubble,
)


def gpipes_order(num_stages, num_microbatches):
    """The order that JAX derives from a forward pipeline: as fast, but with everything in flight."""
    forward, backward = ([f"{kind}{m}" for m in range(num_microbatches)] for kind in "FB")
    return (" ".join(forward + backward[::-1]),) * num_stages


def drains_between_groups(num_stages, num_microbatches):
    """Groups of as many microbatches as there are stages, each run as a separate GPipe."""
    words = []
    for first in range(0, num_microbatches, num_stages):
        group = range(first, min(first + num_stages, num_microbatches))
        words += [f"F{m}" for m in group] + [f"B{m}" for m in reversed(group)]
    return (" ".join(words),) * num_stages


def breadth_first(num_stages, num_microbatches, num_repeats):
    """All microbatches through one part before the next."""
    if num_microbatches % num_stages:
        raise ValueError(f"{num_microbatches} microbatches, {num_stages} stages")
    turns = [f"{m}{'abcd'[r]}" for r in range(num_repeats) for m in range(num_microbatches)]
    return (" ".join([f"F{turn}" for turn in turns] + [f"B{turn}" for turn in reversed(turns)]),) * num_stages


def drains_between_groups_of_repeats(num_stages, num_microbatches, num_repeats):
    """The interleaved order for as many microbatches as stages, one group after another."""
    if num_microbatches % num_stages:
        raise ValueError(f"{num_microbatches} microbatches, {num_stages} stages")

    def later(word, group):
        return f"{word[0]}{int(word[1:-1]) + group * num_stages}{word[-1]}"

    groups = range(num_microbatches // num_stages)
    lines = interleaved(num_stages, num_stages, num_repeats)
    return tuple(" ".join(later(word, group) for group in groups for word in line.split()) for line in lines)


def weights_at_once(num_stages, num_microbatches):
    """1F1B with each backward pass split in two, and nothing postponed."""
    lines = one_f_one_b(num_stages, num_microbatches)
    return tuple(" ".join(f"I{w[1:]} W{w[1:]}" if w[0] == "B" else w for w in line.split()) for line in lines)


def never_splits(num_stages, num_microbatches):
    """1F1B itself."""
    return one_f_one_b(num_stages, num_microbatches)


def weights_at_the_end(num_stages, num_microbatches):
    """All gradients of weights after everything else, with all microbatches in flight."""
    lines = one_f_one_b(num_stages, num_microbatches)
    last = " ".join(f"W{m}" for m in range(num_microbatches))
    return tuple(f"{line.replace('B', 'I')} {last}" for line in lines)


def differentiates_twice(activation):
    """``jax.vjp`` once for the input and once for the weights: right, but most of it is computed twice."""

    def layer(weights, x):
        return x + activation(x @ weights["up"]) @ weights["down"]

    def forward(weights, x):
        return layer(weights, x), {"x": x}

    def backward_input(weights, saved, dy):
        (dx,) = jax.vjp(lambda x: layer(weights, x), saved["x"])[1](dy)
        return dx, {"dy": dy, "weights": weights}

    def backward_weights(saved, pending):
        return jax.vjp(lambda weights: layer(weights, saved["x"]), pending["weights"])[1](pending["dy"])[0]

    return forward, backward_input, backward_weights


def writes_products_as_sums(activation):
    """Computes the gradients of the weights early, in products that are not a ``dot_general``."""

    def product(a, b):
        return (a[:, :, None] * b[None]).sum(1)

    def forward(weights, x):
        z = product(x, weights["up"])
        return x + product(activation(z), weights["down"]), {"x": x, "z": z}

    def backward_input(weights, saved, dy):
        (dz,) = jax.vjp(activation, saved["z"])[1](product(dy, weights["down"].T))
        gradients = {"up": product(saved["x"].T, dz), "down": product(activation(saved["z"]).T, dy)}
        return dy + product(dz, weights["up"].T), gradients

    return forward, backward_input, lambda saved, pending: pending


alternate, deep, split = partial(patch, one_f_one_b), partial(patch, interleaved), partial(patch, split_backward)
fill, execute, versions = (
    partial(patch, zero_bubble),
    partial(patch, execute_schedule),
    partial(patch, two_weight_versions_step),
)
SWITCH = 'lax.switch(at["action"], [actions[number] for number in sorted(actions)], state, at)'
CHOICE = (
    "jax.tree.map(lambda *found: lax.select_n(jnp.broadcast_to(at['action'], found[0].shape), *found), "
    "*(actions[number](state, at) for number in sorted(actions)))"
)
PLACES = "table.num_slots[kind], like=example"
EVERY = "len(microbatches) * table.num_repeats, like=example"
THERE_AND_BACK = there_and_back('state["y"]', "axis_name")
AVERAGED = 'lax.pcast(lax.pmean(g, data_axis), data_axis, to="varying")'
BOTH = ("bubble", "in flight")

MUTANTS = (
    mutant("one_f_one_b", gpipes_order, "in flight"),
    mutant("one_f_one_b", drains_between_groups, "bubble", "in flight"),
    alternate("begins_one_alone", {"min(num_stages - stage, num_microbatches)": "1"}, "bubble"),
    alternate("begins_one_too_many", {"min(num_stages - stage,": "min(num_stages - stage + 1,"}, "in flight"),
    alternate("begins_too_few", {"min(num_stages - stage,": "min(max(num_stages - stage - 1, 1),"}, "bubble"),
    alternate("numbers_stages_backwards", {"min(num_stages - stage,": "min(stage + 1,"}, "values"),
    mutant("interleaved", breadth_first, "in flight"),
    mutant("interleaved", drains_between_groups_of_repeats, "bubble"),
    deep("begins_with_everything", {"ahead = min(2": "ahead = max(2"}, "values"),
    deep(
        "goes_backward_through_the_parts_in_order",
        {'repeat if kind == "F" else num_repeats - 1 - repeat': "repeat"},
        "values",
    ),
    deep("refuses_nothing", {"if num_microbatches % num_stages:": "if num_microbatches < 1:"}, "values"),
    deep(
        "begins_one_too_many",
        {"(num_repeats - 1) * num_stages, turns)": "(num_repeats - 1) * num_stages + 1, turns)"},
        "in flight",
    ),
    mutant("split_backward", differentiates_twice, "FLOPs"),
    mutant("split_backward", writes_products_as_sums, "FLOPs", shown_by=("silu, without weights' gradients",)),
    split(
        "computes_weights_gradients_ahead",
        {
            '{"dy": dy, "dz": dz}': '{"up": saved["x"].T @ dz, "down": activation(saved["z"]).T @ dy}',
            '{"up": saved["x"].T @ pending["dz"], "down": activation(saved["z"]).T @ pending["dy"]}': "pending",
        },
        "FLOPs",
        shown_by=("silu, without weights' gradients",),
    ),
    split("forgets_the_residual_forward", {"return x + activation": "return activation"}, "values"),
    split("forgets_the_residual", {"return dy + dz": "return dz"}, "gradients"),
    split(
        "takes_the_slope_of_the_output",
        {'jax.vjp(activation, saved["z"])': 'jax.vjp(activation, activation(saved["z"]))'},
        "gradients",
    ),
    split("has_the_weights_gradient_without_activation", {'activation(saved["z"]).T': 'saved["z"].T'}, "gradients"),
    mutant("zero_bubble", weights_at_once, "bubble"),
    mutant("zero_bubble", weights_at_the_end, *BOTH),
    mutant("zero_bubble", never_splits, "bubble"),
    fill(
        "puts_off_by_one_more",
        {
            "if microbatch >= stage:": "if microbatch >= stage + 1:",
            'f"W{microbatch - stage}"': 'f"W{microbatch - stage - 1}"',
            "max(num_microbatches - stage, 0)": "max(num_microbatches - stage - 1, 0)",
        },
        *BOTH,
    ),
    fill("leaves_the_last_weights_out", {"range(max(num_microbatches - stage, 0), num_microbatches)": "()"}, "values"),
    execute("computes_everything_and_chooses", {SWITCH: CHOICE}, "bubble"),
    execute("keeps_a_place_for_every_microbatch", {PLACES: EVERY}, "live temporaries"),
    execute("sums_the_microbatches", {" / len(microbatches)": ""}, *WRONG),
    execute("starts_back_from_every_part", {"dy, when=last": "dy, when=True"}, "gradients"),
    execute("overwrites_what_is_saved", {'at["saved"], saved)': "0, saved)"}, "gradients"),
    execute(
        "gathers_the_gradients",
        {'return state["loss"], state["sums"]': 'return lax.psum(state["loss"], axis_name), state["sums"]'},
        "other collectives",
    ),
    execute("sends_both_ways_twice", {'lax.ppermute(state["y"],': f"lax.ppermute({THERE_AND_BACK},"}, "permute bytes"),
    execute(
        "passes_nothing_round",
        {"(i, (i + 1) % num_stages) for i in range(num_stages)": "(i, i + 1) for i in range(num_stages - 1)"},
        *WRONG,
        shown_by=("pipe=2, interleaved",),
    ),
    versions(
        "sends_both_ways_twice",
        {'lax.ppermute(state["y"],': f"lax.ppermute({THERE_AND_BACK},"},
        "permute bytes",
        inside=execute_schedule,
    ),
    versions(
        "gathers_every_gradient",
        {"lax.pmean(g, data_axis)": "lax.pmean(g + 0 * lax.all_gather(g, data_axis)[0], data_axis)"},
        "other collectives",
    ),
    versions("takes_the_gradient_at_the_newest", {'versions["older"]': 'versions["newest"]'}, *NUMBERS),
    versions(
        "changes_the_older",
        {'learning_rate * g, versions["newest"], gradients)': 'learning_rate * g, versions["older"], gradients)'},
        *NUMBERS,
    ),
    versions("keeps_one_version", {'"older": versions["newest"]': '"older": newest'}, *NUMBERS),
    versions(
        "averages_twice",
        {"lambda g: lax.pmean(g, data_axis)": f"lambda g: lax.pmean({AVERAGED}, data_axis)"},
        "all-reduce bytes",
    ),
    versions(
        "forgets_the_other_pipelines",
        {"lambda g: lax.pmean(g, data_axis)": "lambda g: g"},
        *NUMBERS,
        "all-reduce bytes",
    ),
)
