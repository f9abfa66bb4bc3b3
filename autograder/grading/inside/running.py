"""Run a notebook's statements as the learner ran them, within limits, and record failures along the way."""

from __future__ import annotations

import ast
import asyncio
import atexit
import difflib
import inspect
import linecache
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from autograder.contract.wrapping import Traceable
from autograder.grading.inside.cells import Statement, file_of, locate_cell, read_statements
from autograder.grading.inside.intake import Cell
from autograder.grading.inside.slicing import bound_outside, names_of, needed
from autograder.grading.inside.tracing import Problem, TooLong, describe_error, time_limit

# Processor time, in seconds, for one statement that the graded function does not need, and for all of them together.
STATEMENT_SECONDS, ALL_SECONDS = 5.0, 15.0
# The limit for all of them together if a first attempt failed, and on a learner's own machine.
PATIENT_SECONDS = 40.0
# For a statement that the graded function does need.
NEEDED_SECONDS = 40.0
# Waiting takes no processor time, and everything takes longer on a busy machine.
WALL_RATIO = 3
# Statements too cheap to skip, which may be needed in ways other than by name.
_CHEAP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEFT_OUT = "it was skipped: {} it, and the notebook's cells had run for {:g} s"


@dataclass(frozen=True)
class Failure:
    """A statement that did not complete: the names it would have bound, its location and text, and the cause."""

    names: frozenset[str]
    text: str
    problem: Problem
    needed_by: frozenset[str]
    left_out: bool = False

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        text = text if len(text) <= 100 else text[:97] + "..."
        return f"`{text}` ({self.problem.line}) failed: {self.problem.message}"


