"""Official grading of one submission: intake, tracer, executor, judge; a pure function of submission and secret."""

from __future__ import annotations

import dataclasses
import io
import math
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from autograder.contract.case import UNSEEN, to_plain
from autograder.contract.task import Case, Task, load
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    NEEDS_HUMAN,
    PASS,
    REFUSED,
    STUDENT_ERROR,
    Report,
    Result,
)
from autograder.grading.inside import wire
from autograder.grading.inside.intake import Notebook, read_notebook
from autograder.grading.inside.launch import STALL_S, Limits
from autograder.grading.inside.messages import Ending, TraceMessage, TraceRequest, untrusted
from autograder.grading.inside.running import ALL_SECONDS, PATIENT_SECONDS
from autograder.grading.inside.tracing import Problem, Traced
from autograder.grading.outside.judge import Stopped, judge, plan, stopped
from autograder.grading.outside.notebook_options import lab_code
from autograder.grading.outside.workers import TRACER, TRIES, Worker, sandboxed
from course.program import Program, ProgramError

# Limits for tracing one function, and for each request to the executor. Processor time is a submission's actual
# allowance; the wall limit is wider, to allow for a busy machine.
LIMITS = Limits(wall_s=180.0, cpu_s=60)
# The budget for all functions of a submission together, in multiples of these limits; an honest submission for the
# largest chapter uses less than a third of it on a busy machine. Once a function has hung, the others get this share
# of the limits.
SUBMISSION, AFTER_A_HANG = 6, 2 / 3
# A course's own budget is in processor time; the budget in wall time is this many times as much.
WALL_FOR_CPU = 3
# Compiled and parsed Programs stay in an executor for the next submissions, until it occupies this much memory.
KEPT_BYTES = 1 << 30
# A function is not started with less than this share of its limits.
LEAST = 1 / 6
# The only verdicts that a student's process may claim.
_CLAIMABLE = (STUDENT_ERROR, LIMIT_EXCEEDED, FAIL, REFUSED)
NONE: Mapping[str, str] = {}
NO_LIMITS: Mapping[str, Mapping[str, float]] = {}
_NO_MEMORY = ("bad_alloc", "out of memory", "Cannot allocate memory")


class Budget:
    """A submission's remaining wall time and processor time, in seconds.

    ``seconds`` is the processor time that a course gives a submission; 0 for the usual limit. If it runs short, a
    function is left to a person.
    """

    def __init__(self, limits: Limits, seconds: float = 0.0):
        self.usual, self.hung, self.seconds, self.short = limits, False, seconds, False
        self.wall_s, self.cpu_s = (SUBMISSION * (each or math.inf) for each in (limits.wall_s, limits.cpu_s))
        if seconds:
            self.wall_s, self.cpu_s = WALL_FOR_CPU * seconds, seconds

    def limits(self) -> Limits:
        """The limits of the next request.

        Raises:
            Stopped: Too little time is left.
        """
        usual, share = self.usual, AFTER_A_HANG if self.hung else 1.0
        wall, cpu = usual.wall_s or math.inf, usual.cpu_s or math.inf
        self.short = self.wall_s < share * wall or self.cpu_s < share * cpu
        if self.wall_s < LEAST * wall or self.cpu_s < LEAST * cpu:
            budget = f"{SUBMISSION * wall:g} s, or {SUBMISSION * cpu:g} s of processor time"
            raise Stopped(
                LIMIT_EXCEEDED,
                f"all functions of a submission have {budget}, together, and too little of it was left for this one: "
                "fix the function that takes so long (limit on a submission's time)",
            )
        wall, cpu = min(wall * share, self.wall_s), min(cpu * share, self.cpu_s)
        return dataclasses.replace(
            usual, wall_s=wall if math.isfinite(wall) else None, cpu_s=max(1, int(cpu)) if math.isfinite(cpu) else None
        )

    def judged(self, result: Result) -> Result:
        """Return the result, but leave it to a person if it ended because the course's budget ran short."""
        if result.verdict != LIMIT_EXCEEDED or not (self.seconds and self.short):
            return result
        message = (
            f"the course's budget of {self.seconds:g} processor seconds for a submission was too short for this "
            "function and those before it; give its points by hand, or raise the budget (meshcraft init --budget) "
            "and grade again"
        )
        return dataclasses.replace(result, verdict=NEEDS_HUMAN, points=0.0, message=message)

    def spend(self, begin: float, cpu: Any) -> None:
        """Deduct the time a request has used since ``begin``."""
        used = cpu if isinstance(cpu, int | float) and cpu > 0 else 0.0
        self.wall_s, self.cpu_s = self.wall_s - (time.monotonic() - begin), self.cpu_s - used


