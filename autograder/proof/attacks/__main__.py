"""``python -m autograder.proof.attacks``: every attack through the real pipeline, as a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from autograder.commands.terminal import bar, complain, explained, out, print_json
from autograder.grading.nbgrader.keys import versions
from autograder.grading.outside.sandbox import best_level, survey
from autograder.proof.attacks.declared import Attack
from autograder.proof.attacks.fixtures import find_attacks
from autograder.proof.attacks.plain_user import run_as_plain_user
from autograder.proof.attacks.stock import Control, run_stock
from autograder.proof.attacks.suite import Outcome, Row, run_suite, workplace
from autograder.render import plain

RESULTS = Path(__file__).with_name("results.json")
# Fields of a row that the site shows.
SHOWN = ("name", "group", "says", "expected", "found", "canaries")


def main(arguments: list[str]) -> int:
    """Run the suite; return 0 if every attack got its verdict and left nothing behind."""
    options = _parse(arguments)
    attacks = _chosen(options.only)
    if options.as_user and os.geteuid() == 0:
        outcome = msgspec.convert(run_as_plain_user(_rerun_arguments(options)), Outcome)
    else:
        with bar() as update:
            outcome = run_suite(attacks, options.backend, workers=options.workers, on_progress=update)
    controls = []
    if options.stock:
        points = {row.name: row.points for row in outcome.rows}
        with bar() as update, workplace() as folder:
            controls = run_stock(attacks, points, folder, workers=options.workers, on_progress=update)
    user = "a plain user" if options.as_user or os.geteuid() else "root"
    if options.write:
        keep(outcome, controls, f"{options.backend}, {user}", whole=not options.only)
    if options.json:
        print_json(msgspec.to_builtins(outcome) | {"controls": msgspec.to_builtins(controls)})
    else:
        _show(outcome, controls, f"under {options.backend}, as {user}")
    return 0 if outcome.withstood else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m autograder.proof.attacks", description=__doc__)
    parser.add_argument("--backend", default="", help="the sandbox: bubblewrap or landlock; the best one if not given")
    parser.add_argument("--only", action="append", default=[], help="only attacks whose name or group contains this")
    parser.add_argument("--stock", action="store_true", help="try stock nbgrader too, as the control")
    parser.add_argument("--workers", type=int, default=2, help="how many gradings run at once")
    parser.add_argument("--as-user", action="store_true", help="if root runs this, run it as a plain user")
    parser.add_argument("--json", action="store_true", help="print everything that was found")
    parser.add_argument(
        "--write", action="store_true", help="save the results for the site; with --only, update only those"
    )
    options = parser.parse_args(arguments)
    if not options.backend:
        options.backend = best_level()
    elif options.backend not in {backend.name for backend in survey() if backend.available}:
        known = "; ".join(f"{backend.name}: {backend.reason}" for backend in survey())
        parser.error(f"there is no sandbox {options.backend!r} here ({known})")
    return options


def _chosen(words: list[str]) -> list[Attack]:
    attacks = find_attacks()
    chosen = [a for a in attacks if not words or any(word in (a.name, a.group) for word in words)]
    chosen = chosen or [a for a in attacks if any(word in a.name for word in words)]
    if not chosen:
        complain(f"no attack is called {', '.join(words)}")
        raise SystemExit(2)
    return chosen


def _rerun_arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["--backend", options.backend, "--workers", str(options.workers), "--json"]
    return [*arguments, *(word for name in options.only for word in ("--only", name))]


def keep(outcome: Outcome, controls: list[Control], where: str, whole: bool) -> None:
    """Add a run to the results that the site shows, or update part of one.

    Durations are left out, so that a rerun changes nothing else. What was left behind is forgotten once all attacks
    that may have left it are rerun.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}, "controls": []}
    before = {"rows": [], "left": []} if whole else results["runs"].get(where, {"rows": [], "left": []})
    rows = [{name: row[name] for name in SHOWN} for row in msgspec.to_builtins(outcome.rows)]
    # All attacks of a run share what they left behind: any of them may have left it.
    rerun = [row["name"] for row in rows]
    left = [{**old, "attacks": [name for name in old["attacks"] if name not in rerun]} for old in before["left"]]
    left = [old for old in left if old["attacks"]] + [{"what": what, "attacks": rerun} for what in outcome.left]
    results["runs"][where] = {"versions": versions(), "left": left, "rows": _by_name(before["rows"], rows)}
    if controls:
        results["controls"] = _by_name([] if whole else results["controls"], msgspec.to_builtins(controls))
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def _by_name(before: list[dict], new: list[dict]) -> list[dict]:
    """Both lists in order of name; new rows replace those with the same name."""
    known = {entry["name"]: entry for entry in [*before, *new]}
    return [known[name] for name in sorted(known)]


def _show(outcome: Outcome, controls: list[Control], where: str) -> None:
    known = {control.name: control for control in controls}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("group", "attack", "verdict", "points", "denied", "s"):
        numbers = name in ("points", "denied", "s")
        table.add_column(name, overflow="fold", no_wrap=numbers, justify="right" if numbers else "left")
    if controls:
        table.add_column("stock nbgrader")
    for row in outcome.rows:
        cells = [
            row.group,
            row.name,
            _result_cell(row),
            f"{row.points:g}",
            str(len(row.denied) or ""),
            f"{row.seconds:.1f}",
        ]
        table.add_row(*cells, *([_control(known.get(row.name))] if controls else []))
    out().print(table)
    for row in outcome.rows:
        if not row.withstood:
            complain(f"{row.name}: {'; '.join(filter(None, [row.problem, *row.messages]))[:400]}")
    for thing in outcome.left:
        complain(f"left behind: {thing}")
    withstood = sum(row.withstood for row in outcome.rows)
    through = sum(control.let_through for control in controls)
    summary = f"\n{withstood} of {len(outcome.rows)} attacks got the required verdict {where}"
    summary += f"; stock nbgrader lets {through} of {len(controls)} through" if controls else ""
    out().print(summary, markup=False, soft_wrap=True)


def _result_cell(row: Row) -> Text:
    verdict_note = "" if row.found == row.expected else f"must be {row.expected}"
    points_note = "" if row.expected_points in (None, row.points) else f"must earn {row.expected_points:g}"
    text = ", ".join(
        filter(None, [row.found, verdict_note, points_note, *(f"shows {canary}" for canary in row.canaries)])
    )
    return Text(plain(text), style="green" if row.withstood else "red")


def _control(control: Control | None) -> Text:
    if control is None:
        return Text("not tried", style="dim")
    points = "no grade" if control.points is None else f"{control.points:g} points"
    text = "; ".join([points, *(f"shows {canary}" for canary in control.canaries)])
    return Text(f"{'lets through' if control.let_through else 'stops'}: {text}")


if __name__ == "__main__":
    with explained():
        sys.exit(main(sys.argv[1:]))
