"""``check``: judge functions immediately. The notebook, the command and the tests all call this."""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from autograder.checking.follow_up import (
    blame_callee,
    further_reading,
    limit_notes,
    next_step,
    quote_lines,
    variant_notes,
    with_facts,
)
from autograder.checking.judging import (
    Export,
    FromNotebook,
    Progress,
    executor,
    ignored,
    judge_function,
    judge_traced,
    locate_file,
    plan_of_callee,
    trace_function,
    tracer,
)
from autograder.checking.kernel import Line, labels_of, name_of, stale
from autograder.contract.task import Case, Task, find_task, load
from autograder.contract.verdict import PASS, Fact, Report, Result
from autograder.grading.inside.cells import locate_cell
from autograder.grading.inside.intake import Notebook, read_notebook
from autograder.grading.inside.tracing import Problem, Traced
from autograder.grading.inside.uses import uses
from autograder.grading.outside.judge import GradingPlan, plan
from autograder.grading.outside.kernel_and_file import notebook_here, notes, path_here
from autograder.grading.outside.notebook_options import requested_limits, requested_variants
from autograder.progress import next_function, passing, remember
from course.program import Locate


class CheckResult:
    """The result of ``check``: a table in a notebook, text elsewhere.

    In a notebook its plain text is only the points, which is how nbgrader reads partial credit.
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
            console.print(facts_table(self.report), crop=False)
        return capture.get().rstrip()


class MoreFacts(Protocol):
    """An analysis whose facts are added to the judge's, for functions that have a realistic size."""

    @property
    def notes(self) -> tuple[str, ...]: ...

    def exports(self, task: Task) -> list[Export]:
        """Return the Programs that the analysis needs in addition to those that are judged."""
        ...

    def facts(self, task: Task, result: Result, function: Any, locate: Locate) -> list[Fact]: ...


def check(
    function: Callable[..., Any], *, variant: str | None = None, limits: Mapping[str, float] | None = None
) -> CheckResult:
    """Judge a function as defined in this kernel: on the quick cases and, if they pass, on all other cases of grading.

    Args:
        function: One of a chapter's functions, identified by its name.
        variant: The variant this course asks for; read from the notebook on disk if omitted.
        limits: This course's factors on the limits of facts; read from the notebook on disk if omitted.
    """
    name = name_of(function, sys._getframe(1).f_globals)
    chapter, task = find_task(name)
    executor().start_early()
    notebook = notebook_here()
    if variant is None:
        variant = requested_variants(notebook.cells).get(name, "") if notebook else ""
    if limits is None:
        limits = requested_limits(notebook.cells).get(name, {}) if notebook else {}
    planned = plan(chapter, task, stretched=True, variant=variant, factors=limits)
    disk = _trace_in_background(task, FromNotebook(chapter, notebook), planned.traced[:1]) if notebook else None
    labels, line = labels_of(function), Line()

    def first_case(other: Task) -> Result:
        called = getattr(function, "__globals__", {})[other.name]
        small = plan_of_callee(chapter, other, result)
        return judge_traced(small, trace_function(other, called, small.traced, labels.get))

    try:
        result, traced = judge_function(planned, function, labels.get, lambda text: line(f"{name}: {text}"))
        used, files = uses(function), {label: file for file, label in labels.items()}
        result = blame_callee(chapter, result, used, first_case)
    finally:
        line.clear()
    result = quote_lines(result, lambda label, number: linecache.getline(files.get(label, ""), number))
    if again := stale(task, function):
        result = replace(result, message=f"{again} {result.message}".strip())
    differences = notes(traced, disk.result(), used) if disk else ()
    following = _remember_and_suggest(chapter, result, agrees=bool(notebook) and not differences)
    messages = (
        *differences,
        *variant_notes(task, variant),
        *limit_notes(name, limits),
        *further_reading(chapter, [result]),
        *following,
    )
    return CheckResult(Report(chapter, (result,), notes=messages))


def _remember_and_suggest(chapter: str, result: Result, *, agrees: bool) -> tuple[str, ...]:
    """Record the verdict if file and kernel agree; after a pass, suggest the next step."""
    names = [task.name for task in load(chapter).tasks]
    path = path_here()
    if agrees and path:
        remember(path, chapter, [result])
    passed = (passing(path, chapter) if path else {}) | {result.name: result.verdict == PASS}
    return (next_step(chapter, result, next_function(names, passed)),) if result.verdict == PASS else ()


