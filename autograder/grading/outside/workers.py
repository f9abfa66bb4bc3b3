"""The processes used by grading: started when needed, ended after a fault, each request with a deadline."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from autograder.contract.verdict import LIMIT_EXCEEDED, NEEDS_HUMAN, REFUSED
from autograder.grading.inside import wire
from autograder.grading.inside.launch import STALL_S, Limits
from autograder.grading.outside.judge import Stopped
from autograder.grading.outside.sandbox import PLAIN, Mount, Sandbox
from course.curriculum import ROOT, contract_folder, earlier, home, is_own

TRACER = "autograder.grading.inside.tracer"
TRIES = 3
START_SECONDS = 180.0
# Limits of a worker; each request has its own. A naive program at its largest size takes 3 GiB of memory.
UNLIMITED = Limits(wall_s=None, cpu_s=None, address_space=8 << 30)
# Exit statuses of a process ended by the signal of an arithmetic fault: directly, or inside a sandbox.
_ARITHMETIC = (-signal.SIGFPE, 128 + signal.SIGFPE)
DIVISION = (
    "XLA cannot compile the program: it contains an integer division whose divisor is a constant zero, or the least "
    "integer of its type divided by -1, and no processor can compute these. Take the division out"
)
STALLED = (
    f"the program was run twice, each time computed nothing for {STALL_S:g} s, and was ended: it waits for something "
    "that never comes, such as a collective that not every device takes part in (limit on waiting)"
)


class Worker:
    """A process that serves requests; it is replaced after a fault.

    Args:
        start: Starts the process: an entered sandbox, or an equivalent object.
        greets: True if the process reports that it is ready before the first request.
        seconds: Time limit of a request.
        cpu_s: Processor time limit of a request, which the process itself enforces.
    """

    def __init__(self, start: Callable[[], Any], *, greets: bool, seconds: float, cpu_s: float | None = None):
        self.start, self.greets, self.seconds, self.cpu_s = start, greets, seconds, cpu_s
        self.process: Any = None
        self.greeted = False
        self._lock = threading.Lock()  # one request at a time

    def ask(self, header: dict[str, Any], blobs: list[bytes] | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Return the response to one request; other threads' requests wait in the meantime.

        Raises:
            Stopped: ``limit_exceeded`` after the deadline or when the processor time is used up; ``refused`` if the
                compiler divides by zero; ``needs_human`` if the process died on every try.
        """
        with self._lock:
            try:
                return self._ask(header, blobs)
            except Stopped:
                raise
            except BaseException:  # an interrupt: the next request must not read the answer to this one
                self.close()
                raise

    def _ask(self, header: dict[str, Any], blobs: list[bytes] | None) -> tuple[dict[str, Any], list[bytes]]:
        reason, left, stalls = "", self.seconds, 0  # the seconds are for all tries together
        for _ in range(TRIES):
            expired, begin = threading.Event(), time.monotonic()
            try:
                process = self.ready()
                begin = time.monotonic()
                with self._deadline(process, expired, left):
                    wire.write(process.stdin, {**header, "cpu_s": self.cpu_s}, blobs)
                    return wire.read(process.stdout)
            except (wire.WireError, OSError, ValueError) as error:  # ValueError: a pipe has been closed
                left = max(0.0, left - (time.monotonic() - begin))
                reason = f"{error}; {self._last_words()}"
                status = self._status()
                self.close()
                if status in _ARITHMETIC:
                    raise Stopped(REFUSED, DIVISION) from None
                # On a busy machine a right program stalled once in an hour of tests; one that deadlocks always does.
                stalls += status == wire.STALLED
                if stalls > 1:
                    raise Stopped(LIMIT_EXCEEDED, STALLED) from None
                if status == wire.CPU_USED_UP:
                    message = f"the program used more than {self.cpu_s} s of processor time and was ended"
                    raise Stopped(LIMIT_EXCEEDED, f"{message} (limit on processor time)", self.cpu_s or 0.0) from None
            if expired.is_set():
                message = f"the program took longer than {self.seconds:g} s and was ended (limit on wall time)"
                raise Stopped(LIMIT_EXCEEDED, message)
        raise Stopped(NEEDS_HUMAN, f"the process ended without an answer {TRIES} times: {reason}"[:2000])

    def ready(self) -> Any:
        """Return the process; start it if there is none."""
        self.start_early()
        assert self.process is not None
        if self.greets and not self.greeted:
            with self._deadline(self.process, threading.Event(), START_SECONDS):
                wire.read(self.process.stdout)
            self.greeted = True
        return self.process

    def start_early(self) -> None:
        """Start the process if there is none, without waiting until it is ready."""
        if self.process is None:
            self.process = self.start()

    def close(self) -> None:
        """End the process; the next request starts another."""
        process, self.process, self.greeted = self.process, None, False
        if process is not None:
            process.close()

    def _status(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(5) if self.process else None

    def _last_words(self) -> str:
        lines = self.process.stderr_tail.strip().splitlines() if self.process else []
        return lines[-1] if lines else "no output"

    @contextmanager
    def _deadline(self, process: Any, expired: threading.Event, seconds: float) -> Iterator[None]:
        def end() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # so that no caller sees a process that is being ended


def local_worker(module: str, *, greets: bool, seconds: float) -> Worker:
    """A worker without a sandbox, in a separate process on the learner's machine."""
    env = {"PYTHONPATH": str(ROOT), "MESHCRAFT_LEVEL": "unsafe-local"}
    start = lambda: Sandbox(module, level=PLAIN, limits=UNLIMITED, env=env).__enter__()  # noqa: E731
    return Worker(start, greets=greets, seconds=seconds)


def local_executor() -> Worker:
    """An executor in a separate process on the learner's machine."""
    return local_worker("autograder.grading.inside.executor", greets=True, seconds=120)


def local_tracer(chapter: str, seconds: float = 300) -> Worker:
    """A tracer in a separate process on the learner's machine, which can import what official grading can."""
    return sandboxed(TRACER, chapter, "unsafe-local", greets=False, seconds=seconds)


def sandboxed(
    module: str, chapter: str, level: str, *, greets: bool, seconds: float, cpu_s: float | None = None
) -> Worker:
    """A worker of official grading: it can import what ``mounted`` lists and nothing else."""
    mounts = [Mount(path, str(path.relative_to(ROOT))) for path in mounted(chapter)]
    mounts += [Mount(path, str(path.relative_to(home(chapter)))) for path in own_mounted(chapter)]
    env = {"MESHCRAFT_CONFINE": "1"}
    start = lambda: Sandbox(module, level=level, mounts=mounts, limits=UNLIMITED, env=env).__enter__()  # noqa: E731
    return Worker(start, greets=greets, seconds=seconds, cpu_s=cpu_s)


def mounted(chapter: str) -> list[Path]:
    """The course's files that the sandbox mounts. None of them holds an oracle, an expected value or an answer."""
    chapters = (*(entry.name for entry in earlier(chapter)), chapter)
    files = [
        *(f"autograder/{name}" for name in _INSIDE),
        "solutions/__init__.py",
        *(f"solutions/{entry.name}.py" for entry in earlier(chapter)),
    ]
    course_chapters = (name for name in chapters if not is_own(name))
    wraps = [path for name in course_chapters for path in contract_folder(name).glob("wrapping*")]
    answers = (*_ANSWERS, *(name for name, given in _GIVEN_FROM.items() if given not in chapters))
    return [*_without(ROOT / "course", answers), *(ROOT / file for file in files), *wraps]


def own_mounted(chapter: str) -> list[Path]:
    """The files of a course's own chapter that the sandbox mounts: its wrapping, and the names of its functions."""
    folder = contract_folder(chapter)
    return [*folder.glob("wrapping*"), folder / "chapter.toml"] if is_own(chapter) else []


def _without(folder: Path, answers: tuple[str, ...]) -> list[Path]:
    """The parts of a folder that hold none of these answers: whole folders if nothing in them does."""
    paths = []
    for path in folder.iterdir():
        name = path.relative_to(ROOT / "course").as_posix()
        if any(answer.startswith(f"{name}/") for answer in answers):
            paths += _without(path, answers)
        elif name not in answers and path.name != "__pycache__":
            paths.append(path)
    return paths


_INSIDE = ("__init__.py", "contract", "chapters/__init__.py", "grading/__init__.py", "grading/inside")
# Parts of the course that hold an answer to an exercise, or rows that an exercise is compared with.
_ANSWERS = (
    "validation",
    "training",
    "puzzles.py",
    "planning/search.py",
    *(f"schedules/{name}.py" for name in ("alternating", "filled", "looped")),
)
# Answers to an earlier exercise, mounted from the chapter named here on.
_GIVEN_FROM = {"attention.py": "context_parallel"}
