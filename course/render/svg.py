"""Building blocks of timeline pictures: marks on rows, drawn as self-contained SVG.

Text and lines inherit the surrounding colour, so a picture is readable on light and on dark backgrounds.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from course.render.quantities import printable, seconds_text

# After Okabe and Ito's palette for colour-blind readers (Color Universal Design, 2008), each with a contrast of at
# least 3:1 against white and against a dark page; labels on them are light or dark accordingly.
MATMUL, KERNEL = "#0072b2", "#8a94a0"
AXES = ("#d55e00", "#c264b4", "#00966d", "#9b7d00")
LIGHT, DARK = "#ffffff", "#111111"
FONT = "system-ui,sans-serif"
SMALL, TEXT = 11, 12
LETTER = 6.1  # px per letter of the small size, slightly above the average


@dataclass(frozen=True)
class Mark:
    """A piece of a row.

    Attributes:
        start, end: Seconds.
        fill: A colour, or the name of a hatching: ``exposed`` (in ``colour``) or ``waiting``.
        colour: Colour of the hatching.
        labels: Possible labels, the longest first.
        title: Tooltip.
        name: Name to count it under when many are drawn as one.
    """

    start: float
    end: float
    fill: str
    labels: tuple[str, ...]
    title: str
    name: str
    colour: str = ""


@dataclass(frozen=True)
class Row:
    """A stream of a device."""

    label: str
    marks: tuple[Mark, ...]


def unique(about: str, letter: str = "m") -> str:
    """An id for a picture, the same for the same picture: a page may contain many. It begins with ``letter``."""
    return letter + hashlib.sha256(about.encode()).hexdigest()[:10]


def close_together(items: Sequence[Any], least: float) -> Iterator[list[Any]]:
    """Groups of items with a ``start`` and an ``end``: neighbours shorter than ``least`` seconds form one group."""
    group: list[Any] = []
    for item in items:
        narrow = item.end - item.start < least
        if group and (not narrow or item.end - group[0].start > 2 * least or item.start - group[-1].end > least):
            yield group
            group = []
        if narrow:
            group.append(item)
        else:
            yield [item]
    if group:
        yield group


def merged(marks: Sequence[Mark], least: float) -> list[Mark]:
    """The same marks, with neighbours shorter than ``least`` seconds merged into one."""
    return [_as_one(group) for group in close_together(marks, least)]


def _as_one(group: list[Mark]) -> Mark:
    if len(group) == 1:
        return group[0]
    time: Counter[tuple[str, str]] = Counter()
    names: Counter[str] = Counter()
    for mark in group:
        time[mark.fill, mark.colour] += mark.end - mark.start  # type: ignore[assignment]
        names[mark.name] += mark.end - mark.start  # type: ignore[assignment]
    (fill, colour), most = time.most_common(1)[0][0], names.most_common(1)[0][0]
    covered = seconds_text(sum(names.values()))
    title = f"{len(group)} operations, {covered} in all; most of it: {most}"
    return Mark(group[0].start, group[-1].end, fill, (), title, most, colour)


def hatchings(prefix: str, colours: Sequence[str]) -> str:
    """The definitions that ``draw`` refers to."""
    lines = [
        _pattern(f"{prefix}-{i}", "M-2,2L2,-2M0,8L8,0M6,10L10,6", colour, 1.8, colour)
        for i, colour in enumerate(colours)
    ]
    waiting = _pattern(f"{prefix}-w", "M-2,6L2,10M0,0L8,8M6,-2L10,2", "currentColor", 0.7, "none")
    return f"<defs>{''.join(lines)}{waiting}</defs>"


def _pattern(name: str, path: str, stroke: str, width: float, ground: str) -> str:
    rect = f'<rect width="8" height="8" fill="{ground}" fill-opacity="0.22"/>' if ground != "none" else ""
    line = f'<path d="{path}" stroke="{stroke}" stroke-width="{width}" fill="none"/>'
    return f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">{rect}{line}</pattern>'


def draw(mark: Mark, x: float, y: float, width: float, height: float, fill: str) -> str:
    """A mark as a rectangle with its tooltip, if it has one, and, if there is room, its label."""
    shown = max(width - 0.5, 0.6)  # a seam between neighbours of one colour
    title = f"<title>{safe(mark.title)}</title>" if mark.title else ""
    rect = f'<rect x="{x:.1f}" y="{y:g}" width="{shown:.1f}" height="{height:g}" fill="{fill}">{title}</rect>'
    label = next((text for text in mark.labels if len(text) * LETTER + 8 <= width), "")
    if not label:
        return rect
    colour = "currentColor" if mark.colour or mark.fill == "waiting" else text_on(mark.fill)
    return rect + text(label, x + width / 2, y + height / 2 + 4, "middle", fill=colour, passive=True)


def torn(x: float, y: float, height: float) -> str:
    """A mark at the end of a row that continues beyond the picture."""
    path = f"M{x:g},{y:g}l4,{height / 4:g}l-8,{height / 4:g}l8,{height / 4:g}l-4,{height / 4:g}"
    return f'<path d="{path}" stroke="currentColor" stroke-width="1.5" fill="none"/>'


def text(
    content: str,
    x: float,
    y: float,
    anchor: str = "start",
    *,
    size: int = SMALL,
    fill: str = "currentColor",
    weight: str = "",
    passive: bool = False,
    faint: bool = False,
    halo: str = "",
) -> str:
    """A line of text; ``halo`` is the colour that separates it from a pattern."""
    attributes = f' font-weight="{weight}"' if weight else ""
    attributes += ' pointer-events="none"' if passive else ""
    attributes += ' fill-opacity="0.75"' if faint else ""
    attributes += f' stroke="{halo}" stroke-width="3" paint-order="stroke"' if halo else ""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}"{attributes}>{safe(content)}</text>'


def svg(
    width: float,
    height: float,
    title: str,
    description: str,
    inside: str,
    name: str,
    *,
    file: bool = False,
    least: float = 0.75,
) -> str:
    """The picture.

    Args:
        width, height: Size of its inside, in px.
        title, description: For readers who do not see it.
        inside: The drawn elements.
        name: An id that is unique on the page.
        file: Whether it is standalone: then it includes its own colours, for light and for dark.
        least: Fraction of its width below which it is not shrunk.
    """
    about = f'<title id="{name}-t">{safe(title)}</title><desc id="{name}-d">{safe(description)}</desc>'
    dark = "@media(prefers-color-scheme:dark){svg{color:#e6e8eb;background:#111}}"
    colours = f"<style>svg{{color:#1b1f24;background:#fff}}{dark}</style>" if file else ""
    size = f'width="{width:g}" height="{height:g}"' if file else ""
    # Wide enough to be readable; the surrounding element scrolls.
    style = (
        "" if file else f' style="display:block;width:100%;min-width:{least * width:g}px;max-width:{1.25 * width:g}px;"'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="{name}-t {name}-d" '
        f'viewBox="0 0 {width:g} {height:g}" {size} font-family="{FONT}"{style}>{about}{colours}{inside}</svg>'
    )


def text_on(fill: str) -> str:
    """Light or dark, whichever is more readable on a colour."""
    return LIGHT if contrast(fill, LIGHT) >= contrast(fill, DARK) else DARK


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours (WCAG 2.2)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def safe(value: str) -> str:
    """Text for XML: escaped, and without the control characters that XML cannot represent."""
    return escape(printable(value), quote=True)
