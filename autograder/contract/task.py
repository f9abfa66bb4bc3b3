"""What an exercise is: the cases it is judged on, its oracle, and the facts that must hold.

A chapter's contract lies in ``autograder/chapters/<chapter>.py`` as ``CONTRACT``. It never imports a solution: an
oracle is a single-device computation, and limits come from closed forms or from measured references.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autograder.contract.verdict import Fact
from autograder.contract.wrapping import Case, Mismatch, Wrapped, Wrapping, trace
from course.curriculum import chapter as find_chapter
from course.program import Costs, Leaf, Memory, Timeline
from course.program.program import path_name

CHAPTERS = Path(__file__).resolve().parents[1] / "chapters"
__all__ = ["Case", "Contract", "Evidence", "Mismatch", "Task", "Variant", "Wrapped", "Wrapping", "load", "named",
           "references", "trace"]  # fmt: skip


@dataclass(frozen=True)
class Evidence:
    """Everything that was found out about one Program, for the facts to look at.

    ``measured`` and ``expected`` are empty, and ``difference`` may not be, for a Program that is only analysed, and
    only such a one has a ``timeline``. ``secret`` says that nobody may learn a value of ``measured`` or ``expected``:
    facts then say how far off a result is, and where. ``spent`` is how many seconds of the timeline go into
    communication over ``Task.spent_on``. ``form`` says what the Program does, for finding others that do the same.
    """

    case: Case
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    measured: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    costs: Costs
    memory: Memory
    line: str = ""
    difference: str = ""
    timeline: Timeline | None = None
    secret: bool = False
    spent: float | None = None
    form: str = ""


# Sizes that grow at once in a case that is stretched: how much there is of the data, and two kinds of widths.
_TOGETHER = (
    ("rows", "seq", "max_seq", "chunk"),
    ("width", "num_heads", "head_dim", "features", "d_in"),
    ("hidden", "vocab", "outputs", "d_out"),
)


def _listed(sizes: Mapping[str, int]) -> str:
    return " and ".join(f"{name} {size:,}" for name, size in sizes.items())


@dataclass(frozen=True)
class Variant:
    """Something else that a course may ask of a function, so that another course's answer does not fit.

    Attributes:
        name: What ``check`` is told.
        sentence: What the released notebook says; it names what is usual.
        sizes: What it sets in every case.
    """

    name: str
    sentence: str
    sizes: dict[str, int]

    def of(self, case: Case) -> Case:
        """The case as this variant has it."""
        return replace(case, sizes={**case.sizes, **self.sizes})


# --8<-- [start:task]
@dataclass(frozen=True)
class Task:
    """One function of a chapter.

    Attributes:
        wrapping: Its name and signature, and how it is made into something that can be exported.
        kind: ``local`` (runs inside ``shard_map``), ``step``, ``transform`` or ``value``.
        points: What it is worth.
        cases: The meshes and sizes that it is run on.
        unseen: Draws one more case, for official grading.
        draw: ``(generator, case) ->`` arrays in trees like ``Wrapped.inputs``.
        oracle: ``(inputs, case) ->`` what ``Wrapped.function`` must return, from a single device.
        facts: What is judged, given the evidence of every case and that of ``analysed``.
        analysed: A realistic size that only the lenses look at, and the name of the case that it enlarges.
        stretches: Sizes for ``stretched``, where those of ``analysed`` would take too long or split other leaves.
        naive: The mutant that shows what the naive way costs in memory.
        slow: The mutant that shows what the naive way costs in time.
        machine: What the time of ``analysed`` is predicted for.
        data_branches: Whether the Program may branch on data: such a branch is priced as its dearer side.
        compiled_exposed: How much of the naive version's exposed communication the compiled schedule may have, which
            ``check --aot`` gives as advice; 0 where it says nothing.
        spent_on: Mesh axes whose communication is timed apart: how much longer a step of ``analysed`` takes with it
            than it would if it took no time.
        given: What the wrapper is given of a case and must not compute itself (``Case.given``), as plain data.
        variants: What a course may ask instead; without one, the function is what the public notebook says.
        varies_with: Functions of the same word here are asked for the same one of their variants.
    """

    wrapping: Wrapping
    kind: str
    points: float
    cases: tuple[Case, ...]
    unseen: Callable[[np.random.Generator], Case]
    draw: Callable[[np.random.Generator, Case], dict[str, Any]]
    oracle: Callable[[dict[str, Any], Case], dict[str, Any]]
    facts: Callable[[list[Evidence], Evidence | None, dict[str, Any]], list[Fact]]
    analysed: tuple[Case, str] | None = None
    stretches: tuple[Mapping[str, int], ...] = ()
    naive: str = ""
    slow: str = ""
    machine: str = "8xH100"
    data_branches: bool = False
    compiled_exposed: float = 0
    spent_on: tuple[str, ...] = ()
    given: Callable[[Case], dict[str, Any]] | None = None
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

    def stretched(self) -> tuple[Case, ...]:
        """Cases in which some sizes are those of ``analysed``, or as close as can be run, and all others small.

        What a program does otherwise from some size on shows in one of them: its values are wrong there, or no dim of
        it is as large in ``analysed``.
        """
        if self.analysed is None:
            return ()
        large = self.analysed[0]
        small = next(case for case in self.cases if case.name == self.analysed[1])
        grown = {name: size for name, size in large.sizes.items() if size > small.sizes.get(name, 0)}
        every = self.stretches or [{name: grown[name] for name in group if name in grown} for group in _TOGETHER]
        return tuple(
            Case(f"{small.name}, but {_listed(sizes)}", small.mesh, {**small.sizes, **sizes})
            for sizes in every
            if sizes
        )

    def complete(self, case: Case) -> Case:
        """The case with all that its wrapper is given."""
        return replace(case, given=self.given(case)) if self.given else case

    def wrap(self, function: Callable[..., Any], case: Case) -> Wrapped:
        """The function on a case, ready to be exported."""
        return self.wrapping.wrap(function, self.complete(case))


# --8<-- [end:task]


@dataclass(frozen=True)
class Contract:
    """The tasks of a chapter, in the notebook's order, and what its written question is worth.

    ``read`` says where the course's pages explain what a fact is about: page and heading, by the fact's name.
    """

    chapter: str
    tasks: tuple[Task, ...]
    question_points: float
    read: Mapping[str, tuple[str, str]] = field(default_factory=dict)

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
