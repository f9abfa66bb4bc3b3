"""A course folder: nbgrader's folders and gradebook, with ledger, secret and lock in `.meshcraft/`."""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from autograder.grading.nbgrader.ledger import Ledger
from autograder.grading.nbgrader.names import student_name
from autograder.grading.nbgrader.settings import CourseError, chapters_of, read_settings
from autograder.release.converters import course_config, gradebook_url, nbgrader_quiet, run_nbgrader, write_notebook
from autograder.release.notebook import source_notebook
from course.curriculum import chapter as find_chapter
from course.files import write_atomically

if TYPE_CHECKING:
    from nbgrader.api import Gradebook

HIDDEN = ".meshcraft"
SECRET_BYTES = 32
CONFIG_FILE = "nbgrader_config.py"
CONFIG = '''"""nbgrader's configuration of this course; start nbgrader and its formgrader in this folder."""

from pathlib import Path

from autograder.grading.nbgrader.bridge import configure

c = get_config()  # noqa: F821
configure(c, Path(__file__).resolve().parent)
'''


def make_course(folder: Path, chapters: list[str]) -> Path:
    """Make a course folder, or add chapters to one: source, release, gradebook, nbgrader's configuration.

    Raises:
        CourseError: The folder cannot be written.
    """
    folder = folder.resolve()
    try:
        (folder / "submitted").mkdir(parents=True, exist_ok=True)
        secret(folder)
        config = folder / CONFIG_FILE
        if not config.exists():
            write_atomically(config, CONFIG)
        for name in chapters:
            find_chapter(name)
            add_assignment(folder, name)
    except OSError as error:
        raise CourseError(f"the course folder {folder} cannot be written: {error}; choose another folder") from error
    return folder


def add_assignment(folder: Path, chapter: str) -> None:
    """Write the chapter's source notebook, if there is none, and let nbgrader make its release and gradebook entry."""
    source = folder / "source" / chapter / f"{chapter}.ipynb"
    if not source.exists():
        write_notebook(source_notebook(chapter), source)
    release(folder, chapter)


def release(folder: Path, chapter: str) -> None:
    """Let nbgrader make the release version and the gradebook entry from the existing source notebook."""
    from nbgrader.converters import GenerateAssignment

    from autograder.grading.nbgrader.points import read, require_agreement

    source = folder / "source" / chapter / f"{chapter}.ipynb"
    require_agreement(read(source), chapter, read_settings(folder), f"source/{chapter}/{chapter}.ipynb")
    config = course_config(folder, chapter)
    config.CourseDirectory.course_id = read_settings(folder).name
    config.GenerateAssignment.force = True
    run_nbgrader(GenerateAssignment, config)


def require_course(folder: Path) -> None:
    """Require a course folder: one that ``init`` has made, or any other with submissions.

    Raises:
        CourseError: It is not there, or is something else.
    """
    if not folder.is_dir():
        raise CourseError(f"there is no course folder {folder}; name one with --course")
    if not (folder / "submitted").is_dir():
        raise CourseError(
            f"{folder.resolve()} has no folder `submitted/`, so it is not a course folder; name one with --course, or "
            "make one with `meshcraft init`"
        )


def is_made(folder: Path) -> bool:
    """Return True if ``init`` or ``grade`` has made this folder a course: it has a secret."""
    return os.path.isfile(folder / HIDDEN / "secret")  # False, too, where only others may look


def require_folder(folder: Path, assignment: str) -> None:
    """Require a course folder, and the given chapter.

    Raises:
        CourseError: The folder is not one, or the chapter does not exist.
    """
    require_course(folder)
    try:
        find_chapter(assignment)
    except LookupError as error:
        raise CourseError(str(error)) from None


def require_assignment(folder: Path, assignment: str) -> None:
    """Make sure that the course has this assignment, adding it to a folder that has only submissions.

    Raises:
        CourseError: The course has other chapters but not this one, or has dropped it.
    """
    if assignment in read_settings(folder).dropped:
        raise CourseError(
            f"{assignment} was dropped from this course; `meshcraft init {shlex.quote(str(folder))} --chapter "
            f"{assignment}` restores it"
        )
    require_in_course(folder, assignment)
    release = folder / "release" / assignment / f"{assignment}.ipynb"
    if not (release.exists() and (folder / CONFIG_FILE).exists() and _in_gradebook(folder, assignment)):
        book_again(folder, assignment)
        make_course(folder, [assignment])


def _in_gradebook(folder: Path, assignment: str) -> bool:
    """Return True if the gradebook has the assignment with its cells, or cannot be read, which booking reports."""
    if not (folder / "gradebook.db").exists():
        return False
    try:
        with open_gradebook(folder) as gradebook:
            return any(each.name == assignment and each.notebooks for each in gradebook.assignments)
    except CourseError:
        return True


def book_again(folder: Path, assignment: str) -> None:
    """Make the next grading enter every verdict in the gradebook again."""
    with open_ledger(folder) as ledger:
        for entry in ledger.status(assignment):
            ledger.booked(assignment, entry.student, None)


