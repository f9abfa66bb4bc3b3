"""Named wrong answers, each of which a fact must reject."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from autograder.check import executor, locate_file
from autograder.contract.task import Case, load
from autograder.contract.verdict import Result
from autograder.grading.inside.tracing import Problem, trace_cases
from autograder.grading.outside.judge import Plan, judge, plan, stopped


# --8<-- [start:mutant]
@dataclass(frozen=True)
class Mutant:
    """A wrong answer for a task, and exactly the facts that it must fail.

    ``shown_by`` names the cases that show it, where the task's first does not.
    """

    task: str
    function: Callable[..., Any]
    fails: frozenset[str]
    shown_by: tuple[str, ...] = ()
    # --8<-- [end:mutant]

    @property
    def name(self) -> str:
        return self.function.__name__


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
    """A mistake in the course's own solution: each text becomes another.

    Args:
        function: The solution's.
        name: What the mistake does.
        edits: From what the edited source has exactly once, to what replaces it.
        fails: The facts that it must fail.
        shown_by: The cases that show it, where the task's first does not.
        inside: Another function of the same module that is edited instead, and that ``function`` then uses.

    Raises:
        ValueError: The source does not have a text exactly once.
    """
    edited = inside or function
    source = inspect.getsource(edited)
    for old, new in edits.items():
        if (times := source.count(old)) != 1:
            raise ValueError(f"{name}: {old!r} occurs {times} times in {edited.__name__}, expected once")
        source = source.replace(old, new)
    file = f"<{function.__name__}, {name}>"
    space = dict(function.__globals__)
    if inside:  # The whole module, so that all of its functions use the edited one.
        source = inspect.getsource(sys.modules[function.__module__]).replace(inspect.getsource(inside), source)
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec", dont_inherit=True), space)
    found = space[function.__name__]
    found.__name__ = found.__qualname__ = name
    return mutant(function.__name__, found, *fails, shown_by=shown_by)


def judged(chapter: str, mutant: Mutant, *, full: bool) -> Result:
    """The judgement of a mutant: on all meshes, or on the smallest case that shows it.

    The short form looks at the realistic size only where the small one does not show all that the mutant names.
    """
    task = load(chapter).task(mutant.task)
    planned = plan(chapter, task, full=True)
    programs: dict[str, bytes] = {}
    if full:
        return _judged(planned, mutant, programs)
    shown_by = set(mutant.shown_by or (task.cases[0].name,))
    small = replace(planned, cases=tuple(c for c in planned.cases if c.name in shown_by), at_scale=None)
    result = _judged(small, mutant, programs)
    short = {fact.name for fact in result.facts if fact.passed is False and fact.weight}
    if task.at_scale is None or short == mutant.fails:
        return result
    needed = shown_by | {task.at_scale[1]}
    return _judged(replace(planned, cases=tuple(c for c in planned.cases if c.name in needed)), mutant, programs)


def judged_on(chapter: str, task: str, function: Callable[..., Any], cases: tuple[Case[Any], ...]) -> Result:
    """The judgement of a function on these cases alone, at small sizes."""
    planned = plan(chapter, load(chapter).task(task), full=False)
    return _judged(replace(planned, cases=cases, at_scale=None), mutant(task, function), {})


def judged_unseen(chapter: str, task: str, function: Callable[..., Any], seed: int = 0) -> Result:
    """The judgement of a function on one case that official grading may draw, and on nothing else."""
    planned = plan(chapter, load(chapter).task(task), full=False, secret=str(seed).encode())
    only = replace(planned, cases=planned.cases[-1:], at_scale=None)
    return _judged(only, mutant(task, function), {})


def doubles_gradients(tree: Any) -> Any:
    """The same numbers, with twice their gradient."""
    return jax.tree.map(lambda x: x + (x - jax.lax.stop_gradient(x)), tree)


def _judged(planned: Plan, mutant: Mutant, programs: dict[str, bytes]) -> Result:
    """The judgement on a plan; ``programs`` has what is exported already, and gets the rest."""
    missing = [case for case in planned.traced if case.name not in programs]
    traced = trace_cases(planned.task, mutant.function, missing, locate_file(mutant.function))
    if isinstance(traced, Problem):
        return stopped(planned.task, traced)
    programs |= {name: program.serialise() for name, program in traced.programs.items()}
    return judge(planned, programs, traced.line, executor().ask)
