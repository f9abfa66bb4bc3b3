"""The steps of ``zero``: what each stage holds and sends, and when more microbatches send more than they save."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import (
    Table,
    by_compiler,
    compiled,
    draw,
    draw_steps,
    example,
    kept,
    over,
    program,
    realistic,
    say,
    seen,
    sent,
    wrong,
)

from autograder.contract.task import load
from course.machines import machine
from course.mesh import abstract_mesh, varying
from course.model import mlp
from course.predict import Prediction, predict
from course.render import memory_svg
from course.train import AdamW
from solutions.fsdp import fsdp_loss, shard_params
from solutions.zero import global_norm, sharded_adamw, zero1_step, zero2_step

TASK = load("zero").task("zero2_step")
MACHINE = machine(TASK.machine)
WRONG = wrong("zero")
WHOLE, AFTER, STACKED, IN_PLACE = "whole, added up", "whole, then scattered", "by layer, stacked", "by layer, in place"
WAYS = {
    WHOLE: WRONG["keeps_whole_gradients_between_microbatches"],
    AFTER: WRONG["scatters_after_each_backward_pass"],
    STACKED: WRONG["stacks_the_parts_of_a_microbatch"],
    IN_PLACE: zero2_step,
}
# Stage 1 with accumulation: the same step, except for where its one reduce-scatter is.
STAGE_1 = WRONG["scatters_once_after_all_microbatches"]
CONFIG = AdamW(learning_rate=3e-4)
# The size that the steps are judged at.
MODEL = mlp(width=4096, hidden=16384, num_layers=12, num_inputs=2048, num_outputs=2048)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0))
COUNT = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(SHAPES))


def whole_specs():
    return jax.tree.map(lambda _: P(), SHAPES)


# --8<-- [start:stages]
def data_parallel(params, state, specs, batch):
    """No leaf is split: every device updates all of them."""
    return zero1_step(params, state, whole_specs(), batch, MODEL, "data", CONFIG)


def stage_1(params, state, specs, batch):
    return zero1_step(params, state, specs, batch, MODEL, "data", CONFIG)


def stage_2(params, state, specs, batch):
    return zero2_step(params, state, specs, batch, MODEL, "data", 1, CONFIG)


def stage_3(parts, state, specs, batch, replicas=()):
    """The parameters are parts as well: ``fsdp_loss``, and an update that gathers nothing."""

    def mean(gradient, spec):
        axes = replicas if "data" in spec else ("data", *replicas)
        return lax.pmean(gradient, axes) if axes else gradient

    loss, gradients = jax.value_and_grad(fsdp_loss)(parts, specs, batch, MODEL, "data")
    gradients = jax.tree.map(mean, gradients, specs)
    norm = global_norm(gradients, specs)
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1, CONFIG.clip / norm), gradients)
    config = CONFIG._replace(clip=jnp.inf)
    parts, state, _ = sharded_adamw(parts, clipped, state, whole_specs(), "data", config)
    return parts, state, lax.pmean(loss, ("data", *replicas)), norm


def hybrid(parts, state, specs, batch):
    """Stage 3 inside a node of four; both nodes hold everything."""
    return stage_3(parts, state, specs, batch, replicas=("node",))


# --8<-- [end:stages]


def specs_over(size: int):
    """The specs of ``shard_params``; here no leaf's largest dim is that of the layers."""
    specs = []

    def local(params):
        specs.append(shard_params(params, "data", 16384)[1])
        return jnp.zeros(())

    mesh = abstract_mesh({"data": size})
    jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P()), SHAPES)
    return specs[0]


