"""The machines' tables: figures, links, the link of each mesh axis, and the idealised and the calibrated H100."""

from pathlib import Path
from tempfile import TemporaryDirectory

from showing import Table, example, say

from course.machines import A5000, H100, H100_CALIBRATED, MACHINES, TPU_V5E, TWO_A100, load, machine, scaled
from course.measured.rows import recorded_rows
from course.measured.single_device import PEAKS
from course.measured.validate import MATMUL_SIZES, MOVE_SIZES, kernel_name
from course.validation import gpus

OWN_RATES = """\
[machines.ours]
like = "8xH100"
efficiency = {{ matmul = {:.3f}, memory = {:.3f} }}

[machines.ours.sources]
efficiency = "the largest product and the largest sum of make validate-gpu"
"""
GPUS = (gpus.H100, "NVIDIA H200")
OWN = """\
[machines.ours]
like = "8xH100"
num_devices = 64
links = [
    { name = "NVLink", group = 8, bandwidth = 450e9, latency = 1e-6, reduces = true },
    { name = "Ethernet", group = 64, bandwidth = 25e9, latency = 1e-5, shared = true },
]

[machines.ours.sources]
links = "ours: NVSwitch adds up; one adapter of 200 Gb/s a node"
"""


@example("sourced")
def figures() -> Table:
    columns = *(f"{name} s" for name in ("bf16", "f32", "f8", "vector")), "GB .3g", "GB/s ,.0f"
    table = Table(("machine", "device", "devices"), *columns)
    for m in MACHINES:
        peaks = *(m.matmul_flops.get(dtype) for dtype in ("bf16", "f32", "f8")), m.vector_flops
        shown = (f"{peak / 1e12:g}" if peak else "" for peak in peaks)
        table.add((f"`{m.name}`", m.device, m.num_devices), *shown, m.memory_bytes / 1e9, m.memory_bandwidth / 1e9)
    return table


@example("measured")
def reached() -> Table:
    """Rates that our GPUs reach, as shares of the published peaks."""
    short = [name.split()[1] for name in GPUS]
    columns = [column for name in short for column in (f"{name} s", f"of the {name}'s peak s")]
    table, rows = Table("operation", *columns), {name: recorded_rows(name) for name in GPUS}
    for dtype, words in (("bf16", "bf16"), ("f32 default", "f32")):
        for side in MATMUL_SIZES:
            rates = [(rows[name][kernel_name("matmul", dtype, side)]["rate"], machine(PEAKS[name])) for name in GPUS]
            shown = [(f"{rate / 1e12:.0f}", f"{100 * rate / m.peak(words):.0f}%") for rate, m in rates]
            table.add(f"product, {words}, side {side:,}, TFLOP/s", *(text for pair in shown for text in pair))
    for size in MOVE_SIZES[1:]:
        rates = [(rows[name][kernel_name("add", "f32 default", size)]["rate"], machine(PEAKS[name])) for name in GPUS]
        shown = [(f"{rate / 1e12:.2f}", f"{100 * rate / m.memory_bandwidth:.0f}%") for rate, m in rates]
        table.add(f"sum of two arrays of {size // 2**20:,} MiB, TB/s", *(text for pair in shown for text in pair))
    return table


@example("sourced")
def links() -> Table:
    table = Table(("machine", "link", "wires"), "joins d", "GB/s, one way g", "latency, µs g")
    for m in MACHINES:
        for link in () if m.calibrated else m.links:
            wires = "pairs" if link.pairs else "torus " + " x ".join(map(str, link.torus)) if link.torus else "switch"
            wires += ", reduces" if link.reduces else ""
            table.add((f"`{m.name}`", link.name, wires), link.group, link.bandwidth / 1e9, link.latency * 1e6)
    return table


@example("sourced")
def networks() -> Table:
    table = Table(("node", "network"), "GB/s a device, one way g", "devices of a node, at most d")
    for m in MACHINES:
        if m.network and len(m.links) == 1 and "-" not in m.name:
            table.add(
                (f"`{m.name}`", m.network.name), m.network.bandwidth / 1e9, max(m.links[0].largest, m.num_devices)
            )
    return table


@example("counted by closed form")
def levels() -> Table:
    """A gather and an exchange of 64 MiB over groups of 64 H100."""
    cluster, size = scaled(H100, 64, 8), 64 * 2**20
    table = Table(("collective", "group"), "steps, µs .0f", "bytes at GB/s .1f", "µs ,.0f")
    for kind, group, name in (
        ("all_gather", range(8), "8 of a node"),
        ("all_gather", range(0, 64, 8), "one of each node"),
        ("all_gather", range(64), "all 64"),
        ("all_reduce", range(64), "all 64"),
        ("all_to_all", range(64), "all 64"),
    ):
        n, block = len(group), size / 64 if kind == "all_to_all" else size
        wire = (2 if kind == "all_reduce" else 1) * (n - 1) / n * block
        latency, rate = cluster.transfer(kind, group, wire, block)
        table.add((kind.replace("_", "-"), name), 1e6 * latency, rate / 1e9, 1e6 * (latency + wire / rate))
    return table


