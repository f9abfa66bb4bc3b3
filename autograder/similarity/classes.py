"""Collect the code of this class, earlier classes and the public for the functions of a chapter."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autograder.contract.task import Task, load, trace
from autograder.grading.inside.intake import IntakeError, read_notebook
from autograder.grading.nbgrader.course import CourseError, open_ledger, require_folder
from autograder.grading.nbgrader.ledger import LedgerError
from autograder.grading.nbgrader.settings import read_settings
from autograder.grading.nbgrader.submissions import Submission, find_submissions
from autograder.similarity.compare import Compared, compare
from autograder.similarity.sources import SOLUTION, Author, Written, public_code, read_code, released_grams
from course.curriculum import ROOT
from course.program import ProgramError, form, parse

Progress = Callable[[str, int, int], None]


@dataclass
class Similar:
    """Matches by function, and for each author who could not be compared in full, the reason."""

    chapter: str
    functions: list[Compared] = field(default_factory=list)
    unread: list[tuple[Author, str]] = field(default_factory=list)


def find_similar(
    course: Path, chapter: str, functions: Sequence[str], earlier: Sequence[Path] = (), progress: Progress | None = None
) -> Similar:
    """Compare the submissions of a class.

    Args:
        course: The course folder.
        chapter: The chapter.
        functions: Functions of the chapter; all if empty.
        earlier: Course folders of earlier years.
        progress: Progress callback, called with the stage, the number done and the total.

    Raises:
        CourseError: A folder is not a course folder.
        LookupError: The chapter has no such function.
    """
    notify = progress or (lambda stage, done, total: None)
    tasks = load(chapter).tasks
    selected = [load(chapter).task(name) for name in functions] or list(tasks)
    names = [task.name for task in tasks]
    course = course.resolve()
    folders = {course: "", **{path.resolve(): _called(path) for path in earlier if path.resolve() != course}}
    for folder in folders:
        require_folder(folder, chapter)
    released = released_grams(_released([*folders], chapter), names)
    result, written = Similar(chapter), {task.name: list[Written]() for task in selected}
    submissions = [(each, folder) for folder in folders for each in find_submissions(folder, chapter)]
    known = {folder: _forms(folder, chapter) for folder in folders}
    for done, (submission, folder) in enumerate(submissions, 1):
        author = Author(submission.student, folders[folder])
        forms = known[folder].get((submission.student, submission.digest), {})
        for each in _of_submission(submission, author, selected, names, released, result.unread):
            written[each[0]].append(replace(each[1], form=forms.get(each[0], "")))
        notify("reading", done, len(submissions))
    for name, author, code in public_code(chapter, [task.name for task in selected]):
        each = code.written(name, author, names, released)
        if each:
            written[name].append(each)
    for done, task in enumerate(selected, 1):
        if any(each.form for each in written[task.name]):
            written[task.name] = [_with_form(each, chapter, task) for each in written[task.name]]
        result.functions.append(compare(task.name, written[task.name]))
        notify("comparing", done, len(selected))
    return result


def _of_submission(
    submission: Submission,
    author: Author,
    tasks: Sequence[Task],
    names: list[str],
    released: frozenset[int],
    unread: list[tuple[Author, str]],
) -> list[tuple[str, Written]]:
    """A student's code for each function. Anything odd about it is noted, and does not affect others."""
    if submission.notebook is None:
        unread.append((author, submission.problem))
        return []
    result = []
    try:
        code = read_code(read_notebook(submission.notebook).cells)
        unread += [(author, f"a cell is not Python: {message}") for message in code.unread]
        for task in tasks:
            written = code.written(task.name, author, names, released)
            if written:
                result.append((task.name, written))
            else:
                unread.append((author, f"{task.name} is not defined"))
    except RecursionError:
        unread.append((author, "it is nested too deep to be compared"))
    except IntakeError as error:
        unread.append((author, str(error)))
    except Exception as error:  # whatever the error, the others are compared
        unread.append((author, f"{type(error).__name__}: {error}"))
    return result


def _released(folders: Sequence[Path], chapter: str) -> list[Path]:
    """The notebooks that students were given; the course's own exercise if there is none."""
    paths = [folder / "release" / chapter / f"{chapter}.ipynb" for folder in folders]
    return [path for path in paths if path.is_file()] + [ROOT / "exercises" / chapter / f"{chapter}.ipynb"]


def _called(folder: Path) -> str:
    """An earlier course's name: from its settings, and its folder, since names are kept from year to year."""
    folder = folder.resolve()
    try:
        name = read_settings(folder).name
    except CourseError:
        return folder.name
    return folder.name if name in ("course", folder.name) else f"{name}, {folder.name}"


def _forms(folder: Path, chapter: str) -> dict[tuple[str, str], dict[str, str]]:
    """By student and submission, a canonical form of each function's Program, as far as it was graded here."""
    if not (folder / ".meshcraft" / "ledger.sqlite").is_file():
        return {}
    try:
        with open_ledger(folder) as ledger:
            entries = ledger.status(chapter)
    except LedgerError:  # of an earlier year on a read-only disk, for example
        return {}
    kinds = {task.name: task.kind for task in load(chapter).tasks}
    return {
        (entry.student, entry.submission): {
            result.name: result.form for result in entry.report.functions if kinds.get(result.name) != "value"
        }
        for entry in entries
        if entry.report
    }


def _with_form(written: Written, chapter: str, task: Task) -> Written:
    """The public solution with the form of its Program; all others unchanged."""
    if written.author.name != SOLUTION:
        return written
    try:
        function = getattr(importlib.import_module(f"solutions.{chapter}"), task.name)
        program = trace(task, function, task.cases[0], lambda _: None)
        return replace(written, form=form(parse(program, data_branches=task.data_branches)))
    except (ImportError, ProgramError):
        return written
