"""From the ledger into nbgrader: its autograde step with verdicts instead of running anything.

nbgrader never sees a student's folder. It is given a staged copy that holds one notebook, rebuilt from the released
one: locked cells as they were released, and of the student's the sources of the cells, nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbgrader import utils
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Bool
from traitlets.config import Config

from autograder.grading.course import HIDDEN, open_ledger
from autograder.grading.intake import cell_name
from autograder.grading.ledger import Entry, Ledger, digest
from autograder.notebook import course_config, run_nbgrader, write_notebook
from autograder.show import facts_html
from autograder.verdict import NEEDS_HUMAN, Report, Result

CHECK = "check-"
STAGING = f"{HIDDEN}/staging"
UNREADABLE = "The file that was handed in could not be read as a notebook."


class BridgeError(Exception):
    """A verdict cannot be brought into the gradebook; the message says why and what to do."""


def configure(config: Config, course: Path) -> None:
    """Set nbgrader up to take verdicts from the ledger, so that no command of it runs a student's code."""
    here = "autograder.grading.bridge"
    config.CourseDirectory.root = str(course)
    config.Autograde.sanitize_preprocessors = [
        f"{here}.Restore",
        "nbgrader.preprocessors.OverwriteKernelspec",
        "nbgrader.preprocessors.OverwriteCells",
        "nbgrader.preprocessors.CheckCellMetadata",
    ]
    config.Autograde.autograde_preprocessors = [
        f"{here}.Verdicts",
        f"{here}.SaveVerdicts",
        "nbgrader.preprocessors.AssignLatePenalties",
        "nbgrader.preprocessors.CheckCellMetadata",
    ]
    config.GenerateFeedback.exporter_class = "autograder.grading.feedback.FeedbackExporter"
    config.GenerateFeedback.preprocessors = ["nbgrader.preprocessors.GetGrades", "autograder.grading.feedback.Waiting"]


def book(
    course: Path,
    assignment: str,
    ledger: Ledger,
    submissions: dict[str, Path | None],
    on_progress: Callable[[str], None] = lambda student: None,
) -> dict[str, str]:
    """Bring the gradebook up to date: every student whose verdict it does not have yet.

    Args:
        course: The course folder.
        assignment: The chapter.
        ledger: The course's ledger.
        submissions: Each student's notebook; None where no notebook could be found.
        on_progress: Called with each student when their part is done.

    Returns:
        For each student whose verdict could not be booked, why.
    """
    problems = {}
    for entry in ledger.status(assignment):
        if entry.report is None or entry.booked or entry.student not in submissions:
            continue
        try:
            _book(course, entry, submissions[entry.student])
            ledger.booked(assignment, entry.student, entry.report)
        except Exception as error:
            problems[entry.student] = f"{type(error).__name__}: {error}"
        on_progress(entry.student)
    return problems


def clean_half_made(course: Path, entries: Iterable[Entry]) -> list[Path]:
    """Remove autograded folders that an interrupted run has left; what was removed."""
    removed = []
    for entry in entries:
        folder = course / "autograded" / entry.student / entry.assignment
        if not entry.booked and folder.is_dir():
            shutil.rmtree(folder)
            removed.append(folder)
    shutil.rmtree(course / STAGING, ignore_errors=True)
    return removed


def _book(course: Path, entry: Entry, submission: Path | None) -> None:
    staged = course / STAGING / entry.student / entry.assignment
    shutil.rmtree(staged, ignore_errors=True)
    write_notebook(_readable(submission), staged / f"{entry.assignment}.ipynb")
    stamp = submission.parent / "timestamp.txt" if submission else None
    if stamp and stamp.is_file() and not stamp.is_symlink() and stamp.stat().st_size < 100:
        shutil.copyfile(stamp, staged / "timestamp.txt")
    config = course_config(course, entry.assignment, entry.student)
    configure(config, course.resolve())
    config.CourseDirectory.submitted_directory = STAGING
    config.Autograde.force = True
    config.Verdicts.staged = True
    run_nbgrader(Autograde, config)
    shutil.rmtree(staged, ignore_errors=True)


def _readable(submission: Path | None) -> NotebookNode:
    """What can be read of a submission: code and text, sources only."""
    try:
        if submission is None:
            raise ValueError("no notebook")
        return _sources_only(json.loads(submission.read_bytes())["cells"])
    except Exception:
        return new_notebook(cells=[new_markdown_cell(UNREADABLE, id="unreadable")])


