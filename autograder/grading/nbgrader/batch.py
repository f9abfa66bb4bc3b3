"""Grade a whole class: resumable, in parallel, with each verdict on disk before the next begins."""

import statistics
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autograder.contract.task import ChapterError, load
from autograder.contract.verdict import NEEDS_HUMAN, Report
from autograder.grading.inside.intake import IntakeError, parse_notebook
from autograder.grading.inside.launch import Limits
from autograder.grading.nbgrader.course import (
    CourseError,
    locked,
    open_ledger,
    require_assignment,
    require_folder,
    secret,
)
from autograder.grading.nbgrader.group import share
from autograder.grading.nbgrader.jobs import Job, Outcome, grade_one, verdict_for_all
from autograder.grading.nbgrader.keys import digest, fingerprint
from autograder.grading.nbgrader.ledger import TRIES, Entry, Ledger, needs_human
from autograder.grading.nbgrader.limit_factors import require_possible, require_stated
from autograder.grading.nbgrader.names import name_problem, question, same_name, student_name
from autograder.grading.nbgrader.points import require_released, scaled, ungraded, worth
from autograder.grading.nbgrader.pools import NewPool, dask_pool, local_pool
from autograder.grading.nbgrader.settings import read_settings
from autograder.grading.nbgrader.submissions import Submission, find_submissions, read_submitted
from autograder.grading.nbgrader.task_variants import requested_by
from autograder.render import one_line

# Estimates for one function on an idle core, and for booking one student, if nothing has been measured yet.
FUNCTION_SECONDS, BOOKING_SECONDS = 1.5, 0.3
# Begins the note on a report that was judged but could not be entered in the gradebook.
NOT_BOOKED = "not in the gradebook"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Regrade:
    """A new verdict and the ledger's: if they differ in a single bit, the grader has a fault."""

    student: str
    before: Report
    after: Report


def grade_course(
    course: Path,
    assignment: str,
    *,
    workers: int = 1,
    level: str,
    scheduler: str = "",
    only: Collection[str] = (),
    again: bool = False,
    limits: Limits | None = None,
    on_progress: Progress = lambda stage, done, total: None,
    on_again: Callable[[Regrade], None] = lambda regrade: None,
    new_pool: NewPool | None = None,
) -> list[Report]:
    """Grade every submission that has no verdict yet, and bring the gradebook up to date.

    Args:
        course: A folder with nbgrader's layout.
        assignment: The chapter.
        workers: The number of parallel gradings on this machine.
        level: The sandbox's level; empty for the best one on each machine that grades.
        scheduler: The address of a Dask scheduler, whose workers grade instead of this machine.
        only: The students to grade; everyone if empty.
        again: Also regrade submissions that have a verdict.
        limits: Limits other than the defaults, for tracing a function and for each of its Programs.
        on_progress: Progress callback, called with the stage, the number done and the total.
        on_again: Called with each regraded verdict.
        new_pool: Creates the executor, in place of ``workers`` and ``scheduler``.

    Returns:
        A report for each submission, in order of student.

    Raises:
        CourseError: The folder cannot be used, or is being graded already.
        LedgerError: The ledger cannot be read or written; recorded verdicts stay.
    """
    from autograder.grading.nbgrader.booking import book, clean_half_made

    course = course.resolve()
    require_folder(course, assignment)
    with locked(course), _pool(workers, scheduler, new_pool) as pool:
        require_assignment(course, assignment)
        with open_ledger(course) as ledger:
            everyone = find_submissions(course, assignment)
            chosen = _chosen(everyone, only)
            require_released(course, assignment)
            for submission in everyone:
                ledger.submit(assignment, submission.student, submission.key, submission.digest)
            ledger.forget(assignment, _renamed(everyone, ledger.status(assignment)))
            clean_half_made(course, ledger.status(assignment))
            model = _model(course, assignment, level, limits)
            _Batch(ledger, model, again, on_progress, on_again).judge(chosen, pool)
            paths = {submission.student: submission.notebook for submission in chosen}
            entries = [entry for entry in ledger.status(assignment) if entry.student in paths]
            waiting = [each for each in entries if each.report and not each.booked and not name_problem(each.student)]
            booked = iter(range(1, len(waiting) + 1))
            on_book: Callable[[str], None] = lambda _: on_progress("gradebook", next(booked), len(waiting))  # noqa: E731
            problems = book(course, assignment, ledger, paths, on_book)
        share(course)
    points = worth(read_settings(course), assignment)
    reports = [scaled(entry.report, points) for entry in entries if entry.report]
    return [_with_problem(report, problems.get(report.student, "")) for report in reports]


