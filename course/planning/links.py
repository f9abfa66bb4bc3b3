"""The time of one collective on an axis of a mesh whose axes are ``data``, ``pipe`` and ``tensor``, using rings."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from course.machine import Machine
from course.planning.choices import Mesh

# Fraction of the whole array that each device sends in a ring, up to the factor (n - 1) / n.
_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
# Message size for finding the slowest pair of a permute if rates do not depend on the size.
_MEDIUM = 2.0**20


def axis_group(mesh: Mesh, axis: int) -> range:
    """The devices of the first group along an axis: the last axis is innermost, as in ``course.mesh``."""
    stride = 1
    for size in mesh[axis + 1 :]:
        stride *= size
    return range(0, stride * mesh[axis], stride)


class Links:
    """A machine's collectives. If the rate does not depend on the size, it is looked up once per group."""

    def __init__(self, machine: Machine):
        self._rates: Callable[..., tuple[float, float]] = cache(lambda *given: _rate(machine, *given))
        self._sized = machine.calibrated

    def collective(self, kind: str, group: range, size: float) -> float:
        """Seconds of one collective over a group.

        Args:
            kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
            group: Devices of the group.
            size: Bytes of the whole array.
        """
        n = len(group)
        if n == 1 or not size:
            return 0.0
        wire = _SENT[kind] * (n - 1) / n * size
        latency, rate = self._rates(kind, group, size if self._sized else _MEDIUM)
        return latency + wire / rate

    def permute(self, group: range, size: float) -> float:
        """Seconds for all devices to pass a block of ``size`` bytes to the next one; the slowest pair counts."""
        if len(group) == 1 or not size:
            return 0.0
        latency, rate = self._rates("collective_permute", group, size if self._sized else _MEDIUM)
        return latency + size / rate


def _rate(machine: Machine, kind: str, group: range, size: float) -> tuple[float, float]:
    """Seconds before the bytes, and bytes per second: for a permute, those of the slowest pair."""
    devices = tuple(group)
    if kind != "collective_permute":
        return machine.transfer(kind, devices, size, size)
    pairs = zip(devices, (*devices[1:], devices[0]), strict=True)
    found = (machine.transfer(kind, devices, size, size, pair=pair) for pair in pairs)
    return max(found, key=lambda one: one[0] + size / one[1])
