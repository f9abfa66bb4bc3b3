"""Build a solution module into nbgrader's source notebook, and from it the exercise. Only nbgrader strips solutions."""

import ast
import difflib
import hashlib
import re
import tempfile
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from autograder.contract.text import points_text
from autograder.release.converters import CHECK, course_config, grade_id_of, notebook_text, run_nbgrader, write_notebook
from course.curriculum import NOTEBOOKS, PRIMER, Chapter, home

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
QUESTION = "question"
CHECK_IMPORT = "from autograder.check import check"
# Include markers for pages, which do not belong in a notebook.
PAGE_MARK = re.compile(r"^[ \t]*# --8<-- \[(?:start|end):.*\n?", re.MULTILINE)
# Terms that notebooks do not explain at first use.
GLOSSARY = {
    "leaf": "one array in a tree of arrays, such as the parameters",
    "temporaries": "arrays that live only while the program runs, neither inputs nor results",
    "exposed": "communication during which the device computes nothing, which lengthens the step",
}
# Columns that the tables of ``check`` have if a function has a realistic size.
COMPARED = (
    "*reference*, *naive*: columns in the tables of `check`, for the course's solution and for the straightforward "
    "version that it improves on."
)
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class BuildError(Exception):
    """A solution module breaks a rule; the message names file, line, problem and remedy."""


@dataclass(frozen=True)
class Cell:
    """A cell of a solution module; ``where`` is its ``file:line``."""

    kind: str
    source: str
    where: str


def build(chapters: list[str], *, root: Path | None = None) -> list[Path]:
    """Write ``exercises/<chapter>/<chapter>.ipynb`` for each chapter; a second build changes no byte.

    Raises:
        BuildError: A solution module breaks a rule.
    """
    written = []
    for chapter in chapters:
        text = exercise_text(chapter, root=root)
        path = (root or home(chapter)) / "exercises" / chapter / f"{chapter}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def stale(chapter: str, *, root: Path | None = None) -> str:
    """The diff from the committed exercise to a build; empty if there is none."""
    path = (root or home(chapter)) / "exercises" / chapter / f"{chapter}.ipynb"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    new = exercise_text(chapter, root=root)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), "committed", "built", lineterm="", n=1)
    return "\n".join(lines)


def exercise_text(chapter: str, *, root: Path | None = None) -> str:
    """The exercise's notebook file contents, stripped by nbgrader's ``generate_assignment``."""
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


def source_notebook(chapter: str, *, root: Path | None = None) -> NotebookNode:
    """The chapter as nbgrader's source notebook: with solutions, check cells and points. The primer has none of these.

    Raises:
        BuildError: The solution module breaks a rule.
    """
    from autograder.contract import task as contract

    path = (root or home(chapter)) / "solutions" / f"{chapter}.py"
    if chapter == PRIMER.name:
        return _as_notebook(_introduced(_story(path), PRIMER))
    chapter_contract = contract.load(chapter)
    points = {task.name: float(task.points) for task in chapter_contract.tasks}
    cells: list[NotebookNode] = []
    places: dict[str, str] = {}
    imported = False
    for cell in read_cells(path):
        if cell.kind == "markdown":
            cells.append(_markdown(cell, float(chapter_contract.question_points), places))
        elif BEGIN in cell.source:
            name = _solution_name(cell, points, places)
            cells += [_solution(name, cell.source), _check(name, points[name])]
        else:
            source = _bare(cell)
            if not imported:
                source, imported = f"{source}\n\n{CHECK_IMPORT}", True
            cells.append(new_code_cell(source))
    _require_complete(path, points, places)
    entry = next((entry for entry in NOTEBOOKS if entry.name == chapter), Chapter(chapter, "", ""))
    compared = any(task.at_scale for task in chapter_contract.tasks)
    return _as_notebook(_estimated(_introduced(cells, entry, compared=compared), entry, points, path))


def _introduced(cells: list[NotebookNode], entry: Chapter, *, compared: bool = False) -> list[NotebookNode]:
    """The cells, with the chapter's page, a glossary and the estimated time added to the first."""
    intro = [f"The theory is on the page “{entry.title}”: `meshcraft site {entry.name}` opens it in a browser."]
    intro = [""] if entry.own else intro
    text = "\n".join(cell.source for cell in cells)
    words = [f"*{word}*: {meaning}." for word, meaning in GLOSSARY.items() if re.search(rf"\b{word}\b", text)]
    words += [COMPARED] if compared else []
    if entry.functions:
        intro[0] += " " * (not entry.own) + (
            "Each function says how difficult it is, and how long it may take somebody who has read that page: "
            f"{entry.time_text} in all. These are estimates; nobody has measured them."
        )
        intro += ["\n".join(["Words:", "", *(f"- {word}" for word in words)])] if words else []
        gives = "sets up JAX" if entry.name == "single_device" else "gives this notebook 8 emulated devices"
        intro.append(f"Run the next cell first: it {gives}.")
    cells[0].source = "\n\n".join(filter(None, [cells[0].source, *intro]))
    return cells


