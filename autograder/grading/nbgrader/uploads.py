"""Submissions out of the zip files of Canvas, Moodle and Gradescope, and feedback back into one that they take.

Nothing of a zip file is unpacked by its own names: each notebook is matched to a student of the roster and written to
``submitted/``. What matches nobody is kept aside and named, never dropped.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from autograder.grading.inside.intake import MAX_BYTES
from autograder.grading.nbgrader.course import HIDDEN, CourseError, open_gradebook
from autograder.grading.nbgrader.names import name_problem, same_name
from autograder.render import one_line

CANVAS = re.compile(r"^(?P<who>[^_/]+)_(?P<late>LATE_)?(?P<id>\d+)_(?P<number>\d+)_(?P<file>[^/]+)$")
MOODLE = re.compile(r"^(?P<who>[^/]+)_(?P<number>\d+)_assignsubmission_file_?(?:/(?:.*/)?)?(?P<file>[^/]+)$")
GRADESCOPE = re.compile(r"^(?:[^/]+/)?(?P<id>submission_\d+)/(?:.*/)?(?P<file>[^/]+)$")
METADATA = "submission_metadata.yml"
MOST_FILES = 20_000


@dataclass(frozen=True)
class Upload:
    """One notebook of a zip file: the entry, whose it is as the file says, and when it was handed in, if it says so."""

    entry: str
    who: str
    at: str = ""
    ids: tuple[str, ...] = ()
    late: bool = False


@dataclass
class Collected:
    """What became of a zip file's entries: student ids, and the reason for each entry that is nobody's."""

    new: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    others: int = 0


def collect(course: Path, chapter: str, path: Path) -> Collected:
    """Write each notebook of an LMS's zip file to ``submitted/STUDENT/CHAPTER/``.

    Raises:
        CourseError: It is not a zip file of one of the three, or holds too much.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _collect(course.resolve(), chapter, archive)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
        raise CourseError(f"{path} cannot be read as a zip file: {error}; download it again") from None


def _collect(course: Path, chapter: str, archive: zipfile.ZipFile) -> Collected:
    files = [info for info in archive.infolist() if not info.is_dir()]
    if len(files) > MOST_FILES:
        raise CourseError(f"the zip file has {len(files):,} files; at most {MOST_FILES:,} are read")
    uploads = _uploads(archive, [info.filename for info in files])
    people, made, used = identities(course), Collected(), dict[str, str]()
    made.others = len(files) - len(uploads)
    sizes = {info.filename: info.file_size for info in files}
    for upload in uploads:
        student, why = match(upload, people)
        data = b""
        if sizes[upload.entry] > MAX_BYTES:
            why = f"it has {sizes[upload.entry]:,} bytes, and at most {MAX_BYTES:,} are read"
        else:
            with archive.open(upload.entry) as file:
                data = file.read(MAX_BYTES + 1)
        if not why and student in used and used[student] != upload.entry:
            why = (
                f"{student} has another notebook in this file, {one_line(used[student])}; put one in submitted/ by hand"
            )
        if why:
            made.aside[upload.entry] = why
            keep(course / HIDDEN / "unmatched" / chapter, upload.entry, data)
            continue
        used[student] = upload.entry
        getattr(made, put(course, chapter, student, upload, data)).append(student)
        made.late += [student] if upload.late else []
    if not uploads:
        raise CourseError(
            "the zip file has no notebook as Canvas, Moodle or Gradescope name them; give the file as it was downloaded"
        )
    _remember(course, chapter, used)
    return made


def _uploads(archive: zipfile.ZipFile, names: list[str]) -> list[Upload]:
    """The notebooks of the file, in the naming of the system that it comes from."""
    found = []
    told = next((name for name in names if PurePosixPath(name).name == METADATA), None)
    about = _gradescope(archive.read(told)) if told and archive.getinfo(told).file_size <= MAX_BYTES else {}
    for name in names:
        if not name.lower().endswith(".ipynb") or "/.ipynb_checkpoints/" in name or name.startswith("__MACOSX"):
            continue
        if (parts := GRADESCOPE.match(name)) and about:
            who, at, ids = about.get(parts["id"], (parts["id"], "", ()))
            found.append(Upload(name, who, at, ids))
        elif parts := MOODLE.match(name):
            found.append(Upload(name, parts["who"].rpartition("/")[2]))
        elif parts := CANVAS.match(PurePosixPath(name).name):
            found.append(Upload(name, parts["who"], "", (parts["id"],), bool(parts["late"])))
    return found


