"""Ticks of a pipeline Program, found in its timeline, and the schedule's action of each stage in them.

A timeline does not tell which microbatch a matmul belongs to. It does tell when data crosses ``pipe``: each tick of
a pipeline ends by passing on its result. So a tick is the time between two permutes in which some stage
multiplies matrices, written as a loop or not, and a schedule's own ticks are matched to these. If their numbers
differ, nothing is labelled.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from course.program.simulator import Bar, Timeline
from course.schedules.orders import Action, Schedule
from course.schedules.timing import Costs, run


@dataclass(frozen=True)
class Work:
    """The work of one stage in one tick.

    Attributes:
        start, end: Seconds, over all its kernels.
        flops: FLOPs of its matmuls.
    """

    start: float
    end: float
    flops: float


@dataclass(frozen=True)
class Tick:
    """One tick of a Program.

    Attributes:
        start, end: Seconds: from the first to the last matmul of any stage.
        work: By stage; None if it has no matmul.
    """

    start: float
    end: float
    work: tuple[Work | None, ...]


def program_ticks(timeline: Timeline, axis: str = "pipe") -> tuple[Tick, ...]:
    """The ticks of a pipeline Program, forward and backward.

    Args:
        timeline: A timeline with its bars; among devices that differ only in other mesh axes, the first ones count.
        axis: The mesh axis that the stages are on.

    Raises:
        ValueError: The mesh has no such axis, or no messages cross it, so that ticks cannot be
            distinguished.
    """
    bars = stage_bars(timeline, axis)
    permute_ends = sorted({bar.end for stage in bars for bar in stage if _passes_on(bar, axis)})
    if not permute_ends:
        raise ValueError(
            f"nothing is permuted over {axis!r} (size {timeline.mesh[axis]}), so ticks cannot be identified; "
            "timeline_svg draws this step"
        )
    by_tick: dict[int, dict[int, list[Bar]]] = defaultdict(lambda: defaultdict(list))
    for stage, own in enumerate(bars):
        for bar in own:
            if bar.stream == "compute":
                by_tick[bisect_right(permute_ends, bar.start)][stage].append(bar)
    ticks = [_tick(by_tick[number], len(bars)) for number in sorted(by_tick)]
    return tuple(tick for tick in ticks if any(tick.work))


def stage_bars(timeline: Timeline, axis: str) -> list[list[Bar]]:
    """The bars of each stage's first device.

    Raises:
        ValueError: The mesh has no such axis.
    """
    if axis not in timeline.mesh:
        raise ValueError(f"the mesh {timeline.mesh} has no axis {axis!r}; name the one that has the stages")
    sizes = list(timeline.mesh.values())
    places = np.moveaxis(np.arange(math.prod(sizes)).reshape(sizes), list(timeline.mesh).index(axis), 0)
    representatives = {member: device.device for device in timeline.devices for member in device.members}
    by_device: dict[int, list[Bar]] = defaultdict(list)
    for bar in timeline.bars:
        by_device[bar.device].append(bar)
    return [by_device[representatives[int(device)]] for device in places.reshape(len(places), -1)[:, 0]]


def _passes_on(bar: Bar, axis: str) -> bool:
    return bar.kind == "collective_permute" and axis in bar.stream.split(",")


def _tick(bars: dict[int, list[Bar]], num_stages: int) -> Tick:
    work = [_work(bars.get(stage, [])) for stage in range(num_stages)]
    active = [piece for piece in work if piece] or [Work(0.0, 0.0, 0.0)]
    return Tick(min(piece.start for piece in active), max(piece.end for piece in active), tuple(work))


def _work(bars: list[Bar]) -> Work | None:
    flops = sum(bar.flops for bar in bars)
    return Work(min(bar.start for bar in bars), max(bar.end for bar in bars), flops) if flops else None


def schedule_ticks(schedule: Schedule) -> tuple[dict[int, Action], ...]:
    """The schedule in ticks, with one tick per action and no time for messages: by tick, the action of each stage."""
    repeats = float(schedule.num_repeats)
    whole = any(action.kind == "B" for order in schedule.orders for action in order)
    split = (repeats / 2, repeats / 2) if whole else (repeats, repeats)
    timed = run(schedule, Costs(repeats, *split))
    ticks: list[dict[int, Action]] = [{} for _ in range(round(timed.end))]
    for spans in timed.spans:
        for span in spans:
            ticks[round(span.start)][span.stage] = span.action
    return tuple(ticks)


def match_ticks(ticks: tuple[Tick, ...], schedule: Schedule) -> list[dict[int, Action] | None]:
    """The schedule's actions in each of a Program's ticks.

    Returns:
        One entry for each tick, or an empty list if the two do not have the same number. A Program may have one more
        tick, between forward and backward: the loss, whose entry is None.
    """
    actions: list[dict[int, Action] | None] = list(schedule_ticks(schedule))
    if len(ticks) == len(actions) + 1 and not schedule.forward_only:
        actions.insert(len(actions) // 2, None)
    return actions if len(actions) == len(ticks) else []
