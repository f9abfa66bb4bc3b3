"""The site's page on validation: its tables and plots, from the recorded figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, pstdev

from course.planning.efficiency import factors
from course.render.page_parts import write_parts
from course.validation import rows
from course.validation.means import means
from course.validation.plot import Series, ratio_svg
from course.validation.rows import (
    CLOSED,
    LOOPING,
    MEMORY,
    PLANNED_MEMORY,
    PLANNED_TIME,
    RINGS,
    TABLES,
    TIME,
    Figure,
    bubble_name,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "site" / "pages" / "validation.md"
FIGURES = ROOT / "site" / "figures"
MEASUREMENTS = ROOT / "course" / "measurements"
GB, GIB = 1e9, 2.0**30
# The pipelines that the page lists individually; the rest share one row.
LISTED = [bubble_name(8, m, r) for m, r in ((1, 1), (8, 1), (16, 1), (8, 2), (8, 4))]
SUMMED = {bubble_name(*size) for size in rows.BUBBLES} - {*LISTED}
NOT_MEASURED = "not measured"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    rule = "|" + "---|" * left + "---:|" * (len(columns) - left)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _of(figures: Sequence[Figure], group: str, lens: str = "") -> list[Figure]:
    return [figure for figure in figures if figure.group == group and lens in ("", figure.lens)]


def number(value: float | None) -> str:
    """Four digits, and every digit of a large number: never an exponent."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _percent(share: float | None, form: str = "+.1f") -> str:
    return "" if share is None else f"{100 * share:{form}}%"


def _error(figure: Figure) -> str:
    return "exact" if figure.error is not None and abs(figure.error) < 5e-5 else _percent(figure.error)


def closed(figures: Sequence[Figure]) -> str:
    """The closed forms: the named ones, and the largest error of all other pipelines."""
    every = _of(figures, CLOSED)
    found = [
        [f.name, f.lens, number(f.published), number(f.found), f.unit, _error(f)] for f in every if f.name not in SUMMED
    ]
    summed = [f for f in every if f.name in SUMMED]
    if summed:
        worst = max(summed, key=lambda f: abs(f.error or 0.0))
        cells = [worst.lens, number(worst.published), number(worst.found), "", _error(worst)]
        found.insert(len(LISTED), [f"{len(summed)} more pipelines, the worst", *cells])
    return _table(("", "lens", "closed form", "lens gives", "unit", "error"), found, 2)


def memory(figures: Sequence[Figure]) -> str:
    """Peak memory of the A5000 runs, by both analyses, with errors for both readings of GB."""
    lenses = [column for lens in ("liveness", "compiled") for column in (f"{lens}, GB", "error", "if GiB")]
    head = ("run", "published", *lenses, "on a GPU of ours")
    return _runs(
        figures,
        MEMORY,
        head,
        lambda f, found: [f"{found:.2f}", _error(f), _percent(found * GB / GIB / f.published - 1)],
    )


def time(figures: Sequence[Figure]) -> str:
    """Step times of the A5000 runs, by both analyses."""
    head = ("run", "published, s", "timeline, s", "error", "replay, s", "error", "on a GPU of ours")
    return _runs(figures, TIME, head, lambda f, found: [f"{found:.3f}", _error(f)])


