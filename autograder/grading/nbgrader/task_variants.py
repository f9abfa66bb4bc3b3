"""The variants of a course: drawn from its secret when a chapter is released, then kept in its settings.

The released notebook states each one before its function, and passes it to ``check``. Official grading uses the
settings and never the submission.
"""

import hmac
import json
from collections.abc import Mapping
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from autograder.contract.task import load
from autograder.grading.inside.intake import Cell, IntakeError, read_notebook
from autograder.grading.nbgrader.settings import CourseError, read_settings
from autograder.grading.outside.notebook_options import requested_limits, requested_variants
from autograder.release.converters import CHECK, grade_id_of

MARK, LIMIT_MARK = "variant-", "limits-"


def choose(secret: bytes, chapter: str) -> dict[str, str]:
    """The variant of each function that has some, derived from the course's secret."""
    result = {}
    for task in load(chapter).tasks:
        if task.variants:
            label = f"variant|{chapter}|{task.varies_with or task.name}"
            number = int.from_bytes(hmac.digest(secret, label.encode(), "sha256")[:8], "big")
            result[task.name] = task.variants[number % len(task.variants)].name
    return result


def requested_by(course: Path, chapter: str) -> dict[str, str]:
    """The course's variants, by function.

    Raises:
        CourseError: The settings name an unknown variant, or the released notebook differs.
    """
    requested = requested_in(read_settings(course).variants, chapter)
    try:
        for name, variant in requested.items():
            load(chapter).task(name).variant(variant)
    except LookupError as error:
        raise CourseError(f"{course / 'course.toml'}: {error}") from None
    released = course / "release" / chapter / f"{chapter}.ipynb"
    try:
        in_release = requested_variants(read_notebook(released).cells) if released.is_file() else requested
    except IntakeError as error:
        raise CourseError(f"the released notebook cannot be read: {error}") from None
    if in_release != requested:
        raise CourseError(
            f"{released} asks for {in_release or 'no variants'} and course.toml for {requested or 'none'}; students "
            f"are judged on what they were told: `meshcraft init {course}` makes them agree, or restore course.toml"
        )
    return requested


def requested_in(variants: Mapping[str, str], chapter: str) -> dict[str, str]:
    """A chapter's part of the settings' variants, by function."""
    parts = [(name.partition("."), variant) for name, variant in variants.items()]
    return {function: variant for (where, _, function), variant in sorted(parts) if where == chapter and variant}


def state(
    notebook: NotebookNode,
    chapter: str,
    requested: Mapping[str, str],
    limits: Mapping[str, Mapping[str, float]] | None = None,
) -> bool:
    """Make a source notebook ask for exactly these variants and limits; return True if that changes it."""
    limits = limits or {}
    before = [(cell.get("id"), cell.source) for cell in notebook.cells]
    cells = []
    for cell in notebook.cells:
        name = grade_id_of(cell)
        if str(cell.get("id", "")).startswith((MARK, LIMIT_MARK)):
            continue
        if name in requested:
            variant = load(chapter).task(name).variant(requested[name])
            assert variant
            cells.append(new_markdown_cell(f"**In this course:** {variant.sentence}", id=f"{MARK}{name}"[:64]))
        if name in limits:
            text = "; ".join(f"“{fact}” {factor:g} times" for fact, factor in limits[name].items())
            text = f"**In this course** these limits differ from those stated above: {text} as large."
            cells.append(new_markdown_cell(text, id=f"{LIMIT_MARK}{name}"[:64]))
        checked = name.removeprefix(CHECK)
        if name.startswith(CHECK):
            argument = f', variant="{requested[checked]}"' if checked in requested else ""
            argument += f", limits={json.dumps(limits[checked])}" if checked in limits else ""
            if argument or requested_variants([Cell(name, cell.source)]) or requested_limits([Cell(name, cell.source)]):
                cell.source = f"check({checked}{argument})"
        cells.append(cell)
    notebook.cells = cells
    return [(cell.get("id"), cell.source) for cell in cells] != before
