"""Peak memory of a Program on a real device, from the allocator of a process that ran nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from course.measured import fresh
from course.program import Program


@dataclass(frozen=True)
class Peak:
    """Peak memory of the fullest device, in bytes.

    Attributes:
        bytes: The allocator's ``peak_bytes_in_use`` after a step; None if the backend does not report it.
        compiling: The same after compilation alone, which may allocate to try kernels out.
    """

    bytes: int | None
    compiling: int | None

    @property
    def at_most(self) -> bool:
        """True if compilation used as much as the whole run, so that the program itself may need less."""
        return self.bytes is not None and self.bytes == self.compiling


def peak_memory(program: Program, *, high: int = 2, seconds: float = 300, platform: str = "", flags: str = "") -> Peak:
    """Run a Program once in a fresh process, and return the allocator's peak.

    Args:
        program: Exported for the devices' platform.
        high: As for ``fill``.
        seconds, platform, flags: As for ``fresh.ask``.

    Raises:
        MeasurementFailed: It could not be run; ``kind`` is ``out of memory`` if it did not fit.
    """
    request = {"do": "memory", "high": high}
    response = fresh.ask(request, {"program": program.serialise()}, seconds=seconds, platform=platform, flags=flags)
    return Peak(response["bytes"], response["compiling"])


def peak_now() -> int | None:
    """The largest ``peak_bytes_in_use`` of this process's devices; None if they do not report it, as on CPUs."""
    stats: list[dict[str, Any] | None] = [device.memory_stats() for device in jax.local_devices()]
    peaks = [
        device_stats["peak_bytes_in_use"]
        for device_stats in stats
        if device_stats and "peak_bytes_in_use" in device_stats
    ]
    return max(peaks) if peaks else None
