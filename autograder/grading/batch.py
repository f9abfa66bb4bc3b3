"""Grade a whole class: resumable, in parallel, each verdict on disk before the next begins."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autograder.grading.course import locked, open_ledger, require_assignment, require_folder, secret
from autograder.grading.ledger import TRIES, Ledger, needs_human
from autograder.grading.submissions import Submission, find_submissions
from autograder.verdict import NEEDS_HUMAN, REFUSED, Report, Result

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """One grading: a pure function of these, so it may run anywhere and twice."""

    chapter: str
    notebook: Path
    student: str
    secret: bytes
    level: str


@dataclass(frozen=True)
class Outcome:
    """A report, or what went wrong in the grader."""

    report: Report | None
    fault: str = ""


def grade_course(
    course: Path,
    assignment: str,
    *,
    workers: int = 1,
    level: str,
    on_progress: Progress = lambda stage, done, total: None,
    new_pool: Callable[[int], Executor] | None = None,
) -> list[Report]:
    """Grade every submission that has no verdict yet, and bring the gradebook up to date.

    Args:
        course: A folder with nbgrader's layout.
        assignment: The chapter.
        workers: How many gradings run at once.
        level: The sandbox's level.
        on_progress: Called with the stage, and how many of how many are done.
        new_pool: Makes the executor; one of local processes if not given.

    Returns:
        A report for each submission, in order of student.

    Raises:
        CourseError: the folder cannot be used, or is being graded already.
        LedgerError: the ledger cannot be read or written; what is recorded stays.
    """
    from autograder.grading.bridge import book, clean_half_made

    course = course.resolve()
    require_folder(course, assignment)
    with locked(course):
        require_assignment(course, assignment)
        with open_ledger(course) as ledger:
            ledger.drop_leases()
            submissions = find_submissions(course, assignment)
            for submission in submissions:
                ledger.submit(assignment, submission.student, submission.key, submission.digest)
            clean_half_made(course, ledger.status(assignment))
            _judge(ledger, assignment, submissions, secret(course), level, _pool(workers, new_pool), on_progress)
            waiting = [entry for entry in ledger.status(assignment) if entry.report and not entry.booked]
            booked = iter(range(1, len(waiting) + 1))
            paths = {submission.student: submission.notebook for submission in submissions}
            on_book: Callable[[str], None] = lambda _: on_progress("gradebook", next(booked), len(waiting))  # noqa: E731
            problems = book(course, assignment, ledger, paths, on_book)
            reports = {entry.student: entry.report for entry in ledger.status(assignment)}
    found = [reports[submission.student] for submission in submissions]
    return [_with_problem(report, problems.get(report.student, "")) for report in found if report]


def verdict_for_all(chapter: str, verdict: str, message: str, isolation: str = "") -> Report:
    """A report that says the same of every function of the chapter, and gives no points."""
    from autograder import contract

    tasks = contract.load(chapter).tasks
    functions = tuple(Result(task.name, 0.0, float(task.points), verdict, message=message) for task in tasks)
    return Report(chapter, functions, isolation=isolation)


def _with_problem(report: Report, problem: str) -> Report:
    return replace(report, notes=(*report.notes, f"not in the gradebook: {problem}")) if problem else report


def _pool(workers: int, new_pool: Callable[[int], Executor] | None) -> Callable[[bool], tuple[Executor, int]]:
    make = new_pool or _local_pool
    return lambda alone: (make(1 if alone else workers), 1 if alone else workers)


def _local_pool(workers: int) -> Executor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (os.getpid(),))


def _judge(
    ledger: Ledger,
    chapter: str,
    submissions: list[Submission],
    key_material: bytes,
    level: str,
    pool: Callable[[bool], tuple[Executor, int]],
    on_progress: Progress,
) -> None:
    """Record a verdict for every submission that has none, or whose verdict waits for a person."""
    jobs: dict[str, Job] = {}
    notes: dict[str, str] = {}
    for submission in submissions:
        known = ledger.get(submission.key)
        if known is not None and not needs_human(known):
            continue
        if submission.notebook is None:
            ledger.record(submission.key, verdict_for_all(chapter, submission.verdict, submission.problem))
        else:
            jobs[submission.key] = Job(chapter, submission.notebook, submission.student, key_material, level)
            notes[submission.key] = submission.note
    total = len(jobs)
    on_progress("grading", 0, total)

    def settle(filed: str, outcome: Outcome) -> bool:
        report = outcome.report
        if report is None and ledger.fault(filed, outcome.fault) >= TRIES:
            said = f"the grader failed {TRIES} times on this submission: {outcome.fault}"
            report = verdict_for_all(chapter, NEEDS_HUMAN, said, level)
        if report is not None:
            ledger.record(filed, replace(report, notes=(*filter(None, [notes[filed]]), *report.notes)))
            del jobs[filed]
            on_progress("grading", total - len(jobs), total)
        return report is not None

    _run(dict(jobs), False, ledger, pool, settle)
    # What is left shared a worker's death or met a fault: each alone, so that one cannot take another with it.
    for filed, job in list(jobs.items()):
        for _ in range(TRIES):
            if filed not in jobs:
                break
            for lost in _run({filed: job}, True, ledger, pool, settle):
                settle(lost, Outcome(None, "it ended the grader's worker"))


def _run(
    jobs: dict[str, Job],
    alone: bool,
    ledger: Ledger,
    pool: Callable[[bool], tuple[Executor, int]],
    settle: Callable[[str, Outcome], bool],
) -> list[str]:
    """Run the jobs, as many at once as there are workers; the keys of those that were lost with a worker."""
    waiting, lost = deque(jobs.items()), []
    owner = f"{os.uname().nodename}:{os.getpid()}"
    while waiting:
        executor, width = pool(alone)
        running: dict[Any, str] = {}
        with executor:
            try:
                while waiting or running:
                    while waiting and len(running) < width:
                        filed, job = waiting.popleft()
                        if ledger.lease(filed, owner, 3600.0):
                            running[executor.submit(grade_one, job)] = filed
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        outcome = future.result()
                        settle(running.pop(future), outcome)
            except BrokenProcessPool:
                lost += running.values()
    return lost


_graders: dict[tuple[str, bytes, str], Any] = {}


def _start_worker(parent: int) -> None:
    """A worker leaves interrupting to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        from autograder.grading.launch import prctl

        prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    from multiprocessing.util import Finalize

    Finalize(None, _close_graders, exitpriority=10)


def _close_graders() -> None:
    while _graders:
        _graders.popitem()[1].__exit__(None, None, None)


def grade_one(job: Job) -> Outcome:
    """Grade one submission with this process's warm grader."""
    from autograder.grading.intake import IntakeError
    from autograder.grading.pipeline import Grader

    which = (job.chapter, job.secret, job.level)
    try:
        if which not in _graders:
            grader = Grader(job.chapter, secret=job.secret, level=job.level)
            _graders[which] = grader.__enter__()
        return Outcome(_graders[which].grade(job.notebook, job.student))
    except IntakeError as error:
        said = str(error).replace(str(job.notebook), job.notebook.name)
        return Outcome(verdict_for_all(job.chapter, REFUSED, said, job.level))
    except Exception as error:
        said = traceback.format_exception_only(error)[-1].strip()
        _close_graders()
        return Outcome(None, said)
