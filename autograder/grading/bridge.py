"""From the ledger into nbgrader: its autograde step with verdicts instead of running anything.

nbgrader never sees a student's folder. It is given a staged copy that holds one notebook, rebuilt from the released
one: locked cells as they were released, and of the student's the sources of the cells, nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import nbgrader
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader import utils
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Bool, Dict
from traitlets.config import Config, PyFileConfigLoader

from autograder.grading.course import CONFIG_FILE, HIDDEN, STUDENT, CourseError, open_ledger
from autograder.grading.ledger import Entry, Ledger, digest, remedy
from autograder.grading.restore import exchange_files, grade_id, readable, restore, sources_only
from autograder.grading.settings import read_settings
from autograder.notebook import course_config, run_nbgrader, write_notebook
from autograder.show import facts_html
from autograder.verdict import NEEDS_HUMAN, Report, Result

CHECK = "check-"
STAGING = f"{HIDDEN}/staging"
FORMGRADER = Path(nbgrader.__file__).parent / "server_extensions" / "formgrader" / "templates"


class BridgeError(Exception):
    """A verdict cannot be brought into the gradebook; the message says why and what to do."""


def configure(config: Config, course: Path) -> None:
    """Set nbgrader up for the course: verdicts come from the ledger, so no command of it runs a student's code."""
    here = "autograder.grading.bridge"
    settings = read_settings(course)
    config.CourseDirectory.root = str(course)
    config.CourseDirectory.course_id = settings.name
    if settings.exchange:
        config.Exchange.root = settings.exchange
    config.AssignLatePenalties.plugin_class = "autograder.grading.late.LatePenalty"
    config.LatePenalty.per_day = settings.late_per_day
    config.LatePenalty.at_most = settings.late_at_most
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
    # Formgrader shows what students wrote to somebody who may change grades: no markup of theirs runs there.
    config.HTMLExporter.filters = {"markdown2html": "autograder.grading.feedback.prose"}
    config.HTMLExporter.extra_template_basedirs = [str(Path(__file__).parent / "templates"), str(FORMGRADER)]


def configuration(course: Path, assignment: str, student: str = "") -> Config:
    """What ``configure`` sets, and the course's own nbgrader_config.py; but nothing there lets a notebook be run.

    Raises:
        CourseError: nbgrader_config.py raises.
    """
    course = course.resolve()
    config, ours = course_config(course, assignment, student), Config()
    configure(ours, course)
    config.merge(deepcopy(ours))
    if (course / CONFIG_FILE).exists():
        try:
            own = PyFileConfigLoader(CONFIG_FILE, path=str(course)).load_config()
        except Exception as error:
            raise CourseError(f"{course / CONFIG_FILE} raises {type(error).__name__}: {error}; correct it") from error
        config.merge(own)
    config.Autograde.merge(ours.Autograde)
    config.CourseDirectory.root = str(course)
    return config


def book(
    course: Path,
    assignment: str,
    ledger: Ledger,
    submissions: dict[str, Path | None],
    on_progress: Callable[[str], None] = lambda student: None,
) -> dict[str, str]:
    """Bring the gradebook up to date: every student whose verdict, or whose time of handing in, it does not have yet.

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
        if entry.report is None or entry.student not in submissions or not STUDENT.fullmatch(entry.student):
            continue
        if entry.booked and not _restamped(course, entry, submissions[entry.student]):
            continue
        try:
            _book(course, entry, submissions[entry.student])
            ledger.booked(assignment, entry.student, entry.report)
        except Exception as error:
            todo = remedy(str(error))
            said = f"{course / 'gradebook.db'}: {error}; {todo}" if todo else f"{type(error).__name__}: {error}"
            problems[entry.student] = said
        if not entry.booked:
            on_progress(entry.student)
    return problems


def _restamped(course: Path, entry: Entry, submission: Path | None) -> bool:
    """Whether the time of handing in, or the exchange's secret, is another one than when it was booked."""
    copy = course / "autograded" / entry.student / entry.assignment
    return submission is not None and exchange_files(submission.parent) != exchange_files(copy)


