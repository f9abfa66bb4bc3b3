"""Pictures: a step's timeline, several on one time scale, and the memory contents at the peak.

Each is one piece of SVG without scripts, style sheets or addresses, for notebooks, pages and files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from course.mesh import mesh_text
from course.program.ir import plain_kind
from course.program.memory import Alive, Memory
from course.program.simulator import Bar, Timeline
from course.program.simulator.gaps import Gap, by_device, gaps
from course.program.simulator.trace import device_name, shape_text, work_of
from course.render.captions import NOTHING, WAITING, exposed_text, line_text
from course.render.quantities import axis_texts, bytes_text, capacity_text, count_text, seconds_text, ticks
from course.render.svg import (
    AXES,
    KERNEL,
    LETTER,
    MATMUL,
    TEXT,
    Mark,
    Row,
    draw,
    hatchings,
    merged,
    svg,
    text,
    torn,
    unique,
)

# Narrow enough to be read without scrolling in a window of 700 px.
LEFT, WIDTH, RIGHT = 112.0, 572.0, 22.0
LONGEST_STREAM = 12  # letters of the axis names that fit into ``LEFT``
LEAST = 0.9
BAR, STEP, HEAD = 20.0, 25.0, 22.0
COLUMNS = (212.0, 376.0, 508.0)  # shape, operation and line of the live temporaries
LONGEST_ALIVE = 120.0
SLOW, KEPT = 3, 2  # multiple of the reference beyond which a timeline is cut, and of the longest other one that is kept
MAX_DEVICES, MAX_ALIVE, MAX_LETTERS = 8, 12, 290_000


def timeline_svg(timeline: Timeline, *, until: float = 0.0, file: bool = False) -> str:
    """A step: a row for each stream of each class of devices, with the transfers that it waited for.

    Args:
        timeline: A timeline with its bars.
        until: Minimum length of the time axis in seconds, so that several pictures have one scale.
        file: Whether the picture is standalone, with its own colours.

    Raises:
        TypeError: It is not a timeline.
    """
    return side_by_side({"": timeline}, until=until, file=file)


def _require(value: object, kind: type, attribute: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(
            f"this draws a {kind.__name__}, not a value of type {type(value).__name__}; a prediction has one as "
            f".{attribute}"
        )


def _shown_end(timelines: Mapping[str, Timeline], reference: str) -> float:
    """Seconds covered by the scale."""
    durations = [timeline.seconds for timeline in timelines.values()]
    known = timelines.get(reference)
    if known is None or not known.seconds:
        return max(durations)
    comparable = [seconds for seconds in durations if seconds <= SLOW * known.seconds]
    return min(max(durations), KEPT * max(comparable))


def side_by_side(
    timelines: Mapping[str, Timeline], *, reference: str = "", until: float = 0.0, file: bool = False
) -> str:
    """Several steps, one below the other on one time scale.

    Args:
        timelines: By the heading of each.
        reference: The name of one of them: another that takes more than three times as long is cut off at twice the
            longest of the rest, to leave those enough room. Without it, nothing is cut.
        until: As for ``timeline_svg``.
        file: As for ``timeline_svg``.

    Raises:
        TypeError: An entry is not a timeline.
        ValueError: There is none.
    """
    for timeline in timelines.values():
        _require(timeline, Timeline, "timeline")
    if not timelines:
        raise ValueError("side_by_side needs at least one timeline by name, as in {'mine': prediction.timeline}")
    end = max(_shown_end(timelines, reference), until)
    colours = _colours({bar.stream for timeline in timelines.values() for bar in timeline.bars} - {"compute"})
    most = MAX_DEVICES if len(timelines) == 1 else MAX_DEVICES // 2
    blocks = {name: _rows(timeline, colours, most, end) for name, timeline in timelines.items()}
    described = " ".join(_described(name, timeline) for name, timeline in timelines.items())
    name = unique(repr([(n, t.seconds, len(t.bars), t.devices) for n, t in timelines.items()]))
    least = end / WIDTH
    while True:
        drawn, height = _drawn(blocks, timelines, colours, end, least, name)
        picture = svg(LEFT + WIDTH + RIGHT, height, _title(timelines), described, drawn, name, file=file, least=LEAST)
        if len(picture) <= MAX_LETTERS or least > end:
            return picture
        least *= 2


def _colours(streams: Iterable[str]) -> dict[str, str]:
    """A colour for each stream, single axes first; if there are too few colours, the rest share the last one."""
    ordered = sorted(streams, key=lambda stream: (stream.count(","), stream))
    return {stream: AXES[min(i, len(AXES) - 1)] for i, stream in enumerate(ordered)}


def _label(stream: str) -> str:
    """The label next to a stream's row; labels that are too long are in the legend."""
    if stream == "compute":
        return stream
    long = "," in stream and len(stream) > LONGEST_STREAM
    return f"over {stream.count(',') + 1} axes" if long else f"over {stream}"


