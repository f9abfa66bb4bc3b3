"""Trace and judge a function on this machine: in this process, or from a notebook on disk in a separate process."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from autograder.contract.task import Case, Evidence, Task
from autograder.contract.text import count_of
from autograder.contract.verdict import PARTIAL, PASS, Fact, Result
from autograder.grading.inside.intake import Notebook
from autograder.grading.inside.launch import Limits
from autograder.grading.inside.tracing import UNROLLED, Problem, Traced, time_limit, trace_cases, unwrapped
from autograder.grading.outside.judge import GradingPlan, Stopped, judge, plan, stopped
from autograder.grading.outside.pipeline import trace_request, trace_together
from autograder.grading.outside.workers import Worker, local_executor, local_tracer
from course.program import Locate, Program, ProgramError

Progress = Callable[[str], None]
# A function's Programs for a platform: the task, the cases, the platform.
Export = tuple[Task, list[Case], str]
# Processor time, which doesn't depend on load; and wall time, to catch code that waits without computing.
TRACE_SECONDS, TRACE_WALL_SECONDS = 60, 300
# The tracer of a learner's own machine: nothing here needs protecting from others.
LOCAL = Limits(wall_s=TRACE_WALL_SECONDS, cpu_s=TRACE_SECONDS, address_space=1 << 40, open_files=1024)


def ignored(_: str) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class FromNotebook:
    """The functions of a notebook on disk, whose cells run in a tracer process as in official grading."""

    chapter: str
    notebook: Notebook
    traced: dict[tuple[str, str], list[Traced | Problem]] = field(default_factory=dict, repr=False, compare=False)

    def trace(self, exports: list[Export]) -> list[Traced | Problem]:
        """Run the cells once for the Programs of all ``exports``, and cache them for ``programs``."""
        limits = replace(LOCAL, cpu_s=TRACE_SECONDS)
        requests = [
            trace_request(self.chapter, task, self.notebook, cases, limits, platform, patient=True, with_uses=True)
            for task, cases, platform in exports
        ]
        worker = tracer(self.chapter)
        worker.seconds = len(exports) * (limits.wall_s or 0) + 120  # it ends its children itself
        all_traced = trace_together(worker, requests)
        for (task, _, platform), traced in zip(exports, all_traced, strict=True):
            self.traced.setdefault((task.name, platform), []).append(traced)
        return all_traced

    def programs(self, task: Task, cases: list[Case[Any]], platform: str) -> Traced | Problem:
        """A function's Programs on some cases, or the reason there are none."""
        names = {case.name for case in cases}
        for traced in self.traced.get((task.name, platform), []):
            if isinstance(traced, Problem) or names <= traced.programs.keys():
                return traced
        return self.trace([(task, cases, platform)])[0]


def judge_function(
    planned: GradingPlan, function: Any, locate: Locate, progress: Progress = ignored
) -> tuple[Result, Traced | Problem]:
    """Judge a function on the quick cases and, if they pass, on all others of official grading.

    Args:
        planned: The cases it is judged on.
        function: The function, as ``trace_function`` accepts it.
        locate: Names its lines.
        progress: Progress callback, called with the current activity.

    Returns:
        The result, and the traced Programs.
    """
    first, seen = planned.first, {}
    progress(f"tracing {count_of(len(first.cases), 'first case')} of {len(planned.cases)}")
    with _compiling(first) as compile_early:
        traced = trace_function(planned.task, function, first.traced, locate, on_program=compile_early)
    result = judge_traced(first, traced, progress, seen)
    if isinstance(traced, Problem) and traced.runs and (wrong := _where_it_runs(first, function, locate)):
        message = f"{result.message}. {traced.runs[:1].upper()}{traced.runs[1:]} it is wrong, too: see below."
        return replace(result, message=message, facts=wrong), traced
    known = {case.name for case in first.traced}
    others = [case for case in planned.traced if case.name not in known]
    if isinstance(traced, Problem) or not others:
        return result, traced
    if result.verdict != PASS:
        return replace(result, cases_left=len(others)), traced
    so_far = (
        f"passes on {count_of(len(first.cases), 'first case')}; now {count_of(len(others), 'other case')} of grading"
    )
    progress(so_far)
    with _compiling(planned) as compile_early:
        all_traced = trace_function(planned.task, function, others, locate, on_program=compile_early)
    if isinstance(all_traced, Traced):
        all_traced = replace(all_traced, programs={**traced.programs, **all_traced.programs})
    return judge_traced(planned, all_traced, lambda case: progress(f"{so_far}: {case}"), seen), all_traced


