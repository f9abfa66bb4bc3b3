"""Links between devices: the time of a collective over one of them, depending on its wiring."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

# Rates by size: ((bytes or FLOPs, rate), ...), ascending; between two entries the rate is interpolated in the
# logarithm of the size, and beyond the ends it is constant.
Table = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Link:
    """A connection between devices: a switch, unless ``pairs`` or ``torus`` is set.

    Attributes:
        name: For example ``NVLink``.
        group: Number of devices it connects: consecutive devices in groups of this size.
        bandwidth: Bytes per second that one device sends over it, one way; for ``pairs`` or a ``torus``, over one wire.
        latency: Seconds that one step of a ring takes in addition to sending its bytes.
        shared: Whether all devices of an inner group share ``bandwidth``: one network adapter for a node.
        reduces: Whether its switches sum the data that passes through them, as NVLink SHARP does: in an all-reduce each
            device then sends the array once instead of 2 (n - 1) / n times. Only the times change; the bytes reported
            for a program stay those of a ring.
        pairs: Whether every pair of devices has its own wire: in a group of n, each device sends over n - 1 of them, in
            a permute over one.
        torus: Sizes of a grid whose neighbours are wired. Every mesh axis is assumed to have its own dimensions, as
            ``jax.experimental.mesh_utils`` assigns them where it can.
        wraps: A dimension closes into a ring if its size is a multiple of this; in a grid of three dimensions, either
            all close or none does.
        largest: The most devices it can connect when ``course.machines.scaled`` builds it; 0 means ``group``.
        rates: Measured bytes per second that a device sends, by collective and by size as passed to
            ``Machine.transfer``; used instead of ``bandwidth`` and ``latency``.
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

        It is expressed in bytes of a ring, whichever algorithm runs: the time is a ring's bytes divided by this rate.
        """
        if self.pairs:
            return self.bandwidth * (n - 1)
        if self.torus:
            dimensions = self.dimensions(n)
            if kind == "all_to_all":
                # Of each device's block S, S d / 4 crosses the middle of a dimension of d one way, and half of that
                # if the dimension is a ring, which has two middles.
                return min(self.bandwidth * (n - 1) / n * (8 if ring else 4) / d for d, ring in dimensions)
            return self.bandwidth * sum(2 if ring else 1 for _, ring in dimensions)
        if self.reduces and kind == "all_reduce":
            return self.bandwidth * 2 * (n - 1) / n
        return self.bandwidth

    def steps(self, kind: str, n: int, joined: int) -> int:
        """Number of sequential steps over this link.

        Args:
            kind: StableHLO's name of the collective.
            n: Number of devices connected.
            joined: Steps over this link in one round of a ring through all devices.
        """
        if kind == "all_reduce" and self.reduces:
            return 2
        if self.torus:
            joined = sum(d // 2 if ring else d - 1 for d, ring in self.dimensions(n))
        return 2 * joined if kind == "all_reduce" else joined

    def dimensions(self, n: int) -> tuple[tuple[int, bool], ...]:
        """The part of the torus that n devices occupy: sizes, and whether each is a ring; partial ones are lines."""
        return _dimensions(self.torus, self.wraps, n)


@cache
def _dimensions(torus: tuple[int, ...], wraps: int, n: int) -> tuple[tuple[int, bool], ...]:
    closed = [wraps > 0 and size % wraps == 0 for size in torus]
    if len(torus) > 2:
        closed = [all(closed)] * len(torus)
    occupied, left = [], n
    for size, ring in sorted(zip(torus, closed, strict=True), reverse=True):
        if size > 1 and left > 1 and left % size == 0:
            occupied.append((size, ring))
            left //= size
    return (*occupied, (left, False)) if left > 1 else tuple(occupied)


@dataclass(frozen=True)
class Level:
    """The part of a group's work that goes over one link of a machine.

    Attributes:
        link: Index of the machine's link.
        together: Minimum number of members that share one inner group and use their links in parallel.
        parts: Maximum number of inner groups that it joins.
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
        sizes: Number of devices that each link of the machine connects.
        devices: The group: a tuple, or a range, which is faster to look up for thousands of devices.
    """
    needed, inner = [], 1
    for index, size in enumerate(sizes):
        counts = Counter(device // inner for device in devices)
        last = index == len(sizes) - 1
        outer = Counter(0 if last else part * inner // size for part in counts)
        if len(outer) < len(counts):
            needed.append(Level(index, min(counts.values()), max(outer.values()), len(counts) - len(outer)))
        inner = size
    return tuple(needed)


def grid(devices: int, dimensions: int) -> tuple[int, ...]:
    """Sizes of the grid with that many devices that is closest to a square or a cube, smallest first.

    >>> grid(256, 2), grid(512, 3), grid(32, 3)
    ((16, 16), (8, 8, 8), (2, 4, 4))
    """
    if dimensions == 1:
        return (devices,)
    most = round(devices ** (1 / dimensions) + 1e-9, 6)
    first = max(size for size in range(1, math.floor(most) + 1) if devices % size == 0)
    return (first, *grid(devices // first, dimensions - 1))
