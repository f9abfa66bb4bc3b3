"""Solution module to nbgrader source notebook to exercise. nbgrader alone strips the solutions."""

from __future__ import annotations

import ast
import difflib
import hashlib
import logging
import os
import re
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from traitlets.config import Config

from course.curriculum import PRIMER

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
QUESTION = "question"
CHECK_IMPORT = "from autograder.check import check"
# Where a page includes a part of a source: no concern of a notebook's reader.
PAGE_MARK = re.compile(r"^[ \t]*# --8<-- \[(?:start|end):.*\n?", re.MULTILINE)
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class BuildError(Exception):
    """A solution module that breaks a rule; the message names file, line, what was found and what to do."""


class NbgraderError(Exception):
    """nbgrader could not do what it was asked; the message holds what it logged."""


@dataclass(frozen=True)
class Cell:
    """A cell of a solution module; ``where`` is its ``file:line``."""

    kind: str
    source: str
    where: str


def build(chapters: list[str], *, root: Path = ROOT) -> list[Path]:
    """Write ``exercises/<chapter>/<chapter>.ipynb`` for each chapter; a second build changes no byte.

    Raises:
        BuildError: a solution module breaks a rule.
    """
    written = []
    for chapter in chapters:
        text = exercise_text(chapter, root=root)
        path = root / "exercises" / chapter / f"{chapter}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def stale(chapter: str, *, root: Path = ROOT) -> str:
    """What a build would change in the committed exercise, as a diff; empty if nothing."""
    path = root / "exercises" / chapter / f"{chapter}.ipynb"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = exercise_text(chapter, root=root)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "committed", "built", lineterm="", n=1)
    return "\n".join(lines)


def exercise_text(chapter: str, *, root: Path = ROOT) -> str:
    """The exercise as the text of a notebook file, stripped by nbgrader's ``generate_assignment``."""
    from nbgrader.converters import GenerateAssignment

    with tempfile.TemporaryDirectory(prefix="meshcraft-build-") as folder:
        course = Path(folder).resolve()
        write_notebook(source_notebook(chapter, root=root), course / "source" / chapter / f"{chapter}.ipynb")
        config = course_config(course, chapter)
        config.GenerateAssignment.no_database = True
        steps = GenerateAssignment().preprocessors
        config.GenerateAssignment.preprocessors = [step for step in steps if step.__name__ != "SaveCells"]
        run_nbgrader(GenerateAssignment, config)
        notebook = nbformat.read(course / "release" / chapter / f"{chapter}.ipynb", as_version=4)
    return notebook_text(notebook)


def source_notebook(chapter: str, *, root: Path = ROOT) -> NotebookNode:
    """The chapter as nbgrader's source notebook: with solutions, check cells and points. The primer has none of these.

    Raises:
        BuildError: the solution module breaks a rule.
    """
    from autograder.contract import task as contract

    path = root / "solutions" / f"{chapter}.py"
    if chapter == PRIMER.name:
        return _as_notebook(_story(path))
    agreed = contract.load(chapter)
    points = {task.name: float(task.points) for task in agreed.tasks}
    cells: list[NotebookNode] = []
    found: dict[str, str] = {}
    imported = False
    for cell in _read_cells(path):
        if cell.kind == "markdown":
            cells.append(_markdown(cell, float(agreed.question_points), found))
        elif BEGIN in cell.source:
            name = _solution_name(cell, points, found)
            cells += [_solution(name, cell.source), _check(name, points[name])]
        else:
            source = _bare(cell)
            if not imported:
                source, imported = f"{source}\n\n{CHECK_IMPORT}", True
            cells.append(new_code_cell(source))
    _require_complete(path, points, found)
    return _as_notebook(cells)


