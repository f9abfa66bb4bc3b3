"""How long one collective takes on an axis of a mesh whose axes are ``data``, ``pipe`` and ``tensor``, by rings."""

from __future__ import annotations

from course.machine import Machine
from course.planning.choices import Mesh

# What each of n devices sends of the whole array, in a ring.
_SENT = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def axis_group(mesh: Mesh, axis: int) -> tuple[int, ...]:
    """The devices of the first group along an axis: the last axis is innermost, as ``course.mesh`` lays them out."""
    stride = 1
    for size in mesh[axis + 1 :]:
        stride *= size
    return tuple(range(0, stride * mesh[axis], stride))


def collective_seconds(machine: Machine, kind: str, group: tuple[int, ...], size: float) -> float:
    """Of one collective over a group.

    Args:
        machine: Where.
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        group: Its devices.
        size: Bytes of the whole array.
    """
    n = len(group)
    if n == 1 or not size:
        return 0.0
    wire = _SENT[kind] * (n - 1) / n * size
    latency, rate = machine.transfer(kind, group, wire, size)
    return latency + wire / rate


def permute_seconds(machine: Machine, group: tuple[int, ...], size: float) -> float:
    """Of handing a block of so many bytes on to the next device, all at once; the slowest pair counts."""
    if len(group) == 1 or not size:
        return 0.0
    pairs = zip(group, (*group[1:], group[0]), strict=True)
    times = (machine.transfer("collective_permute", group, size, size, pair=pair) for pair in pairs)
    return max(latency + size / rate for latency, rate in times)
