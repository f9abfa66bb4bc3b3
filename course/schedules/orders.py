"""Pipeline schedules as data: the actions of each stage, in order.

A device of the pipeline is a *stage*. It has ``num_repeats`` parts of the layers; part ``r`` of stage ``s`` is the
``r * num_stages + s``-th part of the model, so a microbatch goes round the stages once for each repeat. There are two
other routes: in a ``v``, every second repeat goes through the stages in reverse, and with ``both``, a repeat is a
direction: half of the microbatches go through the whole model in each, and each device has a part for each direction.
``family`` has the published schedules; ``written`` parses one written by hand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

KINDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
ROUTES = ("round", "v", "both")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Action:
    """One piece of work of a stage.

    Attributes:
        kind: ``F`` forward; ``B`` the whole backward pass; or its two parts, ``I`` the gradient of the input, which
            the previous stage waits for, and ``W`` the gradient of the weights, which no stage waits for.
        microbatch: Index in the step, from 0; in a schedule that never flushes, in the whole stream.
        repeat: Index of the part of the stage's layers, from 0.
    """

    kind: str
    microbatch: int
    repeat: int = 0


@dataclass(frozen=True)
class Schedule:
    """The actions of each stage, in order.

    Attributes:
        name: Common name.
        num_stages: Devices in the pipeline.
        num_microbatches: Microbatches per step.
        num_repeats: Parts of the model on each device.
        orders: A tuple of actions for each stage.
        flushes: Whether all microbatches of a step finish before the weights change and the next step begins.
            If not, ``orders`` is a stream of microbatches, each of which changes the weights.
        microbatches: Number of microbatches in ``orders``: ``num_microbatches``, or the length of the stream.
        route: The path of a microbatch through the stages, one of ``ROUTES``; with ``both``, ``num_microbatches`` is
            that of one direction.

    Raises:
        ValueError: An order does not have every microbatch and repeat exactly once, forward and backward.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_repeats: int
    orders: tuple[tuple[Action, ...], ...]
    flushes: bool = True
    microbatches: int = 0
    route: str = "round"

    def __post_init__(self) -> None:
        require_sizes(self.num_stages, self.num_microbatches, self.num_repeats)
        if self.route not in ROUTES:
            raise ValueError(f"{self.name}: there is no route {self.route!r}; there are: {', '.join(ROUTES)}")
        object.__setattr__(self, "microbatches", self.microbatches or self.num_microbatches)
        if len(self.orders) != self.num_stages:
            raise ValueError(f"{self.name}: {self.num_stages} stages need as many orders, not {len(self.orders)}")
        for stage, order in enumerate(self.orders):
            self._require_complete(stage, order)

    @property
    def forward_only(self) -> bool:
        return all(action.kind == "F" for order in self.orders for action in order)

    @property
    def parts(self) -> int:
        """Number of parts that each device's share of the model is cut into."""
        return 1 if self.route == "both" else self.num_repeats

    def neighbour(self, stage: int, repeat: int, step: int) -> tuple[int, int] | None:
        """The stage and repeat with the next part of the model (``step`` 1) or the one before (-1), if there is one."""
        turned = repeat % 2 == 1 and self.route != "round"
        place = self.num_stages - 1 - stage if turned else stage
        first = 0 if self.route == "both" else repeat * self.num_stages
        part = first + place + step
        last = self.num_stages * self.parts
        if not 0 <= part < last:
            return None
        if self.route == "both":
            return (self.num_stages - 1 - part if turned else part), repeat
        repeat, place = divmod(part, self.num_stages)
        return (self.num_stages - 1 - place if repeat % 2 and self.route == "v" else place), repeat

    def _require_complete(self, stage: int, order: tuple[Action, ...]) -> None:
        counts = Counter(order)
        for repeat in range(self.num_repeats):
            for microbatch in range(self.microbatches):
                has = {kind: counts.pop(Action(kind, microbatch, repeat), 0) for kind in KINDS}
                backward = [has[kind] for kind in "BIW"]
                if has["F"] != 1 or backward not in ([[0, 0, 0]] if self.forward_only else [[1, 0, 0], [0, 1, 1]]):
                    counted = ", ".join(f"{count} x {kind}" for kind, count in has.items() if count) or "nothing"
                    name = text_of(Action("", microbatch, repeat), self.num_repeats)
                    raise ValueError(
                        f"{self.name}: stage {stage} needs one F and one B (or one I and one W) of microbatch {name}, "
                        f"and has {counted}"
                    )
        if counts:
            extra = text_of(next(iter(counts)), len(LETTERS))
            raise ValueError(f"{self.name}: stage {stage} has {extra}, which is not part of this pipeline")


def require_sizes(num_stages: int, num_microbatches: int, num_repeats: int) -> None:
    """Refuse invalid sizes of a pipeline.

    Raises:
        ValueError: One of them is below 1, or there are more repeats than letters in the alphabet.
    """
    for name, size in (("stages", num_stages), ("microbatches", num_microbatches), ("repeats", num_repeats)):
        if size < 1:
            raise ValueError(f"a pipeline has at least 1 of its {name}, not {size}")
    if num_repeats > len(LETTERS):
        raise ValueError(f"at most {len(LETTERS)} repeats can be named by a letter, not {num_repeats}")


def forwards(schedule: Schedule) -> Schedule:
    """The forward pass of the same schedule."""
    orders = tuple(tuple(action for action in order if action.kind == "F") for order in schedule.orders)
    return replace(schedule, name=f"{schedule.name}, forward pass", orders=orders)


def text_of(action: Action, num_repeats: int = 1) -> str:
    """``F3``; with repeats, ``F3b``: microbatch 3 in its second repeat."""
    return f"{action.kind}{action.microbatch}{LETTERS[action.repeat] if num_repeats > 1 else ''}"


def written(lines: Sequence[str], *, name: str = "by hand", route: str = "round") -> Schedule:
    """Parse a schedule written as text.

    Args:
        lines: One for each stage, such as ``"F0 F1 B0 B1"``. ``F``, ``B``, ``I`` and ``W`` are the kinds of an
            ``Action``; a letter after the number names the repeat: ``F3b`` is microbatch 3 in its second repeat. Idle
            ticks are left out: the start of each action follows from its dependencies.
        name: Name of the schedule.
        route: The path of a microbatch through the stages, one of ``ROUTES``.

    Returns:
        The schedule; it has as many microbatches and repeats as the lines name.

    Raises:
        ValueError: A word is not an action, or a stage does not have all of them.

    >>> written(["F0 F1 B1 B0", "F0 F1 B1 B0"]).num_microbatches
    2
    """
    orders = tuple(tuple(_action(word) for word in line.split()) for line in lines)
    actions = [action for order in orders for action in order]
    if not actions:
        raise ValueError('a schedule needs at least one action, as in written(["F0 B0"])')
    microbatches, repeats = (1 + max(getattr(a, key) for a in actions) for key in ("microbatch", "repeat"))
    return Schedule(name, len(orders), microbatches, repeats, orders, route=route)


def _action(word: str) -> Action:
    parts = re.fullmatch(r"([FBIW])(\d{1,6})([a-z]?)", word)
    if parts is None:
        raise ValueError(
            f"{word!r} is not an action; write F3, B3, I3 or W3, and F3b for the second repeat of microbatch 3"
        )
    return Action(parts[1], int(parts[2]), LETTERS.index(parts[3]) if parts[3] else 0)
