"""The learner's notebooks: where they are, the released text, and backups."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from autograder.commands.terminal import UsageError
from autograder.progress import hidden_folder
from course.curriculum import home


def back_up(path: Path) -> Path:
    """Copy a file into the folder of backups; return the copy's path."""
    backup = hidden_folder(path) / "backups" / f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S-%f}{path.suffix}"
    backup.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, backup)
    return backup


def find_notebook(chapter: str) -> Path | None:
    """The learner's notebook in the working folder."""
    places = (usual_place(chapter), Path(f"{chapter}.ipynb"))
    return next((place for place in places if place.exists()), None)


def usual_place(chapter: str) -> Path:
    """The place of a chapter's notebook in the working folder."""
    return Path(chapter) / f"{chapter}.ipynb"


def require_notebook(chapter: str, given: Path | None) -> Path:
    """The given notebook, or the learner's.

    Raises:
        UsageError: There is none.
    """
    if given is not None:
        if given.is_dir():
            raise UsageError(f"{given} is a folder; name the notebook in it")
        if not given.is_file():
            raise UsageError(f"there is no notebook {given}")
        return given
    path = find_notebook(chapter)
    if path is None:
        raise UsageError(
            f"there is no {chapter}/{chapter}.ipynb here; `meshcraft start {chapter}` makes it, "
            "`--notebook FILE` names another one"
        )
    return path


def exercise_text(chapter: str) -> str:
    """The released exercise: the committed one, else built from the solution."""
    committed = home(chapter) / "exercises" / chapter / f"{chapter}.ipynb"
    if committed.exists():
        return committed.read_text(encoding="utf-8")
    from autograder.release.notebook import exercise_text as built

    return built(chapter)


def with_stub(path: Path, chapter: str, function: str) -> str:
    """The text of a notebook in which one function is the released stub again.

    Raises:
        UsageError: The exercise has no such function, or the notebook cannot be read or has lost its cell.
    """
    import nbformat

    from autograder.release.converters import grade_id_of, notebook_text

    def cell_of(notebook: Any) -> Any:
        return next((cell for cell in notebook.cells if grade_id_of(cell) == function), None)

    stub = cell_of(nbformat.reads(exercise_text(chapter), as_version=4))
    if stub is None:
        raise UsageError(f"{chapter} has no function {function!r}")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:
        raise UsageError(
            f"{path} is not a notebook ({error}); reset the whole notebook: meshcraft reset {chapter}"
        ) from None
    cell = cell_of(notebook)
    if cell is None:
        raise UsageError(f"{path} has lost the cell of {function}; reset the whole notebook: meshcraft reset {chapter}")
    cell.source = stub.source
    return notebook_text(notebook)
