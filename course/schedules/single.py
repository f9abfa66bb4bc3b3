"""The published schedules with one part of the model on each device, for any number of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from course.schedules.orders import Action, Schedule, require_sizes


def gpipe(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Schedule:
    """All microbatches forward, then all backward, the last one first.

    Source: Huang et al., GPipe, 2019, section 2.3 and figure 2c.

    Raises:
        ValueError: Sizes below 1, or more than one repeat.
    """
    order = (*_each("F", range(num_microbatches)), *_each("B", reversed(range(num_microbatches))))
    return _schedule("GPipe", num_stages, num_microbatches, num_repeats, lambda stage: order)


def one_f_one_b(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Schedule:
    """One forward, one backward: each stage starts just enough microbatches to keep the next ones busy, then alternates

    Source: PipeDream-Flush in Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, section 3.2;
    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2.1.

    Raises:
        ValueError: Sizes below 1, or more than one repeat.
    """
    return _schedule(
        "1F1B", num_stages, num_microbatches, num_repeats, lambda s: _alternating(num_stages - s, num_microbatches)
    )


def pipedream(num_stages: int, num_microbatches: int, num_repeats: int = 1, *, stream: int = 0) -> Schedule:
    """1F1B that never flushes: the next microbatch follows at once, and each backward pass changes the weights.

    A stage keeps the weights used in a microbatch's forward pass until its backward pass (weight stashing).

    Source: Narayanan et al., PipeDream, 2019, sections 3.2 (1F1B) and 3.3 (weight stashing).

    Args:
        num_stages: Devices in the pipeline.
        num_microbatches: Microbatches per step of the other schedules, for comparison.
        num_repeats: 1.
        stream: Number of microbatches in the stream; by default, enough for a steady state.

    Raises:
        ValueError: Sizes below 1, or more than one repeat.
    """
    stream = stream or max(3 * num_microbatches, 10 * num_stages)
    return _schedule(
        "PipeDream", num_stages, num_microbatches, num_repeats, lambda s: _alternating(num_stages - s, stream), stream
    )


def zero_bubble(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Schedule:
    """ZB-H1: 1F1B with a split backward pass; the gradients of the weights are deferred to fill idle time.

    Stage ``s`` defers the gradients of the weights by ``s`` microbatches, so that every stage has as many in memory as
    the first one of 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 2.1 (ZB-H1).

    Raises:
        ValueError: Sizes below 1, or more than one repeat.
    """
    return _schedule(
        "ZB-H1", num_stages, num_microbatches, num_repeats, lambda s: _zero_bubble(s, num_stages, num_microbatches)
    )


def _schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_repeats: int,
    order: Callable[[int], Iterable[Action]],
    stream: int = 0,
) -> Schedule:
    """The schedule of a stage's ``order``; with a ``stream`` of microbatches, one that never flushes."""
    require_sizes(num_stages, num_microbatches, num_repeats)
    if num_repeats != 1:
        raise ValueError(
            f"{name} has one part of the model on each device, not {num_repeats}: interleaved 1F1B and breadth-first "
            "are the schedules with repeats"
        )
    orders = tuple(tuple(order(stage)) for stage in range(num_stages))
    return Schedule(name, num_stages, num_microbatches, 1, orders, flushes=not stream, microbatches=stream)


def _each(kind: str, microbatches: Iterable[int]) -> Iterator[Action]:
    return (Action(kind, microbatch) for microbatch in microbatches)


def _alternating(in_flight: int, microbatches: int) -> Iterator[Action]:
    """Forward passes until ``in_flight`` microbatches are in flight; then another one for each that comes back."""
    first = min(in_flight, microbatches)
    yield from _each("F", range(first))
    for microbatch in range(microbatches):
        yield Action("B", microbatch)
        if first + microbatch < microbatches:
            yield Action("F", first + microbatch)


def _zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    first = min(num_stages - stage, num_microbatches)
    yield from _each("F", range(first))
    for microbatch in range(num_microbatches):
        yield Action("I", microbatch)
        if microbatch >= stage:
            yield Action("W", microbatch - stage)
        if first + microbatch < num_microbatches:
            yield Action("F", first + microbatch)
    yield from _each("W", range(max(0, num_microbatches - stage), num_microbatches))
