"""nbgrader's converters: their configuration, quiet execution, and the text of the notebooks they read."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from traitlets.config import Config

from course.files import write_atomically

CHECK = "check-"  # prefix of the grade id of a function's check cell


class NbgraderError(Exception):
    """nbgrader failed; the message holds its log."""


def notebook_text(notebook: NotebookNode) -> str:
    """The notebook's file contents, identical for equal notebooks."""
    return nbformat.writes(notebook, indent=1, sort_keys=True) + "\n"


def grade_id_of(cell: NotebookNode) -> str:
    """The cell's grade id; empty if it has none."""
    return cell.metadata.get("nbgrader", {}).get("grade_id", "")


def write_notebook(notebook: NotebookNode, path: Path) -> Path:
    """Write the notebook, creating its folder."""
    write_atomically(path, notebook_text(notebook))
    return path


def course_config(course: Path, assignment: str, student: str = "") -> Config:
    """nbgrader's configuration for one assignment, from here rather than from the working directory."""
    config = Config()
    config.CourseDirectory.root = str(course.resolve())
    config.CourseDirectory.db_url = gradebook_url(course.resolve())
    config.CourseDirectory.assignment_id = assignment
    if student:
        config.CourseDirectory.student_id = student
    return config


def gradebook_url(course: Path) -> str:
    """The database URL of the course's gradebook, for any characters in the folder's name."""
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(course / "gradebook.db")).render_as_string()


def run_nbgrader(converter: type, config: Config) -> None:
    """Run one of nbgrader's converters, quietly.

    Raises:
        NbgraderError: It failed; the message holds its log.
    """
    from nbgrader.coursedir import CourseDirectory

    with nbgrader_quiet() as records:
        try:
            named = type(converter.__name__, (_Named, converter), {})
            named(coursedir=CourseDirectory(config=config), config=config).start()  # type: ignore[call-arg]
        except Exception as error:
            # The last line that names an exception; anything after it may be a pointer to documentation.
            logged = [record.getMessage() for record in records]
            named = [re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b.*", text, re.MULTILINE) for text in logged]
            errors = [lines[-1] for lines in named if lines]
            raise NbgraderError("; ".join(errors or [*logged, f"{type(error).__name__}: {error}"])) from error


class _Named:
    """Find the notebooks of one student and assignment by name; nbgrader treats the whole path as a pattern."""

    def init_notebooks(self: Any) -> None:
        folder = self._format_source(self.coursedir.assignment_id, self.coursedir.student_id)
        paths = sorted(str(path) for path in Path(folder).glob("*.ipynb"))
        if not paths:
            raise FileNotFoundError(f"there is no notebook in {folder}")
        self.assignments, self.notebooks = {folder: [os.path.join(folder, os.path.basename(f)) for f in paths]}, []


@contextmanager
def nbgrader_quiet() -> Iterator[list[logging.LogRecord]]:
    """Run nbgrader's code: collect the errors it logs, drop its warnings.

    Making a gradebook calls the program ``alembic``, which is next to this Python but may not be on the path.
    """
    collector = BufferingHandler(sys.maxsize)
    collector.setLevel(logging.ERROR)
    loggers = [logging.getLogger(name) for name in ("traitlets", "tornado.application")]
    before = [(log.level, log.propagate, log.handlers[:]) for log in loggers]
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join(filter(None, [str(Path(sys.executable).parent), path]))
    for log in loggers:
        log.handlers, log.propagate = [collector], False
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield collector.buffer
    finally:
        os.environ["PATH"] = path
        for log, (level, propagate, handlers) in zip(loggers, before, strict=True):
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)
