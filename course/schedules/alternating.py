"""1F1B and its successors: schedules with one part of the model on each device and alternating passes.

The sandbox never has this module: these orders are an exercise.
"""

from __future__ import annotations

from collections.abc import Iterator

from course.schedules.orders import Action, Schedule
from course.schedules.single import each, one_part


def one_f_one_b(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Schedule:
    """One forward, one backward: a stage begins just enough microbatches to keep the next stages busy, then alternates.

    Source: PipeDream-Flush in Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, 2021, section 3.2;
    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 2.2.1.

    Raises:
        ValueError: A size is below 1, or there is more than one repeat.
    """
    return one_part(
        "1F1B", num_stages, num_microbatches, num_repeats, lambda s: _alternating(num_stages - s, num_microbatches)
    )


def pipedream(num_stages: int, num_microbatches: int, num_repeats: int = 1, *, stream: int = 0) -> Schedule:
    """1F1B that never flushes: the next microbatch follows at once, and each one's backward pass changes the weights.

    A stage keeps the weights that a microbatch used in its forward pass until its backward pass (weight stashing).

    Source: Narayanan et al., PipeDream, 2019, sections 3.2 (1F1B) and 3.3 (weight stashing).

    Args:
        num_stages: Devices in the pipeline.
        num_microbatches: Number of microbatches that other schedules put into a step, for comparisons.
        num_repeats: 1.
        stream: Number of microbatches that go through; by default, enough for a steady state.

    Raises:
        ValueError: A size is below 1, or there is more than one repeat.
    """
    stream = stream or max(3 * num_microbatches, 10 * num_stages)
    return one_part(
        "PipeDream", num_stages, num_microbatches, num_repeats, lambda s: _alternating(num_stages - s, stream), stream
    )


def zero_bubble(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose backward pass is split; the gradient of the weights waits and fills time that would be idle.

    Stage ``s`` delays the gradients of the weights by ``s`` microbatches, so that every stage has as many microbatches
    in flight as the first stage of 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 2.1 (ZB-H1).

    Raises:
        ValueError: A size is below 1, or there is more than one repeat.
    """
    return one_part(
        "ZB-H1", num_stages, num_microbatches, num_repeats, lambda s: _zero_bubble(s, num_stages, num_microbatches)
    )


def _alternating(in_flight: int, microbatches: int) -> Iterator[Action]:
    """Forward passes until ``in_flight`` microbatches are under way; then, for each that comes back, another one."""
    first = min(in_flight, microbatches)
    yield from each("F", range(first))
    for microbatch in range(microbatches):
        yield Action("B", microbatch)
        if first + microbatch < microbatches:
            yield Action("F", first + microbatch)


def _zero_bubble(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Action]:
    first = min(num_stages - stage, num_microbatches)
    yield from each("F", range(first))
    for microbatch in range(num_microbatches):
        yield Action("I", microbatch)
        if microbatch >= stage:
            yield Action("W", microbatch - stage)
        if first + microbatch < num_microbatches:
            yield Action("F", first + microbatch)
    yield from each("W", range(max(0, num_microbatches - stage), num_microbatches))
