"""The commands that measure this machine's devices and save the results, a row at a time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course.measured import fresh
from course.measured.card import file_name
from course.measured.rows import FOLDER, NOT_MEASURED, Group, Report, measure_all, read, say

NO_GPU = (
    "no GPU: JAX sees {kind} ({platform}) here. This target measures real GPUs; run it on a machine that has one, with "
    "JAX's GPU support installed (pip install 'jax[cuda12]'). Nothing was measured and nothing was written."
)


def parser(program: str, description: str) -> argparse.ArgumentParser:
    """The options that all measuring commands share."""
    argument_parser = argparse.ArgumentParser(prog=program, description=description.split("\n")[0])
    argument_parser.add_argument(
        "--limit", type=float, default=3600, metavar="SECONDS", help="stop cleanly after this long"
    )
    argument_parser.add_argument("--again", action="store_true", help="also measure recorded rows again")
    argument_parser.add_argument("--folder", type=Path, help="where the file goes; course/measurements if left out")
    return argument_parser


def measure(
    options: argparse.Namespace,
    groups: Callable[[str], list[Group]],
    *,
    platform: str = "",
    as_json: bool = False,
    conclusion: Callable[[str, dict[str, Any]], str] = lambda kind, rows: "",
) -> int:
    """Measure, and return the exit status: 0 if every row is measured, 1 if some are not, 2 if nothing can be.

    Args:
        options: As parsed by ``parser``.
        groups: The groups to measure on devices of a given kind.
        platform: ``cpu`` to try the command on emulated devices.
        as_json: Print one JSON object with the card and the rows.
        conclusion: Describes in one line what follows from the kind's rows.
    """
    deadline = time.monotonic() + options.limit
    try:
        card = fresh.ask({"do": "card"}, seconds=min(options.limit, 120), platform=platform)
    except fresh.MeasurementFailed as error:
        return _nothing(f"the devices cannot be identified: {error}. Nothing was measured.", as_json)
    if card["platform"] != "gpu" and platform != "cpu":
        return _nothing(NO_GPU.format(**card), as_json)
    path = (options.folder or FOLDER) / file_name(card["kind"])
    all_groups = groups(card["kind"])
    try:
        missing = _with_bar(
            len(all_groups),
            lambda report: measure_all(
                card, path, all_groups, again=options.again, deadline=deadline, platform=platform, report=report
            ),
        )
        if as_json:
            data = read(path, card)
            own = {name: data["rows"][name] for group in all_groups for name in group.rows}
            print(json.dumps({"missing": missing, **data, "rows": own}))
    except ValueError as error:
        return _nothing(f"{error}. Nothing was measured.", as_json)
    shown_path = path if options.folder else path.name
    say(
        f"written: {shown_path}; {len(missing)} rows are not measured"
        + (": run it again to continue" if missing else "")
    )
    other_rows, our_rows = _by_installation(
        [name for group in all_groups for name in group.rows], read(path, card), card
    )
    if other_rows:
        say(
            f"{len(other_rows)} of these rows were measured with another machine or installation and kept. To measure "
            "them on this one, name a --folder of your own, or --again to replace them"
        )
    if text := conclusion(card["kind"], our_rows):
        say(text)
    return 1 if missing else 0


def _by_installation(
    names: list[str], data: dict[str, Any], card: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The measured rows with these names from another machine or installation, and those from this one."""
    is_same = [{**recorded_card, "date": ""} == {**card, "date": ""} for recorded_card in data["cards"]]
    rows = {name: data["rows"][name] for name in names if NOT_MEASURED not in data["rows"][name]}
    by_installation = {True: {}, False: {}}
    for name, row in rows.items():
        by_installation[is_same[row["card"]]][name] = row
    return by_installation[False], by_installation[True]


def _nothing(reason: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"rows": {}, "reason": reason}))
    say(reason)
    return 2


def _with_bar(total: int, run: Callable[[Report], list[str]]) -> list[str]:
    """Run with a progress bar in a terminal, and with lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if not sys.stderr.isatty():
        return run(Report())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as progress:
        task = progress.add_task("measuring", total=total)
        return run(Report(lambda text: progress.console.print(text, markup=False), lambda: progress.advance(task)))
