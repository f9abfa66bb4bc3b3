"""Pools that run gradings: processes on this machine, or an existing Dask cluster.

A grading is a pure function of its job, so it can run anywhere, and twice.
"""

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

from autograder.grading.inside.launch import PR_SET_PDEATHSIG, prctl
from autograder.grading.nbgrader.course import CourseError
from autograder.grading.nbgrader.jobs import close_grader

# Number of gradings handed to a cluster at once: those without a worker wait there.
CLUSTER_WIDTH = 512
CONNECT_SECONDS = 20

# Creates the executor, for one grading at a time or for many, with its maximum number in parallel.
NewPool = Callable[[bool], tuple[Executor, int]]


def local_pool(workers: int) -> NewPool:
    """Processes on this machine, which end with this process."""

    def make(alone: bool) -> tuple[Executor, int]:
        width = 1 if alone else workers
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(width, spawn, start_worker, (os.getpid(),)), width

    return make


class _PersistentPool(Executor):
    """Worker processes that stay for the next chapter; if one dies, the next grading restarts them."""

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
    """Processes on this machine that several chapters share, so that each starts and imports only once."""
    make = local_pool(workers)
    pool = _PersistentPool(lambda: make(False)[0])
    try:
        yield lambda alone: make(True) if alone else (pool, workers)
    finally:
        pool.close()


def cluster_gradings(address: str) -> int:
    """The number of gradings that the workers of a Dask cluster run at once; 0 if it has no worker yet.

    Raises:
        CourseError: No scheduler answers at the address, or Dask is not installed.
    """
    with _client(address) as client:
        return sum(client.nthreads().values())


@contextmanager
def dask_pool(address: str) -> Iterator[NewPool]:
    """The workers of a Dask cluster. If a worker dies, others redo its gradings.

    Raises:
        CourseError: No scheduler answers at the address, it has gone away since, or Dask is not installed.
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


def start_worker(parent: int) -> None:
    """Set up a local worker: it leaves interrupts to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)
    Finalize(None, close_grader, exitpriority=10)