def _gradescope(text: bytes) -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Names, time and ids of each submission, from Gradescope's YAML, whose keys begin with a colon."""
    try:
        data: Any = yaml.safe_load(text)
        return {
            str(name).lstrip(":"): (
                ", ".join(str(person.get(":name", "")) for person in each[":submitters"]),
                _utc(each.get(":created_at")),
                tuple(
                    str(person[key]) for person in each[":submitters"] for key in (":sid", ":email") if person.get(key)
                ),
            )
            for name, each in data.items()
        }
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise CourseError(f"{METADATA} cannot be read: {error}; download the export again") from None


def _utc(value: Any) -> str:
    try:
        when = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).replace(" UTC", "+00:00"))
    except ValueError:
        return ""
    return f"{(when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def identities(course: Path) -> dict[str, set[str]]:
    """Everything that identifies each student: id, LMS number, email, and the name in the three systems' spellings."""
    with open_gradebook(course) as gradebook:
        people = {}
        for student in gradebook.students:
            first, last = str(student.first_name or ""), str(student.last_name or "")
            names = (
                {f"{first} {last}", f"{last} {first}", f"{last}, {first}", f"{last}{first}"} if first or last else set()
            )
            every = {str(student.id), student.lms_user_id, student.email, *names}
            people[str(student.id)] = {_form(str(each)) for each in every if each}
        return people


def _form(name: str) -> str:
    return re.sub(r"[\W_]+", "", same_name(name))


def match(upload: Upload, people: dict[str, set[str]]) -> tuple[str, str]:
    """The student whose upload it is, and an empty text; or the reason why it is nobody's."""
    for given in (*upload.ids, upload.who):
        found = [student for student, names in people.items() if _form(given) in names]
        if len(found) == 1 and not name_problem(found[0]):
            return found[0], ""
        if len(found) > 1:
            return "", f"{one_line(given)} may be any of {', '.join(found)}; put it in submitted/ by hand"
    spelt = {name: student for student, names in people.items() for name in names}
    near = get_close_matches(_form(upload.who), spelt, 1)
    like = f"; is it {spelt[near[0]]}?" if near else "; add the student with `meshcraft init . --students FILE`"
    return "", f"nobody on the list of students is called {one_line(upload.who)}{like}"


def put(course: Path, chapter: str, student: str, upload: Upload, data: bytes) -> str:
    """Put a notebook in place and keep one that it replaces; return which of ``new``, ``replaced``, ``same`` it is."""
    folder = course / "submitted" / student / chapter
    target = folder / f"{chapter}.ipynb"
    before = target.read_bytes() if target.is_file() and not target.is_symlink() else None
    if before is not None and before != data:
        stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{student}"
        keep(course / HIDDEN / "earlier" / chapter, f"{stamp}.ipynb", before)
    folder.mkdir(parents=True, exist_ok=True)
    if before != data:
        target.write_bytes(data)
    if upload.at:
        (folder / "timestamp.txt").write_text(upload.at)
    return "new" if before is None else "same" if before == data else "replaced"


def keep(folder: Path, name: str, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / re.sub(r"[^\w.()-]+", "_", name)[-200:]).write_bytes(data)


def _remember(course: Path, chapter: str, used: dict[str, str]) -> None:
    path = course / HIDDEN / "uploads" / f"{chapter}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**known, **used}, indent=1))


def feedback_zip(course: Path, chapter: str, pages: list[Path], to: Path) -> int:
    """Pack feedback pages under the names that the submissions had in the LMS's zip file; return their number."""
    path = course.resolve() / HIDDEN / "uploads" / f"{chapter}.json"
    entries = json.loads(path.read_text()) if path.is_file() else {}
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        for page in pages:
            student = page.parent.parent.name
            entry = entries.get(student, f"{student}.ipynb")
            parts = [part for part in PurePosixPath(entry).with_suffix(".html").parts if part not in ("..", "/")]
            archive.write(page, str(PurePosixPath(*parts)))
    return len(pages)
