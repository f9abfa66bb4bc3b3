"""Commands for running your own course: init, status, feedback, export."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autograder.commands.instructor import Assignment, CourseFolder, assignments
from autograder.commands.people import tell
from autograder.commands.terminal import (
    SHORT,
    AsJson,
    UsageError,
    complain,
    err,
    out,
    print_json,
    require_chapter,
    show,
    spinner,
    table,
)
from autograder.contract.verdict import counted
from autograder.render import number, one_line, plain
from course.curriculum import CHAPTERS

NAMED = re.compile(r"([A-Za-z_][\w]*)=(.*)", re.DOTALL)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The course folder: a new one, or one to change.")],
    chapter: Annotated[
        list[str] | None, typer.Option(metavar="CHAPTER", help="Repeat it for more; all, if left out.")
    ] = None,
    due: Annotated[
        list[str] | None,
        typer.Option(metavar="[CHAPTER=]TIME", help="2026-12-01T18:00, here or with +01:00; none takes it away."),
    ] = None,
    late_per_day: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="What each day begun takes off the points earned.")
    ] = None,
    late_at_most: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="What lateness takes off at most.")
    ] = None,
    late_grace: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="How late counts as on time; 15, for example.")
    ] = None,
    points: Annotated[
        list[str] | None,
        typer.Option(metavar="FUNCTION=POINTS", help="What a function is worth: fsdp_loss=10; 0 for not graded."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(metavar="FUNCTION.FACT=FACTOR", help="Times a limit: 'fsdp_loss.live temporaries=1.5'; 1: ours."),
    ] = None,
    drop_chapter: Annotated[
        list[str] | None,
        typer.Option(metavar="CHAPTER", help="A chapter that no longer counts; --chapter takes it back."),
    ] = None,
    students: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV with the column id, or an export of Canvas, Moodle or Gradescope."),
    ] = None,
    withdraw: Annotated[
        list[str] | None, typer.Option(metavar="STUDENT", help="A student who has left; work and grades are kept.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(metavar="GROUP", help="The Unix group of the assistants, who review and export.")
    ] = None,
    site: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where the course's pages are, for links in feedback.")
    ] = None,
    exchange: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="nbgrader's exchange, which students can reach.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Processor time of a submission before a person looks; 0: the usual."),
    ] = None,
    variants: Annotated[
        bool | None,
        typer.Option("--variants/--no-variants", help="Ask for variants of some functions, drawn from the secret."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="COURSE_ID", help="The course's name in the exchange; the folder's, if none.")
    ] = None,
) -> None:
    """Make your own course folder. Run it again to add chapters or students, or to change dates."""
    known = [entry.name for entry in CHAPTERS]
    new = not (folder / "source").is_dir()
    chapters = [require_chapter(each) for each in chapter or (known if new else [])]
    settings = {"name": name, "late_per_day": _percent(late_per_day), "late_at_most": _percent(late_at_most)}
    settings |= {"vary": variants, "late_grace": late_grace, "group": group, "site": site and site.rstrip("/")}
    settings["budget"] = budget
    settings["exchange"] = str(exchange.resolve()) if exchange else None
    with spinner("making the course"):
        from autograder.grading.nbgrader.group import require_group
        from autograder.grading.nbgrader.limited import parse_limits
        from autograder.grading.nbgrader.new_course import init_course
        from autograder.grading.nbgrader.points import parse_points
        from autograder.grading.nbgrader.register import log
        from autograder.grading.nbgrader.rosters import read_students

        if group:
            require_group(group)
        there = [path.name for path in (folder / "source").glob("*") if path.is_dir()]
        before = 0 if new else len(log(folder.resolve()))
        made = init_course(
            folder,
            chapters=chapters,
            due=_dates(due or [], folder, chapter or []),
            settings={field: value for field, value in settings.items() if value is not None},
            students=read_students(students) if students else [],
            points=parse_points(points or [], [*there, *chapters]),
            limits=parse_limits(limit or [], [*there, *chapters]),
            drop=[require_chapter(each) for each in drop_chapter or []],
            withdraw=withdraw or [],
        )
        changes = log(folder.resolve())
    widest = max(14, *map(len, made))
    for subject, message in made.items():
        out().print(f"{subject:<{widest}}  {message}", markup=False, soft_wrap=True)
    if not new and not chapter:
        out().print("")
        if len(changes) > before:
            tell(changes[-1].sentence, changes[-1].number)
        else:
            out().print("nothing has changed")
        return
    out().print("\nnext", markup=False)
    steps = _next(folder.resolve(), chapter or chapters)
    longest = max(len(command) for command, does in steps if does)
    for command, does in steps:
        out().print(f"  {command:<{longest}}  {does}".rstrip(), markup=False, soft_wrap=True)


def _percent(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.strip().removesuffix("%"))
    except ValueError:
        raise UsageError(f"{text!r} is not a percentage; write 10 or 10%") from None


def _dates(given: list[str], folder: Path, chosen: list[str]) -> dict[str, Any]:
    """The due dates by chapter: one without a name applies to every chapter chosen, or to the whole course."""
    from autograder.grading.nbgrader.new_course import parse_due

    there = sorted(path.name for path in (folder / "source").glob("*") if path.is_dir())
    dates: dict[str, Any] = {}
    for text in given:
        named = NAMED.fullmatch(text)
        names = [require_chapter(named[1])] if named else chosen or there or [entry.name for entry in CHAPTERS]
        dates |= dict.fromkeys(names, parse_due(named[2] if named else text))
    return dates


def _next(folder: Path, chapters: list[str]) -> list[tuple[str, str]]:
    first = chapters[0] if chapters else "CHAPTER"
    return [
        (f"cd {shlex.quote(str(folder))}", ""),
        (f"nbgrader release_assignment {first}", f"to the exchange; or hand out release/{first}/{first}.ipynb"),
        (f"nbgrader collect {first}", f"from the exchange; or put notebooks in submitted/STUDENT/{first}/"),
        (f"meshcraft grade {first}", "official grading"),
        ("meshcraft status", "what is done, and what needs a person"),
    ]


def status(assignment: Assignment = None, course: CourseFolder = Path("."), as_json: AsJson = False) -> None:
    """Show graded and ungraded submissions, and those that need manual attention."""
    from autograder.grading.nbgrader.export import counts, overview
    from autograder.grading.nbgrader.late import renew_penalties
    from autograder.grading.nbgrader.submissions import misplaced

    names = assignments(course, assignment)
    for name in names:
        renew_penalties(course.resolve(), name)
    rows = [row for name in names for row in overview(course.resolve(), name)]
    if as_json:
        print_json({"submissions": rows, "counts": counts(rows), "misplaced": misplaced(course)})
        return
    shown = table("chapter", "student", "state", "points", "late", "", gap=3)
    shown.columns[0].no_wrap = True
    for row in rows:
        points = "" if row["points"] is None else f"{number(row['points'])} of {number(row['max_points'])}"
        late = counted(row["days_late"], "day") if row["days_late"] else ""
        late += f", −{number(row['late_penalty'])}" if row["late_penalty"] else ""
        cells = (row["chapter"], row["student"], row["state"], points, late, row["why"])
        shown.add_row(*(Text(plain(text)) for text in cells))
    message = ", ".join(f"{state}: {count}" for state, count in counts(rows).items())
    show(shown, Text(f"\n{len(rows)} in all; {message}" if rows else "this course has no students yet", style="dim"))
    for path, why in misplaced(course).items():
        complain(f"{path}: {why}")


def feedback(
    assignment: Assignment = None,
    course: CourseFolder = Path("."),
    to_zip: Annotated[
        Path | None, typer.Option("--zip", metavar="FILE", help="Pack the pages under the names that the LMS gave.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a feedback page for every graded student. Exit status 1: a student got none."""
    names = assignments(course, assignment)
    if to_zip and (len(names) > 1 or not to_zip.parent.is_dir()):
        raise UsageError(
            f"--zip packs one chapter; name one of {', '.join(names)}"
            if len(names) > 1
            else f"there is no folder {to_zip.parent}; make it first"
        )
    with spinner("writing feedback"):
        from autograder.grading.nbgrader.feedback import write_feedback
        from autograder.grading.nbgrader.late import renew_penalties

        made = []
        for name in names:
            renew_penalties(course, name)
            made.append(write_feedback(course, name, workers=os.cpu_count() or 1))
    if to_zip:
        from autograder.grading.nbgrader.uploads import feedback_zip

        feedback_zip(course, names[0], made[0][0], to_zip)
    pages = [str(page) for written, _ in made for page in written]
    problems = {student: why for _, failed in made for student, why in failed.items()}
    if as_json:
        print_json({"pages": pages, "without": problems})
    else:
        for page in pages:
            out().print(plain(page), markup=False, soft_wrap=True)
        if to_zip:
            out().print(f"wrote {to_zip}", markup=False, soft_wrap=True)
    for student, why in problems.items():
        complain(f"no page for {one_line(student)}: {one_line(why)}")
    raise typer.Exit(SHORT if problems else 0)


