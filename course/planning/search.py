"""Every configuration of a step, the best of those that fit, and the reason for rejecting each of the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from course.machine import Machine
from course.planning.choices import Choice, Indivisible, Mesh, indivisible, uncounted, unscheduled
from course.planning.estimate import Estimate, unchecked
from course.planning.memory import STATE
from course.planning.training import DEFAULT, LEAST_CHUNK, Training
from course.sizes import Sizes

EQUAL = "equally fast, with no less memory"


class Kind(StrEnum):
    """Reasons for rejecting a configuration."""

    CANNOT = "cannot be split"
    TOO_LARGE = "does not fit"
    SLOWER = "slower"


def meshes(num_devices: int, contexts: Iterable[int] = (1,), experts: Iterable[int] = (1,)) -> Iterator[Mesh]:
    """All meshes that use every device with one of these sizes of ``context`` and ``expert``, large ``data`` first."""
    for expert in experts:
        for context in contexts:
            rest, odd = divmod(num_devices, expert * context)
            for data in reversed(() if odd else divisors(rest)):
                for pipe in divisors(rest // data):
                    yield Mesh(data, pipe, rest // data // pipe, context, expert)


def axes_tried(sizes: Sizes, num_devices: int, training: Training) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of ``context`` and of ``expert`` that a search tries."""
    sizes_of_axes = divisors(num_devices)
    fused = training.kernels == "fused" and not training.only_course
    contexts = [c for c in sizes_of_axes if c == 1 or (fused and sizes.seq // (2 * c) >= LEAST_CHUNK)]
    experts = [e for e in sizes_of_axes if e == 1 or (sizes.experts and sizes.experts % e == 0)]
    return training.contexts or tuple(contexts), training.experts or tuple(experts)


def choices(sizes: Sizes, mesh: Mesh, batch: int, training: Training = DEFAULT) -> Iterator[Choice]:
    """All configurations on a mesh that a model can be placed on; ZeRO only where devices share weights.

    Without a pipeline, every layer is a separate group unless the schedule is breadth-first: nothing else is faster.
    """
    layers = -(-sizes.layers // mesh.pipe)
    zeros = training.zeros if mesh.copies > 1 else (0,)
    for schedule in _schedules(sizes, mesh, batch, training):
        course = schedule == "breadth_first"
        if mesh.pipe > 1 or course:
            repeat_counts = divisors(layers) if course or schedule == "interleaved" else (1,)
        else:
            repeat_counts = (layers,)
        for microbatches in divisors(batch // mesh.data // mesh.expert):
            for repeats in repeat_counts:
                for remat in training.remats:
                    choice = Choice(*mesh[:3], microbatches, repeats, remat, 0, schedule, *mesh[3:])
                    if not unscheduled(choice, schedule) and not uncounted(sizes, choice, training):
                        yield from (choice._replace(zero=zero) for zero in zeros)


def _schedules(sizes: Sizes, mesh: Mesh, batch: int, training: Training) -> Iterator[str]:
    """The schedules to try on a mesh: without a pipeline, breadth-first and only the first of the others."""
    others = [name for name in training.schedules if name != "breadth_first"]
    yield from others if mesh.pipe > 1 else others[:1]
    if "breadth_first" in training.schedules and not indivisible(sizes, batch, mesh, training, True):
        yield "breadth_first"


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return tuple(sorted({*low, *(number // i for i in low)}))


@dataclass(frozen=True)
class Rejected:
    """A configuration that was not chosen.

    Attributes:
        mesh: Axis sizes.
        kind: The kind of reason.
        why: The deciding factor: the size that an axis does not divide, or what takes most of the memory or of the
            additional time; empty if it is as fast as the best one and needs no less memory.
        amount: Amount of ``why``: bytes, or seconds more than the best one takes.
        estimate: The estimate; None if there is none.
        slower: Fraction by which it takes longer than the best one.
    """

    mesh: Mesh
    kind: Kind
    why: Indivisible | str
    amount: float = 0.0
    estimate: Estimate | None = None
    slower: float = 0.0

    @property
    def cause(self) -> str:
        """``why`` in words, the same for all configurations that it decides."""
        return self.why.cause if isinstance(self.why, Indivisible) else self.why or EQUAL

    @property
    def reason(self) -> str:
        """The full reason."""
        if self.kind is Kind.SLOWER and self.why:
            return f"{self.slower:.1%} slower, most of it {self.why}: {1e3 * self.amount:,.1f} ms more"
        if self.kind is Kind.TOO_LARGE and self.estimate:
            needed = f"{self.estimate.needed / 1e9:,.1f} of {self.estimate.memory / 1e9:,.1f} GB"
            return f"{needed}, most of it {self.why}: {self.amount / 1e9:,.1f} GB"
        return str(self.why) or EQUAL

    @property
    def summary(self) -> str:
        """``reason`` for a narrow table."""
        return f"{self.slower:.1%} slower: {self.why}" if self.kind is Kind.SLOWER and self.why else self.reason

    def to_json(self) -> dict[str, Any]:
        """The rejection as plain data."""
        mesh = self.mesh._asdict()
        estimate = self.estimate.to_json() if self.estimate else None
        return {"mesh": mesh, "kind": self.kind, "why": self.cause, "reason": self.reason, "estimate": estimate}


@dataclass(frozen=True)
class Plans:
    """The result of a search.

    Attributes:
        best: The fastest that fits; None if none fits.
        rejected: All others: those that fit, by time; then those that do not fit, by memory; then meshes.
    """

    best: Estimate | None
    rejected: tuple[Rejected, ...]

    @property
    def count(self) -> int:
        """Number of configurations considered; a mesh that a model cannot be placed on counts as one."""
        return len(self.rejected) + (self.best is not None)

    def by_mesh(self) -> dict[Mesh, Estimate | Rejected]:
        """The best configuration of each mesh, or the reason why there is none: by time, then by memory."""
        results: dict[Mesh, Estimate | Rejected] = {}
        if self.best is not None:
            results[self.best.choice.at] = self.best
        for rejected in self.rejected:
            results.setdefault(rejected.mesh, rejected)
        return results

    def grouped(self) -> dict[tuple[Kind, str], list[Rejected]]:
        """All rejected configurations, by kind and deciding factor."""
        groups: dict[tuple[Kind, str], list[Rejected]] = defaultdict(list)
        for rejected in self.rejected:
            groups[rejected.kind, rejected.cause].append(rejected)
        return dict(groups)


def search(sizes: Sizes, machine: Machine, batch: int, training: Training = DEFAULT) -> Plans:
    """Consider every mesh of all of a machine's devices, with all microbatches, repeats, remats, stages of ZeRO and
    schedules.

    If two take equally long, the one that needs less memory is better.

    Args:
        sizes: Sizes of the model.
        machine: The machine.
        batch: Sequences per step, over all devices.
        training: Settings that are the same for every choice.
    """
    predict = unchecked(sizes, machine, batch, training)
    fit: list[Estimate] = []
    large: list[Estimate] = []
    refused: list[Rejected] = []
    for mesh in meshes(machine.num_devices, *axes_tried(sizes, machine.num_devices, training)):
        if why := indivisible(sizes, batch, mesh, training, training.only_course):
            refused.append(Rejected(mesh, Kind.CANNOT, why))
            continue
        for choice in choices(sizes, mesh, batch, training):
            estimate = predict(choice)
            (fit if estimate.fits else large).append(estimate)
    fit.sort(key=lambda e: (e.seconds, e.bytes, e.choice))
    large.sort(key=lambda e: (e.bytes, e.choice))
    best = fit[0] if fit else None
    slower = [_slower(estimate, best) for estimate in fit[1:] if best is not None]
    return Plans(best, (*slower, *map(_too_large, large), *refused))


def _slower(estimate: Estimate, best: Estimate) -> Rejected:
    """Name the cause that adds the most to the time of the best one."""
    added = {cause: seconds - best.parts[cause] for cause, seconds in estimate.parts.items()}
    why = max(added, key=lambda cause: added[cause])
    why, amount = (why, added[why]) if added[why] > 0 else ("", 0.0)
    return Rejected(estimate.choice.at, Kind.SLOWER, why, amount, estimate, estimate.seconds / best.seconds - 1)


def _too_large(estimate: Estimate) -> Rejected:
    """Name the largest part of the memory."""
    resident = {"state": sum(map(estimate.resident.__getitem__, STATE)), **estimate.resident}
    for name in STATE:
        del resident[name]
    why = max(resident, key=lambda name: resident[name])
    return Rejected(estimate.choice.at, Kind.TOO_LARGE, why, resident[why], estimate)
