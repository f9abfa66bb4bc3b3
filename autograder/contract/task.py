"""What an exercise is: the cases it is judged on, its oracle, and the facts that must hold.

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
from autograder.contract.verdict import LIMIT_EXCEEDED, REFUSED, Fact, Kind, Result
from autograder.contract.wrapping import Wrapped, Wrapping, trace
from course.curriculum import CHAPTERS as CURRICULUM
from course.curriculum import chapter as find_chapter
from course.program import Costs, Leaf, Memory, Timeline
from course.program.program import path_name

CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"
__all__ = ["Case", "Contract", "Evidence", "Judged", "Task", "Variant", "load", "named", "references", "trace"]


@dataclass(frozen=True)
class Evidence:
    """Everything that is known about one Program, for the facts to look at.

    Attributes:
        case: What it was exported for.
        inputs: Its signature.
        outputs: What it returns.
        measured: Its results by name; empty for a Program that is only analysed.
        expected: What the oracle gives; empty for a Program that is only analysed.
        costs: FLOPs, products and collectives of one device.
        memory: Of one device.
        line: Where the function is defined.
        structural_mismatch: How it differs from the small Program in more than sizes; only of one that is analysed.
        timeline: Its predicted step; only of one that is analysed.
        secret: Nobody may learn a value of ``measured`` or ``expected``: facts then say how far off a result is.
        exposed: Seconds of the timeline that communication over ``Task.exposed_axes`` adds.
        form: What the Program does, for finding others that do the same.
        drawn: The inputs by name, for finding them in ``measured``; empty for a Program that is only analysed.
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


@dataclass(frozen=True)
class Judged:
    """What the facts of a task are made of.

    Attributes:
        cases: Evidence of every case that was run.
        at_scale: Evidence of the realistic size; None where a check leaves it out.
        references: What the reference and the naive baselines measure at scale, with this jax; may be empty.
    """

    cases: list[Evidence]
    at_scale: Evidence | None
    references: dict[str, Any]

    @property
    def all(self) -> list[Evidence]:
        """Every Program that was analysed: those that were run, and the one at scale."""
        return [*self.cases, self.at_scale] if self.at_scale else self.cases


# Sizes that grow at once in a case that is stretched: how much there is of the data, and two kinds of widths.
_TOGETHER = (
    ("rows", "seq", "max_seq", "chunk"),
    ("width", "num_heads", "head_dim", "features", "d_in"),
    ("hidden", "vocab", "outputs", "d_out"),
)


@dataclass(frozen=True)
class Variant:
    """Something else that a course may ask of a function, so that another course's answer does not fit.

    Attributes:
        name: What ``check`` is given.
        sentence: What the released notebook says; it names what is usual.
        sizes: What it sets in every case.
    """

    name: str
    sentence: str
    sizes: Mapping[str, Any]

    def of(self, case: Case[Any]) -> Case[Any]:
        """The case as this variant has it."""
        return case.but(**self.sizes)


# Where pages explain verdicts that no fact explains.
ABOUT_VERDICTS = {REFUSED: ("lenses", "What is refused"), LIMIT_EXCEEDED: ("grading", "What the sandbox does")}


