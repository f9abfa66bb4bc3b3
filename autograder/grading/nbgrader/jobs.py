"""One grading: a pure function of its `Job`, run in this thread's warm sandboxed processes.

Whatever this module imports can change a verdict (see `keys`), so nothing about classes and gradebooks belongs here.
"""

import platform
import threading
import time
import traceback
from dataclasses import dataclass

from autograder.contract.task import load
from autograder.contract.verdict import NEEDS_HUMAN, REFUSED, Report, Result
from autograder.grading.inside.intake import DamagedError, IntakeError, parse_notebook
from autograder.grading.inside.launch import Limits
from autograder.grading.nbgrader.keys import fingerprint


@dataclass(frozen=True)
class Job:
    """One grading.

    Attributes:
        chapter: The chapter's name.
        name: The notebook's file name, for messages.
        notebook: Its bytes.
        student: The student's name.
        secret: The course's secret.
        level: The sandbox's level; empty for the best one on the machine it runs on.
        fingerprint: The required fingerprint of that machine's course and packages; empty to skip the comparison.
        limits: Limits other than the defaults.
        variants: The course's variants by function.
        ungraded: Functions that the course does not grade.
        budget: The course's processor seconds for a submission; 0 for the usual limit.
        factors: The course's factors on limits, by function and fact.
    """

    chapter: str
    name: str
    notebook: bytes
    student: str
    secret: bytes
    level: str
    fingerprint: str = ""
    limits: Limits | None = None
    variants: tuple[tuple[str, str], ...] = ()
    ungraded: tuple[str, ...] = ()
    budget: float = 0.0
    factors: tuple[tuple[str, tuple[tuple[str, float], ...]], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """A report, or the fault that occurred in the grader."""

    report: Report | None
    fault: str = ""
    seconds: float = 0.0


_own = threading.local()


def close_grader() -> None:
    """End this thread's sandboxed processes."""
    grader = _own.__dict__.pop("grader", None)
    if grader is not None:
        grader.close()


def grade_one(job: Job) -> Outcome:
    """Grade one submission with this thread's warm grader."""
    if job.fingerprint and job.fingerprint != fingerprint(job.chapter):
        return Outcome(
            None,
            f"{platform.node()} has a different version of the course, of Python or of a package than the machine that "
            "the class is graded from; install the same on both",
        )
    try:
        notebook = parse_notebook(job.name, job.notebook)
        grader, begin = _warm_grader(job), time.monotonic()
        report = grader.grade_notebook(notebook, job.student)
        return Outcome(report, seconds=time.monotonic() - begin)
    except DamagedError as error:
        message = f"the upload is damaged: {error}, and submit it again"
        return Outcome(verdict_for_all(job.chapter, NEEDS_HUMAN, message, job.level, job.ungraded, unreadable=True))
    except IntakeError as error:
        return Outcome(verdict_for_all(job.chapter, REFUSED, str(error), job.level, job.ungraded))
    except Exception as error:
        close_grader()
        return Outcome(None, traceback.format_exception_only(error)[-1].strip())


def _warm_grader(job: Job):
    from autograder.grading.outside import pipeline
    from autograder.grading.outside.sandbox import best_level

    which = (job.chapter, job.secret, job.level, job.limits, job.variants, job.ungraded, job.budget, job.factors)
    if _own.__dict__.get("which") != which or "grader" not in _own.__dict__:
        close_grader()
        level, limits = job.level or best_level(), job.limits or pipeline.LIMITS
        options = {"level": level, "limits": limits, "variants": dict(job.variants)}
        options |= {"ungraded": job.ungraded, "budget": job.budget}
        options |= {"factors": {name: dict(each) for name, each in job.factors}}
        _own.grader = pipeline.Grader(job.chapter, secret=job.secret, **options)
        _own.which = which
    return _own.grader


def verdict_for_all(
    chapter: str,
    verdict: str,
    message: str,
    isolation: str = "",
    ungraded: tuple[str, ...] = (),
    *,
    unreadable: bool = False,
) -> Report:
    """A report with the same verdict for every graded function of the chapter, and no points."""
    tasks = [task for task in load(chapter).tasks if task.name not in ungraded]
    functions = tuple(
        Result(task.name, 0.0, float(task.points), verdict, message=message, unreadable=unreadable) for task in tasks
    )
    return Report(chapter, functions, isolation=isolation)