def measured(step, mesh: dict[str, int], moments: bool, parameters: bool) -> Prediction:
    """The analyses of a step that reuses the buffers of parameters and moments; 64 rows a device.

    Each device's arrays, parts or copies of the whole, enter and leave stacked along the first dim.
    """
    axes, specs, devices = tuple(mesh), specs_over(mesh["data"]), math.prod(mesh.values())

    def resident(split: bool):
        def shape(leaf, spec):
            own = list(leaf.shape)
            if split and any(spec):
                own[spec.index("data")] //= mesh["data"]
            return jax.ShapeDtypeStruct((devices, *own), leaf.dtype)

        return jax.tree.map(shape, SHAPES, specs)

    def local(params, m, v, count, batch):
        params, m, v = jax.tree.map(lambda leaf: leaf[0], (params, m, v))
        params, state, loss, _ = step(params, {"m": m, "v": v, "count": count}, specs, batch)
        outputs = {"params": params, "m": state["m"], "v": state["v"], "loss": loss}
        return jax.tree.map(lambda leaf: leaf[None], varying(outputs, axes))

    rows = jax.ShapeDtypeStruct((64 * devices, 2048), "float32")
    inputs: dict[str, Any] = {"params": resident(parameters), "m": resident(moments), "v": resident(moments)}
    inputs |= {"count": jax.ShapeDtypeStruct((), "int32"), "batch": {"inputs": rows, "targets": rows}}
    ins = {name: P() if name == "count" else P(axes) for name in inputs}
    outs = {name: P(axes) for name in ("params", "m", "v", "loss")}
    return predict(over(mesh, local, inputs, ins, outs, donate=("params", "m", "v")), MACHINE)


@example("counted by closed form", "counted in the program", "predicted")
def stages() -> Table:
    """Bytes a parameter by the formula, and what the analyses find at the peak of a step on 8 devices."""
    ways = {
        "data parallel": (data_parallel, {"data": 8}, False, False, 16.0, 2 * 7 / 8),
        "ZeRO-1": (stage_1, {"data": 8}, True, False, 8 + 8 / 8, 2 * 7 / 8),
        "ZeRO-2": (stage_2, {"data": 8}, True, False, 4 + 12 / 8, 2 * 7 / 8),
        "ZeRO-3": (stage_3, {"data": 8}, True, True, 16 / 8, 3 * 7 / 8),
        "hybrid, 2 nodes of 4": (hybrid, {"node": 2, "data": 4}, True, True, 16 / 4, 3 * 3 / 4 + 2 / 2 / 4),
    }
    table = Table(
        "",
        "by the formula .2f",
        "between steps .2f",
        "at the peak .2f",
        "sent, by the formula, W .3f",
        "measured, W .3f",
    )
    for name, (step, mesh, moments, parameters, formula, form) in ways.items():
        prediction = measured(step, mesh, moments, parameters)
        row = table.add(
            name,
            formula,
            prediction.memory.arguments / COUNT,
            prediction.memory.peak / COUNT,
            form,
            sent(prediction) / (4 * COUNT),
        )
        assert 0 < row["at the peak"] - formula < 2.1 and abs(row.measured / row["sent"] - 1) < 0.005
    return table


@cache
def traced(function, microbatches: int, rows: int):
    return program(TASK, function, realistic(TASK, num_microbatches=microbatches, rows=rows))


def predicted(function, microbatches: int = 4, rows: int = 1024, where: str = "8xH100"):
    return seen(traced(function, microbatches, rows), where)


