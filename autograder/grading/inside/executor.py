"""The process that compiles, runs and analyses Programs. It runs no student Python.

The same code serves the notebook's ``check``, in a separate process, and official grading, sandboxed.
"""

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import jax

import course  # noqa: F401  8 emulated devices, before JAX starts
from autograder.grading.inside import wire
from autograder.grading.inside.launch import LOOK_S, STALL_S
from course.machines import machine
from course.mesh import make_mesh
from course.program import (
    Executable,
    Module,
    Program,
    ProgramError,
    compile_program,
    costs,
    form,
    memory,
    parse,
    structural_mismatch,
    timeline,
    timelines,
    work_of,
)
from course.render.timeline_summary import to_summary

_MAX_CACHED = 64
_PAGE = os.sysconf("SC_PAGESIZE")
# A check runs the small case that it compares with the realistic one, and parses both again with all cases.
_parse = lru_cache(maxsize=8)(parse)


class Executor:
    """Serves requests; caches compilations, shared by all Programs that differ only in their source lines.

    It also keeps the last analysis: a check requests it with the quick cases, and again with all of them.
    """

    def __init__(self) -> None:
        self.compiled: dict[str, Executable] = {}
        self.analysed: tuple[Any, dict[str, Any]] = None, {}

    def serve(self, header: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Serve one request: ``compile`` a Program, ``run`` it on inputs, or ``analyse`` it alongside a smaller one."""
        program = Program.load(blobs[0])
        branches = bool(header.get("data_branches"))
        module = _parse(program, data_branches=branches)
        if header["do"] == "analyse":
            small, *stretched = (_parse(Program.load(blob), data_branches=branches) for blob in blobs[1:])
            result = structural_mismatch(small, module)
            for other in stretched:
                result = result or structural_mismatch(other, module, scaled=False)
            if self.analysed[0] != (key := (blobs[0], header)):
                self.analysed = key, {**_analysis(module, program), "orders": _orders(module, program, header)}
            return {**self.analysed[1], "difference": result}, []
        if header["do"] == "compile":
            self._compiled(program, module)
            return {}, []
        analysis = _analysis(module, program)
        if header.get("form"):
            analysis["form"] = form(module)
        results = self._run(program, module, wire.unpack(header["inputs"], blobs[1:]))
        description, arrays = wire.pack(results)
        return {**analysis, "results": description}, arrays

    def _run(self, program: Program, module: Module, inputs: dict[str, Any]) -> dict[str, Any]:
        """Run the Program on inputs; if it branches, an instrumented twin runs and reports the branches taken."""
        executable = self._compiled(program, module)
        if executable.program != program:
            with suppress(ProgramError):  # report the error from this Program itself, with its own lines
                return executable(inputs)
            executable = self._compiled(program, module, anew=True)
        return executable(inputs)

    def _compiled(self, program: Program, module: Module, *, anew: bool = False) -> Executable:
        """The compiled Program, or another that differs from it only in its source lines."""
        key = f"{work_of(program)} {module.data_branches}"
        if anew or key not in self.compiled:
            if len(self.compiled) >= _MAX_CACHED:
                self.compiled.clear()
            self.compiled[key] = compile_program(program, make_mesh(program.mesh), module)
        return self.compiled[key]


def _analysis(module: Module, program: Program) -> dict[str, Any]:
    return {"costs": costs(module).to_json(), "memory": memory(module, program).to_json()}


def _orders(module: Module, program: Program, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Time and memory with collectives issued early and in program order, each pair from the same order."""
    target_machine = machine(header["machine"])
    free = timeline(module, target_machine, free=header["exposed_axes"]).seconds if header.get("exposed_axes") else None
    return [
        {
            "memory": memory(module, program, early=step.early).to_json(),
            "timeline": step.to_json(),
            "picture": to_summary(step),
            "exposed": None if free is None else step.seconds - free,
        }
        for step in timelines(module, target_machine)
    ]


class Watch:
    """End this process when a request exceeds its processor time, or computes nothing for too long.

    A thread, not a resource limit: limits cannot be raised again for the next request, and the first process of a
    namespace ignores their signal.
    """

    def __init__(self) -> None:
        self.limit, self.serving, self.idle, self.last = math.inf, False, 0, 0.0

    @contextmanager
    def request(self, cpu_s: float | None) -> Iterator[None]:
        """Watch while a request is served."""
        self.limit, self.idle = time.process_time() + (cpu_s or math.inf), 0
        self.serving = True
        try:
            yield
        finally:
            self.serving = False

    def look(self, used: float) -> int:
        """Return the exit status with which the process must end now, or 0 if it may go on; call every ``LOOK_S``."""
        busy, self.last = used - self.last > LOOK_S / 100, used
        self.idle = 0 if busy or not self.serving else self.idle + 1
        if self.idle * LOOK_S >= STALL_S:
            return wire.STALLED
        return wire.CPU_USED_UP if self.serving and used > self.limit else 0

    def run(self) -> None:
        """Poll until there is a reason to end the process."""
        while not (status := self.look(time.process_time())):
            time.sleep(LOOK_S)
        os._exit(status)


def answered(executor: Executor, header: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Serve a request; a refusal of the Program is a valid response."""
    try:
        return executor.serve(header, blobs)
    except ProgramError as error:
        return {"refused": error.message, "line": error.line}, []
    except jax.errors.JaxRuntimeError as error:
        message = f"the program cannot be run: {str(error)[:500]}"
        if "RESOURCE_EXHAUSTED" in message:
            return {"exceeded": f"{message} (limit on memory)"}, []
        return {"refused": message}, []
    except Exception as error:  # a fault of ours, not the program's: it must be reported, and must not cost points
        return {"fault": f"{type(error).__name__}: {error}"[:500]}, []


def resident_bytes() -> int:
    """The memory that this process occupies, in bytes; 0 where the system does not report it."""
    with suppress(OSError), open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * _PAGE
    return 0


def main() -> None:
    """Serve requests from standard input until it ends; a refusal of a Program is a response, not a crash."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # library output must not mix with the messages
    # Programs are small and run once: optimising them takes longer than it saves.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.devices()
    if os.environ.get("MESHCRAFT_CONFINE"):
        from autograder.grading.inside.jailed_child import deny_syscalls

        deny_syscalls()
    executor, watch = Executor(), Watch()
    threading.Thread(target=watch.run, daemon=True).start()
    gc.collect()
    gc.freeze()  # everything allocated so far stays: exclude it from garbage collection
    gc.set_threshold(50_000, 20, 20)  # parsing a program creates many objects and few cycles
    wire.write(answers, {"ready": True})
    while True:
        try:
            header, blobs = wire.read(requests)
        except wire.WireError:
            return
        begin = time.process_time()
        with watch.request(header.get("cpu_s")):
            answer, arrays = answered(executor, header, blobs)
        answer["cpu_s"], answer["resident_bytes"] = time.process_time() - begin, resident_bytes()
        try:
            wire.write(answers, answer, arrays)
        except wire.WireError as error:  # nothing has been sent yet
            message = f"the program's results, or the report on them, are too large: {error}"
            wire.write(answers, {"refused": f"{message}; does it use long names?", "cpu_s": answer["cpu_s"]})


if __name__ == "__main__":
    main()
