"""Official grading of one submission: intake, tracer, executor, judge; a pure function of submission and secret."""

from __future__ import annotations

import io
import json
import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

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
    with_denied,
)
from autograder.contract.wrapping import UNSEEN
from autograder.grading.inside import wire
from autograder.grading.inside.intake import Notebook, read_notebook, whole
from autograder.grading.inside.launch import STALL_S, Limits
from autograder.grading.inside.running import ALL_SECONDS, PATIENT_SECONDS
from autograder.grading.inside.tracing import Problem, Traced
from autograder.grading.outside.judge import Stopped, judge, plan, stopped
from autograder.grading.outside.released import lab_code
from autograder.grading.outside.workers import TRIES, Worker, sandboxed
from course.program import Program, ProgramError

# For tracing one function, and for each request to the executor. Processor time is what a submission may use up; the
# wall limit is wider, for a machine that is busy otherwise.
LIMITS = Limits(wall_s=180.0, cpu_s=60)
# For all functions of a submission together, in multiples of those; an honest one of the largest chapter stays below a
# third of it on a machine that is busy otherwise. Once a function has hung, the others get this share of the limits.
SUBMISSION, AFTER_A_HANG = 6, 2 / 3
# A function is not begun with less than this share of its limits.
LEAST = 1 / 6
# A student's process may claim these and no others.
_THEIRS = (STUDENT_ERROR, LIMIT_EXCEEDED, FAIL, REFUSED)
NONE: Mapping[str, str] = {}
_NO_MEMORY = ("bad_alloc", "out of memory", "Cannot allocate memory")


class Budget:
    """What is left of a submission's time: of its processes' on the clock and on the processor, in seconds."""

    def __init__(self, limits: Limits):
        self.usual, self.hung = limits, False
        self.wall_s, self.cpu_s = (SUBMISSION * (each or math.inf) for each in (limits.wall_s, limits.cpu_s))

    def limits(self) -> Limits:
        """The limits of the next request.

        Raises:
            Stopped: too little is left.
        """
        usual, share = self.usual, AFTER_A_HANG if self.hung else 1.0
        wall, cpu = usual.wall_s or math.inf, usual.cpu_s or math.inf
        if self.wall_s < LEAST * wall or self.cpu_s < LEAST * cpu:
            said = f"{SUBMISSION * wall:g} s, or {SUBMISSION * cpu:g} s of processor time"
            raise Stopped(
                LIMIT_EXCEEDED,
                f"all functions of a submission have {said}, together, and too little of it was left for this one: "
                "mend the function that takes so long (limit on a submission's time)",
            )
        wall, cpu = min(wall * share, self.wall_s), min(cpu * share, self.cpu_s)
        return replace(
            usual, wall_s=wall if math.isfinite(wall) else None, cpu_s=max(1, int(cpu)) if math.isfinite(cpu) else None
        )

    def spend(self, begin: float, cpu: Any) -> None:
        """Take off what a request has used since ``begin``."""
        used = cpu if isinstance(cpu, int | float) and cpu > 0 else 0.0
        self.wall_s, self.cpu_s = self.wall_s - (time.monotonic() - begin), self.cpu_s - used


