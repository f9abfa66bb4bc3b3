"""One configuration of a training step on a number of devices, and the check that it is possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from course.budget import Sizes
from course.planning.training import Training

Mesh = tuple[int, int, int]


class Choice(NamedTuple):
    """One configuration of a step: a mesh and how it is used.

    Attributes:
        data, pipe, tensor: Sizes of the mesh axes, ``tensor`` innermost.
        microbatches: Number of parts that a pipeline splits its share of the batch into.
        repeats: Groups of layers on each stage; without a pipeline, the number of groups of layers whose
            weights are gathered together, and whose gradients are reduced together.
        remat: One of ``course.planning.training.REMAT``.
        fsdp: Whether ``data`` splits parameters, gradients and optimizer state as well.
    """

    data: int
    pipe: int
    tensor: int
    microbatches: int
    repeats: int
    remat: str
    fsdp: bool

    @property
    def mesh(self) -> dict[str, int]:
        return {"data": self.data, "pipe": self.pipe, "tensor": self.tensor}

    @property
    def devices(self) -> int:
        return self.data * self.pipe * self.tensor


@dataclass(frozen=True)
class Indivisible:
    """A size of a model that a mesh axis does not divide; its text says which."""

    what: str
    number: int
    axis: str
    size: int

    @property
    def cause(self) -> str:
        """The reason, worded the same for every size of the axis."""
        return f"{self.what} {self.number:,} cannot be split over {self.axis}"

    def __str__(self) -> str:
        return f"{self.cause}={self.size}"


def indivisible(sizes: Sizes, batch: int, mesh: Mesh, training: Training) -> Indivisible | None:
    """The first reason why a model cannot be placed on a mesh, however the mesh is used; None if there is none."""
    data, pipe, tensor = mesh
    split = {"heads": sizes.heads, "hidden": sizes.inner}
    if training.course:
        split["vocab"] = sizes.vocab
    if training.sequence_parallel:
        split["seq"] = sizes.seq
    every = [Indivisible(what, number, "tensor", tensor) for what, number in split.items()]
    # Stages may differ in their number of layers, but each needs at least one.
    uneven = not training.course and sizes.layers >= pipe
    every += [] if uneven else [Indivisible("layers", sizes.layers, "pipe", pipe)]
    every.append(Indivisible("batch", batch, "data", data))
    return next((one for one in every if one.number % one.size), None)


def refusal(sizes: Sizes, num_devices: int, batch: int, choice: Choice, training: Training) -> str:
    """The reason why a step cannot be placed like this; empty if it can. Memory is checked separately."""
    for what in ("data", "pipe", "tensor", "microbatches", "repeats"):
        number = getattr(choice, what)
        if type(number) is not int or number < 1:
            return f"{what} is {number!r}, and it must be a whole number of at least 1"
    if choice.devices != num_devices:
        return f"data x pipe x tensor is {choice.devices}, and there are {num_devices} devices"
    if why := indivisible(sizes, batch, choice[:3], training):
        return str(why)
    share, layers = batch // choice.data, -(-sizes.layers // choice.pipe)
    if share % choice.microbatches:
        return f"a share of {share} sequences cannot be taken in {choice.microbatches} microbatches"
    if layers % choice.repeats if training.course else layers < choice.repeats:
        return f"{layers} layers on a stage cannot be taken in {choice.repeats} repeats"
    if choice.remat not in training.remats_known:
        return f"no remat is called {choice.remat!r}; there are: {', '.join(training.remats_known)}"
    return ""


def group_layers(sizes: Sizes, choice: Choice) -> int:
    """Layers of one repeat on the stage with the most layers."""
    return -(-sizes.layers // (choice.pipe * choice.repeats))
