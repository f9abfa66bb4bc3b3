"""Machine models for the analyses: a few published figures, and the rules that turn work into seconds.

Times of collectives assume rings: a latency for each of the ring's steps, plus each device's bytes over its
bandwidth. If a calibrated machine has measured rates for a collective, only these are used: they already include
latency and losses, so neither ``Link.latency`` nor an efficiency factor is applied on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from course.link import Level, Link, Table, levels


class TooFewDevices(ValueError):
    """Raised when a mesh needs more devices than there are; the message says what to do."""


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the published peaks that programs reach, the same for every program."""

    matmul: float = 1.0
    memory: float = 1.0
    link: float = 1.0


@dataclass(frozen=True)
class Machine:
    """A machine with several identical devices.

    Attributes:
        name: The name used in commands: ``8xH100``.
        device: The vendor's name for a device.
        num_devices: Number of devices.
        matmul_flops: Peak FLOP/s of matmuls by operand dtype, in StableHLO's names (``bf16``, ``f32``).
        vector_flops: Peak FLOP/s of everything else, in float32.
        memory_bytes: Memory of one device.
        memory_bandwidth: Bytes per second of one device.
        links: Innermost first; the last one reaches all devices.
        network: Link between nodes, for ``course.machines.scaled``; its ``group`` is 0. None if no source gives it.
        efficiency: At most three factors, the same for every program.
        launch: Fixed overhead of each kernel in seconds.
        matmul_rates: Measured FLOP/s by FLOPs of one bfloat16 product, used instead of the peak.
        calibrated: Whether it has measured rates by size.
        sources: Source of each figure, by the figure's name; ``latency`` refers to the links, ``rates`` to the measured
            tables.
        compiler: Figures that only the deviceless GPU compiler reads: cores, clock, registers, compute capability.
    """

    name: str
    device: str
    num_devices: int
    matmul_flops: Mapping[str, float]
    vector_flops: float
    memory_bytes: float
    memory_bandwidth: float
    links: tuple[Link, ...]
    network: Link | None = None
    efficiency: Efficiency = Efficiency()
    launch: float = 0.0
    matmul_rates: Table = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    compiler: Mapping[str, float] = field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        return bool(self.matmul_rates) or any(link.rates for link in self.links)

    @property
    def tf32(self) -> bool:
        """True if float32 matmuls run as TensorFloat-32: JAX's default on NVIDIA's Ampere and newer."""
        return self.compiler.get("major", 0) >= 8

    def kernel_seconds(self, bytes_moved: float, operations: float = 0.0) -> float:
        """Seconds for elementwise work and copies: memory traffic or arithmetic, whichever takes longer."""
        memory = bytes_moved / (self.memory_bandwidth * self.efficiency.memory)
        return self.launch + max(memory, operations / self.vector_flops)

    def matmul_seconds(self, flops: float, bytes_moved: float, dtype: str) -> float:
        """Seconds for one matmul: arithmetic or memory traffic, whichever takes longer."""
        peak = self.peak(dtype)
        rate = self.efficiency.matmul * peak
        if self.matmul_rates and flops:
            rate = interpolate(self.matmul_rates, flops) * peak / self.peak("bf16")
        memory = bytes_moved / (self.memory_bandwidth * self.efficiency.memory)
        return self.launch + max(memory, flops / rate)

    def peak(self, dtype: str) -> float:
        """FLOP/s of matmuls of this operand dtype; a dtype without a unit on this machine runs as float32.

        Complex products are computed as products of their real and imaginary parts.
        """
        dtype = dtype.removeprefix("complex<").removesuffix(">")
        if dtype in self.matmul_flops:
            return self.matmul_flops[dtype]
        if dtype.startswith("f8") and "f8" in self.matmul_flops:
            return self.matmul_flops["f8"]
        return self.matmul_flops["bf16"] if dtype.startswith(("f8", "f4")) else self.vector_flops

    def link_of(self, devices: Sequence[int]) -> int:
        """Index in ``links`` of the link that a group of devices uses: the innermost one that reaches all of them."""
        needed = self.levels(devices)
        return needed[-1].link if needed else 0

    def axis_links(self, mesh: Mapping[str, int]) -> dict[str, str]:
        """Name of the link used by each mesh axis.

        Devices are numbered along the mesh with its last axis innermost, as ``course.mesh.make_mesh`` lays them out:
        neighbours on the last axis have neighbouring numbers. Where groups along one axis would use different links,
        the outermost is named, because the slowest group holds up the others. An axis of size 1 sends nothing and
        gets ``"none"``.

        >>> from course.machines import machine
        >>> machine("8xA5000").axis_links({"data": 4, "tensor": 2})
        {'data': 'PCIe', 'tensor': 'NVLink'}
        >>> machine("2x8xA100").axis_links({"data": 2, "tensor": 8})
        {'data': 'InfiniBand', 'tensor': 'NVLink'}

        Raises:
            TooFewDevices: The mesh has more devices than the machine.
        """
        self.require_fits(mesh)
        numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        names = {}
        for position, (axis, size) in enumerate(mesh.items()):
            groups = np.moveaxis(numbers, position, -1).reshape(-1, size)
            outermost = max(self.link_of(tuple(group.tolist())) for group in groups)
            names[axis] = self.links[outermost].name if size > 1 else "none"
        return names

    def require_fits(self, mesh: Mapping[str, int]) -> None:
        """Raise ``TooFewDevices`` for a mesh with more devices than the machine has."""
        needed = math.prod(mesh.values())
        if needed > self.num_devices:
            axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
            raise TooFewDevices(
                f"mesh {axes} needs {needed} devices and {self.name} has {self.num_devices}: use smaller axes, "
                "or a machine with more devices"
            )

    def levels(self, devices: Sequence[int]) -> tuple[Level, ...]:
        """Work of a group (a tuple or a range) on each link that it needs, innermost first."""
        return levels(tuple(link.group for link in self.links), devices)

    def bandwidth_of(self, devices: Sequence[int]) -> float:
        """Bytes per second that each device of a group sends in a ring over the group.

        Members of the same inner group use their outer links in parallel, as NCCL's rings do, up to the inner
        link's bandwidth.
        """
        own = self.efficiency.link * self.links[0].bandwidth
        return min((rate for _, rate in self.level_rates("all_gather", devices)), default=own)

    def level_rates(self, kind: str, devices: Sequence[int]) -> list[tuple[int, float]]:
        """The links that a collective needs, and how fast each device would send if that link were the only one.

        Rates are in bytes of a ring through all devices, which sends the same number over every level: the slowest
        level decides. In an all-to-all, only data for devices outside an inner group crosses the outer link, each
        device's part over its own outer link.
        """
        rates = []
        for level in self.levels(devices):
            link, n = self.links[level.link], len(devices)
            share = self.links[level.link - 1].group if link.shared and level.link else 1
            if kind == "all_to_all" and not link.torus:
                rate = link.bandwidth * (n - 1) / (n - level.together) * (n - 1 if link.pairs else 1)
            else:
                rate = level.together * link.rate(kind, level.parts)
            rates.append((level.link, self.efficiency.link * rate / share))
        return rates

    def transfer(
        self, kind: str, devices: Sequence[int], wire_bytes: float, size: float, *, pair: tuple[int, int] | None = None
    ) -> tuple[float, float]:
        """The latency of a collective in seconds, and the bytes per second that it then sends.

        The latency is that of a ring through all devices, some of whose steps go between nodes, as NCCL counts them
        (src/graph/tuning.cc).

        Args:
            kind: StableHLO's name.
            devices: The group.
            wire_bytes: Bytes that each device sends, in a ring.
            size: Bytes of the whole array; of one device's block for a permute and an all-to-all.
            pair: Source and target, for one edge of a permute.
        """
        index = self.link_of(devices if pair is None else pair)
        link = self.links[index]
        if kind in link.rates:
            return 0.0, interpolate(link.rates[kind], size)
        if kind == "collective_permute":
            sharing = 1
            if link.shared and index:
                # Parallel groups send at the same time: as many as fit between two members of this one.
                apart = min((b - a for a, b in pairwise(sorted(devices))), default=1)
                sharing = min(apart, self.links[index - 1].group)
            return link.latency, self.efficiency.link * link.bandwidth / sharing
        link_levels = [(self.links[level.link], level) for level in self.levels(devices)]
        latency = sum(link.latency * link.steps(kind, level.parts, level.joined) for link, level in link_levels)
        return latency, min(rate for _, rate in self.level_rates(kind, devices))


def interpolate(table: Table, size: float) -> float:
    """The rate for a size, linear in the logarithm of the size, constant beyond the ends."""
    if size <= table[0][0]:
        return table[0][1]
    for (low, slow), (high, fast) in pairwise(table):
        if size <= high:
            share = (math.log(size) - math.log(low)) / (math.log(high) - math.log(low))
            return slow + share * (fast - slow)
    return table[-1][1]
