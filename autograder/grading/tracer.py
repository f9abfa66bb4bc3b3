"""The sandboxed process that holds a student's Python: cells in, serialised Programs out, and nothing else.

It starts no backend and runs none of the student's code itself: each request is served by a fork that has taken
the strict filter first, so one request cannot change the next.
"""

from __future__ import annotations

import gc
import json
import sys
from functools import cache
from io import FileIO
from typing import Any, BinaryIO

import course  # noqa: F401  before anything that could start JAX
from autograder.grading import wire
from autograder.grading.confine import fork_confined
from autograder.grading.intake import Cell
from autograder.grading.launch import Limits
from autograder.grading.tracing import Problem, explained, find_function, locate_cell, run_cells, trace_cases
from autograder.wrapping import UNSEEN, Case, wrappings

MAX_RESULT = 64 * 2**20
REPORTED = ("exceeded", "signal", "exit_status", "cpu_s", "denied", "output", "clean")


def trace_request(header: dict[str, Any], result: BinaryIO) -> None:
    """Serve one request, in the confined child: write the Programs, or why there are none."""
    task = wrappings(header["chapter"])[header["task"]]
    namespace, problems = run_cells([Cell(**cell) for cell in header["cells"]])
    function = find_function(task, namespace, problems)
    found = function if isinstance(function, Problem) else None
    if found is None:
        traced = trace_cases(task, function, [Case(**case) for case in header["cases"]], locate_cell)  # type: ignore[arg-type]
        if not isinstance(traced, Problem):
            programs = {name: program.serialise() for name, program in traced.programs.items()}
            wire.write(result, {"cases": list(programs), "line": traced.line}, list(programs.values()))
            return
        found = explained(traced, problems)
    wire.write(result, {"problem": found.to_json()})


@cache
def prepare(chapter: str, task: str, case: str) -> None:
    """Do once what every submission needs: what a task's cases are made of. None of it is a student's."""
    wrappings(chapter)[task].wrap(_nothing, Case(**json.loads(case)))
    gc.collect()
    gc.freeze()  # a fork need not look for garbage among what is here already


def _nothing(*_: Any) -> Any:
    raise AssertionError("nothing is traced here")


def main() -> None:
    """Serve requests from standard input until it ends."""
    # Unbuffered: a fork must not find the next request in a buffer.
    requests, answers = FileIO(0), sys.stdout.buffer
    while True:
        try:
            header, _ = wire.read(requests)  # type: ignore[arg-type]
        except wire.WireError:
            return
        for case in header["cases"]:
            if case["name"] != UNSEEN:
                prepare(header["chapter"], header["task"], json.dumps(case))
        limits = Limits(**header["limits"])
        report = fork_confined(
            lambda result, h=header: trace_request(h, result), limits=limits, result_bytes=MAX_RESULT
        )
        said = {name: getattr(report, name) for name in REPORTED}
        wire.write(answers, said, [report.result])


if __name__ == "__main__":
    main()