def _trace_in_background(task: Task, function: FromNotebook, cases: list[Case[Any]]) -> Future[Traced | Problem]:
    """Trace the notebook on disk in parallel with this process."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(trace_function, task, function, cases, locate_cell)
    pool.shutdown(wait=False)
    return future


def check_notebook(
    path: Path,
    chapter: str,
    functions: list[str] | None = None,
    *,
    progress: Progress = ignored,
    more: Sequence[MoreFacts] = (),
) -> Report:
    """Judge a notebook as saved on disk.

    Args:
        path: The notebook.
        chapter: The chapter's name.
        functions: Names of functions; None for all of the chapter.
        progress: Progress callback, called with the current activity.
        more: Analyses whose facts are added.

    Raises:
        IntakeError: The notebook cannot be read.
        LookupError: The chapter has no such function.
    """
    _tasks(chapter, functions)
    executor().start_early()
    tracer(chapter).start_early()
    return check_cells(read_notebook(path), chapter, functions, progress=progress, more=more)


def check_cells(
    notebook: Notebook,
    chapter: str,
    functions: list[str] | None = None,
    *,
    progress: Progress = ignored,
    more: Sequence[MoreFacts] = (),
) -> Report:
    """Judge a notebook that has already been read; arguments as for ``check_notebook``.

    Its cells run once. If a single function is judged, they run for the first cases and then, if these pass, again for
    the others, so that errors are reported sooner.
    """
    tasks = _tasks(chapter, functions)
    source = FromNotebook(chapter, notebook)
    variants = requested_variants(notebook.cells)
    limits = requested_limits(notebook.cells)
    planned = [
        plan(chapter, task, stretched=True, variant=variants.get(task.name, ""), factors=limits.get(task.name, {}))
        for task in tasks
    ]
    alone = len(tasks) == 1 and not more
    exports = [
        (grading_plan.task, (grading_plan.first if alone else grading_plan).traced, "cpu") for grading_plan in planned
    ]
    exports += [export for each in more for task in tasks if task.at_scale for export in each.exports(task)]
    progress("running the notebook's cells")
    source.trace(_missing(exports))
    report = _judged(chapter, planned, lambda task: (source, locate_cell), progress, more)

    def judged(other: Task, caller: Result) -> Result:
        if known := next((result for result in report.functions if result.name == other.name), None):
            return known
        small = plan_of_callee(chapter, other, caller)
        return judge_traced(small, source.programs(other, small.traced, "cpu"))

    def with_more(task: Task, result: Result) -> Result:
        used = [traced.uses for traced in source.traced.get((task.name, "cpu"), ()) if isinstance(traced, Traced)]
        result = blame_callee(chapter, result, used[0] if used else {}, partial(judged, caller=result))
        return quote_lines(result, notebook.line)

    report = replace(report, functions=tuple(map(with_more, tasks, report.functions)))
    requested = [note for task in tasks for note in variant_notes(task, variants.get(task.name, ""))]
    requested += [note for task in tasks for note in limit_notes(task.name, limits.get(task.name, {}))]
    return replace(report, notes=(*requested, *further_reading(chapter, report.functions), *report.notes))


def check_solution(
    chapter: str,
    functions: list[str] | None = None,
    *,
    progress: Progress = ignored,
    more: Sequence[MoreFacts] = (),
    stretched: bool = True,
    limits: Mapping[str, Mapping[str, float]] | None = None,
) -> Report:
    """Judge the course's own solution; arguments as for ``check_notebook``.

    ``limits`` has factors on limits, by function and fact. Without ``stretched``, functions are judged on all meshes
    and at the realistic size, but not on the cases in between.

    Raises:
        LookupError: There is no such chapter or function.
    """
    factors = limits or {}
    planned = [
        plan(chapter, task, stretched=stretched, factors=factors.get(task.name, {}))
        for task in _tasks(chapter, functions)
    ]
    module = importlib.import_module(f"solutions.{chapter}")

    def find(task: Task) -> tuple[Any, Locate]:
        function = getattr(module, task.name)
        return function, locate_file(function)

    def text(label: str, number: int) -> str:
        return linecache.getline(str(Path(module.__file__ or "").parent / label), number)

    report = _judged(chapter, planned, find, progress, more)
    return replace(report, functions=tuple(quote_lines(result, text) for result in report.functions))


def _judged(
    chapter: str,
    planned: list[GradingPlan],
    find: Callable[[Task], tuple[Any, Locate]],
    progress: Progress,
    more: Sequence[MoreFacts],
) -> Report:
    executor().start_early()
    results = []
    for grading_plan in planned:
        function, locate = find(grading_plan.task)
        name = grading_plan.task.name
        result, _ = judge_function(grading_plan, function, locate, lambda text, name=name: progress(f"{name}: {text}"))
        for each in more if grading_plan.task.at_scale and result.facts and not result.message else ():
            result = with_facts(result, each.facts(grading_plan.task, result, function, locate))
        results.append(result)
    return Report(chapter, tuple(results), notes=tuple(note for each in more for note in each.notes))


def _missing(exports: list[Export]) -> list[Export]:
    """Drop the exports that an earlier one already contains."""
    distinct: list[Export] = []
    for task, cases, platform in exports:
        names = {case.name for case in cases}
        known = (other for other in distinct if (other[0].name, other[2]) == (task.name, platform))
        if not any(names <= {case.name for case in other[1]} for other in known):
            distinct.append((task, cases, platform))
    return distinct


def _tasks(chapter: str, functions: list[str] | None) -> list[Task]:
    contract = load(chapter)
    return [contract.task(name) for name in functions] if functions else list(contract.tasks)
