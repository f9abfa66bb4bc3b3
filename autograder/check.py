"""``check``: judge one function here and now. The notebook, the command and the tests all call this."""

from __future__ import annotations

import atexit
import importlib
import inspect
import linecache
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from autograder.contract.task import Case, Task, load
from autograder.contract.verdict import FAIL, PASS, Fact, Report, Result, conclude
from autograder.grading.inside.cells import locate_cell, read_statements
from autograder.grading.inside.intake import Cell, Notebook, read_notebook
from autograder.grading.inside.launch import Limits
from autograder.grading.inside.tracing import Problem, Traced, time_limit, trace_cases
from autograder.grading.inside.uses import uses
from autograder.grading.outside.judge import Plan, Stopped, judge, plan, stopped
from autograder.grading.outside.pipeline import trace_request, trace_together
from autograder.grading.outside.released import stated
from autograder.grading.outside.saved import notebook_here, notes, path_here
from autograder.grading.outside.workers import Worker, local_executor, local_tracer
from autograder.progress import next_function, recall, remember
from course.curriculum import CHAPTERS
from course.program import Locate, Program, ProgramError

Progress = Callable[[str], None]
# A function's Programs for a platform: the task, the cases, the platform.
Export = tuple[Task, list[Case], str]
# Of processor time, which is the same on a busy machine; and of wall time, for what waits and computes nothing.
TRACE_SECONDS, TRACE_WALL_SECONDS = 60, 300
# The tracer of a learner's own machine: what would harm others is not limited.
LOCAL = Limits(wall_s=TRACE_WALL_SECONDS, cpu_s=TRACE_SECONDS, address_space=1 << 40, open_files=1024)


class CheckResult:
    """What ``check`` returns: a table in a notebook, text elsewhere.

    Its plain text in a notebook is the points alone, which is how nbgrader reads partial credit.
    """

    def __init__(self, report: Report):
        self.report = report

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from autograder.render import facts_html

        return {"text/plain": repr(float(self.report.points)), "text/html": facts_html(self.report)}

    def __repr__(self) -> str:
        from rich.console import Console

        from autograder.render import facts_table

        console = Console(width=100)
        with console.capture() as capture:
            console.print(facts_table(self.report))
        return capture.get().rstrip()


@dataclass(frozen=True)
class FromNotebook:
    """The functions of a notebook on disk. A tracer process runs its cells, as official grading does."""

    chapter: str
    notebook: Notebook
    traced: dict[tuple[str, str], list[Traced | Problem]] = field(default_factory=dict, repr=False, compare=False)

    def trace(self, exports: list[Export]) -> list[Traced | Problem]:
        """Run the cells once, for the Programs of all ``exports``, and keep them for ``programs``."""
        limits = replace(LOCAL, cpu_s=TRACE_SECONDS)
        requests = [
            trace_request(self.chapter, task, self.notebook, cases, limits, platform, patient=True, with_uses=True)
            for task, cases, platform in exports
        ]
        worker = tracer()
        worker.seconds = len(exports) * (limits.wall_s or 0) + 120  # it ends its children itself
        every = trace_together(worker, requests)
        for (task, _, platform), traced in zip(exports, every, strict=True):
            self.traced.setdefault((task.name, platform), []).append(traced)
        return every

    def programs(self, task: Task, cases: list[Case], platform: str) -> Traced | Problem:
        """A function's Programs on some cases, or why there are none."""
        names = {case.name for case in cases}
        for traced in self.traced.get((task.name, platform), []):
            if isinstance(traced, Problem) or names <= traced.programs.keys():
                return traced
        return self.trace([(task, cases, platform)])[0]