def _title(timelines: Mapping[str, Timeline]) -> str:
    entries = [
        f"{name}: {seconds_text(t.seconds)}" if name else seconds_text(t.seconds) for name, t in timelines.items()
    ]
    first = next(iter(timelines.values()))
    return f"Timeline of a step on {first.machine}, {mesh_text(first.mesh)}: {', '.join(entries)}"


def _described(name: str, timeline: Timeline) -> str:
    """A text description of the picture."""
    sentences = [f"{name}:"] if name else []
    for device in timeline.devices[:MAX_DEVICES]:
        exposed = [f"{exposed_text(axes)} {seconds_text(s)}" for axes, s in device.exposed.items() if s]
        parts = [f"computes {seconds_text(device.busy)}", *exposed, f"{WAITING} {seconds_text(device.waiting)}"]
        sentences.append(f"{device_name(device)} {', '.join(parts)}.")
    return " ".join(sentences)


def _rows(timeline: Timeline, colours: Mapping[str, str], most: int, end: float) -> list[tuple[str, list[Row]]]:
    """The first ``most`` classes of devices by name, with their streams up to ``end``."""
    if not timeline.seconds:
        return [(NOTHING, [])]
    streams = by_device(timeline)
    device_rows = []
    for device in timeline.devices[:most]:
        rows = []
        for stream, bars in streams[device.device].items():
            marks = [_bar_mark(bar, colours) for bar in bars]
            if stream == "compute":
                marks += [_gap_mark(gap, colours) for gap in gaps(timeline, device)]
                marks.sort(key=lambda mark: mark.start)
            visible = tuple(replace(mark, end=min(mark.end, end)) for mark in marks if mark.start < end or not end)
            rows.append(Row(_label(stream), visible))
        device_rows.append((device_name(device), rows))
    return device_rows


def _bar_mark(bar: Bar, colours: Mapping[str, str]) -> Mark:
    head, _, suffix = bar.kind.partition(" ")  # "dot_general and 3 more" if a timeline summary has merged some
    kind, shape = f"{plain_kind(head)} {suffix}".rstrip(), shape_text(bar.shape, bar.dtype) if bar.dtype else ""
    fill = {"matmul": MATMUL, "kernel": KERNEL}.get(work_of(head)) or colours.get(bar.stream, AXES[0])
    work = [count_text(bar.flops, "FLOP")] if bar.flops else []
    moved = f"{bytes_text(bar.bytes)} {'moved' if bar.stream == 'compute' else 'sent'}"
    line = line_text(bar.line)
    operation = f"{kind} {shape}".rstrip()
    title = f"{operation}, {seconds_text(bar.end - bar.start)}, {', '.join([*work, moved])}\n{line}"
    return Mark(bar.start, bar.end, fill, (operation, kind), title, f"{kind}, {line}")


def _gap_mark(gap: Gap, colours: Mapping[str, str]) -> Mark:
    duration = seconds_text(gap.end - gap.start)
    line = line_text(gap.line)
    if gap.axes:
        title = f"{exposed_text(gap.axes)}, {duration} in which nothing is computed while this is sent\n{line}"
        return Mark(gap.start, gap.end, "exposed", (), title, f"{exposed_text(gap.axes)}, {line}", colours[gap.axes])
    title = f"{WAITING}, {duration} in which nothing is computed and they are not ready to communicate\n{line}"
    return Mark(gap.start, gap.end, "waiting", (), title, f"{WAITING}, {line}")