def require_in_course(folder: Path, assignment: str) -> None:
    """Make sure that the course has, or had, this assignment, or is a folder that has only submissions.

    Raises:
        CourseError: The course has other chapters but not this one.
    """
    chapters = chapters_of(folder)
    if chapters and assignment not in chapters:
        raise CourseError(
            f"{assignment} is not in this course, which has {', '.join(chapters)}; `meshcraft init "
            f"{shlex.quote(str(folder))} --chapter {assignment}` adds it"
        )


def open_ledger(folder: Path) -> Ledger:
    """The course's ledger.

    Raises:
        CourseError: The folder is not a course folder.
    """
    require_course(folder)
    (folder / HIDDEN).mkdir(mode=0o700, exist_ok=True)
    return Ledger(folder / HIDDEN / "ledger.sqlite")


def has_gradebook(folder: Path) -> bool:
    """Return True if the course has a gradebook; a folder with only submissions has none yet.

    Raises:
        CourseError: The gradebook is lost.
    """
    path = folder.resolve() / "gradebook.db"
    if not path.exists() and (folder / "release").is_dir():
        raise CourseError(
            f"the gradebook {path} is missing, and with it due dates, students' names and points given by hand; "
            "restore it from a backup, or make a new one with `meshcraft grade --all`"
        )
    return path.exists()


@contextmanager
def open_gradebook(folder: Path, *, create: bool = False) -> Iterator[Gradebook]:
    """nbgrader's gradebook of the course; ``create`` makes a missing one.

    Raises:
        CourseError: There is none, or it cannot be read or written.
    """
    from nbgrader.api import Gradebook
    from sqlalchemy.exc import DatabaseError

    require_course(folder)
    path = folder.resolve() / "gradebook.db"
    if not create and not has_gradebook(folder):
        raise CourseError(
            f"{path.parent} has no gradebook yet; `meshcraft init {shlex.quote(str(path.parent))} --students FILE` "
            "makes one"
        )
    with nbgrader_quiet():
        try:
            with Gradebook(gradebook_url(folder.resolve()), read_settings(folder).name) as gradebook:
                yield gradebook
        except DatabaseError as error:
            message = f"the gradebook {path} cannot be used: {error.orig}"
            raise CourseError(f"{message}; wait until no other program writes to it, and run this again") from error


def secret(folder: Path) -> bytes:
    """The secret from which the inputs of official grading are drawn; created at first use, readable by its owner only.

    Raises:
        CourseError: The file is damaged, or others can read it.
    """
    path = folder / HIDDEN / "secret"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"secret.{os.getpid()}")
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)  # unlike a rename, this never replaces the secret of another process
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    _require_private(path)
    try:
        content = path.read_bytes()
    except PermissionError:
        raise CourseError(
            f"{path} can be read only by {path.owner()}, who grades; assistants review and export"
        ) from None
    if len(content) != SECRET_BYTES:
        raise CourseError(
            f"{path} is damaged: {len(content)} bytes instead of {SECRET_BYTES}; restore it from a backup"
        )
    return content


def _require_private(path: Path) -> None:
    shared = read_settings(path.parent.parent).group
    for which in (path.parent, path):
        mode = stat.S_IMODE(which.stat().st_mode)
        if mode & (0o007 if shared and which == path.parent else 0o077):
            close = f"chmod 700 {shlex.quote(str(path.parent))} && chmod 600 {shlex.quote(str(path))}"
            raise CourseError(
                f"{which} is open to other users of this machine (mode {mode:o}), and with the secret in it they can "
                f"compute the inputs of the official grade; close it: {close}"
            )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the course's lock. The system drops it when its holder dies, so it never blocks forever.

    Raises:
        CourseError: Another process holds it.
    """
    path = folder / HIDDEN / "lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        owner = path.owner() if path.parent.is_dir() and path.exists() else "its owner"
        raise CourseError(
            f"{path} cannot be locked: {error.strerror}; only {owner} grades and changes this course, "
            "assistants review and export"
        ) from error
    except OSError as error:
        raise CourseError(
            f"{path} cannot be locked: {error.strerror}; make the course folder writable for you"
        ) from error
    with os.fdopen(handle, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = file.read().strip() or "unknown"
            raise CourseError(
                f"this course is being graded already (process {holder}); wait for it, or end it, then run this again"
            ) from None
        with suppress(OSError):  # a full disk; the pid is only for the message above
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield


def students(folder: Path) -> list[str]:
    """All students the course knows: those with a folder under `submitted/`, and those in the gradebook."""
    submitted = folder / "submitted"
    folders = [path.name for path in submitted.iterdir() if path.is_dir()] if submitted.is_dir() else []
    names = {student_name(name) for name in folders if not name.startswith(".")}
    if has_gradebook(folder):
        with open_gradebook(folder) as book:
            names |= {str(student.id) for student in book.students}
    return sorted(names)
