"""The command that makes your own course folder, and changes it: init."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from autograder.commands.people import tell
from autograder.commands.terminal import NAMED, UsageError, complain, out, require_chapter, spinner
from course.curriculum import CHAPTERS

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The course folder: a new one, or one to change.")]
Chapters = Annotated[list[str] | None, typer.Option(metavar="CHAPTER", help="Repeat it for more; all, if left out.")]
DueDates = Annotated[
    list[str] | None,
    typer.Option(metavar="[CHAPTER=]TIME", help="2026-12-01T18:00, in local time or with +01:00; `none` removes it."),
]
LatePerDay = Annotated[
    str | None, typer.Option(metavar="PERCENT", help="Deducted from the points for each day late or part of one.")
]
LateAtMost = Annotated[str | None, typer.Option(metavar="PERCENT", help="The most that lateness deducts.")]
LateGrace = Annotated[
    float | None, typer.Option(metavar="MINUTES", help="Minutes late that still count as on time; 15, for example.")
]
Points = Annotated[
    list[str] | None,
    typer.Option(metavar="FUNCTION=POINTS", help="What a function is worth: fsdp_loss=10; 0 for not graded."),
]
LimitFactors = Annotated[
    list[str] | None,
    typer.Option(metavar="FUNCTION.FACT=X", help="X times a limit: 'fsdp_loss.live temporaries=1.5'; 1: the default."),
]
Dropped = Annotated[
    list[str] | None, typer.Option(metavar="CHAPTER", help="A chapter that no longer counts; --chapter takes it back.")
]
Students = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="CSV with the column id, or an export of Canvas, Moodle or Gradescope."),
]
Withdrawn = Annotated[
    list[str] | None, typer.Option(metavar="STUDENT", help="A student who has left; work and grades are kept.")
]
UnixGroup = Annotated[
    str | None, typer.Option(metavar="GROUP", help="The Unix group of the assistants, who review and export.")
]
SiteAddress = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Where the course's pages are, for links in feedback.")
]
Exchange = Annotated[Path | None, typer.Option(metavar="FOLDER", help="nbgrader's exchange, which students can reach.")]
Budget = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="CPU time a submission may take before it needs a person; 0: the default."),
]
Variants = Annotated[
    bool | None,
    typer.Option("--variants/--no-variants", help="Ask for variants of some functions, drawn from the secret."),
]
CourseName = Annotated[
    str | None, typer.Option(metavar="COURSE_ID", help="The course's name in the exchange; by default, the folder's.")
]


def init(
    folder: Folder,
    chapter: Chapters = None,
    due: DueDates = None,
    late_per_day: LatePerDay = None,
    late_at_most: LateAtMost = None,
    late_grace: LateGrace = None,
    points: Points = None,
    limit: LimitFactors = None,
    drop_chapter: Dropped = None,
    students: Students = None,
    withdraw: Withdrawn = None,
    group: UnixGroup = None,
    site: SiteAddress = None,
    exchange: Exchange = None,
    budget: Budget = None,
    variants: Variants = None,
    name: CourseName = None,
) -> None:
    """Make your own course folder. Run it again to add chapters or students, or to change dates."""
    new = not (folder / "source").is_dir()
    chapters = [require_chapter(each) for each in chapter or ([entry.name for entry in CHAPTERS] if new else [])]
    settings = {"name": name, "late_per_day": _percent(late_per_day), "late_at_most": _percent(late_at_most)}
    settings |= {"vary": variants, "late_grace": late_grace, "group": group, "site": site and site.rstrip("/")}
    settings |= {"budget": budget, "exchange": str(exchange.resolve()) if exchange else None}
    with spinner("making the course"):
        from autograder.grading.nbgrader.course import is_made
        from autograder.grading.nbgrader.group import require_group
        from autograder.grading.nbgrader.limit_factors import parse_limits
        from autograder.grading.nbgrader.new_course import init_course
        from autograder.grading.nbgrader.points import parse_points
        from autograder.grading.nbgrader.register import log
        from autograder.grading.nbgrader.rosters import read_students
        from autograder.grading.nbgrader.settings import chapters_of

        if group:
            require_group(group)
        all_chapters = [*chapters_of(folder), *chapters]
        before = len(log(folder)) if is_made(folder) and (folder / "submitted").is_dir() else 0
        messages = init_course(
            folder,
            chapters=chapters,
            due=_dates(due or [], folder, chapter or []),
            settings={field: value for field, value in settings.items() if value is not None},
            students=read_students(students) if students else [],
            points=parse_points(points or [], all_chapters),
            limits=parse_limits(limit or [], all_chapters),
            drop=[require_chapter(each) for each in drop_chapter or []],
            withdraw=withdraw or [],
        )
        changes = log(folder)[before:]
    widest = max(14, *map(len, messages))
    for subject, message in messages.items():
        out().print(f"{subject:<{widest}}  {message}", markup=False, soft_wrap=True)
    if new or chapter:
        _print_next(folder.resolve(), chapter or chapters)
        return
    out().print("")
    if changes:
        tell(changes[-1].sentence, changes[-1].number)
        if {name for _, name in changes[-1].after} & {"points", "limits"}:
            complain(
                "run `meshcraft grade` for new grades of what is graded already; students have the earlier notebook "
                "until you hand out the new one: `nbgrader release_assignment CHAPTER --force`"
            )
    else:
        out().print("nothing has changed")


def _percent(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return float(text.strip().removesuffix("%"))
    except ValueError:
        raise UsageError(f"{text!r} is not a percentage; write 10 or 10%") from None


def _dates(texts: list[str], folder: Path, chosen: list[str]) -> dict[str, Any]:
    """The due dates by chapter: one without a name applies to every chapter chosen, or to the whole course."""
    from autograder.grading.nbgrader.due_dates import parse_due
    from autograder.grading.nbgrader.settings import chapters_of

    dates: dict[str, Any] = {}
    for text in texts:
        match = NAMED.fullmatch(text)
        names = (
            [require_chapter(match[1])]
            if match
            else chosen or chapters_of(folder) or [entry.name for entry in CHAPTERS]
        )
        dates |= dict.fromkeys(names, parse_due(match[2] if match else text))
    return dates


def _print_next(folder: Path, chapters: list[str]) -> None:
    """Say which commands come next."""
    first = chapters[0] if chapters else "CHAPTER"
    steps = [
        (f"cd {shlex.quote(str(folder))}", ""),
        (f"nbgrader release_assignment {first}", f"to the exchange; or hand out release/{first}/{first}.ipynb"),
        (f"nbgrader collect {first}", f"from the exchange; or put notebooks in submitted/STUDENT/{first}/"),
        (f"meshcraft grade {first}", "official grading"),
        ("meshcraft status", "what is done, and what needs a person"),
    ]
    out().print("\nnext", markup=False)
    longest = max(len(command) for command, purpose in steps if purpose)
    for command, purpose in steps:
        out().print(f"  {command:<{longest}}  {purpose}".rstrip(), markup=False, soft_wrap=True)
