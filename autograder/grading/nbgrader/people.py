"""Decisions about people: extensions, who grades which answers, regrade requests, and undoing a change.

All of them are in the register, with a log. nbgrader's gradebook is updated from the register where it has a place for
them.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autograder.grading.nbgrader import register
from autograder.grading.nbgrader.bridge import configuration
from autograder.grading.nbgrader.changes import state
from autograder.grading.nbgrader.course import CourseError, has_gradebook, open_gradebook, students
from autograder.grading.nbgrader.due_dates import due_dates
from autograder.grading.nbgrader.names import question
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.nbgrader.register import DUE, ENROLLED, EXTENSION, PERSON, READER, REQUEST, SETTING, Change
from autograder.render import few

MOST_HOURS = 365 * 24.0


def chosen(course: Path, named: Collection[str], section: str) -> list[str]:
    """The students who are named, and those in a section.

    Raises:
        CourseError: The course does not know one of them, or the section is empty.
    """
    known = students(course)
    if unknown := sorted({*named} - {*known}):
        near = question(unknown, known) or "; `meshcraft status` lists those it has"
        raise CourseError(f"the course has no student {', '.join(unknown)}{near}")
    enrolled = register.values(course, ENROLLED)
    in_section = [student for student, about in enrolled.items() if section and about.get("section") == section]
    if section and not in_section:
        sections = sorted({about["section"] for about in enrolled.values() if about.get("section")})
        raise CourseError(f"no student is in the section {section!r}; there are: {', '.join(sections) or 'none'}")
    if not (selected := sorted({*named, *in_section})):
        raise CourseError("name the students, or a section with --section")
    return selected


def extend(course: Path, chapter: str, who: Collection[str], hours: float) -> int:
    """Extend students' deadlines by ``hours``, whether or not they have submitted; 0 removes an extension.

    Returns:
        The number of the change in the log; 0 if nothing changes.

    Raises:
        CourseError: The chapter has no due date, or the extension is not a time.
    """
    if not 0 <= hours <= MOST_HOURS:
        raise CourseError(f"an extension of {hours:g} hours is not possible; it is from 0 to {MOST_HOURS:g} hours")
    if hours:
        _due(course, chapter)
    extension = f"{hours:g} more hours" if hours else "no extension"
    sentence = f"{chapter}: {extension} for {few(sorted(who))}"
    number = register.record(course, sentence, {(EXTENSION, f"{chapter}/{name}"): hours or None for name in who})
    _grant(course, {f"{chapter}/{name}": hours for name in who})
    return number


def hours_until(course: Path, chapter: str, until: datetime) -> float:
    """The hours from a chapter's due date to a time.

    Raises:
        CourseError: The chapter has no due date, or the time is before it.
    """
    due = _due(course, chapter)
    hours = (until.astimezone(UTC) - due).total_seconds() / 3600
    if hours <= 0:
        raise CourseError(f"{until:%Y-%m-%d %H:%M} is not after the due date, {due:%Y-%m-%d %H:%M} UTC")
    return hours


def _due(course: Path, chapter: str) -> datetime:
    if due := due_dates(course).get(chapter):
        return due
    raise CourseError(f"{chapter} has no due date; give it one with `meshcraft init . --due {chapter}=TIME`")


def _grant(course: Path, hours: dict[str, float]) -> None:
    """Enter these extensions for submissions in the gradebook; later submissions get theirs when they are booked."""
    from nbgrader.api import MissingEntry

    if not has_gradebook(course):
        return
    with open_gradebook(course) as gradebook:
        for name, extra_hours in hours.items():
            chapter, _, student = name.partition("/")
            try:
                gradebook.grant_extension(chapter, student, hours=extra_hours)  # type: ignore[arg-type]
            except MissingEntry:
                continue


def assign_readers(course: Path, chapter: str, assistants: list[str]) -> dict[str, list[str]]:
    """Divide a chapter's submissions among assistants, who grade the written answers: equally, and by section.

    A student already assigned to one of these assistants stays with them, so that late submissions move nobody.

    Returns:
        The students of each assistant.

    Raises:
        CourseError: An assistant is named twice, or no submission has been graded.
    """
    if len({*assistants}) != len(assistants) or not all(assistants):
        raise CourseError("name each assistant once")
    with open_gradebook(course) as gradebook:
        everyone = sorted(str(each.student.id) for each in gradebook.assignment_submissions(chapter))
    if not everyone:
        raise CourseError(
            f"no submission of {chapter} is in the gradebook yet; `meshcraft grade {chapter}` comes first"
        )
    before = {
        name.partition("/")[2]: reader
        for name, reader in register.values(course, READER).items()
        if name.startswith(f"{chapter}/")
    }
    sections = register.values(course, ENROLLED)
    share: dict[str, list[str]] = {reader: [] for reader in assistants}
    max_share = -(-len(everyone) // len(assistants))
    rest = []
    for student in everyone:
        reader = before.get(student)
        if reader in share and len(share[reader]) < max_share:
            share[reader].append(student)
        else:
            rest.append(student)
    for student in sorted(rest, key=lambda name: (sections.get(name, {}).get("section", ""), name)):
        min(share.values(), key=len).append(student)
    new: dict[tuple[str, str], Any] = {(READER, f"{chapter}/{student}"): None for student in before}
    new |= {(READER, f"{chapter}/{student}"): reader for reader, assigned in share.items() for student in assigned}
    register.record(course, f"{chapter}: written answers are graded by {', '.join(assistants)}", new)
    return share


def numbers(course: Path, chapter: str) -> dict[str, int]:
    """The number under which formgrader shows each student's submission, without a name."""
    from nbgrader.apps.api import NbGraderAPI
    from nbgrader.coursedir import CourseDirectory

    config = configuration(course, chapter)
    api = NbGraderAPI(coursedir=CourseDirectory(config=config), config=config)
    with open_gradebook(course):
        return {each["student"]: each["index"] + 1 for each in api.get_notebook_submissions(chapter, chapter)}


