"""Trace a learner's code to Programs: used by the notebook's check, the command and the sandboxed tracer."""

import ast
import errno
import inspect
import math
import os
import re
import signal
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import FrameType
from typing import Any

from autograder.contract.case import UNSEEN, Case
from autograder.contract.wrapping import Call, Mismatch, Traceable, trace
from autograder.grading.inside.wording import worded
from course.program import Locate, Program, ProgramError


@dataclass(frozen=True)
class Problem:
    """The reason why there is no Program: who is at fault, what happened, and at which of the learner's lines.

    ``verdict`` is ``student_error`` for an exception in the learner's code, ``limit_exceeded`` for an exhausted
    resource, ``fail`` for a result whose structure differs from the contract's, ``refused`` for a program that
    may not be judged. ``original`` is the message of Python or JAX, if ``message`` rephrases it; ``runs``
    describes a case in which the function runs, if there is one. ``unwritten`` is True for the released stub, and
    ``undefined`` is the unbound name, if that is the problem.
    """

    verdict: str
    message: str
    line: str = ""
    original: str = ""
    runs: str = ""
    unwritten: bool = False
    undefined: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Traced:
    """The Programs of one function by case name, its defining line, and the names it uses if requested."""

    programs: dict[str, Program]
    line: str
    uses: dict[str, str] = field(default_factory=dict)

    def serialised(self) -> dict[str, bytes]:
        """The Programs as files, by case name."""
        return {name: program.serialise() for name, program in self.programs.items()}


class TooLong(KeyboardInterrupt):
    """The learner's Python exceeded its time limit; the message gives the limit and suggests a cause.

    It is a KeyboardInterrupt because an event loop propagates that wherever it occurs; any other exception between two
    steps would only be logged.
    """


# The question to ask about a function that is being traced.
UNROLLED = "does a loop ever end? A Python loop over tokens or rows puts each of its iterations into the program"


@contextmanager
def time_limit(seconds: float, *, processor: bool = False, asks: str = "does a loop ever end?") -> Iterator[None]:
    """Raise ``TooLong`` in the learner's Python after ``seconds``, if signals allow: in the main thread on Unix.

    Args:
        seconds: The limit, in wall time.
        processor: Limit this process's processor time instead.
        asks: The question that suggests a cause, if processor time is limited.
    """
    usable = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not usable:
        yield
        return
    timer, number = (signal.ITIMER_PROF, signal.SIGPROF) if processor else (signal.ITIMER_REAL, signal.SIGALRM)

    begin = time.process_time()

    def stop(*_: Any) -> None:
        if processor:
            raise TooLong(f"{round(seconds, 1):g} s of processor time; {asks}")
        computed = time.process_time() - begin
        raise TooLong(
            f"{round(seconds, 1):g} s, in which it computed for {computed:.0f} s; does it wait for something, or is "
            "the machine busy with other work?"
        )

    before = signal.signal(number, stop)
    # Repeatedly: Python drops an exception that is raised while it calls a finaliser.
    signal.setitimer(timer, seconds, max(seconds / 10, 1))
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
    on_program: Callable[[Case, Program], None] = lambda case, program: None,
    platform: str = "cpu",
) -> Traced | Problem:
    """Trace the function for every case; return the Programs or the first problem. ``on_program`` gets each at once."""
    line, programs, case = "", {}, None
    try:
        line = definition_line(function, locate)
        _check_signature(task, function)
        for case in cases:
            programs[case.name] = trace(task, function, case, locate, platform)
            on_program(case, programs[case.name])
    except TooLong as error:
        message = f"{task.name} took longer to trace than {error}"
        return Problem("limit_exceeded", message, describe_error(error, locate).line)
    except Mismatch as error:
        if error.function:
            function_line = definition_line(error.function, locate)
            return Problem("fail", str(error), _return_line(error.function, function_line) or function_line)
        return Problem("fail", str(error), line if case is None else _return_line(function, line))
    except ProgramError as error:
        return refused(error)
    except (Exception, SystemExit) as error:
        try:
            return _raised(error, task, function, case, cases, locate, line)
        except Exception:  # a class of the learner's own may raise whatever it is asked
            return Problem("student_error", f"{task.name} raised an exception that cannot be described", line)
    return Traced(programs, line)


