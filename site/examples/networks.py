"""Numbers and pictures of ``networks``: algorithms step by step, two levels, a torus."""

import cmath
import math
from collections import defaultdict

from showing import Table, block, diagram, example

from course.machines import machine, scaled
from course.render.svg import AXES, KERNEL, MATMUL, text

Steps = list[list[tuple[int, int, float]]]  # in each step: sender, receiver, and the share of the array


def ring(n: int) -> Steps:
    """An all-reduce of ``n`` devices in a ring."""
    return [[(device, (device + 1) % n, 1 / n) for device in range(n)] for _ in range(2 * (n - 1))]


def tree(n: int) -> Steps:
    """Sums go up a binomial tree, and the result down; ``n`` is a power of two."""
    halves = [2**level for level in range(n.bit_length() - 1)]
    up = [[(device, device - half, 1.0) for device in range(half, n, 2 * half)] for half in halves]
    return up + [[(receiver, sender, size) for sender, receiver, size in step] for step in reversed(up)]


def switch(n: int) -> Steps:
    """Device ``n`` is the switch, which adds."""
    return [[(device, n, 1.0) for device in range(n)], [(n, device, 1.0) for device in range(n)]]


def arrow(start: complex, end: complex, colour: str, *, both: bool = False, gap: float = 0) -> str:
    """A line with a head at one end or both, that keeps a distance from the points; x is real, y imaginary."""
    along = (end - start) / abs(end - start)
    start, end = start + gap * along, end - gap * along
    parts = [(start, end), *((end - 7 * along * cmath.rect(1, turn), end) for turn in (-0.45, 0.45))]
    parts += [(start + 7 * along * cmath.rect(1, turn), start) for turn in (-0.45, 0.45) if both]
    path = "".join(f"M{a.real:.1f},{a.imag:.1f}L{b.real:.1f},{b.imag:.1f}" for a, b in parts)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'


@example("counted by closed form")
def algorithms() -> None:
    """Three all-reduces of eight devices: their links, and what is sent over them."""
    around = {device: 46j * cmath.rect(-1, device * math.pi / 4) for device in range(8)}
    grown = {0: -53j, 4: -36 - 18j, 2: 6 - 18j, 1: 42 - 18j, 6: -52 + 17j, 5: -20 + 17j, 3: 6 + 17j, 7: -52 + 52j}
    parts, sentences = [], []
    ways = {"ring": (ring(8), around), "tree": (tree(8), grown), "switch that adds": (switch(8), {**around, 8: 0j})}
    for at, (name, (steps, places)) in enumerate(ways.items()):
        middle, devices, links = 64 + 132 * at + 84j, defaultdict(float), defaultdict(float)
        for sender, receiver, size in (message for step in steps for message in step):
            devices[sender] += size
            links[sender, receiver] += size
        for a, b in links:
            if a < b or (b, a) not in links:
                ends = middle + places[a], middle + places[b]
                parts.append(arrow(*ends, AXES[0], both=(b, a) in links, gap=12))
        for device, place in places.items():
            x, y = (middle + place).real - 9, (middle + place).imag - 9
            parts.append(block(str(device) if device < 8 else "+", x, y, 18, 18, MATMUL if device < 8 else AXES[2]))
        devices.pop(8, None)  # the switch
        (link,), most = {*links.values()}, max(devices.values())
        busiest = "a device" if len({*devices.values()}) == 1 else "busiest device"
        direction = "each way" if all((b, a) in links for a, b in links) else "one way"
        sizes = [f"{size:.3g} W".removeprefix("1 ") for size in (most, link)]
        lines = f"{len(steps)} steps", f"{busiest}: {sizes[0]}", f"a link: {sizes[1]} {direction}"
        parts.append(text(name, middle.real, 14, "middle", size=12, weight="600"))
        parts += [text(line, middle.real, 160 + 17 * row, "middle") for row, line in enumerate(lines)]
        sentences.append(f"{name[0].upper()}{name[1:]}: {', '.join(lines)}.")
    assert len(ring(8)) == 14 and len(tree(8)) == 2 * math.log2(8)
    title = "An all-reduce of W bytes by eight devices: ring, tree, and a switch that adds"
    diagram("algorithms", (392, 202), title, " ".join(sentences), parts, "counted by closed form")


