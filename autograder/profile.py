"""``profile``: a function's timeline and memory on a machine, beside the reference's and the naive way's."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autograder.check import TRACE_SECONDS, _find, _locate_file, _locate_live
from autograder.contract import Case, Task, load, trace
from autograder.grading.intake import read_notebook
from autograder.grading.tracing import (
    Problem,
    TooLong,
    explained,
    find_function,
    locate_cell,
    run_cells,
    time_limit,
    trace_cases,
)
from course.machine import Machine
from course.machines import machine as find_machine
from course.predict import Prediction, predict
from course.program import Locate, Program, ProgramError

Progress = Callable[[str], None]
YOURS, REFERENCE, NAIVE = "yours", "reference", "naive"


@dataclass(frozen=True)
class Profile:
    """What ``profile`` returns: a picture in a notebook, tables elsewhere.

    Attributes:
        chapter, function: Whose.
        case: The mesh and the sizes that it was traced at.
        machine: The machine's name.
        predictions: Of ``yours``, ``reference`` and ``naive``, as far as there are.
        missing: Why there is none of the others, by name.
        problem: Why there is none of yours.
        programs: Yours as exported: ``cpu``, and ``cuda`` where the GPU compiler was asked.
    """

    chapter: str
    function: str
    case: str
    machine: str
    predictions: dict[str, Prediction]
    missing: dict[str, str]
    problem: Problem | None = None
    programs: dict[str, Program] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.function} at {self.case}, predicted for {self.machine}"

    @property
    def remarks(self) -> dict[str, str]:
        """What is missing, and why."""
        return self.missing | (self.predictions[YOURS].remarks if self.predictions else {})

    def to_json(self) -> dict[str, Any]:
        """Everything but the bars, as plain data."""
        return {
            "chapter": self.chapter,
            "function": self.function,
            "case": self.case,
            "machine": self.machine,
            "problem": self.problem.to_json() if self.problem else None,
            "predictions": {name: prediction.to_json() for name, prediction in self.predictions.items()},
            "missing": self.missing,
        }

    def html(self) -> str:
        """Pictures and tables, or what went wrong."""
        from course.show.panels import comparison_html, problem_html

        if self.problem is not None:
            return problem_html(self.title, self.problem.message, self.problem.line)
        return comparison_html(self.title, self.predictions, self.remarks)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.html()}

    def __repr__(self) -> str:
        from course.show.tables import as_text

        if self.problem is not None:
            return f"{self.title}: {self.problem.line + ': ' if self.problem.line else ''}{self.problem.message}"
        return as_text(self.tables())

    def tables(self) -> list[Any]:
        """The same for a terminal; print it with rich. Empty where there is a problem."""
        from course.show.tables import rich_comparison, rich_sections

        if self.problem is not None:
            return []
        head = rich_comparison(self.title, self.predictions, self.remarks)
        return [*head, *rich_sections(self.predictions[YOURS])]


def profile(
    function: Callable[..., Any],
    *,
    machine: str | Machine | None = None,
    aot: bool = False,
    model_flops: float | None = None,
) -> Profile:
    """Where a step's time and memory would go, for a function as it stands in this kernel.

    Args:
        function: One of a chapter's functions; its name says which.
        machine: A machine or its name; the one that the function's time is judged on, if left out.
        aot: Whether to ask the deviceless GPU compiler too.
        model_flops: FLOPs that the model needs for the step on all devices, for the MFU.

    Raises:
        LookupError: No chapter has such a function, or no machine that name.
        ValueError: The machine has too few devices.
    """
    chapter, task = _find(getattr(function, "__name__", ""))
    where = machine_of(task, machine)
    return profile_function(chapter, task, function, _locate_live(function), where, aot=aot, model_flops=model_flops)


def profile_notebook(
    path: Path,
    chapter: str,
    name: str,
    *,
    machine: str | None = None,
    aot: bool = False,
    model_flops: float | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Profile a function of a notebook as it stands on disk; the rest as for ``profile``.

    Raises:
        IntakeError: It cannot be read.
    """
    task = load(chapter).task(name)
    where = machine_of(task, machine)
    with time_limit(TRACE_SECONDS):
        namespace, problems = run_cells(read_notebook(path).cells)
    function = find_function(task, namespace, problems)
    if isinstance(function, Problem):
        return _without(chapter, task, where, function)
    found = profile_function(
        chapter, task, function, locate_cell, where, aot=aot, model_flops=model_flops, progress=progress
    )
    return _without(chapter, task, where, explained(found.problem, problems)) if found.problem else found


