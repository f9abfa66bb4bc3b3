"""All lenses on one Program: what it computes, holds and sends, and how long a machine would take for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from course import prediction
from course.machine import Machine
from course.machines import chosen
from course.prediction import NOT_ASKED
from course.program import Module, Program, ProgramError, costs, memory, parse, timeline
from course.render.panels import prediction_html
from course.render.tables import as_text, prediction_tables

if TYPE_CHECKING:
    from course.program.compiled import GpuReport


class Prediction(prediction.Prediction):
    """A prediction that shows itself: in a notebook as a picture, in a terminal as tables."""

    def __repr__(self) -> str:
        return as_text(prediction_tables(self))

    def _repr_html_(self) -> str:
        return prediction_html(self)


def predict(
    program: Program,
    machine: str | Machine = "8xH100",
    *,
    aot: bool = False,
    gpu_program: Program | None = None,
    model_flops: float | None = None,
    name: str = "",
) -> Prediction:
    """Predict a Program on a machine, without the machine. The same Program gives the same figures.

    Args:
        program: Exported for the CPU.
        machine: A machine, its name (``meshcraft machines`` lists them) or the path of a machine file.
        aot: Whether to ask the deviceless GPU compiler too.
        gpu_program: The same function exported with ``platform="cuda"``, which that compiler needs.
        model_flops: FLOPs that the model needs for the step on all devices, for the MFU.
        name: What to call it.

    Raises:
        TypeError: One of these is something else; the message says what was given.
        LookupError: No machine has that name.
        ValueError: The machine file cannot be used, the mesh has more devices than the machine, or ``model_flops`` is
            no positive number.
        ProgramError: An operation, a trip count or a branch cannot be resolved.
    """
    for what, given in (("program", program), ("gpu_program", gpu_program)):
        if not isinstance(given, Program) and not (what == "gpu_program" and given is None):
            raise TypeError(
                f"predict takes a Program as its {what}, not {described(given)}: course.program.export gives one, and "
                "Program.load(bytes) reads one that was saved"
            )
    _check_flops(model_flops)
    where = resolved(machine)
    where.require_fits(program.mesh)
    module = parse(program)
    time = timeline(module, where)
    held = memory(module, program, early=time.early)
    compiled, reason = _compiled(module, gpu_program, where) if aot else (None, NOT_ASKED)
    return Prediction(where, costs(module), held, time, compiled, reason, model_flops, name)


def described(given: object) -> str:
    """A given object for a message: its type and how it begins."""
    shown = repr(given) if isinstance(given, str | bytes | int | float) else ""
    return f"{type(given).__name__} {shown[:40]}".rstrip() if given is not None else "None"


def resolved(machine: str | Machine) -> Machine:
    """A machine or the one of that name or file.

    Raises:
        TypeError: It is neither a machine nor a name.
        LookupError: No machine has that name.
        ValueError: The file cannot be used.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str):
        raise TypeError(f"machine is a name such as '8xH100' or a course.machine.Machine, not {described(machine)}")
    return chosen(machine)


def _check_flops(model_flops: float | None) -> None:
    if model_flops is None:
        return
    if isinstance(model_flops, bool) or not isinstance(model_flops, int | float | np.number):
        raise TypeError(f"model_flops is a number of FLOPs, not {described(model_flops)}")
    if not 0 < model_flops < float("inf"):
        raise ValueError(f"model_flops is {model_flops:g}: a step needs a positive, finite number of FLOPs")


def _compiled(module: Module, program: Program | None, machine: Machine) -> tuple[GpuReport | None, str]:
    """The GPU compiler's report, or why there is none."""
    if program is None:
        return None, 'the GPU compiler needs the same function exported with platform="cuda"'
    from course.program.compiled import AotMissing, compile_for
    from course.program.compiled.agreement import disagreement

    try:
        different = disagreement(module, parse(program))
        if different:
            return None, f"the exports for CPUs and for GPUs are not the same program: {different}"
        return compile_for(program, machine), ""
    except (AotMissing, ProgramError) as error:
        return None, str(error)
