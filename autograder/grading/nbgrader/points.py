"""The points of each function in a course, and the check that its notebooks state the same points.

Verdicts are recorded in the contract's points. They are scaled when they are booked, so changed points need no new
grading.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader import utils

from autograder.contract.task import load
from autograder.contract.text import points_text
from autograder.contract.verdict import Report, Result
from autograder.grading.nbgrader.settings import CourseError, Settings, read_settings
from autograder.release.converters import CHECK, grade_id_of
from autograder.release.notebook import QUESTION


def worth(settings: Settings, chapter: str) -> dict[str, float]:
    """The points of each function of the chapter, and of its question, in this course."""
    contract = load(chapter)
    own = {task.name: float(task.points) for task in contract.tasks} | {QUESTION: float(contract.question_points)}
    return {name: settings.points.get(f"{chapter}.{name}", points) for name, points in own.items()}


def ungraded(settings: Settings, chapter: str) -> tuple[str, ...]:
    """The chapter's functions that this course does not grade: those worth 0 points."""
    points = worth(settings, chapter)
    return tuple(task.name for task in load(chapter).tasks if not points[task.name])


def scaled(report: Report, points: Mapping[str, float]) -> Report:
    """Scale each function's points in the report to what the function is worth in this course."""
    return replace(report, functions=tuple(_scaled(result, points) for result in report.functions))


def _scaled(result: Result, points: Mapping[str, float]) -> Result:
    max_points = points.get(result.name, result.max_points)
    if max_points == result.max_points or not result.max_points:
        return result
    return replace(result, points=round(result.points * max_points / result.max_points, 2), max_points=max_points)


def the_one(name: str, known: Collection[str], usage: str) -> str:
    """The ``chapter.function`` that a name refers to; the name may leave out the chapter if that is unambiguous.

    Raises:
        CourseError: It refers to none, or to several.
    """
    matches = [each for each in sorted(known) if name in (each, each.partition(".")[2])]
    if len(matches) != 1:
        near = get_close_matches(name, [*known, *(each.partition(".")[2] for each in known)], 1)
        unknown = "is not in this course" + (f"; is it {near[0]}?" if near else ";")
        several = f"is in several chapters; write one of {', '.join(matches)};" if matches else unknown
        raise CourseError(f"{name!r} {several} {usage}")
    return matches[0]


def parse_points(given: list[str], chapters: list[str]) -> dict[str, float]:
    """Parse ``fsdp_loss=10`` or ``fsdp.question=4`` into points by ``chapter.function``.

    Args:
        given: The options as typed.
        chapters: The chapters of the course.

    Raises:
        CourseError: It is not of that form, or no chapter has such a function.
    """
    known = {f"{chapter}.{name}" for chapter in chapters for name in worth(Settings(), chapter)}
    points: dict[str, float] = {}
    for text in given:
        full_name = the_one(text.partition("=")[0], known, "points are given as fsdp_loss=10 or fsdp.question=4")
        points[full_name] = number_given("--points", text, "10")
    return points


def number_given(option: str, text: str, example: str) -> float:
    """The number in NAME=NUMBER.

    Args:
        option: The option with which it was given.
        text: The text that was typed.
        example: A number that the message proposes.

    Raises:
        CourseError: There is none.
    """
    name, _, number = text.partition("=")
    try:
        return float(number)
    except ValueError:
        raise CourseError(f"{option} {text!r} has no number; write for example {name}={example}") from None


def set_points(notebook: NotebookNode, points: Mapping[str, float], before: Mapping[str, float]) -> bool:
    """Write the points into a source notebook, where they were ``before``; return True if that changes it."""
    changed = False
    for cell in notebook.cells:
        name = grade_id_of(cell).removeprefix(CHECK)
        if utils.is_grade(cell) and name in points and cell.metadata.nbgrader.points == before[name] != points[name]:
            cell.metadata.nbgrader.points = points[name]
            changed = True
    for name in points:
        heading = re.compile(
            rf"(^##+ .*`{re.escape(name)}`.*\n\n\*[^\n]*; ){_as_text(before[name])}(\.\*)$", re.MULTILINE
        )
        for cell in notebook.cells:
            says = _as_text(points[name])
            cell.source = heading.sub(lambda match, says=says: f"{match[1]}{says}{match[2]}", cell.source)
    return changed


def _as_text(points: float) -> str:
    return points_text(points) if points else "not graded in this course"


def points_in(notebook: NotebookNode) -> dict[str, float]:
    """The points of a notebook's graded cells, by grade id."""
    return {
        cell.metadata.nbgrader.grade_id: float(cell.metadata.nbgrader.points)
        for cell in notebook.cells
        if utils.is_grade(cell)
    }


def require_agreement(
    notebook: NotebookNode, chapter: str, settings: Settings, where: str, *, released: bool = False
) -> None:
    """Require that a notebook's graded cells are those of the contract, with the course's points.

    A question of the instructor's own is fine, since a person grades it. A test cell of their own is not: official
    grading runs none of the notebook's cells; once it is released, a person gives its points.

    Raises:
        CourseError: They differ; the message names the cell and the remedy.
    """
    points, seen = worth(settings, chapter), set[str]()
    for cell in notebook.cells:
        if not utils.is_grade(cell):
            continue
        name = cell.metadata.nbgrader.grade_id.removeprefix(CHECK)
        seen.add(name)
        if name not in points:
            if not (utils.is_solution(cell) or released):
                raise CourseError(
                    f"{where} has the test cell {cell.metadata.nbgrader.grade_id!r}, which official grading cannot "
                    "judge: it runs none of the notebook's cells. Make it a manually graded answer, or set its type to "
                    f"“-” (JupyterLab: Create Assignment), in source/{chapter}/{chapter}.ipynb; then "
                    f"`nbgrader generate_assignment {chapter} --force`"
                )
        elif cell.metadata.nbgrader.points != points[name]:
            has = cell.metadata.nbgrader.points
            raise CourseError(
                f"{where} says that {name} is worth {has:g} points, and the course says {points[name]:g}. To make it "
                f"{has:g}: `meshcraft init . --points {chapter}.{name}={has:g}` in the course folder. To keep "
                f"{points[name]:g}: put that back in source/{chapter}/{chapter}.ipynb and run "
                f"`nbgrader generate_assignment {chapter} --force`"
            )
    if missing := sorted({*points} - seen - {QUESTION}):
        raise CourseError(
            f"{where} has no check cell for {', '.join(missing)}; put it back, or move the notebook away and run "
            f"`meshcraft init . --chapter {chapter}`, which writes a new one"
        )


def require_released(course: Path, chapter: str) -> None:
    """Apply ``require_agreement`` to a chapter's source and released notebooks.

    Raises:
        CourseError: They differ from the course.
    """
    settings = read_settings(course)
    for folder in ("source", "release"):
        path = course / folder / chapter / f"{chapter}.ipynb"
        if path.is_file():
            require_agreement(read(path), chapter, settings, f"{folder}/{chapter}/{path.name}", released=True)


def read(path: Path) -> NotebookNode:
    """Read an instructor's notebook.

    Raises:
        CourseError: It cannot be read.
    """
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise CourseError(f"{path} cannot be read as a notebook: {error}; restore it from a backup") from None
