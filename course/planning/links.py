"""The time of one collective on axes of a mesh, using rings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from course.machine import Machine
from course.planning.choices import Mesh

LAYOUT = ("data", "pipe", "expert", "context", "tensor")
# Fraction of the whole array that each device sends in a ring, up to the factor (n - 1) / n; for an all-to-all, of one
# device's array.
_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
# Message size for finding the slowest pair of a permute if rates do not depend on the size.
_MEDIUM = 2.0**20


@dataclass(frozen=True)
class Rows:
    """Devices in equally long rows, each with the same gaps: a group along axes that are not next to each other."""

    starts: range
    row: range

    def __len__(self) -> int:
        return len(self.starts) * len(self.row)

    def __iter__(self) -> Iterator[int]:
        return (start + place for start in self.starts for place in self.row)


Group = range | Rows


@cache
def axis_group(mesh: Mesh, *axes: str) -> Group:
    """The devices of the first group along one or several axes; the last axis of ``LAYOUT`` is innermost."""
    stride, runs = 1, []
    for axis in reversed(LAYOUT):
        size = getattr(mesh, axis)
        if axis in axes and size > 1:
            if runs and stride == len(runs[-1]) * runs[-1].step:
                inner = runs.pop()
                runs.append(range(0, size * stride, inner.step))
            else:
                runs.append(range(0, size * stride, stride))
        stride *= size
    if len(runs) > 1:
        row, starts = runs
        return Rows(starts, row)
    return runs[0] if runs else range(1)


class Links:
    """A machine's collectives. If the rate does not depend on the size, it is looked up once per group."""

    def __init__(self, machine: Machine):
        self._rates: Callable[..., tuple[float, float]] = cache(lambda *arguments: _rate(machine, *arguments))
        self._sized = machine.calibrated

    def collective(self, kind: str, group: Group, size: float) -> float:
        """Seconds of one collective over a group.

        Args:
            kind: ``all_gather``, ``reduce_scatter``, ``all_reduce`` or ``all_to_all``.
            group: Devices of the group.
            size: Bytes of the whole array; for an all-to-all, of one device's array.
        """
        n = len(group)
        if n == 1 or not size:
            return 0.0
        wire = _SENT[kind] * (n - 1) / n * size
        latency, rate = self._rates(kind, group, size if self._sized else _MEDIUM)
        return latency + wire / rate

    def permute(self, group: Group, size: float) -> float:
        """Seconds for all devices to pass a block of ``size`` bytes to the next one; the slowest pair counts."""
        if len(group) == 1 or not size:
            return 0.0
        latency, rate = self._rates("collective_permute", group, size if self._sized else _MEDIUM)
        return latency + size / rate


def _rate(machine: Machine, kind: str, group: Group, size: float) -> tuple[float, float]:
    """The latency in seconds, and bytes per second; for a permute, those of the slowest pair."""
    devices = tuple(group)
    if kind != "collective_permute":
        return machine.transfer(kind, devices, size, size)
    pairs = zip(devices, (*devices[1:], devices[0]), strict=True)
    timings = (machine.transfer(kind, devices, size, size, pair=pair) for pair in pairs)
    return max(timings, key=lambda timing: timing[0] + size / timing[1])