def export(
    assignment: Assignment = None,
    course: CourseFolder = Path("."),
    to: Annotated[Path | None, typer.Option(help="The file to write; standard output, if none.")] = None,
    canvas: Annotated[bool, typer.Option("--canvas", help="The file that Canvas imports as a gradebook.")] = False,
    moodle: Annotated[bool, typer.Option("--moodle", help="A file for Moodle's grade import.")] = False,
    gradescope: Annotated[
        bool, typer.Option("--gradescope", help="A file with the columns of Gradescope's own export of grades.")
    ] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="CHAPTER=NAME", help='With --canvas: the column, as Canvas calls it: fsdp="FSDP (4711)".'),
    ] = None,
    leaderboard: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="A page that ranks those listed in CSV (student,name) by time and bytes."),
    ] = None,
) -> None:
    """Export the gradebook as CSV, with manual grades and late penalties. Ungraded students have no number.

    With --leaderboard, a page of a chapter's predicted times and bytes, for the students in CSV under chosen names.
    """
    if canvas + moodle + gradescope > 1:
        raise UsageError("--canvas, --moodle and --gradescope are three files; write one at a time")
    columns = _columns(column or [], canvas)
    names = assignments(course, assignment)
    if leaderboard is not None:
        _export_leaderboard(course.resolve(), names, leaderboard, to, canvas or moodle or gradescope)
        return
    from autograder.grading.nbgrader.export import canvas_csv, grades_csv, gradescope_csv, moodle_csv, penalties
    from autograder.grading.nbgrader.late import renew_penalties

    folder = course.resolve()
    for name in names:
        renew_penalties(folder, name)
    if canvas:
        text = canvas_csv(folder, names, columns)
    else:
        text = (moodle_csv if moodle else gradescope_csv if gradescope else grades_csv)(folder, names)
    if to is None:
        sys.stdout.write(text)
    else:
        write(to, text)
    if canvas or moodle or gradescope:
        _tell_penalties(penalties(folder, names))


