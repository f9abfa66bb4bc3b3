"""GPipe, and the building blocks of schedules with one part of the model on each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from course.schedules.orders import Action, Schedule, require_sizes


def gpipe(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Schedule:
    """All microbatches forward, then all backward, the last one first.

    Source: Huang et al., GPipe, 2019, section 2.3 and figure 2c.

    Raises:
        ValueError: A size is below 1, or there is more than one repeat.
    """
    order = (*each("F", range(num_microbatches)), *each("B", reversed(range(num_microbatches))))
    return one_part("GPipe", num_stages, num_microbatches, num_repeats, lambda stage: order)


def one_part(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    order: Callable[[int], Iterable[Action]],
    stream: int = 0,
) -> Schedule:
    """A schedule from the ``order`` of each stage; with a ``stream`` of microbatches, one that never flushes."""
    require_sizes(num_stages, num_microbatches, num_repeats)
    if num_repeats != 1:
        raise ValueError(
            f"{name} has one part of the model on each device, not {num_repeats}: interleaved 1F1B and breadth-first "
            "are the schedules with repeats"
        )
    orders = tuple(tuple(order(stage)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, 1, orders, flushes=not stream, microbatches=stream)


def each(kind: str, microbatches: Iterable[int]) -> Iterator[Action]:
    """The same kind of action for several microbatches."""
    return (Action(kind, microbatch) for microbatch in microbatches)
