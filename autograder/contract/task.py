"""The definition of an exercise: the cases it is judged on, its oracle, and the facts that must hold.

A chapter's contract is ``CONTRACT`` in ``autograder/chapters/<chapter>``. It never imports a solution: an oracle is a
single-device computation, and limits come from closed forms or from measured references.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from autograder.contract.case import Case
from autograder.contract.sentence import About
from autograder.contract.verdict import LIMIT_EXCEEDED, REFUSED, Fact, Kind, Result
from autograder.contract.wrapping import Wrapped, Wrapping, trace
from course.curriculum import CHAPTERS as CURRICULUM
from course.curriculum import chapter as find_chapter
from course.curriculum import contract_folder, is_own, own_page
from course.program import Costs, Leaf, Memory, Timeline
from course.program.program import path_name

__all__ = ["Case", "Contract", "Evidence", "Task", "TaskEvidence", "Variant", "load", "named", "references", "trace"]


@dataclass(frozen=True)
class Evidence:
    """All evidence about one Program, from which facts are computed.

    Attributes:
        case: The case it was exported for.
        inputs: Its signature.
        outputs: Its outputs.
        measured: Its results by name; empty for a Program that is only analysed.
        expected: The oracle's results; empty for a Program that is only analysed.
        costs: FLOPs, products and collectives of one device.
        memory: Memory of one device.
        line: The line that defines the function.
        structural_mismatch: How it differs from the small Program beyond sizes; only for an analysed Program.
        timeline: Its predicted step; only for an analysed Program.
        secret: True if ``measured`` and ``expected`` must stay hidden: facts then give only the size of an error.
        exposed: Seconds that communication over ``Task.exposed_axes`` adds to the timeline.
        form: A canonical form of the Program, to find others equivalent to it.
        drawn: The inputs by name, to locate them in ``measured``; empty for a Program that is only analysed.
        squeezed: Axes whose dims, of size 1 on each device, the function does not see.
    """

    case: Case[Any]
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    measured: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    costs: Costs
    memory: Memory
    line: str = ""
    structural_mismatch: str = ""
    timeline: Timeline | None = None
    secret: bool = False
    exposed: float | None = None
    form: str = ""
    drawn: Mapping[str, np.ndarray] = field(default_factory=dict)
    squeezed: tuple[str, ...] = ()


class ChapterError(Exception):
    """A course's own chapter cannot be used; the message gives the folder and the cause."""


class ChoiceError(LookupError):
    """A notebook or a course asks for a variant or a limit that the function does not have."""


@dataclass(frozen=True)
class TaskEvidence:
    """The inputs from which a task's facts are computed.

    Attributes:
        cases: Evidence of every case that was run.
        at_scale: Evidence at the realistic size; None if a check skips it.
        references: Figures of the reference and the naive baselines at scale, with this jax; may be empty.
        factors: A course's factors on the limits of facts, by the fact's name.
        adjustable: Facts whose limit a course may change, filled while facts are computed.
    """

    cases: list[Evidence]
    at_scale: Evidence | None
    references: dict[str, Any]
    factors: Mapping[str, float] = field(default_factory=dict)
    adjustable: set[str] = field(default_factory=set)

    def factor(self, name: str) -> float:
        """The course's factor on a fact's limit; 1 if it keeps that limit."""
        self.adjustable.add(name)
        return self.factors.get(name, 1.0)

    @property
    def programs(self) -> list[Evidence]:
        """Every analysed Program: those that were run, and the one at scale."""
        return [*self.cases, self.at_scale] if self.at_scale else self.cases


# Groups of sizes that grow together in a stretched case: the amount of data, and two kinds of widths.
_TOGETHER = (
    ("rows", "seq", "max_seq", "chunk"),
    ("width", "num_heads", "head_dim", "features", "d_in"),
    ("hidden", "vocab", "outputs", "d_out"),
)


@dataclass(frozen=True)
class Variant:
    """A modified requirement for a function, chosen per course, so that another course's answer does not pass.

    Attributes:
        name: The name passed to ``check``.
        sentence: The sentence in the released notebook; it names the default.
        sizes: The sizes it sets in every case.
    """

    name: str
    sentence: str
    sizes: Mapping[str, Any]

    def of(self, case: Case[Any]) -> Case[Any]:
        """Return the case with this variant applied."""
        return case.with_sizes(**self.sizes)


