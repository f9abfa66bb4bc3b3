"""``check``: judge one function here and now. The notebook, the command and the tests all call this."""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from autograder.contract.task import Case, Task, load
from autograder.contract.verdict import Fact, Report, Result, conclude
from autograder.grading.inside.cells import locate_cell
from autograder.grading.inside.intake import Notebook, read_notebook
from autograder.grading.inside.launch import Limits
from autograder.grading.inside.tracing import Problem, Traced, time_limit, trace_cases
from autograder.grading.inside.uses import uses
from autograder.grading.outside.judge import Plan, Stopped, judge, plan, stopped
from autograder.grading.outside.pipeline import trace_request, traced_by
from autograder.grading.outside.released import stated
from autograder.grading.outside.saved import notebook_here, notes
from autograder.grading.outside.workers import Worker, local_executor, local_tracer
from course.curriculum import CHAPTERS
from course.program import Locate, Program, ProgramError

Progress = Callable[[str], None]
TRACE_SECONDS = 60
# The tracer of a learner's own machine: what would harm others is not limited.
LOCAL = Limits(wall_s=180.0, cpu_s=TRACE_SECONDS, address_space=1 << 40, open_files=1024)


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


def check(function: Callable[..., Any], *, full: bool = False, variant: str | None = None) -> Outcome:
    """Judge a function as it stands in this kernel.

    Args:
        function: One of a chapter's functions; its name says which.
        full: All meshes, as official grading does, instead of two.
        variant: What this course asks for; as the notebook on disk says, if not given.
    """
    name = _name_of(function, sys._getframe(1).f_globals)
    chapter, task = find_task(name)
    executor().start_early()
    read = notebook_here()
    asked = (stated(read.cells).get(name, "") if read else "") if variant is None else variant
    planned = plan(chapter, task, full=full, stretched=full, variant=asked)
    disk = _beside(task, FromNotebook(chapter, read), planned.traced[:1]) if read else None
    traced = trace_function(task, function, planned.traced, locate_live(function))
    result = judge_traced(planned, traced)
    said = notes(traced, disk.result(), uses(function)) if disk else ()
    return Outcome(Report(chapter, (result,), notes=(*said, *_notes(task, asked))))


def _name_of(function: Callable[..., Any], namespace: dict[str, Any]) -> str:
    """What the function is graded as: what a notebook calls it, as for a lambda or an object that is called."""
    own = getattr(function, "__name__", "")
    bound = [task.name for entry in CHAPTERS for task in load(entry.name).tasks if namespace.get(task.name) is function]
    return own if own in bound or not bound else bound[0]


def check_function(
    chapter: str,
    task: Task,
    function: Any,
    locate: Locate,
    *,
    full: bool,
    progress: Progress | None = None,
    variant: str = "",
) -> Result:
    """Judge a function: trace it, run its Programs in the executor process."""
    planned = plan(chapter, task, full=full, stretched=full, variant=variant)
    return judge_traced(planned, trace_function(task, function, planned.traced, locate), progress)


def judge_traced(planned: Plan, traced: Traced | Problem, progress: Progress | None = None) -> Result:
    """Judge what tracing gave."""
    if isinstance(traced, Problem):
        return stopped(planned.task, traced)
    programs = {name: program.serialise() for name, program in traced.programs.items()}
    try:
        return judge(planned, programs, traced.line, executor().ask, progress)
    except Stopped as error:
        return stopped(planned.task, Problem(error.verdict, str(error), traced.line))


def trace_function(
    task: Task, function: Any, cases: list[Case], locate: Locate, platform: str = "cpu"
) -> Traced | Problem:
    """The Programs of a function, as ``functions_of`` finds it: traced here, or from a notebook in a tracer process."""
    if isinstance(function, Problem):
        return function
    if not isinstance(function, FromNotebook):
        with time_limit(TRACE_SECONDS):
            return trace_cases(task, function, cases, locate, platform=platform)
    limits = replace(LOCAL, cpu_s=TRACE_SECONDS)
    request = trace_request(
        function.chapter, task, function.notebook, cases, limits, platform, patient=True, with_uses=True
    )
    return traced_by(tracer(), request)


def _beside(task: Task, function: FromNotebook, cases: list[Case]) -> Future[Traced | Problem]:
    """What the notebook on disk gives, while this process does something else."""
    pool = ThreadPoolExecutor(1)
    found = pool.submit(trace_function, task, function, cases, locate_cell)
    pool.shutdown(wait=False)
    return found