def _as_notebook(cells: list[NotebookNode]) -> NotebookNode:
    _stamp_ids(cells)
    return new_notebook(cells=cells, metadata={"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}})


def notebook_text(notebook: NotebookNode) -> str:
    """The notebook as the text of its file, the same for equal notebooks."""
    return nbformat.writes(notebook, indent=1, sort_keys=True) + "\n"


def write_notebook(notebook: NotebookNode, path: Path) -> Path:
    """Write the notebook, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(notebook_text(notebook), encoding="utf-8")
    return path


def course_config(course: Path, assignment: str, student: str = "") -> Config:
    """nbgrader's configuration for one assignment, from here and not from the working directory."""
    config = Config()
    config.CourseDirectory.root = str(course.resolve())
    config.CourseDirectory.db_url = gradebook_url(course.resolve())
    config.CourseDirectory.assignment_id = assignment
    if student:
        config.CourseDirectory.student_id = student
    return config


def gradebook_url(course: Path) -> str:
    """The address of the course's gradebook, whatever characters are in the folder's name."""
    from sqlalchemy import URL

    return URL.create("sqlite", database=str(course / "gradebook.db")).render_as_string()


def run_nbgrader(converter: type, config: Config) -> None:
    """Run one of nbgrader's converters, quietly.

    Raises:
        NbgraderError: it failed; the message holds what it logged.
    """
    from nbgrader.coursedir import CourseDirectory

    records: list[str] = []
    with nbgrader_quiet(records):
        try:
            named = type(converter.__name__, (_Named, converter), {})
            named(coursedir=CourseDirectory(config=config), config=config).start()  # type: ignore[call-arg]
        except Exception as error:
            # The last line that names an exception; what follows it may be a pointer to documentation.
            named = [re.findall(r"^[\w.]*(?:Error|Exception|Exit)\b.*", record, re.MULTILINE) for record in records]
            said = [lines[-1] for lines in named if lines]
            raise NbgraderError("; ".join(said or [*records, f"{type(error).__name__}: {error}"])) from error


class _Named:
    """Finds the notebooks of one student and assignment by name; nbgrader takes the whole path for a pattern."""

    def init_notebooks(self: Any) -> None:
        folder = self._format_source(self.coursedir.assignment_id, self.coursedir.student_id)
        found = sorted(str(path) for path in Path(folder).glob("*.ipynb"))
        if not found:
            raise FileNotFoundError(f"there is no notebook in {folder}")
        self.assignments, self.notebooks = {folder: [os.path.join(folder, os.path.basename(f)) for f in found]}, []


class _Collector(logging.Handler):
    """Keeps the messages of errors."""

    def __init__(self, messages: list[str]):
        super().__init__(logging.ERROR)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def nbgrader_quiet(records: list[str] | None = None):
    """Run nbgrader's code: errors it logs go to ``records``, its warnings nowhere.

    Making a gradebook calls the program ``alembic``, which lies beside this Python but perhaps not on the path.
    """
    collector = _Collector(records if records is not None else [])
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
            yield
    finally:
        os.environ["PATH"] = path
        for log, (level, propagate, handlers) in zip(loggers, before, strict=True):
            log.handlers, log.propagate = handlers, propagate
            log.setLevel(level)


def _read_cells(path: Path) -> list[Cell]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(f"{path} does not exist: a chapter's solution module has the chapter's name") from None
    starts = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"# %%( |$)", line)]
    cells = jupytext.reads(text, fmt="py:percent").cells
    if len(starts) != len(cells):
        raise BuildError(f"{path}: every cell must begin with '# %%'; {len(starts)} do, of {len(cells)}")
    return [
        Cell(cell.cell_type, PAGE_MARK.sub("", cell.source).strip("\n"), f"{path}:{line}")
        for cell, line in zip(cells, starts, strict=True)
    ]


def _story(path: Path) -> list[NotebookNode]:
    """The cells of a notebook that asks for nothing: nothing to strip, nothing to check."""
    cells = _read_cells(path)
    asking = next((cell for cell in cells if BEGIN in cell.source), None)
    if asking:
        raise BuildError(
            f"{asking.where}: found '{BEGIN}', and {path.stem} asks for nothing; that belongs in a chapter"
        )
    made = {"markdown": lambda cell: new_markdown_cell(cell.source), "code": lambda cell: new_code_cell(_bare(cell))}
    return [made[cell.kind](cell) for cell in cells]


def _markdown(cell: Cell, points: float, found: dict[str, str]) -> NotebookNode:
    if BEGIN not in cell.source:
        return new_markdown_cell(cell.source)
    _require_region(cell)
    if QUESTION in found:
        raise BuildError(f"{cell.where}: a second question; the first is at {found[QUESTION]}; a chapter has one")
    found[QUESTION] = cell.where
    return new_markdown_cell(cell.source, metadata={"nbgrader": _roles(QUESTION, "markdown", points, solution=True)})


