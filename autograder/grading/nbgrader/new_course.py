"""An instructor's own course: created by `meshcraft init`, which can also change an existing one."""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from autograder.grading.nbgrader import course, varied
from autograder.grading.nbgrader.names import name_problem
from autograder.grading.nbgrader.settings import FILE, CourseError, Settings, checked, read_settings, write_settings
from autograder.release.converters import write_notebook
from autograder.release.notebook import source_notebook

KNOWN = ("submitted", "source", "release", "autograded", "feedback", "gradebook.db", course.CONFIG_FILE, FILE)
COLUMNS = ("id", "first_name", "last_name", "email", "lms_user_id")
DUE = "due"
NONE = "none"


def init_course(
    folder: Path,
    *,
    chapters: list[str],
    due: Mapping[str, datetime | None],
    settings: Mapping[str, Any],
    students: list[dict[str, str]],
) -> dict[str, str]:
    """Create a course folder, or add to one and change its dates and settings. Nothing existing is lost.

    Args:
        folder: The course folder.
        chapters: Chapters to add; an existing one keeps its source notebook.
        due: New due dates by chapter; None removes a date.
        settings: The fields of ``Settings`` to change.
        students: Rows of ``read_students``, for the gradebook.

    Returns:
        The resulting state, by subject.

    Raises:
        CourseError: The folder holds something else, is in use, or cannot be written.
    """
    folder = folder.resolve()
    _require_ours(folder)
    settled = _settled(folder, settings)
    unknown = sorted({*due} - {*_chapters(folder), *chapters})
    if unknown:
        raise CourseError(f"{', '.join(unknown)} is not in this course; add it with --chapter {unknown[0]}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with course.locked(folder):
            (folder / "submitted").mkdir(exist_ok=True)
            settled = replace(settled, variants=_variants(folder, chapters, settled, settings))
            if not (folder / FILE).exists() or settled != read_settings(folder):
                write_settings(folder, settled)
            config = folder / course.CONFIG_FILE
            if not config.exists():
                config.write_text(course.CONFIG, encoding="utf-8")
            dates = _assignments(folder, chapters, due, settled)
            count = _enrol(folder, students)
    except OSError as error:
        raise CourseError(f"the course folder {folder} cannot be written: {error}; choose another folder") from error
    return {
        "course": f"{settled.name}, in {folder}",
        **{f"chapter {name}": f"due {shown(date)}" if date else "no due date" for name, date in dates.items()},
        "late": policy(settled) or "nothing is taken off",
        "variants": ", ".join(f"{name}: {which}" for name, which in settled.variants.items()) or "none are asked for",
        "exchange": settled.exchange or "nbgrader's own, as its configuration on this machine says",
        "students": f"{count} in the gradebook",
        "secret": f"{folder / course.HIDDEN / 'secret'}, only for you; keep a copy of it: grades are repeated with it",
    }


def parse_due(text: str) -> datetime | None:
    """Parse a due date into UTC; ``none`` is None. Without a time zone, this machine's applies.

    Raises:
        CourseError: It is not a date with a time.
    """
    if text == NONE:
        return None
    try:
        if "T" not in text and " " not in text:
            raise ValueError("there is no time in it")
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError as error:
        raise CourseError(
            f"the due date {text!r} cannot be read: {error}; write 2026-12-01T18:00 or 2026-12-01T18:00+01:00, or none"
        ) from None


def shown(due: datetime) -> str:
    """The date and time in this machine's time zone, and in UTC if that differs."""
    here = due.astimezone()
    utc = "" if here.utcoffset() == due.utcoffset() else f" ({due:%Y-%m-%d %H:%M} UTC)"
    return f"{here:%Y-%m-%d %H:%M %Z}{utc}"


def policy(settings: Settings) -> str:
    """The late penalty as a sentence; empty if there is none."""
    if not settings.late_per_day:
        return ""
    most = f", {settings.late_at_most:g} % at most" if settings.late_at_most < 100 else ""
    return f"each day begun after the due date takes off {settings.late_per_day:g} % of the points earned{most}"


def read_students(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with nbgrader's columns for a student; only ``id`` is required.

    Raises:
        CourseError: It cannot be read, or a row is invalid.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            head = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = head
            rows = [(reader.line_num, {name: (row.get(name) or "").strip() for name in COLUMNS}) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{path} cannot be read as CSV: {error}; save it as CSV in UTF-8") from None
    if "id" not in head:
        raise CourseError(
            f"{path} has the columns {', '.join(head) or 'none'}; it needs id, and may have {COLUMNS[1:]}"
        )
    seen: dict[str, int] = {}
    for line, row in rows:
        if odd := name_problem(row["id"]):
            raise CourseError(f"{path}, line {line}: the id {row['id']!r} cannot name a folder, it {odd}")
        if row["id"] in seen:
            raise CourseError(f"{path}, line {line}: {row['id']} is in line {seen[row['id']]} already; remove one")
        seen[row["id"]] = line
    return [row for _, row in rows]


def due_dates(folder: Path) -> dict[str, datetime | None]:
    """Each assignment's due date in UTC, as the gradebook has it."""
    if not (folder / "gradebook.db").exists():
        return {}
    with course.open_gradebook(folder) as gradebook:
        stored: dict[str, Any] = {str(each.name): each.duedate for each in gradebook.assignments}
    return {name: date and date.replace(tzinfo=UTC) for name, date in stored.items()}


def _require_ours(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CourseError(f"{folder} is not a folder; name one, or one that is not there yet")
    if not folder.exists() or (folder / course.HIDDEN).is_dir():
        return
    others = sorted(path.name for path in folder.iterdir() if path.name not in KNOWN)
    if others:
        listed = ", ".join(others[:4]) + (", …" if len(others) > 4 else "")
        raise CourseError(
            f"{folder} contains something else ({listed}); name an empty folder, or one that is not there"
        )
    config = folder / course.CONFIG_FILE
    if config.exists() and "autograder.grading.nbgrader.bridge" not in config.read_text(encoding="utf-8"):
        raise CourseError(f"{config} is a configuration without Meshcraft; move it away, and add to the new one after")


def _settled(folder: Path, changes: Mapping[str, Any]) -> Settings:
    before = (
        read_settings(folder)
        if (folder / FILE).exists()
        else Settings(name=course_name(folder.name), vary=not _chapters(folder))
    )
    try:
        return checked(replace(before, **changes))
    except ValueError as error:
        raise CourseError(f"{error}; use the options of `meshcraft init` to choose others") from None


def course_name(folder: str) -> str:
    """The course's default name in the exchange: the folder's, without characters that are not allowed there."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder).strip("-.") or Settings().name


def _chapters(folder: Path) -> list[str]:
    return [path.stem for path in sorted((folder / "source").glob("*/*.ipynb")) if path.stem == path.parent.name]


def _variants(folder: Path, chapters: list[str], settled: Settings, changes: Mapping[str, Any]) -> dict[str, str]:
    """Every chapter's variants: drawn from the secret if new or changed, else unchanged."""
    secret, there = course.secret(folder), _chapters(folder)
    variants = dict(settled.variants)
    for name in chapters or (there if "vary" in changes else []):
        if name in there and "vary" not in changes:
            continue
        drawn = varied.choose(secret, name) if settled.vary else {}
        new = {f"{name}.{function}": variant for function, variant in drawn.items()}
        old = {which: variant for which, variant in variants.items() if which.startswith(f"{name}.")}
        if new != old and any((folder / "submitted").glob(f"*/{name}")):
            raise CourseError(f"{name} already has submissions; its variants can no longer change")
        variants = {which: variant for which, variant in variants.items() if which not in old} | new
    return variants


def _assignments(
    folder: Path, chapters: list[str], due: Mapping[str, datetime | None], settings: Settings
) -> dict[str, datetime | None]:
    """Release new or changed chapters, and set the dates; return the due date of every chapter in the course."""
    dates = due_dates(folder)
    for name in dict.fromkeys([*_chapters(folder), *chapters]):
        dates[name] = due.get(name, dates.get(name))
        path = folder / "source" / name / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4) if path.exists() else source_notebook(name)
        changed = _write_due(notebook, dates[name], settings)
        changed |= varied.state(notebook, name, varied.requested_in(settings.variants, name))
        if changed or not path.exists():
            write_notebook(notebook, path)
        if changed or not (folder / "release" / name / f"{name}.ipynb").exists():
            course.release(folder, name)
        with course.open_gradebook(folder) as gradebook:
            gradebook.update_or_create_assignment(name, duedate=dates[name])  # type: ignore[arg-type]
    return dates


def _write_due(notebook: NotebookNode, due: datetime | None, settings: Settings) -> bool:
    """Write the due date into a cell after the notebook's first; return True if that changes it."""
    late = policy(settings)
    text = f"**Due {shown(due)}.**" + (f" {late[0].upper()}{late[1:]}." if late else "") if due else ""
    notice = next((cell for cell in notebook.cells if cell.get("id") == DUE), None)
    if (notice.source if notice else "") == text:
        return False
    notebook.cells = [cell for cell in notebook.cells if cell is not notice]
    if text:
        notebook.cells.insert(1, new_markdown_cell(text, id=DUE))
    return True


def _enrol(folder: Path, students: list[dict[str, str]]) -> int:
    """Add the students to the gradebook, or complete their data; return the number of students."""
    with course.open_gradebook(folder) as gradebook:
        for row in students:
            known: Any = {name: value for name, value in row.items() if value and name != "id"}
            gradebook.update_or_create_student(row["id"], **known)
        return len(gradebook.students)
