"""Speed, memory and leftovers of official grading: the second half of ``make bench``."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from autograder.contract.task import load
from autograder.grading.inside.intake import parse_notebook
from autograder.grading.inside.launch import Limits
from autograder.grading.nbgrader.batch import grade_course
from autograder.grading.outside.pipeline import Grader
from autograder.grading.outside.sandbox import best_level
from autograder.proof.demo import CHAPTER, HERE, numbered
from autograder.proof.throughput import demo_class, resident

Rows = list[tuple[str, str, str]]
HANG = "class Hang:\n    while True:\n        pass\n"
HANG_LIMIT_S = 3.0


def timed(action: Callable[[], Any]) -> float:
    """Elapsed seconds."""
    begin = time.monotonic()
    action()
    return time.monotonic() - begin


def one_submission() -> Rows:
    """A grading in cold processes and in warm ones, each function alone, and the time until a hang ends."""
    solved = [parse_notebook("right.ipynb", numbered("right", number).encode()) for number in range(5)]
    rows = []
    with Grader(CHAPTER, secret=b"b" * 32, level=best_level()) as grader:
        cold = timed(lambda: grader.grade_notebook(solved[0], "cold"))
        rows.append(("grading one submission, cold processes", f"{cold:.1f} s", ""))
        for task in load(CHAPTER).tasks:
            times = [
                timed(lambda notebook=notebook, task=task: grader.grade_task(task, notebook)) for notebook in solved[1:]
            ]
            rows.append((f"grading {task.name}, warm processes", f"{statistics.median(times):.2f} s", ""))
    cell = {"cell_type": "code", "source": HANG, "metadata": {}}
    hang = parse_notebook("hang.ipynb", json.dumps({"cells": [cell]}).encode())
    limits = Limits(wall_s=HANG_LIMIT_S, cpu_s=60)
    with Grader(CHAPTER, secret=b"b" * 32, level=best_level(), limits=limits) as grader:
        task = load(CHAPTER).tasks[0]
        grader.grade_task(task, solved[0])
        overrun = timed(lambda: grader.grade_task(task, hang)) - HANG_LIMIT_S
    return [*rows, ("a hang ends after its limit by", f"{overrun:.2f} s", "under 1 s")]


def class_of(size: int, workers: int, models: tuple[str, ...] = ()) -> Rows:
    """A class of ``size``: the demo's submissions, or some of them, repeated, no two the same."""
    level = best_level()
    chosen = models or tuple(sorted(path.name for path in (HERE / "submitted").iterdir()))
    with tempfile.TemporaryDirectory() as folder, _leftovers() as leftovers:
        course = demo_class(Path(folder), chosen, size)
        resident_bytes: list[int] = []
        seconds = timed(
            lambda: grade_course(
                course, CHAPTER, workers=workers, level=level, on_progress=lambda *_: resident_bytes.append(resident())
            )
        )
    tasks = 1 if models else len(load(CHAPTER).tasks)
    quarter = max(1, len(resident_bytes) // 4)
    early, late = (
        statistics.median(part) / 2**20 for part in (resident_bytes[quarter : 2 * quarter], resident_bytes[-quarter:])
    )
    kind = f" of one function ({', '.join(models)})" if models else ""
    return [
        (f"a class of {size}{kind}, {workers} workers, {level}", f"{seconds:.0f} s", ""),
        ("  functions an hour", f"{3600 * size * tasks / seconds:,.0f}", "2,500 or more"),
        ("  memory of all processes, 2nd and last quarter", f"{early:,.0f} and {late:,.0f} MiB", "flat"),
        ("  processes and files left", ", ".join(leftovers) or "none", "none"),
    ]


def next_to_stock(size: int) -> Rows:
    """The same submissions, solved, through official grading and through stock nbgrader, one after another."""
    from autograder.proof.attacks.stock import grade_as_nbgrader_does

    with tempfile.TemporaryDirectory() as folder:
        course = demo_class(Path(folder) / "ours", ("right",), size)
        ours = timed(lambda: grade_course(course, CHAPTER, workers=1, level=best_level()))
        stock = demo_class(Path(folder) / "stock", ("right",), size)
        students = sorted(path.name for path in (stock / "submitted").iterdir())
        theirs = timed(lambda: [grade_as_nbgrader_does(stock, student) for student in students])
    return [
        (f"stock nbgrader next to official grading, {size} solved, in turn", f"{theirs / ours:.2f} times as long", "")
    ]


@contextmanager
def _leftovers() -> Iterator[list[str]]:
    """Processes and scratch folders that exist now and did not before."""
    scratch = Path(tempfile.gettempdir())
    before = {path.name for path in scratch.glob("meshcraft-*")}
    ours = {*psutil.Process().children(recursive=True)}
    leftovers: list[str] = []
    yield leftovers
    started = [process for process in psutil.Process().children(recursive=True) if process not in ours]
    _, alive = psutil.wait_procs(started, timeout=5)
    leftovers += [
        f"process {process.pid}" for process in alive if "resource_tracker" not in " ".join(process.cmdline())
    ]
    leftovers += sorted({path.name for path in scratch.glob("meshcraft-*")} - before)