@contextmanager
def _compiling(planned: GradingPlan) -> Iterator[Callable[[Case, Program], None]]:
    """Let the executor compile the Programs that will run while this process traces the next ones."""

    def compile_early(program: Program) -> None:
        with suppress(Stopped):  # the judge asks again, and reports it
            header = {"do": "compile", "data_branches": planned.task.data_branches}
            executor().ask(header, [program.serialise()])

    def on_program(case: Case, program: Program) -> None:
        if case.name in runs:
            pool.submit(compile_early, program)

    runs, pool = {case.name for case in planned.cases}, ThreadPoolExecutor(1)
    try:
        yield on_program
    finally:  # the judge asks for what has not begun, if anything is left to judge
        pool.shutdown(wait=False, cancel_futures=True)


def _where_it_runs(planned: GradingPlan, function: Any, locate: Locate) -> tuple[Fact, ...]:
    """The facts that fail on the first case, if a function raises an error on another: a cause may show there."""
    alone = replace(planned, cases=planned.cases[:1], at_scale=None)
    if isinstance(function, FromNotebook):
        (traced,) = function.trace([(planned.task, alone.traced, "cpu")])  # not the cached result, which is the error
    else:
        traced = trace_function(planned.task, function, alone.traced, locate)
    result = judge_traced(alone, traced) if isinstance(traced, Traced) else None
    return tuple(fact for fact in result.missed if fact.kind.required) if result else ()


def plan_of_callee(chapter: str, task: Task, caller: Result) -> GradingPlan:
    """The cases that show whether a callee falls short on its own: as few as the caller's result suggests.

    A partial caller exceeds a limit on memory or time, which shows at the realistic size; quick cases are judged as
    well, since a fact without a case would fail. If a caller is right in its first case, the callee may be, too.
    """
    planned = plan(chapter, task)
    if caller.verdict == PARTIAL and task.at_scale:
        return planned.first
    quick = planned.first.cases
    later = all(fact.case not in caller.cases[:1] for fact in caller.missed)
    return replace(planned, cases=quick if later else quick[:1], at_scale=None)


def judge_traced(
    planned: GradingPlan,
    traced: Traced | Problem,
    progress: Progress | None = None,
    seen: dict[str, Evidence] | None = None,
) -> Result:
    """Judge traced Programs; ``seen`` is as for ``judge``."""
    if isinstance(traced, Problem):
        return stopped(planned.task, traced)
    try:
        return judge(planned, traced.serialised(), traced.line, executor().ask, progress, seen)
    except Stopped as error:
        return stopped(planned.task, Problem(error.verdict, str(error), traced.line))


def trace_function(
    task: Task,
    function: Any,
    cases: list[Case],
    locate: Locate,
    platform: str = "cpu",
    on_program: Callable[[Case, Program], None] = lambda case, program: None,
) -> Traced | Problem:
    """The Programs of a function, traced in this process or, for a notebook on disk, in a tracer process.

    ``on_program`` is called with each Program as soon as it is traced, if that is in this process.
    """
    if isinstance(function, Problem):
        return function
    if isinstance(function, FromNotebook):
        return function.programs(task, cases, platform)
    with time_limit(TRACE_SECONDS, processor=True, asks=UNROLLED), time_limit(TRACE_WALL_SECONDS):
        return trace_cases(task, function, cases, locate, on_program, platform)


def exported(task: Task, function: Any, case: Case, locate: Locate, platform: str) -> Program:
    """The Program of a function, as ``trace_function`` accepts it, for analyses that give advice.

    Raises:
        ProgramError: There is none; the message gives the cause, including any exception the learner's code raised.
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


@cache
def executor() -> Worker:
    """The only executor process of this kernel or command; it exits with its parent."""
    return _ending_with_this(local_executor())


@cache
def tracer(chapter: str) -> Worker:
    """The only tracer process of this kernel or command for the chapter; it exits with its parent."""
    return _ending_with_this(local_tracer(chapter))


def _ending_with_this(worker: Worker) -> Worker:
    atexit.register(worker.close)
    return worker


def locate_file(function: Callable[..., Any]) -> Locate:
    """Locate lines in the file that defines the function, using the function's name."""
    own = file_of(function)
    return lambda file: Path(file).name if file == own else None


def file_of(function: Any) -> str:
    code = getattr(unwrapped(function), "__code__", None)
    return code.co_filename if code else ""