class MoreFacts(Protocol):
    """An analysis whose facts are added to the judge's, for functions that have a realistic size."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def exports(self, task: Task) -> list[Export]:
        """The Programs that it looks at, besides those that are judged."""
        ...

    def facts(self, task: Task, result: Result, function: Any, locate: Locate) -> list[Fact]: ...


def check(function: Callable[..., Any], *, full: bool = False, variant: str | None = None) -> CheckResult:
    """Judge a function as this kernel has it.

    Args:
        function: One of a chapter's functions; its name says which.
        full: All meshes, as official grading does, instead of two.
        variant: What this course asks for; as the notebook on disk says, if not given.
    """
    name = _name_of(function, sys._getframe(1).f_globals)
    chapter, task = find_task(name)
    executor().start_early()
    read = notebook_here()
    if variant is None:
        variant = stated(read.cells).get(name, "") if read else ""
    planned = plan(chapter, task, full=full, stretched=full, variant=variant)
    disk = _meanwhile(task, FromNotebook(chapter, read), planned.traced[:1]) if read else None
    labels = _labels(function)
    traced = trace_function(task, function, planned.traced, labels.get)

    def first_case(other: Task) -> Result:
        called = getattr(function, "__globals__", {})[other.name]
        small = _first_case(chapter, other)
        return judge_traced(small, trace_function(other, called, small.traced, labels.get))

    files = {label: file for file, label in labels.items()}
    used = uses(function)
    result = with_fault(chapter, judge_traced(planned, traced), used, first_case)
    result = with_quotes(result, lambda label, number: linecache.getline(files.get(label, ""), number))
    if stale := _stale(task, function):
        result = replace(result, message=f"{stale} {result.message}".strip())
    differences = notes(traced, disk.result(), used) if disk else ()
    following = _way_on(chapter, result, kept=bool(read) and not differences)
    return CheckResult(Report(chapter, (result,), notes=(*differences, *_variant_notes(task, variant), *following)))


def _way_on(chapter: str, result: Result, *, kept: bool) -> tuple[str, ...]:
    """Remember the verdict, where the file has what the kernel has; after a pass, what comes next."""
    names = [task.name for task in load(chapter).tasks]
    passed = {result.name: result.verdict == PASS}
    if kept and (path := path_here()):
        remember(path, chapter, [result])
        passed = recall(path, chapter).passed
    return (way_on(chapter, result, next_function(names, passed, result.name)),) if result.verdict == PASS else ()


def way_on(chapter: str, result: Result, following: str) -> str:
    """What to do after a pass: the next function, and where a profile tells something, that."""
    text = f"Next: {following}." if following else f"All functions of {chapter} pass."
    scaled = load(chapter).task(result.name).at_scale
    more = f" `meshcraft profile {chapter} {result.name}` shows where its time and memory go." if scaled else ""
    return text + more


def _name_of(function: Callable[..., Any], namespace: dict[str, Any]) -> str:
    """The name that a function is graded by: what a notebook calls it, as for a lambda or an object that is called."""
    own = getattr(function, "__name__", "")
    bound = [name for name in every_task() if namespace.get(name) is function]
    return own if own in bound or not bound else bound[0]


def _meanwhile(task: Task, function: FromNotebook, cases: list[Case]) -> Future[Traced | Problem]:
    """Trace the notebook on disk while this process does something else."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(trace_function, task, function, cases, locate_cell)
    pool.shutdown(wait=False)
    return future


def _first_case(chapter: str, task: Task) -> Plan:
    planned = plan(chapter, task, full=False)
    return replace(planned, cases=planned.cases[:1], at_scale=None)


def with_fault(chapter: str, result: Result, used: Mapping[str, str], judged: Callable[[Task], Result]) -> Result:
    """A wrong result, with the function that it calls and that is wrong by itself, if there is one, named first.

    Args:
        chapter: The chapter's name.
        result: Of a function.
        used: What ``uses`` says of it.
        judged: The judgement of another function of the chapter.
    """
    if result.verdict != FAIL or result.message or not result.facts:
        return result
    for other in [task for task in load(chapter).tasks if task.name in used and task.name != result.name]:
        found = judged(other)
        if found.reason or not found.facts:
            wrong = found.reason.partition(" earn")[0].lower() or "an error"
            first = f"{other.name}, which {result.name} calls, has {wrong} by itself: mend that first."
            return replace(result, message=f"{first} check({other.name}) says more.")
    return result


def with_quotes(result: Result, text: Callable[[str, int], str]) -> Result:
    """The result with the text of every line of the learner's that it names; ``text`` gives that of ``cell:line``."""
    found = {}
    for line in {result.line, *(fact.line for fact in result.facts if not fact.passed)}:
        label, _, number = line.rpartition(":")
        if number.isdigit() and (said := text(label, int(number)).strip()):
            found[line] = said[:200]
    return replace(result, quoted=found)


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
    """The Programs of a function: traced here, or from a notebook in a tracer process."""
    if isinstance(function, Problem):
        return function
    if isinstance(function, FromNotebook):
        return function.programs(task, cases, platform)
    with time_limit(TRACE_SECONDS, processor=True), time_limit(TRACE_WALL_SECONDS):
        return trace_cases(task, function, cases, locate, platform=platform)