def _sources_only(cells: list[dict[str, Any]]) -> NotebookNode:
    """The cells with their sources, grade ids and the names that verdicts call them by, and nothing else."""
    kept = []
    for number, cell in enumerate(cells, 1):
        make = new_code_cell if cell.get("cell_type") == "code" else new_markdown_cell
        source = cell.get("source", "")
        made = make(source if isinstance(source, str) else "".join(map(str, source)), id=f"cell-{number}")
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
    last = {_grade_id(cell): number for number, cell in enumerate(submitted.cells)}
    cells: list[NotebookNode] = []
    for number, cell in enumerate(submitted.cells):
        name = _grade_id(cell)
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


def _grade_id(cell: NotebookNode) -> str:
    return cell.metadata.get("nbgrader", {}).get("grade_id") or ""


class Restore(NbGraderPreprocessor):
    """Rebuilds the submission from the released notebook, in place of nbgrader's repairs."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        path = Path("release") / names["assignment"] / f"{names['notebook']}.ipynb"
        if not path.exists():
            raise BridgeError(f"{path} is missing from the course folder; make it with nbgrader generate_assignment")
        return restore(nbformat.read(path, as_version=4), _sources_only(nb.cells)), resources


class Verdicts(NbGraderPreprocessor):
    """In place of running the notebook: each check cell gets one output, the points that the ledger has for it."""

    staged = Bool(False, help="The submission is the one that was graded; do not look whether it changed.").tag(
        config=True
    )

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        with open_ledger(Path.cwd()) as ledger:
            entry = ledger.entry(names["assignment"], names["student"])
        if entry is None or entry.report is None:
            raise BridgeError(f"no verdict for {names['student']}; run `meshcraft grade {names['assignment']}` first")
        submission = Path("submitted") / names["student"] / names["assignment"] / f"{names['notebook']}.ipynb"
        if not self.staged and submission.is_file() and digest(submission.read_bytes()) != entry.submission:
            raise BridgeError(f"{submission} has changed since it was graded; run `meshcraft grade` again")
        write_verdicts(nb, entry.report)
        return nb, resources


def write_verdicts(notebook: NotebookNode, report: Report) -> None:
    """Put the report's verdicts into the check cells, and take every other output away.

    Raises:
        BridgeError: a check cell has no verdict, or is worth other points than the verdict says.
    """
    results = {result.name: result for result in report.functions}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs, cell.execution_count = [], None
        if utils.is_grade(cell):
            cell.outputs = [_output(cell, results)]
    notebook.metadata["meshcraft"] = {
        "isolation": report.isolation,
        "notes": list(report.notes),
        "functions": [_summary(result) for result in report.functions],
    }


def _summary(result: Result) -> dict[str, Any]:
    lines = {result.line, *(fact.line for fact in result.facts if fact.passed is False and fact.weight)}
    return {"name": result.name, "verdict": result.verdict, "lines": sorted(filter(None, lines))}


def _output(cell: NotebookNode, results: dict[str, Result]) -> NotebookNode:
    name = cell.metadata.nbgrader.grade_id
    result = results.get(name.removeprefix(CHECK))
    if result is None:
        raise BridgeError(f"no verdict for the cell {name}; grade this submission again")
    points = float(cell.metadata.nbgrader.points)
    if result.max_points != points or not 0.0 <= result.points <= points:
        raise BridgeError(
            f"{name} is worth {points} points in the released notebook, its verdict says {result.points} of "
            f"{result.max_points}; release the assignment again, or grade with the version that released it"
        )
    data = {"text/plain": repr(float(result.points)), "text/html": facts_html(result)}
    return new_output("execute_result", data=data, execution_count=None)


class SaveVerdicts(NbGraderPreprocessor):
    """Writes the grades of a submission into the gradebook, in one transaction."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        where = (names["notebook"], names["assignment"], names["student"])
        waiting = {f["name"] for f in nb.metadata["meshcraft"]["functions"] if f["verdict"] == NEEDS_HUMAN}
        with Gradebook(names["db_url"]) as gradebook:
            for cell in nb.cells:
                if utils.is_grade(cell):
                    name = cell.metadata.nbgrader.grade_id
                    _save_grade(gradebook.find_grade(name, *where), cell, name.removeprefix(CHECK) in waiting)
                if utils.is_solution(cell):
                    _save_comment(gradebook.find_comment(cell.metadata.nbgrader.grade_id, *where), cell)
            gradebook.db.commit()
        return nb, resources


def _save_grade(grade: Any, cell: NotebookNode, waits: bool) -> None:
    """As nbgrader does; but a fault of the grader is no grade at all, and waits for a person."""
    score = None if waits else utils.determine_grade(cell)[0]
    grade.auto_score = score
    grade.needs_manual_grade = score is None or grade.manual_score is not None


def _save_comment(comment: Any, cell: NotebookNode) -> None:
    untouched = cell.metadata.nbgrader.get("checksum") == utils.compute_checksum(cell)
    comment.auto_comment = "No response." if untouched else None
