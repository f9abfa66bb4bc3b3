"""Shared code of the instructor's commands; build; and doctor, for anyone."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autograder.commands.terminal import (
    SHORT,
    USAGE,
    AsJson,
    UsageError,
    complain,
    out,
    print_json,
    require_chapter,
    spinner,
)
from course.curriculum import CHAPTERS, NOTEBOOKS, PRIMER

Assignment = Annotated[
    str | None, typer.Argument(metavar="ASSIGNMENT", help="A chapter; all submitted ones, if left out.")
]
CourseFolder = Annotated[Path, typer.Option("--course", help="The course folder, in nbgrader's layout.")]


def build(
    chapters: Annotated[list[str] | None, typer.Argument(metavar="CHAPTER", help="All, if left out.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if an exercise is stale.")] = False,
) -> None:
    """Make the exercises from the solutions, which nbgrader strips, and measure the figures behind the limits."""
    names = [require_chapter(name, or_primer=True) for name in chapters or [entry.name for entry in NOTEBOOKS]]
    from autograder.release import notebook

    if check:
        stale = {name: notebook.stale(name) for name in names}
        for name in filter(stale.get, names):
            complain(f"exercises/{name} is stale; run `meshcraft build`")
            out().print(stale[name], markup=False)
        raise typer.Exit(SHORT if any(stale.values()) else 0)
    from autograder.release import reference_metrics

    with spinner("building"):
        written = [*notebook.build(names), *(reference_metrics.write(name) for name in names if name != PRIMER.name)]
    for path in written:
        out().print(f"wrote {path}", markup=False)


def doctor(as_json: AsJson = False) -> None:
    """Show this machine's capabilities. Exit status 1: it has no sandbox for official grading."""
    from importlib import metadata

    with spinner("trying the sandboxes"):
        from autograder.grading.outside.sandbox import survey

        backends = survey()
    packages = ("meshcraft", "jax", "flax", "optax", "nbgrader", "jupyterlab")
    installed = {name: _version(metadata, name) for name in packages}
    compiler, resources = _gpu_compiler(), _resources()
    usable = next((backend.name for backend in backends if backend.available), None)
    if as_json:
        backend_rows = [
            {"name": r.name, "available": r.available, "reason": r.reason, "remedy": r.remedy} for r in backends
        ]
        versions = {"python": sys.version.split()[0], "packages": installed, "gpu_compiler": compiler}
        print_json({**versions, "room": resources, "sandbox": usable, "backends": backend_rows})
        raise typer.Exit(0 if usable else SHORT)
    console = out()
    console.print(f"{'Python':<20}{sys.version.split()[0]}, {os.cpu_count()} cores")
    for name, version in installed.items():
        console.print(f"{name:<20}{version or 'not installed'}", markup=False)
    console.print(f"{'GPU compiler':<20}{compiler['version'] or compiler['reason']}", markup=False, soft_wrap=True)
    console.print(
        f"{'scratch space':<20}{resources['free'] / 2**30:.1f} GiB free in {resources['scratch']}", markup=False
    )
    process_limit = (
        "as many as the machine allows" if resources["processes"] is None else f"{resources['processes']:,} at once"
    )
    console.print(f"{'processes':<20}{process_limit}", markup=False)
    for backend in backends:
        message = (
            backend.reason or "works" if backend.available else f"does not work: {backend.reason}. {backend.remedy}"
        )
        style = "green" if backend.available else "red"
        console.print(Text(f"{'sandbox ' + backend.name:<20}{message}", style=style), soft_wrap=True)
    console.print(f"\nofficial grading uses {usable or 'nothing: it refuses, unless --unsafe-local is given'}")
    if usable and not backends[0].available:
        console.print(f"{backends[0].name} would be better: {backends[0].remedy}", markup=False, soft_wrap=True)
    raise typer.Exit(0 if usable else SHORT)


def _resources() -> dict[str, Any]:
    """Resources of grading besides processor and memory: scratch space in bytes, and processes (None if unlimited)."""
    import resource

    scratch = tempfile.gettempdir()
    process_limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    free = shutil.disk_usage(scratch).free
    return {
        "scratch": scratch,
        "free": free,
        "processes": None if process_limit == resource.RLIM_INFINITY else process_limit,
    }


def _gpu_compiler() -> dict[str, str]:
    """The versions that the compiled analysis needs, or why it is unavailable."""
    from course.program.compiled.plugin import PACKAGES, AotMissing, find_plugin

    try:
        return {"version": find_plugin().versions[PACKAGES[0]], "reason": ""}
    except AotMissing as error:
        return {"version": "", "reason": str(error)}


def course_chapter(course: Path, name: str) -> str:
    """Return the name if it is a chapter, and one of this course if the course has any.

    Raises:
        UsageError: There is no such chapter.
        CourseError: This is no course folder, or the course has other chapters.
    """
    require_chapter(name)
    from autograder.grading.nbgrader.course import require_course, require_in_course

    require_course(course)
    require_in_course(course.resolve(), name)
    return name


def assignments(course: Path, given: str | None) -> tuple[list[str], int]:
    """The assignment named, or all chapters that are in the course or have submissions.

    Returns:
        The chapters, and the minimum exit status: among several, one that cannot be used is reported and left out.

    Raises:
        UsageError: No such chapter, or no chapter in the folder that can be used.
        CourseError: This is no course folder.
    """
    if given is not None:
        return [course_chapter(course, given)], 0
    from autograder.contract.task import ChapterError, load
    from autograder.grading.nbgrader.course import require_course
    from autograder.grading.nbgrader.settings import chapters_of, read_settings

    require_course(course)
    dropped, course_chapters = read_settings(course).dropped, chapters_of(course)
    names = [
        entry.name
        for entry in CHAPTERS
        if entry.name not in dropped
        and (
            entry.name in course_chapters
            or (not course_chapters and any((course / "submitted").glob(f"*/{entry.name}")))
        )
    ]
    handed_out = (path.parent.name for path in (course / "source").glob("*/chapters"))  # with their own chapter
    names += sorted({*handed_out} - {*names, *dropped})
    if not names:
        raise UsageError(f"nothing has been submitted: {course.resolve()}/submitted/STUDENT/CHAPTER/ holds no chapter")
    usable = []
    for name in names:
        try:
            load(name)
            usable.append(name)
        except (LookupError, ChapterError) as error:
            if len(names) == 1:
                raise UsageError(f"{name} cannot be used: {error}") from error
            complain(f"{name} is left out: {error}")
    return usable, USAGE if len(usable) < len(names) else 0


def _version(metadata: Any, name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
