"""The site's page on validation: its tables and plots, from the recorded figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, pstdev

from course.measured.card import file_name
from course.measured.rows import FOLDER, recorded_rows
from course.measured.validate import kernel_name
from course.planning.efficiency import factors
from course.render.page_parts import write_parts
from course.validation import plot, rows
from course.validation.gpus import H100, ours
from course.validation.means import means
from course.validation.plot import GB, GIB
from course.validation.rows import (
    CLOSED,
    LOOPING,
    MEMORY,
    PLANNED_MEMORY,
    PLANNED_TIME,
    RINGS,
    TIME,
    Figure,
    bubble_name,
    figures_of,
    ratios_of,
    xla_tables,
)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "site" / "pages" / "validation.md"
FIGURES = ROOT / "site" / "figures"
# The pipelines that the page lists individually; the rest share one row.
LISTED = [bubble_name(8, m, r) for m, r in ((1, 1), (8, 1), (16, 1), (8, 2), (8, 4))]
SUMMED = {bubble_name(*size) for size in rows.BUBBLES} - {*LISTED}
NOT_MEASURED = "not measured"
_DIGITS = {"GB": ".2f", "s": ".3f"}


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    rule = "|" + "---|" * left + "---:|" * (len(columns) - left)
    return "\n".join([f"| {' | '.join(columns)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


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
    all_figures = figures_of(figures, CLOSED)
    table_rows = [
        [f.name, f.lens, number(f.published), number(f.found), f.unit, _error(f)]
        for f in all_figures
        if f.name not in SUMMED
    ]
    summed = [f for f in all_figures if f.name in SUMMED]
    if summed:
        worst = max(summed, key=lambda f: abs(f.error or 0.0))
        cells = [worst.lens, number(worst.published), number(worst.found), "", _error(worst)]
        table_rows.insert(len(LISTED), [f"{len(summed)} more pipelines, the worst", *cells])
    return _table(("", "lens", "closed form", "lens gives", "unit", "error"), table_rows, 2)


def memory(figures: Sequence[Figure]) -> str:
    """Peak memory of the A5000 runs, by both analyses, with errors for both readings of GB."""
    lenses = [column for lens in ("liveness", "compiled") for column in (f"{lens}, GB", "error", "if GiB")]
    return _runs(
        figures,
        [MEMORY],
        ("published", *lenses),
        lambda f, value: [f"{value:.2f}", _error(f), _percent(value * GB / GIB / f.published - 1)],
    )


def time(figures: Sequence[Figure]) -> str:
    """Step times of the A5000 runs, by both analyses."""
    head = ("published, s", "timeline, s", "error", "replay, s", "error")
    return _runs(figures, [TIME], head, lambda f, value: [f"{value:.3f}", _error(f)])


def measured(figures: Sequence[Figure]) -> str:
    """Memory and time of the same runs on our GPUs, a table for each kind: errors in memory, and ratios of times."""
    head = ("measured, GB", "liveness", "compiled", "measured, s", "timeline", "replay", "timeline, own rates")

    def cells(figure: Figure, value: float) -> list[str]:
        return [_error(figure) if figure.unit == "GB" else f"{value / figure.published:.2f}"]

    origin = "<!-- origin: measured; predicted, idealised; predicted, calibrated; compiled -->"
    return "\n\n".join(
        f"**{kind}**, {_installed(kind)}:\n\n{origin}\n\n"
        + _runs(figures, [own.memory, own.time], head, cells, digits=True)
        for kind, own in ours()
    )


def _installed(kind: str) -> str:
    card = json.loads((FOLDER / file_name(kind)).read_text())["cards"][0]
    return f"driver {card['driver']['driver_version']}, jax {card['versions']['jax']}, {card['date']}"


def _runs(
    figures: Sequence[Figure],
    groups: Sequence[str],
    head: Sequence[str],
    cells: Callable[[Figure, float], list[str]],
    *,
    digits: bool = False,
) -> str:
    """A row for each run: its name, and for each group the published value and those of the analyses.

    ``digits`` rounds the published values, which otherwise have as many digits as in their source.
    """
    table: dict[str, list[str]] = {}
    for group in groups:
        for figure in figures_of(figures, group):
            row = table.setdefault(figure.name, [figure.name])
            if figure.lens in ("liveness", "timeline"):
                row.append(f"{figure.published:{_DIGITS[figure.unit] if digits else 'g'}}")
            missing = [NOT_MEASURED, *[""] * (len(cells(figure, figure.published)) - 1)]
            row += missing if figure.found is None else cells(figure, figure.found)
    return _table(("run", *head), table.values(), 1)


def spread(figures: Sequence[Figure]) -> str:
    """The spread that remains after two fitted factors: the distance between the runs' ratios."""
    return _spread(figures, [TIME])


def measured_spread(figures: Sequence[Figure]) -> str:
    """The same on our GPUs, on idealised machines and at the cards' own rates."""
    return _spread(figures, [own.time for _, own in ours()])


