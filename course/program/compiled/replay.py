"""Replay: the time of the GPU compiler's schedule on one device of a machine.

The complete rules; ``kernels`` has those of a single kernel and ``network`` those of the links:

- Kernels run one after another in the schedule's order.
- A collective begins when the schedule starts it and its stream is free, one stream for each set of mesh axes;
  instructions scheduled before its end overlap with it. A synchronous one blocks the kernels.
- A loop runs its body as often as the compiler says. A branch is priced as its more expensive branch.
- Every device runs the same schedule, so one represents all; transfers take as long as in the slowest group.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from course.machine import Machine
from course.program.compiled.collectives import as_op, done_of, transfer
from course.program.compiled.kernels import Work, work_of
from course.program.compiled.schedule import CONTAINERS, Computation, Instruction, Schedule
from course.program.simulator import Bar
from course.program.simulator.network import Instance, Network

# Yields a time to reach or a transfer to await; receives the time at which that happened, returns its own end.
_Process = Generator[float | Instance, float, float]


@dataclass(frozen=True)
class Replay:
    """The compiled schedule on a machine.

    Attributes:
        machine: Name of the machine.
        seconds: Duration of the step.
        busy: Seconds of compute on the device.
        matmul: The part of ``busy`` in matmuls.
        exposed: Idle seconds during which a transfer runs or queues, by mesh axes.
        bars: Every kernel and transfer; not part of the JSON, and empty unless requested.
    """

    machine: str
    seconds: float
    busy: float
    matmul: float
    exposed: dict[str, float]
    bars: tuple[Bar, ...] = ()


def replay(schedule: Schedule, mesh: dict[str, int], machine: Machine, *, bars: bool = False) -> Replay:
    """Run the schedule in simulated time.

    Args:
        schedule: The parsed schedule.
        mesh: The Program's mesh.
        machine: The machine to simulate.
        bars: Whether to keep every kernel and transfer.

    Raises:
        ProgramError: A trip count is unknown, or a collective's groups are not axes of the mesh.
    """
    device = _Device(schedule, mesh, machine, bars)
    process = device.run(schedule.computations[schedule.entry], 0.0)
    ended: list[float] = []

    def resume(now: float | None) -> None:
        try:
            waits_for = next(process) if now is None else process.send(now)
        except StopIteration as end:
            ended.append(end.value)
            return
        if isinstance(waits_for, Instance):
            waits_for.after.append(resume)
        else:
            device.network.at(waits_for, resume)

    resume(None)
    device.network.run()
    sorted_bars = tuple(sorted(device.bars, key=lambda bar: (bar.start, bar.stream)))
    return Replay(machine.name, ended[0], device.busy, device.matmul, dict(sorted(device.exposed.items())), sorted_bars)


class _Device:
    """One device that runs a schedule."""

    def __init__(self, schedule: Schedule, mesh: dict[str, int], machine: Machine, bars: bool):
        self.schedule, self.mesh, self.machine, self.keep_bars = schedule, mesh, machine, bars
        self.network = Network(program_order=True)
        self.busy = self.matmul = 0.0
        self.exposed: dict[str, float] = {}
        self.bars: list[Bar] = []
        self._work: dict[str, Work] = {}
        self._transfers: dict[str, Instance | None] = {}
        self._alone: dict[str, tuple[float, float, float]] = {}

    def run(self, computation: Computation, now: float) -> _Process:
        """Run a computation, starting at ``now``."""
        flying: dict[str, Instance] = {}
        for instruction in computation.instructions:
            if instruction.opcode in CONTAINERS:
                now = yield from self._control(instruction, now)
            elif self.schedule.collective_kind(instruction):
                now = yield from self._begin(computation, instruction, now, flying)
            elif instruction.opcode.endswith("-done"):
                instance = flying.pop(instruction.operands[0], None)
                now = (yield from self._wait(instance, now)) if instance else now
            else:
                now = self._kernel(computation, instruction, now)
        return now

    def _control(self, instruction: Instruction, now: float) -> _Process:
        if instruction.opcode == "while":
            body, trips = instruction.called("body"), instruction.trips
        else:
            body, trips = max(instruction.calls, key=lambda name: sum(self.alone(name)[::2])), 1
        seconds, matmul, sent = self.alone(body)
        if not sent and not self.keep_bars:  # nothing to wait for: every trip takes as long as the first
            self.busy += trips * seconds
            self.matmul += trips * matmul
            return now + trips * seconds
        for _ in range(trips):
            now = yield from self.run(self.schedule.computations[body], now)
        return now

    def _begin(
        self, computation: Computation, instruction: Instruction, now: float, flying: dict[str, Instance]
    ) -> _Process:
        instance = self._transfer(computation, instruction)
        if instance is None:
            return now
        now = yield now
        self.network.issue(instance, 0)
        self.network.arrive(instance, 0, now, None)
        if self.keep_bars:
            instance.after.append(lambda _: self.bars.append(Bar.of_transfer(0, instance)))
        if done_of(computation, instruction) is None:
            return (yield from self._wait(instance, now))
        flying[instruction.name] = instance
        return now

    def _transfer(self, computation: Computation, instruction: Instruction) -> Instance | None:
        """A new execution of a collective; None if no device sends anything."""
        if instruction.name not in self._transfers:
            op = as_op(self.schedule, computation, instruction, self.mesh)
            self._transfers[instruction.name] = transfer(op, self.mesh, self.machine)
        first = self._transfers[instruction.name]
        return first and first.again()

    def _wait(self, instance: Instance, now: float) -> _Process:
        now = yield now
        if instance.end is None:
            ended = yield instance
            axes = ",".join(instance.axes)
            self.exposed[axes] = self.exposed.get(axes, 0.0) + ended - now
            return ended
        return now

    def _kernel(self, computation: Computation, instruction: Instruction, now: float) -> float:
        work = self._work.get(instruction.name)
        if work is None:
            work = self._work[instruction.name] = work_of(self.schedule, computation, instruction)
        seconds = work.seconds(self.machine)
        self.busy += seconds
        self.matmul += seconds if work.flops else 0.0
        if self.keep_bars and seconds:
            first, kind_and_line = instruction.results[0], (instruction.opcode, instruction.line)
            done = now + seconds
            self.bars.append(
                Bar(0, "compute", now, done, *kind_and_line, first.shape, first.dtype, work.flops, work.bytes)
            )
        return now + seconds

    def alone(self, name: str) -> tuple[float, float, float]:
        """Seconds of a computation's kernels, of its matmuls among them, and of its transfers."""
        if name in self._alone:
            return self._alone[name]
        computation = self.schedule.computations[name]
        seconds = matmul = sent = 0.0
        for instruction in computation.instructions:
            if instruction.opcode in CONTAINERS:
                trips = instruction.trips if instruction.opcode == "while" else 1
                bodies = (instruction.called("body"),) if instruction.opcode == "while" else instruction.calls
                inner = max((self.alone(body) for body in bodies), key=lambda totals: totals[0] + totals[2])
                seconds, matmul, sent = (a + trips * b for a, b in zip((seconds, matmul, sent), inner, strict=True))
            elif self.schedule.collective_kind(instruction):
                instance = self._transfer(computation, instruction)
                sent += instance.latency + instance.wire_bytes / instance.rate if instance else 0.0
            else:
                work = work_of(self.schedule, computation, instruction)
                seconds += work.seconds(self.machine)
                matmul += work.seconds(self.machine) if work.flops else 0.0
        self._alone[name] = (seconds, matmul, sent)
        return self._alone[name]