@example("diagram")
def own() -> str:
    """A machine file, loaded to check that the page's example is valid."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "my.toml")
        file.write_text(OWN)
        assert load(file).links[1].shared
    return f"```toml\n{OWN}```"


@example("measured")
def own_rates() -> str:
    """A machine file with the factors that our H100 reached; loaded, and compared with the validation's machine."""
    where = dict(gpus.ours())[gpus.H100].own_rates
    assert where
    factors = where.efficiency.matmul, where.efficiency.memory
    text = OWN_RATES.format(*factors)
    with TemporaryDirectory() as folder:
        file = Path(folder, "ours.toml")
        file.write_text(text)
        read = load(file)
    assert (read.efficiency.matmul, read.efficiency.memory) == tuple(round(factor, 3) for factor in factors)
    return f"```toml\n{text}```"


@example("counted by closed form")
def axes() -> Table:
    table = Table(("machine", "mesh", "runs over"))
    for m, mesh in (
        (A5000, {"data": 4, "tensor": 2}),
        (A5000, {"tensor": 2, "data": 4}),
        (A5000, {"data": 8}),
        (H100, {"data": 4, "tensor": 2}),
        (TWO_A100, {"data": 2, "tensor": 8}),
        (TWO_A100, {"data": 4, "tensor": 4}),
        (TWO_A100, {"data": 16}),
    ):
        sizes = ", ".join(f"`{axis}` = {size}" for axis, size in mesh.items())
        table.add((f"`{m.name}`", sizes, ", ".join(f"`{axis}`: {link}" for axis, link in m.axis_links(mesh).items())))
    return table


@example("predicted, idealised", "predicted, calibrated")
def compared() -> Table:
    """Times in microseconds."""
    table, machines = Table("", "`8xH100`, µs ,.0f", "`8xH100-calibrated`, µs ,.0f"), (H100, H100_CALIBRATED)
    for kind, share, name in (
        ("all_gather", 7 / 8, "all-gather"),
        ("all_reduce", 14 / 8, "all-reduce"),
        ("collective_permute", 1, "permute"),
    ):
        for mib in (1, 4, 32, 128):
            size = mib * 2**20
            transfers = [m.transfer(kind, tuple(range(8)), share * size, size) for m in machines]
            table.add(f"{name}, {mib} MiB", *(1e6 * (latency + share * size / rate) for latency, rate in transfers))
    for side in (1024, 4096):
        seconds = (m.matmul_seconds(2 * side**3, 0, "bf16") for m in machines)
        table.add(f"bfloat16 product, {side:,} cubed", *(1e6 * x for x in seconds))
    return table


@example("sourced")
def sources() -> str:
    """The source of each figure, and the figures that the text quotes."""
    lines = []
    for m in MACHINES:
        lines += [f'??? note "{m.name}"\n']
        lines += [f"    - **{figure.replace('_', ' ')}**: {source}" for figure, source in m.sources.items()]
        lines += [""]
    pairs, wide = A5000.bandwidth_of((0, 1)), A5000.bandwidth_of(tuple(range(8)))
    assert pairs == wide
    efficiency = A5000.efficiency
    # Bytes of an array of 1 GiB that an all-reduce of eight sums per second.
    reduced = {
        name: machine(name).transfer("all_reduce", range(8), 1.75, 2**30)[1] / 1.75
        for name in ("8xH100", "8xH100-sharp", "8xH100-calibrated")
    }
    say(
        wide=f"{wide / 1e9:g}",
        strided=f"{A5000.bandwidth_of((0, 2, 4, 6)) / 1e9:g}",
        matmul=f"{efficiency.matmul:g}",
        memory=f"{efficiency.memory:g}",
        nodes=f"{TWO_A100.bandwidth_of(tuple(range(16))) / 1e9:g}",
        tpu=f"{TPU_V5E.bandwidth_of(range(4)) / 1e9:g}",
        both=f"{TPU_V5E.bandwidth_of(range(8)) / 1e9:g}",
        cube=f"{machine('64xTPUv5p').bandwidth_of(range(64)) / 1e9:g}",
        sharp_gain=f"{reduced['8xH100-sharp'] / reduced['8xH100'] - 1:.0%}",
        table_reduce=f"{reduced['8xH100-calibrated'] / 1e9:.0f}",
        ring_reduce=f"{reduced['8xH100'] / 1e9:.0f}",
        sharp_reduce=f"{reduced['8xH100-sharp'] / 1e9:.0f}",
    )
    return "\n".join(lines).rstrip()
