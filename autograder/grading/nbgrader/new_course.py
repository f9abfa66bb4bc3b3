"""An instructor's own course: created by `meshcraft init`, which can also change an existing one."""

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from autograder.contract.task import contract_files, load
from autograder.grading.nbgrader import course, task_variants
from autograder.grading.nbgrader.changes import log_changes, state
from autograder.grading.nbgrader.due_dates import due_dates, policy, shown
from autograder.grading.nbgrader.group import close, share
from autograder.grading.nbgrader.limit_factors import limits_in, require_possible
from autograder.grading.nbgrader.points import points_in, read, require_agreement, set_points, ungraded, worth
from autograder.grading.nbgrader.rosters import COLUMNS
from autograder.grading.nbgrader.settings import (
    FILE,
    CourseError,
    Settings,
    chapters_of,
    checked,
    read_settings,
    write_settings,
)
from autograder.release.converters import write_notebook
from autograder.release.notebook import source_notebook
from course.curriculum import contract_folder, is_own
from course.files import write_atomically

KNOWN = (
    "submitted",
    "source",
    "release",
    "autograded",
    "feedback",
    "gradebook.db",
    "rubrics",
    "chapters",
    "solutions",
    "exercises",
    course.CONFIG_FILE,
    course.HIDDEN,
    FILE,
)
DUE = "due"


def init_course(
    folder: Path,
    *,
    chapters: list[str],
    due: Mapping[str, datetime | None],
    settings: Mapping[str, Any],
    students: list[dict[str, str]],
    points: Mapping[str, float] | None = None,
    limits: Mapping[str, float] | None = None,
    drop: Collection[str] = (),
    withdraw: Collection[str] = (),
    undoes: int = 0,
) -> dict[str, str]:
    """Create a course folder, or add to one and change its dates and settings. Nothing existing is lost.

    Args:
        folder: The course folder.
        chapters: Chapters to add; an existing one keeps its source notebook.
        due: New due dates by chapter; None removes a date.
        settings: The fields of ``Settings`` to change.
        students: Rows of ``read_students``, for the gradebook.
        points: New points by ``chapter.function``; the contract's own if not given.
        limits: New factors on limits by ``chapter.function.fact``; 1 removes one.
        drop: Chapters that no longer count. What was submitted and graded stays.
        withdraw: Students who have left the course. Their work and grades stay.
        undoes: The number of the logged change that this undoes.

    Returns:
        The resulting state, by subject.

    Raises:
        CourseError: The folder holds something else, is in use, or cannot be written.
    """
    folder = folder.resolve()
    _require_ours(folder)
    new_settings = _changed_settings(folder, settings)
    all_chapters = {*chapters_of(folder), *chapters}
    if unknown := sorted({*due} - all_chapters):
        raise CourseError(f"{', '.join(unknown)} is not in this course; add it with --chapter {unknown[0]}")
    if unknown := sorted({*drop} - all_chapters):
        listed = f"which has {', '.join(sorted(all_chapters))}" if all_chapters else "which is new"
        raise CourseError(f"{', '.join(unknown)} cannot be dropped: it is not in this course, {listed}")
    if new_settings.exchange and Path(new_settings.exchange).resolve().is_relative_to(folder):
        raise CourseError(
            f"the exchange {new_settings.exchange} is inside the course folder, which only you can access; name a "
            "folder that students' accounts can access, outside it"
        )
    before, old = state(folder), read_settings(folder) if folder.is_dir() else Settings()
    new_settings = _with_points(new_settings, points or {}, {*new_settings.dropped, *drop} - {*chapters})
    new_settings = _with_limits(new_settings, limits or {}, [*chapters_of(folder), *chapters])
    former = {name: worth(old, name) for name in chapters_of(folder)}
    for name, points_before in former.items():
        notebook = read(folder / "source" / name / f"{name}.ipynb")
        set_points(notebook, worth(new_settings, name), points_before)
        require_agreement(notebook, name, new_settings, f"source/{name}/{name}.ipynb")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with course.locked(folder):
            (folder / "submitted").mkdir(exist_ok=True)
            new_settings = replace(new_settings, variants=_variants(folder, chapters, new_settings, settings))
            course.secret(folder)
            if not (folder / FILE).exists() or new_settings != read_settings(folder):
                write_settings(folder, new_settings)
            config = folder / course.CONFIG_FILE
            if not config.exists():
                write_atomically(config, course.CONFIG)
            dates = _assignments(folder, chapters, due, new_settings, former)
            count = _enrol(folder, students, withdraw)
            log_changes(folder, before, students, withdraw, undoes)
            if old.group and not new_settings.group:
                close(folder)
            share(folder)
    except OSError as error:
        raise CourseError(f"the course folder {folder} cannot be written: {error}; choose another folder") from error
    return _outcome(folder, new_settings, dates, count)


