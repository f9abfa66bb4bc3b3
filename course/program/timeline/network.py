"""The communication streams of all devices: which collective runs when, and how links are shared."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

# A class of devices that behave alike, by its number; it stands for each of its members.
ClassIndex = int


@dataclass(eq=False, slots=True)
class Instance:
    """One execution of a collective by one group.

    Attributes:
        op: The operation.
        axes: Mesh axes that it runs over, which name its stream.
        members: The classes that take part.
        latency: Seconds before bytes flow.
        wire_bytes: What each device sends.
        rate: Bytes per second while no other transfer shares a link.
        links: What it occupies of each member: the link, and its direction where each has wires of its own.
        arrived: When each member was ready for it, and why then and not earlier.
        ready, start, end: When all were, when it began and when it ended; none before that.
        cause: Why it began then: the arrival that was last, or the transfer that kept a stream.
    """

    op: Any
    axes: tuple[str, ...]
    members: tuple[ClassIndex, ...]
    latency: float
    wire_bytes: float
    rate: float
    links: tuple[tuple[int, int], ...]
    arrived: dict[ClassIndex, tuple[float, Any]] = field(default_factory=dict)
    ready: float | None = None
    start: float | None = None
    end: float | None = None
    cause: Any = None
    after: list[Callable[[float], None]] = field(default_factory=list)
    left: float = 0.0
    since: float = 0.0
    speed: float = 0.0
    version: int = 0


class Network:
    """Runs transfers in simulated time.

    One stream per class and set of axes carries one collective at a time. Transfers that share a link of a device
    share its bandwidth equally.

    Args:
        program_order: Whether a stream takes its collectives in program order; else the one that is ready first.
    """

    def __init__(self, program_order: bool):
        self.program_order = program_order
        self.now = 0.0
        self.overtaken = False  # whether a collective ever began before one that stands earlier in the program
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._queues: dict[tuple[ClassIndex, tuple[str, ...]], list[Instance]] = {}
        self._busy: dict[tuple[ClassIndex, tuple[str, ...]], Instance | None] = {}
        self._waiting: list[Instance] = []
        self._flowing: list[Instance] = []

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Do something at a time that is not past."""
        heapq.heappush(self._events, (max(time, self.now), next(self._number), action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action(self.now)

    def issue(self, instance: Instance, member: ClassIndex) -> None:
        """A member reaches the collective in its program; its operands need not be ready yet."""
        self._queues.setdefault((member, instance.axes), []).append(instance)

    def arrive(self, instance: Instance, member: ClassIndex, time: float, cause: Any) -> None:
        """A member's operands are ready from ``time`` on."""

        def arrived(now: float) -> None:
            instance.arrived[member] = (now, cause)
            if len(instance.arrived) == len(instance.members):
                instance.ready, instance.cause = now, (member, cause)
                self._waiting.append(instance)
                self._start_what_can(now)

        self.at(time, arrived)

    def _start_what_can(self, now: float) -> None:
        for instance in list(self._waiting):
            if all(self._free(instance, member) for member in instance.members):
                self._waiting.remove(instance)
                self._begin(instance, now)

    def _free(self, instance: Instance, member: ClassIndex) -> bool:
        stream = (member, instance.axes)
        if self._busy.get(stream) is not None:
            return False
        return not self.program_order or self._queues[stream][0] is instance

    def _begin(self, instance: Instance, now: float) -> None:
        for stream in self._streams(instance):
            queue = self._queues[stream]
            self.overtaken |= queue[0] is not instance
            queue.remove(instance)
            self._busy[stream] = instance
        instance.start = now
        instance.left = instance.wire_bytes

        def flow(now: float) -> None:
            instance.since = now
            self._flowing.append(instance)
            self._share(now)

        self.at(now + instance.latency, flow)

    def _share(self, now: float) -> None:
        """Give every flowing transfer its share of the links that it uses."""
        load: dict[tuple[ClassIndex, int, int], int] = {}
        for instance in self._flowing:
            for place in _places(instance):
                load[place] = load.get(place, 0) + 1
        for instance in self._flowing:
            speed = instance.rate / max((load[place] for place in _places(instance)), default=1)
            if speed == instance.speed and instance.version:
                continue
            instance.left = max(0.0, instance.left - (now - instance.since) * instance.speed)
            instance.since, instance.speed = now, speed
            instance.version += 1
            self.at(now + (instance.left / speed if instance.left else 0.0), self._finish(instance, instance.version))

    def _finish(self, instance: Instance, version: int) -> Callable[[float], None]:
        def finish(now: float) -> None:
            if instance.version != version or instance.end is not None:
                return
            instance.end = now
            self._flowing.remove(instance)
            for stream in self._streams(instance):
                self._busy[stream] = None
            for waiting in self._waiting:
                if any(stream in self._streams(waiting) for stream in self._streams(instance)):
                    waiting.cause = instance
            self._share(now)
            for action in instance.after:
                action(now)
            self._start_what_can(now)

        return finish

    @staticmethod
    def _streams(instance: Instance) -> list[tuple[ClassIndex, tuple[str, ...]]]:
        return [(member, instance.axes) for member in instance.members]


def _places(instance: Instance) -> Iterator[tuple[ClassIndex, int, int]]:
    for member in instance.members:
        for link, direction in instance.links:
            yield member, link, direction
