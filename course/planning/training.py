"""The settings of a planned step that are the same on every mesh."""

from __future__ import annotations

from dataclasses import dataclass

from course.budget import OPTIMIZERS, PLANS
from course.budget import REMAT as BUDGETED

# Margin for workspaces, fragmentation and buffers of collectives, without closed forms. As in ``meshcraft memory``.
MARGIN = 0.2
REMAT = (*BUDGETED, "half")
KERNELS = ("fused", "materialised", "plain")
SCHEDULES = ("1f1b", "gpipe", "breadth_first")


@dataclass(frozen=True)
class Training:
    """How a model is trained, whatever the mesh.

    Attributes:
        plan: Dtypes, one of ``course.budget.PLANS``.
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
        schedule: ``1f1b``: interleaved if a stage has several repeats; ``gpipe``: all microbatches are in flight,
            and their logits; both take one microbatch at a time without a pipeline. ``breadth_first``: the
            schedule of the course's own step, which has all in flight on every mesh, recomputes the layers of a repeat
            together, needs layers divisible by stages and repeats, and has embedding and head on every stage.
        zero1: Whether ``data`` splits the optimizer's state if it does not split everything.
        zero2: The same, and gradients as well: each microbatch then reduce-scatters its own.
        sequence_parallel: Whether ``tensor`` splits the sequence wherever it does not split the features.
        dropout: Whether its masks are kept, one byte per element.

    Raises:
        ValueError: A name is unknown, or the margin is not a fraction; the message lists the valid values.
    """

    plan: str = "cast"
    optimizer: str = "adam"
    rings: bool = False
    share_loss: bool = False
    scanned: bool = False
    pairs: bool = False
    remats: tuple[str, ...] = ("none", "block")
    margin: float = MARGIN
    kernels: str = "fused"
    schedule: str = "1f1b"
    zero1: bool = False
    zero2: bool = False
    sequence_parallel: bool = True
    dropout: bool = False

    def __post_init__(self) -> None:
        names = [
            ("plan", self.plan, PLANS),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("schedule", self.schedule, SCHEDULES),
        ]
        names += [("kernels", self.kernels, KERNELS), *(("remat", remat, self.remats_known) for remat in self.remats)]
        for what, given, known in names:
            if given not in known:
                raise ValueError(f"no {what} is called {given!r}; there are: {', '.join(known)}")
        if not self.remats:
            raise ValueError(f"no remat is given; there are: {', '.join(self.remats_known)}")
        if not 0 <= self.margin < float("inf"):
            raise ValueError(f"margin is {self.margin:g}: it is a share, 0 or more; 0.2 adds a fifth")

    @property
    def course(self) -> bool:
        """True for the schedule of the course's own step."""
        return self.schedule == "breadth_first"

    @property
    def splits_optimizer(self) -> bool:
        """True if ``data`` splits the optimizer's state, with FSDP and without."""
        return self.zero1 or self.zero2

    @property
    def remats_known(self) -> tuple[str, ...]:
        """The members of ``REMAT`` that its schedule supports."""
        return BUDGETED if self.course else REMAT

    @property
    def element(self) -> int:
        """Bytes per element of the compute dtype."""
        return PLANS[self.plan].activation

    @property
    def dtype(self) -> str:
        """Operand dtype of matrix products, in StableHLO's name."""
        return {4: "f32", 2: "bf16"}[self.element]


DEFAULT = Training()
# The step of the chapters, whose programs the analyses see.
COURSE = Training(rings=True, share_loss=True, pairs=True, kernels="plain", schedule="breadth_first")
