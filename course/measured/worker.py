"""The fresh process: reports the devices, runs a Program for its memory or time, or times kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import course  # noqa: F401  before JAX starts
from course.measured import kernels
from course.measured.card import card
from course.measured.fresh import serve
from course.measured.memory import peak_now
from course.measured.run import Step, device_seconds, fill, mesh_of_present, place, stepper, time_steps
from course.program import Program, compile_program


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Respond to one request: ``card``, ``memory``, ``step`` or ``kernels``."""
    if request["do"] == "card":
        return card()
    if request["do"] == "kernels":
        return {str(size): _kernel(request, size) for size in request["sizes"]}
    program = Program.load((Path(request["folder"]) / "program").read_bytes())
    executable = compile_program(program, mesh_of_present(program.mesh))
    # Memory first, because only one step may have run; then time.
    compiling = peak_now()
    step = stepper(executable, place(executable, fill(executable.program, high=request["high"])))
    step()
    memory = {"bytes": peak_now(), "compiling": compiling}
    return memory if request["do"] == "memory" else {**memory, **_timed(step, request)}


def _kernel(request: dict[str, Any], size: int) -> dict[str, Any]:
    """Measure one size; if it does not fit, the others may still."""
    try:
        return kernels.measure(request["kind"], request["dtype"], size)
    except jax.errors.JaxRuntimeError as error:
        return {"not measured": str(error).split("\n")[0][:200]}


def _timed(step: Step, request: dict[str, Any]) -> dict[str, Any]:
    times = time_steps(step, steps=request["steps"], seconds=request["seconds"])
    device, method = device_seconds(step)
    low, middle, high = (float(x) for x in np.quantile(times, [0.25, 0.5, 0.75]))
    timing = {"seconds": middle, "quartiles": [low, high], "steps": len(times)}
    return {**timing, "device_seconds": device, "device_how": method}


if __name__ == "__main__":
    serve(sys.argv[1], answer)
