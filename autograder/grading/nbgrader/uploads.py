"""Submissions as Canvas, Moodle and Gradescope export them, and feedback as a zip file that they accept.

Submissions come as a zip file, or as the folder that it was unpacked to. No file of a zip file is unpacked under its
own name: each notebook is matched to a student on the roster and written to ``submitted/``. One that matches nobody is
kept aside and named, never dropped.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from autograder.grading.inside.intake import MAX_BYTES, IntakeError, parse_notebook
from autograder.grading.nbgrader.course import HIDDEN, CourseError, open_gradebook
from autograder.grading.nbgrader.names import name_problem, same_name
from autograder.render import one_line
from course.curriculum import CHAPTERS
from course.files import write_atomically

# As Canvas's lib/content_zipper.rb names them; students' names may have underscores, and anonymous files have no name.
CANVAS = re.compile(r"^(?P<who>[^/]+?)_(?P<late>LATE_)?(?P<id>\d+)_(?P<number>\d+)_(?P<file>[^/]+)$")
ANONYMOUS = re.compile(r"^(?:LATE_)?anon_(?P<id>[^_/]+)_(?P<number>\d+)_(?P<file>[^/]+)$")
MOODLE = re.compile(r"^(?P<who>[^/]+)_(?P<number>\d+)_assignsubmission_file_?(?:/(?:.*/)?)?(?P<file>[^/]+)$")
GRADESCOPE = re.compile(r"^(?:[^/]+/)?(?P<id>submission_\d+)/(?:.*/)?(?P<file>[^/]+)$")
METADATA = "submission_metadata.yml"
MOST_FILES = 20_000
BY_HAND = "put it in submitted/ by hand"
AS_GIVEN = "give the zip file as it was downloaded, or the folder that it was unpacked to"


@dataclass(frozen=True)
class Upload:
    """One notebook: its entry, the student whom the entry names, and when it was handed in, if that is known.

    ``problem`` is the reason why it cannot be matched to anyone.
    """

    entry: str
    who: str
    at: str = ""
    ids: tuple[str, ...] = ()
    late: bool = False
    problem: str = ""


@dataclass
class Collected:
    """The outcome for all entries: student ids, and for each entry that matches nobody, the reason."""

    new: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    others: int = 0


@dataclass(frozen=True)
class _Files:
    """The files of a zip file or a folder: the size of each by its name, and a function that reads it."""

    sizes: Mapping[str, int]
    read: Callable[[str], bytes]


def collect(course: Path, chapter: str, path: Path) -> Collected:
    """Write each notebook that an LMS handed over to ``submitted/STUDENT/CHAPTER/``.

    Raises:
        CourseError: It is not a zip file or folder from one of the three, or holds too much.
    """
    try:
        if path.is_dir():
            return _collect(course.resolve(), chapter, _in_folder(path))
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
            return _collect(course.resolve(), chapter, _Files(sizes, archive.read))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
        raise CourseError(f"{path} cannot be read as a zip file or a folder: {error}; {AS_GIVEN}") from None


def _in_folder(folder: Path) -> _Files:
    """The files of an unpacked zip file; links are not followed."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if not path.is_symlink()}
    sizes = {name: path.stat().st_size for name, path in files.items() if path.is_file()}
    return _Files(sizes, lambda name: files[name].read_bytes())


