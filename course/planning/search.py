"""Every way to place a step, the best of those that fit, and why each of the others is not it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from course.budget import Sizes
from course.machine import Machine
from course.planning.choices import Choice, Mesh, mesh_refusal
from course.planning.estimate import Estimate, estimator
from course.planning.memory import STATE
from course.planning.training import DEFAULT, Training

CANNOT, TOO_LARGE, SLOWER = "cannot be split", "does not fit", "slower"


def meshes(num_devices: int) -> Iterator[Mesh]:
    """All ``(data, pipe, tensor)`` that use every device, large ``data`` first."""
    for data in reversed(divisors(num_devices)):
        for pipe in divisors(num_devices // data):
            yield data, pipe, num_devices // data // pipe


def choices(sizes: Sizes, mesh: Mesh, batch: int, remats: tuple[str, ...] = ("none", "block")) -> Iterator[Choice]:
    """All ways to use a mesh that a model can be placed on; ``fsdp`` only where ``data`` has more than one place."""
    data, pipe, tensor = mesh
    for microbatches in divisors(batch // data):
        for repeats in divisors(sizes.layers // pipe):
            for remat in remats:
                for fsdp in (False, True) if data > 1 else (False,):
                    yield Choice(data, pipe, tensor, microbatches, repeats, remat, fsdp)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return tuple(sorted({*low, *(number // i for i in low)}))


@dataclass(frozen=True)
class Rejected:
    """What was not chosen.

    Attributes:
        mesh: Axis sizes.
        kind: ``CANNOT``, ``TOO_LARGE`` or ``SLOWER``.
        why: What decided: an axis that does not divide, what takes the memory, what takes the time.
        said: The whole reason.
        found: The estimate; None where there is none.
    """

    mesh: Mesh
    kind: str
    why: str
    said: str
    found: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        found = self.found.to_json() if self.found else None
        return {"mesh": dict(zip(("data", "pipe", "tensor"), self.mesh, strict=True)), "kind": self.kind,
                "why": self.why, "said": self.said, "estimate": found}  # fmt: skip


@dataclass(frozen=True)
class Plans:
    """What a search has found.

    Attributes:
        best: The fastest that fits; None if nothing does.
        rejected: All others: what fits by time, then what does not by memory, then meshes.
    """

    best: Estimate | None
    rejected: tuple[Rejected, ...]

    @property
    def count(self) -> int:
        """How many ways were looked at; a mesh that a model cannot be placed on is one."""
        return len(self.rejected) + (self.best is not None)

    def by_mesh(self) -> dict[Mesh, Estimate | Rejected]:
        """The best of each mesh, or why there is none: by time, then by memory."""
        found: dict[Mesh, Estimate | Rejected] = {}
        if self.best is not None:
            found[self.best.choice[:3]] = self.best
        for one in self.rejected:
            found.setdefault(one.mesh, one)
        return found

    def grouped(self) -> dict[tuple[str, str], list[Rejected]]:
        """All that were rejected, by kind and by what decided."""
        groups: dict[tuple[str, str], list[Rejected]] = defaultdict(list)
        for one in self.rejected:
            groups[one.kind, one.why].append(one)
        return dict(groups)


def search(sizes: Sizes, machine: Machine, batch: int, training: Training = DEFAULT) -> Plans:
    """Look at every mesh of all of a machine's devices, with all microbatches, repeats, remats, FSDP on and off.

    Of two that take equally long, the one that holds less is taken.

    Args:
        sizes: Of the model.
        machine: Where.
        batch: Sequences in a step, over all devices.
        training: What is the same for every choice.
    """
    one = estimator(sizes, machine, batch, training)
    fit: list[Estimate] = []
    large: list[Estimate] = []
    refused: list[Rejected] = []
    for mesh in meshes(machine.num_devices):
        if said := mesh_refusal(sizes, batch, mesh):
            refused.append(Rejected(mesh, CANNOT, said.rpartition("=")[0], said))
            continue
        for choice in choices(sizes, mesh, batch, training.remats):
            found = one(choice)
            (fit if found.fits else large).append(found)
    fit.sort(key=lambda e: (e.seconds, e.bytes, e.choice))
    large.sort(key=lambda e: (e.bytes, e.seconds, e.choice))
    best = fit[0] if fit else None
    slower = [_slower(found, best) for found in fit[1:] if best is not None]
    return Plans(best, (*slower, *map(_too_large, large), *refused))


def _slower(found: Estimate, best: Estimate) -> Rejected:
    """What costs more than with the best one, the most of it named."""
    more = {cause: seconds - best.parts[cause] for cause, seconds in found.parts.items()}
    why = max(more, key=lambda cause: more[cause])
    if more[why] <= 0:
        return Rejected(found.choice[:3], SLOWER, "nothing", "as fast, and holds no less", found)
    said = f"{found.seconds / best.seconds - 1:.1%} slower, most of it {why}: {1e3 * more[why]:,.1f} ms more"
    return Rejected(found.choice[:3], SLOWER, why, said, found)


def _too_large(found: Estimate) -> Rejected:
    """What takes most of the memory."""
    state = sum(found.held[name] for name in STATE)
    held = {"state": state, **{name: size for name, size in found.held.items() if name not in STATE}}
    why = max(held, key=lambda name: held[name])
    needed = (1 + found.margin) * found.bytes
    said = f"{needed / 1e9:,.1f} of {found.memory / 1e9:,.1f} GB, most of it {why}: {held[why] / 1e9:,.1f} GB"
    return Rejected(found.choice[:3], TOO_LARGE, why, said, found)
