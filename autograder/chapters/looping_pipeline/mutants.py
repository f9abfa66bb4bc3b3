"""Wrong answers for ``looping_pipeline``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import NUMBERS, WRONG, mutant, patch
from course.mesh import as_varying
from course.model import layer_key
from solutions.data_parallel import fold_key_over_axes
from solutions.looping_pipeline import execute_looping_pipeline, layers_of_stage, loop_position, looping_train_step


def _take(tree: Any, at: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], tree)


def in_one_scan(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, *, enter):
    """One scan over all ticks; ``enter`` receives the weights where a stage uses them."""
    key = fold_key_over_axes(key, (data_axis,))
    axes, num_stages, index = (pipe_axis, data_axis), lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    counted = jnp.sum(batch["mask"])
    share = counted / lax.psum(counted, data_axis)
    num_repeats, each = jax.tree.leaves(params["layers"])[0].shape[:2]

    def loss_of(params):
        @jax.checkpoint
        def of_repeat(stack, x, microbatch, repeat):
            weights = enter(_take(stack, repeat))
            for j in range(each):
                number = (repeat * num_stages + index) * each + j
                x = model.layer(_take(weights, j), x, layer_key(key, microbatch, number))
            return x

        x = model.embed(params["embed"], batch["inputs"])
        x = x.reshape(num_microbatches, -1, *x.shape[1:])
        outputs = execute_looping_pipeline(partial(of_repeat, params["layers"]), x, num_repeats, pipe_axis)
        loss = model.loss(params["head"], outputs.reshape(-1, *outputs.shape[2:]), batch["targets"], batch["mask"])
        return jnp.where(index == num_stages - 1, share * loss, 0)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    for part in ("embed", "head"):
        gradients[part] = jax.tree.map(lambda g: lax.psum(g, axes), gradients[part])
    if enter is _as_they_are:
        gradients["layers"] = jax.tree.map(lambda g: lax.psum(g, data_axis), gradients["layers"])
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients), lax.psum(loss, axes)


def _as_they_are(weights: Any) -> Any:
    return weights


def averages_after_the_backward_pass(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The obvious step: right, but no reduction has any computation left to overlap with."""
    return in_one_scan(
        params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, enter=_as_they_are
    )


def averages_in_every_tick(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The weights enter where they are used, so that each tick's share of the gradients is reduced."""
    enter = jax.custom_vjp(_as_they_are)

    def summed(_, gradients):
        return (jax.tree.map(lambda g: as_varying(lax.psum(g, data_axis), data_axis), gradients),)

    enter.defvjp(lambda weights: (weights, None), summed)
    return in_one_scan(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, enter=enter)


layers, position = partial(patch, layers_of_stage), partial(patch, loop_position)
execute, step = partial(patch, execute_looping_pipeline), partial(patch, looping_train_step)
UNEVEN, PERIOD, WAITS_FOR_ALL = (
    "if num_layers % visits:",
    "max(num_microbatches, num_stages)",
    "num_microbatches + num_stages - 1",
)

TWICE = step(
    "averages_every_repeat_twice",
    {
        "entering(jax.tree.map(lambda leaf, i=repeat: leaf[i]": "(jax.tree.map(lambda leaf, i=repeat: leaf[i]",
        "run_once_traced(two_repeats,": "run_once_traced(entering(two_repeats),",
    },
    "all-reduce bytes",
)
averages_every_repeat_twice = TWICE.function

MUTANTS = (
    layers(
        "gives_neighbouring_layers",
        {"(repeat * num_stages + stage) * each": "(stage * num_repeats + repeat) * each"},
        "values",
    ),
    layers(
        "joins_the_repeats",
        {
            "tuple(tuple(range(start, start + each)) for": "tuple(layer for",
            "in first)": "in first for layer in range(start, start + each))",
        },
        "values",
    ),
    layers("leaves_layers_out", {UNEVEN: "if num_layers < visits:"}, "values"),
    layers("refuses_without_a_word", {UNEVEN: f'{UNEVEN}\n        raise ValueError("not divisible")'}, "values"),
    layers("counts_layers_from_one", {"* each for repeat": "* each + 1 for repeat"}, "values"),
    position("begins_everywhere_at_once", {"tick < stage": "tick < 0", "divmod(tick - stage": "divmod(tick"}, "values"),
    position(
        "never_waits_for_the_first",
        {PERIOD: "num_microbatches"},
        "values",
        shown_by=("4 stages, 2 microbatches, 3 repeats",),
    ),
    position("waits_for_the_first_alone", {PERIOD: "num_stages"}, "values"),
    position("waits_for_the_last", {PERIOD: WAITS_FOR_ALL}, "values"),
    position("gives_floats", {"return (microbatch, repeat) if": "return (microbatch / 1, repeat) if"}, "values"),
    execute("drains_between_repeats", {PERIOD: WAITS_FOR_ALL}, "bubble", "permute bytes"),
    execute(
        "begins_a_repeat_too_early",
        {PERIOD: "num_microbatches"},
        "bubble",
        *WRONG,
        shown_by=("data=2 x pipe=3, 1 microbatch",),
    ),
    execute(
        "has_four_stages_at_most",
        {"lax.axis_size(axis_name)": "min(4, lax.axis_size(axis_name))"},
        *WRONG,
        shown_by=("pipe=8, 8 microbatches",),
    ),
    execute(
        "gathers_the_outputs",
        {"outputs[-num_microbatches:]": "lax.all_gather(outputs[-num_microbatches:], axis_name)[-1]"},
        "other collectives",
    ),
    execute(
        "runs_a_tick_too_many",
        {WAITS_FOR_ALL: "num_microbatches + num_stages", "[-num_microbatches:]": "[-num_microbatches - 1 : -1]"},
        *("bubble", "permute bytes"),
    ),
    mutant("looping_train_step", averages_after_the_backward_pass, "exposed over data"),
    mutant("looping_train_step", averages_in_every_tick, "all-reduce bytes", "exposed over data"),
    TWICE,
    step(
        "computes_both_repeats_to_choose",
        {
            "weights = jax.tree.map(lambda leaf: leaf[1 - late], two_repeats)\n": (
                "both = [jax.tree.map(lambda leaf, i=i: leaf[i], two_repeats) for i in (0, 1)]\n"
            ),
            "return stage(weights, x, microbatch, repeat)": (
                "before, own = (stage(weights, x, microbatch, repeat) for weights in both)\n"
                "            return jnp.where(late == 1, before, own)"
            ),
        },
        "FLOPs",
    ),
    step("keeps_all_activations", {"@jax.checkpoint\n": "\n"}, "live temporaries"),
    step(
        "drops_alike_in_every_pipeline",
        {"fold_key_over_axes(key, (data_axis,))": "key"},
        *NUMBERS,
        shown_by=("data=2 x pipe=3, 1 microbatch",),
    ),
    step(
        "averages_means_of_pipelines",
        {"share = counted /": "share = 1 / lax.axis_size(data_axis) if True else counted /"},
        *NUMBERS,
    ),
    step(
        "numbers_layers_within_the_group",
        {"(repeat * num_stages + index) * layers_per_stage + j": "j"},
        *NUMBERS,
        shown_by=("data=2 x pipe=3, 1 microbatch",),
    ),
    step("drains_between_repeats_in_step", {PERIOD: WAITS_FOR_ALL}, "permute bytes"),
    step(
        "gathers_the_outputs_in_step",
        {"outputs[-num_microbatches:]": "lax.all_gather(outputs[-num_microbatches:], pipe_axis)[-1]"},
        "other collectives",
    ),
)
