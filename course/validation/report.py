"""The validation report: every published figure against the lenses, with the error of each row and the mean of each
group. ``python -m course.validation`` prints it; exit status 1 if a mean is above its goal.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from course.validation import page
from course.validation.gap import Gap, gaps
from course.validation.means import Mean, means
from course.validation.rows import TABLES, Figure, every

RESULTS = Path(__file__).parent / "results.json"
EXACT = 1e-9  # what floating-point sums lose
EXPLAINED = (
    "8xH100 is idealised: it has published peaks alone, which no program reaches, so it is meant to miss what XLA "
    "measured, most of all where pieces are small; 8xH100-calibrated carries these tables."
)


def versions() -> dict[str, str]:
    """The versions that figures depend on."""
    return {name: version(name) for name in ("jax", "jaxlib")}


class Recorded(msgspec.Struct, frozen=True):
    """The result that ``--write`` kept: the versions, the figures, and where timeline and replay differ."""

    versions: dict[str, str]
    rows: list[Figure]
    gaps: list[Gap]


def recorded() -> Recorded:
    """The last result that was kept.

    Raises:
        FileNotFoundError: None was.
    """
    return msgspec.json.decode(RESULTS.read_bytes(), type=Recorded)


def write(rows: list[Figure]) -> None:
    """Keep the result and bring the site's page up to date."""
    keep(Recorded(versions(), rows, gaps()))


def keep(found: Recorded) -> None:
    """Keep a result as it is, and write the page from it."""
    RESULTS.write_text(json.dumps(msgspec.to_builtins(found), indent=1, ensure_ascii=False) + "\n")
    page.write(found.rows)


def show(rows: list[Figure]) -> None:
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
        if group == TABLES:
            console.print(EXPLAINED, style="dim")
        for mean in means([row for row in rows if row.group == group]):
            console.print(f"  {mean.lens}: {said(mean)}", style="bold" if mean.met is not False else "bold red")
        console.print()


def shown(row: Figure) -> tuple[str, str, str]:
    """Published and found with their unit, and the error."""
    unit = f" {row.unit}" if row.unit not in ("", "ratio") else ""
    found = page.number(row.found) + (unit if row.found is not None else "")
    error = "" if row.error is None else _error(row.error)
    return f"{page.number(row.published)}{unit}", found, error if row.counts else f"{error} *"


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
        print(json.dumps({"versions": versions(), "rows": msgspec.to_builtins(rows)}, ensure_ascii=False))
    else:
        show(rows)
    return 1 if any(mean.met is False for mean in means(rows)) else 0
