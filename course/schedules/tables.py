"""A schedule as a table that one SPMD program can run: what each stage does in each tick, and where it keeps things.

All actions take equally long, so that devices that run in step waste no time: ``F`` takes one tick, and so do ``I``
and ``W``. A whole backward pass ``B`` is an ``I`` with its ``W`` in the next tick.

A stage keeps things in *slots*, which are reused. So there are only as many of each kind as the schedule needs on the
stage that needs the most, and a program's memory follows its schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from course.schedules.orders import Action, Schedule
from course.schedules.timing import Costs, run

IDLE, FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS = range(4)
NUMBERS = {"F": FORWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHTS}
# What is kept in slots, and how long: an input and a gradient from their arrival until they are used, what the forward
# pass saves until both backward passes have read it, and what ``I`` leaves for ``W``.
SLOTS = ("inputs", "saved", "gradients", "pending")


@dataclass(frozen=True)
class Table:
    """The action of each stage in each tick.

    Attributes:
        num_ticks: Number of ticks in a step.
        num_repeats: Parts of the model on each device.
        num_slots: Number of slots of each kind in ``SLOTS``, on every stage.
        columns: Integers ``[num_ticks, num_stages]`` by name. ``action`` is ``IDLE``, ``FORWARD``, ``BACKWARD_INPUT``
            or ``BACKWARD_WEIGHTS``; ``microbatch`` and ``repeat`` are those that it works on; ``inputs``, ``saved``,
            ``gradients`` and ``pending`` are the slots that it uses. ``arrived_input`` and ``arrived_gradient`` are the
            slots for what was sent in the previous tick, or -1 where nothing was. All others are 0 where they have no
            meaning.
    """

    num_ticks: int
    num_repeats: int
    num_slots: dict[str, int]
    columns: dict[str, np.ndarray]


def unit_ticks(schedule: Schedule) -> tuple[dict[int, Action], ...]:
    """The action of each stage, by tick, with every ``B`` as an ``I`` and a ``W``."""
    repeats = float(schedule.num_repeats)
    timed = run(schedule, Costs(repeats, repeats, repeats))
    ticks: list[dict[int, Action]] = [{} for _ in range(round(timed.end))]
    for span in (span for spans in timed.spans for span in spans):
        kinds, start = ("I", "W") if span.action.kind == "B" else (span.action.kind,), round(span.start)
        for later, kind in enumerate(kinds):
            ticks[start + later][span.stage] = Action(kind, span.action.microbatch, span.action.repeat)
    return tuple(ticks)


def tabulate(schedule: Schedule) -> Table:
    """The table of a schedule that takes all microbatches forward and backward.

    Raises:
        ValueError: It never flushes, has no backward pass, has another route than ``round``, or its stages would wait
            for each other forever.
    """
    if not schedule.flushes or schedule.forward_only:
        raise ValueError(f"{schedule.name} is not a whole step: a table has each microbatch once, forward and backward")
    if schedule.route != "round":
        raise ValueError(f"{schedule.name} has route {schedule.route!r}, and the program sends outputs one way round")
    ticks, stages = unit_ticks(schedule), schedule.num_stages
    at = {(stage, action): tick for tick, row in enumerate(ticks) for stage, action in row.items()}
    names = ("action", "microbatch", "repeat", *SLOTS, "arrived_input", "arrived_gradient")
    columns = {name: np.zeros((len(ticks), stages), np.int32) for name in names}
    slots: dict[str, dict[tuple[int, Action], int]] = {}
    for kind in SLOTS:
        lifetimes = [_lifetimes(kind, stage, schedule, at) for stage in range(stages)]
        slots[kind] = {
            (stage, action): slot for stage in range(stages) for action, slot in _shared(lifetimes[stage]).items()
        }
    counts = {kind: 1 + max(slots[kind].values(), default=0) for kind in SLOTS}
    columns["arrived_input"][:] = columns["arrived_gradient"][:] = -1
    for (stage, action), tick in at.items():
        cell = (tick, stage)
        columns["action"][cell] = NUMBERS[action.kind]
        columns["microbatch"][cell], columns["repeat"][cell] = action.microbatch, action.repeat
        forward = Action("F", action.microbatch, action.repeat)
        for kind in SLOTS:
            columns[kind][cell] = slots[kind].get((stage, forward), 0)
        kind, step = ("inputs", 1) if action.kind == "F" else ("gradients", -1)
        other = schedule.neighbour(stage, action.repeat, step) if action.kind != "W" else None
        if other:
            slot = slots[kind][other[0], Action("F", action.microbatch, other[1])]
            columns["arrived_input" if step == 1 else "arrived_gradient"][tick + 1, other[0]] = slot
    return Table(len(ticks), schedule.num_repeats, counts, columns)


def _lifetimes(
    kind: str, stage: int, schedule: Schedule, at: dict[tuple[int, Action], int]
) -> dict[Action, tuple[int, int]]:
    """The first and the last tick of what is kept for each microbatch and part, by the part's forward pass."""
    lifetimes = {}
    for microbatch in range(schedule.num_microbatches):
        for repeat in range(schedule.num_repeats):
            f, i, w = (at[stage, Action(letter, microbatch, repeat)] for letter in "FIW")
            lifetime: tuple[int, int] | None = (i, w) if kind == "pending" else (f, w)
            if kind == "inputs":
                source = schedule.neighbour(stage, repeat, -1)
                lifetime = (at[source[0], Action("F", microbatch, source[1])] + 1, f) if source else None
            if kind == "gradients":
                source = schedule.neighbour(stage, repeat, 1)
                lifetime = (at[source[0], Action("I", microbatch, source[1])] + 1 if source else f, i)
            if lifetime:
                lifetimes[Action("F", microbatch, repeat)] = lifetime
    return lifetimes


def _shared(lifetimes: dict[Action, tuple[int, int]]) -> dict[Action, int]:
    """A slot for each lifetime, the lowest that is free."""
    busy_until: list[int] = []
    slots = {}
    for action, (first, final) in sorted(lifetimes.items(), key=lambda item: item[1]):
        slot = next((n for n, until in enumerate(busy_until) if until < first), len(busy_until))
        busy_until[slot : slot + 1] = [final]
        slots[action] = slot
    return slots