def ask_regrade(course: Path, chapter: str, student: str, text: str) -> int:
    """Keep a student's request for a regrade; return its number in the log.

    Raises:
        CourseError: There is nothing to regrade, or no text.
    """
    chosen(course, [student], "")
    if not text.strip():
        raise CourseError("say what the request is about; students name the fact that they think is wrong")
    name = (REQUEST, f"{chapter}/{student}")
    now = datetime.now(UTC).isoformat(timespec="minutes")
    return register.record(
        course, f"{chapter}: {student} asks for a regrade", {name: {"text": text, "at": now, "answer": ""}}
    )


def answer_regrade(course: Path, chapter: str, student: str, text: str) -> int:
    """Answer a request; the answer is on the student's next feedback page.

    Raises:
        CourseError: There is no such request.
    """
    name = f"{chapter}/{student}"
    request = register.values(course, REQUEST).get(name)
    if request is None:
        raise CourseError(
            f"{student} has not asked for a regrade of {chapter}; `meshcraft requests` lists those who have"
        )
    return register.record(course, f"{chapter}: {student} was answered", {(REQUEST, name): {**request, "answer": text}})


def undo(course: Path, number: int) -> Change:
    """Restore the values from before a logged change.

    Raises:
        CourseError: There is no such change, or what it set has been changed again since.
    """
    course = course.resolve()
    change = register.find_change(course, number, state(course))
    before = change.before
    sentence = f"change {number} undone: {change.sentence}"
    settings_and_dates = {which: value for which, value in before.items() if which[0] in (SETTING, DUE)}
    names = {which: fields for which, fields in before.items() if which[0] == PERSON and fields is not None}
    done = 0
    registered = {which: value for which, value in before.items() if which[0] not in (SETTING, DUE, PERSON)}
    if register_values := registered | names:
        with open_gradebook(course) as gradebook:
            for (_, student), fields in names.items():
                gradebook.update_or_create_student(student, **fields)
        done = register.record(course, sentence, register_values, change.after, undoes=number)
        _grant(
            course, {name: hours or 0.0 for (subject, name), hours in register_values.items() if subject == EXTENSION}
        )
    if settings_and_dates:
        dates = {
            name: value and datetime.fromisoformat(value)
            for (subject, name), value in settings_and_dates.items()
            if subject == DUE
        }
        settings = {name: value for (subject, name), value in settings_and_dates.items() if subject == SETTING}
        dropped = settings.pop("dropped", None)
        init_course(
            course,
            chapters=[],
            due=dates,
            settings=settings | ({} if dropped is None else {"dropped": tuple(dropped)}),
            students=[],
            undoes=0 if done else number,
        )
    return change
