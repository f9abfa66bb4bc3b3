"""All lenses on one Program: what it computes, holds and sends, and how long a machine would take for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from course.machine import Machine
from course.machines import machine as find_machine
from course.program import Costs, Memory, Module, Program, ProgramError, Timeline, costs, memory, parse, timeline
from course.program.simulator import Bar
from course.program.simulator.trace import plain_kind
from course.render.quantities import bytes_text, count_text, dtype_text, seconds_text, share_text

if TYPE_CHECKING:
    from course.program.compiled import GpuReport

NOT_ASKED = "not asked for"
REPLAYED = "GPU compiler's schedule, replayed"
TWO_STEPS = (
    "the step is your program as written, the replayed one what XLA's compiler for GPUs made of it; why they differ: "
    "'Timeline and compiled disagree' on the page `lenses`"
)


@dataclass(frozen=True)
class LineTime:
    """What one of the learner's lines costs on the device that is busiest.

    Attributes:
        line: ``cell:line``; empty where an operation has none.
        compute: Seconds of kernels.
        sending: Seconds of transfers, hidden behind kernels or not.
        flops: Of matrix products.
        bytes_sent: By the device.
        kinds: The operations, those that take longest first.
    """

    line: str
    compute: float
    sending: float
    flops: float
    bytes_sent: float
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """A Program on a machine, as all lenses see it. In a notebook it shows itself as a picture.

    Attributes:
        machine: The machine.
        costs, memory, timeline: Of the Program.
        compiled: What the GPU compiler makes of it; None where ``compiled_reason`` says why not.
        compiled_reason: Empty where ``compiled`` is there.
        model_flops: What the model needs for the step on all devices, if it was said.
        name: What was predicted.
    """

    machine: Machine
    costs: Costs
    memory: Memory
    timeline: Timeline
    compiled: GpuReport | None = None
    compiled_reason: str = NOT_ASKED
    model_flops: float | None = None
    name: str = ""

    @property
    def remarks(self) -> dict[str, str]:
        """What was asked for and is missing, and what a figure needs to be understood, by its name."""
        found = {}
        if self.compiled is not None:
            found["two step times"] = TWO_STEPS
        elif self.compiled_reason != NOT_ASKED:
            found["GPU compiler"] = self.compiled_reason
        if self.mfu is not None and self.mfu > 1:
            done = self.costs.flops * sum(len(device.members) for device in self.timeline.devices)
            found["MFU above 100 %"] = (
                f"no machine does that. The step's matrix products are {count_text(done, 'FLOP')} on all devices, and "
                f"model_flops says {count_text(self.model_flops or 0.0, 'FLOP')}: is it that of one step, and does the "
                "program do all of the model's work?"
            )
        return found

    @property
    def idle(self) -> bool:
        """Whether it computes and sends nothing that takes time."""
        return not self.timeline.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, a share of the peak of ``mfu_dtype``; None without ``model_flops``."""
        if self.model_flops is None or not self.timeline.seconds:
            return None
        return self.timeline.mfu(self.model_flops, self.machine.peak(self.mfu_dtype))

    @property
    def mfu_dtype(self) -> str:
        """The operand dtype of most matrix products; ``bf16`` if there are none."""
        products = self.costs.products
        most = max(sorted(products), key=lambda pair: products[pair], default="bf16 x bf16")
        return min(most.split(" x "), key=self.machine.peak)

    def lines(self) -> tuple[LineTime, ...]:
        """Where time goes, the dearest lines first."""
        busiest = max(self.timeline.devices, key=lambda device: (device.busy, -device.device)).device
        found: dict[str, list[Bar]] = defaultdict(list)
        for bar in self.timeline.bars:
            if bar.device == busiest:
                found[bar.line].append(bar)
        every = (_line_time(line, bars) for line, bars in found.items())
        return tuple(sorted(every, key=lambda entry: (-(entry.compute + entry.sending), entry.line)))

    def figures(self) -> dict[str, str]:
        """The figures that matter, in words, by name."""
        if self.idle:
            return self._memory_figures() | self._compiled_figures()
        time = self.timeline
        whole = time.seconds
        rows = {"step": seconds_text(whole), "busy": f"{seconds_text(time.busy)} ({share_text(time.busy, whole)})"}
        for axes, seconds in time.exposed.items():
            rows[f"exposed: {axes}"] = f"{seconds_text(seconds)} ({share_text(seconds, whole)})"
        waiting = max(device.waiting for device in time.devices)
        rows["waiting for others"] = f"{seconds_text(waiting)} ({share_text(waiting, whole)})"
        if self.mfu is not None:
            peak = count_text(self.machine.peak(self.mfu_dtype), "FLOP/s")
            rows["MFU"] = f"{share_text(self.mfu, 1.0)} of {peak} ({dtype_text(self.machine, self.mfu_dtype)})"
        rows["FLOPs of a device"] = count_text(self.costs.flops, "FLOP")
        sent = sum(collective.total_bytes for collective in self.costs.collectives)
        rows["sent by a device"] = bytes_text(sent)
        return rows | self._memory_figures() | self._compiled_figures()

    def _memory_figures(self) -> dict[str, str]:
        held = self.memory
        return {
            "memory at the peak": f"{bytes_text(held.peak)} ({share_text(held.peak, self.machine.memory_bytes)})",
            "of it temporaries": bytes_text(held.temporaries),
        }

    def _compiled_figures(self) -> dict[str, str]:
        if self.compiled is None:
            return {} if self.compiled_reason == NOT_ASKED else {"GPU compiler": "not measured"}
        found = self.compiled
        rows = {REPLAYED: seconds_text(found.replay.seconds)}
        rows["GPU compiler: temporaries"] = bytes_text(found.memory.temporaries)
        if found.coverage is not None:
            rows["GPU compiler: sent beside matmuls"] = share_text(found.coverage, 1.0)
        return rows

    def to_json(self) -> dict[str, Any]:
        """Everything but the bars, as plain data."""
        compiled = self.compiled.to_json() if self.compiled else None
        return {
            "name": self.name,
            "machine": self.machine.name,
            "calibrated": self.machine.calibrated,
            "step_seconds": self.timeline.seconds,
            "busy_seconds": self.timeline.busy,
            "exposed_seconds": self.timeline.exposed,
            "waiting_seconds": max(device.waiting for device in self.timeline.devices),
            "model_flops": self.model_flops,
            "mfu": self.mfu,
            "memory_peak_bytes": self.memory.peak,
            "costs": self.costs.to_json(),
            "memory": self.memory.to_json(),
            "timeline": self.timeline.to_json(),
            "lines": [asdict(line) for line in self.lines()],
            "compiled": compiled,
            "compiled_reason": self.compiled_reason,
            "remarks": self.remarks,
        }

    def __repr__(self) -> str:
        from course.render.tables import as_text, prediction_tables

        return as_text(prediction_tables(self))

    def _repr_html_(self) -> str:
        from course.render.panels import prediction_html

        return prediction_html(self)


