"""Named wrong answers that facts must reject: most are edits of the course's own solution."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

# The facts that most wrong answers fail: of a function with a backward pass, of a gradient alone, and of a step.
WRONG, GRADIENTS = ("gradients", "values"), ("gradient norm", "gradients")
NUMBERS = (*GRADIENTS, "values")


# --8<-- [start:mutant]
@dataclass(frozen=True)
class Mutant:
    """A wrong answer for a task, and exactly the facts that it must fail.

    ``shown_by`` names the cases that reveal it, if the task's first case does not.
    """

    task: str
    function: Callable[..., Any]
    fails: frozenset[str]
    shown_by: tuple[str, ...] = ()
    # --8<-- [end:mutant]

    @property
    def name(self) -> str:
        return self.function.__name__


def there_and_back(value: str, axis: str) -> str:
    """Source that permutes ``value`` along ``axis`` and back: the same numbers, with needless traffic."""
    ring = f"[(i, (i + 1) % lax.axis_size({axis})) for i in range(lax.axis_size({axis}))]"
    back = f"[((i + 1) % lax.axis_size({axis}), i) for i in range(lax.axis_size({axis}))]"
    return f"lax.ppermute(lax.ppermute({value}, {axis}, {ring}), {axis}, {back})"


def gathered_and_scattered(value: str, axis: str) -> str:
    """Source that all-gathers ``value`` along ``axis`` and reduce-scatters it back."""
    return f"(lax.psum_scatter(lax.all_gather({value}, {axis}), {axis}) / lax.axis_size({axis}))"


def in_microbatches(batch: Any, count: int) -> Any:
    """A batch with its rows as ``[count, rows of one microbatch, ...]``."""
    return jax.tree.map(lambda rows: rows.reshape(count, -1, *rows.shape[1:]), batch)


def mutant(task: str, function: Callable[..., Any], *fails: str, shown_by: tuple[str, ...] = ()) -> Mutant:
    return Mutant(task, function, frozenset(fails), shown_by)


def patch(
    function: Callable[..., Any],
    name: str,
    edits: dict[str, str],
    *fails: str,
    shown_by: tuple[str, ...] = (),
    inside: Callable[..., Any] | None = None,
) -> Mutant:
    """Make a mutant from the course's own solution by replacing each given text.

    Args:
        function: The solution's function.
        name: Name of the mutant.
        edits: Maps text that occurs exactly once in the edited source to its replacement.
        fails: The facts that it must fail.
        shown_by: The cases that reveal it, if the task's first case does not.
        inside: Another function of the same module that is edited instead, and that ``function`` then uses.

    Raises:
        ValueError: A text does not occur exactly once in the source.
    """
    edited = inside or function
    source = inspect.getsource(edited)
    for old in edits:
        if (times := source.count(old)) != 1:
            raise ValueError(f"{name}: {old!r} occurs {times} times in {edited.__name__}, expected once")
    source = re.sub("|".join(map(re.escape, edits)), lambda match: edits[match.group()], source)
    file = f"<{function.__name__}, {name}>"
    space = dict(function.__globals__)
    if inside:  # The whole module, so that all of its functions use the edited one.
        source = inspect.getsource(sys.modules[function.__module__]).replace(inspect.getsource(inside), source)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec", dont_inherit=True), space)
    wrong_answer = space[function.__name__]
    wrong_answer.__name__ = wrong_answer.__qualname__ = name
    return mutant(function.__name__, wrong_answer, *fails, shown_by=shown_by)
