"""One configuration of a training step on a number of devices, and the check that it is possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from course.planning.training import Training
from course.sizes import Sizes


class Mesh(NamedTuple):
    """Sizes of the mesh axes. From outermost to innermost they are ``data, pipe, expert, context, tensor``.

    ``expert`` splits experts, and the batch as ``data`` does; ``context`` splits the tokens of a sequence.
    """

    data: int
    pipe: int
    tensor: int
    context: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.pipe * self.tensor * self.context * self.expert

    @property
    def copies(self) -> int:
        """Number of devices that use the same weights for different tokens, unless the weights are those of experts."""
        return self.data * self.context * self.expert


class Choice(NamedTuple):
    """One configuration of a step: a mesh and how it is used.

    Attributes:
        data, pipe, tensor: Sizes of the mesh axes, ``tensor`` innermost.
        microbatches: Number of parts that a pipeline splits its share of the batch into.
        repeats: Groups of layers on each stage; without a pipeline, the number of groups of layers whose
            weights are gathered together, and whose gradients are reduced together.
        remat: One of ``course.planning.training.REMAT``.
        zero: Stage of ZeRO, 0 to 3: what devices with the same weights split.
        schedule: One of ``course.planning.training.SCHEDULES``; empty means the first of ``training.schedules`` that
            the mesh and the repeats allow.
        context, expert: Sizes of the other two axes.
    """

    data: int
    pipe: int
    tensor: int
    microbatches: int
    repeats: int
    remat: str
    zero: int = 0
    schedule: str = ""
    context: int = 1
    expert: int = 1

    @property
    def at(self) -> Mesh:
        return Mesh(self.data, self.pipe, self.tensor, self.context, self.expert)

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes by name, outermost first; ``expert`` and ``context`` only if above 1."""
        rest = {axis: size for axis in ("expert", "context") if (size := getattr(self, axis)) > 1}
        return {"data": self.data, "pipe": self.pipe, **rest, "tensor": self.tensor}

    @property
    def devices(self) -> int:
        return self.at.devices

    @property
    def fsdp(self) -> bool:
        return self.zero == 3

    @property
    def course(self) -> bool:
        """True for the schedule of the course's own step."""
        return self.schedule == "breadth_first"

    @property
    def alone(self) -> bool:
        """True if there is no pipeline, and microbatches run one after the other."""
        return self.pipe == 1 and not self.course


def settled(choice: Choice, training: Training) -> Choice:
    """The configuration with its schedule named."""
    name = choice.schedule or next(
        (name for name in training.schedules if not unscheduled(choice, name)), training.schedules[0]
    )
    return choice._replace(schedule=name)


def unscheduled(choice: Choice, schedule: str) -> str:
    """The reason why a schedule cannot run microbatches, repeats and remat like this; empty if it can."""
    if choice.pipe == 1 or schedule == "breadth_first":
        return ""
    if (choice.repeats > 1) != (schedule == "interleaved"):
        required = "several repeats" if schedule == "interleaved" else "one repeat"
        return f"a pipeline of the schedule {schedule} has {required}, and there are {choice.repeats}"
    if schedule == "zero_bubble" and choice.remat != "none":
        return f"the schedule zero_bubble keeps what gradients of weights need: remat must be none, not {choice.remat}"
    if schedule == "zero_bubble" and choice.microbatches < choice.pipe:
        return (
            f"the schedule zero_bubble needs at least {choice.pipe} microbatches, and there are {choice.microbatches}"
        )
    return ""


@dataclass(frozen=True)
class Indivisible:
    """A size of a model that is not divisible by a mesh axis; ``str`` says which.

    Attributes:
        what, number: Name and value of the size.
        axis, size: The axis.
        chunks: Number of pieces that each device of the axis gets.
    """

    what: str
    number: int
    axis: str
    size: int
    chunks: int = 1

    @property
    def cause(self) -> str:
        """The reason, worded the same for every size of the axis."""
        return f"{self.what} {self.number:,} cannot be split over {self.axis}"

    def __str__(self) -> str:
        return f"{self.cause}={self.size}{f', {self.chunks} chunks each' if self.chunks > 1 else ''}"


