"""Schedules without idle time between a stage's first action and its last: ZB-H2, ZB-V and DualPipe.

The first two are built tick by tick: in each tick, a stage takes its most preferred action that is possible; all three
passes take equally long. The sandbox never has this module, just as it never has ZB-H1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from course.schedules.orders import Action, Schedule, require_sizes


def zero_bubble_2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2: more microbatches at the start than in ZB-H1, so that no stage waits for its first gradient.

    Stage ``s`` has up to ``2 (S - s) - 1`` microbatches between forward pass and input gradient, and no stage has more
    than ``2 S - 1`` in flight.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024, section 2.2 (ZB-H2).

    Raises:
        ValueError: A size is below 1.
    """
    require_sizes(num_stages, num_microbatches, 1)

    def prefers(stage: int, count: Counter) -> Iterator[tuple[str, int]]:
        yield "I", 0
        under_way, in_flight = count["F", 0] - count["I", 0], count["F", 0] - count["W", 0]
        if under_way < 2 * (num_stages - stage) - 1 and in_flight < 2 * num_stages - 1:
            yield "F", 0
        yield "W", 0

    orders = _played(Schedule("ZB-H2", num_stages, 1, 1, _LEAST * num_stages), num_microbatches, prefers)
    return Schedule("ZB-H2", num_stages, num_microbatches, 1, orders)


def zero_bubble_v(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-V: two parts on each device in a V, with the first and the last part of the model on the same device.

    The first device therefore has the loss, and gradients start where microbatches enter. No device has more than
    ``2 S`` parts in flight, each half of a device's share: the memory of 1F1B.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024 (ZB-V), and Pipeline Parallelism with Controllable
    Memory, 2024 (V-ZB); the order is the course's own.

    Raises:
        ValueError: A size is below 1.
    """
    require_sizes(num_stages, num_microbatches, 2)

    def prefers(stage: int, count: Counter) -> Iterator[tuple[str, int]]:
        yield from (("I", 0), ("I", 1))
        in_flight = sum(count["F", part] - count["W", part] for part in (0, 1))
        if in_flight < 2 * num_stages:
            yield "F", 1
        # A place is left for every microbatch that is still to come back through the second part.
        if in_flight + count["F", 0] - count["F", 1] < 2 * num_stages:
            yield "F", 0
        yield from (("W", 0), ("W", 1))

    shape = Schedule("ZB-V", num_stages, 1, 2, _LEAST_OF_TWO * num_stages, route="v")
    orders = _played(shape, num_microbatches, prefers)
    return Schedule("ZB-V", num_stages, num_microbatches, 2, orders, route="v")


def dualpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """DualPipe: half of the microbatches enter at each end, and each device has a part of the model for each direction.

    In the original, forward and backward passes overlap in pairs; here they run one after the other.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1 and figure 5; the order of each device is
    that of the published code, github.com/deepseek-ai/DualPipe.

    Raises:
        ValueError: An odd number of stages or microbatches, or fewer than two microbatches for each stage.
    """
    require_sizes(num_stages, num_microbatches, 2)
    if num_stages % 2 or num_microbatches % 2 or num_microbatches < 2 * num_stages:
        raise ValueError(
            f"DualPipe takes an even number of stages, and an even number of microbatches that is at least twice as "
            f"large, not {num_stages} and {num_microbatches}"
        )
    orders = tuple(tuple(_both_ways(stage, num_stages, num_microbatches // 2)) for stage in range(num_stages))
    return Schedule("DualPipe", num_stages, num_microbatches // 2, 2, orders, route="both")


_LEAST = ((Action("F", 0), Action("B", 0)),)
_LEAST_OF_TWO = (tuple(Action(kind, 0, part) for kind in "FB" for part in (0, 1)),)


def _played(
    shape: Schedule, count: int, prefers: Callable[[int, Counter], Iterator[tuple[str, int]]]
) -> tuple[tuple[Action, ...], ...]:
    """The orders that result if each stage does, in each tick, its most preferred action that is possible."""
    done: dict[tuple[int, Action], int] = {}
    counts: list[Counter] = [Counter() for _ in range(shape.num_stages)]
    orders: list[list[Action]] = [[] for _ in range(shape.num_stages)]
    total, tick = 3 * count * shape.num_repeats, 0
    while any(len(order) < total for order in orders):
        for stage, order in enumerate(orders):
            for kind, repeat in prefers(stage, counts[stage]):
                action = Action(kind, counts[stage][kind, repeat], repeat)
                if action.microbatch < count and _can(shape, stage, action, done, tick):
                    order.append(action)
                    counts[stage][kind, repeat] += 1
                    done[stage, action] = tick
                    break
        tick += 1
        if tick > 4 * total + 8 * shape.num_stages:
            raise ValueError(f"{shape.name}: stages would wait forever")
    return tuple(map(tuple, orders))


def _can(shape: Schedule, stage: int, action: Action, done: dict[tuple[int, Action], int], tick: int) -> bool:
    """Return True if everything that the action needs was done before this tick."""
    needed = []
    if action.kind != "F":
        needed.append((stage, Action("F" if action.kind == "I" else "I", action.microbatch, action.repeat)))
    if action.kind != "W":
        source = shape.neighbour(stage, action.repeat, -1 if action.kind == "F" else 1)
        needed += [(source[0], Action(action.kind, action.microbatch, source[1]))] if source else []
    return all(done.get(dependency, tick) < tick for dependency in needed)


def _both_ways(stage: int, num_stages: int, count: int) -> Iterator[Action]:
    """The order of a device: ``near`` is the direction that enters at its own end."""
    half, from_end = num_stages // 2, min(stage, num_stages - 1 - stage)
    near, far = (0, 1) if stage < half else (1, 0)
    inner = half - from_end - 1
    counts: Counter = Counter()
    waiting: list[Action] = []

    def act(kind: str, direction: int) -> Iterator[Action]:
        number = counts["F" if kind == "F" else "B", direction]
        counts["F" if kind == "F" else "B", direction] += 1
        yield Action(kind, number, direction)
        if kind == "I":
            waiting.append(Action("W", number, direction))

    for _ in range(2 * inner):
        yield from act("F", near)
    for _ in range(from_end + 1):
        yield from act("F", near)
        yield from act("F", far)
    for _ in range(inner):
        yield from act("I", far)
        yield waiting.pop(0)
        yield from act("F", far)
    for _ in range(count - num_stages + from_end + 1):
        for forward, backward in ((near, far), (far, near)):
            yield from act("F", forward)
            yield from act("B", backward)
    for _ in range(inner):
        yield from act("B", far)
        yield from act("F", far)
        yield from act("B", near)
    split = False
    for number in range(from_end + 1):
        for parity, direction in ((1, far), (0, near)):
            split |= number == (from_end + 1) // 2 and from_end % 2 == parity
            yield from act("I" if split else "B", direction)
    for _ in range(inner):
        yield waiting.pop(0)
        yield from act("I", near)
    yield from waiting
