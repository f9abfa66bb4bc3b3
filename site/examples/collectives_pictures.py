"""The steps of two rings, what four ways of summing take by the alpha-beta model, and what collectives send."""

import math
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.mesh import abstract_mesh
from course.program import costs, export, parse
from course.render.shardings import holdings_svg

SIZE = 4
CELL, HIGH, LEFT, GAP = 24, 24, 62, 40
LINK = machine("8xH100").links[0]


def cell(x, y, said, kind, opacity=1.0):
    style = f' style="opacity:{opacity:g}"' if opacity < 1 else ""
    on = "on " if kind != "soft" and opacity > 0.6 else ""
    box = f'<rect class="{kind}" x="{x}" y="{y}" width="{CELL - 1}" height="{HIGH}"{style}/>'
    return box + (f'<text class="{on}mid small" x="{x + CELL / 2 - 0.5:g}" y="{y + 16}">{said}</text>' if said else "")


def grid(said, title, cells):
    """One panel for each step; ``cells(step, device, chunk)`` gives a cell's text, colour and opacity."""
    width = LEFT + SIZE * (SIZE * CELL + GAP) - GAP + 6
    parts = [f'<text class="end small" x="{LEFT - 8}" y="{46 + d * 34}">device {d}</text>' for d in range(SIZE)]
    for step in range(SIZE):
        x = LEFT + step * (SIZE * CELL + GAP)
        name = ("at the start", "after one step", "after two steps", "after three steps")[step]
        parts.append(f'<text class="mid" x="{x + SIZE * CELL / 2:g}" y="16">{name}</text>')
        parts += [
            cell(x + chunk * CELL, 30 + device * 34, *cells(step, device, chunk))
            for device in range(SIZE)
            for chunk in range(SIZE)
        ]
    height = 34 + SIZE * 34
    head = f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{title}: {said}">'
    return "\n".join([head, *parts, "</svg>", ""])


def gathered(step, device, chunk):
    age = (device - chunk) % SIZE  # steps until this chunk is here
    if age > step:
        return "", "soft"
    return str(chunk), "grad" if age == step else "param"


def scattered(step, device, chunk):
    if chunk == (device - 1 - step) % SIZE:
        return str(step + 1), "grad", 0.4 + 0.2 * step
    sent = any(chunk == (device - 1 - before) % SIZE for before in range(step))
    return ("", "soft") if sent else ("1", "param", 0.3)


def ways(n):
    """Seconds of four ways to sum ``w`` bytes over ``n`` devices, by the alpha-beta model."""
    a, b, log = LINK.latency, LINK.bandwidth, math.log2(n)
    return {
        "reduce to one, broadcast": lambda w: 2 * log * (a + w / b),
        "swap whole arrays": lambda w: log * (a + w / b),
        "halving and doubling": lambda w: 2 * log * a + 2 * (n - 1) / n * w / b,
        "ring": lambda w: 2 * (n - 1) * a + 2 * (n - 1) / n * w / b,
    }


COLOURS = ("--fig-state", "--fig-param", "--fig-grad", "--md-default-fg-color")
DASHES = ("6 4", "", "2 3", "")


