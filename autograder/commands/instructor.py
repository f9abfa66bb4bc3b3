"""What an instructor types: build, grade, status, feedback, export; and doctor, for anyone."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from autograder.commands.terminal import (
    FAULT,
    SHORT,
    UsageError,
    bar,
    complain,
    out,
    print_json,
    require_chapter,
    spinner,
)
from autograder.show import RICH, WORDS, number, plain
from autograder.verdict import LIMIT_EXCEEDED, NEEDS_HUMAN, Report
from course.curriculum import CHAPTERS

Assignment = Annotated[str | None, typer.Argument(metavar="[ASSIGNMENT]", help="A chapter; all handed in, if none.")]
CourseFolder = Annotated[Path, typer.Option("--course", help="The course folder, in nbgrader's layout.")]
BRIEF = {**WORDS, LIMIT_EXCEEDED: "limit", NEEDS_HUMAN: "person"}
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]


def build(
    chapters: Annotated[list[str] | None, typer.Argument(metavar="[CHAPTER]...", help="All, if left out.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if an exercise is stale.")] = False,
) -> None:
    """Make the exercises from the solutions, which nbgrader strips, and measure what limits are set against."""
    names = [require_chapter(name) for name in chapters or [entry.name for entry in CHAPTERS]]
    from autograder import notebook

    if check:
        stale = {name: notebook.stale(name) for name in names}
        for name in filter(stale.get, names):
            complain(f"exercises/{name} is stale; run `meshcraft build`")
            out().print(stale[name], markup=False)
        raise typer.Exit(SHORT if any(stale.values()) else 0)
    from autograder import measure

    with spinner("building"):
        written = [*notebook.build(names), *(measure.write(name) for name in names)]
    for path in written:
        out().print(f"wrote {path}", markup=False)


def grade(
    assignment: Assignment = None,
    course: CourseFolder = Path("."),
    workers: Annotated[int, typer.Option(min=1, help="Gradings at once.")] = max(1, (os.cpu_count() or 1)),
    unsafe_local: Annotated[bool, typer.Option("--unsafe-local", help="Grade even without any sandbox.")] = False,
    as_json: AsJson = False,
) -> None:
    """Grade what was handed in and is not graded yet. Interrupt it at any time, and run it again to go on.

    Exit status 0: every submission has a verdict; 3: some need a person.
    """
    from autograder.grading.batch import grade_course
    from autograder.grading.sandbox import best_level

    names = assignments(course, assignment)
    with spinner("looking for a sandbox"):
        level = best_level(allow_unsafe=unsafe_local)
    if level == "unsafe-local":
        complain("no sandbox: students' code runs with your rights on this machine (--unsafe-local)")
    reports: list[Report] = []
    with bar() as update:
        for name in names:
            reports += grade_course(course, name, workers=workers, level=level, on_progress=update)
    if as_json:
        print_json({"submissions": [report.to_json() for report in reports]})
    else:
        for name in names:
            out().print(grade_table([report for report in reports if report.chapter == name]))
    waiting = [report for report in reports if unfinished(report)]
    for report in waiting:
        complain(f"{report.student} needs a person: {reason(report)}")
    raise typer.Exit(FAULT if waiting else 0)


def status(assignment: Assignment = None, course: CourseFolder = Path("."), as_json: AsJson = False) -> None:
    """What is graded, what is not, and what needs a person."""
    from autograder.grading.export import overview

    rows = [row for name in assignments(course, assignment) for row in overview(course.resolve(), name)]
    if as_json:
        print_json({"submissions": rows})
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for column in ("chapter", "student", "state", "points", ""):
        table.add_column(column)
    for row in rows:
        points = "" if row["points"] is None else f"{number(row['points'])} of {number(row['max_points'])}"
        table.add_row(
            *(Text(plain(text)) for text in (row["chapter"], row["student"], row["state"], points, row["why"]))
        )
    out().print(table)


def feedback(assignment: Assignment = None, course: CourseFolder = Path("."), as_json: AsJson = False) -> None:
    """Write a feedback page for everyone who is graded. Exit status 1: someone got none."""
    names = assignments(course, assignment)
    with spinner("writing feedback"):
        from autograder.grading.feedback import write_feedback

        made = [write_feedback(course, name) for name in names]
    pages = [str(page) for written, _ in made for page in written]
    problems = {student: why for _, failed in made for student, why in failed.items()}
    if as_json:
        print_json({"pages": pages, "without": problems})
    else:
        for page in pages:
            out().print(page, markup=False)
    for student, why in problems.items():
        complain(f"no page for {student}: {why}")
    raise typer.Exit(SHORT if problems else 0)


def export(
    assignment: Assignment = None,
    course: CourseFolder = Path("."),
    to: Annotated[Path | None, typer.Option(help="The file to write; standard output, if none.")] = None,
) -> None:
    """The gradebook as CSV, with manual grades and late penalties. Who has no grade yet has no number."""
    from autograder.grading.export import grades_csv

    text = grades_csv(course.resolve(), assignments(course, assignment))
    if to is None:
        sys.stdout.write(text)
        return
    to.write_text(text, encoding="utf-8")
    out().print(f"wrote {to}", markup=False)


def doctor(as_json: AsJson = False) -> None:
    """What this machine can do. Exit status 1: it has no sandbox for official grading."""
    from importlib import metadata

    with spinner("trying the sandboxes"):
        from autograder.grading.sandbox import survey

        rungs = survey()
    packages = ("meshcraft", "jax", "flax", "optax", "nbgrader", "jupyterlab")
    installed = {name: _version(metadata, name) for name in packages}
    compiler = _gpu_compiler()
    usable = next((rung.name for rung in rungs if rung.available), None)
    if as_json:
        found = [{"name": r.name, "available": r.available, "reason": r.reason, "remedy": r.remedy} for r in rungs]
        versions = {"python": sys.version.split()[0], "packages": installed, "gpu_compiler": compiler}
        print_json({**versions, "sandbox": usable, "rungs": found})
        raise typer.Exit(0 if usable else SHORT)
    console = out()
    console.print(f"{'Python':<20}{sys.version.split()[0]}, {os.cpu_count()} cores")
    for name, version in installed.items():
        console.print(f"{name:<20}{version or 'not installed'}", markup=False)
    console.print(f"{'GPU compiler':<20}{compiler['version'] or compiler['reason']}", markup=False, soft_wrap=True)
    for rung in rungs:
        said = "works" if rung.available else f"does not work: {rung.reason}. {rung.remedy}"
        style = "green" if rung.available else "red"
        console.print(Text(f"{'sandbox ' + rung.name:<20}{said}", style=style), soft_wrap=True)
    console.print(f"\nofficial grading uses {usable or 'nothing: it refuses, unless told --unsafe-local'}")
    raise typer.Exit(0 if usable else SHORT)


def _gpu_compiler() -> dict[str, str]:
    """The version of what the compiled lens needs, or why it cannot be used."""
    from course.program.compiled.plugin import PACKAGES, AotMissing, find_plugin

    try:
        return {"version": find_plugin().versions[PACKAGES[0]], "reason": ""}
    except AotMissing as error:
        return {"version": "", "reason": str(error)}


def assignments(course: Path, given: str | None) -> list[str]:
    """The assignment that was named, or all chapters that somebody has handed in.

    Raises:
        UsageError: no such chapter, no such folder, or nothing was handed in.
    """
    if given is not None:
        return [require_chapter(given)]
    if not (course / "submitted").is_dir():
        raise UsageError(f"{course.resolve()} has no folder `submitted/`; name a course folder with --course")
    found = [entry.name for entry in CHAPTERS if any((course / "submitted").glob(f"*/{entry.name}"))]
    if not found:
        raise UsageError(f"nothing is handed in: {course.resolve()}/submitted/STUDENT/CHAPTER/ holds no chapter")
    return found


def grade_table(reports: list[Report]) -> Group:
    """One line a student: points and verdict of each function; and below, the isolation they were judged under."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    names = list(dict.fromkeys(result.name for report in reports for result in report.functions))
    levels = list(dict.fromkeys(report.isolation for report in reports if report.isolation))
    each = ["isolation"] if len(levels) > 1 else []
    for column in ("student", *names, "points", *each):
        table.add_column(plain(column) if len(names) <= 3 else plain(column).replace("_", "_\n"))
    for report in reports:
        results = {result.name: result for result in report.functions}
        cells = [_verdict_cell(results.get(name)) for name in names]
        points = f"{number(report.points)} of {number(report.max_points)}"
        table.add_row(Text(plain(report.student)), *cells, points, *[Text(plain(report.isolation)) for _ in each])
    said = f", judged under {levels[0]}" if len(levels) == 1 else ""
    count = f"{len(reports)} submission{'' if len(reports) == 1 else 's'}"
    return Group(table, Text(f"\n{count}{plain(said)}", style="dim"))


def unfinished(report: Report) -> bool:
    """Whether a person has to look at it."""
    lost = any(note.startswith("not in the gradebook") for note in report.notes)
    return lost or any(result.verdict == NEEDS_HUMAN for result in report.functions)


def reason(report: Report) -> str:
    """Why a person has to look at it."""
    said = [result.message for result in report.functions if result.verdict == NEEDS_HUMAN and result.message]
    return next(iter([*said, *report.notes]), "no reason was given")


def _verdict_cell(result: Any) -> Text:
    if result is None:
        return Text("")
    word = BRIEF.get(result.verdict, plain(result.verdict))
    return Text(f"{number(result.points)} {word}", style=RICH.get(result.verdict, "red"))


def _version(metadata: Any, name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
