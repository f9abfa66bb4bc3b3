"""nbgrader's configuration, and its autograde step with recorded verdicts instead of execution.

nbgrader's view of a submission is rebuilt from the released notebook: locked cells as released, and only the
sources of the student's cells.
"""

from copy import deepcopy
from glob import glob
from pathlib import Path
from typing import Any

import nbformat
import nbgrader
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader import utils
from nbgrader.api import Gradebook
from nbgrader.converters import GenerateAssignment
from nbgrader.exchange.default import ExchangeReleaseFeedback
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets.config import Config, PyFileConfigLoader

from autograder.contract.verdict import NEEDS_HUMAN, Report, Result
from autograder.grading.inside.intake import Cell, read_notebook
from autograder.grading.nbgrader.course import CONFIG_FILE, CourseError, open_ledger
from autograder.grading.nbgrader.keys import digest
from autograder.grading.nbgrader.limit_factors import require_same
from autograder.grading.nbgrader.points import require_agreement, scaled, worth
from autograder.grading.nbgrader.restore import is_missing, restore
from autograder.grading.nbgrader.settings import read_settings
from autograder.release.converters import CHECK, course_config, grade_id_of, gradebook_url
from autograder.render import facts_html

MISSING = "The cell for this answer is not in the notebook that was handed in; a person will look for the answer."
RECEIPT = ("timestamp.txt", "submission_secret.txt")  # of a submission through the exchange
UNGRADED = "This function is not graded in this course."
FORMGRADER = Path(nbgrader.__file__).parent / "server_extensions" / "formgrader" / "templates"


class BridgeError(Exception):
    """A verdict cannot be entered in the gradebook; the message gives the cause and the remedy."""


def configure(config: Config, course: Path) -> None:
    """Configure nbgrader for the course: verdicts come from the ledger, so no nbgrader command runs student code."""
    module = "autograder.grading.nbgrader.bridge"
    settings = read_settings(course)
    config.CourseDirectory.root = str(course)
    config.CourseDirectory.db_url = gradebook_url(course)
    config.CourseDirectory.course_id = settings.name
    if settings.exchange:
        config.Exchange.root = settings.exchange
    config.CourseDirectory.groupshared = bool(settings.group)
    config.AssignLatePenalties.plugin_class = "autograder.grading.nbgrader.late_penalty.LatePenalty"
    config.LatePenalty.per_day = settings.late_per_day
    config.LatePenalty.at_most = settings.late_at_most
    config.LatePenalty.grace = settings.late_grace
    config.Autograde.sanitize_preprocessors = [
        f"{module}.Restore",
        "nbgrader.preprocessors.OverwriteKernelspec",
        "nbgrader.preprocessors.OverwriteCells",
        "nbgrader.preprocessors.CheckCellMetadata",
    ]
    config.Autograde.autograde_preprocessors = [
        f"{module}.Verdicts",
        f"{module}.SaveVerdicts",
        "nbgrader.preprocessors.AssignLatePenalties",
        "nbgrader.preprocessors.CheckCellMetadata",
    ]
    config.GenerateAssignment.preprocessors = [f"{module}.Agrees", *(GenerateAssignment.preprocessors.default() or [])]
    config.GenerateFeedback.exporter_class = "autograder.grading.nbgrader.feedback.FeedbackExporter"
    config.GenerateFeedback.preprocessors = [
        "nbgrader.preprocessors.GetGrades",
        "autograder.grading.nbgrader.feedback.Waiting",
    ]
    config.ExchangeFactory.release_feedback = f"{module}.ReleaseFeedback"
    # Formgrader shows students' text to people who can change grades, so none of the students' markup may run there.
    config.HTMLExporter.filters = {"markdown2html": "autograder.grading.nbgrader.feedback.prose"}
    config.HTMLExporter.extra_template_basedirs = [str(Path(__file__).parent / "templates"), str(FORMGRADER)]


def configuration(course: Path, assignment: str, student: str = "") -> Config:
    """Merge ``configure`` with the course's own nbgrader_config.py, without any setting that lets a notebook run.

    Raises:
        CourseError: nbgrader_config.py raises.
    """
    course = course.resolve()
    config, meshcraft_config = course_config(course, assignment, student), Config()
    configure(meshcraft_config, course)
    config.merge(deepcopy(meshcraft_config))
    if (course / CONFIG_FILE).exists():
        try:
            own = PyFileConfigLoader(str(course / CONFIG_FILE)).load_config()
        except Exception as error:
            raise CourseError(f"{course / CONFIG_FILE} raises {type(error).__name__}: {error}; correct it") from error
        config.merge(own)
    config.Autograde.merge(meshcraft_config.Autograde)
    config.CourseDirectory.root, config.CourseDirectory.db_url = str(course), gradebook_url(course)
    return config


class ReleaseFeedback(ExchangeReleaseFeedback):
    """Release feedback to those who submitted through the exchange, and name the others instead of failing."""

    def copy_files(self) -> None:
        names: Any = self.coursedir
        pages = {*map(Path, glob(f"{self.src_path}/*.html"))}
        received = {page for page in pages if all(page.with_name(name).is_file() for name in RECEIPT)}
        without_receipt = sorted(page.parts[-3] for page in pages - received)
        if without_receipt:
            command = f"`meshcraft feedback {names.assignment_id} --zip FILE`"
            self.log.warning(
                "Not submitted through the exchange: %s; %s has their pages", ", ".join(without_receipt), command
            )
        excluded = names.student_id_exclude
        names.student_id_exclude = ",".join([*filter(None, [excluded]), *without_receipt])
        super().copy_files()
        names.student_id_exclude = excluded


