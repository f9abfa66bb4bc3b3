"""A page that ranks the answers of a class by predicted time and bytes, for those who want to be on it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from autograder.contract.verdict import PASS, Result, Unit
from autograder.grading.nbgrader.course import CourseError, open_ledger, students
from autograder.progress import Best, bests
from autograder.render import one_line, page_template, quantity

TEMPLATES = Path(__file__).parent / "templates" / "leaderboard"
COLUMNS = ("student", "name")


@dataclass(frozen=True)
class Ranking:
    """The passing answers to one function, best first.

    Attributes:
        function: Its name.
        figures: The quantities compared, each with its unit; the first one decides.
        reference: The reference's number for each figure.
        rows: A chosen name and its number for each figure; None where it was not measured.
    """

    function: str
    figures: list[tuple[str, str]]
    reference: list[float]
    rows: list[tuple[str, list[float | None]]]


def read_names(path: Path, course: Path) -> dict[str, str]:
    """Read the chosen names, by student, from a CSV file with the columns ``student`` and ``name``.

    Raises:
        CourseError: The file cannot be read, a column is missing, a student is unknown or named twice, or two students
            chose the same name.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            head = reader.fieldnames = [column.strip() for column in reader.fieldnames or []]
            rows = [(reader.line_num, *((row.get(column) or "").strip() for column in COLUMNS)) for row in reader]
    except OSError as error:
        raise CourseError(f"{path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{path} cannot be read as CSV: {error}; save it as CSV in UTF-8") from None
    if missing := [column for column in COLUMNS if column not in head]:
        raise CourseError(
            f"{path} has the columns {', '.join(head) or 'none'}; it needs student and name, and lacks "
            f"{' and '.join(missing)}. Separate columns by commas."
        )
    known = students(course)
    chosen: dict[str, str] = {}
    for line, student, name in rows:
        where = f"{path}, line {line}"
        if student not in known:
            raise CourseError(f"{where}: the course has no student {student!r}; the ids are those of the gradebook")
        if student in chosen:
            raise CourseError(f"{where}: {student} has a line already; remove one")
        if not name or name in chosen.values():
            problem = f"the name {name!r} is taken" if name else "the name is empty"
            raise CourseError(f"{where}: {problem}; the leaderboard needs a different name for each student")
        chosen[student] = name
    return chosen


def rankings(course: Path, assignment: str, names: dict[str, str]) -> list[Ranking]:
    """Rank the passing answers to each function that has a predicted time or bytes to compare, best first.

    Args:
        course: The course folder.
        assignment: The chapter.
        names: The chosen name of each student who is to appear.
    """
    with open_ledger(course) as ledger:
        entries = {entry.student: entry for entry in ledger.status(assignment) if entry.student in names}
    passing: dict[str, dict[str, dict[str, Best]]] = {}
    for student, entry in entries.items():
        for result in entry.report.functions if entry.report else ():
            if result.verdict == PASS and (best_figures := _in_order(result)):
                passing.setdefault(result.name, {})[names[student]] = best_figures
    return [_ranking(function, figures) for function, figures in passing.items()]


def leaderboard_page(course: Path, assignment: str, names: dict[str, str]) -> str:
    """The leaderboard of one chapter as HTML, without scripts or links to other hosts."""
    page = page_template(TEMPLATES / "index.html.j2", line=one_line, quantity=quantity)
    return page.render(chapter=assignment, rankings=rankings(course, assignment, names))


def _in_order(result: Result) -> dict[str, Best]:
    """The figures of an answer, predicted times before bytes."""
    return dict(sorted(bests(result).items(), key=lambda each: (each[1].unit == Unit.BYTES, each[0])))


def _ranking(function: str, passing: dict[str, dict[str, Best]]) -> Ranking:
    about = {figure: best for figures in passing.values() for figure, best in figures.items()}
    rows = [
        (name, [best.yours if (best := figures.get(each)) else None for each in about])
        for name, figures in passing.items()
    ]
    rows.sort(key=lambda row: ([(value is None, value) for value in row[1]], row[0]))
    units = [(figure, best.unit) for figure, best in about.items()]
    return Ranking(function, units, [best.reference for best in about.values()], rows)
