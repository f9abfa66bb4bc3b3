"""Book the ledger into nbgrader: nbgrader's autograde step for a whole class, with one gradebook and one release.

Each submission is booked in one gradebook transaction; then its folder under ``autograded/`` is written, and the
submission is marked in the ledger.
If a run is killed in between, the next one books that submission again, with the same result.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell
from nbgrader import utils
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import CheckCellMetadata, OverwriteCells, OverwriteKernelspec

from autograder.grading.inside.intake import IntakeError, parse_notebook
from autograder.grading.nbgrader import register
from autograder.grading.nbgrader.bridge import BridgeError, configuration, release_path, save_grades, write_verdicts
from autograder.grading.nbgrader.course import HIDDEN, open_gradebook
from autograder.grading.nbgrader.keys import digest
from autograder.grading.nbgrader.late_penalty import late_plugin, set_penalties
from autograder.grading.nbgrader.ledger import Entry, Ledger, remedy
from autograder.grading.nbgrader.names import name_problem
from autograder.grading.nbgrader.points import read, scaled, worth
from autograder.grading.nbgrader.restore import exchange_files, restore, unreadable
from autograder.grading.nbgrader.settings import read_settings
from autograder.grading.nbgrader.submissions import read_submitted
from autograder.release.converters import grade_id_of, notebook_text
from autograder.release.notebook import BEGIN, END

STAGING, RUBRICS = f"{HIDDEN}/staging", "rubrics"


def book(
    course: Path,
    assignment: str,
    ledger: Ledger,
    submissions: dict[str, Path | None],
    on_progress: Callable[[str], None] = lambda student: None,
) -> dict[str, str]:
    """Bring the gradebook up to date: book every student whose verdict or submission time it does not have yet.

    Args:
        course: The course folder.
        assignment: The chapter.
        ledger: The course's ledger.
        submissions: Each student's notebook; None if no notebook could be found.
        on_progress: Progress callback, called with each student when done.

    Returns:
        For each student whose verdict could not be booked, the reason.
    """
    due = [entry for entry in ledger.status(assignment) if _is_due(course, entry, submissions)]
    problems: dict[str, str] = {}
    if not due:
        return problems
    try:
        with open_gradebook(course) as gradebook:
            booker = _Booker(course, assignment, gradebook)
            for entry in due:
                try:
                    booker.book(entry, submissions[entry.student])
                    ledger.booked(assignment, entry.student, entry.report)
                except Exception as error:
                    problems[entry.student] = _describe(course, error)
                if not entry.booked:
                    on_progress(entry.student)
    except Exception as error:
        problems |= {entry.student: _describe(course, error) for entry in due}
    return problems


def clean_half_made(course: Path, entries: Iterable[Entry]) -> list[Path]:
    """Remove autograded folders left by an interrupted run; return the removed paths."""
    removed = []
    for entry in entries:
        folder = course / "autograded" / entry.student / entry.assignment
        if not entry.booked and folder.is_dir() and _autograded(course, entry) is None:
            shutil.rmtree(folder)
            removed.append(folder)
    shutil.rmtree(course / STAGING, ignore_errors=True)
    return removed


def model_answers(course: Path, assignment: str) -> dict[str, str]:
    """The text for graders above each written answer, by id: the source's answer, and ``rubrics/<chapter>.md``."""
    path, rubric = course / "source" / assignment / f"{assignment}.ipynb", course / RUBRICS / f"{assignment}.md"
    rubric_text = (
        f"\n\n**Rubric**\n\n{rubric.read_text(encoding='utf-8', errors='replace')}" if rubric.is_file() else ""
    )
    answers = {}
    for cell in read(path).cells if path.is_file() else ():
        if cell.cell_type == "markdown" and utils.is_solution(cell) and utils.is_grade(cell):
            answer = cell.source.partition(BEGIN)[2].partition(END)[0] if BEGIN in cell.source else cell.source
            answers[cell.metadata.nbgrader.grade_id] = (
                f"**For graders: a model answer**\n\n{answer.strip()}{rubric_text}"
            )
    return answers


