"""Wrong answers for ``transformer_3d``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from types import FunctionType
from typing import Any

import jax

from autograder.chapters.mutant import GRADIENTS, NUMBERS, gathered_and_scattered, mutant, patch, there_and_back
from solutions.tp_transformer import tp_transformer_block
from solutions.transformer_3d import (
    choose_mesh,
    forward_3d,
    init_3d,
    layers_3d,
    run_ticks,
    stage_3d,
    train_step_3d,
    whole_weights,
)


def keeps_everything(params, specs, batch, key, options, data_axis, pipe_axis, tensor_axis):
    """Never recomputes, and keeps everything that it gathered."""
    return forward_3d(params, specs, batch, key, replace(options, remat=False), data_axis, pipe_axis, tensor_axis)


def but(function: Callable[..., Any], **parts: Any) -> Callable[..., Any]:
    """The function with some names in its module replaced."""
    assert isinstance(function, FunctionType) and set(parts) <= set(function.__globals__)
    return FunctionType(function.__code__, {**function.__globals__, **parts}, function.__name__)


def gathering_in_every_tick(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The parts are passed through the ticks, and a layer is gathered on every use."""

    @wraps(forward)
    def gathers_in_every_tick(params, specs, x, key, options, data_axis, pipe_axis, tensor_axis):
        layer_specs = specs.get("layers", specs)
        of_stage = jax.tree.map(lambda spec: type(spec)(*spec[2:]), layer_specs)

        def late(weights, *rest):
            return stage_3d(whole_weights(weights, of_stage, options.dtype, data_axis, (tensor_axis,)), *rest)

        layers = but(layers_3d, whole_weights=lambda parts, *rest: parts, stage_3d=late)
        changed = layers if forward is layers_3d else but(forward, layers_3d=layers)
        return changed(params, specs, x, key, options, data_axis, pipe_axis, tensor_axis)

    gathers_in_every_tick.__name__ = "gathers_in_every_tick"
    return gathers_in_every_tick


LOW_NORM = "rms_norm(*jax.tree.map(lambda a: a.astype('bfloat16'), (mlp['norm'], x))).astype('float32')"
low_block = patch(tp_transformer_block, "low_block", {'rms_norm(mlp["norm"], x)': LOW_NORM})


def taking_norms_in_bfloat16(function: Callable[..., Any]) -> Callable[..., Any]:
    """``stage_3d``, or a function that calls it, with the statistics of norms in bfloat16."""
    stage = but(stage_3d, tp_transformer_block=low_block.function)
    layers = but(layers_3d, stage_3d=stage)
    low = {stage_3d: stage, layers_3d: layers, forward_3d: but(forward_3d, layers_3d=layers)}[function]

    @wraps(function)
    def takes_norms_in_bfloat16(*args):
        return low(*args)

    takes_norms_in_bfloat16.__name__ = "takes_norms_in_bfloat16"
    return takes_norms_in_bfloat16


gathers_in_every_tick = gathering_in_every_tick(forward_3d)
init, forward = partial(patch, init_3d), partial(patch, forward_3d)
whole, stage, layers = partial(patch, whole_weights), partial(patch, stage_3d), partial(patch, layers_3d)
step, choose = partial(patch, train_step_3d), partial(patch, choose_mesh)
PLACED = ("split dims", "state bytes per device")
FIRST, RINGS = "data=2 x pipe=2 x tensor=2", ("replica=1 x stage=2 x model=4, rings, parallel, dropout",)
LOW, LOW_STAGE = "data=1 x pipe=3 x tensor=2, bfloat16, dropout", "replica=1 x stage=1 x model=4, bfloat16, rings"
LOW_LAYERS = "data=2 x pipe=1 x tensor=2, bfloat16, rings"
DROPOUT = ("replica=2 x stage=3 x model=1, one microbatch, dropout",)
TOTAL = "total = lax.psum(gradient, axes) / lax.axis_size(data_axis)"
LOWERED = "x.astype(options.dtype), kernel.astype(options.dtype), axis_name"

ROUND = {"lax.ppermute(y, pipe_axis,": f"lax.ppermute({there_and_back('y', 'pipe_axis')}, pipe_axis,"}
SCATTERED = {"lax.pmean(loss, data_axis)": f"lax.pmean({gathered_and_scattered('loss', 'data_axis')}, data_axis)"}
GATHERED = {
    "sent = part.astype(dtype)": (
        "part = part + 0 * sum(lax.all_gather((part, 2 * part), data_axis)).sum()\n        sent = part.astype(dtype)"
    )
}
SQUARE = "jnp.sum(gradient**2)"