def _raised(
    error: BaseException,
    task: Traceable,
    function: Callable[..., Any],
    case: Case | None,
    cases: Sequence[Case],
    locate: Locate,
    line: str,
) -> Problem:
    """Describe an exception of the learner's code, which was traced for the cases before ``case``."""
    result = describe_error(error, locate, list(case.mesh) if case else [])
    called = _called(task, function, result)
    runs = cases[0].place if case and case is not cases[0] else ""
    where = f" ({case.place}; {runs} it runs)" if case and runs else ""
    if isinstance(error, NotImplementedError) and not str(error):  # JAX names what it has not implemented
        subject = f"{called}, which {task.name} calls, is" if called else f"{task.name} is"
        is_stub = _is_stub(unwrapped(function).__globals__[called] if called else function)
        state = "not written yet" if is_stub else "not complete"
        message = f"{subject} {state}: it raises NotImplementedError{where}"
        return Problem("student_error", message, result.line or line, unwritten=is_stub and not called)
    before = f"in {called}, which {task.name} calls{_call(error, task, locate)}: " if called else ""
    secret = case is None or case.name == UNSEEN
    calls = [note for note in getattr(error, "__notes__", ()) if isinstance(note, Call) and not secret]
    where += f" (in the call {textwrap.shorten(calls[0], _LONGEST_CALL, placeholder=' …')})" if calls else ""
    return replace(result, message=f"{before}{result.message}{where}", runs=runs)


def _called(task: Traceable, function: Callable[..., Any], problem: Problem) -> str:
    """The name of the learner's other function in which the problem occurred, if its cell has that name."""
    name, namespace = problem.line.rpartition(":")[0], getattr(unwrapped(function), "__globals__", {})
    return name if name != task.name and callable(namespace.get(name)) else ""


def _call(error: BaseException, task: Traceable, locate: Locate) -> str:
    """The last line of the function's own cell in an error's traceback, as source text."""
    own = [at for at in traceback.extract_tb(error.__traceback__) if locate(at.filename) == task.name and at.line]
    return f" in `{own[-1].line}`" if own else ""


def _return_line(function: Callable[..., Any], line: str) -> str:
    """The line of a function's only ``return``; empty if it has none or several."""
    waiting, lines = _statements(function), []
    while waiting:
        node = waiting.pop()
        lines += [node.lineno] if isinstance(node, ast.Return) else []
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    label, _, first = line.rpartition(":")
    return f"{label}:{int(first) + lines[0] - 1}" if label and len(lines) == 1 else ""


def _is_stub(function: Callable[..., Any]) -> bool:
    """Return True if a function that raised ``NotImplementedError`` does nothing else, or has no source to read."""
    return all(isinstance(node, ast.Raise | ast.Expr) for node in _statements(function))