@dataclass(frozen=True)
class Ran:
    """The namespace left behind by a notebook's cells, and the statements that failed."""

    namespace: dict[str, Any]
    failures: tuple[Failure, ...] = ()

    @property
    def left_out(self) -> int:
        """The number of statements skipped because others had taken too long."""
        return sum(failure.left_out for failure in self.failures)

    def function(self, task: Traceable) -> Callable[..., Any] | Problem:
        """The task's function, or the reason there is none."""
        function = self.namespace.get(task.name)
        if callable(function):
            return function
        failed = next((failure for failure in reversed(self.failures) if task.name in failure.names), None)
        if failed:
            return failed.problem
        if function is not None:
            return Problem("student_error", f"{task.name} is a {type(function).__name__}, expected a function")
        function_names = [name for name, value in self.namespace.items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(task.name, function_names, 1, 0.75)
        hint = f"it has {near[0]}: is the name misspelt?" if near else "was it renamed, or its cell deleted?"
        message = f"the notebook has no function {task.name}{task.signature}; {hint}"
        return self.explained(Problem("student_error", message), task.name)

    def explained(self, problem: Problem, function: str) -> Problem:
        """Add to a function's problem an earlier failed statement of the notebook that may be its cause."""
        earlier = self.failures
        if problem in (problems := [failure.problem for failure in earlier]):
            earlier = earlier[: problems.index(problem)]
        causes = [f for f in earlier if problem.undefined in f.names]
        if causes and causes[-1].problem.verdict == "limit_exceeded":
            problem = replace(problem, verdict="limit_exceeded")
        if causes:  # no similar name, since this one was meant
            problem = replace(problem, message=f"{problem.undefined} is not defined (NameError)")
        causes = causes or [f for f in earlier if function in f.needed_by]
        if causes:
            why = f"before it, {causes[-1]}"
        elif skipped := [failure for failure in earlier if failure.left_out]:
            why = f"before it, {len(skipped)} statements were skipped, from {skipped[0].problem.line} on: "
            why += "experiments took too long; remove them before submitting"
        elif problem.undefined and problem.undefined not in self.namespace and "Did you mean" not in problem.message:
            why = f"no cell of the notebook defines {problem.undefined}"
        else:
            return problem
        return replace(problem, message=f"{problem.message} ({why})")


class Silent:
    """A stand-in for what a notebook has and a judge lacks: the shell, ``display``, ``check``. It does nothing."""

    def __getattr__(self, name: str) -> Silent:
        if name.startswith("__") or name.startswith("_repr_"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> Silent:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __repr__(self) -> str:
        return ""


def run_cells(
    cells: Iterable[Cell],
    wanted: Sequence[str],
    *,
    lab: tuple[str, ...] = (),
    only_needed: bool = False,
    patience: float = ALL_SECONDS,
    module: types.ModuleType | None = None,
) -> Ran:
    """Run a notebook's cells in order, statement by statement.

    A failed statement does not stop the following ones, and a slow one is ended, unless ``wanted`` needs it.

    Args:
        cells: The notebook's cells.
        wanted: The functions that will be analysed.
        lab: The course's own statements. Those that do more than import or define run only if ``wanted`` needs
            them, and none of them rebinds a name that the learner's own statements bind.
        only_needed: Run only what ``wanted`` needs.
        patience: Processor time, in seconds, for everything ``wanted`` does not need.
        module: The module in which the notebook's names are bound; a new one by default.
    """
    cells = list(cells)
    _show_sources(cells)
    statements = read_statements(cells)
    own = lab_statements(lab)
    labs = frozenset(n for n, statement in enumerate(statements) if statement.node and ast.dump(statement.node) in own)
    needs_of = {name: needed(statements, [name], labs) for name in wanted}
    needs = frozenset().union(*needs_of.values())
    idle = frozenset(n for n in labs if not isinstance(statements[n].node, _CHEAP))
    skipped = (frozenset(range(len(statements))) if only_needed else idle) - needs
    module = module or types.ModuleType("__main__")
    module.__dict__.update(get_ipython=(shell := Silent()), display=shell, In=[""], Out={}, _="", __="", ___="")
    theirs = bound_outside(statements, labs)
    of_lab = frozenset().union(*(names_of(statements[number]).binds for number in labs)) - theirs
    failures, cpu_seconds = [], 0.0
    with _without_check():
        for number, statement in enumerate(statements):
            is_needed = number in needs
            if number in skipped or (statement.timed and names_of(statement).binds & module.__dict__.keys()):
                continue
            problem = Problem("student_error", statement.error, statement.where) if statement.error else None
            late = problem is None and not is_needed and cpu_seconds > patience
            if late:
                reason = f"{wanted[0]} does not need" if len(wanted) == 1 else "no function that is judged needs"
                message = _LEFT_OUT.format(reason, patience)
                problem = Problem("student_error", message, statement.where)
            elif problem is None:
                begin = time.process_time()
                learner_values = {
                    name: module.__dict__[name] for name in theirs & module.__dict__.keys() if number in labs
                }
                seconds = NEEDED_SECONDS if is_needed else STATEMENT_SECONDS
                problem = _run(statement, module.__dict__, seconds)
                module.__dict__.update(learner_values)
                if statement.shown and not problem and (value := module.__dict__.get("_")) is not None:
                    module.__dict__["Out"] = {**module.__dict__["Out"], statement.shown: value}
                cpu_seconds += 0.0 if is_needed else time.process_time() - begin
            if problem:
                # A statement that fails for lack of a name bound by the lab comes from another edition of the lab.
                labs_own = number in labs or problem.undefined in of_lab
                needed_by = frozenset(name for name in wanted if number in needs_of[name] and not labs_own)
                failures.append(Failure(names_of(statement).binds, statement.text, problem, needed_by, late))
    return Ran(module.__dict__, tuple(failures))


def _show_sources(cells: Iterable[Cell]) -> None:
    """Make the cells' sources available to ``inspect.getsource`` and to tracebacks."""
    for number, cell in enumerate(cells, 1):
        file = file_of(number, cell)
        linecache.cache[file] = (len(cell.source), None, cell.source.splitlines(True), file)


@lru_cache(maxsize=8)
def lab_statements(lab: tuple[str, ...]) -> frozenset[str]:
    """The statements of a release's lab, in a comparable form."""
    statements = read_statements([Cell("lab", source) for source in lab])
    return frozenset(ast.dump(statement.node) for statement in statements if statement.node)


def _run(statement: Statement, namespace: dict[str, Any], seconds: float) -> Problem | None:
    """Run one statement while an event loop runs, as in a kernel; return the problem if it fails."""
    code = statement.code
    assert code

    async def inside() -> None:
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            await result

    task = _loop().create_task(inside())
    try:
        with time_limit(seconds, processor=True), time_limit(seconds * WALL_RATIO):
            _loop().run_until_complete(task)
    except TooLong as error:
        task.cancel()  # it may not have started
        where = describe_error(error, locate_cell).line or statement.where
        return Problem("limit_exceeded", f"it took longer than {error}", where)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = describe_error(error, locate_cell)
        return problem if problem.line else replace(problem, line=statement.where)
    return None


class _Loop(asyncio.SelectorEventLoop):
    """An event loop without the socket pair with which other threads wake it: a sandbox has no sockets."""

    def _make_self_pipe(self) -> None:
        self._csock = self._ssock = None
        self._internal_fds = 0

    def _close_self_pipe(self) -> None:
        pass


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    loop = _Loop()
    atexit.register(loop.close)
    return loop


@contextmanager
def _without_check() -> Iterator[None]:
    """Replace ``autograder.check.check`` with a stub that does nothing, and show warnings rather than raise them."""
    import autograder

    stub: Any = types.ModuleType("autograder.check")
    stub.check = Silent()
    names, before = sys.modules, sys.modules.get("autograder.check")
    attribute = autograder.__dict__.get("check")
    names["autograder.check"] = autograder.check = stub  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            yield
    finally:
        del autograder.check  # type: ignore[attr-defined]
        del names["autograder.check"]
        if before is not None:
            names["autograder.check"] = before
        if attribute is not None:
            autograder.check = attribute  # type: ignore[attr-defined]
