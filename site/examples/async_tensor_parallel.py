"""Rings of products and permutes, by the program, the timeline, the GPU compiler and on a measured machine."""

from collections import Counter, defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from showing import Table, by_compiler, compare, compiled, draw, draw_timelines, example, kept, look, over, say

from autograder.chapters.async_tensor_parallel import mutants, tasks
from autograder.chapters.async_tensor_parallel.alternatives import async_tp_mlp_unrolled, gathering_again, unrolled
from autograder.chapters.async_tensor_parallel.mutants import gathers_then_multiplies
from autograder.chapters.async_tensor_parallel.tasks import HIDDEN, TOKENS, WIDTH
from autograder.contract.task import load, references
from course.machines import machine
from course.predict import predict
from course.program import parse, timeline
from course.program.compiled import DEFAULT_FLAGS, compile_all
from course.render import memory_svg
from solutions.async_tensor_parallel import async_tp_mlp, bidirectional_gather_matmul, ring_gather_matmul

MIB, US = 2**20, 1e-6
TASK = load("async_tensor_parallel").task("async_tp_mlp")
IDEAL, MEASURED = machine("8xH100"), machine("8xH100-calibrated")
LINK, RATES = IDEAL.links[0], MEASURED.links[0].rates
NONE, LOOP, SCAN, BOTH = "all-gather, then product", "ring, a Python loop", "ring, a scan", "bidirectional ring"
RINGS = {NONE: gathers_then_multiplies, LOOP: unrolled, SCAN: ring_gather_matmul, BOTH: bidirectional_gather_matmul}
MLPS = {
    "no ring": mutants.synchronous,
    "rings in the forward pass alone": mutants.hides_the_forward_pass_alone,
    "rings, JAX's derivative": mutants.leaves_the_derivative_to_jax,
    "the same, unrolled": async_tp_mlp_unrolled,
    "rings, rows kept": async_tp_mlp,
    "rings, rows sent again": gathering_again,
}
DRAWN = {"no ring": "none", "rings, JAX's derivative": "jax", "rings, rows kept": "kept"}
COMPILED = "overlapping a matmul s", "replayed, µs .1f", "exposed, µs .1f", "temporaries, MiB .2f"


def exported(function, rows=TOKENS, hidden=HIDDEN, dtype=jnp.bfloat16, platform="cpu"):
    """Export ``[rows@tensor, WIDTH] @ [WIDTH, hidden@tensor]`` on eight devices; ``function`` computes the product."""
    specs, out = {"x": P("tensor"), "kernel": P(None, "tensor")}, {"y": P(None, "tensor")}
    shapes = {"x": (rows, WIDTH), "kernel": (WIDTH, hidden)}
    inputs = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}

    def local(x, kernel):
        return {"y": function(x, kernel, "tensor")}

    return over({"tensor": 8}, local, inputs, specs, out, platform=platform)


@example("counted in the program", timeline="predicted, idealised", lens_memory="predicted")
def program() -> dict[str, Table]:
    table = Table("the program", "what is sent s", "MiB .2f", "up s", "down s", "operations d")
    predictions = {name: predict(exported(function), IDEAL) for name, function in RINGS.items()}
    for name, prediction in predictions.items():
        times: Counter[str] = Counter()
        directions: dict[bool, float] = defaultdict(float)
        for c in prediction.costs.collectives:
            times[c.kind.replace("collective_", "").replace("_", "-")] += c.count
            if c.shift is not None:
                directions[c.shift < 4] += c.total_bytes
        up, down = (f"{directions[up] / MIB:.2f}" if directions else "" for up in (True, False))
        sent = sum(c.total_bytes for c in prediction.costs.collectives) / MIB
        table.add(
            name, ", ".join(f"{n} x {kind}" for kind, n in times.items()), sent, up, down, prediction.costs.operations
        )
    columns = "step, µs .1f", "computing .1f", "exposed .1f", "times .2f", "temporaries, MiB .2f"
    steps = compare("the timeline", predictions, *columns)
    drawn = {"gathered": NONE, "ring": SCAN, "both": BOTH}
    draw_timelines("lens", **{picture: predictions[name].timeline for picture, name in drawn.items()})
    draw("lens_memory", memory_svg(predictions[NONE].memory, IDEAL.memory_bytes), "predicted")
    rows = 2 * TOKENS * WIDTH / MIB
    say(best=f"{steps[NONE].computing / steps[NONE].step:.2f}", rows=f"{rows:.2f}")
    assert steps[NONE].exposed > 0.9 * steps[NONE].computing and predictions[NONE].memory.temporaries == rows * MIB
    return {"program": table, "timeline": steps}


