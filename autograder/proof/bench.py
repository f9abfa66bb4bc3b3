"""``make bench``: durations that people wait for. Printed, never judged: machines differ."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from autograder.proof.bench_grading import class_of, next_to_stock, one_submission, timed
from autograder.proof.demo import CHAPTER, submission
from course.curriculum import CHAPTERS, ROOT

# Time limit of a check in a running notebook.
FUNCTION_S, WHOLE_STEP_S = 3, 10


def cold_check() -> list[tuple[str, str, str]]:
    """``meshcraft check`` of a solved notebook, as a separate process."""
    notebook = str(submission("right"))
    command = [sys.executable, "-m", "autograder.cli", "check", CHAPTER, "--notebook", notebook, "--json"]
    seconds = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    return [("meshcraft check, whole, cold", f"{seconds:.1f} s", "under 12 s")]


def warm_check(chapters: list[str], repeats: int) -> list[tuple[str, str, str]]:
    """``check`` of each function in a process that has already run a check, as in a notebook's kernel."""
    from autograder.check import check_solution
    from autograder.contract.task import load

    rows = []
    for chapter in chapters:
        for task in load(chapter).tasks:
            print(f"check({task.name}) of {chapter}", file=sys.stderr)
            first = timed(lambda where=chapter, name=task.name: check_solution(where, [name]))
            times = [timed(lambda where=chapter, name=task.name: check_solution(where, [name])) for _ in range(repeats)]
            limit = WHOLE_STEP_S if "step" in task.name else FUNCTION_S
            rows.append((f"check({task.name}), repeated", f"{statistics.median(times):.2f} s", f"under {limit} s"))
            rows.append((f"check({task.name}), first in a kernel", f"{first:.2f} s", f"under {limit} s"))
    return rows


def sandbox(repeats: int) -> list[tuple[str, str, str]]:
    """A bare start on every backend that this machine has."""
    from autograder.grading.outside.sandbox import measure_start_s, survey

    rows = []
    for backend in survey():
        if backend.available:
            times = [measure_start_s(backend.name) for _ in range(repeats)]
            rows.append((f"sandbox start, {backend.name}", f"{1000 * statistics.median(times):.0f} ms", "under 50 ms"))
        else:
            rows.append((f"sandbox start, {backend.name}", "not measured", backend.reason))
    return rows


def lenses() -> list[tuple[str, str, str]]:
    """Costs, liveness and timeline of the largest graded Program, and of a large step on many devices."""
    import importlib
    from dataclasses import replace

    from autograder.contract.task import load, trace

    def at_scale(chapter: str, name: str = "", **changes: Any) -> Any:
        """A function's Program at scale, by default of the chapter's last function analysed on a realistic machine."""
        task = [task for task in load(chapter).tasks if task.at_scale and name in ("", task.name)][-1]
        assert task.at_scale
        case = replace(task.at_scale[0].with_sizes(**changes.pop("sizes", {})), **changes)
        return trace(task, getattr(importlib.import_module(f"solutions.{chapter}"), task.name), case, lambda _: None)

    billion = {"num_layers": 16, "seq": 1024, "max_seq": 1024, "num_microbatches": 8}
    rows = _measure(f"of the last function of {CHAPTER}", at_scale(CHAPTER), ("300 ms", "1 s"))
    step = at_scale("transformer_3d", "forward_3d", sizes=billion)
    rows += _measure("of a 3D loss and gradient, 1 billion parameters, 8 devices", step, ("10 s", "10 s"))
    wide = at_scale("transformer_3d", "forward_3d", sizes=billion, mesh={"data": 4, "pipe": 4, "tensor": 4})
    return rows + _measure("of the same on 64 devices", wide, ("", ""))


def _measure(label: str, program: Any, targets: tuple[str, str]) -> list[tuple[str, str, str]]:
    """Measure the duration of the analyses of a Program, and of parsing it."""
    from course.machines import machine, scaled
    from course.program import costs, memory, parse, timeline

    large = scaled(machine("8xH100"), 64, 8)

    def first() -> None:
        module = parse(program)
        costs(module)
        memory(module, program)

    module = parse(program)
    limits = [f"under {limit}" if limit else "" for limit in targets]
    return [
        (f"costs and liveness {label}", f"{1000 * timed(first):.0f} ms", limits[0]),
        (f"timeline {label}", f"{1000 * timed(lambda: timeline(module, large)):.0f} ms", limits[1]),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--size", type=int, default=50, help="submissions in the class; 0 leaves grading out")
    parser.add_argument("--long", type=int, default=200, help="submissions of one function in a row; 0 leaves it out")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    names = [chapter.name for chapter in CHAPTERS]
    parser.add_argument("--chapter", nargs="+", choices=names, metavar="NAME", help="checks of these chapters alone")
    parser.add_argument("--no-checks", dest="checks", action="store_false", help="leave checks and lenses out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.chapter:
        rows, options.size, options.long = warm_check(options.chapter, 3), 0, 0
    else:
        rows = [*sandbox(10), *cold_check(), *warm_check(names, 3), *lenses()] if options.checks else []
    if options.size:
        rows += [*one_submission(), *class_of(options.size, options.workers), *next_to_stock(4)]
    if options.long:
        rows += class_of(options.long, options.workers, ("partial",))
    if options.json:
        print(json.dumps([{"what": what, "measured": measured, "wanted": wanted} for what, measured, wanted in rows]))
        return
    table = Table(title=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}", box=None)
    for column in ("what", "measured", "wanted"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
