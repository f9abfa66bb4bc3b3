"""Seconds, bytes and counts for readers: three digits and a suitable unit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from course.machine import Machine

# Shorter than anything that a device does: rounding errors in differences of equal sums.
INSTANT = 1e-10
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_COUNTS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


class Figure(str):
    """A figure for readers, ``80 ms (40%)``: its ``value``, and in parentheses its ``share`` of a whole."""

    value: str
    share: str

    def __new__(cls, value: str, share: str = "") -> Figure:
        figure = super().__new__(cls, f"{value} ({share})" if share else value)
        figure.value, figure.share = value, share
        return figure

    @property
    def stacked(self) -> str:
        """The share below the value, for a narrow column."""
        return f"{self.value}\n({self.share})" if self.share else self.value


def seconds_text(seconds: float) -> str:
    """``20.6 ms``; a duration below a tenth of a nanosecond is a rounding error, and zero."""
    return _scaled(seconds, _SECONDS) if abs(seconds) >= INSTANT else "0 s"


def bytes_text(number: float) -> str:
    """``256 MiB``."""
    return _scaled(number, _BYTES) if number else "0 B"


def capacity_text(number: float) -> str:
    """``74.5 GiB (80 GB)``: memory of a device in the unit used everywhere here, and in the vendor's."""
    return f"{bytes_text(number)} ({digits(number / 1e9)} GB)"


def dtype_text(machine: Machine, dtype: str) -> str:
    """Name of the precision of a machine's matmuls: ``TF32`` for ``f32`` if its peak is TensorFloat-32's."""
    return "TF32" if dtype == "f32" and machine.tf32 else dtype


def count_text(number: float, unit: str) -> str:
    """``7.15 TFLOP`` for a unit of ``FLOP``."""
    return _scaled(number, tuple((size, prefix + unit) for size, prefix in _COUNTS)) if number else f"0 {unit}"


def share_text(part: float, whole: float) -> str:
    """``30.5%``, with a resolution of a tenth of a percent."""
    percent = 100 * part / whole if whole else 0.0
    return "< 0.1%" if 0 < percent < 0.1 else f"{digits(round(percent, 1))}%"


def digits(value: float) -> str:
    """Format with three digits, never with an exponent, and with all digits of a whole number."""
    if not value:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(places, 12)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(end: float, most: int = 8) -> list[float]:
    """From 0 to ``end`` in steps of 1, 2 or 5 times a power of ten, at most ``most`` of them."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(end / most))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * (most - 1) >= end * (1 - 1e-9))
    return [step * i for i in range(math.floor(end / step * (1 + 1e-9)) + 1)]


def axis_texts(values: list[float]) -> list[str]:
    """The ticks' labels, all in the unit of the last one."""
    size, unit = next((entry for entry in _SECONDS if values[-1] >= entry[0]), _SECONDS[-1])
    return [f"{digits(value / size)} {unit}" if value else "0" for value in values]


def printable(text: str) -> str:
    """Remove control characters: a line's name may come from an untrusted file."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def _scaled(number: float, units: tuple[tuple[float, str], ...]) -> str:
    # The rounded number determines the unit: 999.6 µs reads as 1 ms.
    for size, unit in units:
        if round(abs(number) / size, 3) >= 0.9995:
            return f"{digits(number / size)} {unit}".rstrip()
    size, unit = units[-1]
    return f"{digits(number / size)} {unit}".rstrip()
