"""The command that reports similar submissions to instructors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from autograder.commands.instructor import CourseFolder, course_chapter
from autograder.commands.terminal import (
    AsJson,
    UsageError,
    bar,
    complain,
    out,
    print_json,
    require_target,
    show,
    table,
)
from autograder.contract.text import count_of
from autograder.render import one_line, plain

SHOWN = 20


def similar(
    chapter: Annotated[str, typer.Argument(metavar="CHAPTER", help="The chapter whose submissions are compared.")],
    course: CourseFolder = Path("."),
    earlier: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="An earlier year's course folder; repeat it for more.")
    ] = None,
    function: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this function; repeat it for more.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with both sources of each.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find code shared with other students, an earlier class or the public solution. Evidence, not a verdict."""
    if html:
        require_target(html)
    name = course_chapter(course, chapter)
    from autograder.similarity.classes import find_similar
    from autograder.similarity.page import EVIDENCE, page

    try:
        with bar() as update:
            report = find_similar(course, name, function or (), earlier or (), update)
    except LookupError as error:
        raise UsageError(str(error)) from None
    if html:
        html.touch(0o600)  # it shows students' code
        html.write_text(page(report), encoding="utf-8")
    if as_json:
        unread = [{"author": str(author), "why": why} for author, why in report.unread]
        functions = [_function(each) for each in report.functions]
        print_json({"chapter": name, "note": EVIDENCE, "functions": functions, "not_compared": unread})
        return
    public = [f"{each.function} {each.like_public} of {each.authors}" for each in report.functions if each.like_public]
    nearly = f"\nnearly as in public code: {', '.join(public)}\n" if public else ""
    show(_table(report), Text(nearly), Text(EVIDENCE, style="dim"))
    if html:
        out().print(f"wrote {html}", markup=False, soft_wrap=True)
    for author, why in report.unread:
        complain(f"{one_line(author)}: {one_line(why)}")


def _function(compared: Any) -> dict[str, Any]:
    matches = [match.to_json() for match in compared.matches]
    figures = {"authors": compared.authors, "usual_share": compared.usual, "like_public": compared.like_public}
    return {"name": compared.function, **figures, "matches": matches}


def _table(report: Any) -> Table | Text:
    """The strongest matches across all functions."""
    matches = sorted((match for each in report.functions for match in each.matches), key=lambda match: -match.score)
    if not matches:
        compared = max((each.authors for each in report.functions), default=0)
        return Text("no two share anything rare" if compared > 1 else f"{count_of(compared, 'submission')} to compare")
    rows = table("function", "who", "and", "share", "others have it", "public", "Program")
    for match in matches[:SHOWN]:
        authors = (one_line(author.author) for author in (match.first, match.second))
        figures = (f"{match.share:.0%}", f"{match.others:g}", f"{match.in_public:.0%}", match.program_text)
        rows.add_row(*(Text(plain(cell)) for cell in (match.function, *authors, *figures)))
    if len(matches) > SHOWN:
        rows.add_row(Text(f"and {len(matches) - SHOWN} weaker ones", style="dim"))
    return rows