# The pages that explain verdicts without facts.
ABOUT_VERDICTS = {REFUSED: ("lenses", "What is refused"), LIMIT_EXCEEDED: ("grading", "What the sandbox does")}


# --8<-- [start:task]
@dataclass(frozen=True)
class Task:
    """One function of a chapter.

    Attributes:
        wrapping: Its name and signature, and how to make it exportable.
        points: Its points.
        core_facts: Facts the exercise is about, besides correct results: missing one leaves at most half the points.
        cases: The meshes and sizes it runs on.
        unseen: Draws one more case, for official grading.
        draw: ``(generator, case) ->`` arrays in trees like ``Wrapped.inputs``.
        oracle: ``(inputs, case) ->`` the expected result of ``Wrapped.function``, from a single device.
        facts: The facts that are judged.
        at_scale: A realistic size that is only analysed, and the name of the case that it enlarges.
        stretches: Sizes for ``stretched``, if those of ``at_scale`` would take too long or split other leaves.
        naive_memory: The mutant that demonstrates the naive baseline's memory use.
        naive_time: The mutant that demonstrates the naive baseline's time.
        machine: The machine for which the time of ``at_scale`` is predicted.
        kind: ``value`` if it returns plain data, ``transform`` if it takes a function.
        data_branches: True if the Program may branch on data; the more expensive branch then counts.
        compiled_exposed: Fraction of the naive baseline's exposed communication allowed in the compiled schedule, which
            ``check --aot`` reports as advice; 0 for no such advice.
        exposed_axes: Mesh axes whose communication is timed separately: the time it adds to a step of ``at_scale``,
            compared with a step in which it takes no time.
        given: Plain data of a case that the wrapper needs and must not compute itself (``Case.given``).
        variants: The variants a course may ask for; without one, the public notebook's description applies.
        varies_with: Functions with the same group name here get the same variant.
    """

    wrapping: Wrapping
    points: float
    cases: tuple[Case[Any], ...]
    unseen: Callable[[np.random.Generator], Case[Any]]
    draw: Callable[[np.random.Generator, Case[Any]], dict[str, Any]]
    oracle: Callable[[dict[str, Any], Case[Any]], dict[str, Any]]
    facts: Callable[[TaskEvidence], list[Fact]]
    core_facts: tuple[str, ...] = ()
    at_scale: tuple[Case[Any], str] | None = None
    stretches: tuple[Mapping[str, Any], ...] = ()
    naive_memory: str = ""
    naive_time: str = ""
    machine: str = "8xH100"
    kind: Literal["program", "transform", "value"] = "program"
    data_branches: bool = False
    compiled_exposed: float = 0
    exposed_axes: tuple[str, ...] = ()
    given: Callable[[Case[Any]], dict[str, Any]] | None = None
    variants: tuple[Variant, ...] = ()
    varies_with: str = ""

    @property
    def name(self) -> str:
        return self.wrapping.name

    @property
    def signature(self) -> str:
        return self.wrapping.signature

    def variant(self, name: str) -> Variant | None:
        """The variant with that name; None for an empty name.

        Raises:
            ChoiceError: There is no such variant.
        """
        variant = next((variant for variant in self.variants if variant.name == name), None)
        if name and variant is None:
            known = ", ".join(variant.name for variant in self.variants) or "none"
            raise ChoiceError(f"{self.name} has no variant {name!r}; it has: {known}. Its `check` cell asks for it")
        return variant

    def stretched(self) -> tuple[Case[Any], ...]:
        """Cases in which some sizes are those of ``at_scale``, or as close as can be run, and all others are small.

        They catch a program that behaves differently above some size: either its values are wrong in one of them, or no
        dim is as large in ``at_scale``.
        """
        if self.at_scale is None:
            return ()
        large = self.at_scale[0].sizes
        small = next(case for case in self.cases if case.name == self.at_scale[1])
        grown = {
            name: getattr(large, name)
            for name in (entry.name for entry in fields(large))
            if isinstance(getattr(large, name), int) and getattr(large, name) > getattr(small.sizes, name)
        }
        groups = self.stretches or [{name: grown[name] for name in group if name in grown} for group in _TOGETHER]
        named = {" and ".join(f"{name} {size:,}" for name, size in sizes.items()): sizes for sizes in groups if sizes}
        return tuple(
            replace(small, name=f"{small.name}, but {text}", sizes=small.sizes.replace(**sizes), quick=False)
            for text, sizes in named.items()
        )

    def complete(self, case: Case[Any]) -> Case[Any]:
        """Return the case with all data its wrapper needs."""
        return replace(case, given=self.given(case)) if self.given else case

    def wrap(self, function: Callable[..., Any], case: Case[Any]) -> Wrapped:
        """Wrap the function for a case, ready for export."""
        return self.wrapping.wrap(function, self.complete(case))

    def input_shapes(self, case: Case[Any]) -> dict[str, Any]:
        """Shapes of the inputs of a case, by name."""
        return self.wrapping.input_shapes(self.complete(case))


