"""Building blocks of schedule pictures: rows of numbered cells, bubbles between them, thin lines for messages."""

from __future__ import annotations

from dataclasses import dataclass

from course.render.quantities import axis_texts, digits, ticks
from course.render.svg import AXES, DARK, KERNEL, LETTER, MATMUL, TEXT, hatchings, safe, svg, text, text_on, unique
from course.schedules.orders import KINDS

# Colours of the first, third, ... repeat, and of the second, fourth, ...; the contrast with white and with a dark page
# is at least 3:1.
_BACKWARD = (AXES[0], "#b04c00")
FILLS = {
    "F": (MATMUL, "#3a93cf"),
    "B": _BACKWARD,
    "I": _BACKWARD,
    "W": (AXES[2], "#007a58"),
    "loss": (KERNEL, KERNEL),
    "tick": (MATMUL, MATMUL),
    "other": (KERNEL, KERNEL),
    "synchronised": (AXES[1], AXES[1]),
}
PATTERNS = {"B": "lines", "I": "lines", "W": "dots"}  # the fills' names in ``_patterns``
WORDS = {**KINDS, "I": "backward, input's gradient", "W": "weights' gradient", "loss": "loss"}
WORDS |= {"tick": "computing", "other": "other kernels", "synchronised": "sent over other axes"}
LEFT, RIGHT, LEAST_WIDTH, MOST_WIDTH = 62.0, 20.0, 572.0, 2400.0
CELL, WIRE, GAP = 24.0, 3.0, 5.0
MAX_CELLS = 5000
LEAST = 1e-3  # fraction of the picture below which nothing is drawn
MASKED, IDLE = "masked: computed for nothing", "bubble"


@dataclass(frozen=True)
class Cell:
    """A piece of work of a stage.

    Attributes:
        start, end: Start and end times.
        kind: An action's kind, or ``masked``, ``missing``, ``loss``, ``tick`` or ``other``.
        repeat: Determines the shade.
        labels: Possible labels, the longest first.
        title: Tooltip.
    """

    start: float
    end: float
    kind: str
    repeat: int
    labels: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class Wire:
    """A message of a stage, on its first or second line."""

    start: float
    end: float
    kind: str
    line: int
    title: str


@dataclass(frozen=True)
class Row:
    """A stage, with a ``description`` for readers who do not see the picture."""

    cells: tuple[Cell, ...]
    wires: tuple[Wire, ...]
    description: str


@dataclass(frozen=True)
class Picture:
    """All stages up to ``end``, in ``seconds`` or without a unit; ``letters`` says that labels name repeats."""

    title: str
    heading: str
    rows: tuple[Row, ...]
    end: float
    seconds: bool
    letters: bool


def draw_lanes(picture: Picture, *, file: bool = False) -> str:
    """Draw the picture; ``file`` as for ``schedule_svg``.

    Raises:
        ValueError: It has too many cells to be readable.
    """
    count = sum(len(row.cells) for row in picture.rows)
    if count > MAX_CELLS:
        raise ValueError(f"{count:,} actions cannot be read in a picture; draw at most {MAX_CELLS:,}")
    named = [cell for row in picture.rows for cell in row.cells if cell.labels and cell.end > cell.start]
    lengths = [cell.end - cell.start for cell in named]
    room = LETTER * max((len(cell.labels[-1]) + picture.letters for cell in named), default=0) + 6
    needed_width = room * picture.end / min(lengths) if lengths else 0.0
    width = min(MOST_WIDTH, max(LEAST_WIDTH, needed_width))
    scale = width / picture.end if picture.end else 0.0
    name = unique(repr((picture.title, picture.heading, picture.end, picture.rows)))
    lines = 1 + max((wire.line for row in picture.rows for wire in row.wires), default=-1)
    step = CELL + GAP + lines * (WIRE + 1)
    parts, y = [text(picture.heading, 0, 16, size=TEXT + 1, weight="600")], 28.0
    top = y
    for stage, row in enumerate(picture.rows):
        parts.append(text(f"stage {stage}", LEFT - 8, y + CELL / 2 + 4, "end"))
        parts += [_bubble(*gap, y, scale, name) for gap in _gaps(row, picture)]
        parts += [_cell_svg(cell, y, scale, name) for cell in row.cells]
        parts += [_wire_svg(wire, y + CELL + 1, scale) for wire in row.wires]
        y += step
    legend, below = _legend(picture, name, y + 22, LEFT + width + RIGHT)
    inside = _patterns(name) + _axis(picture, scale, top, y - GAP) + "".join(parts) + legend
    described = " ".join(f"Stage {stage} {row.description}." for stage, row in enumerate(picture.rows))
    whole, title = LEFT + width + RIGHT, f"{picture.title}: {picture.heading}"
    least = 1.0 if width > LEAST_WIDTH else 0.9
    return svg(whole, below, title, described, inside, name, file=file, least=least)


def _patterns(name: str) -> str:
    """Hatchings for bubbles, masked work, backward passes and gradients of weights."""
    over = 'stroke-opacity="0.4" fill="none"'
    lines = (
        f'<pattern id="{name}-lines" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="M-1,1L1,-1M0,6L6,0M5,7L7,5" stroke="{DARK}" {over}/></pattern>'
        f'<pattern id="{name}-dots" width="5" height="5" patternUnits="userSpaceOnUse">'
        f'<circle cx="1.5" cy="1.5" r="0.9" fill="{DARK}" fill-opacity="0.5"/></pattern>'
        f'<pattern id="{name}-crossed" width="7" height="7" patternUnits="userSpaceOnUse">'
        f'<rect width="7" height="7" fill="{KERNEL}" fill-opacity="0.3"/>'
        f'<path d="M0,0L7,7M0,7L7,0" stroke="{KERNEL}" fill="none"/></pattern>'
    )
    return hatchings(name, []) + f"<defs>{lines}</defs>"