def _line_time(line: str, bars: list[Bar]) -> LineTime:
    kinds: dict[str, float] = defaultdict(float)
    for bar in bars:
        kinds[plain_kind(bar.kind)] += bar.end - bar.start
    kernels = [bar for bar in bars if bar.stream == "compute"]
    transfers = [bar for bar in bars if bar.stream != "compute"]
    compute, sending = (sum(bar.end - bar.start for bar in some) for some in (kernels, transfers))
    flops, sent = sum(bar.flops for bar in kernels), sum(bar.bytes for bar in transfers)
    return LineTime(line, compute, sending, flops, sent, tuple(sorted(kinds, key=lambda k: (-kinds[k], k))))


def predict(
    program: Program,
    machine: str | Machine = "8xH100",
    *,
    aot: bool = False,
    gpu_program: Program | None = None,
    model_flops: float | None = None,
    name: str = "",
) -> Prediction:
    """What a machine would make of a Program, without the machine. The same Program gives the same figures.

    Args:
        program: Exported for the CPU.
        machine: A machine or its name; ``meshcraft machines`` lists them.
        aot: Whether to ask the deviceless GPU compiler too.
        gpu_program: The same function exported with ``platform="cuda"``, which that compiler needs.
        model_flops: FLOPs that the model needs for the step on all devices, for the MFU.
        name: What to call it.

    Raises:
        TypeError: One of these is something else; the message says what was given.
        LookupError: No machine has that name.
        ValueError: The mesh has more devices than the machine, or ``model_flops`` is no positive number.
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
    found = (costs(module), memory(module, program), timeline(module, where))
    compiled, reason = _compiled(module, gpu_program, where) if aot else (None, NOT_ASKED)
    return Prediction(where, *found, compiled, reason, model_flops, name)


def described(given: object) -> str:
    """What somebody gave, for a message: its type and how it begins."""
    shown = repr(given) if isinstance(given, str | bytes | int | float) else ""
    return f"{type(given).__name__} {shown[:40]}".rstrip() if given is not None else "None"


def resolved(machine: str | Machine) -> Machine:
    """A machine or the one of that name.

    Raises:
        TypeError: It is neither a machine nor a name.
        LookupError: No machine has that name.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, str):
        raise TypeError(f"machine is a name such as '8xH100' or a course.machine.Machine, not {described(machine)}")
    return find_machine(machine)


def _check_flops(model_flops: float | None) -> None:
    if model_flops is None:
        return
    if isinstance(model_flops, bool) or not isinstance(model_flops, int | float | np.number):
        raise TypeError(f"model_flops is a number of FLOPs, not {described(model_flops)}")
    if not 0 < model_flops < float("inf"):
        raise ValueError(f"model_flops is {model_flops:g}: a step needs a positive, finite number of FLOPs")


def _compiled(module: Module, program: Program | None, machine: Machine) -> tuple[GpuReport | None, str]:
    """What the GPU compiler makes of it, or why there is nothing."""
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