def profile_function(
    chapter: str,
    task: Task,
    function: Callable[..., Any],
    locate: Locate,
    machine: Machine,
    *,
    aot: bool = False,
    model_flops: float | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Trace a function at its largest size and look at it beside the course's own; raises as ``profile`` does."""
    case, say = largest_case(task), progress or (lambda said: None)
    machine.require_fits(case.mesh)
    say(YOURS)
    found = look(task, function, locate, machine, aot=aot, model_flops=model_flops)
    if isinstance(found, Problem):
        return _without(chapter, task, machine, found)
    own, programs = found
    predictions, missing = {YOURS: own}, {}
    for which in (REFERENCE, NAIVE):
        say(which)
        other = _course(chapter, task, which, machine, aot, model_flops)
        if isinstance(other, Prediction):
            predictions[which] = other
        else:
            missing[which] = other
    return Profile(chapter, task.name, case.name, machine.name, predictions, missing, None, programs)


def predict_solution(
    chapter: str, name: str, machine: str | None = None, *, aot: bool = False, model_flops: float | None = None
) -> tuple[Prediction, dict[str, Program]]:
    """The course's own solution of a function on a machine, and its Programs by platform.

    Raises:
        LookupError: There is no such chapter, function, solution or machine.
        ValueError: The machine has too few devices.
        ProgramError: The solution cannot be simulated.
    """
    task = load(chapter).task(name)
    where = machine_of(task, machine)
    function = _solution(chapter, name)
    if isinstance(function, str):
        raise LookupError(function)
    found = look(task, function, _locate_file(function), where, aot=aot, model_flops=model_flops)
    if isinstance(found, Problem):
        raise ProgramError(f"{found.line}: {found.message}")
    return found


def look(
    task: Task,
    function: Callable[..., Any],
    locate: Locate,
    machine: Machine,
    *,
    aot: bool = False,
    model_flops: float | None = None,
) -> tuple[Prediction, dict[str, Program]] | Problem:
    """A function at its largest size through all lenses, and its Programs by platform; or what went wrong."""
    case = largest_case(task)
    machine.require_fits(case.mesh)
    with time_limit(TRACE_SECONDS):
        traced = trace_cases(task, function, [case], locate)
    if isinstance(traced, Problem):
        return traced
    programs = {"cpu": traced.programs[case.name]}
    try:
        if aot:
            with time_limit(TRACE_SECONDS):
                programs["cuda"] = trace(task, function, case, locate, platform="cuda")
        found = predict(
            programs["cpu"], machine, aot=aot, gpu_program=programs.get("cuda"), model_flops=model_flops, name=task.name
        )
    except ProgramError as error:
        return Problem("refused", str(error), traced.line)
    except TooLong as error:
        return Problem("limit_exceeded", f"{task.name} took longer than {error} to trace for GPUs", traced.line)
    return found, programs


def largest_case(task: Task) -> Case:
    """The realistic size, where the contract has one; else the case with most devices, the last of them.

    Raises:
        LookupError: The function returns plain data: there is no Program to look at.
    """
    if task.kind == "value":
        raise LookupError(f"{task.name} returns plain data and runs on no device: there is nothing to profile")
    if task.analysed:
        return task.analysed[0]
    return max(enumerate(task.cases), key=lambda entry: (math.prod(entry[1].mesh.values()), entry[0]))[1]


def machine_of(task: Task, given: str | Machine | None) -> Machine:
    """The machine that was named, else the one that the task's time is judged on; ``LookupError`` if there is none."""
    return given if isinstance(given, Machine) else find_machine(given or task.machine)


def _without(chapter: str, task: Task, machine: Machine, problem: Problem) -> Profile:
    return Profile(chapter, task.name, largest_case(task).name, machine.name, {}, {}, problem)


def _course(
    chapter: str, task: Task, which: str, machine: Machine, aot: bool, model_flops: float | None
) -> Prediction | str:
    """The reference's or the naive way's prediction, or why there is none."""
    function = _solution(chapter, task.name) if which == REFERENCE else _naive(chapter, task)
    if isinstance(function, str):
        return function
    found = look(task, function, _locate_file(function), machine, aot=aot, model_flops=model_flops)
    return found.message if isinstance(found, Problem) else found[0]


def _solution(chapter: str, name: str) -> Callable[..., Any] | str:
    return _of_module(f"solutions.{chapter}", lambda module: getattr(module, name))


def _naive(chapter: str, task: Task) -> Callable[..., Any] | str:
    if not task.naive:
        return "this function has no naive version to compare with"
    found = _of_module(f"autograder.mutants.{chapter}", lambda module: {m.name: m for m in module.MUTANTS})
    return found if isinstance(found, str) else found[task.naive].function


def _of_module(name: str, what: Callable[[Any], Any]) -> Any:
    """Something of a module that an installation for students may lack; then a sentence that says so."""
    try:
        return what(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return "not part of this installation: it comes when the chapter is released"
