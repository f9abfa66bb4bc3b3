"""nbgrader's view of a submission: the released notebook with the student's sources, and nothing else."""

import re
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

from nbformat import NotebookNode, from_dict
from nbformat.v4 import new_notebook
from nbgrader import utils

from autograder.grading.inside.intake import CODE, PROSE, Cell, Notebook
from autograder.release.converters import grade_id_of

SECRET = re.compile("[0-9a-f]{128}")
UNREADABLE = "The submitted file could not be read as a notebook."


def unreadable() -> Notebook:
    """A stand-in for a submission that intake refused."""
    return Notebook((Cell("", UNREADABLE, kind=PROSE),), "")


def restore(release: NotebookNode, submitted: Notebook) -> NotebookNode:
    """The released notebook with the student's sources, as seen by nbgrader and by reviewers.

    Every graded cell is in it. Cells are identified by grade id and kind; the last of several with the same id
    counts. An answer whose cell has lost its grade id is found by the cell's own id, or by its place after the
    question; one that is not found is marked for a person (``is_missing``). A released check cell is always the
    released version, preceded by the student's version of it, and a missing one is restored. The student's other
    cells stay, without metadata.
    """
    graded = [cell for cell in release.cells if "nbgrader" in cell.metadata]
    released_cells = {(cell.metadata.nbgrader.grade_id, cell.cell_type): cell for cell in graded}
    plain = {cell.source for cell in release.cells if "nbgrader" not in cell.metadata}
    last = {(cell.grade_id, cell.kind): number for number, cell in enumerate(submitted.everything)}
    recovered_answers = {
        number: which
        for which in released_cells
        if which not in last
        if (number := _lost(release, submitted, which)) is not None
    }
    last |= {which: number for number, which in recovered_answers.items()}
    cells: list[NotebookNode] = []
    for number, cell in enumerate(submitted.everything):
        which = recovered_answers.get(number, (cell.grade_id, cell.kind))
        released = deepcopy(released_cells[which]) if which in released_cells and last[which] == number else None
        if released is not None and utils.is_solution(released):
            released.source = cell.source
        if released is None or released.source != cell.source:
            cells.append(_cell(cell.kind, cell.source, cell.id, released=cell.source in plain))
        if released is not None:
            same = released.source == cell.source
            released.metadata["meshcraft"] = {"name": cell.id if same else "", "released": False}
            released.metadata["meshcraft"] |= _question(release, released)
            cells.append(released)
    cells += [
        _absent(release, cell) for which, cell in released_cells.items() if which not in last and utils.is_grade(cell)
    ]
    for number, cell in enumerate(cells, 1):
        cell.id = f"cell-{number}"
    return new_notebook(cells=cells, metadata=deepcopy(release.metadata))


def is_missing(cell: NotebookNode) -> bool:
    """Return True if a student's answer has no cell in the submission."""
    return bool(cell.metadata.get("meshcraft", {}).get("missing"))


def _absent(release: NotebookNode, cell: NotebookNode) -> NotebookNode:
    """A copy of a released cell that is not in the submission."""
    copy = deepcopy(cell)
    if utils.is_solution(copy):
        copy.metadata["meshcraft"] = {"name": "", "released": False, "missing": True, **_question(release, copy)}
    return copy


def _question(release: NotebookNode, answer: NotebookNode) -> dict[str, str]:
    """The text of the question above a written answer, for the feedback page."""
    if answer.cell_type != PROSE or not utils.is_grade(answer):
        return {}
    at = next(
        n for n, cell in enumerate(release.cells) if cell.get("metadata") and grade_id_of(cell) == grade_id_of(answer)
    )
    above = release.cells[at - 1] if at else answer
    return {"question": above.source} if above.cell_type == PROSE and not grade_id_of(above) else {}


def _lost(release: NotebookNode, submitted: Notebook, which: tuple[str, str]) -> int | None:
    """The place of an answer whose cell no longer has a grade id; None if it cannot be determined."""
    at = next(n for n, cell in enumerate(release.cells) if grade_id_of(cell) == which[0])
    if not (utils.is_solution(release.cells[at]) and utils.is_grade(release.cells[at])):
        return None
    candidates = [cell.kind == which[1] and not cell.grade_id for cell in submitted.everything]
    own = [n for n, cell in enumerate(submitted.everything) if candidates[n] and cell.id == which[0]]
    if own:
        return own[-1]
    question = _words(release.cells[at - 1].source) if at else ""
    released_texts = {_words(cell.source) for cell in release.cells} - {_words(release.cells[at].source)}
    for n, cell in enumerate(submitted.everything):
        text = _words(cell.source)
        if question and candidates[n] and text.startswith(question) and text != question:
            return n  # the answer was written into the question's own cell
        if question and text == question and n + 1 < len(candidates) and candidates[n + 1]:
            return n + 1 if _words(submitted.everything[n + 1].source) not in released_texts else None
    return None


def _words(text: str) -> str:
    return " ".join(text.split())


def _cell(kind: str, source: str, name: str, *, released: bool = False) -> NotebookNode:
    """A cell whose only metadata is the name verdicts use for it; not validated, since it is valid by construction."""
    code = {"outputs": [], "execution_count": None} if kind == CODE else {}
    metadata = {"meshcraft": {"name": name, "released": released}}
    cell: Any = from_dict({"cell_type": kind, "id": "cell", "metadata": metadata, "source": source, **code})
    return cell


def exchange_files(folder: Path) -> dict[str, str]:
    """Read the time and the secret that nbgrader's exchange puts next to a notebook, if they look genuine.

    The student could write to both files, so nothing else is passed on.
    """
    result = {}
    for name, is_fine in (("timestamp.txt", _is_time), ("submission_secret.txt", SECRET.fullmatch)):
        path = folder / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 200:
            text = path.read_bytes().decode(errors="replace").strip()
            if is_fine(text):
                result[name] = text
    return result


def _is_time(text: str) -> bool:
    try:
        return isinstance(utils.parse_utc(text), datetime)
    except (ValueError, OverflowError):
        return False