@example("predicted, idealised", "predicted, calibrated")
def passes() -> Table:
    predictions = {name: look(TASK, function) for name, function in MLPS.items()}
    columns = (
        "step, µs .1f",
        "calibrated .1f",
        "computing .1f",
        "exposed .1f",
        "times .2f",
        "sent, MiB .1f",
        "temporaries, MiB .1f",
    )
    table = compare("forward and backward", predictions, *columns)
    draw_timelines("passes", **{picture: predictions[name].timeline for name, picture in DRAWN.items()})
    none, forward, by_jax, unrolled, rows_kept, rows_again = table.rows.values()
    assert none.calibrated == min(row.calibrated for row in table.rows.values())
    assert abs(forward.exposed / none.exposed - 0.5) < 0.01, "half of the exposed time is left"
    assert by_jax.exposed == 0 and by_jax.step - none.step > 0, "computing grew by more than exposed shrank"
    assert abs(rows_again.sent - 5 / 4 * rows_kept.sent) < 1e-6, "half of the forward pass's bytes"
    assert rows_kept.step < rows_again.step and rows_again.temporaries < rows_kept.temporaries < unrolled.temporaries
    return table


@example("counted by closed form")
def costs_of_a_step() -> Table:
    """The cost of a step of the judged rings: 512 rows per device, in float32."""
    rows, features = TOKENS // 8, HIDDEN // 8
    latency, rate = IDEAL.transfer("collective_permute", (0, 1), 0, 0, pair=(0, 1))
    product = IDEAL.matmul_seconds(2 * rows * WIDTH * features, 0, "f32")
    placing, adding = IDEAL.kernel_seconds(8 * rows * features), IDEAL.kernel_seconds(12 * rows * WIDTH)
    table, kernel = Table("in each step", "time, µs .1f"), 4 * WIDTH * features
    moves = ("product", product), ("transfer", latency + 4 * rows * WIDTH / rate)
    for name, seconds in (*moves, ("placing a product", placing), ("adding to a sum", adding)):
        table.add(name, seconds / US)
    known = {name: references("async_tensor_parallel")[name] for name in ("matmul_ring_scatter", "ring_gather_matmul")}
    scatter, gather = (metrics["seconds"] for metrics in known.values())
    zeros = IDEAL.kernel_seconds(4 * TOKENS * features)
    assert abs((8 * product + 7 * adding) / scatter["reference"] - 1) < 0.01
    assert abs((8 * (product + placing) + zeros) / gather["reference"] - 1) < 0.01
    assert all(
        0.24 < metrics["temporaries"]["reference"] / metrics["temporaries"]["naive"] < 1 / 3
        for metrics in known.values()
    )
    ratios = {
        f"{name}_ratio": f"{metric['reference'] / metric['naive']:.2f}"
        for name, metric in (("scatter", scatter), ("gather", gather))
    }
    say(
        kernel=f"{kernel / MIB:.1f}",
        kernel_us=f"{IDEAL.kernel_seconds(3 * kernel) / US:.1f}",
        formula=f"{8 / 15:.2f}",
        gather_limit=tasks.TIME[tasks.GATHER],
        scatter_limit=tasks.TIME[tasks.SCATTER],
        exposed_limit=tasks.EXPOSED,
        **ratios,
    )
    return table


@example("counted by closed form")
def least_features() -> Table:
    table = Table("machine", "TFLOP/s in bfloat16 .1f", "GB/s each way g", "least $f$ in bfloat16 ,.0f")
    for name in ("8xA100", "8xH100", "8xTPUv5e"):
        where = machine(name)
        table.add(
            name,
            where.peak("bf16") / 1e12,
            where.links[0].bandwidth / 1e9,
            where.peak("bf16") / where.links[0].bandwidth,
        )
    tpu = machine("8xTPUv5e")
    say(both_ways_f=f"{tpu.peak('bf16') / tpu.links[0].bandwidth / 2:,.0f}")
    least = IDEAL.peak("bf16") / LINK.bandwidth
    assert HIDDEN / 16 < least < HIDDEN / 8 == 2304, "on 8 devices it is enough, and on 16 it is not"
    assert abs(2 * IDEAL.peak("f32") / LINK.bandwidth / least - 1) < 1e-3
    return table


def times(ring, plain, where=MEASURED):
    return timeline(parse(ring), where).seconds / timeline(parse(plain), where).seconds


def both(rows=TOKENS, hidden=HIDDEN):
    return exported(ring_gather_matmul, rows, hidden), exported(gathers_then_multiplies, rows, hidden)


def with_rates(where, rates):
    return replace(where, links=(replace(where.links[0], rates=rates),))


def break_even(ring, plain):
    """The factor by which permutes would have to be faster for the ring to match the all-gather."""
    low, high, least = 1.0, 64.0, timeline(parse(plain), MEASURED).seconds
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        faster = tuple((size, middle * rate) for size, rate in RATES["collective_permute"])
        where = with_rates(MEASURED, {**RATES, "collective_permute": faster})
        low, high = (low, middle) if timeline(parse(ring), where).seconds <= least else (middle, high)
    return high


