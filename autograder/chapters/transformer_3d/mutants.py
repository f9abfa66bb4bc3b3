"""Wrong answers for ``transformer_3d``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import jax

from autograder.chapters.mutant import mutant, patch
from course.layout import along
from solutions.fsdp import gather_params
from solutions.transformer_3d import choose_mesh, complete, forward_3d, init_3d, tp_transformer_block, train_step_3d


def keeps_everything(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Never recomputes, and keeps what it gathered."""
    return forward_3d(params, specs, batch, key, replace(options, remat=False), data_axis, pipe_axis, tensor_axis)


def but(function: Callable[..., Any], **parts: Any) -> Callable[..., Any]:
    """The function with other things by these names in its module."""
    assert isinstance(function, FunctionType) and set(parts) <= set(function.__globals__)
    return FunctionType(function.__code__, {**function.__globals__, **parts}, function.__name__)


def gathers_in_every_tick(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """The parts travel through the ticks, and a layer is gathered whenever it is used."""
    one = jax.tree.map(lambda spec: along(type(spec)(*spec[3:]), data_axis), specs["layers"])

    def late(shards, each, axis_name):
        return shards if isinstance(shards, list) else gather_params(shards, each, axis_name)

    def block(weights, *rest):
        return tp_transformer_block(gather_params(weights, one, data_axis), *rest)

    def gradient(g, spec, data, others):
        return g if data in along(spec, data) and pipe_axis not in others else complete(g, spec, data, others)

    changed = but(forward_3d, gather_params=late, tp_transformer_block=block, complete=gradient)
    return changed(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis)


init, forward = partial(patch, init_3d), partial(patch, forward_3d)
step, choose = partial(patch, train_step_3d), partial(patch, choose_mesh)
PLACED, NUMBERS = ("split dims", "state bytes per device"), ("gradient norm", "gradients", "values")
COMPLETED = "jax.tree.map(lambda g, spec: complete(g, spec, data_axis, others), gradients, specs)"
RINGS = ("replica=1 x stage=2 x model=4, rings, side by side, dropout",)

MUTANTS = (
    init("leaves_data_out", {"shard_params(leaf[(0,) * skipped], data_axis, min_size)[1]": "P()"}, *PLACED),
    init(
        "leaves_features_out",
        {"tensor_specs(params, tensor_axis)": "jax.tree.map(lambda _: P(), params)"},
        *PLACED,
    ),
    init("splits_small_leaves_too", {"data_axis, min_size)[1]": "data_axis, 0)[1]"}, *PLACED),
    init(
        "asks_the_whole_leaf_for_its_size",
        {"data_axis, min_size)[1]": "data_axis, min_size // lax.axis_size(tensor_axis))[1]"},
        *PLACED,
    ),
    init(
        "gives_every_place_the_first_part",
        {"leaf = cut(leaf, dim, data_axis)": "leaf = lax.all_gather(cut(leaf, dim, data_axis), data_axis)[0]"},
        *("communication", "values"),
    ),
    mutant("forward_3d", keeps_everything, "live temporaries"),
    mutant(
        "forward_3d",
        gathers_in_every_tick,
        "all-gather bytes over data",
        "exposed over data",
        "reduce-scatter bytes over data",
    ),
    forward(
        "sums_twice_over_stages",
        {
            f"return {COMPLETED}": (
                f"found = {COMPLETED}\n"
                "        if pipe_axis not in others:\n"
                "            return found\n"
                "        return jax.tree.map(lambda g: as_varying(lax.pmean(g, pipe_axis), pipe_axis), found)"
            )
        },
        "all-reduce bytes",
    ),
    forward(
        "folds_the_stage_in",
        {"fold_key_over_axes(key, (data_axis,))": "fold_key_over_axes(key, (data_axis, pipe_axis))"},
        *NUMBERS,
        shown_by=RINGS,
    ),
    forward("forgets_rings", {"if options.rings else": "if False else"}, "transfers in one piece", shown_by=RINGS),
    forward(
        "forgets_bfloat16",
        {"return x.astype(options.dtype)": "return x"},
        "bfloat16 products",
        shown_by=("data=2 x pipe=2 x tensor=2", "data=2 x pipe=1 x tensor=2, bfloat16"),
    ),
    step(
        "clips_by_its_own_norm",
        {"lax.psum(sum(jax.tree.leaves(squares)), axes)": "sum(jax.tree.leaves(squares))"},
        *NUMBERS,
    ),
    step("counts_copies", {" / jnp.prod(jnp.asarray(copies, gradient.dtype))": ""}, *NUMBERS),
    step(
        "always_scales",
        {"jnp.minimum(1, largest_norm / norm)": "largest_norm / norm"},
        *NUMBERS,
        shown_by=("data=2 x pipe=2 x tensor=2, 20 steps",),
    ),
    step(
        "averages_once_more",
        {
            "return jax.tree.map(lambda part, g: part - rate * g, params, gradients)": (
                "def averaged(part, g, spec):\n"
                "        copies = tuple(axis for axis in axes if axis not in along(spec, axis))\n"
                "        return lax.pmean(part - rate * g, copies)\n\n"
                "    return jax.tree.map(averaged, params, gradients, specs)"
            )
        },
        "all-reduce bytes",
    ),
    step("reports_the_loss_of_its_rows", {"lax.pmean(loss, data_axis)": "loss"}, "values"),
    choose("takes_the_fastest_whatever_it_holds", {"if found.fits and (": "if ("}, "memory fits"),
    choose(
        "holds_as_little_as_possible", {"found.seconds < best.seconds": "found.bytes < best.bytes"}, "predicted MFU"
    ),
    choose("always_recomputes", {'("none", "block")': '("block",)'}, "predicted MFU"),
    choose("never_shards_state", {"(False, True)": "(False,)"}, "predicted MFU"),
    choose(
        "gives_nothing_where_nothing_fits",
        {"return best.choice": "return best and best.choice", "if best is None:": "if False:"},
        "every choice can be placed",
    ),
)
