"""Judge mutations like answers: first on the smallest case, and only its survivors on everything else."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType, ModuleType
from typing import Any

import jax
import msgspec

from autograder.checking.judging import executor
from autograder.contract.task import Case, Task, load
from autograder.contract.verdict import STUDENT_ERROR
from autograder.grading.inside.tracing import Problem, time_limit, trace_cases
from autograder.grading.outside.judge import GradingPlan, Stopped, judge, plan, stopped
from autograder.proof.mutation.operators import Mutation, mutations, name_of

# Results of a mutation that no fact rejects; other results are the kind of the rejecting fact, or a verdict.
BROKEN, EQUAL, SURVIVED = "raises an exception", "the same program", "survived"
_TRACE_SECONDS = 30
_SECRET = b"mutation"
_CLEARED_EVERY = 200


class ReferenceFails(Exception):
    """The solution itself does not pass the judgement of its mutations."""


class Outcome(msgspec.Struct, frozen=True):
    """The result of a mutation, the reason (fact and case, or message), and the duration."""

    function: str
    edit: tuple[str, ...]
    operator: str
    result: str
    why: str
    seconds: float

    @property
    def name(self) -> str:
        return name_of(self.function, self.edit)


def mutations_of(chapter: str, task: Task) -> list[Mutation]:
    """The mutations of a task, in order: changes of its function, and of the helpers that it calls.

    Graded functions that it calls have their own mutations, so theirs come last.
    """
    module = importlib.import_module(f"solutions.{chapter}")
    graded = {other.name for other in load(chapter).tasks}
    called = _called(module, task.name)
    names = [task.name, *(name for name in called if name not in graded), *(name for name in called if name in graded)]
    return [mutation for name in names for mutation in mutations(module, name)]


def _called(module: ModuleType, function: str) -> list[str]:
    """The functions of the same module that a function calls, directly or indirectly."""
    names = [function]
    for name in names:
        for other in _names(getattr(module, name).__code__):
            value = getattr(module, other, None)
            if inspect.isfunction(value) and value.__module__ == module.__name__ and other not in names:
                names.append(other)
    return names[1:]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


class _Rejected(Exception):
    """``(result, why)`` of a mutation that has no program, or fails a fact."""


@dataclass(frozen=True)
class Judged:
    """Judges one task's answers as in official grading, but stops at the first failed fact.

    ``wanted`` has the solution's programs by case. ``silent`` has, by stage, the uninformative facts: those
    that fail for the solution too, such as one about gradients on a case without any.
    """

    plan: GradingPlan
    module: ModuleType
    wanted: dict[str, bytes]
    silent: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, chapter: str, task: Task) -> Judged:
        """Judge the solution.

        Raises:
            ReferenceFails: It does not pass.
        """
        planned = plan(chapter, task, secret=_SECRET)
        planned = replace(planned, official=False)  # so that inputs and oracles are reused
        module = importlib.import_module(f"solutions.{chapter}")
        try:
            programs = {case.name: _program(task, getattr(module, task.name), case) for case in planned.traced}
            failed = [_failed(stage, programs) for stage in _stages(planned)]
            if failed[-1]:
                raise _Rejected(*failed[-1].popitem())
        except _Rejected as error:
            raise ReferenceFails(f"the solution of {task.name} is rejected: {': '.join(error.args)}") from None
        return cls(planned, module, programs, tuple(map(frozenset, failed)))

    def outcome(self, mutation: Mutation) -> Outcome:
        """Judge one mutation."""
        begin, programs = time.monotonic(), {}
        try:
            self._judge(mutation, programs)
            result, why = (EQUAL if programs == self.wanted else SURVIVED), ""
        except _Rejected as error:
            result, why = error.args
        seconds = round(time.monotonic() - begin, 2)
        return Outcome(mutation.function, mutation.edit, mutation.operator, result, why[:200], seconds)

    def _judge(self, mutation: Mutation, programs: dict[str, bytes]) -> None:
        """Raise ``_Rejected`` if the mutation fails; ``programs`` receives the exported ones."""
        task = self.plan.task
        try:
            function = mutation.apply(self.module, task.name)
        except SyntaxError as error:
            raise _Rejected(BROKEN, str(error)) from None
        for stage, silent in zip(_stages(self.plan), self.silent, strict=True):
            for case in stage.traced:
                if case.name not in programs:
                    programs[case.name] = _program(task, function, case)
            if all(programs[case.name] == self.wanted[case.name] for case in stage.traced):
                continue
            for fact, kind in _failed(stage, programs).items():
                if fact not in silent:
                    raise _Rejected(kind, f"{fact}, {stage.cases[0].name if len(stage.cases) == 1 else 'all cases'}")


def _stages(planned: GradingPlan) -> Iterator[GradingPlan]:
    """Each case alone, then everything with the realistic size."""
    for case in planned.cases:
        yield replace(planned, cases=(case,), at_scale=None)
    yield planned


def _program(task: Task, function: Callable[..., Any], case: Case[Any]) -> bytes:
    with time_limit(_TRACE_SECONDS, processor=True):
        traced = trace_cases(task, function, [task.complete(case)], lambda _: None)
    if isinstance(traced, Problem):
        facts = stopped(task, traced).facts
        result = BROKEN if traced.verdict == STUDENT_ERROR else facts[0].kind if facts else traced.verdict
        raise _Rejected(str(result), traced.message)
    return traced.programs[case.name].serialise()


def _failed(stage: GradingPlan, programs: dict[str, bytes]) -> dict[str, str]:
    """The failed facts that count, by name, and their kinds.

    Raises:
        _Rejected: The programs cannot be judged.
    """
    try:
        result = judge(stage, programs, "", executor().ask)
    except Stopped as error:
        raise _Rejected(error.verdict, str(error)) from None
    if not result.facts:
        raise _Rejected(result.verdict, result.message)
    return {fact.name: str(fact.kind) for fact in result.facts if fact.passed is False and fact.weight}


def survey(
    chapter: str, task: Task, known: Mapping[str, Outcome], only: Collection[str] | None = None
) -> Iterator[Outcome]:
    """The outcome of each of a task's mutations.

    Args:
        chapter: The chapter's name.
        task: Its task.
        known: Outcomes that an earlier run has found, by name.
        only: Names of mutations; None for all.

    Raises:
        ReferenceFails: The solution does not pass.
    """
    judged = None
    for number, mutation in enumerate(mutations_of(chapter, task), 1):
        if only is not None and mutation.name not in only:
            continue
        if mutation.name in known:
            yield known[mutation.name]
            continue
        judged = judged or Judged.of(chapter, task)
        yield judged.outcome(mutation)
        if number % _CLEARED_EVERY == 0:
            jax.clear_caches()