@example("predicted, idealised", "predicted, calibrated")
def loses() -> Table:
    ring, plain = both()
    table = Table("8 H100s, 4,096 rows", "all-gather, µs .1f", "ring, µs .1f", "times .2f")
    for name, where in {
        "idealised": IDEAL,
        "measured products": replace(IDEAL, matmul_rates=MEASURED.matmul_rates),
        "measured all-gather": with_rates(IDEAL, {"all_gather": RATES["all_gather"]}),
        "measured permute": with_rates(IDEAL, {"collective_permute": RATES["collective_permute"]}),
        "all of them measured": MEASURED,
    }.items():
        plain_seconds, ring_seconds = (timeline(parse(p), where).seconds for p in (plain, ring))
        table.add(name, plain_seconds / US, ring_seconds / US, ring_seconds / plain_seconds)
    ideal, products, gather, permute, measured = (row.times for row in table.rows.values())
    assert products >= 1 > ideal > gather and permute > 3 and measured > 2
    return table


@example("predicted, calibrated")
def messages() -> Table:
    columns = "a message, MiB .3f", "permute, GB/s .1f", "ring, times .2f", "break-even, GB/s .0f"
    table = Table("rows in all", *columns)
    for rows in (1024, 4096, 16384, 65536):
        ring, plain = both(rows)
        size = 2 * rows // 8 * WIDTH
        rate = MEASURED.transfer("collective_permute", (0, 1), size, size, pair=(0, 1))[1] / 1e9
        row = table.add(f"{rows:,}", size / MIB, rate, times(ring, plain), rate * break_even(ring, plain))
        assert row.ring > 1 and row["break-even"] > rate, "at no size does the ring win"
    judged = table["4,096"]
    gathered = MEASURED.transfer("all_gather", tuple(range(8)), 7 / 8, 8 * judged["a message"] * MIB)[1]
    assert (
        abs(450 / judged.permute - 8) < 0.5
        and 3.5 < gathered / 1e9 / judged.permute < 4.5
        and judged["break-even"] < 200
    )
    say(size=f"{judged['a message']:g}")
    return table


@example("predicted, idealised", "predicted, calibrated")
def features() -> Table:
    table = Table("hidden on a device", "idealised, times .2f", "measured, times .2f")
    for hidden in (4096, 9216, 18432, 36864, 73728):
        ring, plain = both(hidden=hidden)
        table.add(f"{hidden // 8:,}", times(ring, plain, IDEAL), times(ring, plain))
    assert min(table.rows, key=lambda name: table[name].idealised) == "2,304"
    assert min(row.measured for row in table.rows.values()) == table["9,216"].measured > 1
    return table


@kept("compiled")
def third() -> dict[str, Table]:
    programs = {name: exported(function, platform="cuda") for name, function in RINGS.items()}
    precise = {name: exported(RINGS[name], dtype=jnp.float32, platform="cuda") for name in (LOOP, SCAN)}
    reports = compile_all([*programs.values(), *precise.values()], IDEAL, DEFAULT_FLAGS, time_limit=1800)
    merged = compile_all([programs[name] for name in precise], IDEAL, {}, time_limit=1800)
    tables = [
        compiled("the compiler", dict(zip(programs, reports, strict=False)), *COMPILED),
        compiled("rings in float32", dict(zip(precise, reports[4:], strict=True)), *COMPILED),
        compiled("rings in bfloat16, with the merge pass left on", dict(zip(precise, merged, strict=True)), *COMPILED),
    ]
    none, loop, scan, bidirectional = tables[0].rows.values()
    assert loop.exposed == scan.exposed == bidirectional.exposed == 0 and round(scan.temporaries, 2) == round(
        loop.temporaries, 2
    ) == round(none.temporaries / 2, 2)
    assert tables[2][LOOP].replayed > none.replayed, "longer than with no ring at all"
    assert 1.7 < bidirectional.replayed / none.replayed < 2 and [
        row["overlapping a matmul"] for row in tables[2].rows.values()
    ] == ["0 of 7", "7 of 7"]
    return dict(zip(("third", "precise", "merged"), tables, strict=True))


@kept("compiled")
def compiled_passes() -> Table:
    reports = by_compiler(TASK, {name: MLPS[name] for name in DRAWN})
    table = compiled("an MLP in float32, forward and backward", reports, *COMPILED)
    none, by_jax, rows = table.rows.values()
    assert none.replayed < rows.replayed and by_jax.replayed > 1.1 * rows.replayed, "no ring takes less"
    assert rows.temporaries < none.temporaries
    return table
