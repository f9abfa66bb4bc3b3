"""Gaps: the times when a device computes nothing, and the reasons that a timeline's bars show."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from course.program.simulator import Bar, DeviceTime, Timeline


@dataclass(frozen=True)
class Gap:
    """Time in which a device computes nothing.

    Attributes:
        start, end: Seconds.
        axes: The mesh axes of the running transfer; empty while it waits for other devices.
        line: The learner's line of the collective that it waits for.
    """

    start: float
    end: float
    axes: str
    line: str


def gaps(timeline: Timeline, device: DeviceTime) -> list[Gap]:
    """Explain the gaps in a device's compute stream, by start, up to the device's end.

    A kernel that begins when a collective ends has waited for it. The time in which that collective was sent, and
    those that it queued behind or read from, is exposed communication; the time before them is waiting for others.
    """
    bars = [bar for bar in timeline.bars if bar.device == device.device]
    ended: dict[float, Bar] = {}
    for bar in bars:
        if bar.stream != "compute" and bar.end > bar.start:
            longest = ended.setdefault(bar.end, bar)
            ended[bar.end] = min(longest, bar, key=lambda b: b.start)
    explained, free = [], 0.0
    for start, end in [*((b.start, b.end) for b in bars if b.stream == "compute"), (device.end, device.end)]:
        if start > free and start in ended:
            explained += _explained(free, start, ended)
        free = max(free, end)
    return explained


def _explained(start: float, end: float, ended: dict[float, Bar]) -> list[Gap]:
    """The gap split into transfers, backwards from its end; the remaining time at its start is waiting."""
    parts, line = [], ended[end].line
    while end > start and end in ended:
        bar = ended[end]
        parts.append(Gap(max(bar.start, start), end, bar.stream, bar.line))
        end = bar.start
    if end > start:
        parts.append(Gap(start, end, "", line))
    return parts[::-1]


def by_device(timeline: Timeline) -> dict[int, dict[str, list[Bar]]]:
    """Bars of each device by stream: ``compute`` first, then the communication streams by name."""
    streams_by_device: dict[int, dict[str, list[Bar]]] = {}
    for device in timeline.devices:
        streams: dict[str, list[Bar]] = defaultdict(list)
        for bar in timeline.bars:
            if bar.device == device.device:
                streams[bar.stream].append(bar)
        streams_by_device[device.device] = {
            name: streams[name] for name in sorted(streams, key=lambda n: (n != "compute", n))
        }
    return streams_by_device