@dataclass(frozen=True)
class FromNotebook:
    """A function as the cells of a notebook on disk define it; they are run by a tracer process, as officially."""

    chapter: str
    notebook: Notebook


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
    tracer().start_early()
    notebook = read_notebook(path)
    found, asked = FromNotebook(chapter, notebook), stated(notebook.cells)
    results, said = [], []
    for task in tasks:
        variant = asked.get(task.name, "")
        said += _notes(task, variant)
        results.append(check_function(chapter, task, found, locate_cell, full=full, progress=progress, variant=variant))
    return Report(chapter, tuple(results), notes=tuple(said))


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
        locate = locate_file(function)
        results.append(check_function(chapter, task, function, locate, full=full, progress=progress))
    return Report(chapter, tuple(results))


def functions_of(path: Path | None, chapter: str) -> Callable[[Task], tuple[Any, Locate]]:
    """Finds a task's function, or the problem with it, in a notebook or in the course's own solution, and its lines."""
    import importlib

    if path is None:
        module = importlib.import_module(f"solutions.{chapter}")
        return lambda task: (getattr(module, task.name), locate_file(getattr(module, task.name)))
    found = FromNotebook(chapter, read_notebook(path))
    return lambda task: (found, locate_cell)


def add_facts(
    report: Report, chapter: str, path: Path | None, more: Callable[[Task, Result, Any, Locate], list[Fact]]
) -> Report:
    """The same report with more facts for every function that has a realistic size and ran at all.

    Args:
        report: What the other lenses gave.
        chapter: The chapter's name.
        path: The notebook that was judged; None for the course's own solution.
        more: The facts of a task, given its result and what ``functions_of`` finds.
    """
    found = functions_of(path, chapter)
    results = []
    for result in report.functions:
        task = load(chapter).task(result.name)
        if task.analysed and result.facts:
            result = with_facts(result, more(task, result, *found(task)))
        results.append(result)
    return replace(report, functions=tuple(results))


def with_facts(result: Result, facts: list[Fact]) -> Result:
    """Points and verdict with more facts; advice and facts that were not measured change neither."""
    again = conclude(result.name, result.max_points, [*result.facts, *facts])
    return replace(result, points=again.points, verdict=again.verdict, facts=again.facts)


def exported(task: Task, function: Any, case: Case, locate: Locate, platform: str) -> Program:
    """The Program of a function, as ``functions_of`` finds it, for lenses that give advice.

    Raises:
        ProgramError: There is none; the message says what stood in the way, be it an exception of the learner's.
    """
    if isinstance(function, Problem):
        raise ProgramError(function.message)
    found = trace_function(task, function, [case], locate, platform)
    if isinstance(found, Traced):
        return found.programs[case.name]
    if found.verdict == "refused":
        raise ProgramError(found.message)
    where = f" ({found.line})" if found.line else ""
    raise ProgramError(f"the program cannot be exported for {platform}: {found.message}{where}")


@cache
def executor() -> Worker:
    """The one executor process of this kernel or command; it ends with it."""
    worker = local_executor()
    atexit.register(worker.close)
    return worker


@cache
def tracer() -> Worker:
    """The one tracer process of this kernel or command; it ends with it."""
    worker = local_tracer()
    atexit.register(worker.close)
    return worker


def _tasks(chapter: str, functions: list[str] | None) -> list[Task]:
    contract = load(chapter)
    return [contract.task(name) for name in functions] if functions else list(contract.tasks)


def find_task(name: str) -> tuple[str, Task]:
    """The chapter and task that a function's name belongs to.

    Raises:
        LookupError: No chapter has such a function.
    """
    every = {task.name: (entry.name, task) for entry in CHAPTERS for task in load(entry.name).tasks}
    if name not in every:
        raise LookupError(f"no chapter has a function called {name!r}; check knows: {', '.join(every)}")
    return every[name]


def locate_file(function: Callable[..., Any]) -> Locate:
    """Locations in the file that defines the function, named by it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = code.co_filename if code else ""
    return lambda file: Path(file).name if file == own else None


def locate_live(function: Callable[..., Any]) -> Locate:
    """Locations in a notebook's cells: by the graded function that a cell defines, else by its number."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return locate_file(function)
    shell = get_ipython()
    if shell is None:
        return locate_file(function)
    known = {}
    for name in (task.name for entry in CHAPTERS for task in load(entry.name).tasks):
        code = getattr(inspect.unwrap(shell.user_ns[name]), "__code__", None) if name in shell.user_ns else None
        if code is not None:
            known[code.co_filename] = name
    numbers = getattr(shell.compile, "_filename_map", {})
    own = locate_file(function)

    def locate(file: str) -> str | None:
        if file in known:
            return known[file]
        return f"In[{numbers[file]}]" if file in numbers else own(file)

    return locate


def _notes(task: Task, variant: str) -> tuple[str, ...]:
    """What the course asks for instead of what is usual, for the learner to see."""
    found = task.variant(variant)
    return (f"{task.name}, in this course: {found.sentence}",) if found else ()
