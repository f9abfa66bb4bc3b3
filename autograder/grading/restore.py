"""What nbgrader gets to see of a submission: the released notebook with the student's sources, and nothing else."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbgrader import utils

from autograder.grading.intake import cell_name, whole

SECRET = re.compile("[0-9a-f]{128}")
UNREADABLE = "The file that was handed in could not be read as a notebook."


def readable(submission: Path | None) -> NotebookNode:
    """What can be read of a submission: code and text, sources only."""
    try:
        if submission is None:
            raise ValueError("no notebook")
        return sources_only(json.loads(submission.read_bytes())["cells"])
    except Exception:
        return new_notebook(cells=[new_markdown_cell(UNREADABLE, id="unreadable")])


def sources_only(cells: list[dict[str, Any]]) -> NotebookNode:
    """The cells with their sources, grade ids and the names that verdicts call them by, and nothing else."""
    kept = []
    for number, cell in enumerate(cells, 1):
        make = new_code_cell if cell.get("cell_type") == "code" else new_markdown_cell
        source = cell.get("source", "")
        made = make(whole(source if isinstance(source, str) else "".join(map(str, source))), id=f"cell-{number}")
        metadata = cell.get("metadata") or {}
        staged = (metadata.get("meshcraft") or {}).get("name")
        made.metadata["meshcraft"] = {"name": staged if isinstance(staged, str) else cell_name(cell, number)}
        roles = metadata.get("nbgrader") or {}
        if isinstance(roles.get("grade_id"), str):
            made.metadata["nbgrader"] = {"grade_id": roles["grade_id"]}
        kept.append(made)
    return new_notebook(cells=kept)


def restore(release: NotebookNode, submitted: NotebookNode) -> NotebookNode:
    """The released notebook with the student's sources: what nbgrader gets to see of a submission.

    Cells are known by grade id; of several with the same id the last counts. A released check cell is always the
    released one, and one that is missing is put back. Other cells of the student's stay, without metadata.
    """
    known = {cell.metadata.nbgrader.grade_id: cell for cell in release.cells if "nbgrader" in cell.metadata}
    plain = {cell.source for cell in release.cells if "nbgrader" not in cell.metadata}
    last = {grade_id(cell): number for number, cell in enumerate(submitted.cells)}
    cells: list[NotebookNode] = []
    for number, cell in enumerate(submitted.cells):
        name = grade_id(cell)
        shown = {"name": cell.metadata.meshcraft.name, "released": cell.source in plain}
        if name in known and last[name] == number:
            kept = deepcopy(known[name])
            if utils.is_solution(kept):
                kept.source = cell.source
        else:
            kept = (new_code_cell if cell.cell_type == "code" else new_markdown_cell)(cell.source)
        kept.metadata["meshcraft"] = shown
        cells.append(kept)
    cells += [deepcopy(cell) for name, cell in known.items() if name not in last and utils.is_grade(cell)]
    for number, cell in enumerate(cells, 1):
        cell.id = f"cell-{number}"
    return new_notebook(cells=cells, metadata=deepcopy(release.metadata))


def grade_id(cell: NotebookNode) -> str:
    """The cell's grade id; empty if it has none."""
    return cell.metadata.get("nbgrader", {}).get("grade_id") or ""


def exchange_files(folder: Path) -> dict[str, str]:
    """What nbgrader's exchange has put beside a notebook, where it is what the exchange writes: time and secret.

    The student could write to both, so nothing else is passed on.
    """
    found = {}
    for name, is_fine in (("timestamp.txt", _is_time), ("submission_secret.txt", SECRET.fullmatch)):
        path = folder / name
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 200:
            text = path.read_bytes().decode(errors="replace").strip()
            if is_fine(text):
                found[name] = text
    return found


def _is_time(text: str) -> bool:
    try:
        return isinstance(utils.parse_utc(text), datetime)
    except (ValueError, OverflowError):
        return False
