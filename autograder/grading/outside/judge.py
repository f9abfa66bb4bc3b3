"""The trusted side: draws inputs, holds the oracle, and turns a function's Programs into facts and points."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import msgspec
import numpy as np

from autograder.contract.task import Case, ChoiceError, Evidence, Task, TaskEvidence, Variant, load, named, references
from autograder.contract.text import append_sentence
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    NEEDS_HUMAN,
    STUDENT_ERROR,
    Fact,
    Kind,
    Result,
    conclude,
    each_message_once,
)
from autograder.contract.wrapping import Wrapped, never_called
from autograder.grading.inside import wire
from autograder.grading.inside.tracing import Problem, refused
from autograder.grading.outside.jax_settings import pinned
from course.program import Costs, Memory, Program, ProgramError, Timeline, signature_of
from course.render.timeline_summary import from_summary, to_summary

# Sends a request to an executor and returns its response; raises Stopped if there is none.
Execute = Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]


NO_FACTORS: Mapping[str, float] = {}


class Stopped(Exception):
    """A Program could not be judged: ``verdict`` says who is at fault; ``cpu_s`` is the processor time it took."""

    def __init__(self, verdict: str, message: str, cpu_s: float = 0.0):
        super().__init__(message)
        self.verdict, self.cpu_s = verdict, cpu_s


@dataclass(frozen=True)
class GradingPlan:
    """The cases on which a function is judged, and the seeds for its inputs.

    ``seed`` is derived from the submission; ``shared`` is the seed of the stretched cases, whose large inputs and
    oracles are computed once for all submissions of a course. ``official`` means that these inputs are secret, and
    that the verdict is recorded; ``variant`` is the course's variant, if it asks for one, and ``factors`` are the
    course's factors on the limits of facts.
    """

    chapter: str
    task: Task
    cases: tuple[Case[Any], ...]
    at_scale: Case[Any] | None
    seed: int
    shared: int
    official: bool = False
    variant: Variant | None = None
    factors: tuple[tuple[str, float], ...] = ()

    @property
    def traced(self) -> list[Case[Any]]:
        """All cases that the tracer must export."""
        return [self.task.complete(case) for case in (*self.cases, *([self.at_scale] if self.at_scale else []))]

    @property
    def first(self) -> GradingPlan:
        """The quick cases only, with the realistic size and the case it is compared with."""
        small = self.task.at_scale[1] if self.task.at_scale else ""
        return replace(self, cases=tuple(case for case in self.cases if case.quick or case.name == small))


def plan(
    chapter: str,
    task: Task,
    *,
    stretched: bool = False,
    secret: bytes = b"",
    submission: str = "",
    variant: str = "",
    factors: Mapping[str, float] = NO_FACTORS,
) -> GradingPlan:
    """Plan the cases and seeds that a function is judged on.

    Args:
        chapter: The chapter's name.
        task: Its task.
        stretched: Include the cases that have some sizes of the realistic one, as in official grading.
        secret: The course's secret; with it, inputs depend on the submission and are unpredictable, and one
            more case is drawn. Without it, they are the same each time.
        submission: Hash of the submission.
        variant: The course's variant; empty for the default.
        factors: The course's factors on the limits of facts, by the fact's name.

    Raises:
        ChoiceError: The task has no such variant.
    """
    seed, shared = (_seed(secret, f"{owner}|{chapter}|{task.name}") for owner in (submission, "all"))
    cases = (*task.cases, *(task.stretched() if stretched else ()))
    if secret:
        cases += (task.unseen(np.random.default_rng(seed)),)
    at_scale, requested = task.at_scale[0] if task.at_scale else None, task.variant(variant)
    if requested:
        cases, at_scale = tuple(map(requested.of, cases)), at_scale and requested.of(at_scale)
    return GradingPlan(chapter, task, cases, at_scale, seed, shared, bool(secret), requested, tuple(factors.items()))


def _seed(secret: bytes, text: str) -> int:
    return int.from_bytes(hmac.digest(secret, text.encode(), "sha256")[:16], "big")


@pinned()
def judge(
    plan: GradingPlan,
    programs: dict[str, bytes],
    line: str,
    execute: Execute,
    progress: Callable[[str], None] | None = None,
    seen: dict[str, Evidence] | None = None,
) -> Result:
    """Judge a function by its Programs, one per case.

    Args:
        plan: The cases it is judged on.
        programs: Its Programs by case.
        line: The line that defines the function, as ``cell:line``.
        execute: Sends a request to an executor.
        progress: Called with each case before it runs.
        seen: Evidence of cases that have already run and are skipped; newly run cases are added.

    Raises:
        Stopped: The executor gave up for a reason that is not the Program's fault.
    """
    seen = {} if seen is None else seen
    try:
        for number, case in enumerate(plan.cases, 1):
            if case.name not in seen:
                if progress:
                    progress(f"case {number} of {len(plan.cases)}, {case.name}")
                seen[case.name] = _run(plan, case, programs, line, execute)
    except ProgramError as error:
        return stopped(plan.task, refused(error))
    cases, figures = [seen[case.name] for case in plan.cases], references(plan.chapter).get(plan.task.name, {})
    try:
        orders = _analyse(plan, programs, line, execute) if plan.at_scale else [(None, None)]
    except ProgramError as error:
        return _at_scale_refused(refused(error), plan, _concluded(plan, cases, None, figures, None))
    results = [_concluded(plan, cases, large, figures, picture) for large, picture in orders]
    return max(results, key=lambda result: (result.points, -sum(fact.excess for fact in result.missed)))


def _at_scale_refused(problem: Problem, plan: GradingPlan, small: Result) -> Result:
    """Report a refusal at scale, after any values or gradients that are already wrong at small sizes."""
    if small.points:
        return stopped(plan.task, problem)
    message = f"the Program of the realistic size is refused: {problem.message}"
    facts = [replace(f, message=message, line=problem.line) if f.passed is None else f for f in small.facts]
    return replace(small, facts=each_message_once(facts))


def _concluded(
    plan: GradingPlan,
    cases: list[Evidence],
    large: Evidence | None,
    figures: dict[str, Any],
    picture: dict[str, Any] | None,
) -> Result:
    """Conclude the result, with the collectives of the realistic size in one order."""
    task_evidence = TaskEvidence(cases, large, figures, dict(plan.factors))
    raw_facts = plan.task.facts(task_evidence)
    if unknown := sorted({*task_evidence.factors} - task_evidence.adjustable):
        names = ", ".join(sorted(task_evidence.adjustable)) or "none"
        raise ChoiceError(
            f"{plan.task.name} has no fact {unknown[0]!r} whose limit a course may change; it has: {names}"
        )
    facts = [
        replace(
            _in_this_course(_with_factor(fact, task_evidence), plan.variant), core=fact.name in plan.task.core_facts
        )
        for fact in raw_facts
    ]
    result = conclude(plan.task.name, plan.task.points, facts)
    if plan.official:
        return replace(result, timeline=picture, form=cases[0].form)
    return replace(result, cases=tuple(evidence.case.name for evidence in cases))


def _with_factor(fact: Fact, evidence: TaskEvidence) -> Fact:
    """Add to a failed fact's message that this course has changed its limit."""
    if fact.passed is not False or evidence.factors.get(fact.name, 1.0) == 1.0:
        return fact
    sentence = f"In this course the limit is {evidence.factors[fact.name]:g} times the usual one."
    return replace(fact, message=append_sentence(fact.message, sentence))


