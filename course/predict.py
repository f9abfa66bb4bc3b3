"""All lenses on one Program: what it computes, holds and sends, and how long a machine would take for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from course.machine import Machine
from course.machines import machine as find_machine
from course.program import Costs, Memory, Module, Program, ProgramError, Timeline, costs, memory, parse, timeline
from course.program.timeline import Bar
from course.program.timeline.trace import plain_kind
from course.show.quantities import bytes_text, count_text, seconds_text, share_text

if TYPE_CHECKING:
    from course.program.compiled import GpuReport

NOT_ASKED = "not asked for"


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
        """What was asked for and is missing, and why."""
        asked = self.compiled is None and self.compiled_reason != NOT_ASKED
        return {"GPU compiler": self.compiled_reason} if asked else {}

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
        time, held = self.timeline, self.memory
        whole = time.seconds
        rows = {"step": seconds_text(whole), "busy": f"{seconds_text(time.busy)} ({share_text(time.busy, whole)})"}
        for axes, seconds in time.exposed.items():
            rows[f"exposed: {axes}"] = f"{seconds_text(seconds)} ({share_text(seconds, whole)})"
        waiting = max(device.waiting for device in time.devices)
        rows["waiting for others"] = f"{seconds_text(waiting)} ({share_text(waiting, whole)})"
        if self.mfu is not None:
            peak = count_text(self.machine.peak(self.mfu_dtype), "FLOP/s")
            rows["MFU"] = f"{share_text(self.mfu, 1.0)} of {peak} ({self.mfu_dtype})"
        rows["FLOPs of a device"] = count_text(self.costs.flops, "FLOP")
        sent = sum(collective.total_bytes for collective in self.costs.collectives)
        rows["sent by a device"] = bytes_text(sent)
        rows["memory at the peak"] = f"{bytes_text(held.peak)} ({share_text(held.peak, self.machine.memory_bytes)})"
        rows["of it temporaries"] = bytes_text(held.temporaries)
        return rows | self._compiled_figures()

    def _compiled_figures(self) -> dict[str, str]:
        if self.compiled is None:
            return {} if self.compiled_reason == NOT_ASKED else {"GPU compiler": "not measured"}
        found = self.compiled
        rows = {"GPU compiler: step": seconds_text(found.replay.seconds)}
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
        }

    def __repr__(self) -> str:
        from course.show.tables import as_text, prediction_tables

        return as_text(prediction_tables(self))

    def _repr_html_(self) -> str:
        from course.show.panels import prediction_html

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
        LookupError: No machine has that name.
        ValueError: The mesh has more devices than the machine.
        ProgramError: An operation, a trip count or a branch cannot be resolved.
    """
    where = find_machine(machine) if isinstance(machine, str) else machine
    where.require_fits(program.mesh)
    module = parse(program)
    found = (costs(module), memory(module, program), timeline(module, where))
    compiled, reason = _compiled(module, gpu_program, where) if aot else (None, NOT_ASKED)
    return Prediction(where, *found, compiled, reason, model_flops, name)


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