class _Booker:
    """Books submissions one after the other; their common data is read once."""

    def __init__(self, course: Path, assignment: str, gradebook: Gradebook):
        self.course, self.assignment, self.gradebook = course, assignment, gradebook
        config = configuration(course, assignment)
        self.models = model_answers(course, assignment)
        self.extensions = register.values(course, register.EXTENSION)
        self.worth = worth(read_settings(course), assignment)
        self.plugin = late_plugin(config)
        coursedir = CourseDirectory(config=config)
        self.coursedir: Any = coursedir
        self.converter = Autograde(coursedir=coursedir, config=config)
        self.release = _release(course, assignment, coursedir.db_url)
        self.source = Path(coursedir.format_path(coursedir.source_directory, ".", assignment))
        self.extras = utils.find_all_files(str(self.source), [*coursedir.ignore, "*.ipynb"])

    def book(self, entry: Entry, submission: Path | None) -> None:
        """Book one submission."""
        assert entry.report
        notebook = self._reviewed(entry, submission)
        write_verdicts(notebook, scaled(entry.report, self.worth))
        files = exchange_files(submission.parent) if submission else {}
        time = utils.parse_utc(files["timestamp.txt"]) if "timestamp.txt" in files else None  # not an earlier one's
        before = _autograded(self.course, entry) or {}
        with _transaction(self.gradebook):
            self.gradebook.update_or_create_student(entry.student)
            self.gradebook.update_or_create_submission(self.assignment, entry.student, timestamp=time)  # type: ignore[arg-type]
            save_grades(self.gradebook, notebook, (self.assignment, self.assignment, entry.student), before)
            self._extend(entry.student)
            set_penalties(self.plugin, self.gradebook.find_submission(self.assignment, entry.student))
            self.gradebook.db.commit()
        self._write(entry, {f"{self.assignment}.ipynb": notebook_text(notebook), **files})

    def _extend(self, student: str) -> None:
        """Grant the student's extension, which may be older than the submission."""
        hours = self.extensions.get(f"{self.assignment}/{student}", 0.0)
        if hours:
            self.gradebook.grant_extension(self.assignment, student, hours=hours)  # type: ignore[arg-type]

    def _reviewed(self, entry: Entry, submission: Path | None) -> NotebookNode:
        """Build the notebook for manual review from the graded cells, or from none if the submission is unreadable."""
        if submission is None:
            return self._with_model(restore(self.release, unreadable()))
        problem, data = read_submitted(submission)
        if problem or digest(data) != entry.submission:
            raise BridgeError(f"{submission.name} has changed since it was graded; run `meshcraft grade` again")
        try:
            return self._with_model(restore(self.release, parse_notebook(submission.name, data)))
        except IntakeError:
            return self._with_model(restore(self.release, unreadable()))

    def _with_model(self, notebook: NotebookNode) -> NotebookNode:
        """Add the model answer and the rubric above each written answer; feedback leaves them out."""
        cells = []
        for cell in notebook.cells:
            model = self.models.get(grade_id_of(cell))
            cells += [new_markdown_cell(model, id=f"model-{len(cells)}")] if model else []
            cells.append(cell)
        notebook.cells = cells
        return notebook

    def _write(self, entry: Entry, texts: dict[str, str]) -> None:
        """Put the complete autograded folder in place."""
        staged = self.course / STAGING / entry.student
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        for name in self.extras:
            copy = staged / Path(name).relative_to(self.source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, copy)
        for name, text in texts.items():
            (staged / name).write_text(text, encoding="utf-8")
        target = self.course / "autograded" / entry.student / self.assignment
        self.coursedir.student_id = entry.student
        self.converter.notebooks = [str(target / f"{self.assignment}.ipynb")]
        self.converter.run_pre_convert_hook()
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(staged, target)
        self.converter.set_permissions(self.assignment, entry.student)
        self.converter.run_post_convert_hook()


def _is_due(course: Path, entry: Entry, submissions: dict[str, Path | None]) -> bool:
    if entry.report is None or entry.student not in submissions or name_problem(entry.student):
        return False
    return not entry.booked or _restamped(course, entry, submissions[entry.student])


def _restamped(course: Path, entry: Entry, submission: Path | None) -> bool:
    """Return True if the submission time, or the exchange's secret, has changed since it was booked."""
    copy = course / "autograded" / entry.student / entry.assignment
    return submission is not None and exchange_files(submission.parent) != exchange_files(copy)


def _describe(course: Path, error: Exception) -> str:
    todo = remedy(str(error))
    return f"{course / 'gradebook.db'}: {error}; {todo}" if todo else f"{type(error).__name__}: {error}"


def _autograded(course: Path, entry: Entry) -> dict[str, str] | None:
    """The sources of an earlier run's autograded copy by grade id; None if there is no complete one."""
    path = course / "autograded" / entry.student / entry.assignment / f"{entry.assignment}.ipynb"
    try:
        notebook = json.loads(path.read_bytes())
        if "meshcraft" not in notebook["metadata"]:
            return None
        return {
            cell["metadata"]["nbgrader"]["grade_id"]: "".join(cell["source"])
            for cell in notebook["cells"]
            if "nbgrader" in cell["metadata"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _release(course: Path, assignment: str, db_url: str) -> NotebookNode:
    """The released notebook, with the gradebook's points and locked cells."""
    notebook = nbformat.read(release_path(course, assignment, assignment), as_version=4)
    names: Any = {"nbgrader": {"notebook": assignment, "assignment": assignment, "db_url": db_url}}
    for step in (OverwriteKernelspec, OverwriteCells, CheckCellMetadata):
        notebook, _ = step().preprocess(notebook, names)
    return notebook


@contextmanager
def _transaction(gradebook: Gradebook) -> Iterator[None]:
    """A single transaction, however often nbgrader's own methods commit on the way."""
    gradebook.db.remove()
    with gradebook.engine.begin() as connection:
        gradebook.db(bind=connection, join_transaction_mode="rollback_only")
        try:
            yield
        finally:
            gradebook.db.remove()