def _statements(function: Callable[..., Any]) -> list[ast.AST]:
    """The statements of a function's body; none if its source cannot be read."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(unwrapped(function)))).body
        return [*getattr(definition, "body", [])]
    except (OSError, TypeError, SyntaxError, ValueError):
        return []


def refused(error: ProgramError) -> Problem:
    """The problem that reports a refusal, at the line to blame."""
    return Problem("refused", error.message[:2000], error.line)


def _check_signature(task: Traceable, function: Callable[..., Any]) -> None:
    expected = [name.strip() for name in task.signature.strip("()").split(",")]
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return
    if names != expected:
        raise Mismatch(
            f"{task.name} takes ({', '.join(names)}), expected {task.signature}: restore the stub's first line"
        )


def definition_line(function: Any, locate: Locate) -> str:
    """``cell:line`` of the function's first line, empty if it is not in the learner's code."""
    code = getattr(unwrapped(function), "__code__", None)
    label = locate(code.co_filename) if code else None
    return f"{label}:{code.co_firstlineno}" if code and label else ""


def unwrapped(function: Any) -> Any:
    """The function that decorators wrap; itself if that cannot be told, such as for one that wraps itself."""
    try:
        return inspect.unwrap(function)
    except Exception:
        return function


def describe_error(error: BaseException, locate: Locate, axes: Sequence[str] = ()) -> Problem:
    """Describe an exception for the learner: in plain words, at their own innermost line.

    Args:
        error: The exception.
        locate: Names the learner's files.
        axes: The mesh's axes, if there is one.
    """
    try:
        return _described(error, locate, axes)
    except Exception:  # a class of the learner's own may raise whatever it is asked
        return Problem("student_error", "an exception that cannot be described")


def _described(error: BaseException, locate: Locate, axes: Sequence[str]) -> Problem:
    line, own, frame = "", None, error.__traceback__
    frames = []
    while frame is not None:
        frames.append(frame.tb_frame)
        label = locate(frame.tb_frame.f_code.co_filename)
        if label is not None:
            line, own = f"{label}:{frame.tb_lineno}", len(frames)
        frame = frame.tb_next
    line = line if own else _line_of_operation(frames, locate)
    try:
        text = str(error).strip()
    except Exception:
        text = "(its message cannot be shown)"
    original = f"{type(error).__name__}: {text.split(_INTERNAL)[0]}".rstrip(": ")[:_LONGEST]
    limit = limit_of(error, text)
    if limit:
        return Problem("limit_exceeded", f"it reached the limit on {limit}: {original[:2000]}", line)
    if len(frames) > (own or 0):
        original = _named_by_jax(original, frames[own or 0 :], axes)
    message = worded(error, original)[:2000]
    line = line or next(iter(_lines_in(original, locate)), "")
    undefined = error.name if type(error) is NameError and isinstance(error.name, str) else ""
    return Problem("student_error", message, line, "" if message == original else original[:8000], undefined=undefined)


# Limit on the length of a message that is examined; a learner's own exception may contain megabytes.
_LONGEST, _LONGEST_CALL = 20_000, 200
_INTERNAL = "\n--------------------\nFor simplicity, JAX"


def _line_of_operation(frames: list[FrameType], locate: Locate) -> str:
    """The line of the operation that JAX was processing, if none of the learner's frames is left."""
    for frame in reversed(frames):
        source_traceback = getattr(getattr(frame.f_locals.get("eqn"), "source_info", None), "traceback", None)
        for source_frame in getattr(source_traceback, "frames", ()):
            label = locate(source_frame.file_name)
            if label is not None:
                return f"{label}:{source_frame.line_num}"
    return ""


def _lines_in(text: str, locate: Locate) -> Iterator[str]:
    """The learner's lines named in MLIR's text of an error."""
    for file, number in re.findall(r'"([^"]+)":(\d+)', text):
        if (label := locate(file)) is not None:
            yield f"{label}:{number}"


def _named_by_jax(original: str, inner: list[FrameType], axes: Sequence[str]) -> str:
    """Reword, in JAX's usual terms, JAX errors that lack a message: a missing axis, a pair out of range."""
    for frame in inner if "destinations must be unique" in original else ():  # JAX first takes them modulo the size
        pairs, size = frame.f_locals.get("perm") or (), frame.f_locals.get("group_size") or math.inf
        if beyond := [device for pair in pairs for device in pair if device >= size]:
            return f"IndexError: no_such_device: {max(beyond)} of {size}"
    for frame in (
        inner if axes and original in ("AssertionError", "KeyError", "IndexError: list index out of range") else ()
    ):
        names = [frame.f_locals.get(name) for name in ("axis_name", "axes", "axis_names")]
        flat = [
            name
            for value in names
            for name in (value if isinstance(value, tuple) else (value,))
            if isinstance(name, str)
        ]
        if nested := [
            value for value in names if isinstance(value, tuple) and any(isinstance(n, tuple) for n in value)
        ]:
            return f"TypeError: nested_axes: {nested[0]}"
        if missing := [name for name in flat if name not in axes]:
            return f"NameError: Found an unbound axis name: {missing[0]}"
        if pairs := frame.f_locals.get("perm"):
            return f"IndexError: no_such_device: {list(pairs)[-1]}"
    return original


def limit_of(error: BaseException, text: str) -> str:
    """The process limit that an exception reports; empty if none."""
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