def _spread(figures: Sequence[Figure], groups: Sequence[str]) -> str:
    table_rows = []
    for group in groups:
        for lens in ("timeline", "replay", *((rows.OWN_RATES,) if group != TIME else ())):
            ratios = [ratio for ratio in ratios_of(figures, group, lens) if ratio is not None]
            if not ratios:
                table_rows.append([group, lens, *[NOT_MEASURED] * 4])
                continue
            middle = math.exp(fmean(map(math.log, ratios)))
            mean_error = fmean(abs(ratio / middle - 1) for ratio in ratios)
            ends = [f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))]
            table_rows.append([group, lens, *ends, f"{middle:.3f}", _percent(mean_error, ".1f")])
    head = ("", "lens", "lowest ratio", "highest", "geometric mean", "mean error, the mean divided out")
    return _table(head, table_rows, 2)


def others(figures: Sequence[Figure]) -> str:
    """The looping pipeline and the ring: ratios and counts."""
    table_rows = [
        [f.name, f.lens, number(f.published), number(f.found), _error(f)]
        for f in (*figures_of(figures, LOOPING), *figures_of(figures, RINGS))
    ]
    return _table(("", "lens", "published or counted", "lens gives", "error"), table_rows, 2)


def planner(figures: Sequence[Figure]) -> str:
    """The planner on published runs: step time at the chip's factor and at the other papers', and memory."""
    kinds = (PLANNED_TIME, "planner"), (PLANNED_TIME, "unseen"), (PLANNED_MEMORY, "planner")
    seconds, unseen, sizes = ({f.name: f for f in figures_of(figures, *kind)} for kind in kinds)
    table_rows = []
    for name, f in seconds.items():
        size = sizes.get(name)
        cells = [number(size.published), number(size.found), _error(size)] if size else ["", "", ""]
        other = _error(unseen[name]) if name in unseen else ""
        table_rows.append([name, number(f.published), number(f.found), _error(f), other, *cells])
    head = ("run", "published, s", "planner, s", "error", "unseen", "published, GB", "planner, GB", "error")
    return _table(head, table_rows, 1)


def chips(_: Sequence[Figure]) -> str:
    """The planner's factors."""
    table_rows = []
    for chip, f in factors().items():
        spread = f"{f.lowest:.2f} to {f.highest:.2f}"
        errors = [_percent(share, ".1f") for share in (f.error, f.unseen)]
        table_rows.append([chip, "; ".join(f.papers), f"{f.factor:.3f}", spread, str(f.runs), *errors])
    return _table(("chip", "fitted on", "factor", "single runs", "runs", "mean error", "unseen"), table_rows, 2)


def tables(figures: Sequence[Figure]) -> str:
    """XLA's tables compared with both H100 machines."""
    calibrated = xla_tables(figures, rows.CALIBRATED)
    table_rows = [
        [
            f"{name}, {f.unit}",
            number(f.published),
            number(f.found),
            _error(f),
            number(calibrated[name].found),
            _on_our_h100(name),
        ]
        for name, f in xla_tables(figures, rows.IDEALISED).items()
    ]
    return _table(("", "XLA's table", "`8xH100`", "error", "`8xH100-calibrated`", "on our H100"), table_rows, 1)


def averages(figures: Sequence[Figure]) -> str:
    """The mean error of each group by each analysis, its bias and spread, and the goal."""
    table_rows = []
    for mean in means(figures):
        error = _percent(mean.error, ".2f") or NOT_MEASURED
        met = {None: "", True: "met", False: "missed"}[mean.met]
        order = {None: "", True: "kept", False: "not kept"}[mean.order]
        bias_and_spread = [_percent(mean.bias), _percent(mean.spread, ".1f")] if mean.rows > 1 else ["", ""]
        table_rows.append(
            [mean.group, mean.lens, str(mean.rows), error, *bias_and_spread, _percent(mean.goal, ".3g"), met, order]
        )
    for lens in ("liveness", "compiled"):
        errors = [ratio - 1 for ratio in ratios_of(figures, MEMORY, lens, GB / GIB) if ratio is not None]
        error = _percent(fmean(map(abs, errors)), ".2f") if errors else NOT_MEASURED
        bias_and_spread = [_percent(fmean(errors)), _percent(pstdev(errors), ".1f")] if errors else ["", ""]
        table_rows.append([f"{MEMORY}, read as GiB", lens, str(len(errors)), error, *bias_and_spread, "", "", ""])
    return _table(("group", "lens", "rows", "mean error", "bias", "spread", "goal", "", "order"), table_rows, 2)


_OUR_MATMULS = {rows.matmul_name(side): kernel_name("matmul", "bf16", side) for side in rows.MATMULS}


def _on_our_h100(name: str) -> str:
    """The rate of a matmul of XLA's tables on our H100; there is none for collectives."""
    row = recorded_rows(H100).get(_OUR_MATMULS.get(name, ""), {})
    return f"{row['rate'] / 1e12:.4g}" if row.get("rate") else NOT_MEASURED


BLOCKS: dict[str, Callable[[Sequence[Figure]], str]] = {
    "means": averages,
    "closed forms": closed,
    "memory": memory,
    "time": time,
    "measured": measured,
    "measured spread": measured_spread,
    "spread": spread,
    "others": others,
    "tables": tables,
    "planner": planner,
    "chips": chips,
}


def write(figures: Sequence[Figure]) -> None:
    """Bring the page's tables and its plots up to date."""
    write_parts(PAGE, {name: make(figures) for name, make in BLOCKS.items()})
    for name, make in plot.PLOTS.items():
        (FIGURES / name).write_text(make(figures) + "\n")
