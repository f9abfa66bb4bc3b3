"""A process that runs cells like a kernel, in IPython's shell, and traces the functions that they define.

It serves the same requests as the tracer; each gets a forked shell, so that no request can affect the next.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import traceback
from typing import Any

from IPython.core.interactiveshell import InteractiveShell

import autograder.check
from autograder.contract.case import from_plain
from autograder.contract.task import load
from autograder.grading.inside import wire
from autograder.grading.inside.tracing import Problem, trace_cases


def run(header: dict[str, Any]) -> bytes:
    """The response to one request."""
    shell, task = InteractiveShell.instance(), load(header["chapter"]).task(header["task"])
    autograder.check.check = lambda *_, **__: None  # type: ignore[assignment]
    asyncio.run(_run_cells(shell, [cell["source"] for cell in header["cells"]]))
    function = shell.user_ns.get(task.name)
    cases = [from_plain(case, task.wrapping.sizes) for case in header["cases"]]
    missing = Problem("student_error", f"no function {task.name} in the kernel")
    traced = trace_cases(task, function, cases, lambda _: None) if callable(function) else missing
    response = io.BytesIO()
    if isinstance(traced, Problem):
        wire.write(response, {"problem": traced.to_json()})
    else:
        programs = traced.serialised()
        wire.write(response, {"cases": list(programs), "line": traced.line}, list(programs.values()))
    return response.getvalue()


async def _run_cells(shell: InteractiveShell, sources: list[str]) -> None:
    """Run cells in an event loop, like a kernel."""
    for source in sources:
        failed, code = None, source
        try:
            code = shell.transform_cell(source)
        except Exception:
            failed = sys.exc_info()
        await shell.run_cell_async(source, transformed_cell=code, preprocessing_exc_tuple=failed)


def forked(header: dict[str, Any]) -> bytes:
    """``run`` in a forked child; empty if it ended without a response."""
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            with os.fdopen(write_end, "wb") as file:
                file.write(run(header))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        data = file.read()
    os.waitpid(pid, 0)
    return data


def main() -> None:
    """Serve requests from standard input until it ends."""
    shell = InteractiveShell.instance()
    assert shell.history_manager
    shell.history_manager.enabled = False
    requests, answers = io.FileIO(0), sys.stdout.buffer
    while True:
        try:
            _, blobs = wire.read(requests)  # type: ignore[arg-type]
        except wire.WireError:
            return
        status = {"exceeded": "", "signal": None, "exit_status": 0, "cpu_s": 0.0, "output": "", "clean": True}
        wire.write(answers, status, [forked(wire.from_json(blobs[0]))])


if __name__ == "__main__":
    main()
