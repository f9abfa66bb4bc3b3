"""The class at a glance: points, the facts that fail and their messages, attempts, time, and who waits."""

from __future__ import annotations

import statistics
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autograder.contract.task import load
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    NEEDS_HUMAN,
    PARTIAL,
    PASS,
    REFUSED,
    STUDENT_ERROR,
    Result,
)
from autograder.grading.nbgrader.course import CourseError, open_ledger
from autograder.grading.nbgrader.export import BY_HAND, HUMAN, counts, csv_text, overview
from autograder.grading.nbgrader.points import scaled, worth
from autograder.grading.nbgrader.settings import read_settings
from autograder.render import NOT_STARTED, number, one_line, page_template, plain

TEMPLATES = Path(__file__).parent / "templates" / "report"
ORDER = (PASS, PARTIAL, FAIL, STUDENT_ERROR, LIMIT_EXCEEDED, REFUSED, NOT_STARTED, NEEDS_HUMAN)
BINS, MOST_FACTS, LONGEST = 10, 5, 300


def class_report(course: Path, chapter: str, earlier: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Figures of a chapter for the whole class, as plain data.

    Args:
        course: The course folder.
        chapter: The chapter.
        earlier: Folders of earlier terms to compare with.

    Raises:
        CourseError: A folder is not a course, or nothing of the chapter was graded there.
    """
    course = course.resolve()
    rows = overview(course, chapter)
    with open_ledger(course) as ledger:
        entries = ledger.status(chapter)
        attempts, grading_seconds = ledger.attempts(chapter), ledger.seconds(chapter).get(chapter, [])
    points = worth(read_settings(course), chapter)
    reports = [scaled(entry.report, points) for entry in entries if entry.report]
    if not reports:
        raise CourseError(
            f"nothing of {chapter} has been graded in {course}; run `meshcraft grade {chapter}` there first"
        )
    judged = [row for row in rows if row["points"] is not None]
    results: dict[str, list[Result]] = {}
    for report in reports:
        for result in report.functions:
            results.setdefault(result.name, []).append(result)
    return {
        "chapter": chapter,
        "students": len(rows),
        "graded": len(judged),
        "max_points": judged[0]["max_points"] if judged else None,
        "mean_points": round(statistics.mean(row["points"] for row in judged), 2) if judged else None,
        "median_points": round(statistics.median(row["points"] for row in judged), 2) if judged else None,
        "histogram": _histogram([row["points"] for row in judged], judged[0]["max_points"] if judged else 0.0),
        "states": counts(rows),
        "functions": [_function(name, results[name]) for name in dict.fromkeys(_names(chapter, results))],
        "attempts": _attempts(attempts),
        "grader_seconds": _seconds(grading_seconds),
        "persons": [
            {"student": row["student"], "state": row["state"], "why": row["why"]}
            for row in rows
            if row["state"] in (HUMAN, BY_HAND)
        ],
        "earlier": [_earlier(folder, chapter) for folder in earlier],
    }


def _names(chapter: str, results: dict[str, list[Result]]) -> list[str]:
    return [task.name for task in load(chapter).tasks if task.name in results] + [*results]


def _function(name: str, results: list[Result]) -> dict[str, Any]:
    """One function: verdicts, points, and the facts that fail most often. What needs a person has no points yet."""
    judged = [result for result in results if result.verdict != NEEDS_HUMAN]
    verdicts = Counter(NOT_STARTED if result.not_started else result.verdict for result in results)
    missed: dict[str, list[Any]] = {}
    for result in results:
        for fact in {fact.name: fact for fact in result.missed}.values():
            missed.setdefault(fact.name, []).append(fact)
    stopped = [
        result.message
        for result in results
        if result.message and not result.missed and not result.not_started and result.verdict != NEEDS_HUMAN
    ]
    facts = sorted(missed.items(), key=lambda each: (-len(each[1]), each[0]))[:MOST_FACTS]
    return {
        "name": name,
        "max_points": results[0].max_points,
        "mean_points": round(statistics.mean(result.points for result in judged), 2) if judged else None,
        "pass_share": round(verdicts[PASS] / len(judged), 4) if judged else None,
        "verdicts": {verdict: verdicts[verdict] for verdict in ORDER if verdicts[verdict]},
        "facts": [
            {
                "name": fact,
                "failed": len(failures),
                "message": _most_common([each.message for each in failures]),
                "case": _most_common([each.case for each in failures]),
            }
            for fact, failures in facts
        ],
        "stopped": {"count": len(stopped), "message": _most_common(stopped)},
    }


def _most_common(messages: list[str]) -> str:
    """The message that occurs most often, on one line."""
    frequencies = Counter(" ".join(message.split()) for message in messages if message)
    text = frequencies.most_common(1)[0][0] if frequencies else ""
    return plain(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def _histogram(points: list[float], max_points: float) -> list[dict[str, Any]]:
    if not points or not max_points:
        return []
    places = Counter(min(int(BINS * each / max_points), BINS - 1) for each in points)
    return [
        {"from": round(max_points * n / BINS, 2), "to": round(max_points * (n + 1) / BINS, 2), "count": places[n]}
        for n in range(BINS)
    ]


def _attempts(attempts: dict[str, list[tuple[float, Any]]]) -> dict[str, Any]:
    """The number of times that students handed in, their mean gain, and the different submissions seen on each day."""
    days = Counter(f"{datetime.fromtimestamp(seen, UTC):%Y-%m-%d}" for tries in attempts.values() for seen, _ in tries)
    gains = [
        tries[-1][1].points - tries[0][1].points
        for tries in attempts.values()
        if len(tries) > 1 and tries[0][1] and tries[-1][1]
    ]
    return {
        "by_number": {str(n): count for n, count in sorted(Counter(map(len, attempts.values())).items())},
        "by_day": dict(sorted(days.items())),
        "mean_gain": round(statistics.mean(gains), 2) if gains else None,
    }


def _seconds(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {}
    return {
        "gradings": len(seconds),
        "median": round(statistics.median(seconds), 2),
        "longest": round(max(seconds), 2),
        "all": round(sum(seconds), 1),
    }


def _earlier(folder: Path, chapter: str) -> dict[str, Any]:
    report = class_report(folder, chapter)
    shares = {each["name"]: each["pass_share"] for each in report["functions"] if each["pass_share"] is not None}
    means = {
        each["name"]: each["mean_points"] / each["max_points"]
        for each in report["functions"]
        if each["max_points"] and each["mean_points"] is not None
    }
    return {
        "term": read_settings(folder.resolve()).name,
        "graded": report["graded"],
        "pass_share": shares,
        "mean_share": {name: round(share, 4) for name, share in means.items()},
    }


def report_csv(data: dict[str, Any]) -> str:
    """One row per function and failed fact, for a spreadsheet."""
    head = ["chapter", "function", "mean_points", "max_points", "pass_share", "fact", "failed", "case", "message"]
    rows = []
    for each in data["functions"]:
        common = {"chapter": data["chapter"], "function": each["name"], **{name: each[name] for name in head[2:5]}}
        facts = [{"fact": fact["name"], **{name: fact[name] for name in head[6:]}} for fact in each["facts"]]
        rows += [{**common, **row} for row in facts or [{}]]
    return csv_text(head, rows)


def report_page(data: dict[str, Any]) -> str:
    """The figures as one HTML page without scripts that loads nothing, for the screen and for paper."""
    page = page_template(TEMPLATES / "index.html.j2", number=number, line=one_line)
    return page.render(**data, today=f"{datetime.now(UTC):%Y-%m-%d}")