class Grader:
    """Grades submissions of one chapter, one after the other, in warm sandboxed processes of its own.

    Args:
        chapter: The chapter's name.
        secret: The course's: inputs and the unseen case follow from it and the submission.
        level: What ``sandbox.best_level`` returned.
        limits: For tracing one function, and for each of its Programs.
        variants: What the course asks for by function; see ``varied``.
    """

    def __init__(
        self, chapter: str, *, secret: bytes, level: str, limits: Limits = LIMITS, variants: Mapping[str, str] = NONE
    ):
        self.variants = variants
        self.chapter, self.secret, self.level, self.limits = chapter, secret, level, limits
        self.contract = load(chapter)
        wall = limits.wall_s or 0
        # The tracer ends its children itself; its own deadline is for one that hangs.
        self.tracer = sandboxed("autograder.grading.inside.tracer", chapter, level, greets=False, seconds=wall + 30)
        self.executor = sandboxed(
            "autograder.grading.inside.executor", chapter, level, greets=True, seconds=wall, cpu_s=limits.cpu_s
        )

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self.tracer.close()
        self.executor.close()

    def grade(self, notebook: Path, student: str) -> Report:
        """Every function of a submission.

        Raises:
            IntakeError: The notebook cannot be read.
        """
        return self.grade_notebook(read_notebook(notebook), student)

    def grade_notebook(self, read: Notebook, student: str) -> Report:
        """Every function of a notebook that has been read."""
        budget = Budget(self.limits)
        results = tuple(self.grade_task(task, read, budget) for task in self.contract.tasks)
        return Report(self.chapter, results, student, self.level)

    def grade_task(self, task: Task, notebook: Notebook, budget: Budget | None = None) -> Result:
        """One function of a notebook; ``budget`` is what the functions before it have left.

        Where that is no success and experiments took so long that cells after them were left out, it is tried again
        with more time for them.
        """
        budget = budget or Budget(self.limits)
        result, left_out = self._grade_task(task, notebook, budget, patient=False)
        if left_out and result.verdict != PASS:
            result, _ = self._grade_task(task, notebook, budget, patient=True)
        return result

    def _grade_task(self, task: Task, notebook: Notebook, budget: Budget, *, patient: bool) -> tuple[Result, bool]:
        planned = plan(self.chapter, task, stretched=True, secret=self.secret, submission=notebook.digest,
                       variant=self.variants.get(task.name, ""))  # fmt: skip
        request = trace_request(self.chapter, task, notebook, planned.traced, self.limits, patient=patient)
        denied: tuple[str, ...] = ()
        left_out = False
        try:
            limits = budget.limits()
            told, blobs = self._trace(request, limits, budget)
            denied = tuple(str(call)[:200] for call in told.get("denied", []))[:50]
            if not told.get("clean", False):
                self.tracer.close()
            left_out = bool(_said(blobs[0]).get("left_out"))
            programs, line = _programs(told, blobs[0], limits)
            result = judge(planned, programs, line, partial(self._execute, budget))
        except _Told as told_problem:
            result = stopped(task, told_problem.problem)
        except wire.WireError as error:
            result = stopped(task, Problem(REFUSED, f"what the submission's process gave is not Programs: {error}"))
        except Stopped as error:
            result = stopped(task, Problem(error.verdict, str(error)))
        return with_denied(result, denied), left_out

    def _trace(self, request: dict[str, Any], limits: Limits, budget: Budget) -> tuple[dict[str, Any], list[bytes]]:
        """What the tracer tells; asked again when its child was killed from outside, or by what nobody needs."""
        for _ in range(TRIES):
            told, blobs = ask_tracer(self.tracer, {**request, "limits": asdict(limits)}, limits, budget.spend)
            budget.hung |= told["exceeded"] in ("wall time", "waiting") or _used_up(told, limits)
            if told.get("signal") != signal.SIGKILL or told["exceeded"] or _used_up(told, limits):
                return told, blobs
        said = f"the submission's process was killed from outside {TRIES} times; is this machine out of memory?"
        raise Stopped(NEEDS_HUMAN, said)

    def _execute(
        self, budget: Budget, header: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """What the executor makes of a Program, within what is left of the submission's time."""
        limits, begin, used = budget.limits(), time.monotonic(), 0.0
        self.executor.seconds, self.executor.cpu_s = limits.wall_s or 0, limits.cpu_s
        try:
            answer, arrays = self.executor.ask(header, blobs)
            used = answer.get("cpu_s", 0.0)
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
) -> dict[str, Any]:
    """What a tracer is asked for a function of a notebook. Nothing says which variant a course asks for.

    ``patient`` leaves a notebook's experiments more time.
    """
    asked = {name for variant in task.variants for name in variant.sizes}

    def shown(case: Case) -> dict[str, Any]:
        found = asdict(task.complete(case))
        return {**found, "sizes": {name: size for name, size in case.sizes.items() if name not in asked}}

    return {
        "chapter": chapter,
        "task": task.name,
        "cells": [asdict(cell) for cell in notebook.cells],
        "lab": lab_code(chapter),
        "cases": [shown(case) for case in cases],
        "platform": platform,
        "patience": PATIENT_SECONDS if patient else ALL_SECONDS,
        "limits": asdict(limits),
    }


def ask_tracer(
    tracer: Worker,
    request: dict[str, Any],
    limits: Limits,
    spend: Callable[[float, Any], None] = lambda begin, cpu: None,
) -> tuple[dict[str, Any], list[bytes]]:
    """What a tracer tells. Where its child ended without a word and before its time, it is asked for less.

    A cell that the function does not need may have ended it: by leaving Python, by its memory, or for good in C.
    """
    begin = time.monotonic()
    told, blobs = tracer.ask(*_message(request))
    spend(begin, told.get("cpu_s"))
    killed = told["exceeded"] in ("wall time", "waiting") or (
        told.get("signal") == signal.SIGKILL and not told["exceeded"]
    )
    if not blobs[0] and not killed and not _used_up(told, limits):
        if not told.get("clean", False):
            tracer.close()
        begin = time.monotonic()
        told, blobs = tracer.ask(*_message({**request, "only_needed": True}))
        spend(begin, told.get("cpu_s"))
    return told, blobs


