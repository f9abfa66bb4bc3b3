"""A course folder: nbgrader's folders and gradebook, and beside them `.meshcraft/` with ledger, secret and lock."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autograder.grading.ledger import Ledger
from autograder.notebook import course_config, nbgrader_quiet, run_nbgrader, source_notebook, write_notebook
from course.curriculum import chapter as find_chapter

HIDDEN = ".meshcraft"
SECRET_BYTES = 32
STUDENT = re.compile(r"[\w@+-][\w @.+-]*")
CONFIG = '''"""nbgrader's configuration of this course; start nbgrader and its formgrader in this folder."""

from pathlib import Path

from autograder.grading.bridge import configure

c = get_config()  # noqa: F821
configure(c, Path(__file__).resolve().parent)
'''


class CourseError(Exception):
    """The course folder cannot be used; the message says why and what to do."""


def make_course(folder: Path, chapters: list[str]) -> Path:
    """Make a course folder, or add chapters to one: source, release, gradebook, nbgrader's configuration.

    Raises:
        CourseError: the folder cannot be written.
    """
    folder = folder.resolve()
    try:
        (folder / "submitted").mkdir(parents=True, exist_ok=True)
        secret(folder)
        config = folder / "nbgrader_config.py"
        if not config.exists():
            config.write_text(CONFIG, encoding="utf-8")
        for name in chapters:
            find_chapter(name)
            add_assignment(folder, name)
    except OSError as error:
        raise CourseError(f"the course folder {folder} cannot be written: {error}; choose another folder") from error
    return folder


def add_assignment(folder: Path, chapter: str) -> None:
    """Write the chapter's source notebook and let nbgrader make its release version and its gradebook entry."""
    from nbgrader.converters import GenerateAssignment

    write_notebook(source_notebook(chapter), folder / "source" / chapter / f"{chapter}.ipynb")
    config = course_config(folder, chapter)
    config.GenerateAssignment.force = True
    run_nbgrader(GenerateAssignment, config)


def require_folder(folder: Path, assignment: str) -> None:
    """Make sure that this is a folder with submissions, and that there is such a chapter.

    Raises:
        CourseError: it is not, or there is none.
    """
    if not folder.is_dir():
        raise CourseError(f"there is no course folder {folder}; name the folder that holds `submitted/`")
    try:
        find_chapter(assignment)
    except LookupError as error:
        raise CourseError(str(error)) from None
    if not (folder / "submitted").is_dir():
        raise CourseError(f"{folder} has no folder `submitted/`; submissions lie in submitted/STUDENT/{assignment}/")


def require_assignment(folder: Path, assignment: str) -> None:
    """Make sure that the course has this assignment, adding it to a folder that has only submissions."""
    release = folder / "release" / assignment / f"{assignment}.ipynb"
    if not (release.exists() and (folder / "gradebook.db").exists() and (folder / "nbgrader_config.py").exists()):
        make_course(folder, [assignment])


def open_ledger(folder: Path) -> Ledger:
    """The course's ledger."""
    return Ledger(folder / HIDDEN / "ledger.sqlite")


def secret(folder: Path) -> bytes:
    """The secret from which the inputs of official grading are drawn; made at first use, for the owner alone.

    Raises:
        CourseError: the file is damaged.
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
    found = path.read_bytes()
    if len(found) != SECRET_BYTES:
        raise CourseError(f"{path} is damaged: {len(found)} bytes instead of {SECRET_BYTES}; put it back from a backup")
    return found


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the course's lock. The system drops it when its holder dies, so a dead one never blocks.

    Raises:
        CourseError: another process holds it.
    """
    path = folder / HIDDEN / "lock"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CourseError(f"no lock at {path}: {error.strerror}; make the course folder writable for you") from error
    with os.fdopen(handle, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = file.read().strip() or "unknown"
            raise CourseError(
                f"this course is being graded already (process {holder}); wait for it, or end it, then run this again"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def students(folder: Path, assignment: str) -> list[str]:
    """Everyone the course knows: who has a folder under `submitted/`, and who is in the gradebook."""
    submitted = folder / "submitted"
    names = {entry.name for entry in submitted.iterdir() if entry.is_dir()} if submitted.is_dir() else set()
    if (folder / "gradebook.db").exists():
        from nbgrader.api import Gradebook

        with nbgrader_quiet(), Gradebook(f"sqlite:///{folder.resolve() / 'gradebook.db'}") as book:
            names |= {str(student.id) for student in book.students}
    return sorted(name for name in names if not name.startswith("."))
