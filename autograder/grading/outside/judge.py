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
from autograder.contract.verdict import FAIL, LIMIT_EXCEEDED, NEEDS_HUMAN, STUDENT_ERROR, Fact, Kind, Result, conclude
from autograder.contract.wrapping import never_called
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

    ``seed`` follows from the submission; ``shared`` is that of the stretched cases, whose large inputs and oracles are
    computed once for all submissions of a course. ``official`` means that these inputs are secret, and that the
    verdict is recorded; ``variant`` is the course's variant, if it asks for one, and ``factors`` are the course's
    on the limits of facts.
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
        secret: The course's secret; with it inputs follow from the submission and are unpredictable, and one
            more case is drawn. Without it they are the same each time.
        submission: Hash of the submission.
        variant: The course's variant; empty for the default.
        factors: The course's factors on the limits of facts, by the fact's name.

    Raises:
        ChoiceError: The task has no such variant.
    """
    seed, shared = (_seed(secret, f"{whose}|{chapter}|{task.name}") for whose in (submission, "all"))
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
        line: Where the function is defined, as ``cell:line``.
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
    cases, known = [seen[case.name] for case in plan.cases], references(plan.chapter).get(plan.task.name, {})
    try:
        orders = _analyse(plan, programs, line, execute) if plan.at_scale else [(None, None)]
    except ProgramError as error:
        return _at_scale_refused(refused(error), plan, _concluded(plan, cases, None, known, None))
    results = [_concluded(plan, cases, large, known, picture) for large, picture in orders]
    return max(results, key=lambda result: (result.points, -sum(fact.excess for fact in result.missed)))


def _at_scale_refused(problem: Problem, plan: GradingPlan, small: Result) -> Result:
    """Report a refusal at scale, after any values or gradients that are already wrong at small sizes."""
    if small.points:
        return stopped(plan.task, problem)
    why = f"the Program of the realistic size is refused: {problem.message}"
    facts = (replace(f, message=why, line=problem.line) if f.passed is None else f for f in small.facts)
    return replace(small, facts=tuple(facts))


def _concluded(
    plan: GradingPlan,
    cases: list[Evidence],
    large: Evidence | None,
    known: dict[str, Any],
    picture: dict[str, Any] | None,
) -> Result:
    """Conclude the result with the realistic size in one of its orders."""
    judged = TaskEvidence(cases, large, known, dict(plan.factors))
    found = plan.task.facts(judged)
    if unknown := sorted({*judged.factors} - judged.adjustable):
        names = ", ".join(sorted(judged.adjustable)) or "none"
        raise ChoiceError(
            f"{plan.task.name} has no fact {unknown[0]!r} whose limit a course may change; it has: {names}"
        )
    facts = [
        replace(_in_this_course(_with_factor(fact, judged), plan.variant), core=fact.name in plan.task.core_facts)
        for fact in found
    ]
    result = conclude(plan.task.name, plan.task.points, facts)
    if plan.official:
        return replace(result, timeline=picture, form=cases[0].form)
    return replace(result, cases=tuple(evidence.case.name for evidence in cases))


def _with_factor(fact: Fact, judged: TaskEvidence) -> Fact:
    """Add to a fact that fails that its limit is this course's own."""
    if fact.passed is not False or judged.factors.get(fact.name, 1.0) == 1.0:
        return fact
    more = f"In this course the limit is {judged.factors[fact.name]:g} times ours."
    return replace(fact, message=append_sentence(fact.message, more))


def _in_this_course(fact: Fact, variant: Variant | None) -> Fact:
    """Add to a fact about wrong numbers what this course's variant asks for, if it has one."""
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


def _load(plan: GradingPlan, case: Case, programs: dict[str, bytes]) -> Program:
    """Load the case's Program, whose signature must match the contract's exactly."""
    if case.name not in programs:
        raise ProgramError(f"there is no Program for {case.name}")
    program = Program.load(programs[case.name])
    wrapped = plan.task.wrap(never_called, case)
    expected = signature_of(wrapped.inputs, wrapped.in_specs, wrapped.roles)
    if program.mesh != case.mesh or list(program.mesh) != list(case.mesh):
        raise ProgramError(f"the Program for {case.name} is for mesh {program.mesh}, expected {case.mesh}")
    if program.platform != "cpu":
        raise ProgramError(f"the Program for {case.name} is for platform {program.platform!r}, expected 'cpu'")
    for leaf, wanted in zip((*program.inputs, None), (*expected, None), strict=False):
        if leaf != wanted:
            raise ProgramError(f"the Program for {case.name} takes {leaf}, expected {wanted}")
    donated = tuple(index for index, leaf in enumerate(expected) if leaf.name.split("/")[0] in wrapped.donate)
    if program.donated != donated:
        raise ProgramError(
            f"the Program for {case.name} donates its inputs {list(program.donated)}, expected {list(donated)}"
        )
    return program


