"""Read a notebook, as submitted by a learner, into named cells. Nothing in it is run or parsed as Python here."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_BYTES = 8 * 2**20
MAX_CELLS = 10_000
MAX_CODE_CELLS = 1000
MAX_SOURCE = 2**20
CODE, PROSE = "code", "markdown"


class IntakeError(Exception):
    """The notebook cannot be read; the message gives the cause and the remedy."""


class DamagedError(IntakeError):
    """The file is not a notebook at all: empty, cut off, or in another encoding or format."""


@dataclass(frozen=True)
class Cell:
    """A cell. ``id`` is its ``grade_id`` if it has one, else the notebook's own id; anything but code is prose."""

    id: str
    source: str
    grade_id: str = ""
    kind: str = CODE


@dataclass(frozen=True)
class Notebook:
    """A notebook: grading and manual review both use ``everything``.

    Attributes:
        everything: All its cells.
        digest: A hash of the whole file.
    """

    everything: tuple[Cell, ...]
    digest: str

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The code cells, which are graded."""
        return tuple(cell for cell in self.everything if cell.kind == CODE)

    def line(self, name: str, number: int) -> str:
        """The text of a line of the only code cell with that name; empty if there is none, or several."""
        sources = [cell.source.split("\n") for cell in self.cells if cell.id == name]
        return sources[0][number - 1] if len(sources) == 1 and 0 < number <= len(sources[0]) else ""


def read_notebook(path: Path) -> Notebook:
    """The notebook at ``path``.

    Raises:
        IntakeError: There is no file, it is not a notebook, or it is too large.
    """
    try:
        if path.is_symlink():
            raise IntakeError(f"{path} is a link; submit the notebook itself")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise IntakeError(f"{path} cannot be read: {error.strerror or error}") from None
    return parse_notebook(str(path), data)


def parse_notebook(name: str, data: bytes) -> Notebook:
    """Parse the notebook in ``data``; ``name`` identifies it in messages.

    Raises:
        IntakeError: It is not a notebook, or it is too large.
    """
    if len(data) > MAX_BYTES:
        raise IntakeError(
            f"{name} is too large: at most {MAX_BYTES:,} bytes are allowed; clear its outputs and try again"
        )
    if not data.strip():
        raise DamagedError(f"{name} is empty: it has no cells. Open and save it in JupyterLab")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        # Content nested or written beyond any parser's limits is not an accident of an upload.
        kind = DamagedError if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else IntakeError
        raise kind(f"{name} is not a notebook: it is not JSON ({error}). Open and save it in JupyterLab") from None
    return Notebook(_cells(name, content), hashlib.sha256(data).hexdigest())


def _cells(path: str, content: Any) -> tuple[Cell, ...]:
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list):
        raise DamagedError(
            f"{path} is not a notebook of format 4: it has no list of cells. Save it again in JupyterLab"
        )
    parsed = tuple(_cell(path, number, cell) for number, cell in enumerate(cells[: MAX_CELLS + 1], 1))
    code = [cell for cell in parsed if cell.kind == CODE]
    for kind, count, most in (("cells", len(cells), MAX_CELLS), ("code cells", len(code), MAX_CODE_CELLS)):
        if count > most:
            raise IntakeError(f"{path} has {count:,} {kind} and at most {most:,} are allowed")
    if sum(len(json.dumps(cell.source)) for cell in code) > MAX_SOURCE:
        raise IntakeError(f"{path} has more code than the {MAX_SOURCE:,} bytes that are allowed")
    return parsed


def _cell(path: str, number: int, cell: Any) -> Cell:
    if not isinstance(cell, dict):
        raise IntakeError(f"{path}: cell {number} is not a cell")
    source = cell.get("source", "")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        source = "".join(source)
    if not isinstance(source, str):
        raise IntakeError(f"{path}: the source of cell {number} is not text")
    kind = CODE if cell.get("cell_type") == CODE else PROSE
    grade_id = _grade_id(cell)
    return Cell(_clean(grade_id or cell.get("id")) or f"cell-{number}", whole(source), grade_id, kind)


def whole(text: str) -> str:
    """Replace lone surrogates, which no file can hold."""
    return text.encode(errors="replace").decode()


def _grade_id(cell: dict[str, Any]) -> str:
    metadata = cell.get("metadata")
    nbgrader = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    name = nbgrader.get("grade_id") if isinstance(nbgrader, dict) else None
    return whole(name) if isinstance(name, str) else ""


def _clean(name: Any) -> str:
    """Replace odd characters in the name; empty if it is not text."""
    if not isinstance(name, str):
        return ""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in whole(name))[:80]
