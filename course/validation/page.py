"""The site's page on validation: its tables and plots, from the recorded rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from course.render.page_parts import write_parts
from course.validation.plot import Series, ratio_svg
from course.validation.rows import Row

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "site" / "pages" / "validation.md"
FIGURES = ROOT / "site" / "figures"
MEASUREMENTS = ROOT / "course" / "measurements"
GB, GIB = 1e9, 2.0**30
MEMORY, TIME, TABLES = "A5000, memory", "A5000, time", "XLA's tables, 8xH100"
LOOPING, RINGS, CLOSED = "looping pipeline", "ring matmul, 8xH100", "closed forms"
# The pipelines that the page lists one by one; the rest stand together in one row.
LISTED = [f"bubble, S=8 M={m} R={r}" for m, r in ((1, 1), (8, 1), (16, 1), (8, 2), (8, 4))]
NOT_MEASURED = "not measured"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    rule = "|" + "---|" * left + "---:|" * (len(columns) - left)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _of(rows: Sequence[Row], group: str) -> list[Row]:
    return [row for row in rows if row.group == group]


def _number(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _error(row: Row) -> str:
    if row.error is None:
        return ""
    return "exact" if abs(row.error) < 5e-5 else f"{100 * row.error:+.1f}\u00a0%"


def closed(rows: Sequence[Row]) -> str:
    """The closed forms: the named ones, and the largest error of all other pipelines."""
    shown, others = [], []
    for row in _of(rows, CLOSED):
        listed = not row.name.startswith("bubble") or row.name in LISTED
        (shown if listed else others).append(row)
    found = [[row.name, row.lens, _number(row.published), _number(row.found), row.unit, _error(row)] for row in shown]
    worst = max(others, key=lambda row: abs(row.error or 0.0), default=None)
    if worst:
        found.insert(len(LISTED), [f"{len(others)} more pipelines, the worst", worst.lens, _number(worst.published),
                                   _number(worst.found), "", _error(worst)])  # fmt: skip
    return _table(("", "lens", "closed form", "lens gives", "unit", "error"), found, 2)


def memory(rows: Sequence[Row]) -> str:
    """Peak memory of the A5000 runs, by both lenses, with errors for both readings of GB."""
    found = []
    for name, pair in _pairs(rows, MEMORY):
        cells = [name, f"{pair[0].published:g}"]
        for row in pair:
            scale = None if row.found is None else row.found * GB
            cells += [NOT_MEASURED if scale is None else f"{scale / GB:.2f}", _error(row),
                      "" if scale is None else f"{100 * (scale / GIB / row.published - 1):+.1f}\u00a0%"]  # fmt: skip
        found.append([*cells, here(pair[0])])
    head = (
        "run",
        "published",
        "liveness, GB",
        "error",
        "if GiB",
        "compiled, GB",
        "error",
        "if GiB",
        "on a GPU of ours",
    )
    return _table(head, found, 1)


def time(rows: Sequence[Row]) -> str:
    """Step times of the A5000 runs, by both lenses."""
    found = []
    for name, pair in _pairs(rows, TIME):
        cells = [name, f"{pair[0].published:g}"]
        for row in pair:
            cells += [NOT_MEASURED if row.found is None else f"{row.found:.3f}", _error(row)]
        found.append([*cells, here(pair[0])])
    return _table(("run", "published, s", "timeline, s", "error", "replay, s", "error", "on a GPU of ours"), found, 1)


def _pairs(rows: Sequence[Row], group: str) -> list[tuple[str, list[Row]]]:
    """The rows of a group by what they are of."""
    found: dict[str, list[Row]] = {}
    for row in _of(rows, group):
        found.setdefault(row.name, []).append(row)
    return list(found.items())


def spread(rows: Sequence[Row]) -> str:
    """What two chosen factors leave open: how far apart the runs' ratios lie."""
    found = []
    for lens in ("timeline", "replay"):
        ratios = [row.found / row.published for row in _of(rows, TIME) if row.lens == lens and row.found is not None]
        if not ratios:
            found.append([lens, *[NOT_MEASURED] * 4])
            continue
        middle = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
        left = sum(abs(ratio / middle - 1) for ratio in ratios) / len(ratios)
        found.append([lens, f"{min(ratios):.2f}", f"{max(ratios):.2f}", f"{middle:.3f}", f"{100 * left:.1f}\u00a0%"])
    head = ("lens", "lowest ratio", "highest", "geometric mean", "mean error, the mean divided out")
    return _table(head, found, 1)


def others(rows: Sequence[Row]) -> str:
    """The looping pipeline and the ring: ratios and counts."""
    found = [
        [row.name, row.lens, _number(row.published), _number(row.found), _error(row), here(row)]
        for row in (*_of(rows, LOOPING), *_of(rows, RINGS))
    ]
    return _table(("", "lens", "published or counted", "lens gives", "error", "on a GPU of ours"), found, 2)


