"""The validation report: every published figure compared with the analyses, with the error of each row and the mean of
each group. ``python -m course.validation`` prints it; exit status 1 if a mean is above its goal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import msgspec

from course.validation import page
from course.validation.gap import Gap, gaps
from course.validation.means import Mean, means
from course.validation.rows import TABLES, Figure, every

RESULTS = Path(__file__).parent / "results.json"
EXACT = 1e-9  # rounding error of floating-point sums
EXPLAINED = (
    "8xH100 is idealised: it uses only published peaks, which no program reaches, so it is expected to miss "
    "XLA's measurements, most of all where pieces are small; 8xH100-calibrated has the measured tables."
)


def versions() -> dict[str, str]:
    """The versions that figures depend on."""
    return {name: version(name) for name in ("jax", "jaxlib")}


class Recorded(msgspec.Struct, frozen=True):
    """The result saved by ``--write``: the versions, the figures, and the differences between timeline and replay."""

    versions: dict[str, str]
    rows: list[Figure]
    gaps: list[Gap]


def recorded() -> Recorded:
    """The last recorded result.

    Raises:
        FileNotFoundError: There is none.
    """
    return msgspec.json.decode(RESULTS.read_bytes(), type=Recorded)


def write(rows: list[Figure]) -> None:
    """Record the result and update the site's page."""
    keep(Recorded(versions(), rows, gaps()))


def keep(result: Recorded) -> None:
    """Record a result unchanged, and write the page from it."""
    RESULTS.write_text(json.dumps(msgspec.to_builtins(result), indent=1, ensure_ascii=False) + "\n")
    page.write(result.rows)


def show(rows: Iterable[Figure]) -> list[Figure]:
    """Print each row when it is ready, with the reason if there is no figure, and the means at the end."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    printed = []
    for row in rows:
        printed.append(row)
        published, value, error = shown(row)
        console.print(f"{row.group:<26}  {row.name:<42}  {row.lens:<8}  {published:>12}  {value:>12}  {error:>7}")
        if row.found is None:
            console.print(f"  {row.note}", style="dim", markup=False)
    console.print("\nMeans, of the rows that count (bias: with signs; spread: standard deviation):", style="bold")
    for mean in means(printed):
        style = "red" if mean.met is False else None
        console.print(f"{mean.group}, {mean.lens}: {mean_text(mean)}", style=style)
    for note in dict.fromkeys(f"{row.group}: {row.note}" for row in printed if not row.counts):
        console.print(f"* in no mean: {note}", style="dim")
    if any(row.group == TABLES for row in printed):
        console.print(EXPLAINED, style="dim")
    return printed


def shown(row: Figure) -> tuple[str, str, str]:
    """Published and found with their unit, and the error."""
    unit = f" {row.unit}" if row.unit not in ("", "ratio") else ""
    value = page.number(row.found) + (unit if row.found is not None else "")
    error = "" if row.error is None else _error(row.error)
    return f"{page.number(row.published)}{unit}", value, error if row.counts else f"{error} *"


def _error(error: float) -> str:
    """The error, with its sign unless it rounds to zero."""
    if abs(error) < EXACT:
        return "exact"
    return f"{error:+.1%}" if abs(error) >= 5e-4 else "< 0.1%"


def mean_text(mean: Mean) -> str:
    """A mean in words."""
    if mean.error is None:
        return "not measured" if mean.rows == 0 and mean.goal is not None else "nothing here counts"
    order = {None: "", True: ", rows in the published order", False: ", rows not in the published order"}[mean.order]
    goal = "" if mean.goal is None else f" (goal: at most {100 * mean.goal:.3g}%)"
    rows = f"{mean.rows} row" + "s" * (mean.rows != 1)
    bias_and_spread = (
        f", bias {mean.bias:+.2%}, spread {mean.spread:.2%}" if mean.rows > 1 and mean.error > EXACT else ""
    )
    return f"mean error {mean.error:.2%} over {rows}{goal}{bias_and_spread}{order}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="make validate", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few rows of each group")
    parser.add_argument("--no-aot", action="store_true", help="leave the GPU compiler out")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--write", action="store_true", help="keep the result and bring the site's page up to date")
    options = parser.parse_args(arguments)
    if options.write and (options.short or options.no_aot):
        parser.error("--write keeps every row: leave --short and --no-aot out")
    figures = every(options.short, not options.no_aot)
    rows = list(figures) if options.json else show(figures)
    if options.json:
        print(json.dumps({"versions": versions(), "rows": msgspec.to_builtins(rows)}, ensure_ascii=False))
    if options.write:
        missing = next((row for row in rows if row.found is None), None)
        if missing:
            parser.error(f"--write keeps every row, and {missing.name} by {missing.lens} is missing: {missing.note}")
        write(rows)
    return 1 if any(mean.met is False for mean in means(rows)) else 0
