"""From a learner's code to Programs: used by the notebook's check, the command and the sandboxed tracer alike."""

import errno
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autograder.contract.case import Case
from autograder.contract.wrapping import Mismatch, Traceable, trace
from course.program import Locate, Program, ProgramError


@dataclass(frozen=True)
class Problem:
    """The reason why there is no Program: whose fault it is, what happened, and at which of the learner's lines.

    ``verdict`` is ``student_error`` for an exception of the learner's, ``limit_exceeded`` for one that says that
    something ran out, ``fail`` for a result of another form than the contract says, ``refused`` for a program that
    may not be judged.
    """

    verdict: str
    message: str
    line: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Traced:
    """The Programs of one function by case name, the line that defines it, and what it uses, where that was asked."""

    programs: dict[str, Program]
    line: str
    uses: dict[str, str] = field(default_factory=dict)


class TooLong(KeyboardInterrupt):
    """The learner's Python ran longer than it may; the message says how long that is, and asks why.

    An event loop lets an interrupt through wherever it comes, and would log any other exception between two steps.
    """


@contextmanager
def time_limit(seconds: float, *, processor: bool = False) -> Iterator[None]:
    """Raise ``TooLong`` in the learner's Python after ``seconds``, where signals can: in the main thread of Unix.

    Args:
        seconds: Of wall time.
        processor: Of this process's processor time instead.
    """
    usable = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not usable:
        yield
        return
    timer, number = (signal.ITIMER_PROF, signal.SIGPROF) if processor else (signal.ITIMER_REAL, signal.SIGALRM)

    begin = time.process_time()

    def stop(*_: Any) -> None:
        if processor:
            raise TooLong(f"{seconds:g} s of processor time; does a loop ever end?")
        computed = time.process_time() - begin
        raise TooLong(f"{seconds:g} s, in which it computed for {computed:.0f} s; does it wait for something?")

    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)


def trace_cases(
    task: Traceable,
    function: Callable[..., Any],
    cases: list[Case],
    locate: Locate,
    progress: Callable[[str], None] | None = None,
    platform: str = "cpu",
) -> Traced | Problem:
    """The function's Program on every case, or the first thing that went wrong."""
    line, programs = "", {}
    try:
        line = definition_line(function, locate)
        _check_signature(task, function)
        for case in cases:
            programs[case.name] = trace(task, function, case, locate, platform)
            if progress:
                progress(case.name)
    except TooLong as error:
        message = f"{task.name} took longer to trace than {error}"
        return Problem("limit_exceeded", message, describe_error(error, locate).line)
    except Mismatch as error:
        return Problem("fail", str(error), line)
    except ProgramError as error:
        return Problem("refused", str(error), line)
    except NotImplementedError as error:
        message = f"{task.name} is not written yet: it raises NotImplementedError"
        return Problem("student_error", message, describe_error(error, locate).line or line)
    except (Exception, SystemExit) as error:
        result = describe_error(error, locate)
        return replace(result, line=result.line or line)
    return Traced(programs, line)


def _check_signature(task: Traceable, function: Callable[..., Any]) -> None:
    expected = [name.strip() for name in task.signature.strip("()").split(",")]
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return
    if names != expected:
        raise Mismatch(
            f"{task.name} takes ({', '.join(names)}), expected {task.signature}: "
            "give the function the stub's first line back"
        )


def definition_line(function: Any, locate: Locate) -> str:
    """``cell:line`` of the function's first line, empty where that is not the learner's."""
    try:
        code = getattr(inspect.unwrap(function), "__code__", None)
    except ValueError:  # it wraps itself
        code = None
    label = locate(code.co_filename) if code else None
    return f"{label}:{code.co_firstlineno}" if code and label else ""


def describe_error(error: BaseException, locate: Locate) -> Problem:
    """An exception as the learner should see it: its type, its first lines, and their own innermost line."""
    line, frame = "", error.__traceback__
    while frame is not None:
        label = locate(frame.tb_frame.f_code.co_filename)
        if label is not None:
            line = f"{label}:{frame.tb_lineno}"
        frame = frame.tb_next
    try:
        text = str(error).strip()
    except Exception:
        text = "(its message cannot be shown)"
    text = text.split("\n--------------------\nFor simplicity, JAX")[0]
    message = f"{type(error).__name__}: {text}"[:2000].rstrip(": ")
    limit = limit_of(error, text)
    if limit:
        return Problem("limit_exceeded", f"it reached the limit on {limit}: {message}", line)
    return Problem("student_error", message, line)


def limit_of(error: BaseException, text: str) -> str:
    """The limit of a process that an exception is about; empty if none."""
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "std::bad_alloc" in text:
        return "address space"
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return "processes and threads"
    if not isinstance(error, OSError):
        return ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "scratch space" if os.statvfs(os.environ.get("TMPDIR", "/tmp")).f_favail else "files (inodes)"
    named = {errno.EMFILE: "open files", errno.EFBIG: "file size", errno.ENOMEM: "address space"}
    return named.get(error.errno or 0, "")
