"""``check``: judge one function here and now. The notebook, the command and the tests all call this."""

from __future__ import annotations

import atexit
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from autograder.contract import Task, load
from autograder.grading.intake import read_notebook
from autograder.grading.judge import Stopped, judge, plan, stopped
from autograder.grading.tracing import (
    Problem,
    explained,
    find_function,
    locate_cell,
    run_cells,
    time_limit,
    trace_cases,
)
from autograder.grading.workers import Worker, local_executor
from autograder.verdict import Report, Result
from course.curriculum import CHAPTERS
from course.program import Locate

Progress = Callable[[str], None]
TRACE_SECONDS = 60


class Outcome:
    """What ``check`` returns: a table in a notebook, text elsewhere.

    Its plain text in a notebook is the points alone, which is how nbgrader reads partial credit.
    """

    def __init__(self, report: Report):
        self.report = report

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from autograder.show import facts_html

        return {"text/plain": repr(float(self.report.points)), "text/html": facts_html(self.report)}

    def __repr__(self) -> str:
        from rich.console import Console

        from autograder.show import facts_table

        console = Console(width=100)
        with console.capture() as capture:
            console.print(facts_table(self.report))
        return capture.get().rstrip()


def check(function: Callable[..., Any], *, full: bool = False) -> Outcome:
    """Judge a function as it stands in this kernel.

    Args:
        function: One of a chapter's functions; its name says which.
        full: All meshes, as official grading does, instead of two.
    """
    name = getattr(function, "__name__", "")
    chapter, task = _find(name)
    result = check_function(chapter, task, function, _locate_live(function), full=full)
    return Outcome(Report(chapter, (result,), notes=_unsaved(function, name)))


def check_function(
    chapter: str,
    task: Task,
    function: Callable[..., Any],
    locate: Locate,
    *,
    full: bool,
    progress: Progress | None = None,
) -> Result:
    """Judge a function: trace it here, run its Programs in the executor process."""
    planned = plan(chapter, task, full=full)
    with time_limit(TRACE_SECONDS):
        traced = trace_cases(task, function, planned.traced, locate)
    if isinstance(traced, Problem):
        return stopped(task, traced)
    programs = {name: program.serialise() for name, program in traced.programs.items()}
    try:
        return judge(planned, programs, traced.line, executor().ask, progress)
    except Stopped as error:
        return stopped(task, Problem(error.verdict, str(error), traced.line))


def check_notebook(
    path: Path,
    chapter: str,
    functions: list[str] | None = None,
    *,
    full: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Judge a notebook as it stands on disk.

    Raises:
        IntakeError: It cannot be read.
        LookupError: The chapter has no such function.
    """
    tasks = _tasks(chapter, functions)
    executor().start_early()
    cells = read_notebook(path).cells
    with time_limit(TRACE_SECONDS):
        namespace, problems = run_cells(cells)
    results = []
    for task in tasks:
        function = find_function(task, namespace, problems)
        if isinstance(function, Problem):
            results.append(stopped(task, function))
            continue
        result = check_function(chapter, task, function, locate_cell, full=full, progress=progress)
        message = explained(Problem(result.verdict, result.message, result.line), problems).message
        results.append(replace(result, message=message))
    return Report(chapter, tuple(results))


def check_solution(
    chapter: str, functions: list[str] | None = None, *, full: bool = False, progress: Progress | None = None
) -> Report:
    """Judge the course's own solution.

    Raises:
        LookupError: There is no such chapter or function.
    """
    import importlib

    tasks = _tasks(chapter, functions)
    executor().start_early()
    module = importlib.import_module(f"solutions.{chapter}")
    results = []
    for task in tasks:
        function = getattr(module, task.name)
        locate = _locate_file(function)
        results.append(check_function(chapter, task, function, locate, full=full, progress=progress))
    return Report(chapter, tuple(results))


def functions_of(path: Path | None, chapter: str) -> Callable[[Task], tuple[Any, Locate]]:
    """Finds a task's function, or the problem with it, in a notebook or in the course's own solution, and its lines."""
    import importlib

    if path is None:
        module = importlib.import_module(f"solutions.{chapter}")
        return lambda task: (getattr(module, task.name), _locate_file(getattr(module, task.name)))
    with time_limit(TRACE_SECONDS):
        namespace, problems = run_cells(read_notebook(path).cells)
    return lambda task: (find_function(task, namespace, problems), locate_cell)


@cache
def executor() -> Worker:
    """The one executor process of this kernel or command; it ends with it."""
    worker = local_executor()
    atexit.register(worker.close)
    return worker


def _tasks(chapter: str, functions: list[str] | None) -> list[Task]:
    contract = load(chapter)
    return [contract.task(name) for name in functions] if functions else list(contract.tasks)


def _find(name: str) -> tuple[str, Task]:
    """The chapter and task that a function's name belongs to."""
    every = {task.name: (entry.name, task) for entry in CHAPTERS for task in load(entry.name).tasks}
    if name not in every:
        raise LookupError(f"no chapter has a function called {name!r}; check knows: {', '.join(every)}")
    return every[name]


def _locate_file(function: Callable[..., Any]) -> Locate:
    """Locations in the file that defines the function, named by it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = code.co_filename if code else ""
    return lambda file: Path(file).name if file == own else None


def _locate_live(function: Callable[..., Any]) -> Locate:
    """Locations in a notebook's cells: by the graded function that a cell defines, else by its number."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return _locate_file(function)
    shell = get_ipython()
    if shell is None:
        return _locate_file(function)
    known = {}
    for name in (task.name for entry in CHAPTERS for task in load(entry.name).tasks):
        code = getattr(inspect.unwrap(shell.user_ns.get(name, None) or _find), "__code__", None)
        if code is not None and code is not _find.__code__:
            known[code.co_filename] = name
    numbers = getattr(shell.compile, "_filename_map", {})
    own = _locate_file(function)

    def locate(file: str) -> str | None:
        if file in known:
            return known[file]
        return f"In[{numbers[file]}]" if file in numbers else own(file)

    return locate


def _unsaved(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """A note where the notebook on disk says something else than the kernel runs."""
    path = Path(os.environ.get("JPY_SESSION_NAME", ""))
    if path.suffix != ".ipynb" or not path.exists():
        return ()
    try:
        on_disk = [cell.source for cell in read_notebook(path).cells if cell.id == name]
        live = inspect.getsource(function).strip()
    except (OSError, TypeError, json.JSONDecodeError):
        return ()
    if on_disk and live not in on_disk[0]:
        return (f"The notebook on disk has another {name} than this kernel. Save it: grading reads the file.",)
    return ()
