"""Pools that run gradings: processes of this machine, or an existing Dask cluster.

A grading is a pure function of its `Job`, so it may run anywhere, and twice. Each grading thread has its own warm
sandboxed processes.
"""

import logging
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

from autograder.contract.task import load
from autograder.contract.verdict import NEEDS_HUMAN, REFUSED, Report, Result
from autograder.grading.inside.intake import DamagedError, IntakeError, parse_notebook
from autograder.grading.inside.launch import PR_SET_PDEATHSIG, Limits, prctl
from autograder.grading.nbgrader.course import CourseError
from autograder.grading.nbgrader.submissions import fingerprint

# Number of gradings handed to a cluster at once: those without a worker wait there.
CLUSTER_WIDTH = 512
CONNECT_SECONDS = 20

# Creates the executor, for one grading at a time or for many, with its maximum number in parallel.
NewPool = Callable[[bool], tuple[Executor, int]]


@dataclass(frozen=True)
class Job:
    """One grading.

    Attributes:
        chapter: The chapter's name.
        name: The notebook's file name, for messages.
        notebook: Its bytes.
        student: The student's name.
        secret: The course's secret.
        level: The sandbox's level; empty for the best of the machine it runs on.
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


def local_pool(workers: int) -> NewPool:
    """Processes of this machine, which end with this one."""

    def make(alone: bool) -> tuple[Executor, int]:
        width = 1 if alone else workers
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(width, spawn, start_worker, (os.getpid(),)), width

    return make


class _Kept(Executor):
    """Worker processes that stay for the next chapter; if one dies, the next grading starts them anew."""

    def __init__(self, make: Callable[[], Executor]):
        self._make = make
        self._inner: Executor | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._inner is not None:
            try:
                return self._inner.submit(fn, *args, **kwargs)
            except BrokenExecutor:
                self.close()
        self._inner = self._make()
        return self._inner.submit(fn, *args, **kwargs)

    def __exit__(self, *_: object) -> None:
        return None  # another chapter follows

    def close(self) -> None:
        if self._inner is not None:
            self._inner.shutdown(wait=True, cancel_futures=True)
            self._inner = None


@contextmanager
def shared_pool(workers: int) -> Iterator[NewPool]:
    """Processes of this machine that several chapters share, so that each starts and imports once."""
    make = local_pool(workers)
    kept = _Kept(lambda: make(False)[0])
    try:
        yield lambda alone: make(True) if alone else (kept, workers)
    finally:
        kept.close()


def cluster_gradings(address: str) -> int:
    """How many gradings the workers of a Dask cluster run at once; 0 if it has no worker yet.

    Raises:
        CourseError: No scheduler answers at the address, or Dask is not installed.
    """
    with _client(address) as client:
        return sum(client.nthreads().values())


@contextmanager
def dask_pool(address: str) -> Iterator[NewPool]:
    """The workers of a Dask cluster. If a worker dies, others redo its gradings.

    Raises:
        CourseError: No scheduler answers at the address, it went away meanwhile, or Dask is not installed.
    """
    with _client(address) as client:
        try:
            yield lambda alone: (client.get_executor(pure=False), 1 if alone else CLUSTER_WIDTH)
        except Exception as error:
            if client.status == "running":
                raise
            raise CourseError(
                f"the Dask scheduler at {address} has gone; every verdict so far is kept: start it again, and run "
                "the same command again"
            ) from error


def _client(address: str) -> Any:
    """A client of the scheduler at the address.

    Raises:
        CourseError: No scheduler answers there, or Dask is not installed.
    """
    try:
        from distributed import Client
    except ImportError:
        raise CourseError(
            "--scheduler needs Dask: pip install '.[cluster]' in the course's checkout, here and on the cluster"
        ) from None
    for name in ("distributed", "distributed.client", "tornado.application"):  # they raise anything that matters
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        return Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise CourseError(
            f"no Dask scheduler answers at {address} ({error}); give the address that it prints when it starts, "
            "such as tcp://HOST:8786"
        ) from error


_own = threading.local()


def start_worker(parent: int) -> None:
    """Set up a local worker: it leaves interrupts to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)
    Finalize(None, close_grader, exitpriority=10)


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
            f"{platform.node()} has another version of the course, of Python or of a package than the machine that "
            "the class is graded from; install the same on both",
        )
    try:
        notebook = parse_notebook(job.name, job.notebook)
        grader, begin = _warm_grader(job), time.monotonic()
        report = grader.grade_notebook(notebook, job.student)
        return Outcome(report, seconds=time.monotonic() - begin)
    except DamagedError as error:
        message = f"the upload is damaged: {error}. Ask for the file again, or give points by hand"
        return Outcome(verdict_for_all(job.chapter, NEEDS_HUMAN, message, job.level, job.ungraded))
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
    chapter: str, verdict: str, message: str, isolation: str = "", ungraded: tuple[str, ...] = ()
) -> Report:
    """A report with the same verdict for every function of the chapter that is graded, and no points."""
    tasks = [task for task in load(chapter).tasks if task.name not in ungraded]
    functions = tuple(Result(task.name, 0.0, float(task.points), verdict, message=message) for task in tasks)
    return Report(chapter, functions, isolation=isolation)