def _runs(
    figures: Sequence[Figure], group: str, head: Sequence[str], cells: Callable[[Figure, float], list[str]]
) -> str:
    """A row for each run: its name, the published value, the value of each analysis, and a measurement on our GPU."""
    table: dict[str, list[str]] = {}
    for figure in _of(figures, group):
        row = table.setdefault(figure.name, [figure.name, f"{figure.published:g}", here(figure)])
        missing = [NOT_MEASURED, *[""] * ((len(head) - 3) // 2 - 1)]
        row[-1:-1] = missing if figure.found is None else cells(figure, figure.found)
    return _table(head, table.values(), 1)


def spread(figures: Sequence[Figure]) -> str:
    """The spread that remains after two fitted factors: the distance between the runs' ratios."""
    found = []
    for lens in ("timeline", "replay"):
        ratios = [ratio for ratio in _ratios(figures, TIME, lens) if ratio is not None]
        if not ratios:
            found.append([lens, *[NOT_MEASURED] * 4])
            continue
        middle = math.exp(sum(map(math.log, ratios)) / len(ratios))
        left = sum(abs(ratio / middle - 1) for ratio in ratios) / len(ratios)
        found.append([lens, f"{min(ratios):.2f}", f"{max(ratios):.2f}", f"{middle:.3f}", _percent(left, ".1f")])
    return _table(("lens", "lowest ratio", "highest", "geometric mean", "mean error, the mean divided out"), found, 1)


def others(figures: Sequence[Figure]) -> str:
    """The looping pipeline and the ring: ratios and counts."""
    found = [
        [f.name, f.lens, number(f.published), number(f.found), _error(f), here(f)]
        for f in (*_of(figures, LOOPING), *_of(figures, RINGS))
    ]
    return _table(("", "lens", "published or counted", "lens gives", "error", "on a GPU of ours"), found, 2)


def planner(figures: Sequence[Figure]) -> str:
    """Published runs by the planner: step time at the chip's factor and at the other papers', and memory."""
    kinds = (PLANNED_TIME, "planner"), (PLANNED_TIME, "unseen"), (PLANNED_MEMORY, "planner")
    seconds, unseen, sizes = ({f.name: f for f in _of(figures, *kind)} for kind in kinds)
    found = []
    for name, f in seconds.items():
        held = sizes.get(name)
        cells = [number(held.published), number(held.found), _error(held)] if held else ["", "", ""]
        other = _error(unseen[name]) if name in unseen else ""
        found.append([name, number(f.published), number(f.found), _error(f), other, *cells])
    head = ("run", "published, s", "planner, s", "error", "unseen", "published, GB", "planner, GB", "error")
    return _table(head, found, 1)


def chips(_: Sequence[Figure]) -> str:
    """The planner's factors."""
    found = []
    for chip, f in factors().items():
        spread = f"{f.lowest:.2f} to {f.highest:.2f}"
        errors = [_percent(share, ".1f") for share in (f.error, f.unseen)]
        found.append([chip, "; ".join(f.papers), f"{f.factor:.3f}", spread, str(f.runs), *errors])
    return _table(("chip", "fitted on", "factor", "single runs", "runs", "mean error", "unseen"), found, 2)


def _xla_tables(figures: Sequence[Figure], machine: str) -> dict[str, Figure]:
    """The figures of XLA's tables on a machine, by name."""
    by_name = {figure.name: figure for figure in _of(figures, TABLES)}
    names = [*map(rows.matmul_name, rows.MATMULS), *map(rows.gather_name, rows.GATHERS)]
    return {name: by_name[f"{name}, {machine}"] for name in names}


def tables(figures: Sequence[Figure]) -> str:
    """XLA's tables compared with both H100 machines."""
    calibrated = _xla_tables(figures, rows.CALIBRATED)
    found = [
        [f"{name}, {f.unit}", number(f.published), number(f.found), _error(f), number(calibrated[name].found), here(f)]
        for name, f in _xla_tables(figures, rows.IDEALISED).items()
    ]
    return _table(("", "XLA's table", "`8xH100`", "error", "`8xH100-calibrated`", "on a GPU of ours"), found, 1)


def averages(figures: Sequence[Figure]) -> str:
    """The mean error of each group by each analysis, its bias and spread, and the goal."""
    found = []
    for mean in means(figures):
        error = _percent(mean.error, ".2f") or NOT_MEASURED
        met = {None: "", True: "met", False: "missed"}[mean.met]
        order = {None: "", True: "kept", False: "not kept"}[mean.order]
        apart = [_percent(mean.bias), _percent(mean.spread, ".1f")] if mean.rows > 1 else ["", ""]
        found.append([mean.group, mean.lens, str(mean.rows), error, *apart, _percent(mean.goal, ".3g"), met, order])
    for lens in ("liveness", "compiled"):
        errors = [ratio - 1 for ratio in _ratios(figures, MEMORY, lens, GB / GIB) if ratio is not None]
        error = _percent(fmean(map(abs, errors)), ".2f") if errors else NOT_MEASURED
        apart = [_percent(fmean(errors)), _percent(pstdev(errors), ".1f")] if errors else ["", ""]
        found.append([f"{MEMORY}, read as GiB", lens, str(len(errors)), error, *apart, "", "", ""])
    return _table(("group", "lens", "rows", "mean error", "bias", "spread", "goal", "", "published order"), found, 2)


_MATMULS_HERE = {f"{rows.matmul_name(side)}, {rows.IDEALISED}": f"matmul bf16 {side}" for side in rows.MATMULS}


def here(figure: Figure) -> str:
    """The same figure as measured on our GPU, from the recorded files; most figures have no entry there."""
    on_a5000 = figure.group in (MEMORY, TIME)
    path = MEASUREMENTS / f"{'nvidia-rtx-a5000' if on_a5000 else 'nvidia-h100-80gb-hbm3'}.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else {}
    row = kept.get(f"step {figure.name}" if on_a5000 else _MATMULS_HERE.get(figure.name), {})
    key, scale, form = {MEMORY: ("bytes", GB, ".2f"), TIME: ("seconds", 1.0, ".3f")}.get(
        figure.group, ("rate", 1e12, ".4g")
    )
    return NOT_MEASURED if row.get(key) is None else f"{row[key] / scale:{form}} {figure.unit}"


def _ratios(figures: Sequence[Figure], group: str, lens: str, scale: float = 1.0) -> tuple[float | None, ...]:
    return tuple(f.found and scale * f.found / f.published for f in _of(figures, group, lens))


def memory_plot(figures: Sequence[Figure]) -> str:
    """Peaks over published ones, GB read as 10^9 bytes (filled) and as 2^30 (open)."""
    series = [
        Series(lens + (", if GiB" if scale < 1 else ""), _ratios(figures, MEMORY, lens, scale), style, scale < 1)
        for scale in (1.0, GB / GIB)
        for style, lens in enumerate(("liveness", "compiled"))
    ]
    return _run_plot("Peak memory", figures, MEMORY, series, (0.8, 0.9, 1.0, 1.1, 1.2), 0.05)


def time_plot(figures: Sequence[Figure]) -> str:
    """Step times over published ones."""
    series = [Series(lens, _ratios(figures, TIME, lens), i) for i, lens in enumerate(("timeline", "replay"))]
    return _run_plot("Step time", figures, TIME, series, (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3), 0.1)


def _run_plot(
    what: str, figures: Sequence[Figure], group: str, series: list[Series], ticks: Sequence[float], goal: float
) -> str:
    names = list(dict.fromkeys(figure.name for figure in _of(figures, group)))
    return ratio_svg(f"{what} on one A5000, predicted over published", names, series, ticks, goal)


def tables_plot(figures: Sequence[Figure]) -> str:
    """The idealised H100 over XLA's tables."""
    ideal = _xla_tables(figures, rows.IDEALISED)
    series = [Series("8xH100, idealised", tuple(f.found / f.published for f in ideal.values() if f.found), 0)]
    return ratio_svg(
        "Rates of the idealised 8xH100 over XLA's measured tables", list(ideal), series, (0.8, 1.0, 1.5, 2, 3, 4)
    )


BLOCKS: dict[str, Callable[[Sequence[Figure]], str]] = {
    "means": averages,
    "closed forms": closed,
    "memory": memory,
    "time": time,
    "spread": spread,
    "others": others,
    "tables": tables,
    "planner": planner,
    "chips": chips,
}
PLOTS: dict[str, Callable[[Sequence[Figure]], str]] = {
    "validation_memory.svg": memory_plot,
    "validation_time.svg": time_plot,
    "validation_tables.svg": tables_plot,
}


def write(figures: Sequence[Figure]) -> None:
    """Bring the page's tables and its plots up to date."""
    write_parts(PAGE, {name: make(figures) for name, make in BLOCKS.items()})
    for name, make in PLOTS.items():
        (FIGURES / name).write_text(make(figures) + "\n")