def _drawn(
    blocks: Mapping[str, list[tuple[str, list[Row]]]],
    timelines: Mapping[str, Timeline],
    colours: Mapping[str, str],
    end: float,
    least: float,
    name: str,
) -> tuple[str, float]:
    """Everything inside, and its height; marks shorter than ``least`` seconds are merged."""
    hatches = {colour: f"url(#{name}-{i})" for i, colour in enumerate(colours.values())}
    parts, spans, y = [], [], 4.0
    for block, devices in blocks.items():
        timeline = timelines[block]
        cut = timeline.seconds > end
        if block or cut:
            heading = f"{block}: {seconds_text(timeline.seconds)}" if block else seconds_text(timeline.seconds)
            heading += f", cut off at {seconds_text(end)}" if cut else ""
            parts.append(text(heading, 0, y + 14, size=TEXT + 1, weight="600"))
            y += HEAD
        for device, rows in devices:
            parts.append(text(device, LEFT + 4, y + 13, faint=True))
            y += HEAD - 4
            spans.append((y, y + len(rows) * STEP))
            for row in rows:
                parts.append(text(row.label, LEFT - 8, y + BAR / 2 + 4, "end"))
                parts += [_placed(mark, y, end, hatches, name) for mark in merged(row.marks, least)]
                parts += [torn(LEFT + WIDTH + 3, y, BAR)] if cut else []
                y += STEP
        hidden = len(timeline.devices) - len(devices)
        if hidden > 0:
            parts.append(text(f"and {hidden} more that behave differently, not drawn", LEFT + 4, y + 12, faint=True))
            y += HEAD - 4
        y += 6
    used = {(m.fill, m.colour) for devices in blocks.values() for _, rows in devices for row in rows for m in row.marks}
    legend, below = _legend(colours, hatches, used, name, y + 24)
    return hatchings(name, list(colours.values())) + _axis(end, y, spans) + "".join(parts) + legend, below


def _placed(mark: Mark, y: float, end: float, hatches: Mapping[str, str], name: str) -> str:
    fill = (
        hatches[mark.colour] if mark.fill == "exposed" else f"url(#{name}-w)" if mark.fill == "waiting" else mark.fill
    )
    scale = WIDTH / end if end else 0.0
    return draw(mark, LEFT + mark.start * scale, y, (mark.end - mark.start) * scale, BAR, fill)


def _axis(end: float, y: float, spans: list[tuple[float, float]]) -> str:
    """Ticks, and lines across the ``spans`` that have rows, behind everything else: no line crosses a heading."""
    if not end:
        return ""
    values = ticks(end, 6)
    path = "".join(f"M{{x}},{low:g}V{high:g}" for low, high in [*spans, (y - 4, y)] if high > low)
    parts = []
    for value, label in zip(values, axis_texts(values), strict=True):
        x = LEFT + value / end * WIDTH
        lines = path.replace("{x}", f"{x:.1f}")
        line = f'<path d="{lines}" stroke="currentColor" stroke-opacity="0.18"/>'
        parts.append(line + text(label, x, y + 13, "middle", faint=True))
    return "".join(parts)


def _legend(
    colours: Mapping[str, str], hatches: Mapping[str, str], used: set[tuple[str, str]], name: str, y: float
) -> tuple[str, float]:
    """A legend of the ``used`` colours, and its end."""
    entries = [(MATMUL, "matmul", (MATMUL, "")), (KERNEL, "other kernels", (KERNEL, ""))]
    of_colour = {c: " or ".join(axes for axes, other in colours.items() if other == c) for c in colours.values()}
    entries += [(colour, f"sending over {axes}", (colour, "")) for colour, axes in of_colour.items()]
    entries += [(hatches[c], exposed_text(axes), ("exposed", c)) for c, axes in of_colour.items()]
    entries.append((f"url(#{name}-w)", WAITING, ("waiting", "")))
    parts, x = [], LEFT
    for fill, label in [(fill, label) for fill, label, key in entries if key in used]:
        width = 18 + len(label) * 6.3 + 16
        if x + width > LEFT + WIDTH + RIGHT and x > LEFT:
            x, y = LEFT, y + 18
        parts.append(f'<rect x="{x:.1f}" y="{y:g}" width="12" height="12" fill="{fill}"/>')
        parts.append(text(label, x + 17, y + 10))
        x += width
    return "".join(parts), y + 18


