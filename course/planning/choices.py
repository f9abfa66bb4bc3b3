"""One way to place a training step on a number of devices, and whether it can be."""

from __future__ import annotations

from typing import NamedTuple

from course.budget import REMAT, Sizes

Mesh = tuple[int, int, int]


class Choice(NamedTuple):
    """One way to place a step: a mesh and how it is used.

    Attributes:
        data, pipe, tensor: Sizes of the mesh axes, ``tensor`` innermost.
        microbatches: Parts that a pipeline's share of the batch is run in.
        repeats: Groups of layers that each stage holds, run breadth-first; without a pipeline, how many groups the
            layers form whose weights are gathered, and whose gradients are reduced, together.
        remat: ``none``, ``attention`` or ``block``, as ``course.budget`` has them.
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


def mesh_refusal(sizes: Sizes, batch: int, mesh: Mesh) -> str:
    """Why a model cannot be placed on a mesh, whatever the rest; empty if it can."""
    data, pipe, tensor = mesh
    for what, number, parts, axis in (
        ("heads", sizes.heads, tensor, "tensor"),
        ("hidden", sizes.inner, tensor, "tensor"),
        ("vocab", sizes.vocab, tensor, "tensor"),
        ("seq", sizes.seq, tensor, "tensor"),
        ("layers", sizes.layers, pipe, "pipe"),
        ("batch", batch, data, "data"),
    ):
        if number % parts:
            return f"{what} {number:,} cannot be split over {axis}={parts}"
    return ""


def refusal(sizes: Sizes, num_devices: int, batch: int, choice: Choice) -> str:
    """Why a step cannot be placed so; empty if it can. Memory is another question."""
    whole = {"data": choice.data, "pipe": choice.pipe, "tensor": choice.tensor,
             "microbatches": choice.microbatches, "repeats": choice.repeats}  # fmt: skip
    for what, number in whole.items():
        if type(number) is not int or number < 1:
            return f"{what} is {number!r}, and it must be a whole number of at least 1"
    if choice.devices != num_devices:
        return f"data x pipe x tensor is {choice.devices}, and there are {num_devices} devices"
    if said := mesh_refusal(sizes, batch, choice[:3]):
        return said
    share, layers = batch // choice.data, sizes.layers // choice.pipe
    if share % choice.microbatches:
        return f"a share of {share} sequences cannot be taken in {choice.microbatches} microbatches"
    if layers % choice.repeats:
        return f"{layers} layers on a stage cannot be taken in {choice.repeats} repeats"
    if choice.remat not in REMAT:
        return f"no remat is called {choice.remat!r}; there are: {', '.join(REMAT)}"
    return ""