def _in_this_course(fact: Fact, variant: Variant | None) -> Fact:
    """Add the requirement of this course's variant, if it has one, to a fact about wrong numbers."""
    if variant is None or fact.passed is not False or not fact.kind.required:
        return fact
    return replace(fact, message=f"{fact.message.rstrip('. ')}. In this course: {variant.sentence}")


def stopped(task: Task, problem: Problem) -> Result:
    """The result of a function that has no Program to judge."""
    if problem.verdict == FAIL:
        measured, limit = "of the wrong structure", "as specified"
        form = Fact("values", Kind.FORM, False, measured, limit, line=problem.line, message=problem.message)
        return Result(task.name, 0.0, task.points, FAIL, (form,))
    return Result(
        task.name,
        0.0,
        task.points,
        problem.verdict,
        line=problem.line,
        message=problem.message,
        original=problem.original,
        not_started=problem.unwritten and problem.verdict == STUDENT_ERROR,
    )


def _load(wrapped: Wrapped, case: Case, programs: dict[str, bytes]) -> Program:
    """Load the case's Program, whose signature must match the contract's exactly."""
    if case.name not in programs:
        raise ProgramError(f"there is no Program for {case.name}")
    program = Program.load(programs[case.name])
    expected = signature_of(wrapped.inputs, wrapped.in_specs, wrapped.roles)
    if program.mesh != case.mesh or list(program.mesh) != list(case.mesh):
        raise ProgramError(f"the Program for {case.name} is for mesh {program.mesh}, expected {case.mesh}")
    if program.platform != "cpu":
        raise ProgramError(f"the Program for {case.name} is for platform {program.platform!r}, expected 'cpu'")
    for leaf, expected_leaf in zip((*program.inputs, None), (*expected, None), strict=False):
        if leaf != expected_leaf:
            raise ProgramError(f"the Program for {case.name} takes {leaf}, expected {expected_leaf}")
    donated = tuple(index for index, leaf in enumerate(expected) if leaf.name.split("/")[0] in wrapped.donate)
    if program.donated != donated:
        raise ProgramError(
            f"the Program for {case.name} donates its inputs {list(program.donated)}, expected {list(donated)}"
        )
    return program


