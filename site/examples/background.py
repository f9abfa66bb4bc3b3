"""Numbers of the background pages: chips, networks, low precision, optimizers, goodput, inference, and choosing."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
from showing import Table, example, say

from course.budget import Sizes, activation_bytes, flops_per_token
from course.machines import MACHINES, machine, scaled
from course.planning.choices import Mesh
from course.planning.efficiency import at_efficiency, factors
from course.planning.search import Rejected, search
from course.planning.training import Training

NODES = [one for one in MACHINES if one.name not in ("2x8xA100", "8xH100-calibrated", "8xH100-sharp")]
SMALL = Sizes(16, 2048, 16, 32_768, 2048)
MIDDLE = Sizes(32, 4096, 32, 128_256, 8192, 14_336, kv_heads=8, gated=True)
LARGE = Sizes(80, 8192, 64, 128_256, 8192, 28_672, kv_heads=8, gated=True)


def gather_rate(where, devices) -> float:
    """Bytes per second that a device sends in a large all-gather over the devices."""
    return where.transfer("all_gather", devices, 1e9, 1e9)[1]


@example("sourced", "counted by closed form")
def chips() -> Table:
    columns = ("bf16, TFLOP/s ,.0f", "memory, GB .0f", "FLOPs a byte of memory ,.0f")
    columns += ("gather, GB/s ,.0f", "FLOPs a byte sent ,.0f", "tokens to hide FSDP ,.0f")
    table = Table("machine", *columns)
    for one in NODES:
        n = one.num_devices
        peak, rate = one.peak("bf16"), gather_rate(one, tuple(range(n)))
        ratios = peak / one.memory_bandwidth, rate / 1e9, peak / rate, (n - 1) / n * peak / rate
        table.add(f"`{one.name}`", peak / 1e12, one.memory_bytes / 1e9, *ratios)
    hidden = {name: float(row["tokens to hide FSDP"]) for name, row in table.rows.items()}
    assert hidden["`8xA100`"] < hidden["`8xH100`"] < 2300 and hidden["`8xMI300X`"] > hidden["`8xH100`"]
    return table


@example("counted by closed form")
def all_reduce() -> Table:
    """An all-reduce of 1 GB inside a node, by the devices and by the switch."""
    table = Table("all-reduce of 1 GB", "sent by a device, GB .2f", "time, ms .2f")
    for label, name in (("ring", "8xH100"), ("added in the switch", "8xH100-sharp")):
        where = machine(name)
        latency, rate = where.transfer("all_reduce", tuple(range(8)), 1e9, 1e9)
        wire = 2 * 7 / 8
        sent = wire if label == "ring" else 1.0
        table.add(f"{label}, 8 H100", sent, 1e3 * (latency + wire * 1e9 / rate))
    ring, switch = table.rows.values()
    assert 1.7 < ring["time"] / switch["time"] < 1.76, "the bound of NVLink SHARP"
    return table


@example("counted by closed form")
def two_levels() -> Table:
    """One ring through everything against reduce-scatter, all-reduce between nodes, all-gather; one adapter a GPU."""
    columns = "one ring on one adapter, ms .1f", "rings on all adapters .1f", "in two levels .1f"
    table = Table(("GPUs", "nodes"), *columns)
    node = machine("8xH100")
    inside, outside = node.links[0].bandwidth, 50e9
    for nodes in (2, 8, 64):
        count, size = 8 * nodes, 1e9
        single = 2 * (count - 1) / count * size / outside
        where = scaled(node, count, nodes)
        latency, rate = where.transfer("all_reduce", tuple(range(count)), size, size)
        many = latency + 2 * (count - 1) / count * size / rate
        local = 2 * 7 / 8 * size / inside
        between = 2 * (nodes - 1) / nodes * size / 8 / outside
        table.add((count, nodes), 1e3 * single, 1e3 * many, 1e3 * (local + between))
    for row in table.rows.values():
        assert row["one ring on one adapter"] > 4 * row["in two levels"]
    return table


@example("counted by closed form")
def latency() -> Table:
    """Small all-reduces: steps count, not bytes."""
    table = Table("GPUs", "ring steps d", "ring time, µs ,.0f", "tree steps d", "tree time, µs ,.0f")
    for count in (8, 64, 512, 4096):
        steps = 2 * (count - 1), 2 * round(math.log2(count))
        times = [4 * step for step in steps]
        table.add(count, steps[0], times[0], steps[1], times[1])
    return table


FORMATS = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8 E4M3": ml_dtypes.float8_e4m3fn,
    "float8 E5M2": ml_dtypes.float8_e5m2,
    "float4 E2M1": ml_dtypes.float4_e2m1fn,
}


@example("sourced")
def formats() -> Table:
    columns = "bits d", "largest .3g", "smallest normal .2g", "step at 1 .2g"
    table = Table("format", *columns)
    for name, dtype in FORMATS.items():
        info = ml_dtypes.finfo(dtype)
        table.add(name, info.bits, float(info.max), float(info.smallest_normal), float(info.eps))
    return table


def quantised(array: np.ndarray, dtype: type, block: int) -> np.ndarray:
    """Round to a format and back, with one scale for each block of a row; a block of 0 is the whole array."""
    blocks = array.reshape(-1, block) if block else array.reshape(1, -1)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / float(ml_dtypes.finfo(dtype).max)
    return ((blocks / scale).astype(dtype).astype(np.float64) * scale).reshape(array.shape)


@example("run on CPU devices")
def scaling() -> Table:
    """The error of a product of rounded operands, without and with one column of 1,024 that is 200 times as large."""
    random = np.random.default_rng(0)
    x, w = random.normal(size=(128, 1024)), random.normal(size=(1024, 128)) / 32
    outliers = x.copy()
    outliers[:, 0] *= 200
    columns = "one scale for the array .1%", "the same, with outliers .1%"
    columns += ("a scale for 32 entries .1%", "the same with outliers .1%")
    table = Table("operands", *columns)
    for name in ("bfloat16", "float8 E4M3", "float8 E5M2", "float4 E2M1"):
        errors = []
        for block in (0, 32):
            for given in (x, outliers):
                left = quantised(given, FORMATS[name], block)
                right = quantised(w.T.copy(), FORMATS[name], block).T
                # Of all columns but the one with outliers, which would hide the error of the others.
                exact, rounded = given[:, 1:] @ w[1:], left[:, 1:] @ right[1:]
                errors.append(float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact)))
        table.add(name, *errors)
    row = table["float4 E2M1"]
    assert row["the same"] > 3 * row["the same with outliers"], "outliers ruin one scale for everything"
    return table


@example("counted by closed form")
def optimizers() -> Table:
    """State of optimizers, for a model of 7 billion parameters in mixed precision."""
    table = Table("optimizer", "bytes a parameter .3g", "7 B parameters, GB .0f")
    for name, state in {
        "Adam, float32 moments": 8.0,
        "Adam, 8-bit moments (Dettmers et al. 2022)": 2 * (1 + 4 / 2048),
        "Muon, one momentum (Jordan et al. 2024)": 4.0,
        "Adafactor, factored second moment, no first (Shazeer and Stern 2018)": 4 * (2 / 4096),
        "SGD": 0.0,
    }.items():
        # A bfloat16 parameter and gradient, and the float32 copy.
        table.add(name, 2 + 2 + 4 + state, (2 + 2 + 4 + state) * 7)
    return table


# Dubey et al. 2024, section 3.3.4 and table 5: interruptions nobody planned, in a snapshot of 54 days, on 16,384 H100.
FAILURES, DAYS, GPUS = 419, 54, 16_384


@example("counted by closed form")
def goodput() -> Table:
    """What failures cost, with checkpoints as often as Young and Daly say."""
    each = DAYS * 24 * GPUS / FAILURES
    write, restart = 60.0, 600.0
    columns = (
        "hours between failures ,.1f",
        "a checkpoint every, minutes ,.0f",
        "time lost .1%",
        "with 10 s to write .1%",
    )
    table = Table("GPUs", *columns)
    for count in (8, 256, 2048, 16_384, 32_768):
        mean = 3600 * each / count
        lost = []
        for cost in (write, 10.0):
            every = math.sqrt(2 * cost * mean)
            lost.append(cost / every + every / (2 * mean) + restart / mean)
        table.add(f"{count:,}", mean / 3600, math.sqrt(2 * write * mean) / 60, *lost)
    assert abs(each / GPUS - 3.09) < 0.01
    say(mtbf=f"{each / GPUS:.1f}", years=f"{each / 24 / 365:.1f}", failures=FAILURES)
    return table


@example("counted by closed form")
def diloco() -> Table:
    """Bytes between two sites for a model of 8 billion parameters, in bfloat16, with 1 s a step."""
    table = Table("outer step every", "sent by a site, GB a step .2f", "link that hides it, Gbit/s .1f")
    for steps in (1, 10, 100, 500):
        size = 2 * (2 - 1) / 2 * 2 * 8 / steps
        table.add(f"{steps} steps" if steps > 1 else "step (data parallelism)", size, 8 * size)
    return table


@example("counted by closed form")
def decode() -> Table:
    """One H100, a model of 8 billion parameters in bfloat16, 4,096 tokens in the cache of each sequence."""
    where = machine("8xH100")
    weights, cache = 2 * MIDDLE.count, 2 * 2 * MIDDLE.layers * MIDDLE.keys * 4096
    columns = "cache, GB .1f", "reading, ms .2f", "computing, ms .2f", "tokens/s ,.0f", "of the peak .1%"
    table = Table("sequences", *columns)
    for batch in (1, 8, 32, 64, 128):
        reading = (weights + batch * cache) / where.memory_bandwidth
        computing = 2 * MIDDLE.count * batch / where.peak("bf16")
        seconds = max(reading, computing)
        share = computing / seconds
        fits = weights + batch * cache < where.memory_bytes
        label = str(batch) if fits else f"{batch} (does not fit)"
        table.add(label, batch * cache / 1e9, 1e3 * reading, 1e3 * computing, batch / seconds, share)
    say(
        cache=f"{2 * 2 * MIDDLE.layers * MIDDLE.keys / 1024:,.0f}",
        cache_full=f"{2 * 2 * MIDDLE.layers * MIDDLE.queries / 1024:,.0f}",
        batch=f"{where.peak('bf16') / where.memory_bandwidth:,.0f}",
        weights=f"{weights / 1e9:.1f}",
        prefill=f"{2 * MIDDLE.count * 4096 / where.peak('bf16') * 1e3:,.0f}",
    )
    return table


@example("counted by closed form")
def offload() -> Table:
    """Time to move Adam's state over PCIe 5 (64 GB/s each way), against a step's arithmetic, on one H100."""
    where, sizes = machine("8xH100"), replace(MIDDLE, seq=2048)
    state = 12 * sizes.count / 64e9
    table = Table("tokens in a step", "computing, s .1f", "state there and back, s .1f", "share exposed .0%")
    for tokens in (4096, 32_768, 262_144):
        seconds = flops_per_token(sizes) * tokens / where.peak("bf16") / 0.5
        table.add(f"{tokens:,}", seconds, state, max(0.0, 1 - seconds / state))
    return table


@example("predicted, calibrated")
def choosing() -> Table:
    """Models on clusters: the planner's fastest configuration that fits, at the efficiency of published runs."""
    columns = "state with Adam, GB ,.0f", "mesh s", "ZeRO d", "remat s", "memory, GB .0f", "MFU .0%", "`data` alone s"
    table, ratios = Table(("model", "devices"), *columns), []
    for name, sizes, chip, devices, nodes, batch in (
        ("1 B", SMALL, "8xA5000", 8, 1, 64),
        ("8 B", MIDDLE, "8xH100", 8, 1, 64),
        ("8 B", MIDDLE, "8xH100", 64, 8, 128),
        ("70 B", LARGE, "8xH100", 64, 8, 128),
        ("70 B", LARGE, "8xH100", 512, 64, 512),
        ("70 B", LARGE, "8xH100", 2048, 256, 512),
    ):
        where = scaled(machine(chip), devices, nodes) if nodes > 1 else machine(chip)
        where = at_efficiency(where, factors()[where.device].factor)
        plans = search(sizes, where, batch, Training(remats=("none", "attention", "block")))
        best, alone = plans.best, plans.by_mesh().get(Mesh(devices, 1, 1))
        assert best
        alone = alone.found if isinstance(alone, Rejected) else alone
        ratios.append(alone.mfu / best.mfu if alone else math.nan)
        mesh = " ".join(f"`{axis}={size}`" for axis, size in best.choice.mesh.items() if size > 1)
        figures = 16 * sizes.count / 1e9, mesh, best.choice.zero, best.choice.remat, best.bytes / 1e9, best.mfu
        table.add(
            (name, f"{devices:,} x {chip[2:]}, batch {batch}"), *figures, f"{alone.mfu:.0%}" if alone else "impossible"
        )
    assert min(ratios[2:-1]) > 0.99 and ratios[1] < 0.9 and math.isnan(ratios[-1]), "enough sequences, and room"
    return table


