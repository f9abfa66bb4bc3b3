"""A schedule as a table that one SPMD program can run: what each stage does in each tick, and where it keeps things.

All actions are of one length, so that devices that run in step waste none of it: ``F`` takes one tick, and so do ``I``
and ``W``. A whole backward pass ``B`` is an ``I`` with its ``W`` in the next tick.

A stage keeps things in *slots*. Each is used for one thing after another, so there are as few of each kind as the
schedule needs on the stage that needs most, and a program's memory follows its schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from course.schedules.orders import Action, Schedule
from course.schedules.timing import Costs, run

IDLE, FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHTS = range(4)
NUMBERS = {"F": FORWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHTS}
# What is kept in slots, and the actions between which: an input and a gradient from when they arrive, what the forward
# pass saves until both backward passes have read it, what ``I`` leaves for ``W``.
SLOTS = ("inputs", "saved", "gradients", "pending")


@dataclass(frozen=True)
class Table:
    """What each stage does in each tick.

    Attributes:
        num_ticks: Of a step.
        num_repeats: Parts of the model on each device.
        num_slots: Of each kind in ``SLOTS``, on every stage.
        columns: Integers ``[num_ticks, num_stages]`` by name. ``action`` is ``IDLE``, ``FORWARD``, ``BACKWARD_INPUT``
            or ``BACKWARD_WEIGHTS``; ``microbatch`` and ``repeat`` say of what; ``inputs``, ``saved``, ``gradients``
            and ``pending`` are the slots that the action works with. ``arrived_input`` and ``arrived_gradient`` are
            the slots for what was sent in the tick before, or -1 where nothing was. All others are 0 where they mean
            nothing.
    """

    num_ticks: int
    num_repeats: int
    num_slots: dict[str, int]
    columns: dict[str, np.ndarray]


def unit_ticks(schedule: Schedule) -> tuple[dict[int, Action], ...]:
    """By tick, what each stage does, with every ``B`` as an ``I`` and a ``W``."""
    repeats = float(schedule.num_repeats)
    timed = run(schedule, Costs(repeats, repeats, repeats))
    ticks: list[dict[int, Action]] = [{} for _ in range(round(timed.end))]
    for span in (span for spans in timed.spans for span in spans):
        kinds, start = ("I", "W") if span.action.kind == "B" else (span.action.kind,), round(span.start)
        for later, kind in enumerate(kinds):
            ticks[start + later][span.stage] = Action(kind, span.action.microbatch, span.action.repeat)
    return tuple(ticks)


def tabulate(schedule: Schedule) -> Table:
    """The table of a schedule that ends with all microbatches forward and backward.

    Raises:
        ValueError: It never flushes, has no backward pass, or its stages would wait for each other forever.
    """
    if not schedule.flushes or schedule.forward_only:
        raise ValueError(f"{schedule.name} is no whole step: a table has every microbatch forward and backward, once")
    ticks, stages = unit_ticks(schedule), schedule.num_stages
    at = {(stage, action): tick for tick, row in enumerate(ticks) for stage, action in row.items()}
    last = (stages - 1, schedule.num_repeats - 1)
    names = ("action", "microbatch", "repeat", *SLOTS, "arrived_input", "arrived_gradient")
    columns = {name: np.zeros((len(ticks), stages), np.int32) for name in names}
    slots: dict[str, dict[tuple[int, Action], int]] = {}
    for kind in SLOTS:
        lifetimes = [_lifetimes(kind, stage, schedule, at, last) for stage in range(stages)]
        slots[kind] = {
            (stage, action): slot for stage in range(stages) for action, slot in _shared(lifetimes[stage]).items()
        }
    counts = {kind: 1 + max(slots[kind].values(), default=0) for kind in SLOTS}
    columns["arrived_input"][:] = columns["arrived_gradient"][:] = -1
    for (stage, action), tick in at.items():
        one = (tick, stage)
        columns["action"][one] = NUMBERS[action.kind]
        columns["microbatch"][one], columns["repeat"][one] = action.microbatch, action.repeat
        forward = Action("F", action.microbatch, action.repeat)
        for kind in SLOTS:
            columns[kind][one] = slots[kind].get((stage, forward), 0)
        other = _receiver(stage, action, stages, last)
        if other:
            kind, name = ("inputs", "arrived_input") if action.kind == "F" else ("gradients", "arrived_gradient")
            receiver, what = other
            columns[name][tick + 1, receiver] = slots[kind][receiver, what]
    return Table(len(ticks), schedule.num_repeats, counts, columns)


def _receiver(stage: int, action: Action, stages: int, last: tuple[int, int]) -> tuple[int, Action] | None:
    """Where the result of an action goes: the stage, and the forward action of the same part and microbatch there."""
    if action.kind == "F" and (stage, action.repeat) != last:
        wraps = stage == stages - 1
        return (stage + 1) % stages, Action("F", action.microbatch, action.repeat + wraps)
    if action.kind == "I" and (stage, action.repeat) != (0, 0):
        wraps = stage == 0
        return (stage - 1) % stages, Action("F", action.microbatch, action.repeat - wraps)
    return None


def _lifetimes(
    kind: str, stage: int, schedule: Schedule, at: dict[tuple[int, Action], int], last: tuple[int, int]
) -> dict[Action, tuple[int, int]]:
    """The first and the last tick of what is kept of each microbatch and part."""
    found, stages = {}, schedule.num_stages
    for microbatch in range(schedule.num_microbatches):
        for repeat in range(schedule.num_repeats):
            forward, back, weights = (Action(letter, microbatch, repeat) for letter in "FIW")
            f, i, w = (at[stage, action] for action in (forward, back, weights))
            if kind == "inputs":
                before = ((stage - 1) % stages, Action("F", microbatch, repeat - (stage == 0)))
                lifetime = (at[before] + 1, f) if (stage, repeat) != (0, 0) else None
            elif kind == "gradients":
                behind = ((stage + 1) % stages, Action("I", microbatch, repeat + (stage == stages - 1)))
                lifetime = (f if (stage, repeat) == last else at[behind] + 1, i)
            else:
                lifetime = (f, w) if kind == "saved" else (i, w)
            if lifetime:
                found[forward] = lifetime
    return found


def _shared(lifetimes: dict[Action, tuple[int, int]]) -> dict[Action, int]:
    """A slot for each lifetime, the lowest that is free."""
    busy_until: list[int] = []
    slots = {}
    for action, (first, final) in sorted(lifetimes.items(), key=lambda item: item[1]):
        slot = next((n for n, until in enumerate(busy_until) if until < first), len(busy_until))
        busy_until[slot : slot + 1] = [final]
        slots[action] = slot
    return slots
