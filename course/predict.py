"""All analyses of one Program: what it computes, keeps in memory and sends, and how long that takes on a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from course import prediction
from course.machine import Machine
from course.machines import chosen
from course.prediction import NOT_ASKED
from course.program import Module, Program, ProgramError, capture, costs, memory, parse, timeline
from course.render.panels import prediction_html
from course.render.tables import as_text, prediction_tables

if TYPE_CHECKING:
    from course.program.compiled import GpuReport


class Prediction(prediction.Prediction):
    """A prediction that renders itself: in a notebook as a picture, in a terminal as tables."""

    def __repr__(self) -> str:
        return as_text(prediction_tables(self))

    def _repr_html_(self) -> str:
        return prediction_html(self)


def predict(
    program: Program | Callable[..., Any],
    machine: str | Machine = "8xH100",
    *,
    args: Sequence[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
    aot: bool = False,
    gpu_program: Program | None = None,
    model_flops: float | None = None,
    name: str = "",
) -> Prediction:
    """Predict a step on a machine, without needing the machine. The same step gives the same figures.

    Args:
        program: A Program exported for the CPU, or anything that ``jax.jit`` takes. If shardings are left to
            the compiler, it is predicted as XLA partitions it.
        machine: A machine, its name (``meshcraft machines`` lists them) or the path of a machine file.
        args, kwargs: Arguments of a function: arrays or ``jax.ShapeDtypeStruct``, with shardings or without.
        aot: Whether to ask the deviceless GPU compiler too. If the step as written cannot be priced, only the
            compiled program is predicted.
        gpu_program: The same Program exported with ``platform="cuda"``, which that compiler needs; for a function it
            is made automatically.
        model_flops: FLOPs that the model needs for the step on all devices, for the MFU.
        name: Name of the prediction.

    Raises:
        TypeError: An argument has the wrong type; the message says what was given.
        LookupError: No machine has that name.
        ValueError: The machine file cannot be used, the mesh has more devices than the machine, or ``model_flops`` is
            not a positive number.
        ProgramError: The function cannot be traced, or an operation, a trip count or a branch cannot be resolved.
    """
    from_function = False
    if callable(program) and not isinstance(program, type):
        name, from_function = name or getattr(program, "__name__", ""), True
        programs = programs_of(program, args or (), kwargs, aot=aot)
        program, gpu_program = programs["cpu"], programs.get("cuda")
    elif args is not None or kwargs is not None:
        raise TypeError("args and kwargs are for a function; a Program already has the shapes of its inputs")
    program = _required("program", program)
    gpu_program = None if gpu_program is None else _required("gpu_program", gpu_program)
    _check_flops(model_flops)
    target = resolved(machine)
    target.require_fits(program.mesh)
    try:
        module = parse(program, data_branches=True, lenient=True)
        time = timeline(module, target)
        analyses = (costs(module), memory(module, program, early=time.early), time)
    except ProgramError as error:
        if not aot:
            raise
        compiled, reason = _compiled(None, gpu_program, target)
        if compiled is None:
            raise ProgramError(f"{error}; and the GPU compiler does not help: {reason}") from None
        from course.program.compiled.lenses import read_off

        return Prediction(target, *read_off(compiled, target), compiled, "", model_flops, name, str(error))
    compiled, reason = _compiled(None if from_function else module, gpu_program, target) if aot else (None, NOT_ASKED)
    return Prediction(target, *analyses, compiled, reason, model_flops, name)


def programs_of(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None = None, *, aot: bool = False
) -> dict[str, Program]:
    """A function's Programs: ``cpu`` for the analyses, and with ``aot`` ``cuda`` for the GPU compiler.

    If there is no CPU lowering, as for a Pallas kernel, the GPU Program is used for ``cpu`` as well.

    Raises:
        ProgramError: The function cannot be traced.
    """
    cuda = {"cuda": capture(function, args, kwargs, platform="cuda")} if aot else {}
    try:
        return {"cpu": capture(function, args, kwargs), **cuda}
    except ProgramError:
        if not aot:
            raise
        return {"cpu": cuda["cuda"], **cuda}


def described(given: object) -> str:
    """Describe an object for a message: its type and the beginning of its repr."""
    shown = repr(given) if isinstance(given, str | bytes | int | float) else ""
    return f"{type(given).__name__} {shown[:40]}".rstrip() if given is not None else "None"


def resolved(machine: str | Machine) -> Machine:
    """Resolve a machine from a machine, a name or a file.

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


def _required(name: str, value: object) -> Program:
    if isinstance(value, Program):
        return value
    raise TypeError(
        f"predict takes a Program as its {name}, not {described(value)}: course.program.export gives one, "
        "Program.load(bytes) reads one that was saved, and a function is predicted with args=(...)"
    )


def _check_flops(model_flops: float | None) -> None:
    if model_flops is None:
        return
    if isinstance(model_flops, bool) or not isinstance(model_flops, int | float | np.number):
        raise TypeError(f"model_flops is a number of FLOPs, not {described(model_flops)}")
    if not 0 < model_flops < float("inf"):
        raise ValueError(f"model_flops is {model_flops:g}: a step needs a positive, finite number of FLOPs")


def _compiled(module: Module | None, program: Program | None, machine: Machine) -> tuple[GpuReport | None, str]:
    """The GPU compiler's report, or why there is none; ``module``, if given, must agree with the GPU export."""
    if program is None:
        return None, 'the GPU compiler needs the same function exported with platform="cuda"'
    from course.program.compiled import AotMissing, compile_for
    from course.program.compiled.agreement import disagreement

    try:
        different = module and disagreement(module, parse(program, data_branches=True, lenient=True))
        if different:
            return None, f"the exports for CPUs and for GPUs are not the same program: {different}"
        return compile_for(program, machine, lenient=True), ""
    except (AotMissing, ProgramError) as error:
        return None, str(error)