def exported(task: Task, function: Any, case: Case, locate: Locate, platform: str) -> Program:
    """The Program of a function, as ``trace_function`` takes it, for analyses that give advice.

    Raises:
        ProgramError: There is none; the message says what stood in the way, be it an exception of the learner's.
    """
    if isinstance(function, Problem):
        raise ProgramError(function.message)
    traced = trace_function(task, function, [case], locate, platform)
    if isinstance(traced, Traced):
        return traced.programs[case.name]
    if traced.verdict == "refused":
        raise ProgramError(traced.message)
    where = f" ({traced.line})" if traced.line else ""
    raise ProgramError(f"the program cannot be exported for {platform}: {traced.message}{where}")


def check_notebook(
    path: Path,
    chapter: str,
    functions: list[str] | None = None,
    *,
    full: bool = False,
    progress: Progress | None = None,
    more: Sequence[MoreFacts] = (),
) -> Report:
    """Judge a notebook as it is on disk. Its cells run once, whatever is looked at.

    Args:
        path: The notebook.
        chapter: The chapter's name.
        functions: Names of functions; None for all of the chapter.
        full: All meshes, instead of two.
        progress: Called with what is being done.
        more: Analyses whose facts are added.

    Raises:
        IntakeError: It cannot be read.
        LookupError: The chapter has no such function.
    """
    _tasks(chapter, functions)
    executor().start_early()
    tracer().start_early()
    return check_cells(read_notebook(path), chapter, functions, full=full, progress=progress, more=more)


def check_cells(
    notebook: Notebook,
    chapter: str,
    functions: list[str] | None = None,
    *,
    full: bool = False,
    progress: Progress | None = None,
    more: Sequence[MoreFacts] = (),
) -> Report:
    """Judge a notebook that has been read; the arguments are those of ``check_notebook``."""
    tasks = _tasks(chapter, functions)
    source = FromNotebook(chapter, notebook)
    variants = stated(notebook.cells)
    planned = [plan(chapter, task, full=full, stretched=full, variant=variants.get(task.name, "")) for task in tasks]
    exports = [(one.task, one.traced, "cpu") for one in planned]
    exports += [export for each in more for task in tasks if task.at_scale for export in each.exports(task)]
    source.trace(_missing(exports))
    report = _judged(chapter, planned, lambda task: (source, locate_cell), progress, more)

    def first_case(other: Task) -> Result:
        known = next((result for result in report.functions if result.name == other.name), None)
        small = _first_case(chapter, other)
        return known or judge_traced(small, source.programs(other, small.traced, "cpu"))

    def with_more(task: Task, result: Result) -> Result:
        used = [found.uses for found in source.traced.get((task.name, "cpu"), ()) if isinstance(found, Traced)]
        result = with_fault(chapter, result, used[0] if used else {}, first_case)
        return with_quotes(result, notebook.line)

    report = replace(report, functions=tuple(map(with_more, tasks, report.functions)))
    variant_notes = [note for task in tasks for note in _variant_notes(task, variants.get(task.name, ""))]
    return replace(report, notes=(*variant_notes, *report.notes))


def check_solution(
    chapter: str,
    functions: list[str] | None = None,
    *,
    full: bool = False,
    progress: Progress | None = None,
    more: Sequence[MoreFacts] = (),
) -> Report:
    """Judge the course's own solution; the arguments are those of ``check_notebook``.

    Raises:
        LookupError: There is no such chapter or function.
    """
    planned = [plan(chapter, task, full=full, stretched=full) for task in _tasks(chapter, functions)]
    module = importlib.import_module(f"solutions.{chapter}")

    def find(task: Task) -> tuple[Any, Locate]:
        function = getattr(module, task.name)
        return function, locate_file(function)

    def text(label: str, number: int) -> str:
        return linecache.getline(str(Path(module.__file__ or "").with_name(label)), number)

    report = _judged(chapter, planned, find, progress, more)
    return replace(report, functions=tuple(with_quotes(result, text) for result in report.functions))