def _run(plan: GradingPlan, case: Case, programs: dict[str, bytes], line: str, execute: Execute) -> Evidence:
    program = _load(plan, case, programs)
    drawn = _drawn(plan, case)
    description, blobs = wire.pack(drawn.inputs)
    options = {"data_branches": plan.task.data_branches, "form": plan.official and case is plan.cases[0]}
    with ThreadPoolExecutor(1) as pool:  # the oracle here, while the executor compiles and runs the Program
        single_device = pool.submit(lambda: drawn.wanted)
        answer, arrays = execute({"do": "run", "inputs": description, **options}, [programs[case.name], *blobs])
    looked, wanted = _looked(answer), single_device.result()
    measured = wire.unpack(answer.get("results", []), arrays)
    if set(measured) != set(wanted):
        missing, extra = sorted(set(wanted) - set(measured)), sorted(set(measured) - set(wanted))
        raise ProgramError(f"the Program's results are not the contract's: missing {missing}, unknown {extra}")
    leaves, form = (program.inputs, program.outputs), str(answer.get("form", ""))[:32]
    squeezed = plan.task.wrap(never_called, case).squeezed
    kept = {"secret": plan.official, "form": form, "drawn": drawn.inputs, "squeezed": squeezed}
    return Evidence(case, *leaves, measured, wanted, *looked, line, **kept)


def _analyse(
    plan: GradingPlan, programs: dict[str, bytes], line: str, execute: Execute
) -> list[tuple[Evidence, dict[str, Any] | None]]:
    """Analyse the realistic size; return evidence and a timeline summary for each order of its collectives.

    The best order of a Program counts, for all facts together: issuing early also takes memory early.
    """
    assert plan.at_scale and plan.task.at_scale
    program = _load(plan, plan.at_scale, programs)
    smaller = programs[plan.task.at_scale[1]]
    theirs, ours = ([(x.name, x.dtype, x.spec) for x in p.outputs] for p in (program, Program.load(smaller)))
    if theirs != ours:
        raise ProgramError("the Program of the realistic size does not return what the small one returns")
    options = {"data_branches": plan.task.data_branches, "exposed_axes": list(plan.task.exposed_axes)}
    request = {"do": "analyse", "machine": plan.task.machine, **options}
    stretched = [programs[case.name] for case in plan.task.stretched() if case.name in programs]
    answer, _ = execute(request, [programs[plan.at_scale.name], smaller, *stretched])
    costs, _ = _looked(answer)
    leaves = (program.inputs, program.outputs)
    result = []
    for order in answer["orders"]:
        looked = {}, {}, costs, msgspec.convert(order["memory"], Memory), line, answer["difference"]
        time = msgspec.convert(order["timeline"], Timeline)
        evidence = Evidence(plan.at_scale, *leaves, *looked, time, exposed=order["exposed"])
        result.append((evidence, _picture(order["picture"])))
    return result


def _picture(brief: Any) -> dict[str, Any] | None:
    """Normalise a timeline summary from the executor; None if malformed, since it does not affect the grade."""
    try:
        return to_summary(from_summary(brief))
    except ValueError:
        return None


def _looked(answer: dict[str, Any]) -> tuple[Costs, Memory]:
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
    return drawn.inputs, drawn.wanted


class _Drawn:
    """A case's inputs and, computed when first asked for, the single-device results."""

    def __init__(self, chapter: str, task: str, case: Case[Any], seed: int):
        self.contract, self.case = load(chapter).task(task), case
        what = repr((case.name, list(case.mesh.items()), case.sizes))
        salt = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "big")
        self.tree = self.contract.draw(np.random.default_rng([seed, salt]), case)
        self.inputs = named(self.tree)

    @cached_property
    def wanted(self) -> dict[str, Any]:
        with _quick_compilation():
            return named(self.contract.oracle(self.tree, self.case))


_kept = lru_cache(maxsize=32)(_Drawn)


def _drawn(plan: GradingPlan, case: Case) -> _Drawn:
    stretched = case.name in {other.name for other in plan.task.stretched()}
    make = _Drawn if plan.official and not stretched else _kept  # no other submission gets the same inputs
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