def clean_half_made(course: Path, entries: Iterable[Entry]) -> list[Path]:
    """Remove autograded folders that an interrupted run has left; what was removed."""
    removed = []
    for entry in entries:
        folder = course / "autograded" / entry.student / entry.assignment
        if not entry.booked and folder.is_dir() and _autograded(course, entry) is None:
            shutil.rmtree(folder)
            removed.append(folder)
    shutil.rmtree(course / STAGING, ignore_errors=True)
    return removed


def _book(course: Path, entry: Entry, submission: Path | None) -> None:
    staged = course / STAGING / entry.student / entry.assignment
    shutil.rmtree(staged, ignore_errors=True)
    write_notebook(readable(submission), staged / f"{entry.assignment}.ipynb")
    for name, text in exchange_files(submission.parent).items() if submission else ():
        (staged / name).write_text(text, encoding="utf-8")
    config = configuration(course, entry.assignment, entry.student)
    config.CourseDirectory.submitted_directory = STAGING
    config.Autograde.force = True
    config.Verdicts.staged = True
    before = _autograded(course, entry)
    config.SaveVerdicts.before = {grade_id(cell): cell.source for cell in before.cells} if before else {}
    run_nbgrader(Autograde, config)
    shutil.rmtree(staged, ignore_errors=True)


def _autograded(course: Path, entry: Entry) -> NotebookNode | None:
    """The autograded copy of an earlier run; None if there is none, or one that was not finished."""
    path = course / "autograded" / entry.student / entry.assignment / f"{entry.assignment}.ipynb"
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception:
        return None
    return notebook if "meshcraft" in notebook.metadata else None


class Restore(NbGraderPreprocessor):
    """Rebuilds the submission from the released notebook, in place of nbgrader's repairs."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        path = Path("release") / names["assignment"] / f"{names['notebook']}.ipynb"
        if not path.exists():
            raise BridgeError(f"{path} is missing from the course folder; make it with nbgrader generate_assignment")
        return restore(nbformat.read(path, as_version=4), sources_only(nb.cells)), resources


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
    return {**result.to_json(), "lines": sorted(filter(None, lines))}


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

    before = Dict(help="The sources of the cells when this submission was graded before, by grade id.").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        where = (names["notebook"], names["assignment"], names["student"])
        waiting = {f["name"] for f in nb.metadata["meshcraft"]["functions"] if f["verdict"] == NEEDS_HUMAN}
        with Gradebook(names["db_url"]) as gradebook:
            for cell in nb.cells:
                if utils.is_grade(cell):
                    name = cell.metadata.nbgrader.grade_id
                    same = self.before.get(name) == cell.source
                    _save_grade(gradebook.find_grade(name, *where), cell, name.removeprefix(CHECK) in waiting, same)
                if utils.is_solution(cell):
                    _save_comment(gradebook.find_comment(cell.metadata.nbgrader.grade_id, *where), cell)
            gradebook.db.commit()
        return nb, resources


def _save_grade(grade: Any, cell: NotebookNode, waits: bool, same: bool) -> None:
    """As nbgrader does; but a fault of the grader is no grade at all, and waits for a person.

    A score that a person gave stays. It waits for another look, unless cell and automatic score are what they were.
    """
    score = None if waits else utils.determine_grade(cell)[0]
    looked_at = grade.manual_score is not None and same and grade.auto_score == score and not grade.needs_manual_grade
    grade.auto_score = score
    grade.needs_manual_grade = not looked_at and (score is None or grade.manual_score is not None)


def _save_comment(comment: Any, cell: NotebookNode) -> None:
    untouched = cell.metadata.nbgrader.get("checksum") == utils.compute_checksum(cell)
    comment.auto_comment = "No response." if untouched else None
