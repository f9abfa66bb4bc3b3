"""Requests to the tracer and its responses, with the types that all data from a sandbox must have."""

from typing import Any, TypeVar

import msgspec

from autograder.grading.inside.intake import Cell
from autograder.grading.inside.launch import Limits
from autograder.grading.inside.tracing import Problem
from autograder.grading.inside.wire import WireError

T = TypeVar("T")


class FunctionRequest(msgspec.Struct, frozen=True):
    """A task, and the cases for which its function is traced, as returned by ``to_plain``."""

    task: str
    cases: tuple[dict[str, Any], ...]
    platform: str


class TraceRequest(msgspec.Struct, frozen=True):
    """The cells of a notebook, and the task and cases for which one function in them is traced.

    ``patience`` is the processor time in seconds for everything the function does not need, ``only_needed`` skips
    that, and ``with_uses`` requests the names the function uses. ``also`` lists more functions, or the same one for
    another platform; the cells run once for all of them.
    """

    chapter: str
    task: str
    cells: tuple[Cell, ...]
    lab: tuple[str, ...]
    cases: tuple[dict[str, Any], ...]
    limits: Limits
    patience: float
    platform: str = "cpu"
    only_needed: bool = False
    with_uses: bool = False
    also: tuple[FunctionRequest, ...] = ()

    @property
    def functions(self) -> tuple[FunctionRequest, ...]:
        """All functions that are traced."""
        return (FunctionRequest(self.task, self.cases, self.platform), *self.also)


class Ending(msgspec.Struct, frozen=True):
    """The end of the process that ran a student's code, as reported by its parent: see ``ChildReport``."""

    exceeded: str
    signal: int | None
    exit_status: int | None
    cpu_s: float
    output: str = ""
    denied: tuple[str, ...] = ()
    clean: bool = False


class TraceMessage(msgspec.Struct, frozen=True):
    """A message from a student's process: that its cells ``ran``, then the cases of its Programs, or a problem."""

    ran: bool = False
    problem: Problem | None = None
    cases: tuple[str, ...] = ()
    line: str = ""
    uses: dict[str, str] = {}
    left_out: int = 0


def untrusted(header: dict[str, Any], kind: type[T]) -> T:
    """Validate a message of this kind from a header that a student's process may have forged.

    Raises:
        WireError: A field has the wrong type.
    """
    try:
        return msgspec.convert(header, kind)
    except msgspec.ValidationError as error:
        raise WireError(f"the data received is not a message: {error}") from None
