"""``profile``: a function's timeline and memory on a machine, with the reference's and the naive baselines'."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from autograder.checking.judging import FromNotebook, exported, locate_file, trace_function
from autograder.checking.kernel import labels_of
from autograder.contract.task import Case, Task, find_task, load
from autograder.grading.inside.cells import locate_cell
from autograder.grading.inside.intake import read_notebook
from autograder.grading.inside.tracing import Problem
from autograder.learner.baselines import REFERENCE, solution, versions
from autograder.render import word_in_json
from course.machine import Machine
from course.predict import Prediction, described, predict, resolved
from course.program import Locate, Program, ProgramError

Progress = Callable[[str], None]
YOURS = "yours"


@dataclass(frozen=True)
class Profile:
    """The result of ``profile``: a picture in a notebook, tables elsewhere.

    Attributes:
        chapter, function: The function's chapter and name.
        case: The mesh and sizes it was traced with.
        machine: The machine's name.
        predictions: Predictions for ``yours``, ``reference`` and each naive baseline, by name, as far as available.
        missing: Why each other prediction is missing, by name.
        problem: Why there is no prediction for ``yours``.
        programs: Your Programs as exported: ``cpu``, and ``cuda`` for the GPU compiler.
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
        """Missing predictions with reasons."""
        return self.missing | (self.predictions[YOURS].remarks if self.predictions else {})

    def to_json(self) -> dict[str, Any]:
        """All data but the bars, as plain data."""
        return {
            "chapter": self.chapter,
            "function": self.function,
            "case": self.case,
            "machine": self.machine,
            "problem": self.problem and {**self.problem.to_json(), "verdict": word_in_json(self.problem.verdict)},
            "predictions": {name: prediction.to_json() for name, prediction in self.predictions.items()},
            "missing": self.missing,
        }

    def html(self) -> str:
        """Pictures and tables, or the problem."""
        from course.render.panels import comparison_html, problem_html

        if self.problem is not None:
            return problem_html(self.title, self.problem.message, self.problem.line)
        return comparison_html(self.title, self.predictions, self.remarks, reference=REFERENCE)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self.html()}

    def __repr__(self) -> str:
        from course.render.tables import as_text

        if self.problem is None:
            return as_text(self.tables())
        where = f"{self.problem.line}: " if self.problem.line else ""
        return f"{self.title}: {where}{self.problem.message}"

    def tables(self) -> list[Any]:
        """The profile for a terminal; print it with rich. Empty if there is a problem."""
        from course.render.tables import rich_comparison, rich_sections

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
    """Predict a step's time and memory use, for a function as defined in this kernel.

    Args:
        function: One of a chapter's functions, identified by its name.
        machine: A machine or its name; by default the one on which the function's time is judged.
        aot: Also run the deviceless GPU compiler.
        model_flops: FLOPs that the model needs for the step on all devices, to compute the MFU.

    Raises:
        TypeError: It is not a function, or the machine is neither a machine nor its name.
        LookupError: No chapter has such a function, or no machine has that name.
        ValueError: The machine has too few devices, or ``model_flops`` is not positive.
    """
    if not callable(function):
        raise TypeError(f"profile takes one of your functions, as in profile(fsdp_loss), not {described(function)}")
    chapter, task = find_task(getattr(function, "__name__", ""))
    target_machine = machine_of(task, machine)
    return profile_function(
        chapter, task, function, labels_of(function).get, target_machine, aot=aot, model_flops=model_flops
    )


def profile_notebook(
    path: Path, chapter: str, name: str, *, machine: str | Machine | None = None, **options: Any
) -> Profile:
    """Profile a function of a notebook on disk; other arguments as for ``profile_function``.

    Raises:
        IntakeError: The notebook cannot be read.
    """
    task = load(chapter).task(name)
    target_machine = machine_of(task, machine)
    return profile_function(
        chapter, task, FromNotebook(chapter, read_notebook(path)), locate_cell, target_machine, **options
    )


def profile_function(
    chapter: str,
    task: Task,
    function: Any,
    locate: Locate,
    machine: Machine,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Profile:
    """Analyse a function at its largest size, and the course's own; raises as ``profile``.

    ``options`` are those of ``look``.
    """
    case, say = largest_case(task), progress or (lambda text: None)
    function_profile = Profile(chapter, task.name, case.name, machine.name, {}, {})
    for name, version in {YOURS: function, **versions(chapter, task)}.items():
        say(name)
        if isinstance(version, str):
            function_profile.missing[name] = version
            continue
        locate_version = locate if name == YOURS else locate_file(version)
        result = look(task, version, locate_version, machine, **options)
        if not isinstance(result, Problem):
            function_profile.predictions[name] = result[0]
            function_profile.programs.update(result[1] if name == YOURS else {})
        elif name == YOURS:
            return replace(function_profile, problem=result)
        else:
            function_profile.missing[name] = result.message
    return function_profile


def predict_solution(
    chapter: str, name: str, machine: str | Machine | None = None, **options: Any
) -> tuple[Prediction, dict[str, Program]]:
    """Predict the course's own solution of a function; also return its Programs by platform.

    ``options`` are those of ``look``.

    Raises:
        LookupError: There is no such chapter, function, solution or machine.
        ValueError: The machine has too few devices.
        ProgramError: The solution cannot be simulated.
    """
    task = load(chapter).task(name)
    target_machine = machine_of(task, machine)
    function = solution(chapter, name)
    if isinstance(function, str):
        raise LookupError(function)
    result = look(task, function, locate_file(function), target_machine, **options)
    if isinstance(result, Problem):
        raise ProgramError(result.message, result.line)
    return result


def look(
    task: Task, function: Any, locate: Locate, machine: Machine, *, aot: bool = False, model_flops: float | None = None
) -> tuple[Prediction, dict[str, Program]] | Problem:
    """Run all analyses on a function at its largest size; return them with its Programs by platform, or the problem."""
    case = largest_case(task)
    machine.require_fits(case.mesh)
    if isinstance(function, FromNotebook):
        function.trace([(task, [case], platform) for platform in ("cpu", "cuda")[: 1 + aot]])
    traced = trace_function(task, function, [case], locate)
    if isinstance(traced, Problem):
        return traced
    programs = {"cpu": traced.programs[case.name]}
    try:
        if aot:
            programs["cuda"] = exported(task, function, case, locate, "cuda")
        gpu: dict[str, Any] = {"aot": aot, "gpu_program": programs.get("cuda")}
        return predict(programs["cpu"], machine, **gpu, model_flops=model_flops, name=task.name), programs
    except ProgramError as error:
        return Problem("refused", error.message, error.line or traced.line)


def largest_case(task: Task) -> Case:
    """The realistic size, if the contract has one; else the case with most devices, most axes, and largest inputs.

    Raises:
        LookupError: The function returns plain data: there is no Program to analyse.
    """
    if task.kind == "value":
        raise LookupError(f"{task.name} returns plain data and runs on no device: there is nothing to profile")
    if task.at_scale:
        return task.at_scale[0]

    def size(case: Case) -> tuple[int, int, int]:
        inputs = jax.tree.leaves(task.input_shapes(case))
        axes = sum(number > 1 for number in case.mesh.values())
        return math.prod(case.mesh.values()), axes, sum(math.prod(leaf.shape) for leaf in inputs)

    return max(task.cases, key=size)


def machine_of(task: Task, requested: str | Machine | None) -> Machine:
    """The machine given, else the one on which the task's time is judged; ``LookupError`` if there is none."""
    return resolved(task.machine if requested is None else requested)
