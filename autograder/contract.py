"""What an exercise is: the cases it is judged on, its oracle, and the facts that must hold.

A chapter's contract lies in ``autograder/chapters/<chapter>.py`` as ``CONTRACT``. It never imports a solution: an
oracle is a single-device computation, and limits come from closed forms or from measured references.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from autograder.verdict import Fact
from course.curriculum import chapter as find_chapter
from course.program import Costs, Leaf, Locate, Memory, Program, Timeline, export
from course.program.program import path_name

HERE = Path(__file__).parent
REFERENCES = HERE / "references"
# What a contract may use of the autograder, and what is mounted beside it in the sandbox.
JUDGED_BY = ("answers", "cases", "contract", "facts", "forms", "limits", "verdict")


class Mismatch(Exception):
    """The function ran and gave something of another form than its contract says; the message is for the learner."""


@dataclass(frozen=True)
class Case:
    """A mesh and the sizes of everything that a function is given on it.

    Attributes:
        name: What a learner reads: ``data=8``.
        mesh: Axis sizes by name.
        sizes: Every other size, threshold and choice by name; the task's functions know what they mean.
        quick: Whether a plain ``check`` includes it.
    """

    name: str
    mesh: dict[str, int]
    sizes: dict[str, int]
    quick: bool = False

    @property
    def mesh_text(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())


@dataclass(frozen=True)
class Wrapped:
    """A learner's function made into something that can be exported: see ``course.program.export``.

    ``inputs`` holds trees of shapes; ``out_specs`` may be a callable that is asked after tracing.
    """

    function: Callable[..., dict[str, Any]]
    inputs: dict[str, Any]
    in_specs: dict[str, Any]
    out_specs: dict[str, Any] | Callable[[], dict[str, Any]]
    roles: dict[str, str] = field(default_factory=dict)
    donate: tuple[str, ...] = ()


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


# --8<-- [start:task]
@dataclass(frozen=True)
class Task:
    """One function of a chapter.

    Attributes:
        name: The function's name.
        kind: ``local`` (runs inside ``shard_map``), ``step``, ``transform`` or ``value``.
        signature: Its parameters as written in the stub, ``(params, axis_name, min_size)``.
        points: What it is worth.
        cases: The meshes and sizes that it is run on.
        unseen: Draws one more case, for official grading.
        wrap: ``(function, case) -> Wrapped``.
        draw: ``(generator, case) ->`` arrays in trees like ``Wrapped.inputs``.
        oracle: ``(inputs, case) ->`` what ``Wrapped.function`` must return, from a single device.
        facts: What is judged, given the evidence of every case and that of ``analysed``.
        analysed: A realistic size that only the lenses look at, and the name of the case that it enlarges.
        naive: The mutant that shows what the naive way costs in memory.
        slow: The mutant that shows what the naive way costs in time.
        machine: What the time of ``analysed`` is predicted for.
        data_branches: Whether the Program may branch on data: such a branch is priced as its dearer side.
        compiled_exposed: How much of the naive version's exposed communication the compiled schedule may have, which
            ``check --aot`` gives as advice; 0 where it says nothing.
        spent_on: Mesh axes whose communication is timed apart: how much longer a step of ``analysed`` takes with it
            than it would if it took no time.
    """

    name: str
    kind: str
    signature: str
    points: float
    cases: tuple[Case, ...]
    unseen: Callable[[np.random.Generator], Case]
    wrap: Callable[[Callable[..., Any], Case], Wrapped]
    draw: Callable[[np.random.Generator, Case], dict[str, Any]]
    oracle: Callable[[dict[str, Any], Case], dict[str, Any]]
    facts: Callable[[list[Evidence], Evidence | None, dict[str, Any]], list[Fact]]
    analysed: tuple[Case, str] | None = None
    naive: str = ""
    slow: str = ""
    machine: str = "8xH100"
    data_branches: bool = False
    compiled_exposed: float = 0
    spent_on: tuple[str, ...] = ()


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
    """The modules of a chapter's contract: one file of the chapter's name, or a package."""
    folder = HERE / "chapters"
    found = [folder / f"{chapter}.py", *(folder / chapter).rglob("*.py")]
    return sorted(path for path in found if path.is_file() and not path.name.endswith("_test.py"))


@cache
def references(chapter: str) -> dict[str, Any]:
    """What the reference and the naive version of each function measure with the installed jax; may be empty."""
    path = REFERENCES / f"{chapter}.json"
    every = json.loads(path.read_text()) if path.exists() else {}
    return every.get(jax.__version__, {})


def trace(task: Task, function: Callable[..., Any], case: Case, locate: Locate, platform: str = "cpu") -> Program:
    """The learner's function on a case, as a Program; nothing is computed.

    Raises:
        Mismatch: The function returned something of another form than the contract says.
        ProgramError: The program is too large, or holds a large constant.
        Exception: Whatever the function raises.
    """
    wrapped = task.wrap(function, case)
    return export(
        wrapped.function,
        wrapped.inputs,
        wrapped.in_specs,
        mesh=case.mesh,
        out_specs=wrapped.out_specs,
        roles=wrapped.roles,
        donate=wrapped.donate,
        platform=platform,
        locate=locate,
    )


def named(trees: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays by the names that a Program's signature gives them."""
    return {
        path_name(name, path): np.asarray(leaf)
        for name, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
