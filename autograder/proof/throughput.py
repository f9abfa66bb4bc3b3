"""``make throughput``: measure the speed of grading, booking and feedback, in this checkout and in an earlier commit.

The class is the demo's mix of submissions, judged in the sandbox; the earlier commit grades it first, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from course.curriculum import ROOT

MIB = 2**20
ROWS = {
    "submissions an hour": "{submissions_an_hour:,.0f}",
    "booking, a student": "{booking_s:.2f} s",
    "feedback, a student": "{feedback_s:.2f} s",
    "memory of all processes, at most": "{memory_mib:,.0f} MiB",
    "the course on disk": "{disk_mib:,.0f} MiB",
}


def demo_class(folder: Path, models: tuple[str, ...], size: int) -> Path:
    """A course with ``size`` submissions, which repeat those of the demo's students named in ``models``."""
    from autograder.grading.nbgrader.course import make_course
    from autograder.proof.demo import CHAPTER, numbered

    course = make_course(folder / "course", [CHAPTER])
    for number in range(size):
        target = course / "submitted" / f"student{number:03}" / CHAPTER / f"{CHAPTER}.ipynb"
        target.parent.mkdir(parents=True)
        target.write_text(numbered(models[number % len(models)], number))
    return course


def resident() -> int:
    """Resident bytes of this process and its descendants, shared pages counted once each."""
    total = 0
    for process in (me := psutil.Process(), *me.children(recursive=True)):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def measure(folder: Path, size: int, workers: int) -> dict[str, Any]:
    """Grade a class of ``size`` and write its feedback, in this process; return the figures of ``ROWS``."""
    from autograder.grading.nbgrader.batch import grade_course
    from autograder.grading.nbgrader.feedback import write_feedback
    from autograder.grading.outside.sandbox import best_level
    from autograder.proof.demo import CHAPTER, HERE

    course = demo_class(folder, tuple(sorted(path.name for path in (HERE / "submitted").iterdir())), size)
    ended_at, resident_bytes, done = {"start": time.monotonic()}, [resident()], threading.Event()

    def watch() -> None:
        while not done.wait(1):
            resident_bytes.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        grade_course(
            course,
            CHAPTER,
            workers=workers,
            level=best_level(),
            on_progress=lambda stage, *_: ended_at.update({stage: time.monotonic()}),
        )
        began = time.monotonic()
        write_feedback(course, CHAPTER)
        feedback = time.monotonic() - began
    finally:
        done.set()
        watcher.join()
    return {
        "submissions_an_hour": 3600 * size / (ended_at["grading"] - ended_at["start"]),
        "booking_s": (ended_at["gradebook"] - ended_at["grading"]) / size,
        "feedback_s": feedback / size,
        "memory_mib": max(resident_bytes) / MIB,
        "disk_mib": sum(path.stat().st_size for path in course.rglob("*") if path.is_file()) / MIB,
    }


def measure_in(tree: Path, size: int, workers: int) -> dict[str, Any]:
    """The figures of the course in another folder, measured in a separate process."""
    # This file is run there, and imports that folder's modules.
    command = [sys.executable, str(Path(__file__).resolve()), "--size", str(size), "--workers", str(workers), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures.pop("root") == str(tree.resolve()), figures
    return figures


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="make throughput", description=__doc__)
    parser.add_argument("--size", type=int, default=120, help="students in the class")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--before", metavar="COMMIT", help="an earlier commit that grades the same class first")
    parser.add_argument("--json", action="store_true", help="this checkout's figures alone")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.json:
            print(json.dumps(measure(Path(folder), options.size, options.workers) | {"root": str(ROOT)}))
            return
        measurements = {}
        if options.before:
            tree = Path(folder) / "before"
            tree.mkdir()
            archive = subprocess.run(["git", "archive", options.before], cwd=ROOT, stdout=subprocess.PIPE, check=True)
            subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
            measurements[options.before] = measure_in(tree, options.size, options.workers)
        measurements["now"] = measure_in(ROOT, options.size, options.workers)
    title = f"a class of {options.size}, {options.workers} workers, {platform.machine()}, {os.cpu_count()} cores"
    table = Table(title=title, box=None)
    for column in ("", *measurements):
        table.add_column(column)
    for row, form in ROWS.items():
        table.add_row(row, *(form.format(**figures) for figures in measurements.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
