"""The instructor's main command: grade, and the table it prints."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from autograder.commands.instructor import Assignment, CourseFolder, assignments
from autograder.commands.terminal import (
    FAULT,
    USAGE,
    AsJson,
    UsageError,
    bar,
    complain,
    err,
    fits,
    out,
    print_json,
    spinner,
    table,
)
from autograder.contract.text import count_of
from autograder.contract.verdict import LIMIT_EXCEEDED, NEEDS_HUMAN, PASS, Report
from autograder.render import RICH, WORDS, number, one_line, plain

if TYPE_CHECKING:
    from autograder.grading.nbgrader.batch import Regrade

BRIEF = {**WORDS, LIMIT_EXCEEDED: "limit", NEEDS_HUMAN: "person"}


def grade(
    assignment: Assignment = None,
    course: CourseFolder = Path("."),
    workers: Annotated[int, typer.Option(min=1, help="Gradings at once.")] = max(1, (os.cpu_count() or 1)),
    scheduler: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Grade on the workers of this Dask scheduler, not on this machine.")
    ] = "",
    only: Annotated[
        list[str] | None, typer.Option(metavar="STUDENT", help="Only this student; repeat it for more.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Grade again what has a verdict, and report whether the result is the same.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="Every chapter of the course, one after the other.")] = False,
    only_estimate: Annotated[
        bool, typer.Option("--estimate", help="Only say how much there is to grade, and how long it takes.")
    ] = False,
    unsafe_local: Annotated[bool, typer.Option("--unsafe-local", help="Grade even without any sandbox.")] = False,
    as_json: AsJson = False,
) -> None:
    """Grade submissions that are not graded yet. Interrupt it at any time, and run it again to resume.

    Exit status 0: every submission has a verdict; 3: some need manual attention, or --again gave a different verdict.
    """
    from autograder.grading.nbgrader.batch import estimate as expected
    from autograder.grading.nbgrader.pools import cluster_gradings
    from autograder.grading.nbgrader.submissions import find_submissions, misplaced

    if every and assignment:
        raise UsageError(f"--all grades every chapter; leave out {assignment}, or leave out --all")
    if scheduler and unsafe_local:
        raise UsageError("--unsafe-local is only for this machine; a cluster's workers grade in their sandbox")
    names, exit_status = assignments(course, assignment)
    concurrency = cluster_gradings(scheduler) if scheduler else workers
    gradings, seconds, measured = expected(course, names, max(1, concurrency), only=only or (), again=again)
    _announce(gradings, seconds, measured, names, concurrency, scheduler)
    if only_estimate:
        if not gradings:
            is_empty = not any(find_submissions(course, name) for name in names)
            state = "there are no submissions" if is_empty else "every submission that can be read has a verdict"
            complain(f"nothing to grade: {state}")
        raise typer.Exit(exit_status)
    level = _level(scheduler, unsafe_local)
    options = {"workers": workers, "level": level, "scheduler": scheduler, "only": only or (), "again": again}
    done = _grade_each(course, names, options, gradings)
    if as_json:
        print_json(_as_json(done))
    else:
        for name in (name for name in names if name not in done.failed):
            reports = [report for report in done.reports if report.chapter == name]
            out().print(grade_table(reports) if reports else Text(f"{name}: no submission to grade"))
        for chapter, student, old, new in done.moved:
            out().print(f"{one_line(student)}: {chapter} {number(old)} before, {number(new)} now", markup=False)
    for name, error in done.failed.items():
        complain(f"{name} was not graded: {error}")
    for path, why in misplaced(course).items():
        complain(f"{path}: {why}")
    waiting = [report for report in done.reports if unfinished(report)]
    for report in waiting:
        complain(f"{one_line(report.student)} needs a person: {one_line(reason(report))}")
    differ = _compare(done.regrades, quiet=as_json)
    raise typer.Exit(USAGE if done.failed else exit_status or (FAULT if waiting or differ else 0))


@dataclass
class _Graded:
    """The results of a run over several chapters; ``moved`` has chapter, student, and the scores before and now."""

    reports: list[Report] = field(default_factory=list)
    regrades: list[Regrade] = field(default_factory=list)
    failed: dict[str, Exception] = field(default_factory=dict)
    moved: list[tuple[str, str, float, float]] = field(default_factory=list)


def _grade_each(course: Path, names: list[str], options: dict[str, Any], gradings: int) -> _Graded:
    """Grade the chapters one after another; one that cannot be graded does not stop the others."""
    from autograder.grading.nbgrader.batch import grade_course
    from autograder.grading.nbgrader.course import CourseError
    from autograder.grading.nbgrader.pools import shared_pool

    done = _Graded()
    with bar() as update, nullcontext() if options["scheduler"] else shared_pool(options["workers"]) as pool:
        progress = _CombinedProgress(update, gradings)
        options = {**options, "new_pool": pool, "on_progress": progress.update, "on_again": done.regrades.append}
        for name in names:
            before = _scores(course, name, renew=False)
            try:
                done.reports += grade_course(course, name, **options)
            except CourseError as error:
                if len(names) == 1:
                    raise
                done.failed[name] = error
                continue
            finally:
                progress.next()
            after = _scores(course, name, renew=True)
            unjudged = {report.student for report in done.reports if report.chapter == name and unfinished(report)}
            done.moved += [
                (name, student, old, after[student])
                for student, old in before.items()
                if after.get(student, old) != old and student not in unjudged
            ]
    return done


def _as_json(done: _Graded) -> dict[str, Any]:
    changes = [dict(zip(("chapter", "student", "before", "now"), each, strict=True)) for each in done.moved]
    return {
        "submissions": [report.to_json() for report in done.reports],
        "again": [*map(_regrade_json, done.regrades)],
        "changed": changes,
    }


def _compare(regrades: list[Regrade], *, quiet: bool) -> bool:
    """Say what came out differently when graded again; return True if anything did."""
    changed = [regrade for regrade in regrades if not _regrade_json(regrade)["same"]]
    if regrades and not quiet:
        out().print(f"{len(regrades) - len(changed)} of {len(regrades)} graded again are the same, to the last bit")
        for pair in sorted({(r.before.isolation, r.after.isolation) for r in regrades if r not in changed}):
            if pair[0] != pair[1]:
                out().print(f"judged under {plain(pair[1])} now, and under {plain(pair[0])} before", markup=False)
    for regrade in changed:
        before, after = regrade.before.points, regrade.after.points
        difference = _difference(regrade) if before == after else f"{number(before)} points before, now {number(after)}"
        complain(f"{regrade.student} came out differently: {difference}")
    return bool(changed)


def _scores(course: Path, name: str, *, renew: bool) -> dict[str, float]:
    """Every student's score; empty if the gradebook cannot be read, which grading reports for each student."""
    from autograder.grading.nbgrader.course import CourseError
    from autograder.grading.nbgrader.export import scores
    from autograder.grading.nbgrader.late_penalty import renew_penalties

    try:
        if renew:
            renew_penalties(course, name)
        return scores(course, name)
    except CourseError:
        return {}