def _collect(course: Path, chapter: str, files: _Files) -> Collected:
    if len(files.sizes) > MOST_FILES:
        raise CourseError(f"there are {len(files.sizes):,} files in it; at most {MOST_FILES:,} are read")
    uploads = _uploads(files)
    if all(upload.problem for upload in uploads):
        raise CourseError(f"it has no notebook as Canvas, Moodle or Gradescope name them; {AS_GIVEN}")
    _require_chapter(chapter, uploads, files)
    people, collected, used = identities(course), Collected(), dict[str, str]()
    collected.others = len(files.sizes) - len(uploads)
    for upload in uploads:
        student, why = match(upload, people)
        data = b""
        if files.sizes[upload.entry] > MAX_BYTES:
            why = f"it has {files.sizes[upload.entry]:,} bytes, and at most {MAX_BYTES:,} are read"
        else:
            data = files.read(upload.entry)
            why = why or other_chapter(data, chapter)
        if not why and student in used and used[student] != upload.entry:
            why = f"{student} has another notebook here, {one_line(used[student])}; put one in submitted/ by hand"
        if why:
            collected.aside[upload.entry] = why
            keep(course / HIDDEN / "unmatched" / chapter, upload.entry, data)
            continue
        used[student] = upload.entry
        _record(course, chapter, student, upload)
        getattr(collected, put(course, chapter, student, upload, data)).append(student)
        collected.late += [student] if upload.late else []
    return collected


def _uploads(files: _Files) -> list[Upload]:
    """The notebooks, by the naming scheme of the system that they come from; those named otherwise have a problem."""
    uploads = []
    metadata_name = next((name for name in files.sizes if PurePosixPath(name).name == METADATA), None)
    metadata = (
        _gradescope(files.read(metadata_name)) if metadata_name and files.sizes[metadata_name] <= MAX_BYTES else {}
    )
    for name in files.sizes:
        parts, file = PurePosixPath(name).parts, PurePosixPath(name).name
        if not file.lower().endswith(".ipynb") or {".ipynb_checkpoints", "__MACOSX"} & {*parts}:
            continue
        if (groups := GRADESCOPE.match(name)) and metadata:
            who, at, ids = metadata.get(groups["id"], (groups["id"], "", ()))
            uploads.append(Upload(name, who, at, ids))
        elif groups := MOODLE.match(name):
            uploads.append(Upload(name, groups["who"].rpartition("/")[2]))
        elif groups := ANONYMOUS.match(file):
            why = "Canvas hides the names of this assignment; end its anonymous grading there, and download it again"
            uploads.append(Upload(name, groups["id"], problem=why))
        elif groups := CANVAS.match(file):
            uploads.append(Upload(name, groups["who"], "", (groups["id"],), bool(groups["late"])))
        else:
            why = f"Canvas, Moodle and Gradescope name no file like this; {BY_HAND}"
            uploads.append(Upload(name, file, problem=why))
    return uploads


def _require_chapter(chapter: str, uploads: list[Upload], files: _Files) -> None:
    """Require a notebook of the chapter, or only notebooks that do not show theirs.

    Raises:
        CourseError: The notebooks are of other chapters.
    """
    others = Counter[str]()
    for upload in uploads:
        if files.sizes[upload.entry] <= MAX_BYTES:
            likeliest = likeliest_chapter(files.read(upload.entry), chapter)
            if likeliest == chapter:
                return
            others[likeliest] += 1
    del others[""]
    if others:
        counts = ", ".join(f"{count} of {name}" for name, count in others.items())
        raise CourseError(
            f"no notebook in it is of {chapter}, and {counts}; nothing was collected: name the other chapter, or the "
            f"zip file of {chapter}"
        )


def likeliest_chapter(data: bytes, expected: str) -> str:
    """The chapter whose functions a notebook has, the expected one before any other; empty if it has none."""
    try:
        cells = {cell.id for cell in parse_notebook("", data).everything}
    except IntakeError:
        return ""
    matches = [entry.name for entry in CHAPTERS if cells & {*entry.names}]
    return expected if expected in matches else next(iter(matches), "")


def other_chapter(data: bytes, chapter: str) -> str:
    """The problem of a notebook that is another chapter's; empty if there is none."""
    likeliest = likeliest_chapter(data, chapter)
    return f"it is a notebook of {likeliest}, not of {chapter}" if likeliest not in ("", chapter) else ""


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
            identifiers = {str(student.id), student.lms_user_id, student.email, *names}
            people[str(student.id)] = {_form(str(each)) for each in identifiers if each}
        return people