def count_waiting(course: Path, assignment: str, only: Collection[str] = (), again: bool = False) -> int:
    """Count the notebooks that ``grade_course`` would judge; those that cannot be read take no time."""
    course = course.resolve()
    try:
        submissions = _chosen(find_submissions(course, assignment), only)
    except CourseError:  # grading says who has not submitted
        return 0
    with open_ledger(course) as ledger:
        reports = {each.key: ledger.get(each.key) for each in submissions}
    due = [each for each in submissions if again or (report := reports[each.key]) is None or needs_human(report)]
    return sum(map(_readable, due))


def _readable(submission: Submission) -> bool:
    """Return True if there is a notebook that a grader can start on."""
    problem, data = read_submitted(submission.notebook) if submission.notebook else ("none", b"")
    try:
        return not problem and bool(parse_notebook(submission.student, data))
    except IntakeError:
        return False


def estimate(
    course: Path, assignments: Collection[str], workers: int, *, only: Collection[str] = (), again: bool = False
) -> tuple[int, float, int]:
    """Estimate the number of gradings, their seconds with ``workers``, and the number of measurements behind that.

    A chapter without measurements is assumed to take as long for each function as the others do, or else
    ``FUNCTION_SECONDS``; functions that the course does not grade take no time.
    """
    with open_ledger(course.resolve()) as ledger:
        seconds_by_chapter = ledger.seconds()
    sizes = _graded_functions(course, {*assignments, *seconds_by_chapter})
    per_function = [
        seconds / sizes[name] for name, timings in seconds_by_chapter.items() if sizes.get(name) for seconds in timings
    ]
    function_seconds = statistics.median(per_function) if per_function else FUNCTION_SECONDS
    total, gradings = 0.0, 0
    for name in assignments:
        count = count_waiting(course, name, only, again)
        grading_seconds = (
            statistics.mean(seconds_by_chapter[name])
            if seconds_by_chapter.get(name)
            else function_seconds * sizes.get(name, 0)
        )
        gradings += count
        total += count * grading_seconds / workers + count * BOOKING_SECONDS
    return gradings, total, len(per_function)


def _graded_functions(course: Path, chapters: Collection[str]) -> dict[str, int]:
    """Count the functions of each chapter that the course grades, without chapters that are missing or unusable."""
    settings, counts = read_settings(course), {}
    for name in chapters:
        with suppress(LookupError, ChapterError):
            counts[name] = len(load(name).tasks) - len(ungraded(settings, name))
    return counts


def _model(course: Path, assignment: str, level: str, limits: Limits | None) -> Job:
    """The fields that all jobs of this run have in common."""
    requested = tuple(sorted(requested_by(course, assignment).items()))
    settings = read_settings(course)
    factors = require_stated(course, assignment)
    require_possible(assignment, factors)
    own_limits = tuple((name, tuple(each.items())) for name, each in factors.items())
    course_options = ungraded(settings, assignment), settings.budget, own_limits
    return Job(
        assignment, "", b"", "", secret(course), level, fingerprint(assignment), limits, requested, *course_options
    )


def _pool(workers: int, scheduler: str, new_pool: NewPool | None) -> AbstractContextManager[NewPool]:
    if new_pool or not scheduler:
        return nullcontext(new_pool or local_pool(workers))
    return dask_pool(scheduler)


def _chosen(everyone: list[Submission], only: Collection[str]) -> list[Submission]:
    names = {submission.student for submission in everyone}
    forms = {same_name(name): name for name in names}
    selected = {name if name in names else forms.get(same_name(student_name(name)), name) for name in only}
    missing = sorted(selected - names)
    if missing:
        raise CourseError(
            f"nothing was submitted by {', '.join(missing)}; names are those of the folders in `submitted/`"
            f"{question(missing, names)}"
        )
    return [submission for submission in everyone if not only or submission.student in selected]


