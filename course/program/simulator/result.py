"""Results of the timeline analysis: bars, a breakdown of each device's time, and the critical path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec

from course.machine import Machine
from course.program.ir import Module, Op
from course.program.simulator.device import Device, Kernel
from course.program.simulator.network import Instance
from course.program.simulator.simulation import Simulation, simulate


@dataclass(frozen=True)
class Bar:
    """An event on a device.

    Attributes:
        device: The representative device of its class.
        stream: ``compute``, or the mesh axes of a communication stream.
        start, end: Seconds.
        kind: StableHLO's name of the operation; for a kernel, of the one that writes its result.
        line: The learner's line.
        shape, dtype: Shape and dtype of the result.
        flops: FLOPs of a matmul.
        bytes: Bytes that a kernel moves or a device sends.
    """

    device: int
    stream: str
    start: float
    end: float
    kind: str
    line: str
    shape: tuple[int, ...]
    dtype: str
    flops: float
    bytes: float

    @classmethod
    def of(cls, device: int, stream: str, start: float, end: float, op: Op, flops: float, size: float) -> Bar:
        """The bar of an operation."""
        first = op.results[0]
        return cls(device, stream, start, end, op.kind, op.line, first.shape, first.dtype, flops, size)

    @classmethod
    def of_transfer(cls, device: int, instance: Instance) -> Bar:
        """The bar of a collective that has ended."""
        assert instance.start is not None and instance.end is not None
        stream, moved = ",".join(instance.axes), instance.wire_bytes
        return cls.of(device, stream, instance.start, instance.end, instance.op, 0.0, moved)


@dataclass(frozen=True)
class DeviceTime:
    """A breakdown of a device's time; for the rest of the step, it waits for the others to end.

    Attributes:
        device: The representative device of its class.
        members: All devices that behave like it.
        end: The time at which it ended.
        busy: Seconds that it computes.
        waiting: Idle seconds because other devices are not ready to communicate: a pipeline's bubble.
        exposed: Idle seconds during which a transfer runs or queues, by mesh axes.
    """

    device: int
    members: tuple[int, ...]
    end: float
    busy: float
    waiting: float
    exposed: dict[str, float]


@dataclass(frozen=True)
class Piece:
    """A part of the critical path, which would have to be faster to shorten the step.

    Attributes:
        kind, line: Kind and line of the operation.
        stream: As in ``Bar``.
        seconds: Total seconds.
        count: Number of occurrences on the path.
    """

    kind: str
    line: str
    stream: str
    seconds: float
    count: int


@dataclass(frozen=True)
class Timeline:
    """A step of a Program on a machine.

    Attributes:
        machine: Name of the machine.
        mesh: Axis sizes by name.
        seconds: Duration of the step.
        devices: One entry for each class of devices that behave alike.
        critical: The critical path, the longest pieces first.
        bars: All events, by start; not part of the JSON.
        early: True if collectives were issued as soon as possible, instead of in program order.
    """

    machine: str
    mesh: dict[str, int]
    seconds: float
    devices: tuple[DeviceTime, ...]
    critical: tuple[Piece, ...]
    bars: tuple[Bar, ...] = ()
    early: bool = False

    @property
    def busy(self) -> float:
        """Compute seconds of the busiest device."""
        return max(device.busy for device in self.devices)

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds of exposed communication by mesh axes, each for the most affected device."""
        axes = sorted({name for device in self.devices for name in device.exposed})
        return {name: max(device.exposed.get(name, 0.0) for device in self.devices) for name in axes}

    @property
    def exposed_seconds(self) -> float:
        """Exposed communication over all axes, for the most affected device."""
        return max(sum(device.exposed.values()) for device in self.devices)

    def mfu(self, model_flops: float, peak: float) -> float:
        """Model FLOPs utilisation (Chowdhery et al., PaLM, 2022, appendix B).

        Args:
            model_flops: FLOPs that the model needs for the step on all devices, whatever the program computes.
            peak: FLOP/s of one device.
        """
        devices = sum(len(device.members) for device in self.devices)
        return model_flops / (self.seconds * devices * peak)

    def to_json(self) -> dict[str, Any]:
        """Everything but the bars; ``msgspec.convert`` reads it back."""
        result = msgspec.to_builtins(replace(self, bars=()))  # there are thousands
        del result["bars"]
        return result