@example()
def first_steps() -> None:
    """Figures of the decision guide."""
    h100, fast = machine("8xH100"), 450e9
    peak = h100.peak("bf16")
    say(
        state_8=f"{16 * MIDDLE.count / 1e9:,.0f}",
        state_8_shard=f"{16 * MIDDLE.count / 8 / 1e9:,.0f}",
        peaks=f"{peak / machine('8xA100').peak('bf16'):.1f}",
        links=f"{fast / machine('8xA100').links[0].bandwidth:.1f}",
        count_8=f"{MIDDLE.count / 1e9:.1f}",
        count_70=f"{LARGE.count / 1e9:.1f}",
        state_70=f"{16 * LARGE.count / 1e9:,.0f}",
        state_70_64=f"{16 * LARGE.count / 64 / 1e9:,.0f}",
        tokens_nvlink=f"{7 / 8 * peak / fast:,.0f}",
        tokens_side=f"{63 / 64 * peak / 400e9:,.0f}",
        tokens_network=f"{7 / 8 * peak / 50e9:,.0f}",
        hidden_nvlink=f"{7 * peak / fast:,.0f}",
        hidden_network=f"{7 * peak / 50e9:,.0f}",
        activations=f"{activation_bytes(MIDDLE, 1, dropout=False) / 1e9:,.0f}",
        bubble_8=f"{100 * 7 / (8 + 7):.0f}",
        bubble_32=f"{100 * 7 / (32 + 7):.0f}",
    )