def tables(rows: Sequence[Row]) -> str:
    """XLA's tables beside both H100 machines."""
    found = []
    ideal, calibrated = ([row for row in _of(rows, TABLES) if row.counts is counts] for counts in (True, False))
    for one, other in zip(ideal, calibrated, strict=True):
        cells = [_number(one.published), _number(one.found), _error(one), _number(other.found)]
        found.append([f"{one.name.rsplit(', ', 1)[0]}, {one.unit}", *cells, here(one)])
    head = ("", "XLA's table", "`8xH100`", "error", "`8xH100-calibrated`", "on a GPU of ours")
    return _table(head, found, 1)


def averages(rows: Sequence[Row]) -> str:
    """The mean error of each group by each lens, with the goal."""
    from course.validation.report import means

    found = []
    for mean in means(rows):
        error = NOT_MEASURED if mean.error is None else f"{100 * mean.error:.2f}\u00a0%"
        goal = "" if mean.goal is None else f"{100 * mean.goal:.3g}\u00a0%"
        met = {None: "", True: "met", False: "missed"}[mean.met]
        order = {None: "", True: "kept", False: "not kept"}[mean.order]
        found.append([mean.group, mean.lens, str(mean.rows), error, goal, met, order])
    for lens in ("liveness", "compiled"):
        ratios = [row.found * GB / GIB / row.published for row in _of(rows, MEMORY) if row.lens == lens and row.found]
        error = f"{100 * sum(abs(r - 1) for r in ratios) / len(ratios):.2f}\u00a0%" if ratios else NOT_MEASURED
        found.append([f"{MEMORY}, read as GiB", lens, str(len(ratios)), error, "", "", ""])
    return _table(("group", "lens", "rows", "mean error", "goal", "", "published order"), found, 2)


def here(row: Row) -> str:
    """What a GPU of ours measured for the same figure; the recorded files say, and none has an entry for most."""
    kind = "nvidia-rtx-a5000" if "A5000" in row.group else "nvidia-h100-80gb-hbm3"
    path = MEASUREMENTS / f"{kind}.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else {}
    if row.group in (MEMORY, TIME):
        figure = kept.get(f"step {row.name}", {}).get("bytes" if row.group == MEMORY else "seconds")
        return NOT_MEASURED if figure is None else f"{figure / GB:.2f} GB" if row.group == MEMORY else f"{figure:.3f} s"
    if row.name.startswith("matmul"):
        side = row.name.split()[1].rstrip("³,")
        rate = kept.get(f"matmul bf16 {side}", {}).get("rate")
        return NOT_MEASURED if rate is None else f"{rate / 1e12:.4g} {row.unit}"
    return NOT_MEASURED


def _ratios(rows: Sequence[Row], group: str, lens: str, scale: float = 1.0) -> tuple[float | None, ...]:
    members = [row for row in _of(rows, group) if row.lens == lens]
    return tuple(None if row.found is None else scale * row.found / row.published for row in members)


def memory_plot(rows: Sequence[Row]) -> str:
    """Peaks over published ones, GB read as 10^9 bytes (filled) and as 2^30 (open)."""
    series = [
        Series("liveness", _ratios(rows, MEMORY, "liveness"), 0),
        Series("compiled", _ratios(rows, MEMORY, "compiled"), 1),
        Series("liveness, if GiB", _ratios(rows, MEMORY, "liveness", GB / GIB), 0, True),
        Series("compiled, if GiB", _ratios(rows, MEMORY, "compiled", GB / GIB), 1, True),
    ]
    names = [name for name, _ in _pairs(rows, MEMORY)]
    return ratio_svg("Peak memory on one A5000, predicted over published", names, series,
                     (0.8, 0.9, 1.0, 1.1, 1.2), 0.05)  # fmt: skip


def time_plot(rows: Sequence[Row]) -> str:
    """Step times over published ones."""
    series = [Series(lens, _ratios(rows, TIME, lens), i) for i, lens in enumerate(("timeline", "replay"))]
    names = [name for name, _ in _pairs(rows, TIME)]
    return ratio_svg("Step time on one A5000, predicted over published", names, series,
                     (0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3), 0.1)  # fmt: skip


def tables_plot(rows: Sequence[Row]) -> str:
    """The idealised H100 over XLA's tables."""
    ideal = [row for row in _of(rows, TABLES) if row.counts]
    series = [Series("8xH100, idealised", tuple(row.found / row.published for row in ideal if row.found), 0)]
    names = [row.name.rsplit(", ", 1)[0] for row in ideal]
    return ratio_svg(
        "Rates of the idealised 8xH100 over XLA's measured tables", names, series, (0.8, 1.0, 1.5, 2, 3, 4)
    )


BLOCKS: dict[str, Callable[[Sequence[Row]], str]] = {
    "means": averages,
    "closed forms": closed,
    "memory": memory,
    "time": time,
    "spread": spread,
    "others": others,
    "tables": tables,
}
PLOTS: dict[str, Callable[[Sequence[Row]], str]] = {
    "validation_memory.svg": memory_plot,
    "validation_time.svg": time_plot,
    "validation_tables.svg": tables_plot,
}


def write(rows: Sequence[Row]) -> None:
    """Bring the page's tables and its plots up to date."""
    write_parts(PAGE, {name: make(rows) for name, make in BLOCKS.items()})
    for name, make in PLOTS.items():
        (FIGURES / name).write_text(make(rows) + "\n")
