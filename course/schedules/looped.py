"""Schedules with several parts of the model on each device, and the whole family by name.

The sandbox never has this module: the assignment of work to devices and times is an exercise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from course.schedules.alternating import one_f_one_b, pipedream, zero_bubble
from course.schedules.measures import Measured, measure
from course.schedules.orders import Action, Schedule, require_sizes
from course.schedules.single import gpipe
from course.schedules.timing import UNIT, Costs, run


def interleaved(num_stages: int, num_microbatches: int, num_repeats: int = 2) -> Schedule:
    """1F1B with several parts of the model on each device, in groups of ``num_stages`` microbatches (depth-first).

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2.2.

    Raises:
        ValueError: A size is below 1, there is only one repeat (which is 1F1B), or the number of microbatches is not a
            multiple of the stages.
    """
    require_sizes(num_stages, num_microbatches, num_repeats)
    if num_repeats == 1:
        raise ValueError("interleaved 1F1B needs at least 2 repeats, not 1: with one it would be 1F1B")
    if num_microbatches % num_stages:
        raise ValueError(
            f"interleaved 1F1B sends microbatches round in groups of {num_stages}, one for each stage, and "
            f"{num_microbatches} is not a multiple of it"
        )
    orders = tuple(
        tuple(_interleaved_order(stage, num_stages, num_microbatches, num_repeats)) for stage in range(num_stages)
    )
    return Schedule("interleaved 1F1B", num_stages, num_microbatches, num_repeats, orders)


def breadth_first(num_stages: int, num_microbatches: int, num_repeats: int = 2) -> Schedule:
    """All microbatches go through the first repeat, then all through the next one; backward in the opposite order.

    With one repeat it is GPipe's order.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023. With fewer microbatches than stages,
    each repeat waits until the first microbatch is back: the course's own extension.

    Raises:
        ValueError: A size is below 1.
    """
    require_sizes(num_stages, num_microbatches, num_repeats)
    forward = [Action("F", m, r) for r in range(num_repeats) for m in range(num_microbatches)]
    order = (*forward, *(Action("B", action.microbatch, action.repeat) for action in reversed(forward)))
    return Schedule("breadth-first", num_stages, num_microbatches, num_repeats, (order,) * num_stages)


FAMILY: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "pipedream": pipedream,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth_first": breadth_first,
    "zero_bubble": zero_bubble,
}
LOOPED = ("interleaved", "breadth_first")


def family(name: str, num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Schedule:
    """A schedule by its name in ``FAMILY``.

    Raises:
        LookupError: No schedule has that name.
        ValueError: It is not defined for these sizes; the message says why.
    """
    if name not in FAMILY:
        raise LookupError(f"there is no schedule called {name!r}; there are: {', '.join(FAMILY)}")
    return FAMILY[name](num_stages, num_microbatches, num_repeats)


def compare(num_stages: int, num_microbatches: int, num_repeats: int, costs: Costs = UNIT) -> dict[str, Measured]:
    """Measure the whole family at one size; schedules that cannot have several repeats have one.

    Returns:
        By name as in ``FAMILY``; schedules that are not defined for these sizes are left out.
    """
    measured = {}
    for name in FAMILY:
        try:
            schedule = family(name, num_stages, num_microbatches, num_repeats if name in LOOPED else 1)
        except ValueError:
            continue
        measured[name] = measure(run(schedule, costs))
    return measured


def _interleaved_order(stage: int, num_stages: int, num_microbatches: int, num_repeats: int) -> Iterator[Action]:
    turns = num_microbatches * num_repeats
    group = num_stages * num_repeats

    def turn(kind: str, number: int) -> Action:
        rounds, place = divmod(number, group)
        repeat = place // num_stages
        microbatch = rounds * num_stages + place % num_stages
        return Action(kind, microbatch, repeat if kind == "F" else num_repeats - 1 - repeat)

    first = min(2 * (num_stages - stage - 1) + (num_repeats - 1) * num_stages, turns)
    yield from (turn("F", number) for number in range(first))
    for number in range(turns - first):
        yield turn("F", first + number)
        yield turn("B", number)
    yield from (turn("B", number) for number in range(turns - first, turns))
