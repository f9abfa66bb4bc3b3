"""The fraction of its published peaks that a chip reaches in training: one factor per chip, fitted to published runs.

``python -m course.validation.planner --write`` fits the factors in ``efficiency.json`` to the runs in
``course/validation/published.toml``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from course.machine import Efficiency, Machine

FILE = Path(__file__).parents[1] / "efficiency.json"


class Fitted(msgspec.Struct, frozen=True):
    """The efficiency that published runs reach on a chip.

    Attributes:
        factor: Multiplies the compute peak and the bandwidths of memory and links.
        lowest, highest: Factors of single runs.
        runs: Number of runs.
        error: Mean error of their predicted times.
        unseen: The same with the factor fitted to the other papers; None if there are none.
        papers: Sources of the runs; ``course/validation/published.toml`` has each with its source.
    """

    factor: float
    lowest: float
    highest: float
    runs: int
    error: float
    unseen: float | None
    papers: tuple[str, ...]


@cache
def factors() -> dict[str, Fitted]:
    """Fitted factors by the vendor's name of the chip."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Fitted])


def fitted(machine: Machine) -> Fitted | None:
    """The fit for a machine's chip; None for a chip without published runs, and if rates were measured."""
    return None if machine.calibrated else factors().get(machine.device)


def at_efficiency(machine: Machine, factor: float) -> Machine:
    """A machine that reaches this fraction of every peak; 1 is the idealised one.

    Raises:
        ValueError: The factor is not above 0, or is above 1.
    """
    if not 0 < factor <= 1:
        raise ValueError(f"efficiency is {factor:g}: it is a share of the peaks, above 0 and at most 1")
    return replace(machine, efficiency=Efficiency(factor, factor, factor))
