"""Commands about people and dates: extensions, assistants, regrade requests, and the log of changes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autograder.commands.instructor import CourseFolder, course_chapter
from autograder.commands.terminal import (
    SHORT,
    AsJson,
    UsageError,
    complain,
    out,
    print_json,
    show,
    spinner,
    table,
)
from autograder.contract.text import count_of
from autograder.render import one_line, plain

LATE_IN_CANVAS = "late according to Canvas, which gives no time; they count as on time until a timestamp.txt gives one"
Chapter = Annotated[str, typer.Argument(metavar="CHAPTER", help="The chapter.")]


def extend(
    chapter: Chapter,
    student: Annotated[list[str] | None, typer.Argument(metavar="STUDENT", help="Who gets more time.")] = None,
    course: CourseFolder = Path("."),
    hours: Annotated[float | None, typer.Option(help="Hours after the due date; 0 takes an extension back.")] = None,
    until: Annotated[str, typer.Option(metavar="TIME", help="A time instead: 2026-12-03T18:00.")] = "",
    section: Annotated[str, typer.Option(help="Everyone in this section of the roster.")] = "",
) -> None:
    """Give students or a section more time, before or after they have handed in. It counts at once."""
    from autograder.grading.nbgrader.due_dates import parse_due
    from autograder.grading.nbgrader.people import chosen, extend, hours_until

    when = parse_due(until) if until else None
    if hours is not None and when is not None:
        raise UsageError("--hours and --until both say how long; give one of them")
    if hours is None and when is None:
        raise UsageError("say how long: --hours 24, or --until 2026-12-03T18:00; --hours 0 takes an extension back")
    folder, name = course.resolve(), course_chapter(course, chapter)
    students = chosen(folder, student or [], section)
    extra_hours = hours if hours is not None else hours_until(folder, name, when) if when else 0.0
    number = extend(folder, name, students, extra_hours)
    extension = f"{extra_hours:g} hours more" if extra_hours else "no extension"
    tell(f"{name}: {extension} for {count_of(len(students), 'student')}: {', '.join(students)}", number)


def collect(
    chapter: Chapter,
    source: Annotated[Path, typer.Option("--from", metavar="ZIP", help="The zip file, or its folder.")],
    course: CourseFolder = Path("."),
    as_json: AsJson = False,
) -> None:
    """Take in the submissions that Canvas, Moodle or Gradescope gave you as a zip file, unpacked or not.

    Exit status 1: a notebook matches no student, or is of another chapter; it is set aside and named.
    """
    from autograder.grading.nbgrader.uploads import collect

    name = course_chapter(course, chapter)
    _collected(name, collect(course, name, source), LATE_IN_CANVAS, as_json)


def collect_git(
    chapter: Chapter,
    source: Annotated[
        Path, typer.Option("--from", metavar="PATH", help="A folder of clones, or a CSV: student, repository.")
    ],
    roster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="GitHub Classroom's roster: identifier, github_username.")
    ] = None,
    by: Annotated[
        str, typer.Option("--time", metavar="WHICH", help="The time of handing in: commit or fetch.")
    ] = "commit",
    course: CourseFolder = Path("."),
    as_json: AsJson = False,
) -> None:
    """Take in each student's newest commit, from a folder of clones or from the repositories of a list.

    A repository is matched by its name: fsdp-ada is ada's, as GitHub Classroom names it.

    Exit status 1: a repository belongs to no student, or has no notebook of the chapter; the output names it.
    """
    from autograder.grading.nbgrader.repositories import COMMIT, FETCH, collect_git

    if by not in (COMMIT, FETCH):
        raise UsageError(f"--time is {COMMIT} or {FETCH}, not {by!r}")
    name = course_chapter(course, chapter)
    with spinner("reading repositories"):
        collected = collect_git(course, name, source, roster=roster, by=by)
    _collected(name, collected, f"late, by the time of the {by}", as_json)


def _collected(name: str, collected: Any, late: str, as_json: bool) -> None:
    if as_json:
        print_json({"chapter": name, **vars(collected)})
    else:
        out().print(
            f"{len(collected.new)} new, {len(collected.replaced)} replaced, {len(collected.same)} as before",
            markup=False,
        )
        if collected.others:
            out().print(f"{count_of(collected.others, 'other file')} in it, not notebooks", markup=False)
        if collected.late:
            out().print(plain(f"{late}: {', '.join(collected.late)}"), markup=False, soft_wrap=True)
    for entry, why in collected.aside.items():
        complain(f"{one_line(entry)}: {why}")
    raise typer.Exit(SHORT if collected.aside else 0)


def readers(
    chapter: Chapter,
    among: Annotated[list[str] | None, typer.Option(metavar="NAME", help="An assistant; repeat it for each.")] = None,
    course: CourseFolder = Path("."),
    as_json: AsJson = False,
) -> None:
    """Divide the written answers among assistants, equally and by section; without --among, show who has which.

    Assistants see numbers, as formgrader shows them, and no names.
    """
    from autograder.grading.nbgrader.people import assign_readers, numbers
    from autograder.grading.nbgrader.register import READER, values

    folder, name = course.resolve(), course_chapter(course, chapter)
    if among:
        share = assign_readers(folder, name, among)
    else:
        share = {}
        for key, reader in values(folder, READER).items():
            if key.startswith(f"{name}/"):
                share.setdefault(reader, []).append(key.partition("/")[2])
    shown = numbers(folder, name)
    rows = {reader: sorted(shown[each] for each in students if each in shown) for reader, students in share.items()}
    if as_json:
        print_json({"chapter": name, "readers": [{"name": r, "submissions": n} for r, n in rows.items()]})
        return
    readers_table = table("assistant", "submissions", "in formgrader", gap=3)
    for reader, submissions in sorted(rows.items()):
        readers_table.add_row(
            Text(plain(reader)), str(len(submissions)), ", ".join(f"#{number}" for number in submissions)
        )
    show(readers_table if rows else Text("nobody yet; name the assistants: --among tina --among tom"))


def request(
    chapter: Chapter,
    student: Annotated[str, typer.Argument(metavar="STUDENT", help="The student who asks.")],
    text: Annotated[str, typer.Option("--text", help="What the student asks; kept with the grade.")] = "",
    answer: Annotated[str, typer.Option("--answer", help="Your answer; it is on the next feedback page.")] = "",
    course: CourseFolder = Path("."),
) -> None:
    """Keep a student's request for a regrade, or answer it."""
    from autograder.grading.nbgrader.people import answer_regrade, ask_regrade

    if bool(text) == bool(answer):
        raise UsageError('give either --text "what the student asks" or --answer "what you decided"')
    folder, name = course.resolve(), course_chapter(course, chapter)
    if text:
        number = ask_regrade(folder, name, student, text)
        tell(f"{name}: {student}'s request is kept; `meshcraft requests` lists all, unanswered ones first", number)
    else:
        tell(f"{name}: answered; `meshcraft feedback {name}` writes it", answer_regrade(folder, name, student, answer))


