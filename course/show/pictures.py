"""Pictures: a step's timeline, several on one time scale, and what lives in memory at the peak.

Each is one piece of SVG without script, style sheet or address, for notebooks, pages and files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from course.program.memory import Memory
from course.program.timeline import Bar, DeviceTime, Timeline
from course.program.timeline.gaps import Gap, by_device, gaps
from course.program.timeline.trace import device_name, mesh_text, plain_kind, shape_text, work_of
from course.show.quantities import axis_texts, bytes_text, count_text, seconds_text, ticks
from course.show.svg import AXES, KERNEL, MATMUL, TEXT, Mark, Row, draw, hatchings, merged, svg, text

LEFT, WIDTH, RIGHT = 118.0, 800.0, 26.0
BAR, STEP, HEAD = 20.0, 25.0, 22.0
COLUMNS = (342.0, 560.0, 700.0)  # shape, operation and line of what is alive
MAX_DEVICES, MAX_ALIVE, MAX_LETTERS = 8, 12, 290_000


def timeline_svg(timeline: Timeline, *, file: bool = False) -> str:
    """A step: a row for each stream of each class of devices, with what it waited for.

    Args:
        timeline: With its bars.
        file: Whether the picture is to stand alone, with colours of its own.
    """
    return side_by_side({"": timeline}, file=file)


def side_by_side(timelines: Mapping[str, Timeline], *, file: bool = False) -> str:
    """Several steps, one below the other on one time scale.

    Args:
        timelines: By the name that stands above each.
        file: As for ``timeline_svg``.
    """
    end = max(timeline.seconds for timeline in timelines.values())
    streams = sorted({bar.stream for timeline in timelines.values() for bar in timeline.bars} - {"compute"})
    colours = {name: AXES[i % len(AXES)] for i, name in enumerate(streams)}
    most = MAX_DEVICES if len(timelines) == 1 else MAX_DEVICES // 2
    blocks = {name: _rows(timeline, colours, most) for name, timeline in timelines.items()}
    described = " ".join(_described(name, timeline) for name, timeline in timelines.items())
    name = _unique(repr([(n, t.seconds, len(t.bars), t.devices) for n, t in timelines.items()]))
    least = end / WIDTH
    while True:
        drawn, height = _drawn(blocks, timelines, colours, end, least, name)
        picture = svg(LEFT + WIDTH + RIGHT, height, _title(timelines), described, drawn, name, file=file)
        if len(picture) <= MAX_LETTERS or least > end:
            return picture
        least *= 2


def _title(timelines: Mapping[str, Timeline]) -> str:
    each = [f"{name}: {seconds_text(t.seconds)}" if name else seconds_text(t.seconds) for name, t in timelines.items()]
    one = next(iter(timelines.values()))
    return f"Timeline of a step on {one.machine}, {mesh_text(one.mesh)}: {', '.join(each)}"


def _described(name: str, timeline: Timeline) -> str:
    """The picture in words."""
    said = [f"{name}:"] if name else []
    for device in timeline.devices[:MAX_DEVICES]:
        exposed = [f"{seconds_text(s)} of exposed communication over {axes}" for axes, s in device.exposed.items() if s]
        parts = [f"computes {seconds_text(device.busy)}", *exposed, f"waits {seconds_text(device.waiting)} for others"]
        said.append(f"{device_name(device)} {', '.join(parts)}.")
    return " ".join(said)


def _rows(timeline: Timeline, colours: Mapping[str, str], most: int) -> list[tuple[str, list[Row]]]:
    """The first ``most`` classes of devices by name, with their streams."""
    streams = by_device(timeline)
    found = []
    for device in timeline.devices[:most]:
        rows = []
        for stream, bars in streams[device.device].items():
            marks = [_bar_mark(bar, colours) for bar in bars]
            if stream == "compute":
                marks = sorted([*marks, *_idle(timeline, device, colours)], key=lambda mark: mark.start)
            rows.append(Row("compute" if stream == "compute" else f"over {stream}", tuple(marks)))
        found.append((device_name(device), rows))
    return found


def _bar_mark(bar: Bar, colours: Mapping[str, str]) -> Mark:
    kind, shape = plain_kind(bar.kind), shape_text(bar.shape, bar.dtype)
    fill = {"matmul": MATMUL, "kernel": KERNEL}.get(work_of(bar.kind)) or colours.get(bar.stream, AXES[0])
    work = [count_text(bar.flops, "FLOP")] if bar.flops else []
    moved = f"{bytes_text(bar.bytes)} {'moved' if bar.stream == 'compute' else 'sent'}"
    line = bar.line or "unknown line"
    title = f"{kind} {shape}, {seconds_text(bar.end - bar.start)}, {', '.join([*work, moved])}\n{line}"
    return Mark(bar.start, bar.end, fill, (f"{kind} {shape}", kind), title, f"{kind}, {line}")


def _idle(timeline: Timeline, device: DeviceTime, colours: Mapping[str, str]) -> list[Mark]:
    return [_gap_mark(gap, colours) for gap in gaps(timeline, device)]


def _gap_mark(gap: Gap, colours: Mapping[str, str]) -> Mark:
    took = seconds_text(gap.end - gap.start)
    line = gap.line or "unknown line"
    if gap.axes:
        title = f"nothing is computed for {took}: communication over {gap.axes} is exposed\n{line}"
        return Mark(gap.start, gap.end, "exposed", (), title, f"exposed: {line}", colours[gap.axes])
    title = f"nothing is computed for {took}: others are not ready to communicate\n{line}"
    return Mark(gap.start, gap.end, "waiting", (), title, f"waiting: {line}")


def _drawn(
    blocks: Mapping[str, list[tuple[str, list[Row]]]], timelines: Mapping[str, Timeline], colours: Mapping[str, str],
    end: float, least: float, name: str
) -> tuple[str, float]:  # fmt: skip
    """Everything inside, and how high it is; marks shorter than ``least`` seconds are drawn together."""
    hatches = {colour: f"url(#{name}-{i})" for i, colour in enumerate(colours.values())}
    parts, y = [], 4.0
    for block, devices in blocks.items():
        timeline = timelines[block]
        if block:
            said = f"{block}: {seconds_text(timeline.seconds)}"
            parts.append(text(said, 0, y + 14, size=TEXT + 1, weight="600"))
            y += HEAD
        for device, rows in devices:
            parts.append(text(device, LEFT + 4, y + 13, faint=True))
            y += HEAD - 4
            for row in rows:
                parts.append(text(row.label, LEFT - 8, y + BAR / 2 + 4, "end"))
                parts += [_placed(mark, y, end, hatches, name) for mark in merged(row.marks, least)]
                y += STEP
        hidden = len(timeline.devices) - len(devices)
        if hidden > 0:
            parts.append(text(f"and {hidden} more that behave differently, not drawn", LEFT + 4, y + 12, faint=True))
            y += HEAD - 4
        y += 6
    used = {(m.fill, m.colour) for devices in blocks.values() for _, rows in devices for row in rows for m in row.marks}
    legend, below = _legend(colours, hatches, used, name, y + 24)
    return hatchings(name, list(colours.values())) + _axis(end, y) + "".join(parts) + legend, below


def _placed(mark: Mark, y: float, end: float, hatches: Mapping[str, str], name: str) -> str:
    fill = (
        hatches[mark.colour] if mark.fill == "exposed" else f"url(#{name}-w)" if mark.fill == "waiting" else mark.fill
    )
    scale = WIDTH / end if end else 0.0
    return draw(mark, LEFT + mark.start * scale, y, (mark.end - mark.start) * scale, BAR, fill)


def _axis(end: float, y: float) -> str:
    """Ticks and the lines above them, behind everything else."""
    values = ticks(end)
    parts = []
    for value, said in zip(values, axis_texts(values), strict=True):
        x = LEFT + (value / end * WIDTH if end else 0)
        line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{y:g}" stroke="currentColor" stroke-opacity="0.18"/>'
        parts.append(line + text(said, x, y + 13, "middle", faint=True))
    return "".join(parts)


def _legend(
    colours: Mapping[str, str], hatches: Mapping[str, str], used: set[tuple[str, str]], name: str, y: float
) -> tuple[str, float]:
    """What the colours that were ``used`` mean, and where it ends."""
    entries = [(MATMUL, "matmul", (MATMUL, "")), (KERNEL, "other kernels", (KERNEL, ""))]
    entries += [(colour, f"sending over {axes}", (colour, "")) for axes, colour in colours.items()]
    entries += [(hatches[c], f"nothing computed: sending over {a}", ("exposed", c)) for a, c in colours.items()]
    entries.append((f"url(#{name}-w)", "nothing computed: waiting for others", ("waiting", "")))
    parts, x = [], LEFT
    for fill, said in [(fill, said) for fill, said, key in entries if key in used]:
        width = 18 + len(said) * 6.3 + 16
        if x + width > LEFT + WIDTH + RIGHT and x > LEFT:
            x, y = LEFT, y + 18
        parts.append(f'<rect x="{x:.1f}" y="{y:g}" width="12" height="12" fill="{fill}"/>')
        parts.append(text(said, x + 17, y + 10))
        x += width
    return "".join(parts), y + 18


def memory_svg(memory: Memory, capacity: float | None = None, *, file: bool = False) -> str:
    """What a device holds at the peak: inputs, outputs and temporaries in one bar, then the largest temporaries.

    Args:
        memory: Of the Program.
        capacity: Bytes of one device, to see how much of it is used.
        file: Whether the picture is to stand alone, with colours of its own.
    """
    parts = [("inputs", memory.arguments, MATMUL), ("outputs", memory.outputs - memory.aliased, AXES[2]),
             ("temporaries", memory.temporaries, AXES[0])]  # fmt: skip
    whole = max(capacity or 0.0, memory.peak, 1.0)
    said = f"peak {bytes_text(memory.peak)}" + (f" of {bytes_text(capacity)}" if capacity else "")
    drawn = [text(said, 0, 17, size=TEXT + 1, weight="600")]
    drawn += _stack(parts, whole, 28.0)
    if capacity and capacity < whole:
        x = capacity / whole * (LEFT + WIDTH)
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="52" stroke="currentColor" stroke-width="2"/>')
        drawn.append(text("what a device has", x - 6, 20, "end"))
    listed, y = _alive(memory, 28.0 + 2 * BAR + 28)
    each = ", ".join(f"{label} {bytes_text(size)}" for label, size, _ in parts)
    title = f"Memory of one device: {said}"
    return svg(LEFT + WIDTH + RIGHT, y, title, f"At the peak: {each}.", "".join([*drawn, *listed]),
               _unique(repr(memory)), file=file)  # fmt: skip


def _stack(parts: list[tuple[str, int, str]], whole: float, y: float) -> list[str]:
    frame = f'<rect x="0.5" y="{y:g}" width="{LEFT + WIDTH:g}" height="{BAR:g}" fill="none" stroke="currentColor" '
    drawn, at, x = [frame + 'stroke-opacity="0.4"/>'], 0.5, 0.0
    for label, size, colour in parts:
        width = size / whole * (LEFT + WIDTH)
        drawn.append(draw(Mark(0, 0, colour, (), f"{label}: {bytes_text(size)}", label), at, y, width, BAR, colour))
        drawn.append(f'<rect x="{x:g}" y="{y + BAR + 8:g}" width="12" height="12" fill="{colour}"/>')
        entry = f"{label} {bytes_text(size)}"
        drawn.append(text(entry, x + 17, y + BAR + 18))
        at, x = at + width, x + 17 + len(entry) * 6.3 + 18
    return drawn


def _alive(memory: Memory, y: float) -> tuple[list[str], float]:
    """The temporaries that are alive at the peak, equal ones in one line, and where the list ends."""
    groups = Counter(memory.alive)
    ranked = sorted(groups.items(), key=lambda entry: (-entry[0].bytes * entry[1], entry[0].line, entry[0].kind))
    if not ranked:
        return [], y
    drawn = [text("temporaries alive at the peak", 0, y, weight="600", size=TEXT)]
    largest = max(1, ranked[0][0].bytes * ranked[0][1])
    y += 8
    for alive, count in ranked[:MAX_ALIVE]:
        size = alive.bytes * count
        times = f"{count} times " if count > 1 else ""
        columns = (times + shape_text(alive.shape, alive.dtype), plain_kind(alive.kind), alive.line or "unknown line")
        drawn.append(text(bytes_text(size), LEFT - 40, y + 13, "end"))
        mark = Mark(0, 0, AXES[0], (), f"{', '.join(columns)}: {bytes_text(size)}", "")
        drawn.append(draw(mark, LEFT - 32, y + 1, size / largest * 240, 16, AXES[0]))
        drawn += [text(said, x, y + 13) for said, x in zip(columns, COLUMNS, strict=True)]
        y += 20
    rest = memory.temporaries - sum(alive.bytes * count for alive, count in ranked[:MAX_ALIVE])
    if rest > 0:
        drawn.append(text(f"{bytes_text(rest)} in smaller ones", LEFT - 32, y + 13, faint=True))
        y += 20
    return drawn, y + 4


def _unique(about: str) -> str:
    """A name for a picture, the same for the same picture: a page may hold many."""
    return "m" + hashlib.sha256(about.encode()).hexdigest()[:10]