@example("predicted, idealised", on_8xA5000="predicted, calibrated")
def microbatches() -> dict[str, Table]:
    """4,096 rows a device in more and more microbatches: whole gradients added up, or parts of them."""
    tables = {}
    for where in ("8xH100", "8xA5000"):
        columns = [
            f"ZeRO-{i} {column}"
            for column in ("sends, GiB .1f", "temporaries, GiB .2f", "step, ms .0f")
            for i in (1, 2)
        ]
        tables[f"on_{where}"] = table = Table("microbatches", *columns)
        for number in (1, 2, 4, 8, 16):
            pair = [predicted(function, number, 4096, where) for function in (STAGE_1, zero2_step)]
            figures = [
                (sent(prediction) / 2**30, prediction.memory.temporaries / 2**30, 1e3 * prediction.timeline.seconds)
                for prediction in pair
            ]
            row = table.add(number, *(figure for values in zip(*figures, strict=True) for figure in values))
            assert math.isclose(row["ZeRO-2 sends"] / row["ZeRO-1 sends"], (number + 1) / 2, rel_tol=1e-3)
            faster = row["ZeRO-2 step"] < row["ZeRO-1 step"]
            assert faster == (number <= (4 if where == "8xH100" else 8)), "where ZeRO-2 is the faster one"
    h100 = machine("8xH100")
    bandwidth = h100.bandwidth_of(tuple(range(8)))
    rows = 7 / 8 * 4 / 6 * h100.peak("f32") / bandwidth
    assert 256 < rows < 1024, "hidden with 4 microbatches, exposed with 16"
    last = tables["on_8xH100"]["16"]
    say(rows=f"{rows:,.0f}", saved=f"{last['ZeRO-1 temporaries'] - last['ZeRO-2 temporaries']:.1f}")
    say(count=f"{COUNT / 1e9:.2f}", longer=f"{last['ZeRO-2 step'] / last['ZeRO-1 step']:.2f}")
    return tables


@example("predicted, idealised", "predicted, calibrated")
def gradients() -> Table:
    """Four steps that return the same results and differ in where the gradient is whole."""
    predictions = {name: predicted(function) for name, function in WAYS.items()}
    table = Table(
        "gradients",
        "step, ms .1f",
        "calibrated, ms .1f",
        "exposed, ms .1f",
        "sent, GiB .1f",
        "temporaries, GiB .2f",
        "times .1f",
    )
    for name, prediction in predictions.items():
        seconds = prediction.timeline.seconds, prediction.calibrated_seconds, prediction.timeline.exposed_seconds
        figures = *(1e3 * each for each in seconds), sent(prediction) / 2**30
        temporaries = prediction.memory.temporaries / 2**30
        table.add(name, *figures, temporaries, prediction.memory.temporaries / predictions[IN_PLACE].memory.temporaries)
    for name, picture in ((WHOLE, "before"), (AFTER, "after"), (STACKED, "stacked"), (IN_PLACE, "in_place")):
        draw(f"held_{picture}", memory_svg(predictions[name].memory, MACHINE.memory_bytes), "predicted")
    draw_steps("timeline", {"": predictions[IN_PLACE].timeline})
    layer = 2 * 4 * 4096 * 16384
    part = 4 * COUNT / 8
    # A reduce-scatter frees one matrix's gradient while the other's is computed.
    assert part + layer / 2 < predictions[IN_PLACE].memory.temporaries < part + layer
    assert 0.93 * table[WHOLE].calibrated < table[IN_PLACE].calibrated < table[WHOLE].calibrated, "gains little time"
    assert table[STACKED].step < table[WHOLE].step < table[AFTER].step
    assert 0.5 < table[IN_PLACE].exposed / table[IN_PLACE].step < 0.6, "more than half of it is exposed"
    say(whole=f"{8 * part / 2**30:.2f}", part=f"{part / 2**30:.2f}", layer=f"{layer / 2**30:.2f}")
    return table


@example()
def questions() -> None:
    """The page's questions: 7 billion parameters on 64 devices, and 10 GB on 8 devices in 8 microbatches."""
    first, second = 8 + 8 / 64, 4 + 12 / 64
    say(first=f"{first:g}", first_gb=f"{7 * first:.0f}", second=f"{second:.2f}", second_gb=f"{7 * second:.0f}")
    say(parts_gb=f"{(8 + 1) * 10 * 7 / 8:g}", whole_gb=f"{2 * 10 * 7 / 8:g}")


@kept("compiled")
def with_compiler() -> Table:
    reports = by_compiler(TASK, WAYS)
    return compiled("compiled for 8 H100s", reports, "replayed, ms .1f", "exposed, ms .1f", "temporaries, GiB .2f")