def _gaps(row: Row, picture: Picture) -> list[tuple[float, float]]:
    """Idle times of a stage; a Program sends only when all of its stages wait for it, which is not a bubble."""
    idle, free, end = [], 0.0, picture.end
    busy = [(cell.start, cell.end) for cell in row.cells]
    busy += [(wire.start, wire.end) for wire in row.wires] if picture.seconds else []
    for start, stop in sorted(busy):
        idle.append((free, start))
        free = max(free, stop)
    return [(a, b) for a, b in [*idle, (free, end)] if b - a > LEAST * end]


def _bubble(start: float, end: float, y: float, scale: float, name: str) -> str:
    x, width = LEFT + start * scale, (end - start) * scale
    title = f"<title>{IDLE}: nothing computed</title>"
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{CELL:g}" fill="url(#{name}-w)">{title}</rect>'


def _cell_svg(cell: Cell, y: float, scale: float, name: str) -> str:
    x, width = LEFT + cell.start * scale, max((cell.end - cell.start) * scale - 1, 0.6)
    place = f'x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{CELL:g}"'
    title = f"<title>{safe(cell.title)}</title>"
    if cell.kind == "masked":
        return f'<rect {place} fill="url(#{name}-crossed)">{title}</rect>'
    missing = cell.kind == "missing"
    fill = "none" if missing else FILLS[cell.kind][cell.repeat % 2]
    edge = ' stroke="currentColor" stroke-dasharray="3 2"' if missing else ""
    parts = f'<rect {place} fill="{fill}"{edge}>{title}</rect>'
    if cell.kind in PATTERNS:
        parts += f'<rect {place} fill="url(#{name}-{PATTERNS[cell.kind]})" pointer-events="none"/>'
    label = next((choice for choice in cell.labels if len(choice) * LETTER + 2 <= width), "")
    if not label:
        return parts
    colour = "currentColor" if missing else text_on(fill)
    halo = fill if cell.kind in PATTERNS else ""
    return parts + text(label, x + width / 2, y + CELL / 2 + 4, "middle", fill=colour, passive=True, halo=halo)


def _wire_svg(wire: Wire, y: float, scale: float) -> str:
    x, width = LEFT + wire.start * scale, max((wire.end - wire.start) * scale - 0.5, 0.6)
    place = f'x="{x:.1f}" y="{y + wire.line * (WIRE + 1):g}" width="{width:.1f}" height="{WIRE:g}"'
    return f'<rect {place} fill="{FILLS[wire.kind][0]}"><title>{safe(wire.title)}</title></rect>'


def _axis(picture: Picture, scale: float, top: float, bottom: float) -> str:
    if not picture.end:
        return ""
    values = ticks(picture.end, max(6, int(picture.end * scale / 95)))
    texts = axis_texts(values) if picture.seconds else [digits(value) for value in values]
    parts = []
    for value, label in zip(values, texts, strict=True):
        x = LEFT + value * scale
        parts.append(f'<path d="M{x:.1f},{top:g}V{bottom + 3:g}" stroke="currentColor" stroke-opacity="0.18"/>')
        parts.append(text(label, x, bottom + 15, "middle", faint=True))
    return "".join(parts)


def _legend(picture: Picture, name: str, y: float, width: float) -> tuple[str, float]:
    """A legend of the elements used, and its end."""
    kinds = {cell.kind for row in picture.rows for cell in row.cells}
    kinds |= {wire.kind for row in picture.rows for wire in row.wires} & {"synchronised"}
    entries: list[tuple[list[str], str]] = []
    for kind in FILLS:
        if kind in kinds:
            fills = [*FILLS[kind][: 2 if picture.letters else 1]]
            entries.append(([*fills, f"url(#{name}-{PATTERNS[kind]})"] if kind in PATTERNS else fills, WORDS[kind]))
    entries += [([f"url(#{name}-w)"], IDLE)] if any(_gaps(row, picture) for row in picture.rows) else []
    entries += [([f"url(#{name}-crossed)"], MASKED)] if "masked" in kinds else []
    note = "the number is the microbatch" + (", the letter the repeat" if picture.letters else "")
    note += "; thin lines: messages" if any(row.wires for row in picture.rows) else ""
    parts, x = [], LEFT
    for fills, word in entries:
        needed = 18 + len(word) * 6.3 + 14
        if x + needed > min(width, LEFT + LEAST_WIDTH) and x > LEFT:
            x, y = LEFT, y + 18
        parts.append(_swatch(fills, x, y))
        parts.append(text(word, x + 19, y + 10))
        x += needed
    parts.append(text(note, LEFT, y + 29, faint=True))
    return "".join(parts), y + 38


def _swatch(fills: list[str], x: float, y: float) -> str:
    """A small square; two colours share it, and a pattern covers all of it."""
    plain = [fill for fill in fills if not fill.startswith("url")] or fills
    part_width = 14 / len(plain)
    parts = [
        f'<rect x="{x + i * part_width:.1f}" y="{y:g}" width="{part_width:g}" height="12" fill="{fill}"/>'
        for i, fill in enumerate(plain)
    ]
    patterns = [fill for fill in fills if fill not in plain]
    parts += [f'<rect x="{x:.1f}" y="{y:g}" width="14" height="12" fill="{fill}"/>' for fill in patterns]
    return "".join(parts)