# --8<-- [end:task]


@dataclass(frozen=True)
class Contract:
    """The tasks of a chapter, in the notebook's order, and the points of its written question.

    ``explained_in`` gives the page and heading of the course's pages that explain a fact, by the fact's name, or by
    ``function.fact`` where one function needs another page.
    """

    chapter: str
    tasks: tuple[Task, ...]
    question_points: float
    explained_in: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def places(self, result: Result) -> list[tuple[str, str]]:
        """Pages and headings that explain the failed facts, without repetition, in order of the facts.

        An error, or a result of another form, is explained at the same place as the function's values.
        """
        known = {**self.explained_in, **ABOUT_VERDICTS}
        elsewhere = {About.FIRST_LOSS, About.WRONG_GRADIENTS}  # other facts say where to begin
        missed = [fact for fact in result.missed if not elsewhere & {*fact.about}]
        names = [fact.name for fact in missed if fact.kind != Kind.FORM] or ["values"] * result.unjudged
        places = [known.get(f"{result.name}.{name}", known.get(name)) for name in [*names, result.verdict]]
        pageless = self.chapter if is_own(self.chapter) and not own_page(self.chapter) else ""  # it has no page
        return list(dict.fromkeys(place for place in places if place and place[0] != pageless))

    def task(self, name: str) -> Task:
        """The task with that name.

        Raises:
            LookupError: There is none; the message lists those that exist.
        """
        for task in self.tasks:
            if task.name == name:
                return task
        known = ", ".join(task.name for task in self.tasks)
        raise LookupError(f"chapter {self.chapter} has no function {name!r}; it has: {known}")


@cache
def load(chapter: str) -> Contract:
    """The contract of a chapter.

    Raises:
        LookupError: No chapter has that name.
        ChapterError: The files of a course's own chapter cannot be used.
    """
    find_chapter(chapter)
    try:
        return importlib.import_module(f"autograder.chapters.{chapter}").CONTRACT
    except Exception as error:
        if not is_own(chapter):
            raise
        why = f"{type(error).__name__}: {error}"
        raise ChapterError(f"{contract_folder(chapter)} cannot be imported: {why}; correct it there") from error


def site_command(page: str, heading: str) -> str:
    """The command that opens the course's pages at a heading."""
    return f'meshcraft site {page} "{heading}"'


def every_task() -> Mapping[str, tuple[str, Task]]:
    """Each function of the course by name, with its chapter and its task."""
    return {task.name: (entry.name, task) for entry in CURRICULUM for task in load(entry.name).tasks}


def find_task(name: str) -> tuple[str, Task]:
    """The chapter and task of the function with that name.

    Raises:
        LookupError: No chapter has such a function.
    """
    tasks = every_task()
    if name not in tasks:
        raise LookupError(f"no chapter has a function called {name!r}; check knows: {', '.join(tasks)}")
    return tasks[name]


def contract_files(chapter: str) -> list[Path]:
    """The files that determine a chapter's verdicts, besides shared code: its modules and its references."""
    folder = contract_folder(chapter)
    excluded = ("mutants", "alternatives")
    modules = (path for path in folder.rglob("*.py") if not path.name.endswith("_test.py"))
    files = [path for path in modules if path.relative_to(folder).with_suffix("").parts[0] not in excluded]
    return sorted([*files, *folder.glob("references.json")])


@cache
def references(chapter: str) -> dict[str, Any]:
    """Figures of each function's reference and naive baseline with the installed jax; may be empty."""
    path = contract_folder(chapter) / "references.json"
    by_version = json.loads(path.read_text()) if path.exists() else {}
    return by_version.get(jax.__version__, {})


def named(trees: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays by their names in a Program's signature."""
    return {
        path_name(name, path): np.asarray(leaf)
        for name, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