def _run(plan: GradingPlan, case: Case, programs: dict[str, bytes], line: str, execute: Execute) -> Evidence:
    wrapped = plan.task.wrap(never_called, case)
    program = _load(wrapped, case, programs)
    drawn = _drawn(plan, case)
    description, blobs = wire.pack(drawn.inputs)
    options = {"data_branches": plan.task.data_branches, "form": plan.official and case is plan.cases[0]}
    with ThreadPoolExecutor(1) as pool:  # run the oracle here, while the executor compiles and runs the Program
        single_device = pool.submit(lambda: drawn.expected)
        answer, arrays = execute({"do": "run", "inputs": description, **options}, [programs[case.name], *blobs])
    analysis, expected_values = _costs_and_memory(answer), single_device.result()
    measured = wire.unpack(answer.get("results", []), arrays)
    if set(measured) != set(expected_values):
        missing, extra = sorted(set(expected_values) - set(measured)), sorted(set(measured) - set(expected_values))
        raise ProgramError(f"the Program's results are not the contract's: missing {missing}, unknown {extra}")
    leaves, form = (program.inputs, program.outputs), str(answer.get("form", ""))[:32]
    details = {"secret": plan.official, "form": form, "drawn": drawn.inputs, "squeezed": wrapped.squeezed}
    return Evidence(case, *leaves, measured, expected_values, *analysis, line, **details)


def _analyse(
    plan: GradingPlan, programs: dict[str, bytes], line: str, execute: Execute
) -> list[tuple[Evidence, dict[str, Any] | None]]:
    """Analyse the realistic size; return evidence and a timeline summary for each order of its collectives.

    A Program's best order counts, for all facts together: issuing a collective early also takes up memory early.
    """
    assert plan.at_scale and plan.task.at_scale
    program = _load(plan.task.wrap(never_called, plan.at_scale), plan.at_scale, programs)
    smaller = programs[plan.task.at_scale[1]]
    outputs_at_scale, small_outputs = (
        [(x.name, x.dtype, x.spec) for x in p.outputs] for p in (program, Program.load(smaller))
    )
    if outputs_at_scale != small_outputs:
        raise ProgramError("the Program of the realistic size does not return what the small one returns")
    options = {"data_branches": plan.task.data_branches, "exposed_axes": list(plan.task.exposed_axes)}
    request = {"do": "analyse", "machine": plan.task.machine, **options}
    stretched = [programs[case.name] for case in plan.task.stretched() if case.name in programs]
    answer, _ = execute(request, [programs[plan.at_scale.name], smaller, *stretched])
    costs, _ = _costs_and_memory(answer)
    leaves = (program.inputs, program.outputs)
    result = []
    for order in answer["orders"]:
        arguments = {}, {}, costs, msgspec.convert(order["memory"], Memory), line, answer["difference"]
        time = msgspec.convert(order["timeline"], Timeline)
        evidence = Evidence(plan.at_scale, *leaves, *arguments, time, exposed=order["exposed"])
        result.append((evidence, _picture(order["picture"])))
    return result


def _picture(summary: Any) -> dict[str, Any] | None:
    """Normalise a timeline summary from the executor; None if malformed, since it does not affect the grade."""
    try:
        return to_summary(from_summary(summary))
    except ValueError:
        return None


def _costs_and_memory(answer: dict[str, Any]) -> tuple[Costs, Memory]:
    if "fault" in answer:
        raise Stopped(NEEDS_HUMAN, f"the grader itself failed: {answer['fault']}")
    if "exceeded" in answer:
        raise Stopped(LIMIT_EXCEEDED, str(answer["exceeded"])[:2000])
    if "refused" in answer:
        raise ProgramError(str(answer["refused"]), str(answer.get("line", ""))[:100] or None)
    return msgspec.convert(answer["costs"], Costs), msgspec.convert(answer["memory"], Memory)


def expected(plan: GradingPlan, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a case's inputs, and compute the single-device results from them, by name."""
    drawn = _drawn(plan, case)
    return drawn.inputs, drawn.expected


class _DrawnCase:
    """A case's inputs, and its single-device results, which are computed on first use."""

    def __init__(self, chapter: str, task: str, case: Case[Any], seed: int):
        self.contract, self.case = load(chapter).task(task), case
        identity = repr((case.name, list(case.mesh.items()), case.sizes))
        salt = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big")
        self.tree = self.contract.draw(np.random.default_rng([seed, salt]), case)
        self.inputs = named(self.tree)

    @cached_property
    def expected(self) -> dict[str, Any]:
        with _quick_compilation():
            return named(self.contract.oracle(self.tree, self.case))


_cached_case = lru_cache(maxsize=32)(_DrawnCase)


def _drawn(plan: GradingPlan, case: Case) -> _DrawnCase:
    stretched = case.name in {other.name for other in plan.task.stretched()}
    make = _DrawnCase if plan.official and not stretched else _cached_case  # no other submission gets the same inputs
    return make(plan.chapter, plan.task.name, replace(case, given={}), plan.shared if stretched else plan.seed)


@contextmanager
def _quick_compilation() -> Iterator[None]:
    """Reduce XLA's optimisation: an oracle is small and runs once, possibly in a notebook's kernel."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