class Grader:
    """Grades submissions of one chapter, one after the other, in its own warm sandboxed processes.

    Args:
        chapter: The chapter's name.
        secret: The course's secret: inputs and the unseen case follow from it and the submission.
        level: The level returned by ``sandbox.best_level``.
        limits: Limits for tracing one function, and for each of its Programs.
        variants: The course's variants by function; see ``varied``.
        ungraded: Functions that the course does not grade.
        factors: The course's factors on limits, by function and fact.
        budget: The course's processor seconds for a submission; 0 for the usual limit.
    """

    def __init__(
        self,
        chapter: str,
        *,
        secret: bytes,
        level: str,
        limits: Limits = LIMITS,
        variants: Mapping[str, str] = NONE,
        ungraded: Collection[str] = (),
        budget: float = 0.0,
        factors: Mapping[str, Mapping[str, float]] = NO_LIMITS,
    ):
        self.factors = factors
        self.variants, self.ungraded, self.budget = variants, ungraded, budget
        self.chapter, self.secret, self.level, self.limits = chapter, secret, level, limits
        self.contract = load(chapter)
        self.occupied = 0  # memory of the executor, in bytes, after its last response
        wall = limits.wall_s or 0
        # The tracer ends its children itself; its own deadline is for one that hangs.
        self.tracer = sandboxed(TRACER, chapter, level, greets=False, seconds=wall + 30)
        self.executor = sandboxed(
            "autograder.grading.inside.executor", chapter, level, greets=True, seconds=wall, cpu_s=limits.cpu_s
        )

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self.tracer.close()
        self.executor.close()

    def grade(self, notebook: Path, student: str) -> Report:
        """Grade every function of a submission.

        Raises:
            IntakeError: The notebook cannot be read.
        """
        return self.grade_notebook(read_notebook(notebook), student)

    def grade_notebook(self, read: Notebook, student: str) -> Report:
        """Grade every function of a notebook that has been read, except those that the course does not grade."""
        budget = Budget(self.limits, self.budget)
        tasks = [task for task in self.contract.tasks if task.name not in self.ungraded]
        results = tuple(budget.judged(self.grade_task(task, read, budget)) for task in tasks)
        self._bound_memory()
        return Report(self.chapter, results, student, self.level)

    def _bound_memory(self) -> None:
        """Replace an executor that has grown too large; the next one starts while the next submission is traced."""
        if self.occupied > KEPT_BYTES:
            self.executor.close()
            self.executor.start_early()
            self.occupied = 0

    def grade_task(self, task: Task, notebook: Notebook, budget: Budget | None = None) -> Result:
        """Grade one function of a notebook; ``budget`` is the time left by the functions before it.

        If the function fails and slow experiments made the grader skip the cells after them, it is retried with more
        time for them.
        """
        budget = budget or Budget(self.limits)
        result, left_out = self._grade_task(task, notebook, budget, patient=False)
        if left_out and result.verdict != PASS:
            result, _ = self._grade_task(task, notebook, budget, patient=True)
        return result

    def _grade_task(self, task: Task, notebook: Notebook, budget: Budget, *, patient: bool) -> tuple[Result, bool]:
        variant = self.variants.get(task.name, "")
        options: dict[str, Any] = {"variant": variant, "factors": self.factors.get(task.name, {})}
        planned = plan(self.chapter, task, stretched=True, secret=self.secret, submission=notebook.digest, **options)
        request = trace_request(self.chapter, task, notebook, planned.traced, self.limits, patient=patient)
        denied: tuple[str, ...] = ()
        left_out = False
        try:
            limits = budget.limits()
            ending, written = self._trace(replace(request, limits=limits), budget)
            denied = tuple(call[:200] for call in ending.denied[:50])
            message, programs = read_result(ending, written, limits)
            left_out = message.left_out > 0
            if message.problem:
                result = stopped(task, dataclasses.replace(message.problem, original=""))
            else:
                result = judge(planned, programs, message.line, partial(self._execute, budget))
        except wire.WireError as error:
            result = stopped(task, Problem(REFUSED, f"the submission's process returned invalid Programs: {error}"))
        except Stopped as error:
            result = stopped(task, Problem(error.verdict, str(error)))
        return dataclasses.replace(result, denied=denied), left_out

    def _trace(self, request: TraceRequest, budget: Budget) -> tuple[Ending, bytes]:
        """Return the tracer's response; retry if its child was killed from outside."""
        for _ in range(TRIES):
            ending, written = ask_tracer(self.tracer, request, budget.spend)
            used_up = _used_up(ending, request.limits)
            budget.hung |= ending.exceeded in ("wall time", "waiting") or used_up
            if ending.signal != signal.SIGKILL or ending.exceeded or used_up:
                return ending, written
        message = f"the submission's process was killed from outside {TRIES} times; is this machine out of memory?"
        raise Stopped(NEEDS_HUMAN, message)

    def _execute(
        self, budget: Budget, header: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """The executor's response, within the submission's remaining time."""
        limits, begin, used = budget.limits(), time.monotonic(), 0.0
        self.executor.seconds, self.executor.cpu_s = limits.wall_s or 0, limits.cpu_s
        try:
            answer, arrays = self.executor.ask(header, blobs)
            used, self.occupied = answer.get("cpu_s", 0.0), answer.get("resident_bytes", self.occupied)
            return answer, arrays
        except Stopped as error:
            budget.hung |= error.verdict == LIMIT_EXCEEDED
            used = error.cpu_s
            raise
        finally:
            budget.spend(begin, used)


def trace_request(
    chapter: str,
    task: Task,
    notebook: Notebook,
    cases: list[Case],
    limits: Limits,
    platform: str = "cpu",
    *,
    patient: bool = False,
    with_uses: bool = False,
) -> TraceRequest:
    """Build the request to trace a function of a notebook. It does not reveal the course's variant.

    ``patient`` allows a notebook's experiments more time.
    """
    varied = {name for variant in task.variants for name in variant.sizes}

    def plain_case(case: Case) -> dict[str, Any]:
        plain = to_plain(task.complete(case))
        return {**plain, "sizes": {name: size for name, size in plain["sizes"].items() if name not in varied}}

    patience = PATIENT_SECONDS if patient else ALL_SECONDS
    cells, lab, plain_cases = tuple(notebook.cells), lab_code(chapter), tuple(map(plain_case, cases))
    return TraceRequest(chapter, task.name, cells, lab, plain_cases, limits, patience, platform, with_uses=with_uses)


def ask_tracer(
    tracer: Worker, request: TraceRequest, spend: Callable[[float, Any], None] = lambda begin, cpu: None
) -> tuple[Ending, bytes]:
    """Run a tracer child; return its ending and output. After an early silent exit, retry with only what is needed.

    A cell that the function does not need may have caused it: by exiting Python, exhausting memory, or hanging in C.
    """
    ending, written = _ask(tracer, request, spend)
    killed = ending.exceeded in ("wall time", "waiting") or (ending.signal == signal.SIGKILL and not ending.exceeded)
    if not written and not killed and not _used_up(ending, request.limits):
        ending, written = _ask(tracer, replace(request, only_needed=True), spend)
    return ending, written


def _ask(tracer: Worker, request: TraceRequest, spend: Callable[[float, Any], None]) -> tuple[Ending, bytes]:
    """Send one request: a header the tracer may keep, and the full request for the one process that serves it."""
    begin = time.monotonic()
    public = [case for case in request.cases if case["name"] != UNSEEN]
    header = {"chapter": request.chapter, "task": request.task, "lab": request.lab, "cases": public}
    response, (written, *_) = tracer.ask(header, [msgspec.json.encode(request)])
    ending = msgspec.convert(response, Ending)
    spend(begin, ending.cpu_s)
    if not ending.clean:
        tracer.close()
    return ending, written


def traced_by(tracer: Worker, request: TraceRequest) -> Traced | Problem:
    """Trace in another process, with the same interface as tracing locally."""
    try:
        message, programs = read_result(*ask_tracer(tracer, request), request.limits)
        return _traced(message, programs)
    except Stopped as error:
        return Problem(error.verdict, str(error))
    except (wire.WireError, ProgramError) as error:
        return Problem(REFUSED, f"the notebook's process returned invalid Programs: {error}")


def trace_together(tracer: Worker, requests: list[TraceRequest]) -> list[Traced | Problem]:
    """Trace several functions of a notebook, whose cells run once.

    If they end the shared process, each function gets a separate process, which runs the cells again.

    Args:
        tracer: A tracer that serves no other request in the meantime.
        requests: From ``trace_request``, for the same notebook with the same limits: each limit applies to one request,
            and n requests together can use n times as much.
    """
    first, *others = requests
    if others:
        wall, cpu = first.limits.wall_s or 0, first.limits.cpu_s or 0
        limits = dataclasses.replace(first.limits, wall_s=len(requests) * wall, cpu_s=len(requests) * cpu)
        also = tuple(function for other in others for function in other.functions)
        with suppress(Stopped, wire.WireError, ProgramError):
            _, written = ask_tracer(tracer, replace(first, also=also, limits=limits))
            messages = [_accepted(*read) for read in _messages(written) if not read[0].ran]
            if len(messages) == len(requests):
                return [_traced(*accepted) for accepted in messages]
    return [traced_by(tracer, request) for request in requests]


def _traced(message: TraceMessage, programs: dict[str, bytes]) -> Traced | Problem:
    if message.problem:
        return message.problem
    return Traced({name: Program.load(data) for name, data in programs.items()}, message.line, message.uses)


def read_result(ending: Ending, written: bytes, limits: Limits) -> tuple[TraceMessage, dict[str, bytes]]:
    """Read the untrusted output of a student's process: its message, and its Programs by case.

    Raises:
        WireError: It is not a valid message.
    """
    if ending.exceeded:
        return TraceMessage(problem=Problem(LIMIT_EXCEEDED, _ended(ending.exceeded, limits))), {}
    messages = _messages(written)
    message, blobs = next(messages, (TraceMessage(ran=True), []))
    if message.ran:  # its cells have run, nothing else is known yet
        following = next(messages, None)
        if following is None:
            return TraceMessage(problem=_silent(ending, limits)), {}
        message, blobs = following
    return _accepted(message, blobs)


def _messages(written: bytes) -> Iterator[tuple[TraceMessage, list[bytes]]]:
    stream = io.BytesIO(written)
    while stream.tell() < len(written):
        header, blobs = wire.read(stream)
        yield untrusted(header, TraceMessage), blobs


def _accepted(message: TraceMessage, blobs: list[bytes]) -> tuple[TraceMessage, dict[str, bytes]]:
    """Accept one function's message and its Programs by case, or a problem that a student's process may claim."""
    if problem := message.problem:
        verdict = problem.verdict if problem.verdict in _CLAIMABLE else REFUSED
        texts = problem.message[:2000], problem.line[:100], problem.original[:8000], problem.runs[:100]
        trimmed_problem = Problem(verdict, *texts, unwritten=problem.unwritten)
        return replace(message, problem=trimmed_problem), {}
    if not message.cases or len(message.cases) != len(blobs):
        raise wire.WireError("its cases and Programs do not match")
    return replace(message, line=message.line[:100]), dict(zip(message.cases, blobs, strict=True))


def _ended(limit: str, limits: Limits) -> str:
    """The reason why the grader ended a student's process."""
    outcomes = {
        "wall time": f"took longer than {limits.wall_s:g} s",
        "waiting": f"computed nothing for {STALL_S:g} s",
        "output": f"printed more than {limits.output >> 20} MiB",
        "result size": "exceeded the total size limit for Programs",
    }
    return f"the submission's process {outcomes[limit]} and was ended (limit on {limit})"


def _silent(ending: Ending, limits: Limits) -> Problem:
    """The likely reason why a student's process ended silently."""
    lines = ending.output.strip().splitlines()
    last = f"; its last words: {lines[-1][:300]}" if lines else ""
    if ending.signal == signal.SIGXCPU or (ending.signal == signal.SIGKILL and _used_up(ending, limits)):
        message = f"the submission's process used more than {limits.cpu_s} s of processor time and was ended"
        return Problem(LIMIT_EXCEEDED, f"{message} (limit on processor time)")
    if "pthread_create failed" in ending.output:
        message = "the submission's process could not start another thread (limit on processes and threads)"
        return Problem(LIMIT_EXCEEDED, message)
    if any(words in last for words in _NO_MEMORY):
        return Problem(LIMIT_EXCEEDED, f"the submission's process needed more memory than it is allowed{last}")
    if ending.signal is not None:
        return Problem(STUDENT_ERROR, f"the submission's process crashed with signal {ending.signal}{last}")
    return Problem(STUDENT_ERROR, f"the submission's process ended without a result, status {ending.exit_status}{last}")


def _used_up(ending: Ending, limits: Limits) -> bool:
    return limits.cpu_s is not None and ending.cpu_s >= limits.cpu_s - 1