def timeline(module: Module, machine: Machine, *, free: Iterable[str] = ()) -> Timeline:
    """Simulate a Program on a machine.

    Args:
        module: ``parse(program)``.
        machine: Must have at least as many devices as the mesh.
        free: Mesh axes whose communication takes no time, to see the step without it.

    Raises:
        ProgramError: A trip count or a branch depends on data, or devices wait for each other forever.
        ValueError: The machine has too few devices.
    """
    return _timeline(simulate(module, machine, free)[0], machine)


def timelines(module: Module, machine: Machine, *, free: Iterable[str] = ()) -> list[Timeline]:
    """The same with collectives issued early and in program order, the faster first; only one if both are the same."""
    return [_timeline(simulation, machine) for simulation in simulate(module, machine, free)]


def _timeline(simulation: Simulation, machine: Machine) -> Timeline:
    devices = tuple(_device_time(device) for device in simulation.devices)
    seconds = max(device.end for device in devices)
    bars = tuple(sorted(_bars(simulation), key=lambda bar: (bar.start, bar.device, bar.stream)))
    early = not simulation.network.program_order
    return Timeline(machine.name, dict(simulation.module.mesh), seconds, devices, _critical(simulation), bars, early)


def bubble(useful: float, num_stages: int, seconds: float) -> float:
    """The fraction of a pipeline's device time without useful work.

    Args:
        useful: Seconds of work on real microbatches, over all stages.
        num_stages: Number of stages.
        seconds: Duration of the forward pass on a free network.
    """
    return 1 - useful / (num_stages * seconds)


def _device_time(device: Device) -> DeviceTime:
    waiting, exposed = 0.0, {}
    for idle in device.idle:
        end, instance = idle.end, idle.instance
        # Backwards along the chain of transfers that the kernel waited for, while the device computed nothing.
        while end > idle.start:
            arrived, cause = instance.arrived[device.number]
            assert instance.ready is not None
            sending = max(idle.start, min(end, instance.ready))
            axes = ",".join(instance.axes)
            exposed[axes] = exposed.get(axes, 0.0) + (end - sending)
            end = max(idle.start, min(sending, arrived))
            waiting += sending - end
            if not isinstance(cause, Instance):
                waiting += end - idle.start
                break
            instance = cause
    busy = sum(kernel.end - kernel.start for kernel in device.kernels)
    return DeviceTime(device.alike.device, device.alike.members, device.end or 0.0, busy, waiting, exposed)


def _bars(simulation: Simulation) -> Iterable[Bar]:
    for device in simulation.devices:
        number = device.alike.device
        for kernel in device.kernels:
            step = kernel.step
            yield Bar.of(number, "compute", kernel.start, kernel.end, step.op, step.flops, step.bytes_moved)
        for instance in device.instances:
            yield Bar.of_transfer(number, instance)


def _critical(simulation: Simulation) -> tuple[Piece, ...]:
    """Trace backwards from the last event to end, each time to the event that it waited for."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    last = max(simulation.devices, key=lambda device: device.end or 0.0)
    previous = {after: kernel for device in simulation.devices for kernel, after in pairwise(device.kernels)}
    event: Any = last.last
    while event is not None:
        if isinstance(event, Kernel):
            name, seconds = (event.step.op.kind, event.step.op.line, "compute"), event.end - event.start
            event = event.cause or previous.get(event)
        else:
            assert isinstance(event, Instance) and event.start is not None and event.end is not None
            name, seconds = (event.op.kind, event.op.line, ",".join(event.axes)), event.end - event.start
            event = event.cause if isinstance(event.cause, Instance) else event.cause[1]
        total = totals.setdefault(name, [0.0, 0])
        total[0] += seconds
        total[1] += 1
    pieces = (Piece(*name, seconds, int(count)) for name, (seconds, count) in totals.items())
    return tuple(sorted(pieces, key=lambda piece: (-piece.seconds, piece.line, piece.kind)))