# --8<-- [start:task]
@dataclass(frozen=True)
class Task:
    """One function of a chapter.

    Attributes:
        wrapping: Its name and signature, and how it is made into something that can be exported.
        points: What it is worth.
        point: Facts that the exercise is about, besides right results: a function that misses one earns at most half.
        cases: The meshes and sizes that it is run on.
        unseen: Draws one more case, for official grading.
        draw: ``(generator, case) ->`` arrays in trees like ``Wrapped.inputs``.
        oracle: ``(inputs, case) ->`` what ``Wrapped.function`` must return, from a single device.
        facts: What is judged.
        at_scale: A realistic size that is only analysed, and the name of the case that it enlarges.
        stretches: Sizes for ``stretched``, where those of ``at_scale`` would take too long or split other leaves.
        naive_memory: The mutant that shows what the naive baseline costs in memory.
        naive_time: The mutant that shows what the naive baseline costs in time.
        machine: What the time of ``at_scale`` is predicted for.
        kind: ``value`` where it returns plain data, ``transform`` where it takes a function.
        data_branches: Whether the Program may branch on data: the more expensive branch is what counts.
        compiled_exposed: How much of the naive baseline's exposed communication the compiled schedule may have, which
            ``check --aot`` gives as advice; 0 where it says nothing.
        exposed_axes: Mesh axes whose communication is timed apart: how much longer a step of ``at_scale`` takes with
            it than it would if it took no time.
        given: What the wrapper is given of a case and must not compute itself (``Case.given``), as plain data.
        variants: What a course may ask instead; without one, the function is what the public notebook says.
        varies_with: Functions of the same word here are asked for the same one of their variants.
    """

    wrapping: Wrapping
    points: float
    cases: tuple[Case[Any], ...]
    unseen: Callable[[np.random.Generator], Case[Any]]
    draw: Callable[[np.random.Generator, Case[Any]], dict[str, Any]]
    oracle: Callable[[dict[str, Any], Case[Any]], dict[str, Any]]
    facts: Callable[[Judged], list[Fact]]
    point: tuple[str, ...] = ()
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
        """The variant of that name; None for none.

        Raises:
            LookupError: There is no such variant.
        """
        found = next((variant for variant in self.variants if variant.name == name), None)
        if name and found is None:
            known = ", ".join(variant.name for variant in self.variants) or "none"
            raise LookupError(f"{self.name} has no variant {name!r}; it has: {known}. The notebook says which is asked")
        return found

    def stretched(self) -> tuple[Case[Any], ...]:
        """Cases in which some sizes are those of ``at_scale``, or as close as can be run, and all others small.

        What a program does otherwise from some size on shows in one of them: its values are wrong there, or no dim of
        it is as large in ``at_scale``.
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
        every = self.stretches or [{name: grown[name] for name in group if name in grown} for group in _TOGETHER]
        named = {" and ".join(f"{name} {size:,}" for name, size in sizes.items()): sizes for sizes in every if sizes}
        return tuple(
            replace(small, name=f"{small.name}, but {text}", sizes=small.sizes.but(**sizes), quick=False)
            for text, sizes in named.items()
        )

    def complete(self, case: Case[Any]) -> Case[Any]:
        """The case with all that its wrapper is given."""
        return replace(case, given=self.given(case)) if self.given else case

    def wrap(self, function: Callable[..., Any], case: Case[Any]) -> Wrapped:
        """The function on a case, ready to be exported."""
        return self.wrapping.wrap(function, self.complete(case))


# --8<-- [end:task]


@dataclass(frozen=True)
class Contract:
    """The tasks of a chapter, in the notebook's order, and what its written question is worth.

    ``read`` says where the course's pages explain what a fact is about: page and heading, by the fact's name, or by
    ``function: fact`` where one function's is explained elsewhere.
    """

    chapter: str
    tasks: tuple[Task, ...]
    question_points: float
    read: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def places(self, result: Result) -> list[tuple[str, str]]:
        """Pages and headings that explain what fell short, each once, the first facts first."""
        known = {**self.read, **ABOUT_VERDICTS}
        names = [fact.name for fact in result.missed if fact.kind != Kind.FORM]
        own = [name if (name := f"{result.name}: {fact}") in known else fact for fact in [*names, result.verdict]]
        return list(dict.fromkeys(known[name] for name in own if name in known))

    def task(self, name: str) -> Task:
        """The task of that name.

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
    """
    find_chapter(chapter)
    return importlib.import_module(f"autograder.chapters.{chapter}").CONTRACT


def site_command(page: str, heading: str) -> str:
    """What opens the course's pages at a heading."""
    return f'meshcraft site {page} "{heading}"'


def every_task() -> Mapping[str, tuple[str, Task]]:
    """Each function of the course by name: its chapter and its task."""
    return {task.name: (entry.name, task) for entry in CURRICULUM for task in load(entry.name).tasks}


def find_task(name: str) -> tuple[str, Task]:
    """The chapter and task that a function's name belongs to.

    Raises:
        LookupError: No chapter has such a function.
    """
    every = every_task()
    if name not in every:
        raise LookupError(f"no chapter has a function called {name!r}; check knows: {', '.join(every)}")
    return every[name]


def contract_files(chapter: str) -> list[Path]:
    """What a chapter's verdicts follow from, besides what all chapters share: its modules and its references."""
    folder = CHAPTERS / chapter
    beside = ("mutants", "alternatives")
    modules = (path for path in folder.rglob("*.py") if not path.name.endswith("_test.py"))
    found = [path for path in modules if path.relative_to(folder).parts[0] not in beside]
    return sorted([*found, *folder.glob("references.json")])


@cache
def references(chapter: str) -> dict[str, Any]:
    """What the reference and the naive version of each function measure with the installed jax; may be empty."""
    path = CHAPTERS / chapter / "references.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    return every.get(jax.__version__, {})


def named(trees: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays by the names that a Program's signature gives them."""
    return {
        path_name(name, path): np.asarray(leaf)
        for name, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