def memory_svg(memory: Memory, capacity: float | None = None, *, file: bool = False) -> str:
    """Memory of a device at the peak: inputs, outputs and temporaries in one bar, then the largest temporaries.

    Args:
        memory: Memory of the Program.
        capacity: Bytes of one device, to show the fraction used.
        file: Whether the picture is standalone, with its own colours.

    Raises:
        TypeError: It is not a ``Memory``.
    """
    _require(memory, Memory, "memory")
    sizes = memory.arguments, memory.outputs - memory.aliased, memory.temporaries
    parts = list(zip(("inputs", "outputs", "temporaries"), sizes, (MATMUL, AXES[2], AXES[0]), strict=True))
    whole = max(capacity or 0.0, memory.peak, 1.0)
    heading = f"peak {bytes_text(memory.peak)}" + (f" of {capacity_text(capacity)}" if capacity else "")
    drawn = [text(heading, 0, 17, size=TEXT + 1, weight="600")]
    drawn += _stack(parts, whole, 28.0)
    if capacity and capacity < whole:
        x = capacity / whole * (LEFT + WIDTH)
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="52" stroke="currentColor" stroke-width="2"/>')
        drawn.append(text("what a device has", x - 6, 20, "end"))
    listed, y, right = _alive(memory, 28.0 + 2 * BAR + 28)
    size_texts = ", ".join(f"{label} {bytes_text(size)}" for label, size, _ in parts)
    title = f"Memory of one device: {heading}"
    described, inside, name = f"At the peak: {size_texts}.", "".join([*drawn, *listed]), unique(repr(memory))
    return svg(max(LEFT + WIDTH + RIGHT, right), y, title, described, inside, name, file=file, least=LEAST)


def _stack(parts: Sequence[tuple[str, int, str]], whole: float, y: float) -> list[str]:
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


def _alive(memory: Memory, y: float) -> tuple[list[str], float, float]:
    """The temporaries that are alive at the peak, equal ones in one line, and the lower and right end of the list."""
    groups = Counter(memory.alive)
    ranked = sorted(groups.items(), key=lambda entry: (-entry[0].bytes * entry[1], entry[0].line, entry[0].kind))
    if not ranked:
        return [], y, 0.0
    drawn = [text("temporaries alive at the peak", 0, y, weight="600", size=TEXT)]
    largest = max(1, ranked[0][0].bytes * ranked[0][1])
    y, rows, places = y + 8, [_about(*entry) for entry in ranked[:MAX_ALIVE]], [*COLUMNS, 0.0]
    for i, column in enumerate(zip(*rows, strict=True)):
        places[i + 1] = max(places[i + 1], places[i] + LETTER * max(map(len, column)) + 12)
    for (alive, count), columns in zip(ranked, rows, strict=False):
        size = alive.bytes * count
        drawn.append(text(bytes_text(size), LEFT - 40, y + 13, "end"))
        mark = Mark(0, 0, AXES[0], (), f"{', '.join(columns)}: {bytes_text(size)}", "")
        drawn.append(draw(mark, LEFT - 32, y + 1, size / largest * LONGEST_ALIVE, 16, AXES[0]))
        drawn += [text(cell, x, y + 13) for cell, x in zip(columns, places, strict=False)]
        y += 20
    rest = memory.temporaries - sum(alive.bytes * count for alive, count in ranked[:MAX_ALIVE])
    if rest > 0:
        drawn.append(text(f"{bytes_text(rest)} in smaller ones", LEFT - 32, y + 13, faint=True))
        y += 20
    return drawn, y + 4, places[-1]


def _about(alive: Alive, count: int) -> tuple[str, str, str]:
    """Shape, operation and line of equal arrays."""
    times = f"{count} × " if count > 1 else ""
    return times + shape_text(alive.shape, alive.dtype), plain_kind(alive.kind), line_text(alive.line)