def requests(course: CourseFolder = Path("."), as_json: AsJson = False) -> None:
    """Show the requests for a regrade, those without an answer first."""
    from autograder.grading.nbgrader.register import REQUEST, values

    rows = []
    for key, request in values(course.resolve(), REQUEST).items():
        chapter, _, student = key.partition("/")
        rows.append({"chapter": chapter, "student": student, **request})
    rows.sort(key=lambda row: (bool(row["answer"]), row["at"]))
    if as_json:
        print_json({"requests": rows})
        return
    requests_table = table("chapter", "student", "asked", "request", "answer", gap=3)
    for row in rows:
        requests_table.add_row(*(Text(plain(row[name])) for name in ("chapter", "student", "at", "text", "answer")))
    show(requests_table if rows else Text("nobody has asked for a regrade"))


def changes(
    course: CourseFolder = Path("."),
    undo: Annotated[int | None, typer.Option(metavar="NUMBER", help="Undo the change with this number.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the log of changes to dates, points, people and settings, or undo one."""
    from autograder.grading.nbgrader import people, register

    folder = course.resolve()
    if undo is not None:
        change = people.undo(folder, undo)
        out().print(f"undone: {plain(change.sentence)}", markup=False, soft_wrap=True)
        return
    log = register.log(folder)
    if as_json:
        names = ("number", "at", "who", "sentence", "undone_by")
        print_json({"changes": [{name: getattr(change, name) for name in names} for change in log]})
        return
    changes_table = table("", "when", "who", "change", "", gap=3)
    for change in log:
        undone = f"undone by {change.undone_by}" if change.undone_by else ""
        changes_table.add_row(
            str(change.number), change.at, Text(plain(change.who)), Text(plain(change.sentence)), undone
        )
    show(changes_table if log else Text("nothing has been changed yet"))


def tell(sentence: str, number: int) -> None:
    """Say what was changed and how to undo it; ``number`` is 0 if nothing was."""
    undo = f"; `meshcraft changes --undo {number}` takes it back" if number else "; nothing changed"
    out().print(plain(f"{sentence}{undo}"), markup=False, soft_wrap=True)
