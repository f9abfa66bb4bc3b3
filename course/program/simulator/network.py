"""The communication streams of all devices: when each collective runs, and how links are shared."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

# Index of a class of devices that behave alike; it represents each of its members.
ClassIndex = int
Stream = tuple[ClassIndex, tuple[str, ...]]


@dataclass(eq=False, slots=True)
class Instance:
    """One execution of a collective by one group.

    Attributes:
        op: The operation.
        axes: Mesh axes that it runs over, which name its stream.
        members: The classes that take part.
        latency: Seconds before bytes flow.
        wire_bytes: Bytes that each device sends.
        rate: Bytes per second while no other transfer shares a link.
        places: Every link that it occupies, and the rate at which it would send if that were the only one.
        arrived: The time at which each member was ready for it, and the reason why not earlier.
        ready, start, end: The times at which all were ready, it began and it ended; None before that.
        cause: Why it did not begin earlier: the last arrival, or the transfer that occupied a stream.
    """

    op: Any
    axes: tuple[str, ...]
    members: tuple[ClassIndex, ...]
    latency: float
    wire_bytes: float
    rate: float
    places: tuple[tuple[Hashable, float], ...]
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

    def again(self) -> Instance:
        """Another execution of the same collective."""
        return Instance(self.op, self.axes, self.members, self.latency, self.wire_bytes, self.rate, self.places)


class Network:
    """Runs transfers in simulated time.

    One stream per class and set of axes carries one collective at a time. Transfers that share a link of a device
    share its bandwidth equally; one that needs several links runs at the rate of the slowest.

    Args:
        program_order: Whether a stream takes its collectives in program order; otherwise ready-first.
    """

    def __init__(self, program_order: bool):
        self.program_order = program_order
        self.now = 0.0
        self.overtaken = False  # whether a collective ever began before an earlier one of the program
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        # Collectives issued to each stream but not begun, in program order, and the ready ones among them, likewise.
        self._queues: dict[Stream, OrderedDict[Instance, None]] = {}
        self._waiting: dict[Stream, OrderedDict[Instance, None]] = {}
        self._busy: dict[Stream, Instance | None] = {}
        self._flowing: list[Instance] = []

    def at(self, time: float, action: Callable[[float], None]) -> None:
        """Schedule an action at a time that is not in the past."""
        heapq.heappush(self._events, (max(time, self.now), next(self._number), action))

    def run(self) -> None:
        """Run until no events are left."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action(self.now)

    def issue(self, instance: Instance, member: ClassIndex) -> None:
        """Issue a collective when a member reaches it in its program; its operands need not be ready yet."""
        self._queues.setdefault((member, instance.axes), OrderedDict())[instance] = None

    def arrive(self, instance: Instance, member: ClassIndex, time: float, cause: Any) -> None:
        """Mark a member's operands as ready from ``time`` on."""

        def arrived(now: float) -> None:
            instance.arrived[member] = (now, cause)
            if len(instance.arrived) == len(instance.members):
                instance.ready, instance.cause = now, (member, cause)
                for stream in self._streams(instance):
                    self._waiting.setdefault(stream, OrderedDict())[instance] = None
                self._begin_first(self._streams(instance), now, None)

        self.at(time, arrived)

    def _begin_first(self, streams: list[Stream], now: float, ended: Instance | None) -> None:
        """Begin the collectives that can begin on changed streams; those in ``ended`` have left them."""
        for stream in streams:
            ready = self._waiting.get(stream)
            if not ready or self._busy.get(stream) is not None:
                continue
            first = next(iter(self._queues[stream]))
            for instance in ([first] if first in ready else []) if self.program_order else ready:
                if all(self._free(instance, other) for other in self._streams(instance)):
                    self._begin(instance, now, ended)
                    break

    def _free(self, instance: Instance, stream: Stream) -> bool:
        if self._busy.get(stream) is not None:
            return False
        return not self.program_order or next(iter(self._queues[stream])) is instance

    def _begin(self, instance: Instance, now: float, ended: Instance | None) -> None:
        if ended is not None:
            instance.cause = ended
        for stream in self._streams(instance):
            queue = self._queues[stream]
            self.overtaken |= next(iter(queue)) is not instance
            del queue[instance], self._waiting[stream][instance]
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
        load = Counter(place for instance in self._flowing for place, _ in instance.places)
        for instance in self._flowing:
            speed = min([instance.rate, *(capacity / load[place] for place, capacity in instance.places)])
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
            self._share(now)
            for action in instance.after:
                action(now)
            self._begin_first(self._streams(instance), now, instance)

        return finish

    @staticmethod
    def _streams(instance: Instance) -> list[Stream]:
        return [(member, instance.axes) for member in instance.members]
