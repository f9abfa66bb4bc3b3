"""Links between devices: what a collective over one of them takes, by how its wires run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

# Rates by size: ((bytes or FLOPs, rate), ...), ascending; between two entries the rate is interpolated in the
# logarithm of the size, beyond the ends it stays what it is there.
Table = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Link:
    """A connection of devices: a switch, unless ``pairs`` or ``torus`` says otherwise.

    Attributes:
        name: ``NVLink``.
        group: How many devices it connects: consecutive devices in groups of this size.
        bandwidth: Bytes per second that one device sends over it, one way; over one wire of ``pairs`` or a ``torus``.
        latency: Seconds that one step of a ring takes beside its bytes.
        shared: Whether ``bandwidth`` is that of all devices of an inner group together: one network adapter for a node.
        reduces: Whether its switches add up what passes through them, as NVLink SHARP does: of an all-reduce, each
            device then sends the array once, and not 2 (n - 1) / n times. The times change; the bytes that a program
            is said to send stay those of a ring.
        pairs: Whether every two devices have a wire of their own: a group of n sends over n - 1 of them, a permute
            over one.
        torus: Sizes of a grid whose neighbours have wires. Every mesh axis is taken to have dimensions of its own, as
            ``jax.experimental.mesh_utils`` assigns them where it can.
        wraps: A dimension closes to a ring if its size is a multiple of this; those of a grid of three only together.
        largest: The most devices that it can connect, as ``course.machines.scaled`` builds it; 0: ``group``.
        rates: Measured bytes per second that a device sends, by collective and size as ``Machine.transfer`` takes
            it, used instead of ``bandwidth`` and ``latency``.
    """

    name: str
    group: int
    bandwidth: float
    latency: float
    shared: bool = False
    reduces: bool = False
    pairs: bool = False
    torus: tuple[int, ...] = ()
    wraps: int = 0
    largest: int = 0
    rates: Mapping[str, Table] = field(default_factory=dict)

    def rate(self, kind: str, n: int) -> float:
        """Bytes per second that each of n devices sends in a collective over this link alone.

        In bytes of a ring, whatever runs in its place: the time is a ring's bytes over this.
        """
        if self.pairs:
            return self.bandwidth * (n - 1)
        if self.torus:
            dimensions = self.dimensions(n)
            if kind == "all_to_all":
                # Through the middle of a dimension of d pass, of each device's block S, S d / 4 one way, and half of it
                # where the dimension is a ring, which has two middles.
                return min(self.bandwidth * (n - 1) / n * (8 if ring else 4) / d for d, ring in dimensions)
            return self.bandwidth * sum(2 if ring else 1 for _, ring in dimensions)
        if self.reduces and kind == "all_reduce":
            return self.bandwidth * 2 * (n - 1) / n
        return self.bandwidth

    def steps(self, kind: str, n: int, joined: int) -> int:
        """How many times something is passed on over this link.

        Args:
            kind: StableHLO's name of the collective.
            n: Devices that it connects.
            joined: How many steps of a ring through all devices go over it, once round.
        """
        if kind == "all_reduce" and self.reduces:
            return 2
        if self.torus:
            joined = sum(d // 2 if ring else d - 1 for d, ring in self.dimensions(n))
        return 2 * joined if kind == "all_reduce" else joined

    def dimensions(self, n: int) -> tuple[tuple[int, bool], ...]:
        """What n devices take of the torus: sizes, and whether each is a ring; a part of a dimension is a line."""
        return _dimensions(self.torus, self.wraps, n)


@cache
def _dimensions(torus: tuple[int, ...], wraps: int, n: int) -> tuple[tuple[int, bool], ...]:
    closed = [wraps > 0 and size % wraps == 0 for size in torus]
    if len(torus) > 2:
        closed = [all(closed)] * len(torus)
    found, left = [], n
    for size, ring in sorted(zip(torus, closed, strict=True), reverse=True):
        if size > 1 and left > 1 and left % size == 0:
            found.append((size, ring))
            left //= size
    return (*found, (left, False)) if left > 1 else tuple(found)


@dataclass(frozen=True)
class Level:
    """What a group of devices does over one link of a machine.

    Attributes:
        link: Which of the machine's links.
        together: Members, at least, that lie within one inner group and use their links side by side.
        parts: Inner groups, at most, that it joins.
        joined: Steps of a ring through all devices that go over it.
    """

    link: int
    together: int
    parts: int
    joined: int


@cache
def levels(sizes: tuple[int, ...], devices: Sequence[int]) -> tuple[Level, ...]:
    """The links that a group of devices needs, innermost first.

    Args:
        sizes: How many devices each link of the machine connects.
        devices: The group: a tuple, or a range, which is looked up faster where there are thousands.
    """
    found, inner = [], 1
    for index, size in enumerate(sizes):
        counts = Counter(device // inner for device in devices)
        last = index == len(sizes) - 1
        outer = Counter(0 if last else part * inner // size for part in counts)
        if len(outer) < len(counts):
            found.append(Level(index, min(counts.values()), max(outer.values()), len(counts) - len(outer)))
        inner = size
    return tuple(found)


def grid(devices: int, dimensions: int) -> tuple[int, ...]:
    """The sizes of a grid of so many devices that is nearest to a square or a cube, smallest first.

    >>> grid(256, 2), grid(512, 3), grid(32, 3)
    ((16, 16), (8, 8, 8), (2, 4, 4))
    """
    if dimensions == 1:
        return (devices,)
    most = round(devices ** (1 / dimensions) + 1e-9, 6)
    first = max(size for size in range(1, math.floor(most) + 1) if devices % size == 0)
    return (first, *grid(devices // first, dimensions - 1))