class _CombinedProgress:
    """Report the progress of several chapters as one run."""

    def __init__(self, update: Any, gradings: int):
        self._update, self._gradings = update, gradings
        self._before: Counter[str] = Counter()
        self._done: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()

    def update(self, stage: str, done: int, total: int) -> None:
        self._done[stage], self._totals[stage] = done, total
        known = self._gradings if stage == "grading" else 0
        before = self._before[stage]
        self._update(stage, before + done, max(known, before + total))

    def next(self) -> None:
        self._before += self._totals
        self._totals.clear()


def _announce(gradings: int, seconds: float, measured: int, names: list[str], workers: int, scheduler: str) -> None:
    """Say how much there is to grade and how long it takes, before it begins."""
    if not gradings:
        return
    where = f"with {count_of(workers, 'worker')}" + " of the cluster" * bool(scheduler)
    where = where if workers else "with one worker; the cluster has none yet"
    time = f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{max(1, round(seconds / 60))} min"
    basis = (
        f"from {count_of(measured, 'measured grading')}" if measured else "a rough guess, nothing has been measured yet"
    )
    text = f"{count_of(gradings, 'grading')} of {count_of(len(names), 'chapter')}, about {time} {where}"
    err().print(f"{text} ({basis})", markup=False, style="dim", soft_wrap=True)


