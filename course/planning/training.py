"""The settings of a planned step that are the same on every mesh."""

from __future__ import annotations

from dataclasses import dataclass

from course.budget import OPTIMIZERS, PRECISIONS
from course.budget import REMAT as BUDGETED

# Margin for workspaces, fragmentation and buffers of collectives, without closed forms. As in ``meshcraft memory``.
MARGIN = 0.2
# A device has two chunks of a sequence split over ``context``. At its peaks, an H100 hides keys and values of 8 of 32
# heads on NVLink behind blocks of 1,100 tokens: shorter chunks are not tried.
LEAST_CHUNK = 1024
REMAT = (*BUDGETED, "half")
KERNELS = ("fused", "materialised", "plain")
# All known schedules, and those that a search tries by default: GPipe keeps more than 1F1B and is no faster.
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", "breadth_first", "gpipe")
DEFAULT_SCHEDULES = SCHEDULES[:4]
ZERO_STAGES = (0, 1, 2, 3)
CONTEXT = ("ring", "gathered")


@dataclass(frozen=True)
class Training:
    """Settings for training a model, independent of the mesh.

    Attributes:
        precision: Dtypes, one of ``course.budget.PRECISIONS``.
        optimizer: One of ``course.budget.OPTIMIZERS``.
        rings: Whether layers that are split over ``tensor`` send in rings that overlap with their products.
        share_loss: Whether every stage of a pipeline computes a share of the loss, if the microbatches can be shared;
            otherwise the last one computes it, and the others wait.
        scanned: Whether the layers of a repeat run in a scan, which then saves what they keep.
        pairs: Whether the weights of two repeats are concatenated for each block of ticks.
        remats: Members of ``REMAT`` to try: ``attention`` recomputes its scores, ``half`` the second of
            every two products and everything that is not a product, ``block`` the whole layer.
        margin: Memory margin, as a fraction of the counted bytes.
        kernels: ``fused``: attention keeps no scores, and skips masked ones; ``materialised``: it keeps them,
            in the training's element size; ``plain``: what JAX's autodiff saves for a plain program in a scan, scores
            in float32 and intermediates of norms and GELU.
        schedules: Members of ``SCHEDULES`` to try on a pipeline. ``1f1b``: one repeat, and each stage alternates
            forward and backward passes; ``interleaved``: the same with several repeats; ``zero_bubble``: ZB-H1, in
            which gradients of weights fill the bubble, without remat; ``gpipe``: all microbatches are in flight, and
            their logits. Without a pipeline, all of them take one microbatch at a time. ``breadth_first``: the schedule
            of the course's own step, which has all microbatches in flight on every mesh, recomputes the layers of a
            repeat together, needs layers divisible by stages and repeats, and has embedding and head on every stage.
        zeros: Stages of ZeRO to try: ``data`` splits only the batch (0), the optimizer's state (1), gradients as well,
            which each microbatch then reduce-scatters (2), or parameters too (3, FSDP).
        contexts, experts: Sizes of the axes ``context`` and ``expert`` to try; empty means every one that divides the
            devices, and for ``context`` leaves at least ``LEAST_CHUNK`` tokens in a chunk.
        context_attention: ``ring``: keys and values travel from device to device over ``context``, while the previous
            ones are used; ``gathered``: all are gathered first.
        sequence_parallel: Whether ``tensor`` splits the sequence wherever it does not split the features.
        dropout: Whether its masks are kept, one byte per element.

    Raises:
        ValueError: A name is unknown, or the margin is not a fraction; the message lists the valid values.
    """

    precision: str = "cast"
    optimizer: str = "adam"
    rings: bool = False
    share_loss: bool = False
    scanned: bool = False
    pairs: bool = False
    remats: tuple[str, ...] = ("none", "block")
    margin: float = MARGIN
    kernels: str = "fused"
    schedules: tuple[str, ...] = DEFAULT_SCHEDULES
    zeros: tuple[int, ...] = ZERO_STAGES
    contexts: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    context_attention: str = "ring"
    sequence_parallel: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        lists = [("remat", self.remats, self.remats_known), ("schedule", self.schedules, SCHEDULES)]
        lists.append(("ZeRO stage", self.zeros, ZERO_STAGES))
        single = [("precision", self.precision, PRECISIONS), ("optimizer", self.optimizer, OPTIMIZERS)]
        single += [("kernels", self.kernels, KERNELS), ("context attention", self.context_attention, CONTEXT)]
        for kind, values, known in [*lists, *((kind, (name,), known) for kind, name, known in single)]:
            names = ", ".join(map(str, known))
            if not values:
                raise ValueError(f"no {kind} is given; there are: {names}")
            if unknown := [name for name in values if name not in known]:
                raise ValueError(f"no {kind} is called {unknown[0]!r}; there are: {names}")
        for axis, numbers in (("context", self.contexts), ("expert", self.experts)):
            if any(number < 1 for number in numbers):
                raise ValueError(f"{axis} is {min(numbers)}, and it must be at least 1")
        if not 0 <= self.margin < float("inf"):
            raise ValueError(f"margin is {self.margin:g}: it is a share, 0 or more; 0.2 adds a fifth")

    @property
    def only_course(self) -> bool:
        """True if the schedule of the course's own step is the only one."""
        return self.schedules == ("breadth_first",)

    @property
    def remats_known(self) -> tuple[str, ...]:
        """The members of ``REMAT`` that its schedules support."""
        return BUDGETED if self.only_course else REMAT

    @property
    def element(self) -> int:
        """Bytes per element of the compute dtype."""
        return PRECISIONS[self.precision].activation

    @property
    def dtype(self) -> str:
        """Operand dtype of matmuls, in StableHLO's name."""
        return {4: "f32", 2: "bf16"}[self.element]


DEFAULT = Training()
# The step of the chapters, whose programs the analyses see.
COURSE = Training(rings=True, share_loss=True, pairs=True, kernels="plain", schedules=("breadth_first",), zeros=(0, 3))
