"""A learner's saved state, in a folder next to the notebook: progress, hints shown, personal bests."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from autograder.contract.verdict import PASS, Result, Unit
from course.files import write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NONE: Mapping[str, str] = {}
STUB = "raise NotImplementedError()"


class Best(msgspec.Struct, frozen=True):
    """The lowest figure measured for a passing answer, and the reference's; ``unit`` is as displayed."""

    yours: float
    reference: float
    unit: str


class Progress(msgspec.Struct):
    """Progress in a chapter, by function: passed when last judged, number of hints shown, and best figure by fact.

    ``prints`` has fingerprints of the judged code, if ``watch`` judged it; ``cells`` has those of each function's cell.
    """

    passed: dict[str, bool] = {}
    hints: dict[str, int] = {}
    best: dict[str, dict[str, Best]] = {}
    prints: dict[str, str] = {}
    cells: dict[str, str] = {}

    def changed(self, name: str, cells: Mapping[str, str]) -> bool:
        """Return True if a function's cell has changed since it was judged; False if that is not known."""
        return self.cells.get(name) not in (None, _digest(cells.get(name, "")))


def hidden_folder(notebook: Path) -> Path:
    """The folder that holds all saved state of a notebook."""
    return notebook.parent / ".meshcraft"


def recall(notebook: Path, chapter: str) -> Progress:
    """Load the saved progress; empty if it cannot be read."""
    return _recall_all(notebook).get(chapter, Progress())


def remember(notebook: Path, chapter: str, results: Iterable[Result], prints: Mapping[str, str] = NONE) -> None:
    """Save the verdicts, and each figure that beats the previous best."""

    def change(known: Progress) -> None:
        cells = graded_cells(notebook)
        for result in results:
            known.cells[result.name] = _digest(cells.get(result.name, ""))
            known.passed[result.name] = result.verdict == PASS
            ours = known.best.setdefault(result.name, {}) if result.verdict == PASS else {}
            for name, best in bests(result).items():
                ours[name] = min(ours.get(name, best), best, key=lambda entry: entry.yours)
        known.prints.update(prints)

    _update(notebook, chapter, change)


def remember_hint(notebook: Path, chapter: str, function: str, shown: int) -> None:
    """Save the number of hints shown for a function."""
    _update(notebook, chapter, lambda known: known.hints.update({function: shown}))


def forget(notebook: Path, chapter: str, functions: Collection[str]) -> None:
    """Reset functions: drop their verdicts and hints, keep personal bests."""

    def change(known: Progress) -> None:
        for name in functions:
            known.passed.pop(name, None)
            known.cells.pop(name, None)
            known.hints.pop(name, None)

    _update(notebook, chapter, change)


def passing(notebook: Path, chapter: str) -> dict[str, bool]:
    """Return, for each judged function, whether it passes as it is now; one that has changed since does not."""
    known, cells = recall(notebook, chapter), graded_cells(notebook)
    return {name: passed and not known.changed(name, cells) for name, passed in known.passed.items()}


def graded_cells(notebook: Path | str) -> dict[str, str]:
    """The source of each cell that has a grade id, by that id; empty if the file is not a notebook."""
    try:
        text = notebook.read_text(encoding="utf-8") if isinstance(notebook, Path) else notebook
        cells = [
            (cell["metadata"].get("nbgrader", {}).get("grade_id"), cell["source"]) for cell in json.loads(text)["cells"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return {name: "".join(source).strip() for name, source in cells if name}


def is_stub(source: str, name: str) -> bool:
    """Return True if a cell defines this function as a stub, as in every release: it ends with ``STUB``."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    bodies = [node.body for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    return (
        bool(bodies) and ast.unparse(bodies[-1][-1]) == STUB and not any(isinstance(n, ast.Return) for n in bodies[-1])
    )


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def next_function(names: Iterable[str], passed: Mapping[str, bool]) -> str:
    """The first function that does not pass; empty if all pass."""
    return next((name for name in names if not passed.get(name)), "")


def bests(result: Result) -> dict[str, Best]:
    """The times and bytes in which one correct answer can beat another."""
    by_fact = {}
    for fact in result.facts:
        least, most = fact.limit if isinstance(fact.limit, tuple) else (fact.reference, fact.reference)
        least = fact.reference if fact.reference is not None or least == most else least
        if (
            fact.unit in (Unit.MILLISECONDS, Unit.BYTES)
            and least is not None
            and isinstance(fact.measured, int | float)
        ):
            by_fact[fact.name] = Best(float(fact.measured), float(least), fact.unit_text)
    return by_fact


def _recall_all(notebook: Path) -> dict[str, Progress]:
    try:
        return msgspec.json.decode((hidden_folder(notebook) / "progress.json").read_bytes(), type=dict[str, Progress])
    except (OSError, msgspec.MsgspecError):
        return {}


def _update(notebook: Path, chapter: str, change: Callable[[Progress], None]) -> None:
    """Change the saved progress, one process at a time; an unwritable folder is not an error."""
    path = hidden_folder(notebook) / "progress.json"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            if fcntl:
                with suppress(OSError):  # some network file systems have no locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
            by_chapter = _recall_all(notebook)
            change(by_chapter.setdefault(chapter, Progress()))
            write_atomically(path, msgspec.json.encode(by_chapter))
