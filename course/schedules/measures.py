"""The costs of a schedule: its bubble, activations and messages; measured on its times, and in closed form.

Activations are counted in *microbatches of a device*: the activations that the forward pass of one microbatch keeps
for the backward pass on all layers of one device. With repeats, one part of the layers is a fraction of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from course.schedules.orders import Action, Schedule
from course.schedules.timing import UNIT, Costs, Timed


@dataclass(frozen=True)
class Measured:
    """The cost of one step.

    Attributes:
        time: Duration of a step of ``num_microbatches``; for a schedule that never flushes, in its steady state.
        bubble: Fraction of all devices' time in which they do not compute.
        activations: Peak activations of each stage, in microbatches of a device.
        weights: Maximum number of copies of its weights on each stage.
        messages: Messages sent by each stage per step, each one microbatch's activations or their gradient.
    """

    time: float
    bubble: float
    activations: tuple[float, ...]
    weights: tuple[int, ...]
    messages: tuple[int, ...]


def measure(timed: Timed) -> Measured:
    """The costs of a timed schedule.

    Raises:
        ValueError: It never flushes and its stream is too short for a steady state.
    """
    schedule = timed.schedule
    work = sum(span.end - span.start for spans in timed.spans for span in spans)
    time = timed.end if schedule.flushes else schedule.num_microbatches * _period(timed)
    share = schedule.num_microbatches / schedule.microbatches
    stages = range(schedule.num_stages)
    sent = [sum(message.source == stage for message in timed.messages) for stage in stages]
    return Measured(
        time,
        1 - work * share / (schedule.num_stages * time),
        tuple(_activations(order) / schedule.parts for order in schedule.orders),
        tuple(_copies(schedule) if schedule.flushes else _weights(order) for order in schedule.orders),
        tuple(round(count * share) for count in sent),
    )


def _copies(schedule: Schedule) -> int:
    """The number of copies of the weights; a part from another place in the model counts as another copy."""
    return schedule.num_repeats // schedule.parts


def _activations(order: tuple[Action, ...]) -> int:
    """Peak number of activations, each from the start of a forward pass to the end of the last backward part."""
    in_flight = most = 0
    for action in order:
        in_flight += {"F": 1, "I": 0}.get(action.kind, -1)
        most = max(most, in_flight)
    return most


def _weights(order: tuple[Action, ...]) -> int:
    """The maximum number of resident versions if each backward pass makes a new one: those used by microbatches in
    flight, and the newest."""
    newest, versions, most = 0, {}, 1
    for action in order:
        if action.kind == "F":
            versions[action.microbatch] = newest
        elif action.kind == "B":
            del versions[action.microbatch]
            newest += 1
        most = max(most, len({*versions.values(), newest}))
    return most


def _period(timed: Timed) -> float:
    """Time from one microbatch to the next in the middle of a stream: over a whole number of rounds of the stages."""
    schedule = timed.schedule
    stages, stream = schedule.num_stages, schedule.microbatches
    if stream < 10 * stages:
        raise ValueError(
            f"{schedule.name}: a stream of {stream} is too short for a steady state; give it {10 * stages} microbatches"
        )
    ends = [span.end for span in timed.spans[0] if span.action.kind == "B"]
    last = stream - 1 - stages
    return (ends[last] - ends[last - 4 * stages]) / (4 * stages)


def num_ticks(num_stages: int, num_microbatches: int, num_repeats: int = 1) -> int:
    """Ticks of one pass of the breadth-first schedule: each repeat waits until the first microbatch is back."""
    return (num_repeats - 1) * max(num_microbatches, num_stages) + num_microbatches + num_stages - 1


def bubble_form(
    name: str, num_stages: int, num_microbatches: int, num_repeats: int = 1, costs: Costs = UNIT
) -> float | None:
    """The bubble in closed form, or None if there is none.

    GPipe and 1F1B: Narayanan et al. 2021 (Megatron), section 2.2.1, as a fraction of the total time. Interleaved 1F1B:
    section 2.2.2. Breadth-first: 1 - R M / T, which is Lamy-Poirier 2023 if M is not below S. ZB-H1: Qi et al.
    2024, table 2, if the gradient of the weights takes no longer than either other pass. PipeDream: none; with
    messages that take time, a stage's waiting time because at most S microbatches are in flight.
    """
    stages, microbatches = num_stages, num_microbatches
    work = costs.forward + costs.backward
    if name == "pipedream":
        period = work + 2 * costs.send * (stages - 1) / stages
        return 1 - work / period
    if costs.send and stages > 1:
        return None
    if name in ("gpipe", "1f1b"):
        return (stages - 1) / (microbatches + stages - 1)
    if name == "interleaved":
        return (stages - 1) / (num_repeats * microbatches + stages - 1)
    if name == "breadth_first":
        return 1 - num_repeats * microbatches / num_ticks(stages, microbatches, num_repeats)
    if microbatches < stages:
        return None
    parts = costs.forward, costs.backward_input, costs.backward_weights
    lost = (stages - 1) * max(parts[0] + parts[1] - parts[2], parts[0], parts[1])
    return lost / (microbatches * work + lost)


def activations_form(name: str, stage: int, num_stages: int, num_microbatches: int, num_repeats: int = 1) -> float:
    """The peak activations of a stage, in microbatches of a device, in closed form.

    1F1B: Narayanan et al. 2021 (Memory-Efficient Pipeline-Parallel DNN Training), section 3.2. Interleaved 1F1B: its
    first stage in Korthikanti et al. 2022, section 4.2.3. ZB-H1: Qi et al. 2024, table 2.
    """
    if name in ("1f1b", "pipedream"):
        return min(num_microbatches, num_stages - stage) if name == "1f1b" else num_stages - stage
    if name == "zero_bubble":
        return min(num_microbatches, num_stages)
    if name == "interleaved":
        parts = 2 * (num_stages - stage - 1) + (num_repeats - 1) * num_stages + 1
        return min(parts, num_repeats * num_microbatches) / num_repeats
    return num_microbatches


def messages_form(stage: int, num_stages: int, num_microbatches: int, num_repeats: int = 1) -> int:
    """Messages that a stage sends per step, in closed form: one for each microbatch and repeat, forward and backward,
    except the output of the last part of the model and the gradient of the first part's input."""
    if num_stages == 1:
        return 0
    ends = (stage == 0) + (stage == num_stages - 1)
    return (2 * num_repeats - ends) * num_microbatches
