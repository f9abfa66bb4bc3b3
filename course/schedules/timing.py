"""Start and end times of a schedule's actions, from their dependencies.

The complete rules:

- A stage runs its actions in order, one at a time. An action begins when the previous one has ended and its
  dependencies are ready.
- Forward needs the output of the previous part; backward the gradient of the output, from the next part, and its own
  forward pass; the gradient of the weights its own gradient of the input.
- A message between devices is sent as soon as it is ready, overlapping with compute. A link carries one message at
  a time in each direction, in the order in which they became ready.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from course.schedules.orders import Action, Schedule, text_of


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch, in any unit.

    Attributes:
        forward: Forward pass of all layers of one device.
        backward_input: Gradient of their inputs.
        backward_weights: Gradient of their weights.
        send: One message: a microbatch's activations, or their gradient, between two devices.

    Raises:
        ValueError: A time is negative or not finite, or computing takes no time at all.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weights: float = 1.0
    send: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weights", "send"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is a time: 0 or more, not {value}")
        if not self.forward > 0:
            raise ValueError("a forward pass takes some time: forward must be above 0")

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weights

    def of(self, kind: str, num_repeats: int = 1) -> float:
        """Time of an action on one of ``num_repeats`` parts of the device's layers."""
        times = {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weights}
        return times[kind] / num_repeats


UNIT = Costs()


@dataclass(frozen=True)
class Span:
    """The time of an action on a stage."""

    stage: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Message:
    """A message from one stage to another: the result of ``action``, on the wire from ``start`` to ``end``."""

    source: int
    target: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timed:
    """A schedule with its times.

    Attributes:
        schedule: The schedule that was run.
        costs: The costs that it was run with.
        spans: The spans of each stage, in its order.
        messages: By start.
    """

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[Message, ...]

    @property
    def end(self) -> float:
        """The time at which the last action has ended."""
        return max(span.end for spans in self.spans for span in spans)


def run(schedule: Schedule, costs: Costs = UNIT) -> Timed:
    """Time a schedule.

    Raises:
        ValueError: Its stages would wait forever; the message gives the dependency of each.
    """
    state = _State(schedule, costs)
    while not state.done:
        if not any([state.advance(stage) for stage in range(schedule.num_stages)]):
            raise ValueError(f"{schedule.name}: stages would wait forever: {state.stuck()}")
    messages = sorted(state.messages, key=lambda m: (m.start, m.source, m.target))
    return Timed(schedule, costs, tuple(map(tuple, state.spans)), tuple(messages))


# A part of the model's work on a microbatch: whether backward, microbatch, stage and repeat.
_Key = tuple[bool, int, int, int]


class _State:
    def __init__(self, schedule: Schedule, costs: Costs):
        self.schedule, self.costs = schedule, costs
        self.arrived: dict[_Key, float] = {}
        self.link_free: dict[tuple[int, int], float] = defaultdict(float)
        self.spans: list[list[Span]] = [[] for _ in schedule.orders]
        self.ran: list[set[Action]] = [set() for _ in schedule.orders]
        self.messages: list[Message] = []

    @property
    def done(self) -> bool:
        return all(len(a) == len(b) for a, b in zip(self.spans, self.schedule.orders, strict=True))

    def advance(self, stage: int) -> bool:
        """Run all ready actions of the stage; True if there were any."""
        order, spans = self.schedule.orders[stage], self.spans[stage]
        before = len(spans)
        while len(spans) < len(order) and not any(self._missing(stage, order[len(spans)])):
            self._run(stage, order[len(spans)])
        return len(spans) > before

    def _needs(self, stage: int, action: Action) -> _Key | None:
        """The result that has to arrive from another part of the model."""
        if action.kind == "W":
            return None
        forward = action.kind == "F"
        source = self.schedule.neighbour(stage, action.repeat, -1 if forward else 1)
        return (not forward, action.microbatch, *source) if source else None

    def _missing(self, stage: int, action: Action) -> Iterator[str]:
        key = self._needs(stage, action)
        if key is not None and key not in self.arrived:
            yield f"a result of stage {key[2]}"
        own = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
        before = Action(own, action.microbatch, action.repeat) if own else None
        if before and before not in self.ran[stage]:
            yield f"{text_of(before, self.schedule.num_repeats)}, which comes later on the same stage"

    def _run(self, stage: int, action: Action) -> None:
        spans, key = self.spans[stage], self._needs(stage, action)
        free = spans[-1].end if spans else 0.0
        start = max(free, self.arrived[key]) if key is not None else free
        end = start + self.costs.of(action.kind, self.schedule.parts)
        spans.append(Span(stage, action, start, end))
        self.ran[stage].add(action)
        if action.kind != "W":
            self._hand_on(stage, action, end)

    def _hand_on(self, stage: int, action: Action, end: float) -> None:
        forward = action.kind == "F"
        other = self.schedule.neighbour(stage, action.repeat, 1 if forward else -1)
        if other is None:
            return
        key, target = (not forward, action.microbatch, stage, action.repeat), other[0]
        if target == stage:
            self.arrived[key] = end
            return
        start = max(end, self.link_free[stage, target])
        self.arrived[key] = self.link_free[stage, target] = start + self.costs.send
        self.messages.append(Message(stage, target, action, start, self.arrived[key]))

    def stuck(self) -> str:
        waits = []
        for stage, order in enumerate(self.schedule.orders):
            if len(self.spans[stage]) < len(order):
                action = order[len(self.spans[stage])]
                why = " and ".join(self._missing(stage, action))
                waits.append(f"stage {stage} waits in {text_of(action, self.schedule.num_repeats)} for {why}")
        return "; ".join(waits)
