"""Official grading of one submission: intake, tracer, executor, judge; a pure function of submission and secret."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from autograder.contract import Task, load
from autograder.grading import wire
from autograder.grading.intake import Notebook, read_notebook
from autograder.grading.judge import Stopped, judge, plan, stopped
from autograder.grading.launch import Limits
from autograder.grading.tracing import Problem
from autograder.grading.workers import sandboxed
from autograder.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    REFUSED,
    STUDENT_ERROR,
    Report,
    Result,
    with_denied,
)

# Processor time is what a submission may use up; the wall limits are wider, for a machine that is busy otherwise.
TRACE_LIMITS = Limits(wall_s=180.0, cpu_s=60)
RUN_SECONDS = 180.0
# A student's process may claim these and no others.
_THEIRS = (STUDENT_ERROR, FAIL, REFUSED)


class Grader:
    """Grades submissions of one chapter, one after the other, in warm sandboxed processes of its own.

    Args:
        chapter: The chapter's name.
        secret: The course's: inputs and the unseen case follow from it and the submission.
        level: What ``sandbox.best_level`` returned.
    """

    def __init__(self, chapter: str, *, secret: bytes, level: str):
        self.chapter, self.secret, self.level = chapter, secret, level
        self.contract = load(chapter)
        slack = (TRACE_LIMITS.wall_s or 0) + 30
        self.tracer = sandboxed("autograder.grading.tracer", chapter, level, greets=False, seconds=slack)
        self.executor = sandboxed("autograder.grading.executor", chapter, level, greets=True, seconds=RUN_SECONDS)

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
        read = read_notebook(notebook)
        results = tuple(self._grade_task(task, read) for task in self.contract.tasks)
        return Report(self.chapter, results, student, self.level)

    def _grade_task(self, task: Task, notebook: Notebook) -> Result:
        planned = plan(self.chapter, task, secret=self.secret, submission=notebook.digest)
        request = {
            "chapter": self.chapter,
            "task": task.name,
            "cells": [asdict(cell) for cell in notebook.cells],
            "cases": [asdict(case) for case in planned.traced],
            "limits": asdict(TRACE_LIMITS),
        }
        denied: tuple[str, ...] = ()
        try:
            told, blobs = self.tracer.ask(request)
            denied = tuple(str(call)[:200] for call in told.get("denied", []))[:50]
            if not told.get("clean", False):
                self.tracer.close()
            programs, line = _programs(told, blobs[0])
            result = judge(planned, programs, line, self.executor.ask)
        except _Told as told_problem:
            result = stopped(task, told_problem.problem)
        except wire.WireError as error:
            result = stopped(task, Problem(REFUSED, f"what the submission's process gave is not Programs: {error}"))
        except Stopped as error:
            result = stopped(task, Problem(error.verdict, str(error)))
        return with_denied(result, denied)


class _Told(Exception):
    """The tracer says that there are no Programs, and why."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


def _programs(told: dict[str, Any], result: bytes) -> tuple[dict[str, bytes], str]:
    """Programs by case and the line of the definition, from what the student's process wrote: trusted in nothing."""
    if told["timed_out"]:
        raise _Told(Problem(LIMIT_EXCEEDED, f"tracing took longer than {TRACE_LIMITS.wall_s:g} s and was ended"))
    if told["result_overflow"]:
        raise _Told(Problem(REFUSED, "the submission's process wrote more than a result may have"))
    if not result:
        raise _Told(_silent(told))
    header, blobs = wire.read(io.BytesIO(result))
    if "problem" in header:
        problem = header["problem"] if isinstance(header["problem"], dict) else {}
        verdict = problem.get("verdict")
        text = str(problem.get("message", ""))[:2000]
        raise _Told(Problem(verdict if verdict in _THEIRS else REFUSED, text, str(problem.get("line", ""))[:100]))
    cases = header.get("cases")
    if not isinstance(cases, list) or len(cases) != len(blobs) or not all(isinstance(c, str) for c in cases):
        raise wire.WireError("its cases and Programs do not fit together")
    return dict(zip(cases, blobs, strict=True)), str(header.get("line", ""))[:100]


def _silent(told: dict[str, Any]) -> Problem:
    """Why a student's process may have ended without a word."""
    lines = str(told.get("output", "")).strip().splitlines()
    said = f"; its last words: {lines[-1][:300]}" if lines else ""
    if told.get("signal") in (24, 9):  # SIGXCPU, SIGKILL
        return Problem(LIMIT_EXCEEDED, f"the submission's process used more time or memory than allowed{said}")
    if told.get("signal") is not None:
        return Problem(STUDENT_ERROR, f"the submission's process crashed with signal {told['signal']}{said}")
    return Problem(
        STUDENT_ERROR, f"the submission's process ended without a result, status {told.get('exit_status')}{said}"
    )