def _judged(
    chapter: str,
    planned: list[Plan],
    find: Callable[[Task], tuple[Any, Locate]],
    progress: Progress | None,
    more: Sequence[MoreFacts],
) -> Report:
    executor().start_early()
    results = []
    for one in planned:
        function, locate = find(one.task)
        result = judge_traced(one, trace_function(one.task, function, one.traced, locate), progress)
        for each in more if one.task.at_scale and result.facts else ():
            result = with_facts(result, each.facts(one.task, result, function, locate))
        results.append(result)
    return Report(chapter, tuple(results), notes=tuple(note for each in more for note in each.notes))


def _missing(exports: list[Export]) -> list[Export]:
    """The exports, less those that one before them contains."""
    kept: list[Export] = []
    for task, cases, platform in exports:
        names = {case.name for case in cases}
        known = (other for other in kept if (other[0].name, other[2]) == (task.name, platform))
        if not any(names <= {case.name for case in other[1]} for other in known):
            kept.append((task, cases, platform))
    return kept


def with_facts(result: Result, facts: list[Fact]) -> Result:
    """Points and verdict with more facts; advice and facts that were not measured change neither."""
    again = conclude(result.name, result.max_points, [*result.facts, *facts])
    return replace(result, points=again.points, verdict=again.verdict, facts=again.facts)


@cache
def executor() -> Worker:
    """The one executor process of this kernel or command; it ends with it."""
    return _ending_with_this(local_executor())


@cache
def tracer() -> Worker:
    """The one tracer process of this kernel or command; it ends with it."""
    return _ending_with_this(local_tracer())


def _ending_with_this(worker: Worker) -> Worker:
    atexit.register(worker.close)
    return worker


def every_task() -> Mapping[str, tuple[str, Task]]:
    """Each function of the course by name: its chapter and its task."""
    return {task.name: (entry.name, task) for entry in CHAPTERS for task in load(entry.name).tasks}


def _tasks(chapter: str, functions: list[str] | None) -> list[Task]:
    contract = load(chapter)
    return [contract.task(name) for name in functions] if functions else list(contract.tasks)


def find_task(name: str) -> tuple[str, Task]:
    """The chapter and task that a function's name belongs to.

    Raises:
        LookupError: No chapter has such a function.
    """
    every = every_task()
    if name not in every:
        raise LookupError(f"no chapter has a function called {name!r}; check knows: {', '.join(every)}")
    return every[name]


def locate_file(function: Callable[..., Any]) -> Locate:
    """Locations in the file that defines the function, named by it."""
    own = _file_of(function)
    return lambda file: Path(file).name if file == own else None


def _file_of(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else ""


def locate_live(function: Callable[..., Any]) -> Locate:
    """Locations in a notebook's cells: by the graded function that a cell defines, else by its number."""
    return _labels(function).get


def _labels(function: Callable[..., Any]) -> dict[str, str]:
    """What each file is called that is the learner's: a cell's, or the one that defines the function."""
    own = _file_of(function)
    labels = {own: Path(own).name} if own else {}
    if shell := _shell():
        numbers = getattr(shell.compile, "_filename_map", {})
        labels |= {file: f"In[{number}]" for file, number in numbers.items()}
        labels |= {_file_of(shell.user_ns[name]): name for name in every_task() if name in shell.user_ns}
    labels.pop("", None)
    return labels


def _shell() -> Any:
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return None
    return get_ipython()


def _stale(task: Task, function: Callable[..., Any]) -> str:
    """That a later cell was to define the function and failed, so that an older one is judged; empty if not."""
    shell = _shell()
    numbers = getattr(shell.compile, "_filename_map", {}) if shell else {}
    number, cells = numbers.get(_file_of(function)), list(shell.user_ns.get("In", ())) if shell else []
    later = range((number or len(cells)) + 1, len(cells))
    again = [n for n in later if re.search(rf"^def +{task.name}\b", cells[n], re.MULTILINE)]
    if not again:
        return ""
    failed, why = read_statements([Cell("", cells[again[-1]])])[0], "did not run to its end"
    if failed.node is None and failed.error:
        why = f"does not run: {failed.error}, in its line {failed.line}, `{failed.text}`"
    return f"This judges {task.name} as In[{number}] had it. In[{again[-1]}], which defines it again, {why}."


def _variant_notes(task: Task, variant: str) -> tuple[str, ...]:
    """What the course asks for instead of what is usual, for the learner to see."""
    found = task.variant(variant)
    return (f"{task.name}, in this course: {found.sentence}",) if found else ()
