"""The sandboxed process for a student's Python: cells in, serialised Programs out, and nothing else.

It starts no JAX backend, and does not itself read or run student code: a fork reads and serves each request, and
forks again; this second fork applies the strict filter before it runs the student's code. So no request can affect the
next one, or find another's data in its memory.
"""

import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
import types
from functools import cache
from io import FileIO
from typing import Any, BinaryIO

import msgspec

import course  # noqa: F401  before anything that could start JAX
from autograder.contract.case import from_plain
from autograder.contract.wrapping import never_called, wrappings
from autograder.grading.inside import wire
from autograder.grading.inside.cells import locate_cell
from autograder.grading.inside.jailed_child import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, fork_confined, prctl
from autograder.grading.inside.messages import Ending, FunctionRequest, TraceRequest
from autograder.grading.inside.running import STATEMENT_SECONDS, Ran, lab_statements, run_cells
from autograder.grading.inside.tracing import UNROLLED, Problem, time_limit, trace_cases
from autograder.grading.inside.uses import uses
from course import predict, render  # noqa: F401  imported by labs; loaded once for all forks

MAX_RESULT = 64 * 2**20


def trace_request(request: TraceRequest, result: BinaryIO) -> None:
    """Serve one request in the confined child: write the Programs of each function, or the reason there are none."""
    ran = _run(request)
    wire.write(result, {"ran": True})  # from here on, only a graded function can end the process
    for number, function_request in enumerate(request.functions):
        left = ((request.limits.cpu_s or 60) - time.process_time()) / (len(request.functions) - number)
        _trace(request, function_request, ran, 0.8 * left, result)


def _trace(
    request: TraceRequest, function_request: FunctionRequest, ran: Ran, seconds: float, result: BinaryIO
) -> None:
    task = wrappings(request.chapter)[function_request.task]
    function = ran.function(task)
    traced: Any = function
    if not isinstance(function, Problem):
        with time_limit(max(seconds, 0.1), processor=True, asks=UNROLLED):
            cases = [from_plain(case, task.sizes) for case in function_request.cases]
            traced = trace_cases(task, function, cases, locate_cell, platform=function_request.platform)
    if isinstance(traced, Problem):
        wire.write(result, {"problem": ran.explained(traced, task.name).to_json(), "left_out": ran.left_out})
        return
    programs = traced.serialised()
    used = uses(function) if request.with_uses else {}
    message = {"cases": list(programs), "line": traced.line, "uses": used, "left_out": ran.left_out}
    wire.write(result, message, list(programs.values()))


def _run(request: TraceRequest) -> Ran:
    """Run the notebook's cells; code that nothing needs must not use up the processor time for tracing.

    If no exception can end a statement, because it never returns to Python, the kernel ends this process, and
    the grader retries with only the needed statements.
    """
    before = resource.getrlimit(resource.RLIMIT_CPU)
    if not request.only_needed and request.limits.cpu_s is not None:
        soft = int(time.process_time() + request.patience + 2 * STATEMENT_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (min(soft, before[0]), before[1]))
    os.chdir(os.environ.get("MESHCRAFT_SCRATCH", "."))  # learners' code may write files there, in every sandbox
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # where dataclasses and others look up names
    names = list(dict.fromkeys(function.task for function in request.functions))
    options = {"only_needed": request.only_needed, "patience": request.patience}
    ran = run_cells(request.cells, names, lab=request.lab, module=main, **options)
    resource.setrlimit(resource.RLIMIT_CPU, before)
    return ran


@cache
def prepare(chapter: str, task: str, case: str, lab: tuple[str, ...]) -> None:
    """Do once the work that every submission needs: build the contents of a task's case. It runs no student code."""
    wrapping = wrappings(chapter)[task]
    wrapping.wrap(never_called, from_plain(json.loads(case), wrapping.sizes))
    lab_statements(lab)
    gc.collect()
    gc.freeze()  # forks need not scan the existing objects for garbage


def main() -> None:
    """Serve requests from standard input until it ends."""
    prctl(PR_SET_DUMPABLE, 0)  # else a student's process can open this one's memory through /proc and write to it
    # Drop the finder of an editable installation, which would import what the mounts leave out.
    sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
    # Unbuffered: a fork must not find the next request in a buffer.
    requests, answers = FileIO(0), sys.stdout.buffer
    while True:
        try:
            header, sizes = wire.read_header(requests)  # type: ignore[arg-type]
        except wire.WireError:
            return
        for case in header["cases"]:
            prepare(header["chapter"], header["task"], json.dumps(case), tuple(header["lab"]))
        if pid := os.fork():
            if os.waitpid(pid, 0)[1]:
                sys.exit("the process that served a request was ended")
            continue
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            serve(wire.read_blobs(requests, sizes), answers)  # type: ignore[arg-type]
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def serve(blobs: list[bytes], answers: BinaryIO) -> None:
    """Serve one request in a forked process."""
    header = wire.from_json(blobs[0])
    request = msgspec.convert(header, TraceRequest)
    run = lambda result: trace_request(request, result)  # noqa: E731
    report = fork_confined(run, limits=request.limits, result_bytes=MAX_RESULT)
    wire.write(answers, {name: getattr(report, name) for name in Ending.__struct_fields__}, [report.result])


if __name__ == "__main__":
    main()
