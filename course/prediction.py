"""A prediction: the results of all analyses of one Program on a machine, and its figures in words."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from course.machine import Machine
from course.program import Costs, Memory, Timeline
from course.program.ir import plain_kind
from course.program.simulator import Bar
from course.render.quantities import INSTANT, Figure, bytes_text, count_text, dtype_text, seconds_text, share_text

if TYPE_CHECKING:
    from course.program.compiled import GpuReport

NOT_ASKED = "not requested"
REPLAYED = "GPU compiler's schedule, replayed"
TWO_STEPS = (
    "the step is your program as written, the replayed one is the output of XLA's GPU compiler; why they differ: "
    "'Timeline and compiled disagree' on the page `lenses`"
)


@dataclass(frozen=True)
class LineTime:
    """The cost of one of the learner's lines on the busiest device.

    Attributes:
        line: ``cell:line``; empty if an operation has none.
        compute: Seconds of kernels.
        sending: Seconds of transfers, hidden behind kernels or not.
        flops: FLOPs of matmuls.
        bytes_sent: Bytes sent by the device.
        kinds: The operations, slowest first.
    """

    line: str
    compute: float
    sending: float
    flops: float
    bytes_sent: float
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """The results of all analyses of a Program on a machine.

    Attributes:
        machine: The machine.
        costs, memory, timeline: Analyses of the Program.
        compiled: The GPU compiler's report; None if ``compiled_reason`` says why not.
        compiled_reason: Empty if ``compiled`` is set.
        model_flops: FLOPs that the model needs for the step on all devices, if given.
        name: Name of the predicted program.
        refused: Why the program as written cannot be priced: the figures then come from the GPU compiler's schedule.
    """

    machine: Machine
    costs: Costs
    memory: Memory
    timeline: Timeline
    compiled: GpuReport | None = None
    compiled_reason: str = NOT_ASKED
    model_flops: float | None = None
    name: str = ""
    refused: str = ""

    @property
    def remarks(self) -> dict[str, str]:
        """The reasons why something requested is missing, and notes needed to understand a figure, by its name."""
        remarks = {}
        if self.refused:
            remarks["the program as written"] = (
                f"{self.refused}. All figures are therefore those of the GPU compiler's schedule: no critical path, no "
                "temporaries by line, and FLOPs only of ops it marks as matmuls"
            )
        elif self.compiled is not None:
            remarks["two step times"] = TWO_STEPS
        elif self.compiled_reason != NOT_ASKED:
            remarks["GPU compiler"] = self.compiled_reason
        if self.mfu is not None and self.mfu > 1:
            flops = self.costs.flops * sum(len(device.members) for device in self.timeline.devices)
            remarks["MFU above 100%"] = (
                f"no machine does that. The step's matmuls are {count_text(flops, 'FLOP')} on all devices, and "
                f"model_flops says {count_text(self.model_flops or 0.0, 'FLOP')}: is that for one step, and does the "
                "program do all of the model's work?"
            )
        return remarks

    @property
    def idle(self) -> bool:
        """True if it computes and sends nothing that takes time."""
        return not self.timeline.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, as a fraction of the peak of ``mfu_dtype``; None without ``model_flops``."""
        if self.model_flops is None or not self.timeline.seconds:
            return None
        return self.timeline.mfu(self.model_flops, self.machine.peak(self.mfu_dtype))

    @property
    def mfu_dtype(self) -> str:
        """The operand dtype of most matmuls; ``bf16`` if there are none."""
        products = self.costs.products
        most = max(sorted(products), key=lambda pair: products[pair], default="bf16 x bf16")
        return min(most.split(" x "), key=self.machine.peak)

    def lines(self) -> tuple[LineTime, ...]:
        """Time by source line, the most expensive lines first."""
        busiest = max(self.timeline.devices, key=lambda device: (device.busy, -device.device)).device
        by_line: dict[str, list[Bar]] = defaultdict(list)
        for bar in self.timeline.bars:
            if bar.device == busiest:
                by_line[bar.line].append(bar)
        line_times = (_line_time(line, bars) for line, bars in by_line.items())
        return tuple(sorted(line_times, key=lambda entry: (-(entry.compute + entry.sending), entry.line)))

    def figures(self) -> dict[str, Figure]:
        """The main figures in words, by name."""
        time, rows = self.timeline, {}

        def of_step(seconds: float) -> Figure:
            return Figure(seconds_text(seconds), share_text(seconds if seconds >= INSTANT else 0, time.seconds))

        if not self.idle:
            rows = {"step": Figure(seconds_text(time.seconds)), "busy": of_step(time.busy)}
            rows |= {f"exposed: {axes}": of_step(seconds) for axes, seconds in time.exposed.items()}
            rows["waiting for others"] = of_step(max(device.waiting for device in time.devices))
            if self.mfu is not None:
                peak = count_text(self.machine.peak(self.mfu_dtype), "FLOP/s")
                dtype = dtype_text(self.machine, self.mfu_dtype)
                rows["MFU"] = Figure(f"{share_text(self.mfu, 1.0)} of {peak}", dtype)
            rows["FLOPs of a device"] = Figure(count_text(self.costs.flops, "FLOP"))
            sent = sum(collective.total_bytes for collective in self.costs.collectives)
            rows["sent by a device"] = Figure(bytes_text(sent))
        peak, temporaries = self.memory.peak, self.memory.temporaries
        rows["memory at the peak"] = Figure(bytes_text(peak), share_text(peak, self.machine.memory_bytes))
        return rows | {"temporaries": Figure(bytes_text(temporaries))} | self._compiled_figures()

    def _compiled_figures(self) -> dict[str, Figure]:
        report = self.compiled
        if report is None:
            return {} if self.compiled_reason == NOT_ASKED else {"GPU compiler": Figure("not measured")}
        rows = {REPLAYED: Figure(seconds_text(report.replay.seconds))}
        rows["GPU compiler: temporaries"] = Figure(bytes_text(report.memory.temporaries))
        if report.coverage is not None:
            rows["GPU compiler: overlapped with matmuls"] = Figure(share_text(report.coverage, 1.0))
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
            "refused": self.refused,
            "remarks": self.remarks,
        }


def _line_time(line: str, bars: list[Bar]) -> LineTime:
    kinds: dict[str, float] = defaultdict(float)
    for bar in bars:
        kinds[plain_kind(bar.kind)] += bar.end - bar.start
    kernels = [bar for bar in bars if bar.stream == "compute"]
    transfers = [bar for bar in bars if bar.stream != "compute"]
    compute, sending = (sum(bar.end - bar.start for bar in group) for group in (kernels, transfers))
    flops, sent = sum(bar.flops for bar in kernels), sum(bar.bytes for bar in transfers)
    return LineTime(line, compute, sending, flops, sent, tuple(sorted(kinds, key=lambda k: (-kinds[k], k))))