def _tell_penalties(taken_off: dict[str, float]) -> None:
    """Name, beside a file for an LMS, the penalties in its scores, since no column of the file does."""
    if taken_off:
        each = ", ".join(f"{one_line(name)} −{number(points)}" for name, points in taken_off.items())
        text = f"lateness is taken off already: {each}; the LMS must not take it off again"
        err().print(text, markup=False, soft_wrap=True)


def write(to: Path, text: str) -> None:
    """Write a file that was named on the command line, and say so.

    Raises:
        UsageError: It cannot be written there.
    """
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        missing = f"there is no folder {to.parent}; make it first" if not to.parent.is_dir() else str(error)
        raise UsageError(f"{to} cannot be written: {missing}") from None
    out().print(f"wrote {to}", markup=False, soft_wrap=True)


def _export_leaderboard(course: Path, names: list[str], chosen: Path, to: Path | None, canvas: bool) -> None:
    if canvas or to is None or len(names) > 1:
        problem = (
            "the other formats are for grades; leave them out"
            if canvas
            else "name its file: --to leaderboard.html"
            if to is None
            else f"name one chapter of {', '.join(names)}"
        )
        raise UsageError(f"--leaderboard writes the page of one chapter; {problem}")
    from autograder.grading.nbgrader.leaderboard import leaderboard_page, read_names

    (name,) = names
    write(to, leaderboard_page(course, name, read_names(chosen, course, name)))


def _columns(given: list[str], canvas: bool) -> dict[str, str]:
    if given and not canvas:
        raise UsageError("--column names a column of Canvas's; give --canvas, too")
    found = {}
    for text in given:
        named = NAMED.fullmatch(text)
        if not named or not named[2].strip():
            raise UsageError(f"--column {text!r} is not CHAPTER=NAME; write for example --column 'fsdp=FSDP (4711)'")
        found[require_chapter(named[1])] = named[2].strip()
    return found