def indivisible(sizes: Sizes, batch: int, mesh: Mesh, training: Training, course: bool) -> Indivisible | None:
    """The first reason why a model cannot be placed on a mesh, however the mesh is used; None if there is none.

    ``course`` adds the rules of the course's own step.
    """
    split = {"heads": sizes.heads, "hidden": sizes.inner}
    if sizes.experts:
        split["expert_hidden"] = sizes.expert_inner
    if course:
        split["vocab"] = sizes.vocab
    if training.sequence_parallel:
        split["seq"] = sizes.seq // mesh.context
    divisions = [Indivisible(name, number, "tensor", mesh.tensor) for name, number in split.items()]
    # Stages may differ in their number of layers, but each needs at least one.
    uneven = not course and sizes.layers >= mesh.pipe
    divisions += [] if uneven else [Indivisible("layers", sizes.layers, "pipe", mesh.pipe)]
    if mesh.expert > 1:
        divisions.append(Indivisible("experts", sizes.experts or 1, "expert", mesh.expert))
        divisions.append(Indivisible("batch", batch, "data x expert", mesh.data * mesh.expert))
    else:
        divisions.append(Indivisible("batch", batch, "data", mesh.data))
    if mesh.context > 1:
        divisions.append(Indivisible("seq", sizes.seq, "context", mesh.context, 2))
    return next((division for division in divisions if division.number % (division.size * division.chunks)), None)


def refusal(sizes: Sizes, num_devices: int, batch: int, choice: Choice, training: Training) -> str:
    """The reason why a step cannot be placed like this; empty if it can. Memory is checked separately."""
    for name in ("data", "pipe", "tensor", "context", "expert", "microbatches", "repeats"):
        number = getattr(choice, name)
        if type(number) is not int or number < 1:
            return f"{name} is {number!r}, and it must be a whole number of at least 1"
    mesh = choice.at
    if mesh.devices != num_devices:
        axes = " x ".join(choice.mesh)
        return f"{axes} is {mesh.devices}, and there are {num_devices} devices"
    if why := indivisible(sizes, batch, mesh, training, choice.course):
        return str(why)
    share, layers = batch // choice.data // choice.expert, -(-sizes.layers // choice.pipe)
    if share % choice.microbatches:
        return f"a share of {share} sequences cannot be taken in {choice.microbatches} microbatches"
    if layers % choice.repeats if choice.course else layers < choice.repeats:
        return f"{layers} layers on a stage cannot be taken in {choice.repeats} repeats"
    return _unknown(choice, training) or uncounted(sizes, choice, training) or unscheduled(choice, choice.schedule)


def _unknown(choice: Choice, training: Training) -> str:
    """Describe a name that the training does not have; empty if it has all of them."""
    zeros = training.zeros if choice.at.copies > 1 else (0, *training.zeros)
    for kind, name, known in (
        ("remat", choice.remat, training.remats_known),
        ("schedule", choice.schedule, training.schedules),
        ("ZeRO stage", choice.zero, zeros),
    ):
        if name not in known:
            return f"no {kind} is called {name!r}; there are: {', '.join(map(str, known))}"
    return ""


def uncounted(sizes: Sizes, choice: Choice, training: Training) -> str:
    """The reason why there are no closed forms for a configuration; empty if there are."""
    if choice.course and choice.remat == "half":
        return "the course's own step has no remat called 'half'"
    if choice.context > 1 and (choice.course or training.kernels != "fused"):
        return "context parallelism is planned for fused kernels, and not for the course's own step"
    if not sizes.experts and not sizes.kv_rank:
        return ""
    if choice.course or training.kernels != "fused":
        return "experts and latent attention are planned for fused kernels, and not for the course's own step"
    return "experts and latent attention are planned without remat half" if choice.remat == "half" else ""


def group_layers(sizes: Sizes, choice: Choice) -> int:
    """Layers of one repeat on the stage with the most layers."""
    return -(-sizes.layers // (choice.pipe * choice.repeats))
