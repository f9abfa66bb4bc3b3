"""The step of ``fsdp``: its memory and communication, gathered ahead or not, across nodes, and its gradients' scale."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import (
    Table,
    by_compiler,
    compare,
    compiled,
    draw,
    draw_timelines,
    example,
    how_it_overlaps,
    kept,
    look,
    over,
    program,
    realistic,
    same_order,
    say,
    wrong,
)

from autograder.chapters.fsdp.alternatives import with_delay
from autograder.chapters.fsdp.wrapping import StepSizes
from autograder.contract.task import Case, load
from course.machines import machine
from course.mesh import make_mesh
from course.model import transformer
from course.predict import predict
from course.program import costs, parse
from course.render import memory_svg
from course.render.quantities import bytes_text
from solutions.fsdp import fsdp_train_step, hybrid_shard_step

JUDGED = load("fsdp").task("fsdp_train_step")
TASK = replace(JUDGED, at_scale=(realistic(JUDGED, rows=2048), "data=8"))
MACHINE = machine(TASK.machine)
BEFORE, AFTER = "gathers when it computes", "ahead in both passes"
WRONG = wrong("fsdp")
WAYS = {
    BEFORE: WRONG["gathers_when_it_computes"],
    "ahead, backward by JAX": WRONG["keeps_gathered_weights_in_step"],
    "ahead, JAX with checkpoint": WRONG["keeps_the_carry_of_a_checkpoint"],
    "ahead forward only": WRONG["prefetches_forward_only"],
    AFTER: fsdp_train_step,
}
SIZES = StepSizes(width=4096, hidden=16384, num_layers=8, features=2048, rows=2048, min_size=16384, rate_scale=0.01)
BATCH = jnp.arange(8.0)


@cache
def predicted(function, tokens: int = 2048):
    return look(TASK, function, realistic(TASK, rows=tokens))


@example("predicted, idealised", "predicted, calibrated")
def prefetch() -> Table:
    predictions = {name: predicted(function) for name, function in WAYS.items()}
    table = compare(
        "weights are gathered",
        predictions,
        "step, ms .2f",
        "calibrated .2f",
        "computing .2f",
        "exposed .2f",
        "times .2f",
        "temporaries, GiB .2f",
        base=AFTER,
    )
    drawn = {"before": BEFORE, "half": "ahead forward only", "after": AFTER}
    draw_timelines("prefetch", **{picture: predictions[name].timeline for picture, name in drawn.items()})
    for name, picture in (("ahead, JAX with checkpoint", "kept"), (AFTER, "memory")):
        draw(f"prefetch_{picture}", memory_svg(predictions[name].memory, MACHINE.memory_bytes), "predicted")
    assert same_order(table, "step", "calibrated")
    before, after = table[BEFORE], table[AFTER]
    say(
        share=f"{before.exposed / before.step:.0%}",
        delayed=f"{predicted(with_delay).timeline.seconds / predictions[AFTER].timeline.seconds:.2f}",
    )
    assert table["ahead, backward by JAX"].exposed < 0.1 * before.exposed and after.temporaries < 2 * before.temporaries
    return table


@example("predicted, idealised")
def transfers() -> str:
    prediction, lines = predicted(WAYS[BEFORE]), [f"{BEFORE}, on one device:"]
    bars = [bar for bar in prediction.timeline.bars if bar.device == 0 and bar.stream == "data"]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        own = [bar.end - bar.start for bar in bars if bar.kind == kind]
        lines.append(f"  {kind.replace('_', '-'):15}{len(own):4} times {1e3 * sum(own):8.2f} ms in all")
        if kind == "all_gather":  # the exposed time is nearly all gathers
            assert 0.9 * sum(own) < prediction.timeline.exposed_seconds < sum(own)
    return "\n".join(lines)


@example("predicted, idealised")
def tokens() -> Table:
    table = Table("tokens a device", "when it computes, ms .2f", "ahead, ms .2f", "ratio .2f", "still exposed .0%")
    for count in (512, 1024, 2048, 4096, 8192):
        slow, fast = (predicted(WAYS[name], count).timeline for name in (BEFORE, AFTER))
        table.add(
            f"{count:,}",
            1e3 * slow.seconds,
            1e3 * fast.seconds,
            slow.seconds / fast.seconds,
            fast.exposed_seconds / fast.seconds,
        )
    return table


@kept("compiled")
def with_compiler() -> dict[str, object]:
    ways = {name: WAYS[name] for name in (BEFORE, "ahead forward only", AFTER)}
    columns = "matrices overlapping a product s", "replayed, ms .2f", "exposed, ms .2f", "temporaries, GiB .2f"
    plain = by_compiler(TASK, ways)
    buffered = by_compiler(TASK, ways, xla_gpu_enable_while_loop_double_buffering=True)
    lines = ["transfers of matrices in the loops of the last one:"]
    for c in buffered[AFTER].collectives:
        if c.in_loop and c.operand_bytes >= 2**20:
            kind = c.kind.replace("_", "-")
            lines.append(f"  {c.count:3} x {kind:15}{c.operand_bytes / 2**20:7.0f} MiB  {how_it_overlaps(c)}")
    return {
        "plain": compiled("as it is", plain, *columns, least=2**20),
        "buffered": compiled("loops double-buffered", buffered, *columns, least=2**20),
        "in_loops": "\n".join(lines),
    }


@example("predicted, idealised", links="counted in the program")
def hybrid() -> dict[str, Table]:
    """Two nodes of eight A100s: the step split over all sixteen devices, and split within a node only."""
    nodes = machine("2x8xA100")
    inside, between = nodes.links
    programs = {
        "over all 16": program(TASK, WAYS[BEFORE], Case("", {"data": 16}, SIZES)),
        "inside a node": program(
            load("fsdp").task("hybrid_shard_step"), hybrid_shard_step, Case("", {"replica": 2, "data": 8}, SIZES)
        ),
    }
    links = Table(("parameters split", "axis", "link"), "sent by a device s")
    for way, exported in programs.items():
        for axis, link in nodes.axis_links(exported.mesh).items():
            used = sum(c.total_bytes for c in costs(parse(exported)).collectives if axis in c.axes)
            links.add((way, axis, link), bytes_text(used))
    steps = Table(("parameters split", "between nodes"), "step, ms .1f", "exposed, ms .1f", "temporaries, GiB .2f")
    narrow = replace(nodes, links=(inside, replace(between, shared=True)))
    for name, where in (("an adapter for each device", nodes), ("one adapter for each node", narrow)):
        for way, exported in programs.items():
            prediction = predict(exported, where)
            steps.add(
                (way, name),
                1e3 * prediction.timeline.seconds,
                1e3 * prediction.timeline.exposed_seconds,
                prediction.memory.peak / 2**30,
            )
    wide_all, wide, narrow_all, narrow_node = (row.step for row in steps.rows.values())
    assert 1 < wide / wide_all < 1.1, "no faster with an adapter for each device"
    assert 0.5 < narrow_node / narrow_all < 0.6, "little more than half as long with one for a node"
    n, r = 8, 2
    node = {"hybrid": 2 * (r - 1) / r, "ring": 3 * (n * r - 1) / (n * r)}
    assert node["hybrid"] == 1 and 2.8 < node["ring"] < 2.82, "per node, W against 2.8 W"
    say(hybrid_node="$W$", ring_node=f"${node['ring']:.1f}\\,W$", hybrid_device=f"$W/{n / node['hybrid']:.0f}$")
    return {"links": links, "nodes": steps}


@example("counted by closed form")
def worked() -> dict[str, Table]:
    """The course's Transformer with 6.7 billion parameters, trained with Adam in float32 on 8 devices."""
    sizes: dict[str, Any] = {"num_layers": 32, "width": 4096, "hidden": 16384, "vocab": 32768, "max_seq": 2048}
    least = 2**20
    leaves = jax.tree.leaves_with_path(jax.eval_shape(transformer(num_heads=32, **sizes).init, jax.random.key(0)))
    count = {tuple(entry.key for entry in path): math.prod(leaf.shape) for path, leaf in leaves}
    whole = sum(size for size in count.values() if size < least)
    split = sum(count.values()) - whole
    tables = sum(size for path, size in count.items() if path[0] == "embed")
    layer = {path: size // 32 for path, size in count.items() if path[0] == "layers"}
    in_use = sum(size for path, size in layer.items() if count[path] >= least)
    everything, per_device = whole + split, whole + split // 8
    parameters = Table("count", "parameters ,d")
    for name, size in (
        ("in the whole model", everything),
        ("in one layer", sum(layer.values())),
        ("in leaves that stay whole (norms, biases)", whole),
        ("held by each device", per_device),
    ):
        parameters.add(name, size)
    memory = Table("memory on each device", "data parallel, GB .2f", "fully sharded, GB .2f")
    for name, size in (("parameters", 4), ("gradients", 4), ("Adam's $m$ and $v$", 8), ("all of these", 16)):
        memory.add(name, size * everything / 1e9, size * per_device / 1e9)
    memory.add("the layer in use, whole", 0.0, 4 * in_use / 1e9)
    sent = Table("sent by each device in a step", "data parallel, GB .2f", "fully sharded, GB .2f")
    plain = 2 * 7 / 8 * 4 * everything / 1e9
    sharded = [7 / 8 * 4 * size / 1e9 for size in (split, split - tables, split, 2 * whole)]
    for name, plain_gb, sharded_gb in zip(
        ("all-gather, forward", "all-gather, backward", "reduce-scatter", "all-reduce"),
        (0.0, 0.0, 0.0, plain),
        sharded,
        strict=True,
    ):
        sent.add(name, plain_gb, sharded_gb)
    sent.add("together", plain, sum(sharded))
    say(ratio=f"{sum(sharded) / plain:.2f}")
    return {"parameters": parameters, "memory": memory, "sent": sent}


@example("counted by closed form")
def networks() -> Table:
    """Tokens at which a gather takes as long as the products of its layer: b/2 (n-1)/n C/beta."""
    h100, table = machine("8xH100"), Table("network", "each way, GB/s .0f", "tokens per device ,.0f")
    peak = h100.peak("bf16")
    say(flops_per_byte=f"{peak / h100.links[0].bandwidth:,.0f}")
    for name, bandwidth in (("NVLink", h100.links[0].bandwidth), ("400 Gbit/s Ethernet or InfiniBand", 50e9)):
        table.add(name, bandwidth / 1e9, 7 / 8 * peak / bandwidth)
    return table


# --8<-- [start:functions]
def replicated(weights, number):
    def loss(weights):
        return jnp.sum(weights * number)

    return jax.grad(loss)(weights)


def varying(weights, number):
    weights = lax.pcast(weights, "data", to="varying")

    def loss(weights):
        return jnp.sum(weights * number)

    return jax.grad(loss)(weights)


def sharded(part, number):
    def loss(part):
        weights = lax.all_gather(part, "data", tiled=True)
        return jnp.sum(weights * number)

    return jax.grad(loss)(part)


# --8<-- [end:functions]


@example("run on CPU devices")
def gradient_scale() -> str:
    """Each of 8 devices has one number of the batch; the loss is that number times the sum of ``weights``."""
    lines, weights, mesh = [], jnp.ones(8), {"data": 8}
    for function, spec, out in ((replicated, P(), P()), (varying, P(), P("data")), (sharded, P("data"), P("data"))):
        ins = {"weights": spec, "batch": P("data")}
        program = over(
            mesh, lambda w, n, f=function: {"g": f(w, n)}, {"weights": weights, "batch": BATCH}, ins, {"g": out}
        )
        mapped = jax.shard_map(function, mesh=make_mesh(mesh), in_specs=tuple(ins.values()), out_specs=out)
        kinds = [c.kind for c in costs(parse(program)).collectives if c.kind in ("all_reduce", "reduce_scatter")]
        grads = [shard.data[0] for shard in jax.jit(mapped)(weights, BATCH).addressable_shards]
        lines.append(
            f"{function.__name__:11} device 2: {grads[2]:4.1f}   device 7: {grads[7]:4.1f}   sent: {kinds or 'nothing'}"
        )
    return "\n".join(lines)
