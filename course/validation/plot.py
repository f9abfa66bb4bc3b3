"""Predicted over published, a row for each figure: SVG without scripts or addresses, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course.render.svg import AXES, MATMUL, svg, text, unique
from course.validation import rows
from course.validation.gpus import ours
from course.validation.rows import MEMORY, TIME, Figure, figures_of, ratios_of, xla_tables

# The possible meanings of a published “GB”.
GB, GIB = 1e9, 2.0**30

LEFT, WIDTH, RIGHT = 250.0, 330.0, 20.0
HEAD, STEP, MARK = 26.0, 24.0, 5.0
# Styles of the series: they differ in shape as well as in colour, and in being filled or open.
STYLES = (("circle", MATMUL), ("diamond", AXES[0]))


@dataclass(frozen=True)
class Series:
    """The ratios of one analysis.

    Attributes:
        name: Name in the legend.
        ratios: Predicted over published, one for each row; None if nothing was predicted.
        style: Index into ``STYLES``.
        open: Whether only the outline is drawn.
    """

    name: str
    ratios: tuple[float | None, ...]
    style: int = 0
    open: bool = False


def ratio_svg(
    title: str, rows: Sequence[str], series: Sequence[Series], ticks: Sequence[float], goal: float = 0.0
) -> str:
    """A dot plot of ratios on a logarithmic axis.

    Args:
        title: Title of the plot.
        rows: A label for each row.
        series: At most one dot each in every row.
        ticks: Ticks on the axis; the first and the last are its ends.
        goal: A band of this relative width on both sides of 1.
    """
    bottom = HEAD + STEP * len(rows)
    described = " ".join(f"{name}: {_ratios_text(series, i)}." for i, name in enumerate(rows))
    name = unique(f"{title}{described}", "v")
    parts = [_band(ticks, goal, bottom)] if goal else []
    parts += [_tick(tick, ticks, bottom) for tick in ticks]
    for i, row in enumerate(rows):
        y = HEAD + STEP * (i + 0.5)
        parts.append(text(row, LEFT - 14, y + 4, "end"))
        dots = [(s, ratio) for s in series if (ratio := s.ratios[i]) is not None]
        parts += [_dot(s, _x(ratio, ticks), y, f"{row}, {s.name}: {ratio:.3f}") for s, ratio in dots]
    legend, height = _legend(series, bottom + 34)
    return svg(LEFT + WIDTH + RIGHT, height, title, described, "".join(parts) + legend, name)


def _ratios_text(series: Sequence[Series], row: int) -> str:
    ratios = ((s.name, s.ratios[row]) for s in series)
    return ", ".join(f"{name} {'not measured' if ratio is None else f'{ratio:.3f}'}" for name, ratio in ratios)


def _x(ratio: float, ticks: Sequence[float]) -> float:
    return LEFT + WIDTH * math.log(ratio / ticks[0]) / math.log(ticks[-1] / ticks[0])


def _band(ticks: Sequence[float], goal: float, bottom: float) -> str:
    left, right = (_x(1 + side, ticks) for side in (-goal, goal))
    return (
        f'<rect x="{left:.1f}" y="{HEAD:g}" width="{right - left:.1f}" height="{bottom - HEAD:g}" '
        'fill="currentColor" fill-opacity="0.08"/>'
    )


def _tick(tick: float, ticks: Sequence[float], bottom: float) -> str:
    x, strong = _x(tick, ticks), tick == 1
    opacity = 0.75 if strong else 0.18
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{HEAD:g}" y2="{bottom:g}" stroke="currentColor" '
    return f'{line}stroke-opacity="{opacity}"/>' + text(f"{tick:g}", x, bottom + 15, "middle", faint=not strong)


def _dot(series: Series, x: float, y: float, title: str) -> str:
    shape, colour = STYLES[series.style]
    paint = f'fill="{"none" if series.open else colour}" stroke="{colour}" stroke-width="1.6"'
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{MARK:g}" {paint}><title>{title}</title></circle>'
    r = MARK * 1.25
    path = f"M{x:.1f},{y - r:.1f}l{r:g},{r:g}l{-r:g},{r:g}l{-r:g},{-r:g}z"
    return f'<path d="{path}" {paint}><title>{title}</title></path>'


def _legend(series: Sequence[Series], y: float) -> tuple[str, float]:
    parts, x = [], 12.0
    for entry in series:
        width = 22 + len(entry.name) * 6.3 + 14
        if x + width > LEFT + WIDTH + RIGHT and x > 12:
            x, y = 12.0, y + 20
        parts += [_dot(entry, x, y, entry.name), text(entry.name, x + 12, y + 4)]
        x += width
    return "".join(parts), y + 14


def memory_plot(figures: Sequence[Figure]) -> str:
    """Peaks over published ones, GB read as 10^9 bytes (filled) and as 2^30 (open)."""
    series = [
        Series(lens + (", if GiB" if scale < 1 else ""), ratios_of(figures, MEMORY, lens, scale), style, scale < 1)
        for scale in (1.0, GB / GIB)
        for style, lens in enumerate(("liveness", "compiled"))
    ]
    return _run_plot("Peak memory", figures, MEMORY, series, (0.8, 0.9, 1.0, 1.1, 1.2), 0.05)


def time_plot(figures: Sequence[Figure]) -> str:
    """Step times over published ones."""
    series = [Series(lens, ratios_of(figures, TIME, lens), i) for i, lens in enumerate(("timeline", "replay"))]
    return _run_plot("Step time", figures, TIME, series, (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3), 0.1)


def measured_memory_plot(figures: Sequence[Figure]) -> str:
    """Peaks over those measured on our GPUs."""
    groups = [own.memory for _, own in ours()]
    return _measured_plot("Peak memory", figures, groups, ("liveness", "compiled"), (0.8, 0.9, 1.0, 1.1, 1.2), 0.05)


def measured_time_plot(figures: Sequence[Figure]) -> str:
    """Step times over those measured on our GPUs."""
    groups, ticks = [own.time for _, own in ours()], (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)
    return _measured_plot("Step time", figures, groups, ("timeline", rows.OWN_RATES), ticks)


def _measured_plot(
    quantity: str,
    figures: Sequence[Figure],
    groups: Sequence[str],
    lenses: Sequence[str],
    ticks: Sequence[float],
    goal: float = 0.0,
) -> str:
    names = [figure.name for figure in figures_of(figures, groups[0], lenses[0])]
    series = [
        Series(f"{lens}, {group.partition(',')[0]}", ratios_of(figures, group, lens), style, number > 0)
        for number, group in enumerate(groups)
        for style, lens in enumerate(lenses)
    ]
    return ratio_svg(f"{quantity} on our GPUs, predicted over measured", names, series, ticks, goal)


def _run_plot(
    quantity: str, figures: Sequence[Figure], group: str, series: list[Series], ticks: Sequence[float], goal: float
) -> str:
    names = list(dict.fromkeys(figure.name for figure in figures_of(figures, group)))
    return ratio_svg(f"{quantity} on one A5000, predicted over published", names, series, ticks, goal)


def tables_plot(figures: Sequence[Figure]) -> str:
    """The idealised H100 over XLA's tables."""
    ideal = xla_tables(figures, rows.IDEALISED)
    series = [Series("8xH100, idealised", tuple(f.found / f.published for f in ideal.values() if f.found), 0)]
    return ratio_svg(
        "Rates of the idealised 8xH100 over XLA's measured tables", list(ideal), series, (0.8, 1.0, 1.5, 2, 3, 4)
    )


PLOTS: dict[str, Callable[[Sequence[Figure]], str]] = {
    "validation_memory.svg": memory_plot,
    "validation_time.svg": time_plot,
    "validation_measured_memory.svg": measured_memory_plot,
    "validation_measured_time.svg": measured_time_plot,
    "validation_tables.svg": tables_plot,
}