@example("counted by closed form")
def all_reduce() -> Table:
    """An all-reduce of 1 GB inside a node, by the devices and by the switch."""
    table = Table("all-reduce of 1 GB", "sent by a device, GB .2f", "time, ms .2f")
    for label, name in (("ring", "8xH100"), ("added in the switch", "8xH100-sharp")):
        where = machine(name)
        latency, rate = where.transfer("all_reduce", tuple(range(8)), 1e9, 1e9)
        wire = 2 * 7 / 8
        sent = wire if label == "ring" else 1.0
        table.add(f"{label}, 8 H100s", sent, 1e3 * (latency + wire * 1e9 / rate))
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
    draw_adapters(table["16, 2"])
    return table


def draw_adapters(times: dict[str, float]) -> None:
    """Two nodes of eight, one below the other, and the adapters over which they send."""
    parts, tops = [], (24, 106)
    for left, name in ((2, "one ring on one adapter"), (202, "in two levels")):
        levels = name == "in two levels"
        parts.append(text(f"{name.partition(' on ')[0]}: {times[name]:.1f} ms", left, 12, size=12, weight="600"))
        for column in range(8):
            x, colour = left + 23 * column, AXES[column % 4] if levels else AXES[0]
            numbers = (column, 8 + column if levels else 15 - column)
            fill = colour if levels else MATMUL
            parts += [block(str(device), x, y, 22, 18, fill) for device, y in zip(numbers, tops, strict=True)]
            if levels or column in (0, 7):
                start, end = (44, 104) if column else (104, 44)
                parts.append(arrow(complex(x + 11, start), complex(x + 11, end), colour, both=levels))
            else:
                parts.append(f'<path d="M{x + 11},44v60" stroke="{KERNEL}" stroke-dasharray="2 4"/>')
    title = "The adapters over which two nodes of eight send, by one ring and in two levels"
    description = (
        "In one ring, one adapter of each node sends, and seven are idle. In two levels all eight send, each an eighth."
    )
    diagram("adapters", (388, 126), title, description, parts, "counted by closed form")


@example("counted by closed form")
def torus() -> None:
    """A plane of a TPU's torus, with a mesh axis over a whole dimension and one over half of one."""
    pod, pitch = machine("64xTPUv5p"), 44
    whole, half = (pod.transfer("all_gather", group, 1e9, 1e9)[1] for group in ((0, 1, 2, 3), (0, 1)))
    assert (whole, half) == (2 * pod.links[0].bandwidth, pod.links[0].bandwidth)
    axes = {0: (4, MATMUL, "a whole dimension: a ring", whole), 2: (2, AXES[0], "half of one: a line", half)}
    parts, sentences = [], []
    for row in range(4):
        size, colour, name, rate = axes.get(row, (0, KERNEL, "", 0.0))
        for column in range(4):
            place, ring = complex(30 + pitch * column, 32 + pitch * row), size == 4
            fill = colour if column < size else KERNEL
            parts.append(block("", place.real - 9, place.imag - 9, 18, 18, fill))
            for step, last, hue in (
                (pitch, column == 3, fill if ring or column + 1 < size else KERNEL),
                (pitch * 1j, row == 3, KERNEL),
            ):
                # A dimension wraps around: its last wire leaves on one side and comes back on the other.
                ends = (
                    [(place, place + step)]
                    if not last
                    else [(place, place + step / 1.5), (place - 3 * step, place - 3.7 * step)]
                )
                parts += [arrow(*segment, hue, both=not last, gap=11) for segment in ends]
        if name:
            lines = name, f"gathers at {rate / 1e9:.0f} GB/s"
            parts += [text(line, 214, 28 + pitch * row + 15 * below) for below, line in enumerate(lines)]
            sentences.append(f"A mesh axis over {', '.join(lines)}.")
    title = "Two mesh axes on one plane of a torus of TPU v5p"
    diagram("torus", (372, 2 * 32 + 3 * pitch), title, " ".join(sentences), parts, "counted by closed form")


@example("counted by closed form")
def latency() -> Table:
    """Small all-reduces: steps count, not bytes."""
    table = Table("GPUs", "ring steps ,d", "ring time, µs ,.0f", "tree steps d", "tree time, µs ,.0f")
    for count in (8, 64, 512, 4096):
        steps = 2 * (count - 1), 2 * round(math.log2(count))
        times = [4 * step for step in steps]
        table.add(count, steps[0], times[0], steps[1], times[1])
    return table
