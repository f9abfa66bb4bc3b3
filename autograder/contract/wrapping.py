"""What runs beside a learner's code: the cases, and how a function is made into something that can be exported.

The sandbox mounts this module and each chapter's ``wrapping``, and nothing else of a contract: no oracle, no expected
value, no closed form of an answer. What a wrapper needs of such a kind is computed outside and comes with the case.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from course.program import Locate, Program, export

# The name of the case that official grading draws.
UNSEEN = "unseen"


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
        given: Plain data that the wrapper needs and must not compute, such as how leaves are split (``Task.given``).
    """

    name: str
    mesh: dict[str, int]
    sizes: dict[str, int]
    quick: bool = False
    given: dict[str, Any] = field(default_factory=dict)

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
class Wrapping:
    """One function of a chapter as its tracer knows it.

    Attributes:
        name: The function's name.
        signature: Its parameters as written in the stub, ``(params, axis_name, min_size)``.
        wrap: ``(function, case) -> Wrapped``.
    """

    name: str
    signature: str
    wrap: Callable[[Callable[..., Any], Case], Wrapped]


class Traceable(Protocol):
    """What tracing needs of a task, or of its wrapping."""

    @property
    def name(self) -> str: ...

    @property
    def signature(self) -> str: ...

    @property
    def wrap(self) -> Callable[[Callable[..., Any], Case], Wrapped]: ...


@cache
def wrappings(chapter: str) -> dict[str, Wrapping]:
    """The functions of a chapter by name: ``WRAPPINGS`` of ``autograder.chapters.<chapter>.wrapping``."""
    module = importlib.import_module(f"autograder.chapters.{chapter}.wrapping")
    return {wrapping.name: wrapping for wrapping in module.WRAPPINGS}


def trace(task: Traceable, function: Callable[..., Any], case: Case, locate: Locate, platform: str = "cpu") -> Program:
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
