"""Reading a notebook: what a learner handed in, as cells with names. Nothing in it is run or parsed as Python here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES = 8 * 2**20
MAX_CELLS = 1000
MAX_SOURCE = 2**20


class IntakeError(Exception):
    """The notebook cannot be read; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class Cell:
    """A code cell. ``id`` is its ``grade_id`` where it has one, else the notebook's own id."""

    id: str
    source: str


@dataclass(frozen=True)
class Notebook:
    """The code cells of a notebook, and a hash of the whole file."""

    cells: tuple[Cell, ...]
    digest: str


def read_notebook(path: Path) -> Notebook:
    """The notebook at ``path``.

    Raises:
        IntakeError: There is no file, it is not a notebook, or it is too large.
    """
    try:
        if path.is_symlink():
            raise IntakeError(f"{path} is a link; hand in the notebook itself")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise IntakeError(f"{path} cannot be read: {error.strerror or error}") from None
    return parse_notebook(str(path), data)


def parse_notebook(name: str, data: bytes) -> Notebook:
    """The notebook in ``data``; ``name`` is what messages call it.

    Raises:
        IntakeError: It is not a notebook, or it is too large.
    """
    if len(data) > MAX_BYTES:
        raise IntakeError(
            f"{name} is too large: at most {MAX_BYTES:,} bytes are allowed; clear its outputs and try again"
        )
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntakeError(
            f"{name} is not a notebook: it is not JSON ({error}). Open and save it in JupyterLab"
        ) from None
    return Notebook(_cells(name, content), hashlib.sha256(data).hexdigest())


def _cells(path: str, content: Any) -> tuple[Cell, ...]:
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise IntakeError(f"{path} is not a notebook of format 4: it has no list of cells. Save it again in JupyterLab")
    if len(cells) > MAX_CELLS:
        raise IntakeError(f"{path} has {len(cells):,} cells and at most {MAX_CELLS:,} are allowed")
    found = []
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict):
            raise IntakeError(f"{path}: cell {number} is not a cell")
        if cell.get("cell_type") != "code":
            continue
        source = cell.get("source", "")
        if isinstance(source, list) and all(isinstance(line, str) for line in source):
            source = "".join(source)
        if not isinstance(source, str):
            raise IntakeError(f"{path}: the source of cell {number} is not text")
        found.append(Cell(cell_name(cell, number), whole(source)))
    if sum(len(json.dumps(cell.source)) for cell in found) > MAX_SOURCE:
        raise IntakeError(f"{path} has more code than the {MAX_SOURCE:,} bytes that are allowed")
    return tuple(found)


def whole(text: str) -> str:
    """The text without halves of characters, which no file can hold."""
    return text.encode(errors="replace").decode()


def cell_name(cell: dict[str, Any], number: int) -> str:
    """The cell's ``grade_id`` or id, with odd characters replaced."""
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    name = nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None
    name = name or cell.get("id") or f"cell-{number}"
    clean = "".join(c if c.isalnum() or c in "-_" else "_" for c in whole(str(name)))[:80]
    return clean or f"cell-{number}"