def _estimated(cells: list[NotebookNode], entry: Chapter, points: dict[str, float], path: Path) -> list[NotebookNode]:
    """The cells, with difficulty, minutes and points below the heading of each function.

    Raises:
        BuildError: Curriculum and contract name different functions, or one has no heading.
    """
    if entry.title and entry.names != list(points):
        raise BuildError(
            f"{'chapter.toml' if entry.own else 'course/curriculum.py'} lists "
            f"{', '.join(entry.names) or 'no function'} for {entry.name}, and the contract "
            f"{', '.join(points)}: give each a line there, with its minutes and difficulty"
        )
    for function in entry.functions:
        heading = re.compile(rf"^(##+ .*`{function.name}`.*)$", re.MULTILINE)
        cell = next((cell for cell in cells if cell.cell_type == "markdown" and heading.search(cell.source)), None)
        if cell is None:
            raise BuildError(f"{path}: no heading names `{function.name}`; its difficulty and time go below it")
        worth = points_text(points[function.name])
        cell.source = heading.sub(rf"\1\n\n*{function.text.capitalize()}; {worth}.*", cell.source, count=1)
    return cells


def _as_notebook(cells: list[NotebookNode]) -> NotebookNode:
    _stamp_ids(cells)
    return new_notebook(cells=cells, metadata={"kernelspec": dict(KERNELSPEC), "language_info": {"name": "python"}})


def read_cells(path: Path) -> list[Cell]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise BuildError(f"{path} does not exist: a chapter's solution module has the chapter's name") from None
    starts = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"# %%( |$)", line)]
    cells = jupytext.reads(text, fmt="py:percent").cells
    if len(starts) != len(cells):
        raise BuildError(f"{path}: every cell must begin with '# %%'; {len(starts)} do, of {len(cells)}")
    module_cells = [
        Cell(cell.cell_type, PAGE_MARK.sub("", cell.source).strip("\n"), f"{path}:{line}")
        for cell, line in zip(cells, starts, strict=True)
    ]
    for cell in module_cells:
        if "--8<--" in cell.source:
            raise BuildError(f"{cell.where}: a section mark is a line of its own, `# --8<-- [start:NAME]`")
    return module_cells


def _story(path: Path) -> list[NotebookNode]:
    """The cells of a notebook without exercises: nothing to strip, nothing to check."""
    cells = read_cells(path)
    solution_cell = next((cell for cell in cells if BEGIN in cell.source), None)
    if solution_cell:
        raise BuildError(
            f"{solution_cell.where}: found '{BEGIN}', and {path.stem} asks for nothing; that belongs in a chapter"
        )
    builders = {
        "markdown": lambda cell: new_markdown_cell(cell.source),
        "code": lambda cell: new_code_cell(_bare(cell)),
    }
    return [builders[cell.kind](cell) for cell in cells]


def _markdown(cell: Cell, points: float, places: dict[str, str]) -> NotebookNode:
    if BEGIN not in cell.source:
        return new_markdown_cell(cell.source)
    _require_region(cell)
    if QUESTION in places:
        raise BuildError(f"{cell.where}: a second question; the first is at {places[QUESTION]}; a chapter has one")
    places[QUESTION] = cell.where
    return new_markdown_cell(cell.source, metadata={"nbgrader": _roles(QUESTION, "markdown", points, solution=True)})


def _solution_name(cell: Cell, points: dict[str, float], places: dict[str, str]) -> str:
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
    if name in places:
        raise BuildError(f"{cell.where}: {name} has a solution cell already, at {places[name]}; remove one of them")
    places[name] = cell.where
    return name


def _require_region(cell: Cell) -> None:
    begins, ends = cell.source.count(BEGIN), cell.source.count(END)
    if begins != 1 or ends != 1 or cell.source.index(BEGIN) > cell.source.index(END):
        raise BuildError(
            f"{cell.where}: found {begins} '{BEGIN}' and {ends} '{END}'; a cell has one of each, in this order"
        )


def _require_complete(path: Path, points: dict[str, float], places: dict[str, str]) -> None:
    missing = [name for name in points if name not in places]
    if missing:
        raise BuildError(
            f"{path}: no solution cell for the contract's {', '.join(missing)}; write one, or drop the task"
        )
    if QUESTION not in places:
        raise BuildError(f"{path}: no question: a markdown cell with '{BEGIN}' around the answer, one a chapter")


def _parse(cell: Cell) -> ast.Module:
    try:
        return ast.parse(cell.source)
    except SyntaxError as error:
        raise BuildError(f"{cell.where}: the cell is not Python: {error.msg} in its line {error.lineno}") from None


def _bare(cell: Cell) -> str:
    """The cell's source; for a lab cell, the body of its ``if __name__ == "__main__":``."""
    body = _parse(cell).body
    guards = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    if not guards:
        return cell.source
    guard = guards[0]
    if len(body) != 1 or guard.orelse:
        raise BuildError(f'{cell.where}: a lab cell is one `if __name__ == "__main__":` and nothing else; split it')
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
    return new_code_cell(f"check({name})", metadata={"nbgrader": _roles(f"{CHECK}{name}", "code", points)})


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
    """Assign ids that are stable between builds: the grade id, else the first function in the cell, else a hash.

    Messages name a line by its cell's id, and it may be a line of a function that the notebook provides.
    """
    graded = [grade_id_of(cell) for cell in cells]
    seen: Counter[str] = Counter()
    for cell, grade_id in zip(cells, graded, strict=True):
        first = re.search(r"^def (\w+)", cell.source, re.MULTILINE) if cell.cell_type == "code" else None
        name = grade_id or (first[1] if first and first[1] not in graded else "")
        if not name:
            name = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[name] += 1
        cell.id = name if seen[name] == 1 else f"{name}-{seen[name]}"