def _renamed(everyone: list[Submission], entries: list[Entry]) -> list[str]:
    """Folder names that were not valid student names and no longer exist."""
    names = {submission.student for submission in everyone}
    return [entry.student for entry in entries if entry.student not in names and name_problem(entry.student)]


def _with_problem(report: Report, problem: str) -> Report:
    return replace(report, notes=(*report.notes, f"{NOT_BOOKED}: {problem}")) if problem else report


@dataclass
class _Batch:
    """One run over a class: the submissions still to grade, and their outcomes; ``model`` is common to all jobs."""

    ledger: Ledger
    model: Job
    again: bool
    on_progress: Progress
    on_again: Callable[[Regrade], None]
    open: dict[str, Submission] = field(default_factory=dict)
    before: dict[str, Report] = field(default_factory=dict)
    total: int = 0

    def judge(self, submissions: list[Submission], pool: NewPool) -> None:
        """Record a verdict for every submission that has none, or whose verdict waits for a person."""
        for submission in submissions:
            known = self.ledger.get(submission.key, submission.student)
            if known is not None and not needs_human(known):
                if not self.again:
                    continue
                self.before[submission.key] = known
            if submission.notebook is None:
                why, unreadable = submission.problem, submission.verdict == NEEDS_HUMAN
                report = verdict_for_all(
                    self.model.chapter, submission.verdict, why, ungraded=self.model.ungraded, unreadable=unreadable
                )
                self.ledger.record(submission.key, report)
            else:
                self.open[submission.key] = submission
        self.total = len(self.open)
        self.on_progress("grading", 0, self.total)
        self._run([*self.open], False, pool)
        # The rest shared a worker that died, or met a fault: grade each alone, so that one cannot take down another.
        for key in [*self.open]:
            while key in self.open:
                for lost_key in self._run([key], True, pool):
                    self._settle(lost_key, Outcome(None, "it ended the grader's worker"))

    def _run(self, keys: list[str], alone: bool, pool: NewPool) -> list[str]:
        """Grade these in parallel, up to the pool's width; return the keys of those lost with a worker."""
        waiting, lost = deque(keys), []
        while waiting:
            executor, width = pool(alone)
            running: dict[Any, str] = {}
            with executor:
                try:
                    while waiting or running:
                        while waiting and len(running) < width:
                            key = waiting.popleft()
                            job = self._job(key)
                            if job is None:
                                self._settle(key, Outcome(None, "the file has changed in the meantime; run this again"))
                            else:
                                running[executor.submit(grade_one, job)] = key
                        for future in wait(running, return_when=FIRST_COMPLETED).done:
                            self._settle(running[future], _outcome(future))
                            del running[future]
                except BrokenExecutor:
                    lost += running.values()
        return lost

    def _job(self, key: str) -> Job | None:
        """The job for a submission; None if its file has changed since it was found."""
        submission = self.open[key]
        assert submission.notebook
        problem, data = read_submitted(submission.notebook)
        if problem or digest(data) != submission.digest:
            return None
        return replace(self.model, name=one_line(submission.notebook.name), notebook=data, student=submission.student)

    def _settle(self, key: str, outcome: Outcome) -> None:
        """Record the outcome of a grading; a fault is retried until it has happened too often."""
        report, submission = outcome.report, self.open[key]
        if report is None and self.ledger.fault(key, outcome.fault) >= TRIES:
            message = f"the grader failed {TRIES} times on this submission: {outcome.fault}"
            report = verdict_for_all(self.model.chapter, NEEDS_HUMAN, message, self.model.level, self.model.ungraded)
        if report is None:
            return
        report = replace(report, notes=(*filter(None, [submission.note]), *report.notes), student=submission.student)
        before = self.before.get(key)
        if before is not None:
            self.on_again(Regrade(submission.student, before, report))
        if before is None or not needs_human(report):  # a fault of the grader does not replace a verdict
            self.ledger.record(key, report)
            if outcome.seconds:
                self.ledger.took(key, outcome.seconds)
        del self.open[key]
        self.on_progress("grading", self.total - len(self.open), self.total)


def _outcome(future: Any) -> Outcome:
    """The outcome of a grading. The caller handles a lost worker or cluster; any other error is its fault."""
    try:
        return future.result()
    except (BrokenExecutor, CancelledError):
        raise
    except Exception as error:
        return Outcome(None, f"{type(error).__name__}: {error}"[:2000])
