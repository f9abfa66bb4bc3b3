"""Commands for running your own course: status, feedback, export."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from autograder.commands.instructor import Assignment, CourseFolder, assignments
from autograder.commands.terminal import (
    NAMED,
    SHORT,
    AsJson,
    UsageError,
    complain,
    err,
    fits,
    out,
    print_json,
    require_chapter,
    require_target,
    show,
    spinner,
    table,
)
from autograder.contract.text import count_of
from autograder.render import few, number, one_line, plain


def status(assignment: Assignment = None, course: CourseFolder = Path("."), as_json: AsJson = False) -> None:
    """Show graded and ungraded submissions, and those that need manual attention."""
    from autograder.grading.nbgrader.export import counts, overview
    from autograder.grading.nbgrader.late_penalty import renew_penalties
    from autograder.grading.nbgrader.submissions import misplaced

    names, exit_status = assignments(course, assignment)
    for name in names:
        renew_penalties(course.resolve(), name)
    rows = [row for name in names for row in overview(course.resolve(), name)]
    if as_json:
        print_json({"submissions": rows, "counts": counts(rows), "misplaced": misplaced(course)})
        raise typer.Exit(exit_status)
    shown, notes = table("chapter", "student", "state", "points", "late", "", gap=3), defaultdict[str, list[str]](list)
    for row in rows:
        points = "" if row["points"] is None else f"{number(row['points'])} of {number(row['max_points'])}"
        late = count_of(row["days_late"], "day") if row["days_late"] else ""
        late += f", −{number(row['late_penalty'])}" if row["late_penalty"] else ""
        cells = (row["chapter"], row["student"], row["state"], points, late, row["why"])
        shown.add_row(*(Text(plain(text)) for text in cells))
        for note in row["notes"]:
            notes[note].append(f"{row['chapter']}/{row['student']}" if len(names) > 1 else row["student"])
    parts: list[Any] = [shown]
    if not fits(shown):
        shown.columns.pop()  # the notes are listed below instead, each with its students
        parts += [Text(), *(Text(plain(f"{note}: {few(students, 10)}")) for note, students in notes.items())]
    message = ", ".join(f"{state}: {count}" for state, count in counts(rows).items())
    show(*parts, Text(f"\n{len(rows)} in all; {message}" if rows else "this course has no students yet", style="dim"))
    for path, why in misplaced(course).items():
        complain(f"{path}: {why}")
    raise typer.Exit(exit_status)


def feedback(
    assignment: Assignment = None,
    course: CourseFolder = Path("."),
    to_zip: Annotated[
        Path | None, typer.Option("--zip", metavar="FILE", help="Pack the pages under the names that the LMS gave.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a feedback page for every graded student. Exit status 1: a student got none."""
    if to_zip:
        require_target(to_zip)
    names, exit_status = assignments(course, assignment)
    if to_zip and len(names) > 1:
        raise UsageError(f"--zip packs one chapter; name one of {', '.join(names)}")
    with spinner("writing feedback"):
        from autograder.grading.nbgrader.feedback import write_feedback
        from autograder.grading.nbgrader.late_penalty import renew_penalties

        results = []
        for name in names:
            renew_penalties(course, name)
            results.append(write_feedback(course, name, workers=os.cpu_count() or 1))
    if to_zip:
        from autograder.grading.nbgrader.uploads import feedback_zip

        feedback_zip(course, names[0], results[0][0], to_zip)
    pages = [str(page) for written, _ in results for page in written]
    problems = {student: why for _, failed in results for student, why in failed.items()}
    if as_json:
        print_json({"pages": pages, "without": problems})
    else:
        for page in pages:
            out().print(plain(page), markup=False, soft_wrap=True)
        if to_zip:
            out().print(f"wrote {to_zip}", markup=False, soft_wrap=True)
    if not pages and not problems:
        complain(
            f"no page was written: no submission of {', '.join(names)} has been graded; `meshcraft grade` comes first"
        )
    for student, why in problems.items():
        complain(f"no page for {one_line(student)}: {one_line(why)}")
    raise typer.Exit(exit_status or (SHORT if problems else 0))


def export(
    assignment: Assignment = None,
    course: CourseFolder = Path("."),
    to: Annotated[Path | None, typer.Option(help="The file to write; by default, standard output.")] = None,
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
    names, exit_status = assignments(course, assignment)
    if leaderboard is not None:
        _export_leaderboard(course.resolve(), names, leaderboard, to, canvas or moodle or gradescope)
        raise typer.Exit(exit_status)
    from autograder.grading.nbgrader.export import (
        canvas_csv,
        grades_csv,
        gradescope_csv,
        moodle_csv,
        penalties,
        without_score,
    )
    from autograder.grading.nbgrader.late_penalty import renew_penalties

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
        _report_penalties(penalties(folder, names))
        for state, without in without_score(folder, names).items():
            complain(f"no final score for {', '.join(map(one_line, without))}: {state}")
    raise typer.Exit(exit_status)


def _report_penalties(penalties: dict[str, float]) -> None:
    """Report the penalties included in the scores of a file for an LMS, since no column of the file shows them."""
    if penalties:
        deductions = ", ".join(f"{one_line(name)} −{number(points)}" for name, points in penalties.items())
        text = f"late penalties are already deducted: {deductions}; the LMS must not deduct them again"
        err().print(text, markup=False, soft_wrap=True)


def write(to: Path, text: str) -> None:
    """Write a file that was named on the command line, and say so.

    Raises:
        UsageError: It cannot be written there.
    """
    require_target(to)
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{to} cannot be written: {error.strerror or error}") from None
    out().print(f"wrote {to}", markup=False, soft_wrap=True)


def _export_leaderboard(course: Path, names: list[str], names_csv: Path, to: Path | None, canvas: bool) -> None:
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
    write(to, leaderboard_page(course, name, read_names(names_csv, course)))


def _columns(texts: list[str], canvas: bool) -> dict[str, str]:
    if texts and not canvas:
        raise UsageError("--column names a column of Canvas's; give --canvas, too")
    columns = {}
    for text in texts:
        match = NAMED.fullmatch(text)
        if not match or not match[2].strip():
            raise UsageError(f"--column {text!r} is not CHAPTER=NAME; write for example --column 'fsdp=FSDP (4711)'")
        columns[require_chapter(match[1])] = match[2].strip()
    return columns
