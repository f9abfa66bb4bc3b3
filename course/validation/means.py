"""The mean error of each group of figures by each analysis, with the goal that the course promises."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, pstdev

from course.validation.gpus import ours
from course.validation.rows import CLOSED, LOOPING, MEMORY, PLANNED_MEMORY, PLANNED_TIME, RINGS, TIME, Figure

GOALS = {
    (CLOSED, "timeline"): 5e-5,
    (CLOSED, "costs"): 5e-5,
    (CLOSED, "memory"): 5e-5,
    (MEMORY, "liveness"): 0.08,
    (MEMORY, "compiled"): 0.05,
    (TIME, "timeline"): 0.08,
    (TIME, "replay"): 0.08,
    (LOOPING, "timeline"): 0.03,
    (RINGS, "compiled"): 0.01,
    (PLANNED_TIME, "planner"): 0.15,
    (PLANNED_TIME, "unseen"): 0.20,
    (PLANNED_MEMORY, "planner"): 0.20,
}
# The goals for memory, set for the A5000, apply to every GPU. There are none for time on other GPUs: their machines
# reach every peak, so a prediction in seconds is a bound.
GOALS |= {(own.memory, lens): GOALS[MEMORY, lens] for _, own in ours() for lens in ("liveness", "compiled")}


@dataclass(frozen=True)
class Mean:
    """The mean error of a group's figures by one analysis.

    Attributes:
        group, lens: Group and analysis of the figures.
        error: Mean of the absolute relative errors; None if nothing was measured.
        bias: Mean of the signed errors.
        spread: Their standard deviation.
        goal: The largest allowed error; None if nothing is promised.
        rows: Number of figures averaged.
        order: Whether the figures are in the published order; None for fewer than three figures, or several units.
    """

    group: str
    lens: str
    error: float | None
    goal: float | None
    rows: int
    order: bool | None
    bias: float = 0.0
    spread: float = 0.0

    @property
    def met(self) -> bool | None:
        return None if self.error is None or self.goal is None else self.error <= self.goal


def means(figures: Iterable[Figure]) -> list[Mean]:
    """One mean for each group and analysis, over the figures that count and were measured."""
    members: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        members.setdefault((figure.group, figure.lens), []).append(figure)
    group_means = []
    for (group, lens), own in members.items():
        counted = [figure for figure in own if figure.counts and figure.error is not None]
        errors = [figure.error or 0.0 for figure in counted]
        error = fmean(map(abs, errors)) if errors else None
        bias_and_spread = (fmean(errors), pstdev(errors)) if errors else (0.0, 0.0)
        group_means.append(
            Mean(group, lens, error, GOALS.get((group, lens)), len(counted), _in_order(counted), *bias_and_spread)
        )
    return group_means


def _in_order(figures: list[Figure]) -> bool | None:
    if len(figures) < 3 or figures[0].group == CLOSED or len({figure.unit for figure in figures}) > 1:
        return None
    published, predicted = (
        sorted(range(len(figures)), key=lambda i: getattr(figures[i], field_name) or 0.0)
        for field_name in ("published", "found")
    )
    return published == predicted