def plot():
    """Seconds by bytes, both in logarithms."""
    left, right, top, bottom = 64, 650, 14, 250
    low, high, fast, slow = 3, 9, -6, -1.9  # powers of ten: 1 kB to 1 GB, 1 us to some 12 ms

    def at(w, t):
        x = left + (math.log10(w) - low) / (high - low) * (right - left)
        return x, bottom - (math.log10(t) - fast) / (slow - fast) * (bottom - top)

    parts = []
    for power, said in zip(
        range(low, high + 1), ("1 kB", "10 kB", "100 kB", "1 MB", "10 MB", "100 MB", "1 GB"), strict=True
    ):
        x, _ = at(10.0**power, 1e-6)
        parts.append(f'<path class="edge" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(f'<text class="mid small" x="{x:.1f}" y="{bottom + 18}">{said}</text>')
    for power, said in ((-6, "1 µs"), (-5, "10 µs"), (-4, "100 µs"), (-3, "1 ms"), (-2, "10 ms")):
        _, y = at(1e3, 10.0**power)
        parts.append(f'<path class="edge" d="M{left} {y:.1f}H{right}"/>')
        parts.append(f'<text class="end small" x="{left - 8}" y="{y + 4:.1f}">{said}</text>')
    for i, (name, seconds) in enumerate(ways(8).items()):
        points = [at(10 ** (low + k / 8), seconds(10 ** (low + k / 8))) for k in range(8 * (high - low) + 1)]
        line = "L".join(f"{x:.1f} {max(y, top):.1f}" for x, y in points)
        style = f"fill:none;stroke:var({COLOURS[i]});stroke-width:2.2;stroke-dasharray:{DASHES[i] or 'none'}"
        parts.append(f'<path style="{style}" d="M{line}"/>')
        x, y = left + 16, top + 22 + 20 * i
        parts.append(
            f'<path style="{style}" d="M{x} {y - 4}h34"/><text class="small" x="{x + 42}" y="{y}">{name}</text>'
        )
    title = "Time of four ways to sum an array over eight devices, by its size, both in logarithms"
    return "\n".join([f'<svg viewBox="0 0 672 276" width="672" role="img" aria-label="{title}">', *parts, "</svg>", ""])


def sent(function, rows):
    """Bytes that each of 8 devices sends, as the costs lens counts them, over those of the whole array."""
    local = jax.shard_map(
        lambda x: function(x, "data")[None], mesh=abstract_mesh({"data": 8}), in_specs=P("data"), out_specs=P("data")
    )
    inputs = {"x": jax.ShapeDtypeStruct((8 * rows, 1024), jnp.float32)}
    program = export(lambda x: {"y": local(x)}, inputs, {"x": P("data")}, mesh={"data": 8}, out_specs={"y": P("data")})
    return sum(c.total_bytes for c in costs(parse(program)).collectives) / (4 * 8192 * 1024)


def main(folder):
    """Draw all pictures into ``folder`` and print the tables."""
    said = "in each step every device passes the chunk that it received last to the next device"
    (folder / "collectives_pictures_gather.svg").write_text(grid(said, "A ring all-gather on four devices", gathered))
    said = "in each step every device passes a partial sum on and adds its own chunk to the one that it receives"
    (folder / "collectives_pictures_scatter.svg").write_text(
        grid(said, "A ring reduce-scatter on four devices", scattered)
    )
    (folder / "collectives_pictures_times.svg").write_text(plot())
    for name, spec in (("columns", P(None, "tensor")), ("tuple", P(("data", "tensor")))):
        drawn = holdings_svg((16, 8), spec, {"data": 4, "tensor": 2}, show_spec=True)
        (folder / f"collectives_pictures_{name}.svg").write_text(drawn)
    print_sent()
    print_times()


def print_sent():
    """Between markers, for the page."""
    print("--8<-- [start:sent]")
    print("collective     sent by each of 8 devices, in whole arrays")
    for name, function, rows in (
        ("all_gather", lambda x, axis: lax.all_gather(x, axis, tiled=True), 1024),
        ("psum_scatter", lambda x, axis: lax.psum_scatter(x, axis, tiled=True), 8192),
        ("psum", lambda x, axis: lax.pcast(lax.psum(x, axis), axis, to="varying"), 8192),
        ("all_to_all", lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True), 8192),
        ("ppermute", lambda x, axis: lax.ppermute(x, axis, [(i, (i + 1) % 8) for i in range(8)]), 8192),
    ):
        print(f"{name:13}  {sent(function, rows):.3f}")
    print("--8<-- [end:sent]")


def print_times():
    """Between markers, for the page."""
    print("--8<-- [start:times]")
    print(f"microseconds, {1e6 * LINK.latency:g} us a step and {LINK.bandwidth / 1e9:g} GB/s")
    heads = [["", *textwrap.wrap(name, 15)][-2:] for name in ways(8)]
    for before, at in (("", 0), ("devices   array", 1)):
        print((f"{before:15}" + "".join(f"{head[at]:>16}" for head in heads)).rstrip())
    for n in (8, 64):
        for size, said in ((4 * 2**10, "4 KiB"), (2**20, "1 MiB"), (2**26, "64 MiB")):
            each = "".join(f"{1e6 * seconds(size):16,.1f}" for seconds in ways(n).values())
            print(f"{n:7}{said:>8}{each}")
    for n in (8, 64):
        swap, ring = ways(n)["swap whole arrays"], ways(n)["ring"]
        equal = (2 * (n - 1) - math.log2(n)) * LINK.latency * LINK.bandwidth / (math.log2(n) - 2 * (n - 1) / n)
        assert abs(swap(equal) / ring(equal) - 1) < 1e-9
        print(f"on {n} devices the ring is faster than swapping whole arrays above {equal / 1e6:.1f} MB")
    print("--8<-- [end:times]")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