class Agrees(NbGraderPreprocessor):
    """Require, before a notebook is released, that its graded cells and its limits are those of the course."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        chapter = resources["nbgrader"]["assignment"]
        settings, where = read_settings(Path.cwd()), f"source/{chapter}/{chapter}.ipynb"
        require_agreement(nb, chapter, settings, where)
        code = [Cell("", cell.source) for cell in nb.cells if cell.cell_type == "code"]
        require_same(code, chapter, settings, where)
        return nb, resources


class Restore(NbGraderPreprocessor):
    """Rebuild the submission from the released notebook, in place of nbgrader's repairs."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        release = release_path(Path.cwd(), names["assignment"], names["notebook"])
        return restore(nbformat.read(release, as_version=4), read_notebook(_submitted(names))), resources


def release_path(course: Path, assignment: str, notebook: str) -> Path:
    """The path of the released notebook.

    Raises:
        BridgeError: There is none.
    """
    path = course / "release" / assignment / f"{notebook}.ipynb"
    if not path.exists():
        raise BridgeError(f"{path} is missing from the course folder; make it with nbgrader generate_assignment")
    return path


def _submitted(names: dict[str, str]) -> Path:
    return Path("submitted") / names["student"] / names["assignment"] / f"{names['notebook']}.ipynb"


class Verdicts(NbGraderPreprocessor):
    """Replace execution of the notebook: each check cell gets one output, its points from the ledger."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        with open_ledger(Path.cwd()) as ledger:
            entry = ledger.entry(names["assignment"], names["student"])
        if entry is None or entry.report is None:
            raise BridgeError(f"no verdict for {names['student']}; run `meshcraft grade {names['assignment']}` first")
        submission = _submitted(names)
        if digest(submission.read_bytes()) != entry.submission:
            raise BridgeError(f"{submission} has changed since it was graded; run `meshcraft grade` again")
        write_verdicts(nb, scaled(entry.report, worth(read_settings(Path.cwd()), names["assignment"])))
        return nb, resources


def write_verdicts(notebook: NotebookNode, report: Report) -> None:
    """Put the report's verdicts into the check cells, and remove all other output.

    Raises:
        BridgeError: A check cell has no verdict, or its points differ from the verdict's.
    """
    results = {result.name: result for result in report.functions}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.outputs, cell.execution_count = [], None
        if utils.is_grade(cell) and not is_own(cell):
            cell.outputs = [_output(cell, results)]
    notebook.metadata["meshcraft"] = {
        "isolation": report.isolation,
        "notes": list(report.notes),
        "functions": [_summary(result) for result in report.functions],
    }


def is_own(cell: NotebookNode) -> bool:
    """Return True for a graded cell that the instructor added: a person gives its points."""
    return utils.is_solution(cell) or not cell.metadata.nbgrader.grade_id.startswith(CHECK)


def _summary(result: Result) -> dict[str, Any]:
    lines = {result.line, *(fact.line for fact in result.missed)}
    return {**result.to_json(), "lines": sorted(filter(None, lines))}


def _output(cell: NotebookNode, results: dict[str, Result]) -> NotebookNode:
    name = cell.metadata.nbgrader.grade_id
    result = results.get(name.removeprefix(CHECK))
    if result is None and not cell.metadata.nbgrader.points:
        data = {"text/plain": "0.0", "text/html": f"<p>{UNGRADED}</p>"}
        return new_output("execute_result", data=data, execution_count=None)
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
    """Writes the grades of a submission to the gradebook, in one transaction."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        with Gradebook(names["db_url"]) as gradebook:
            save_grades(gradebook, nb, (names["notebook"], names["assignment"], names["student"]), {})
            gradebook.db.commit()
        return nb, resources


def save_grades(gradebook: Gradebook, nb: NotebookNode, where: tuple[str, str, str], before: dict[str, str]) -> None:
    """Set the grades and comments of a submission from its check cells; the caller commits.

    Args:
        gradebook: nbgrader's gradebook.
        nb: The notebook made by ``write_verdicts``.
        where: The names of notebook, assignment and student.
        before: The sources of the cells when this submission was last graded, by grade id.
    """
    waiting = {f["name"] for f in nb.metadata["meshcraft"]["functions"] if f["verdict"] == NEEDS_HUMAN}
    submission: Any = gradebook.find_submission_notebook(*where)
    grades = {grade.name: grade for grade in submission.grades}
    comments = {comment.name: comment for comment in submission.comments}
    for cell in nb.cells:
        name = grade_id_of(cell)
        if utils.is_grade(cell):
            grade = grades.get(name) or gradebook.find_grade(name, *where)
            waits = name.removeprefix(CHECK) in waiting or is_missing(cell)
            waits = waits or (is_own(cell) and not utils.is_solution(cell))
            _save_grade(grade, cell, waits, before.get(name) == cell.source)
        if utils.is_solution(cell):
            _save_comment(comments.get(name) or gradebook.find_comment(name, *where), cell)


def _save_grade(grade: Any, cell: NotebookNode, waits: bool, same: bool) -> None:
    """Save like nbgrader; but a fault of the grader leaves the grade empty, for a person to set.

    A manual score stays. It needs another review, unless the cell and its automatic score are unchanged.
    """
    score = None if waits else utils.determine_grade(cell)[0]
    reviewed = grade.manual_score is not None and same and grade.auto_score == score and not grade.needs_manual_grade
    grade.auto_score = score
    grade.needs_manual_grade = not reviewed and (score is None or grade.manual_score is not None)


def _save_comment(comment: Any, cell: NotebookNode) -> None:
    untouched = cell.metadata.nbgrader.get("checksum") == utils.compute_checksum(cell)
    comment.auto_comment = MISSING if is_missing(cell) else "No response." if untouched else None