def _form(name: str) -> str:
    return re.sub(r"[\W_]+", "", same_name(name))


def match(upload: Upload, people: dict[str, set[str]]) -> tuple[str, str]:
    """Return the student whose upload it is and an empty text, or an empty text and the reason why it is nobody's."""
    if upload.problem:
        return "", upload.problem
    for identifier in (*upload.ids, upload.who):
        matches = [student for student, names in people.items() if _form(identifier) in names]
        if len(matches) == 1 and not name_problem(matches[0]):
            return matches[0], ""
        if len(matches) > 1:
            return "", f"{one_line(identifier)} could be any of {', '.join(matches)}; {BY_HAND}"
    spelt = {name: student for student, names in people.items() for name in names}
    near = get_close_matches(_form(upload.who), spelt, 1)
    suggestion = f"; is it {spelt[near[0]]}?" if near else "; add the student with `meshcraft init . --students FILE`"
    return "", f"nobody on the list of students is called {one_line(upload.who)}{suggestion}"


def put(course: Path, chapter: str, student: str, upload: Upload, data: bytes) -> str:
    """Put a notebook in place and keep one that it replaces, with its submission time.

    Returns:
        ``new``, ``replaced`` or ``same``.
    """
    folder = course / "submitted" / student / chapter
    target, time = folder / f"{chapter}.ipynb", folder / "timestamp.txt"
    before = target.read_bytes() if target.is_file() and not target.is_symlink() else None
    if before is not None and before != data:
        stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{student}"
        keep(course / HIDDEN / "earlier" / chapter, f"{stamp}.ipynb", before)
        if time.is_file() and not time.is_symlink():  # the time of the earlier notebook
            keep(course / HIDDEN / "earlier" / chapter, f"{stamp}.txt", time.read_bytes())
            time.unlink()
    if before != data:
        write_atomically(target, data)
    if upload.at:
        write_atomically(time, upload.at)
    return "new" if before is None else "same" if before == data else "replaced"


def keep(folder: Path, name: str, data: bytes) -> None:
    write_atomically(folder / re.sub(r"[^\w.()-]+", "_", name)[-200:], data)


def _record(course: Path, chapter: str, student: str, upload: Upload) -> None:
    """Record the name of a student's entry, and whether the LMS marks it as late; it does not say by how much."""
    path = course / HIDDEN / "uploads" / f"{chapter}.json"
    entries = read_state(path)
    if entries.get(student) != upload.entry:
        write_atomically(path, json.dumps({**entries, student: upload.entry}, indent=1))
    before = marked_late(course, chapter)
    late = before | {student} if upload.late else before - {student}
    if late != before:
        write_atomically(course / HIDDEN / "late" / f"{chapter}.json", json.dumps(sorted(late)))


def read_state(path: Path) -> Any:
    """The content of a JSON file; an empty dict if there is none.

    Raises:
        CourseError: The file is damaged.
    """
    try:
        return json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise CourseError(f"{path} is damaged ({error}); restore it from a backup, or remove it") from None


def marked_late(course: Path, chapter: str) -> set[str]:
    """The students whose collected submission the LMS marks as late."""
    return {*read_state(course / HIDDEN / "late" / f"{chapter}.json")}


def feedback_zip(course: Path, chapter: str, pages: list[Path], to: Path) -> int:
    """Pack feedback pages under the names that the submissions had in the LMS's zip file; return their number."""
    entries = read_state(course / HIDDEN / "uploads" / f"{chapter}.json")
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        for page in pages:
            student = page.parent.parent.name
            entry = entries.get(student, f"{student}.ipynb")
            parts = [part for part in PurePosixPath(entry).with_suffix(".html").parts if part not in ("..", "/")]
            archive.write(page, str(PurePosixPath(*parts)))
    return len(pages)