MUTANTS = (
    init("leaves_data_out", {"shard_params(leaf[(0,) * skipped], data_axis, min_size)[1]": "P()"}, *PLACED),
    init("leaves_features_out", {"tensor_specs(params, tensor_axis)": "jax.tree.map(lambda _: P(), params)"}, *PLACED),
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
    whole(
        "always_sends_bfloat16",
        {"part.astype(dtype)": "part.astype('bfloat16')"},
        *("all-gather bytes over data", "values"),
        shown_by=("replica=3 x stage=1 x model=2",),
    ),
    whole("sums_over_data", {TOTAL: "total = lax.psum(gradient, axes)"}, *GRADIENTS),
    whole("leaves_shares", {"(data_axis, *shared_axes)": "(data_axis,)"}, *GRADIENTS, "all-reduce bytes"),
    whole(
        "scatters_what_it_has_rounded",
        {"lax.psum_scatter(gradient, data_axis": "lax.psum_scatter(gradient.astype(dtype), data_axis"}
        | {TOTAL: f"gradient = gradient.astype('float32')\n        {TOTAL}"},
        *("gradients", "other collectives", "reduce-scatter bytes over data"),
    ),
    whole(
        "sends_float32", {"part.astype(dtype)": "part.astype(dtype).astype(part.dtype)"}, "all-gather bytes over data"
    ),
    whole(
        "sends_parts_round",
        {"sent = part.astype(dtype)": f"sent = {there_and_back('part.astype(dtype)', 'data_axis')}"},
        "other collectives",
    ),
    stage(
        "takes_the_layers_in_reverse",
        {"leaf[j]": "leaf[-1 - j]"},
        *("bfloat16 products", *NUMBERS),
        shown_by=(FIRST, LOW_STAGE),
    ),
    stage(
        "gives_all_layers_one_key",
        {"first + j": "first"},
        *("bfloat16 products", *NUMBERS),
        shown_by=(FIRST, "data=2 x pipe=1 x tensor=1, bfloat16, parallel, dropout"),
    ),
    stage(
        "forgets_rings",
        {"if options.rings else": "if False else"},
        "transfers in one piece",
        shown_by=(FIRST, LOW_STAGE),
    ),
    stage("always_takes_rings", {"if options.rings else (gather_matmul, matmul_scatter)": ""}, "other collectives"),
    stage(
        "forgets_bfloat16",
        {LOWERED: "x, kernel, axis_name"},
        *("bfloat16 products", "bytes over tensor"),
        shown_by=(FIRST, LOW_STAGE),
    ),
    mutant(
        "stage_3d", taking_norms_in_bfloat16(stage_3d), *("float32 elsewhere", *NUMBERS), shown_by=(FIRST, LOW_STAGE)
    ),
    stage(
        "rounds_the_residual_stream",
        {"out_of, tensor_axis)": "out_of, tensor_axis).astype(options.dtype).astype(x.dtype)"},
        "bfloat16 products",
        shown_by=(FIRST, LOW_STAGE),
    ),
    stage("sums_what_it_gives", {"return x\n": "return x + 0 * lax.psum(x, tensor_axis)\n"}, "all-reduce bytes"),
    mutant(
        "layers_3d",
        gathering_in_every_tick(layers_3d),
        "all-gather bytes over data",
        "all-reduce bytes",
        "reduce-scatter bytes over data",
    ),
    layers(
        "keeps_gathered_weights",
        {
            "return layers(parts, x) if options.remat else": (
                "compute = jax.checkpoint(compute) if options.remat else compute\n    return"
            )
        },
        "live temporaries",
    ),
    layers("drops_what_late_stages_add", {"*of_layers], of_before": "*of_layers], None"}, *GRADIENTS),
    layers(
        "numbers_a_stages_layers_in_a_row",
        {"(repeat * num_stages + index)": "(index * num_repeats + repeat)"},
        *NUMBERS,
        shown_by=DROPOUT,
    ),
    layers(
        "uses_its_own_repeats_weights_when_late",
        {"run_ticks(compute, before, whole[repeat],": "run_ticks(compute, before and whole[repeat], whole[repeat],"},
        *NUMBERS,
    ),
    layers(
        "completes_what_late_stages_add_apart",
        {
            "of_layers, of_own = [*complete[repeat](of_own), *of_layers], of_before": (
                "of_layers = [*complete[repeat](of_own), *of_layers]\n"
                "            more = complete[repeat - 1](of_before)[0] if before else None\n"
                "            of_own = jax.tree.map(lambda g, part: g + 0 * part.sum(), of_before, more)"
            )
        },
        *("all-reduce bytes", "reduce-scatter bytes over data"),
    ),
    layers(
        "forgets_bfloat16",
        {LOWERED: "x, kernel, axis_name"},
        *("bfloat16 products", "bytes over tensor"),
        shown_by=(FIRST, LOW_LAYERS),
        inside=stage_3d,
    ),
    mutant(
        "layers_3d", taking_norms_in_bfloat16(layers_3d), *("float32 elsewhere", *NUMBERS), shown_by=(FIRST, LOW_LAYERS)
    ),
    layers(
        "always_takes_rings",
        {"if options.rings else (gather_matmul, matmul_scatter)": ""},
        "other collectives",
        inside=stage_3d,
    ),
    layers("sends_every_output_round", ROUND, "permute bytes over pipe", inside=run_ticks),
    layers(
        "gathers_what_a_stage_gives",
        {"return x\n": f"return {gathered_and_scattered('x', 'tensor_axis')}\n"},
        *("bytes over tensor", "transfers in one piece"),
        shown_by=(FIRST, LOW_LAYERS),
        inside=stage_3d,
    ),
    mutant("forward_3d", keeps_everything, "live temporaries"),
    mutant(
        "forward_3d",
        gathers_in_every_tick,
        "all-gather bytes over data",
        "all-reduce bytes",
        "exposed over data",
        "reduce-scatter bytes over data",
    ),
    forward(
        "leaves_the_ends_unsummed",
        {"(pipe_axis, tensor_axis))": "(tensor_axis,))"},
        *("bfloat16 products", *GRADIENTS),
        shown_by=(FIRST, LOW),
    ),
    forward(
        "sums_twice",
        {TOTAL: f"{TOTAL}\n        total = lax.pmean(as_varying(total, axes[-1]), axes[-1]) if axes else total"},
        "all-reduce bytes",
        inside=whole_weights,
    ),
    forward(
        "folds_the_stage_in",
        {"fold_key_over_axes(key, (data_axis,))": "fold_key_over_axes(key, (data_axis, pipe_axis))"},
        *("bfloat16 products", *NUMBERS),
        shown_by=(*RINGS, LOW),
    ),
    forward(
        "forgets_rings_in_the_loss",
        {"if options.rings else": "if False else"},
        "transfers in one piece",
        shown_by=RINGS,
    ),
    forward(
        "takes_the_targets_of_another_microbatch",
        {"index * len(outputs), len(outputs)": "index, len(outputs)"},
        *NUMBERS,
        shown_by=("data=1 x pipe=2 x tensor=1, 4 microbatches",),
    ),
    forward("takes_a_ring_in_the_loss", {"if options.rings else gather_matmul": ""}, "other collectives"),
    forward(
        "multiplies_the_head_in_float32", {LOWERED: "x, kernel, axis_name"}, "bfloat16 products", shown_by=(FIRST, LOW)
    ),
    forward(
        "gathers_outputs_on_every_stage",
        {
            "outputs = jnp.where(last, outputs, 0)": (
                f"outputs = jnp.where(last, outputs, 0)\n    outputs = {gathered_and_scattered('outputs', 'pipe_axis')}"
            )
        },
        "other bytes over pipe",
    ),
    forward("sends_every_output_round", ROUND, "permute bytes over pipe", inside=run_ticks),
    forward(
        "gathers_what_a_stage_gives",
        {"return x\n": f"return {gathered_and_scattered('x', 'tensor_axis')}\n"},
        *("bytes over tensor", "transfers in one piece"),
        shown_by=(FIRST, *RINGS),
        inside=stage_3d,
    ),
    mutant("forward_3d", taking_norms_in_bfloat16(forward_3d), *("float32 elsewhere", *NUMBERS), shown_by=(FIRST, LOW)),
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
    choose("takes_the_fastest_whatever_it_holds", {"if estimated.fits and (": "if ("}, "memory fits"),
    choose(
        "holds_as_little_as_possible",
        {"estimated.seconds < best.seconds": "estimated.bytes < best.bytes"},
        "predicted MFU",
    ),
    choose("always_recomputes", {'("none", "block")': '("block",)'}, "predicted MFU"),
    choose("never_shards_state", {"(0, 3)": "(0,)"}, "predicted MFU"),
    choose(
        "gives_nothing_where_nothing_fits",
        {"return best.choice": "return best and best.choice", "if best is None:": "if False:"},
        "every choice can be placed",
    ),
    step(
        "gathers_gradients_to_take_their_norm",
        {
            SQUARE: (
                "(jnp.sum(gradient**2) + (0 * lax.all_gather(gradient, (pipe_axis, tensor_axis)).sum()"
                " if min(lax.axis_size(pipe_axis), lax.axis_size(tensor_axis)) > 1 else 0))"
            )
        },
        "other collectives",
    ),
    step(
        "gathers_gradients_axis_by_axis",
        {
            SQUARE: (
                "(jnp.sum(gradient**2) + 0 * lax.all_gather(gradient, pipe_axis).sum()"
                " + 0 * lax.all_gather(gradient, tensor_axis).sum())"
            )
        },
        *("bytes over tensor", "other bytes over pipe"),
    ),
    step("sends_every_output_round", ROUND, "permute bytes over pipe", inside=run_ticks),
    step("gathers_and_scatters_the_loss", SCATTERED, "reduce-scatter bytes over data"),
    step("gathers_weights_three_times", GATHERED, "all-gather bytes over data", inside=whole_weights),
)
