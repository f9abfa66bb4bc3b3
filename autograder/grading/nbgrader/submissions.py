"""A class's submissions: a notebook for each student, or the reason there is none."""

import os
import stat
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from autograder.contract.verdict import NEEDS_HUMAN, REFUSED
from autograder.grading.inside.intake import MAX_BYTES
from autograder.grading.nbgrader.keys import contract_hash, digest, key
from autograder.grading.nbgrader.names import name_problem, same_name, student_name
from autograder.grading.nbgrader.points import ungraded
from autograder.grading.nbgrader.settings import chapters_of, read_settings
from autograder.grading.nbgrader.task_variants import requested_in
from autograder.render import few, one_line
from course.curriculum import CHAPTERS

NAMED = 10
IGNORED = (".ipynb_checkpoints", "__pycache__", "__MACOSX", ".git")


@dataclass(frozen=True)
class Submission:
    """One student's submission. ``problem`` says why there is nothing to run; ``verdict`` is then set."""

    student: str
    key: str
    digest: str
    notebook: Path | None
    note: str = ""
    problem: str = ""
    verdict: str = ""


def find_submissions(course: Path, assignment: str) -> list[Submission]:
    """Find ``submitted/<student>/<assignment>/``, ordered by student, and one submission for each odd entry."""
    contract = contract_hash(assignment) + _requested(course, assignment)
    result = []
    for folder in sorted((course / "submitted").iterdir()):
        try:
            submission = _find(folder, assignment, contract)
        except OSError as error:
            message = f"submitted/{one_line(folder.name)} cannot be read ({error.strerror}); make it readable for you"
            submission = _without(folder.name, contract, message, NEEDS_HUMAN)
        if submission:
            result.append(submission)
    return result


def misplaced(course: Path) -> dict[str, str]:
    """Everything in ``submitted/`` that belongs to no student or to no chapter of the course, with a suggestion."""
    chapters = {same_name(entry.name): entry.name for entry in CHAPTERS}
    course_chapters, dropped = chapters_of(course), read_settings(course).dropped
    suggestions = {}
    root = course / "submitted"
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if not folder.is_dir() and not folder.is_symlink() and not folder.name.startswith("."):
            where = "submitted/STUDENT/CHAPTER/"
            suggestions[f"submitted/{one_line(folder.name)}"] = (
                f"in no student's folder, so it is not graded; use {where}"
            )
        try:
            entries = sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else []
        except OSError:
            continue  # the student's row says so
        for entry in entries:
            shown = f"submitted/{one_line(folder.name)}/{one_line(entry.name)}"
            if entry.name in chapters.values() or entry.name in IGNORED:
                if (
                    course_chapters
                    and entry.name in chapters.values()
                    and entry.name not in (*course_chapters, *dropped)
                ):
                    add = f"`meshcraft init . --chapter {entry.name}` adds it"
                    suggestions[shown] = f"{entry.name} is not in this course, so it is not graded; {add}"
                continue
            stem = same_name(entry.stem if entry.suffix in (".ipynb", ".zip") else entry.name).replace(" ", "_")
            near = get_close_matches(stem, chapters, 1)
            if not entry.is_dir() and entry.suffix not in (".ipynb", ".zip"):
                continue
            where = f"submitted/{one_line(folder.name)}/{chapters[near[0]] if near else 'CHAPTER'}/"
            suggestions[shown] = f"not a chapter's folder, so it is not graded; move its contents to {where}"
    return suggestions


def _requested(course: Path, assignment: str) -> str:
    """The course's variants, ungraded functions and limits as text for the key of a verdict; empty for none."""
    settings = read_settings(course)
    requested = requested_in(settings.variants, assignment)
    own = {name: factor for name, factor in sorted(settings.limits.items()) if name.startswith(f"{assignment}.")}
    limits = "".join(f"|{name} {factor:g}" for name, factor in own.items())
    skipped = "".join(f"|{name} is not graded" for name in ungraded(settings, assignment))
    return "".join(f"|{name}={variant}" for name, variant in requested.items()) + skipped + limits


def _find(folder: Path, assignment: str, contract: str) -> Submission | None:
    """The submission in a student's folder; None if there is none."""
    inner, shown = folder / assignment, f"submitted/{one_line(folder.name)}"
    if not (inner.exists() or inner.is_symlink()) and (folder.is_dir() or not folder.is_symlink()):
        return None
    if folder.is_symlink() or inner.is_symlink():
        message = f"the submitted folder is a link; submit {assignment}.ipynb itself, in your own folder"
        return _without(folder.name, contract, message, REFUSED)
    if not inner.is_dir():
        where = f"notebooks belong in submitted/STUDENT/{assignment}/{assignment}.ipynb"
        message = f"{shown}/{assignment} is not a folder; {where}"
        return _without(folder.name, contract, message, NEEDS_HUMAN)
    odd = name_problem(folder.name)
    if odd:
        message = f"the name of the folder {shown} {odd}, which nbgrader cannot handle; rename it"
        return _without(folder.name, contract, message, NEEDS_HUMAN)
    return _submission(folder.name, inner, contract)


def _without(folder: str, contract: str, problem: str, verdict: str) -> Submission:
    """A submission without a notebook."""
    student = student_name(folder)
    return Submission(
        student, key(b"", contract + student + problem + verdict), digest(b""), None, "", problem, verdict
    )


def _submission(student: str, folder: Path, contract: str) -> Submission:
    notebooks = sorted(path for path in folder.iterdir() if path.suffix == ".ipynb")
    expected = folder / f"{folder.name}.ipynb"
    chosen = expected if expected in notebooks else notebooks[0] if len(notebooks) == 1 else None
    note = f"handed in as {one_line(chosen.name)}" if chosen and chosen != expected else ""
    problem, verdict, data = "", "", b""
    if chosen is None:
        names = sorted(path.name for path in folder.iterdir())
        listing = few([*map(one_line, names)], NAMED) or "nothing"
        problem = f"no {expected.name} was handed in; found: {listing}. Hand in one notebook, called {expected.name}"
        verdict, data = NEEDS_HUMAN, "\n".join(names).encode(errors="surrogateescape")
    else:
        problem, data = read_submitted(chosen)
        verdict = REFUSED if problem else ""
    verdict_key = key(data, contract + note + problem + verdict)
    return Submission(student, verdict_key, digest(data), None if problem else chosen, note, problem, verdict)


def read_submitted(path: Path) -> tuple[str, bytes]:
    """Read a file; return a problem, or an empty text and its bytes. Never follow a link or block on a pipe."""
    name = one_line(path.name)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror}); submit the file itself, not a link", b""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        return f"{name} is not a file; submit the notebook itself", b""
    with os.fdopen(handle, "rb") as file:
        if status.st_size > MAX_BYTES:
            size = f"{status.st_size >> 20} MiB"
            return f"{name} has {size}, the limit is {MAX_BYTES >> 20} MiB; clear its outputs and try again", b""
        return "", file.read()