def _message(request: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """A request as it travels: what the tracer may keep, and the whole of it, for the one process that serves it."""
    public = [case for case in request["cases"] if case["name"] != UNSEEN]
    kept = {name: request[name] for name in ("chapter", "task", "lab")}
    return {**kept, "cases": public}, [json.dumps(request).encode()]


def traced_by(tracer: Worker, request: dict[str, Any], limits: Limits) -> Traced | Problem:
    """What a tracer makes of a request, as if it had been traced here."""
    try:
        told, blobs = ask_tracer(tracer, request, limits)
        if not told.get("clean", False):
            tracer.close()
        programs, line = _programs(told, blobs[0], limits)
        loaded = {name: Program.load(data) for name, data in programs.items()}
        return Traced(loaded, line, _uses(blobs[0]))
    except _Told as error:
        return error.problem
    except Stopped as error:
        return Problem(error.verdict, str(error))
    except (wire.WireError, ProgramError) as error:
        return Problem(REFUSED, f"what the notebook's process gave is not Programs: {error}")


def _uses(result: bytes) -> dict[str, str]:
    """What a tracer says of the names that a function uses."""
    used = _said(result).get("uses")
    return {str(name): str(text) for name, text in used.items()} if isinstance(used, dict) else {}


def _said(result: bytes) -> dict[str, Any]:
    """Everything that a tracer says, of all of its messages together."""
    stream, found = io.BytesIO(result), {}
    with suppress(wire.WireError):
        while stream.tell() < len(result):
            header, sizes = wire.read_header(stream)
            found |= header
            stream.seek(sum(sizes), io.SEEK_CUR)
    return found


class _Told(Exception):
    """The tracer says that there are no Programs, and why."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


def _programs(told: dict[str, Any], result: bytes, limits: Limits) -> tuple[dict[str, bytes], str]:
    """Programs by case and the line of the definition, from what the student's process wrote: trusted in nothing."""
    if told["exceeded"]:
        raise _Told(Problem(LIMIT_EXCEEDED, _ended(told["exceeded"], limits)))
    stream = io.BytesIO(result)
    header, blobs = wire.read(stream) if result else ({"ran": True}, [])
    if header.get("ran"):  # its cells have run, nothing else is said yet
        if stream.tell() == len(result):
            raise _Told(_silent(told, limits))
        header, blobs = wire.read(stream)
    if "problem" in header:
        problem = header["problem"] if isinstance(header["problem"], dict) else {}
        verdict = problem.get("verdict")
        text, line = whole(str(problem.get("message", ""))[:2000]), whole(str(problem.get("line", ""))[:100])
        raise _Told(Problem(verdict if verdict in _THEIRS else REFUSED, text, line))
    cases = header.get("cases")
    if not isinstance(cases, list) or len(cases) != len(blobs) or not all(isinstance(c, str) for c in cases):
        raise wire.WireError("its cases and Programs do not fit together")
    return dict(zip(cases, blobs, strict=True)), whole(str(header.get("line", ""))[:100])


def _ended(limit: str, limits: Limits) -> str:
    """Why the grader ended a student's process."""
    most = {
        "wall time": f"took longer than {limits.wall_s:g} s",
        "waiting": f"computed nothing for {STALL_S:g} s",
        "output": f"printed more than {limits.output >> 20} MiB",
        "result size": "gave more than Programs may have together",
    }
    return f"the submission's process {most[limit]} and was ended (limit on {limit})"


def _silent(told: dict[str, Any], limits: Limits) -> Problem:
    """Why a student's process may have ended without a word."""
    lines = str(told.get("output", "")).strip().splitlines()
    said = f"; its last words: {lines[-1][:300]}" if lines else ""
    if told.get("signal") == signal.SIGXCPU or (told.get("signal") == signal.SIGKILL and _used_up(told, limits)):
        said = f"the submission's process used more than {limits.cpu_s} s of processor time and was ended"
        return Problem(LIMIT_EXCEEDED, f"{said} (limit on processor time)")
    if "pthread_create failed" in str(told.get("output", "")):
        said = "the submission's process could not start another thread (limit on processes and threads)"
        return Problem(LIMIT_EXCEEDED, said)
    if any(words in said for words in _NO_MEMORY):
        return Problem(LIMIT_EXCEEDED, f"the submission's process needed more memory than it may have{said}")
    if told.get("signal") is not None:
        return Problem(STUDENT_ERROR, f"the submission's process crashed with signal {told['signal']}{said}")
    return Problem(
        STUDENT_ERROR, f"the submission's process ended without a result, status {told.get('exit_status')}{said}"
    )


def _used_up(told: dict[str, Any], limits: Limits) -> bool:
    return limits.cpu_s is not None and told.get("cpu_s", 0.0) >= limits.cpu_s - 1
