"""The share of its published peaks that a chip reaches in training: one factor a chip, fitted on published runs.

``python -m course.validation.planner --write`` fits the factors of ``efficiency.json`` on the runs of
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
    """What published runs reach on a chip.

    Attributes:
        factor: By which peaks, bandwidths of memory and of links are all multiplied.
        lowest, highest: Of single runs.
        runs: How many there are.
        error: Mean error of their predicted times.
        unseen: The same with the factor fitted on the other papers; None where there are none.
        papers: Where the runs are from; ``course/validation/published.toml`` has each with its source.
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
    """By what the maker calls the chip."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Fitted])


def fitted(machine: Machine) -> Fitted | None:
    """What is known of a machine's chip; None for one without published runs, and where rates were measured."""
    return None if machine.calibrated else factors().get(machine.device)


def at_efficiency(machine: Machine, factor: float) -> Machine:
    """A machine that reaches this share of every peak; 1 is the idealised one.

    Raises:
        ValueError: It is not above 0, or above 1.
    """
    if not 0 < factor <= 1:
        raise ValueError(f"efficiency is {factor:g}: it is a share of the peaks, above 0 and at most 1")
    return replace(machine, efficiency=Efficiency(factor, factor, factor))
