"""``python -m autograder.proof.attacks``: every attack through the real pipeline, as a table."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from autograder.commands.terminal import bar, complain, explained, out, print_json
from autograder.grading.nbgrader.ledger import versions
from autograder.grading.outside.sandbox import best_level, survey
from autograder.proof.attacks.fixtures import Attack, find_attacks
from autograder.proof.attacks.plain_user import run_as_plain_user
from autograder.proof.attacks.stock import Control, run_stock
from autograder.proof.attacks.suite import Outcome, Row, run_suite, workplace
from autograder.show import plain

RESULTS = Path(__file__).with_name("results.json")


def main(arguments: list[str]) -> int:
    """Run the suite; 0 when every attack got the verdict of its folder and left nothing behind."""
    asked = _parse(arguments)
    attacks = _chosen(asked.only)
    if asked.as_user and os.geteuid() == 0:
        outcome = Outcome.from_json(run_as_plain_user(_again(asked)))
    else:
        with bar() as update:
            outcome = run_suite(attacks, asked.backend, workers=asked.workers, on_progress=update)
    controls = []
    if asked.stock:
        points = {row.name: row.points for row in outcome.rows}
        with bar() as update, workplace() as folder:
            controls = run_stock(attacks, points, folder, workers=asked.workers, on_progress=update)
    user = "a plain user" if asked.as_user or os.geteuid() else "root"
    if asked.write:
        keep(outcome, controls, f"{asked.backend}, {user}", whole=not asked.only)
    if asked.json:
        print_json({**outcome.to_json(), "controls": [control.to_json() for control in controls]})
    else:
        _show(outcome, controls, attacks, f"under {asked.backend}, as {user}")
    return 0 if outcome.held else 1


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m autograder.proof.attacks", description=__doc__)
    parser.add_argument("--backend", default="", help="the sandbox: bubblewrap or landlock; the best one if not given")
    parser.add_argument("--only", action="append", default=[], help="the attacks whose name or group has this in it")
    parser.add_argument("--stock", action="store_true", help="try stock nbgrader too, as the control")
    parser.add_argument("--workers", type=int, default=2, help="how many gradings run at once")
    parser.add_argument("--as-user", action="store_true", help="where root runs this: run it as a plain user")
    parser.add_argument("--json", action="store_true", help="print everything that was found")
    parser.add_argument(
        "--write", action="store_true", help="keep the results for the site; with --only, renew those alone"
    )
    asked = parser.parse_args(arguments)
    if not asked.backend:
        asked.backend = best_level()
    elif asked.backend not in {each.name for each in survey() if each.available}:
        known = "; ".join(f"{each.name}: {each.reason}" for each in survey())
        parser.error(f"there is no sandbox {asked.backend!r} here ({known})")
    return asked


def _chosen(words: list[str]) -> list[Attack]:
    attacks = find_attacks()
    chosen = [a for a in attacks if not words or any(word in (a.name, a.group) for word in words)]
    chosen = chosen or [a for a in attacks if any(word in a.name for word in words)]
    if not chosen:
        complain(f"no attack is called {', '.join(words)}")
        raise SystemExit(2)
    return chosen


def _again(asked: argparse.Namespace) -> list[str]:
    again = ["--backend", asked.backend, "--workers", str(asked.workers), "--json"]
    return [*again, *(word for name in asked.only for word in ("--only", name))]


def keep(outcome: Outcome, controls: list[Control], where: str, whole: bool) -> None:
    """Add a run to the results that the site shows, or renew a part of one.

    Seconds are left out, so that a rerun changes nothing else.
    """
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": {}, "controls": []}
    rows = [
        {
            name: value
            for name, value in row.items()
            if name in ("name", "group", "says", "expected", "found", "canaries")
        }
        for row in outcome.to_json()["rows"]
    ]
    before = {"rows": [], "left": []} if whole else kept["runs"].get(where, {"rows": [], "left": []})
    known = {row["name"]: row for row in [*before["rows"], *rows]}
    left = [*before["left"], *outcome.left]
    kept["runs"][where] = {"versions": versions(), "left": left, "rows": [known[name] for name in sorted(known)]}
    if controls:
        tried = {} if whole else {control["name"]: control for control in kept["controls"]}
        tried |= {control.name: control.to_json() for control in controls}
        kept["controls"] = [tried[name] for name in sorted(tried)]
    kept["runs"] = dict(sorted(kept["runs"].items()))
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def _show(outcome: Outcome, controls: list[Control], attacks: list[Attack], where: str) -> None:
    known = {control.name: control for control in controls}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("group", "attack", "verdict", "points", "denied", "s"):
        numbers = name in ("points", "denied", "s")
        table.add_column(name, overflow="fold", no_wrap=numbers, justify="right" if numbers else "left")
    if controls:
        table.add_column("stock nbgrader")
    for row in outcome.rows:
        cells = [row.group, row.name, _got(row), f"{row.points:g}", str(len(row.denied) or ""), f"{row.seconds:.1f}"]
        table.add_row(*cells, *([_control(known.get(row.name))] if controls else []))
    out().print(table)
    for row in outcome.rows:
        if not row.held:
            complain(f"{row.name}: {'; '.join(filter(None, [row.problem, *row.messages]))[:400]}")
    for thing in outcome.left:
        complain(f"left behind: {thing}")
    out().print(f"\n{summary(outcome)} {where}{through(controls)}", markup=False, soft_wrap=True)


def summary(outcome: Outcome) -> str:
    """How many attacks the grader withstood."""
    held = sum(row.held for row in outcome.rows)
    return f"{held} of {len(outcome.rows)} attacks got the verdict of their folder"


def through(controls: list[Control]) -> str:
    """How many the control did not."""
    count = sum(control.let_through for control in controls)
    return f"; stock nbgrader lets {count} of {len(controls)} through" if controls else ""


def _got(row: Row) -> Text:
    wanted = "" if row.found == row.expected else f"must be {row.expected}"
    earned = "" if row.expected_points in (None, row.points) else f"must earn {row.expected_points:g}"
    said = ", ".join(filter(None, [row.found, wanted, earned, *(f"shows {canary}" for canary in row.canaries)]))
    return Text(plain(said), style="green" if row.held else "red")


def _control(control: Control | None) -> Text:
    if control is None:
        return Text("not tried", style="dim")
    points = "no grade" if control.points is None else f"{control.points:g} points"
    said = "; ".join([points, *(f"shows {canary}" for canary in control.canaries)])
    return Text(f"{'lets through' if control.let_through else 'stops'}: {said}")


if __name__ == "__main__":
    with explained():
        sys.exit(main(sys.argv[1:]))
