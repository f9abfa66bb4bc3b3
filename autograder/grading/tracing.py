"""From a learner's code to Programs: used by the notebook's check, the command and the sandboxed tracer alike."""

from __future__ import annotations

import ast
import errno
import inspect
import os
import re
import signal
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from autograder.grading.intake import Cell
from autograder.wrapping import Case, Mismatch, Traceable, trace
from course.program import Locate, Program, ProgramError

PREFIX = "meshcraft-cell:"
_DEFINES = {"defvjp", "defjvp", "defjvps"}
_MAKERS = {"partial", "custom_vjp", "custom_jvp", "checkpoint", "remat", "jit", "vmap", "grad", "value_and_grad",
           "shard_map", "linear_transpose", "NamedTuple", "namedtuple", "TypeVar"}  # fmt: skip
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_CONSTANT = (ast.Constant, ast.Name, ast.Attribute, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp,
             ast.Subscript, ast.expr_context, ast.operator, ast.unaryop)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Why there is no Program: whose fault it is, what happened, and at which of the learner's lines.

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
    """The Programs of one function by case name, and the line that defines it."""

    programs: dict[str, Program]
    line: str


class TooLong(BaseException):
    """The learner's Python ran longer than it may; the message says how long that is."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise ``TooLong`` in the learner's Python after ``seconds``, where signals can: in the main thread of Unix."""
    usable = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")

    def stop(*_: Any) -> None:
        raise TooLong(f"{seconds} s")

    before = signal.signal(signal.SIGALRM, stop) if usable else None
    if usable:
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        if usable:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def run_cells(cells: list[Cell] | tuple[Cell, ...]) -> tuple[dict[str, Any], list[Problem]]:
    """A namespace with the notebook's imports, functions, classes and constants; everything else is left out.

    A function may also be assigned, as a lambda or by ``partial`` or a transformation, and get its derivative.

    Returns:
        The namespace, and what went wrong on the way: a statement that fails does not stop those after it, so that
        a plotting library that is missing here matters only to those who use it.
    """
    module = types.ModuleType("__main__")
    problems = []
    for cell in cells:
        try:
            kept = [node for node in _parse(cell.source).body if _is_kept(node)]
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            said = getattr(error, "msg", "") or str(error) or "the cell cannot be parsed"
            line = f"{cell.id}:{getattr(error, 'lineno', None) or 1}"
            problems.append(Problem("student_error", f"{type(error).__name__}: {said}", line))
            continue
        for node in kept:
            try:
                exec(compile(ast.Module([node], []), PREFIX + cell.id, "exec"), module.__dict__)
            except (Exception, SystemExit, TooLong) as error:
                problems.append(describe_error(error, locate_cell))
    return module.__dict__, problems


def locate_cell(file: str) -> str | None:
    """A cell's name from the file name it was compiled under."""
    return file.removeprefix(PREFIX) if file.startswith(PREFIX) else None


def _parse(source: str) -> ast.Module:
    if re.match(r"\s*%%", source):
        return ast.Module([], [])
    try:
        return ast.parse(source)
    except SyntaxError:
        plain = [("" if re.match(r"\s*[%!?]|.*\?\s*$", line) else line) for line in source.split("\n")]
        return ast.parse("\n".join(plain))


def _is_kept(node: ast.stmt) -> bool:
    if isinstance(node, _KEPT):
        return True
    if isinstance(node, ast.Expr):  # ``gathered.defvjp(forward, backward)`` belongs to a definition
        return isinstance(node.value, ast.Call) and _last_name(node.value.func) in _DEFINES
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        return _makes_function(node.value) or all(isinstance(part, _CONSTANT) for part in ast.walk(node.value))
    return False


def _makes_function(value: ast.expr) -> bool:
    """Whether an assigned value is a function: a lambda, or one made from another by one of JAX's transformations."""
    if isinstance(value, ast.Lambda):
        return True
    return isinstance(value, ast.Call) and _last_name(value.func) in _MAKERS


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def find_function(task: Traceable, namespace: dict[str, Any], problems: list[Problem]) -> Callable[..., Any] | Problem:
    """The task's function, or why there is none."""
    function = namespace.get(task.name)
    if callable(function):
        return function
    if problems:
        return problems[0]
    if function is not None:
        return Problem("student_error", f"{task.name} is a {type(function).__name__}, expected a function")
    return Problem(
        "student_error",
        f"the notebook has no function {task.name}{task.signature}. Only imports, definitions and assignments of "
        "constants and functions are run; was the function renamed, or is it made by a statement of another kind?",
    )


def explained(found: Problem, problems: list[Problem]) -> Problem:
    """The same problem; a name that is missing because something earlier failed, or was left out, says so."""
    if not found.message.startswith("NameError: name "):
        return found
    why = "of the notebook, only imports, definitions and assignments of constants and functions are run"
    if problems:
        why = f"before it, {problems[0].line or 'a cell'} failed with {problems[0].message}"
    return replace(found, message=f"{found.message} ({why})")


def trace_cases(
    task: Traceable,
    function: Callable[..., Any],
    cases: list[Case],
    locate: Locate,
    progress: Callable[[str], None] | None = None,
) -> Traced | Problem:
    """The function's Program on every case, or the first thing that went wrong."""
    line = definition_line(function, locate)
    programs = {}
    try:
        _check_signature(task, function)
        for case in cases:
            programs[case.name] = trace(task, function, case, locate)
            if progress:
                progress(case.name)
    except TooLong as error:
        found = describe_error(error, locate)
        return Problem(
            "limit_exceeded", f"{task.name} took longer than {error} to trace; does a loop ever end?", found.line
        )
    except Mismatch as error:
        return Problem("fail", str(error), line)
    except ProgramError as error:
        return Problem("refused", str(error), line)
    except NotImplementedError as error:
        found = describe_error(error, locate)
        return Problem(
            "student_error", f"{task.name} is not written yet: it raises NotImplementedError", found.line or line
        )
    except (Exception, SystemExit) as error:
        found = describe_error(error, locate)
        return found if found.line else Problem(found.verdict, found.message, line)
    return Traced(programs, line)


def _check_signature(task: Traceable, function: Callable[..., Any]) -> None:
    expected = [name.strip() for name in task.signature.strip("()").split(",")]
    try:
        found = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return
    if found != expected:
        raise Mismatch(
            f"{task.name} takes ({', '.join(found)}), expected {task.signature}: "
            "give the function the stub's first line back"
        )


def definition_line(function: Any, locate: Locate) -> str:
    """``cell:line`` of the function's first line, empty where that is not the learner's."""
    code = getattr(inspect.unwrap(function), "__code__", None)
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
    said = f"{type(error).__name__}: {text}"[:2000].rstrip(": ")
    limit = limit_of(error, text)
    if limit:
        return Problem("limit_exceeded", f"it reached the limit on {limit}: {said}", line)
    return Problem("student_error", said, line)


def limit_of(error: BaseException, text: str) -> str:
    """Which limit of a process an exception is about; empty if about none."""
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
