"""The machines' tables: figures, links, which link a mesh axis runs over, and the idealised and the calibrated H100."""

from showing import Table, example, say

from course.machines import A5000, H100, H100_CALIBRATED, MACHINES, TPU_V5E, TWO_A100


@example
def figures() -> Table:
    columns = *(f"{name} s" for name in ("bf16", "f32", "f8", "vector")), "GB g", "GB/s ,.0f"
    table = Table(("machine", "device", "devices"), *columns, markdown=True)
    for m in MACHINES:
        peaks = *(m.matmul_flops.get(dtype) for dtype in ("bf16", "f32", "f8")), m.vector_flops
        shown = (f"{peak / 1e12:g}" if peak else "" for peak in peaks)
        table.add((f"`{m.name}`", m.device, m.num_devices), *shown, m.memory_bytes / 1e9, m.memory_bandwidth / 1e9)
    return table


@example
def links() -> Table:
    table = Table(("machine", "link"), "joins d", "GB/s, one way g", "latency, µs g", markdown=True)
    for m in MACHINES:
        for link in () if m.calibrated else m.links:
            table.add((f"`{m.name}`", link.name), link.group, link.bandwidth / 1e9, link.latency * 1e6)
    return table


@example
def axes() -> Table:
    table = Table(("machine", "mesh", "runs over"), markdown=True)
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


@example
def compared() -> Table:
    """Times in microseconds."""
    table, both = Table("", "`8xH100`, µs ,.0f", "`8xH100-calibrated`, µs ,.0f", markdown=True), (H100, H100_CALIBRATED)
    for kind, share, name in (
        ("all_gather", 7 / 8, "all-gather"),
        ("all_reduce", 14 / 8, "all-reduce"),
        ("collective_permute", 1, "permute"),
    ):
        for mib in (1, 4, 32, 128):
            size = mib * 2**20
            found = [m.transfer(kind, tuple(range(8)), share * size, size) for m in both]
            table.add(f"{name}, {mib} MiB", *(1e6 * (latency + share * size / rate) for latency, rate in found))
    for side in (1024, 4096):
        seconds = (m.matmul_seconds(2 * side**3, 0, "bf16") for m in both)
        table.add(f"bfloat16 product, {side:,} cubed", *(1e6 * x for x in seconds))
    return table


@example
def sources() -> str:
    """Where each figure is from, and those that the text names."""
    lines = []
    for m in MACHINES:
        lines += [f'??? note "{m.name}"\n']
        lines += [f"    - **{figure.replace('_', ' ')}**: {source}" for figure, source in m.sources.items()]
        lines += [""]
    pairs, wide = A5000.bandwidth_of((0, 1)), A5000.bandwidth_of(tuple(range(8)))
    assert pairs == wide
    efficiency = A5000.efficiency
    say(
        wide=f"{wide / 1e9:g}",
        strided=f"{A5000.bandwidth_of((0, 2, 4, 6)) / 1e9:g}",
        matmul=f"{efficiency.matmul:g}",
        memory=f"{efficiency.memory:g}",
        nodes=f"{TWO_A100.bandwidth_of(tuple(range(16))) / 1e9:g}",
        tpu=f"{TPU_V5E.links[0].bandwidth / 1e9:g}",
        both=f"{TPU_V5E.transfer('all_gather', (0, 1), 1, 1)[1] / 1e9:g}",
    )
    return "\n".join(lines).rstrip()