def _solution_name(cell: Cell, points: dict[str, float], found: dict[str, str]) -> str:
    _require_region(cell)
    body = _parse(cell).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    if len(body) != 1 or len(names) != 1:
        listed = f"found the functions {', '.join(names)}" if names else "found no function"
        other = len(body) - len(names)
        listed += f" and {other} other statement(s)" if other else ""
        raise BuildError(f"{cell.where}: a solution cell defines exactly one function, {listed}; split the cell")
    name = names[0]
    if name not in points:
        known = ", ".join(points) or "none"
        raise BuildError(
            f"{cell.where}: no task of the contract is called {name!r} (it has: {known}); add one, or rename"
        )
    if name in found:
        raise BuildError(f"{cell.where}: {name} has a solution cell already, at {found[name]}; remove one of them")
    found[name] = cell.where
    return name


def _require_region(cell: Cell) -> None:
    begins, ends = cell.source.count(BEGIN), cell.source.count(END)
    if begins != 1 or ends != 1 or cell.source.index(BEGIN) > cell.source.index(END):
        raise BuildError(
            f"{cell.where}: found {begins} '{BEGIN}' and {ends} '{END}'; a cell has one of each, in this order"
        )


def _require_complete(path: Path, points: dict[str, float], found: dict[str, str]) -> None:
    missing = [name for name in points if name not in found]
    if missing:
        raise BuildError(
            f"{path}: no solution cell for the contract's {', '.join(missing)}; write one, or drop the task"
        )
    if QUESTION not in found:
        raise BuildError(f"{path}: no question: a markdown cell with '{BEGIN}' around the answer, one a chapter")


def _parse(cell: Cell) -> ast.Module:
    try:
        return ast.parse(cell.source)
    except SyntaxError as error:
        raise BuildError(f"{cell.where}: the cell is not Python: {error.msg} in its line {error.lineno}") from None


def _bare(cell: Cell) -> str:
    """The cell's source; of a lab cell the body of its ``if __name__ == "__main__":``."""
    body = _parse(cell).body
    guards = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    if not guards:
        return cell.source
    guard = guards[0]
    if len(body) != 1 or guard.orelse:
        raise BuildError(
            f'{cell.where}: a lab cell is one `if __name__ == "__main__":` and nothing beside it; split it'
        )
    first, *rest = cell.source[cell.source.index("if __name__") :].split("\n")
    source = textwrap.dedent("\n".join(rest)).strip("\n")
    try:
        same = first.rstrip().endswith(":") and ast.dump(ast.parse(source)) == ast.dump(ast.Module(guard.body, []))
    except SyntaxError:
        same = False
    if not same:
        raise BuildError(f"{cell.where}: the lab's body changes when dedented; use no strings over several lines in it")
    return source


def _solution(name: str, source: str) -> NotebookNode:
    return new_code_cell(source, metadata={"nbgrader": _roles(name, "code", solution=True)})


def _check(name: str, points: float) -> NotebookNode:
    return new_code_cell(f"check({name})", metadata={"nbgrader": _roles(f"check-{name}", "code", points)})


def _roles(grade_id: str, kind: str, points: float | None = None, *, solution: bool = False) -> dict[str, object]:
    roles: dict[str, object] = {
        "grade": points is not None,
        "grade_id": grade_id,
        "locked": not solution,
        "schema_version": 3,
        "solution": solution,
        "task": False,
        "cell_type": kind,
    }
    return roles if points is None else {**roles, "points": points}


def _stamp_ids(cells: list[NotebookNode]) -> None:
    """Ids that stay the same from build to build: the grade id, else the first function in the cell, else a hash.

    Messages name a line by its cell's id, and it may be the line of a function that the notebook gives.
    """
    graded = [cell.metadata.get("nbgrader", {}).get("grade_id", "") for cell in cells]
    seen: Counter[str] = Counter()
    for cell, grade_id in zip(cells, graded, strict=True):
        first = re.search(r"^def (\w+)", cell.source, re.MULTILINE) if cell.cell_type == "code" else None
        name = grade_id or (first[1] if first and first[1] not in graded else "")
        if not name:
            name = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[name] += 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"
