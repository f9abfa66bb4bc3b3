"""The process that compiles and runs Programs and looks at them through the lenses. It holds no student Python.

The same code serves the notebook's ``check``, in a process of the learner's own, and official grading, sandboxed.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import sys
import threading
import time
from typing import Any

import jax

import course  # noqa: F401  8 emulated devices, before JAX starts
from autograder.grading import wire
from course.machines import machine
from course.mesh import make_mesh
from course.program import (
    Executable,
    Module,
    Program,
    ProgramError,
    compile_program,
    costs,
    difference,
    memory,
    parse,
    timeline,
    timelines,
)
from course.show.brief import to_brief

_MAX_KEPT = 64


class Executor:
    """Serves requests; keeps what it compiled, by the Program's hash."""

    def __init__(self) -> None:
        self.compiled: dict[str, Executable] = {}

    def serve(self, header: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """One request: ``run`` a Program on inputs, or ``analyse`` one beside a smaller one."""
        program = Program.load(blobs[0])
        branches = bool(header.get("data_branches"))
        module = parse(program, data_branches=branches)
        looked = {"costs": costs(module).to_json(), "memory": memory(module, program).to_json()}
        if header["do"] == "analyse":
            smaller = parse(Program.load(blobs[1]), data_branches=branches)
            about = {"difference": difference(smaller, module), "orders": _orders(module, program, header)}
            return {**looked, **about}, []
        results = self._compile(program, blobs[0])(wire.unpack(header["inputs"], blobs[1:]))
        description, arrays = wire.pack(results)
        return {**looked, "results": description}, arrays

    def _compile(self, program: Program, data: bytes) -> Executable:
        key = hashlib.sha256(data).hexdigest()
        if key not in self.compiled:
            if len(self.compiled) >= _MAX_KEPT:
                self.compiled.clear()
            self.compiled[key] = compile_program(program, make_mesh(program.mesh))
        return self.compiled[key]


def _orders(module: Module, program: Program, header: dict[str, Any]) -> list[dict[str, Any]]:
    """Time and memory with collectives issued early and in program order, each pair from one and the same order."""
    where = machine(header["machine"])
    free = timeline(module, where, free=header["spent_on"]).seconds if header.get("spent_on") else None
    return [
        {
            "memory": memory(module, program, early=step.early).to_json(),
            "timeline": step.to_json(),
            "picture": to_brief(step),
            "spent": None if free is None else step.seconds - free,
        }
        for step in timelines(module, where)
    ]


def watch_cpu(limit: list[float]) -> None:
    """End this process when its processor time reaches ``limit[0]``.

    A thread and no resource limit: those cannot be raised again for the next request, and the first process of a
    namespace ignores their signal.
    """
    while True:
        if time.process_time() > limit[0]:
            os._exit(wire.CPU_USED_UP)
        time.sleep(0.1)


def main() -> None:
    """Serve requests from standard input until it ends; a Program that is refused is an answer, not a crash."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get between the messages
    # Programs are small and run once: optimising them takes longer than it saves.
    jax.config.update("jax_disable_most_optimizations", True)
    jax.devices()
    if os.environ.get("MESHCRAFT_CONFINE"):
        from autograder.grading.confine import deny_syscalls

        deny_syscalls(allow_fork=False)
    executor, limit = Executor(), [math.inf]
    threading.Thread(target=watch_cpu, args=(limit,), daemon=True).start()
    gc.collect()
    gc.freeze()  # what is here now stays: no need to look through it for garbage
    gc.set_threshold(50_000, 20, 20)  # reading a program makes many objects and few cycles
    wire.write(answers, {"ready": True})
    while True:
        try:
            header, blobs = wire.read(requests)
        except wire.WireError:
            return
        limit[0] = time.process_time() + (header.get("cpu_s") or math.inf)
        try:
            answer, arrays = executor.serve(header, blobs)
        except ProgramError as error:
            answer, arrays = {"refused": str(error)}, []
        except jax.errors.JaxRuntimeError as error:
            said = f"the program cannot be run: {str(error)[:500]}"
            out_of_memory = "RESOURCE_EXHAUSTED" in said
            answer = {"exceeded": f"{said} (limit on memory)"} if out_of_memory else {"refused": said}
            arrays = []
        except Exception as error:  # ours, not the program's: a person must see it, and nobody gets a zero for it
            answer, arrays = {"fault": f"{type(error).__name__}: {error}"[:500]}, []
        wire.write(answers, answer, arrays)


if __name__ == "__main__":
    main()
