"""``make kernels``: compare kernels, bytes, seconds and temporaries of timeline and liveness with the GPU compiler's.

The programs are every chapter's reference at its realistic size, the published runs on one A5000, and the steps of
``kernel_programs``. Rows are printed as they are compiled; the final table sorts them by difference, largest first.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from autograder.contract.task import Task, load, trace
from autograder.proof import kernel_programs
from course.curriculum import CHAPTERS
from course.machine import Machine
from course.machines import machine
from course.program import Program, ProgramError, memory, parse, timeline
from course.program.compiled import AotMissing, compile_for
from course.program.compiled.comparison import Side, compiled, predicted
from course.program.ir import walk
from course.validation.report import versions
from course.validation.single_device import RUNS, single_device

RESULTS = Path(__file__).with_suffix(".json")
TIME_LIMIT = 300.0
GPU = "8xH100"
COLUMNS = ("seconds", "moved", "kernels", "temporaries")


@dataclass(frozen=True)
class Row:
    """The figures of one program.

    Attributes:
        name: The program's name.
        machine: The machine that it was compiled for.
        ours: Figures of the timeline and liveness.
        theirs: Figures of the GPU compiler; None if it gave nothing.
        why: The reason for that.
    """

    name: str
    machine: str
    ours: Side
    theirs: Side | None
    why: str = ""

    def ratio(self, what: str) -> float | None:
        """Ours over the compiler's; None if either is zero."""
        if self.theirs is None:
            return None
        ours, theirs = getattr(self.ours, what), getattr(self.theirs, what)
        return ours / theirs if ours and theirs else None

    @property
    def difference(self) -> float:
        """The factor between the seconds; rows without a compiler's figure come last."""
        ratio = self.ratio("seconds")
        return abs(math.log(ratio)) if ratio else -1.0


class Recorded(msgspec.Struct, frozen=True):
    """The result kept by ``--write``."""

    versions: dict[str, str]
    rows: list[Row]


def recorded() -> Recorded:
    """The last result that was kept."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Recorded)


def every() -> dict[str, tuple[Callable[[str], Program], Machine, bool]]:
    """Each program by its name: exported for a platform, the machine, and whether it may branch on data."""
    programs: dict[str, tuple[Callable[[str], Program], Machine, bool]] = {}
    for name, exported in kernel_programs.programs().items():
        programs[name] = exported, machine(GPU), False
    for run in RUNS:
        programs[f"A5000: {run.name}"] = partial(_published, run), machine("8xA5000"), False
    for chapter in CHAPTERS:
        solution = importlib.import_module(f"solutions.{chapter.name}")
        for task in load(chapter.name).tasks:
            if task.at_scale:
                where = machine(task.machine)
                where = where if where.compiler and where.memory_bandwidth < math.inf else machine(GPU)
                exported = partial(_reference, task, getattr(solution, task.name))
                programs[f"{chapter.name}: {task.name}"] = exported, where, task.data_branches
    return programs


def _published(run: Any, platform: str) -> Program:
    return single_device(run, platform=platform)


def _reference(task: Task, function: Callable[..., Any], platform: str) -> Program:
    assert task.at_scale
    return trace(task, function, task.at_scale[0], lambda _: None, platform)


def row(name: str, exported: Callable[[str], Program], where: Machine, branches: bool, limit: float) -> Row:
    """Analyse and compile one program; the compiler is stopped after ``limit`` seconds."""
    program = exported("cpu")
    module = parse(program, data_branches=branches)
    predicted_timeline = timeline(module, where)
    ours = predicted(predicted_timeline, memory(module, program))
    if not branches and any(op.kind == "case" for op in walk(module.main)):
        why = "each device takes branches of its own, and the compiler's replay the most expensive ones"
        return Row(name, where.name, ours, None, why)
    try:
        return Row(name, where.name, ours, compiled(compile_for(exported("cuda"), where, time_limit=limit), where))
    except (AotMissing, ProgramError) as error:
        return Row(name, where.name, ours, None, str(error))


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by the difference of their seconds, largest first."""
    return sorted(rows, key=lambda row: -row.difference)


def spread(rows: Iterable[Row], what: str) -> tuple[float, float, int]:
    """Geometric mean of ours over the compiler's, the geometric standard deviation, and the number of rows."""
    logs = [math.log(ratio) for row in rows if (ratio := row.ratio(what))]
    if not logs:
        return math.nan, math.nan, 0
    mean = sum(logs) / len(logs)
    return math.exp(mean), math.exp(math.sqrt(sum((log - mean) ** 2 for log in logs) / len(logs))), len(logs)


_FORMATS = {
    "seconds": lambda side: f"{1e3 * side.seconds:.3f} ms",
    "moved": lambda side: f"{side.moved / 2**30:.2f} GiB",
    "kernels": lambda side: f"{side.kernels:,}",
    "temporaries": lambda side: f"{side.temporaries / 2**20:,.1f} MiB",
}


def line(row: Row, what: str) -> str:
    """Format one figure of both sides, and their ratio."""
    ours, theirs = _FORMATS[what](row.ours), _FORMATS[what](row.theirs) if row.theirs else "?"
    ratio = row.ratio(what)
    return f"{ours} / {theirs}" + (f"  {ratio - 1:+.0%}" if ratio else "")


def show(rows: list[Row]) -> None:
    """Print the table, worst first, and the spread of each figure."""
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in (
        "ours / the compiler's",
        "in kernels",
        "moved by those that multiply nothing",
        "kernels",
        "temporaries",
    ):
        table.add_column(column, overflow="fold")
    for entry in worst_first(rows):
        table.add_row(entry.name, *(line(entry, what) for what in COLUMNS))
    console.print(table)
    for entry in rows:
        if entry.why:
            console.print(f"{entry.name}: {entry.why}", style="dim")
    for what in COLUMNS:
        mean, deviation, count = spread(rows, what)
        console.print(
            f"{what}: ours is {mean:.2f} times the compiler's, spread {deviation:.2f} times, {count} programs"
        )


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="make kernels", description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name matches this")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--write", action="store_true", help="save the result; with --only, for those programs only")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds for compiling one program")
    options = parser.parse_args(arguments)
    rows = []
    for name, (exported, where, branches) in every().items():
        if re.search(options.only, name):
            rows.append(row(name, exported, where, branches, options.time_limit))
            result = rows[-1].why or "; ".join(line(rows[-1], what) for what in COLUMNS)
            print(f"{name}: {result}", file=sys.stderr, flush=True)
    if options.write:
        write(rows)
    if options.json:
        print(json.dumps({"versions": versions(), "rows": [asdict(entry) for entry in worst_first(rows)]}))
    else:
        show(rows)


def write(rows: list[Row]) -> None:
    """Keep the rows, and the previous results of programs that were not requested."""
    before = recorded().rows if RESULTS.exists() and recorded().versions == versions() else []
    names = {entry.name for entry in rows}
    record = Recorded(versions(), worst_first([*rows, *(entry for entry in before if entry.name not in names)]))
    RESULTS.write_text(json.dumps(msgspec.to_builtins(record), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