def _level(scheduler: str, unsafe_local: bool) -> str:
    """The sandbox's level; empty if each machine of a cluster picks its own."""
    from autograder.grading.outside.sandbox import best_level

    if scheduler:
        return ""
    with spinner("looking for a sandbox"):
        level = best_level(allow_unsafe=unsafe_local)
    if level == "unsafe-local":
        complain("no sandbox: students' code runs with your permissions on this machine (--unsafe-local)")
    return level


def _difference(regrade: Regrade) -> str:
    """Describe how two verdicts with the same points differ: in functions, or only in notes."""
    pairs = zip(regrade.before.functions, regrade.after.functions, strict=False)
    names = [before.name for before, after in pairs if before.to_json() != after.to_json()]
    return (
        f"the same points, but other measurements for {', '.join(names)}" if names else "other notes, the same verdicts"
    )


def _regrade_json(regrade: Regrade) -> dict[str, Any]:
    before, after = regrade.before, regrade.after
    return {
        "student": regrade.student,
        "same": replace(before, isolation="").to_json() == replace(after, isolation="").to_json(),
        "isolation_before": before.isolation,
        "isolation": after.isolation,
        "points_before": before.points,
        "points": after.points,
    }


def grade_table(reports: list[Report]) -> Group:
    """One line per student with points and verdict of each function; below it, the isolation they were judged under.

    Where that is too wide for the terminal, the line names only the functions that did not pass.
    """
    names = list(dict.fromkeys(result.name for report in reports for result in report.functions))
    levels = list(dict.fromkeys(report.isolation for report in reports if report.isolation))
    isolation_columns = ["isolation"] if len(levels) > 1 else []
    columns = (plain(column) for column in ("student", *names, "points", *isolation_columns))
    wide = table(*(column if len(names) <= 3 else column.replace("_", "_\n") for column in columns))
    narrow = table("student", "points", *isolation_columns, "not passed")
    parts: list[Text] = []
    for report in reports:
        results = {result.name: result for result in report.functions}
        cells = [_verdict_cell(results.get(name)) for name in names]
        unjudged = {result.verdict for result in report.functions} == {NEEDS_HUMAN}
        points = f"{'–' if unjudged else number(report.points)} of {number(report.max_points)}"
        student, isolation = Text(one_line(report.student)), [Text(plain(report.isolation)) for _ in isolation_columns]
        wide.add_row(student, *cells, points, *isolation)
        failed = [
            Text(f"{plain(result.name)}\N{NO-BREAK SPACE}") + _verdict_cell(result, "\N{NO-BREAK SPACE}")
            for result in report.functions
            if result.verdict != PASS
        ]
        everything = [Text("everything: needs a person", style=RICH.get(NEEDS_HUMAN, "red"))]
        narrow.add_row(student, points, *isolation, Text(", ").join(everything if unjudged else failed))
    message = f", judged under {levels[0]}" if len(levels) == 1 else ""
    for report in reports:
        calls = dict.fromkeys(call for result in report.functions for call in result.denied)
        if calls:
            refusals = f"{report.student}: the sandbox refused {', '.join(map(one_line, calls))}"
            parts.append(Text(plain(refusals), style="yellow"))
    count = f"{len(reports)} submission{'' if len(reports) == 1 else 's'}"
    return Group(wide if fits(wide) else narrow, *parts, Text(f"\n{count}{plain(message)}", style="dim"))


def unfinished(report: Report) -> bool:
    """Return True if the report needs manual attention."""
    from autograder.grading.nbgrader.batch import NOT_BOOKED
    from autograder.grading.nbgrader.ledger import needs_human

    return needs_human(report) or any(note.startswith(NOT_BOOKED) for note in report.notes)


def reason(report: Report) -> str:
    """The reason why it needs manual attention."""
    message = [result.message for result in report.functions if result.verdict == NEEDS_HUMAN and result.message]
    return next(iter([*message, *report.notes]), "no reason was given")


def _verdict_cell(result: Any, gap: str = " ") -> Text:
    if result is None:
        return Text("")
    word = BRIEF.get(result.verdict, plain(result.verdict))
    return Text(f"{number(result.points)}{gap}{word}", style=RICH.get(result.verdict, "red"))
