"""Bytes sent and time of collectives: by formula, and three ways to sum an array through the analyses."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import Table, draw, draw_steps, example, holdings, kept, over, say

from course.machines import machine
from course.predict import predict
from course.program import costs, parse
from course.program.compiled import compile_all
from solutions.collectives import ring_all_gather, ring_all_reduce

MIB, LINK = 2**20, machine("8xH100").links[0]
FILES = {"solutions/collectives.py": "", "examples/collectives.py": "site/"}


# --8<-- [start:naive]
def gather_and_add(x, axis_name):
    everything = ring_all_gather(x[None], axis_name)
    return everything.sum(0)


# --8<-- [end:naive]


def psum(x, axis_name):
    return lax.pcast(lax.psum(x, axis_name), axis_name, to="varying")


SUMS = {"gather and add": gather_and_add, "two rings": ring_all_reduce, "lax.psum": psum}
PRIMITIVES = {
    "all_gather": (lambda x, axis: lax.all_gather(x, axis, tiled=True), 8),
    "psum_scatter": (lambda x, axis: lax.psum_scatter(x, axis, tiled=True), 64),
    "psum": (psum, 64),
    "all_to_all": (lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True), 64),
    "ppermute": (lambda x, axis: lax.ppermute(x, axis, [(i, (i + 1) % 8) for i in range(8)]), 64),
}


def exported(function, size, platform="cpu", rows=8):
    """A collective over ``rows`` rows, ``size`` bytes, on each of eight devices."""

    def local(x):
        return {"total": function(x, "data")[None]}

    def locate(file):
        return next((f"{folder}{name}" for name, folder in FILES.items() if file.endswith(name)), None)

    inputs = {"x": jax.ShapeDtypeStruct((8 * rows, size // 4 // rows), jnp.float32)}
    options = {"platform": platform, "locate": locate}
    return over({"data": 8}, local, inputs, {"x": P("data")}, {"total": P("data")}, **options)


def ways(n):
    """Seconds of four ways to sum ``w`` bytes over ``n`` devices, by the alpha-beta model."""
    a, b, log = LINK.latency, LINK.bandwidth, math.log2(n)
    return {
        "reduce to one, broadcast": lambda w: 2 * log * (a + w / b),
        "swap whole arrays": lambda w: log * (a + w / b),
        "halving and doubling": lambda w: 2 * log * a + 2 * (n - 1) / n * w / b,
        "ring": lambda w: 2 * (n - 1) * a + 2 * (n - 1) / n * w / b,
    }


@example("counted by closed form")
def sent() -> Table:
    holdings(
        {"data": 4, "tensor": 2},
        columns=((16, 8), P(None, "tensor"), None),
        tuple=((16, 8), P(("data", "tensor")), None),
    )
    table = Table("collective", "sent by each of 8 devices, in whole arrays .3f")
    for name, (function, rows) in PRIMITIVES.items():
        own = 4 * rows * 1024
        whole = own * 8 if name == "all_gather" else own
        table.add(
            name, sum(c.total_bytes for c in costs(parse(exported(function, own, rows=rows))).collectives) / whole
        )
    return table


@example("counted by closed form")
def times() -> Table:
    table = Table(("devices", "array"), *(f"{name} ,.1f" for name in ways(8)))
    for n in (8, 64):
        for size, label in ((4 * 2**10, "4 KiB"), (MIB, "1 MiB"), (64 * MIB, "64 MiB")):
            table.add((n, label), *(1e6 * seconds(size) for seconds in ways(n).values()))
        swap, ring = ways(n)["swap whole arrays"], ways(n)["ring"]
        equal = (2 * (n - 1) - math.log2(n)) * LINK.latency * LINK.bandwidth / (math.log2(n) - 2 * (n - 1) / n)
        assert abs(swap(equal) / ring(equal) - 1) < 1e-9
        say(**{f"equal_{n}": f"{equal / 1e6:.1f}"})
    for n in (8, 800):
        sent = 2 * (n - 1) / n * 80
        say(**{f"mb_{n}": f"{sent:.4g}", f"ms_{n}": f"{sent / 50:.1f}", f"steps_{n}": f"{2 * (n - 1):,}"})
    draw("times", plot())
    say(alpha=f"{1e6 * LINK.latency:g}", beta=f"{LINK.bandwidth / 1e9:g}")
    return table


def plot():
    """Seconds by bytes, both in logarithms."""
    left, right, top, bottom = 64, 650, 14, 250
    low, high, fast, slow = 3, 9, -6, -1.9  # powers of ten: 1 kB to 1 GB, 1 us to some 12 ms

    def at(w, t):
        x = left + (math.log10(w) - low) / (high - low) * (right - left)
        return x, bottom - (math.log10(t) - fast) / (slow - fast) * (bottom - top)

    parts = []
    for power, label in enumerate(("1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB"), low):
        x, _ = at(10.0**power, 1e-6)
        parts.append(f'<path class="edge" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="mid small" x="{x:.1f}" y="{bottom + 18}">{label}</text>')
    for power, label in enumerate(("1 µs", "10 µs", "100 µs", "1 ms", "10 ms"), fast):
        _, y = at(1e3, 10.0**power)
        parts.append(f'<path class="edge" d="M{left} {y:.1f}H{right}"/>')
        parts.append(f'<text class="end small" x="{left - 8}" y="{y + 4:.1f}">{label}</text>')
    looks = (("--fig-state", "6 4"), ("--fig-param", "none"), ("--fig-grad", "2 3"), ("--md-default-fg-color", "none"))
    for i, ((name, seconds), (colour, dashes)) in enumerate(zip(ways(8).items(), looks, strict=True)):
        points = [at(10 ** (low + k / 8), seconds(10 ** (low + k / 8))) for k in range(8 * (high - low) + 1)]
        line = "L".join(f"{x:.1f} {max(y, top):.1f}" for x, y in points)
        style = f"fill:none;stroke:var({colour});stroke-width:2.2;stroke-dasharray:{dashes}"
        x, y = left + 16, top + 22 + 20 * i
        parts.append(f'<path style="{style}" d="M{line}"/><path style="{style}" d="M{x} {y - 4}h34"/>')
        parts.append(f'<text class="small" x="{x + 42}" y="{y}">{name}</text>')
    title = "Time of four ways to sum an array over eight devices, by its size, both in logarithms"
    return "\n".join([f'<svg viewBox="0 0 672 276" width="672" role="img" aria-label="{title}">', *parts, "</svg>", ""])


def profiled(name):
    """Three ways to sum 64 MiB, side by side on a machine."""
    predictions = {way: predict(exported(function, 64 * MIB), name) for way, function in SUMS.items()}
    short = name.removeprefix("8x").lower()
    draw_steps(f"profile_{short}", {way: prediction.timeline for way, prediction in predictions.items()})
    table = Table(f"64 MiB on {name}", *(f"{way} s" for way in predictions))
    for figure in ("step", "busy", "exposed: data", "sent by a device", "memory at the peak", "temporaries"):
        table.add(figure, *(prediction.figures()[figure].partition(" (")[0] for prediction in predictions.values()))
    return predictions, table


@example("predicted, idealised")
def h100() -> Table:
    predictions, table = profiled("8xH100")
    naive, rings = predictions["gather and add"], predictions["two rings"]
    sent = [sum(c.total_bytes for c in prediction.costs.collectives) for prediction in (naive, rings)]
    assert sent[0] == 4 * sent[1] and table["temporaries"]["gather and add"] == "640 MiB"
    formula = 1e6 * (14 * LINK.latency + 112 * MIB / LINK.bandwidth)
    say(faster=f"{naive.timeline.seconds / rings.timeline.seconds:.1f}", formula=f"{formula:.0f}")
    return table


@example("predicted, calibrated")
def a5000() -> Table:
    predictions, table = profiled("8xA5000")
    naive, rings, psum = (prediction.timeline for prediction in predictions.values())
    assert 3.9 < naive.seconds / rings.seconds < 4.1 and 1.8 < rings.seconds / psum.seconds < 2
    say(
        exposed=f"{100 * rings.exposed_seconds / rings.seconds:.0f}",
        pcie=f"{machine('8xA5000').links[-1].bandwidth / 1e9:g}",
    )
    return table


@example("predicted, idealised")
def lines() -> str:
    prediction = predict(exported(ring_all_reduce, 64 * MIB), "8xH100")
    shown, root = ["two rings: µs computing, µs sending, your line"], Path(__file__).parents[2]
    for line in prediction.lines()[:5]:
        file, _, number = line.line.partition(":")
        text = (root / file).read_text().splitlines()[int(number) - 1].strip()
        shown.append(f"{1e6 * line.compute:6.1f} {1e6 * line.sending:6.1f}  {text}")
    say(unhidden=f"{1e6 * prediction.lines()[0].compute:.1f}")
    return "\n".join(shown)


@example("predicted, idealised", "predicted, calibrated")
def sizes() -> Table:
    table = Table(("microseconds", "array"), *(f"{way} ,.1f" for way in SUMS))
    machines = ("8xH100", "8xA5000", "8xH100-calibrated")
    for name in machines:
        for kib in (4, 64, 256, 1024, 4096, 65536):
            label = f"{kib} KiB" if kib < 1024 else f"{kib // 1024} MiB"
            steps = [predict(exported(way, 1024 * kib), name).timeline.seconds for way in SUMS.values()]
            table.add((name, label), *(1e6 * seconds for seconds in steps))
    for name in machines[:2]:
        # 7 steps and 7 arrays compared with 14 steps and 1.75 arrays, over the link that reaches all eight.
        link = machine(name).links[-1]
        least = f"{7 * link.latency * link.bandwidth / (7 - 1.75) / 1024:.0f} KiB"
        say(**{f"least_{name[2:].lower()}": least})
    return table


@kept("compiled")
def with_compiler() -> Table:
    programs = [exported(function, 64 * MIB, "cuda") for function in SUMS.values()]
    reports = compile_all(programs, machine("8xH100"))
    table = Table("compiled for 8xH100", *(f"{way} s" for way in SUMS))
    table.add("collectives", *(str(sum(c.count for c in r.collectives)) for r in reports))
    table.add("temporaries", *(f"{r.memory.temporaries / MIB:.1f} MiB" for r in reports))
    table.add("schedule, replayed", *(f"{1e6 * r.replay.seconds:.1f} µs" for r in reports))
    table.add("exposed", *(f"{1e6 * sum(r.replay.exposed.values()):.1f} µs" for r in reports))
    return table
