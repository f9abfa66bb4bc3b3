"""The command that shows a class at a glance."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from autograder.commands.course import write
from autograder.commands.instructor import CourseFolder, course_chapter
from autograder.commands.terminal import AsJson, UsageError, print_json, require_target, show, spinner, table
from autograder.render import number, plain


def report(
    chapter: Annotated[str, typer.Argument(metavar="CHAPTER", help="The chapter.")],
    course: CourseFolder = Path("."),
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="A page for the screen and for paper.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="A row per function and failed fact.")] = False,
    earlier: Annotated[
        list[Path] | None, typer.Option(metavar="FOLDER", help="An earlier term's course folder to compare with.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the class at a glance: points, the facts that fail most often, attempts, and who waits for a person."""
    if (html is not None) + as_csv + as_json > 1:
        raise UsageError("--html, --csv and --json are three formats; choose one")
    if html:
        require_target(html)
    name = course_chapter(course, chapter)
    with spinner("reading the class"):
        from autograder.grading.nbgrader.report import class_report, report_csv, report_page

        data = class_report(course, name, tuple(earlier or ()))
    if html:
        write(html, report_page(data))
    elif as_json:
        print_json(data)
    elif as_csv:
        sys.stdout.write(report_csv(data))
    else:
        terms = [term["term"] for term in data["earlier"]]
        functions_table = table(
            "function", "points", "pass", *(f"in {term}" for term in terms), "most often not met", gap=3
        )
        for each in data["functions"]:
            before = [_share(term["pass_share"].get(each["name"])) for term in data["earlier"]]
            facts = [f"{fact['name']} ({fact['failed']})" for fact in each["facts"][:2]]
            facts += [f"not judged ({each['stopped']['count']})"] if each["stopped"]["count"] and not facts else []
            mean = each["mean_points"]
            points = f"{'–' if mean is None else number(mean)} of {number(each['max_points'])}"
            cells = (each["name"], points, _share(each["pass_share"]), *before, ", ".join(facts))
            functions_table.add_row(*(Text(plain(cell)) for cell in cells))
        median = data["median_points"]
        about = f"{data['graded']} of {data['students']} students have points"
        about += f", the median is {number(median)} of {number(data['max_points'])}" if median is not None else ""
        waiting = (
            f"; {len(data['persons'])} {'waits' if len(data['persons']) == 1 else 'wait'} for a person"
            if data["persons"]
            else ""
        )
        show(functions_table, Text(f"\n{about}{waiting}", style="dim"))


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
