"""The validation report: every published figure against the lenses, with the error of each row and the mean of each
group. ``python -m course.validation`` prints it; exit status 1 if a mean is above its goal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from course.validation import page
from course.validation.gap import Gap, gaps
from course.validation.rows import Row, every

RESULTS = Path(__file__).parent / "results.json"
EXACT = 1e-9  # what floating-point sums lose
# The mean error of a group by one lens that the course promises.
GOALS = {
    ("closed forms", "timeline"): 5e-5,
    ("closed forms", "costs"): 5e-5,
    ("closed forms", "memory"): 5e-5,
    ("A5000, memory", "liveness"): 0.10,
    ("A5000, memory", "compiled"): 0.05,
    ("A5000, time", "timeline"): 0.20,
    ("A5000, time", "replay"): 0.12,
    ("looping pipeline", "timeline"): 0.03,
    ("ring matmul, 8xH100", "compiled"): 0.01,
}


IDEALISED = (
    "8xH100 is idealised: it has published peaks alone, which no program reaches, so it is meant to miss what XLA "
    "measured, most of all where pieces are small; 8xH100-calibrated carries these tables."
)


@dataclass(frozen=True)
class Mean:
    """The mean error of a group's rows by one lens.

    Attributes:
        group, lens: Of the rows.
        error: Mean of the absolute relative errors; None where nothing was measured.
        goal: What it must not exceed; None where nothing is promised.
        rows: How many rows it is the mean of.
        order: Whether the rows come in the published order; None for fewer than three, or of several units.
    """

    group: str
    lens: str
    error: float | None
    goal: float | None
    rows: int
    order: bool | None

    @property
    def met(self) -> bool | None:
        return None if self.error is None or self.goal is None else self.error <= self.goal


def means(rows: Iterable[Row]) -> list[Mean]:
    """One for each group and lens, of the rows that count and were measured."""
    sorted_rows: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        sorted_rows.setdefault((row.group, row.lens), []).append(row)
    found = []
    for (group, lens), members in sorted_rows.items():
        counted = [row for row in members if row.counts and row.error is not None]
        error = sum(abs(row.error or 0.0) for row in counted) / len(counted) if counted else None
        found.append(Mean(group, lens, error, GOALS.get((group, lens)), len(counted), _in_order(counted)))
    return found


def _in_order(rows: list[Row]) -> bool | None:
    if len(rows) < 3 or rows[0].group == "closed forms" or len({row.unit for row in rows}) > 1:
        return None
    by = [sorted(range(len(rows)), key=lambda i: getattr(rows[i], which) or 0.0) for which in ("published", "found")]
    return by[0] == by[1]


def results(rows: list[Row]) -> dict[str, Any]:
    """What is kept: the rows and what they were computed with."""
    return {"versions": versions(), "rows": [row.to_json() for row in rows]}


def versions() -> dict[str, str]:
    """What rows depend on."""
    return {name: version(name) for name in ("jax", "jaxlib")}


@dataclass(frozen=True)
class Recorded:
    """What ``--write`` kept: the versions, the rows, and where timeline and replay differ."""

    versions: dict[str, str]
    rows: list[Row]
    gaps: list[Gap]


def recorded() -> Recorded:
    """The last result that was kept.

    Raises:
        FileNotFoundError: None was.
    """
    data = json.loads(RESULTS.read_text())
    return Recorded(
        data["versions"], [Row(**row) for row in data["rows"]], [Gap.from_json(gap) for gap in data["gaps"]]
    )


def write(rows: list[Row]) -> None:
    """Keep the result and bring the site's page up to date."""
    kept = {**results(rows), "gaps": [gap.to_json() for gap in gaps()]}
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    page.write(rows)


def show(rows: list[Row]) -> None:
    """Print rows and means."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for group in dict.fromkeys(row.group for row in rows):
        table = Table(title=group, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column in ("", "lens", "published", "lens gives", "error"):
            table.add_column(column, justify="left" if column in ("", "lens") else "right", overflow="fold")
        for row in rows:
            if row.group == group:
                table.add_row(row.name, row.lens, *shown(row))
        console.print(table)
        for note in dict.fromkeys(row.note for row in rows if row.group == group and not row.counts):
            console.print(f"* in no mean: {note}", style="dim")
        if group == page.TABLES:
            console.print(IDEALISED, style="dim")
        for mean in means([row for row in rows if row.group == group]):
            console.print(f"  {mean.lens}: {said(mean)}", style="bold" if mean.met is not False else "bold red")
        console.print()


def shown(row: Row) -> tuple[str, str, str]:
    """Published and found with their unit, and the error."""
    unit = f" {row.unit}" if row.unit not in ("", "ratio") else ""
    found = "not measured" if row.found is None else f"{_number(row.found)}{unit}"
    error = "" if row.error is None else _error(row.error)
    return f"{_number(row.published)}{unit}", found, error if row.counts else f"{error} *"


def _number(value: float) -> str:
    """Four digits, and every digit of a large number: never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _error(error: float) -> str:
    """With its sign where it reads as something else than zero."""
    if abs(error) < EXACT:
        return "exact"
    return f"{error:+.1%}" if abs(error) >= 5e-4 else "< 0.1%"


def said(mean: Mean) -> str:
    """A mean in words."""
    if mean.error is None:
        return "not measured" if mean.rows == 0 and mean.goal is not None else "nothing here counts"
    order = {None: "", True: ", rows in the published order", False: ", rows not in the published order"}[mean.order]
    goal = "" if mean.goal is None else f" (goal: at most {100 * mean.goal:.3g}%)"
    rows = f"{mean.rows} row" + "s" * (mean.rows != 1)
    return f"mean error {mean.error:.2%} over {rows}{goal}{order}"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make validate", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few rows of each group")
    parser.add_argument("--no-aot", action="store_true", help="leave the GPU compiler out")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--write", action="store_true", help="keep the result and bring the site's page up to date")
    options = parser.parse_args(arguments)
    if options.write and (options.short or options.no_aot):
        parser.error("--write keeps every row: leave --short and --no-aot out")
    rows = []
    for row in every(options.short, not options.no_aot):
        rows.append(row)
        if sys.stderr.isatty():
            print(f"\r\x1b[K{len(rows)} rows: {row.group}, {row.name}", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if options.write:
        missing = next((row for row in rows if row.found is None), None)
        if missing:
            parser.error(f"--write keeps every row, and {missing.name} by {missing.lens} is missing: {missing.note}")
        write(rows)
    if options.json:
        print(json.dumps(results(rows), ensure_ascii=False))
    else:
        show(rows)
    return 1 if any(mean.met is False for mean in means(rows)) else 0