def _outcome(folder: Path, settings: Settings, dates: Mapping[str, datetime | None], students: int) -> dict[str, str]:
    """The state of a course, by subject."""
    return {
        "course": f"{settings.name}, in {folder}",
        **{f"chapter {name}": f"due {shown(date)}" if date else "no due date" for name, date in dates.items()},
        **({"dropped": f"{', '.join(settings.dropped)}; submissions and grades are kept"} if settings.dropped else {}),
        **({"points": ", ".join(f"{n}: {p:g}" for n, p in settings.points.items())} if settings.points else {}),
        "late": policy(settings) or "nothing is taken off",
        **({"limits": ", ".join(f"{n}: {f:g} times" for n, f in settings.limits.items())} if settings.limits else {}),
        **({"budget": f"{settings.budget:g} processor seconds for a submission"} if settings.budget else {}),
        "variants": ", ".join(f"{name}: {which}" for name, which in settings.variants.items())
        or ("these chapters have none" if settings.vary else "none are asked for"),
        "exchange": settings.exchange or "nbgrader's own, as its configuration on this machine says",
        "students": f"{students} in the gradebook",
        "secret": f"{folder / course.HIDDEN / 'secret'}, only for you; keep a copy of it: regrading needs it",
    }


def _require_ours(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise CourseError(f"{folder} is not a folder; name a folder, or one that does not exist yet")
    if not folder.exists() or course.is_made(folder):
        return
    unknown_names = sorted(path.name for path in folder.iterdir() if path.name not in KNOWN)
    if unknown_names:
        listed = ", ".join(unknown_names[:4]) + (", …" if len(unknown_names) > 4 else "")
        raise CourseError(
            f"{folder} contains something else ({listed}); name an empty folder, or one that does not exist yet"
        )
    config = folder / course.CONFIG_FILE
    if config.exists() and "autograder.grading.nbgrader.bridge" not in config.read_text(encoding="utf-8"):
        raise CourseError(
            f"{config} is a configuration without Meshcraft; move it away, and add its settings to the new one later"
        )


def _changed_settings(folder: Path, changes: Mapping[str, Any]) -> Settings:
    before = (
        read_settings(folder)
        if (folder / FILE).exists()
        else Settings(name=course_name(folder.name), vary=not chapters_of(folder))
    )
    try:
        return checked(replace(before, **changes))
    except ValueError as error:
        raise CourseError(str(error)) from None


def course_name(folder: str) -> str:
    """The course's default name in the exchange: the folder's, without characters that are not allowed there."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder).strip("-.") or Settings().name


def _variants(folder: Path, chapters: list[str], settings: Settings, changes: Mapping[str, Any]) -> dict[str, str]:
    """Every chapter's variants: drawn from the secret if new or changed, else unchanged."""
    secret, course_chapters = course.secret(folder), chapters_of(folder)
    variants = dict(settings.variants)
    for name in chapters or (course_chapters if "vary" in changes else []):
        if name in course_chapters and "vary" not in changes:
            continue
        drawn = task_variants.choose(secret, name) if settings.vary else {}
        new = {f"{name}.{function}": variant for function, variant in drawn.items()}
        old = {which: variant for which, variant in variants.items() if which.startswith(f"{name}.")}
        if new != old and any((folder / "submitted").glob(f"*/{name}")):
            raise CourseError(f"{name} already has submissions; its variants can no longer change")
        variants = {which: variant for which, variant in variants.items() if which not in old} | new
    return variants


def _assignments(
    folder: Path,
    chapters: list[str],
    due: Mapping[str, datetime | None],
    settings: Settings,
    former: Mapping[str, Mapping[str, float]],
) -> dict[str, datetime | None]:
    """Release new or changed chapters, and set the dates; return the due date of every chapter in the course."""
    dates = due_dates(folder)
    for name in dict.fromkeys([*chapters_of(folder), *chapters]):
        dates[name] = due.get(name, dates.get(name))
        path = folder / "source" / name / f"{name}.ipynb"
        notebook = read(path) if path.exists() else source_notebook(name)
        changed = _write_due(notebook, dates[name], settings)
        changed |= set_points(notebook, worth(settings, name), former.get(name, worth(Settings(), name)))
        if points_in(notebook) != points_in(_released(folder, name, notebook)):
            changed = True
            course.book_again(folder, name)
        changed |= task_variants.state(
            notebook, name, task_variants.requested_in(settings.variants, name), limits_in(settings, name)
        )
        if changed or not path.exists():
            write_notebook(notebook, path)
        changed |= hand_out(folder, name)
        if changed or not (folder / "release" / name / f"{name}.ipynb").exists():
            course.release(folder, name)
        with course.open_gradebook(folder) as gradebook:
            gradebook.update_or_create_assignment(name, duedate=dates[name])  # type: ignore[arg-type]
    return dates


def hand_out(folder: Path, chapter: str) -> bool:
    """Copy a course's own chapter next to its notebook, where ``check`` needs it; return True if anything changes.

    Students get the files that decide the verdicts, the hints and the page; the solution, mutants and alternatives
    stay here.
    """
    if not is_own(chapter):
        return False
    chapter_folder = contract_folder(chapter)
    files = {path: path.read_bytes() for path in contract_files(chapter)}
    optional_files = (chapter_folder / name for name in ("chapter.toml", "hints.md", "page.md"))
    files |= {path: path.read_bytes() for path in optional_files if path.exists()}
    target, changed = folder / "source" / chapter / "chapters" / chapter, False
    for path, data in files.items():
        copy = target / path.relative_to(chapter_folder)
        if not copy.exists() or copy.read_bytes() != data:
            write_atomically(copy, data)
            changed = True
    return changed


def _released(folder: Path, chapter: str, source: NotebookNode) -> NotebookNode:
    """The released notebook; the source if there is none."""
    path = folder / "release" / chapter / f"{chapter}.ipynb"
    return read(path) if path.exists() else source


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


def _enrol(folder: Path, students: list[dict[str, str]], withdraw: Collection[str]) -> int:
    """Add the students to the gradebook, or complete their data; return the number of students."""
    with course.open_gradebook(folder, create=True) as gradebook:
        known = {str(student.id) for student in gradebook.students} | {row["id"] for row in students}
        if unknown := sorted({*withdraw} - known):
            raise CourseError(f"the course has no student {', '.join(unknown)}; the ids are those of the gradebook")
        for row in students:
            data: Any = {name: value for name, value in row.items() if value and name in COLUMNS[1:]}
            gradebook.update_or_create_student(row["id"], **data)
        return len(gradebook.students)


def _with_points(settings: Settings, points: Mapping[str, float], dropped: Collection[str]) -> Settings:
    """The settings with new points; points that equal the contract's are not stored."""
    merged = {**settings.points, **points}
    for chapter in {name.partition(".")[0] for name in merged}:
        own = worth(Settings(), chapter)
        merged = {n: p for n, p in merged.items() if not n.startswith(f"{chapter}.") or own[n.partition(".")[2]] != p}
    try:
        new_settings = checked(replace(settings, points=merged, dropped=tuple(sorted(dropped))))
        for chapter in {name.partition(".")[0] for name in merged}:
            if len(ungraded(new_settings, chapter)) == len(load(chapter).tasks):
                raise ValueError(
                    f"no function of {chapter} would be graded; --drop-chapter {chapter} takes it out of the course"
                )
        return new_settings
    except ValueError as error:
        raise CourseError(f"{error}; points are given as --points fsdp_loss=10") from None


def _with_limits(settings: Settings, limits: Mapping[str, float], chapters: list[str]) -> Settings:
    """The settings with new limits, all of which the course's own solution must meet."""
    merged = {name: factor for name, factor in {**settings.limits, **limits}.items() if factor != 1}
    try:
        new_settings = checked(replace(settings, limits=merged))
    except ValueError as error:
        raise CourseError(str(error)) from None
    if unknown := sorted(name for name in merged if name.partition(".")[0] not in chapters):
        raise CourseError(f"the limit {unknown[0]!r} in course.toml belongs to no chapter of this course; remove it")
    for name in dict.fromkeys(chapters):
        require_possible(name, limits_in(new_settings, name))
    return new_settings
