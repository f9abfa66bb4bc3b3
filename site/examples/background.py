"""Numbers of the background pages: chips, optimizers, goodput, and choosing."""

import math
from dataclasses import replace

from showing import Table, example, say

from course.budget import Sizes, activation_bytes, flops_per_token
from course.machines import MACHINES, machine, scaled
from course.planning.choices import Mesh
from course.planning.efficiency import at_efficiency, factors
from course.planning.search import Rejected, search
from course.planning.training import Training

NODES = [m for m in MACHINES if m.name not in ("2x8xA100", "8xH100-calibrated", "8xH100-sharp")]
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
    for node in NODES:
        n = node.num_devices
        peak, rate = node.peak("bf16"), gather_rate(node, tuple(range(n)))
        ratios = peak / node.memory_bandwidth, rate / 1e9, peak / rate, (n - 1) / n * peak / rate
        table.add(f"`{node.name}`", peak / 1e12, node.memory_bytes / 1e9, *ratios)
    hidden = {name: float(row["tokens to hide FSDP"]) for name, row in table.rows.items()}
    assert hidden["`8xA100`"] < hidden["`8xH100`"] < 2300 and hidden["`8xMI300X`"] > hidden["`8xH100`"]
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


# Dubey et al. 2024, section 3.3.4 and table 5: unexpected interruptions in a snapshot of 54 days, on 16,384 H100.
FAILURES, DAYS, GPUS = 419, 54, 16_384


@example("counted by closed form")
def goodput() -> Table:
    """The cost of failures, with checkpoints as often as Young and Daly recommend."""
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
            interval = math.sqrt(2 * cost * mean)
            lost.append(cost / interval + interval / (2 * mean) + restart / mean)
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
        plans = search(sizes, where, batch, Training())
        best, alone = plans.best, plans.by_mesh().get(Mesh(devices, 1, 1))
        assert best
        alone = alone.estimate if isinstance(alone, Rejected) else alone
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
