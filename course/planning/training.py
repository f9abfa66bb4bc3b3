"""The parts of a planned step that are the same on every mesh."""

from __future__ import annotations

from dataclasses import dataclass

from course.budget import OPTIMIZERS, PLANS, REMAT

# Added for what no closed form has: workspaces, fragmentation, buffers of collectives. As in ``meshcraft memory``.
MARGIN = 0.2


@dataclass(frozen=True)
class Training:
    """How a model is trained, whatever the mesh.

    Attributes:
        plan: Dtypes, one of ``course.budget.PLANS``.
        optimizer: One of ``course.budget.OPTIMIZERS``.
        rings: Whether layers that are split over ``tensor`` send by rings, beside their products.
        share_loss: Whether every stage of a pipeline has its share of the loss, where the microbatches can be shared;
            else the last one has it, and the others wait.
        scanned: Whether the layers of a repeat run in a scan, which then saves what they keep.
        pairs: Whether the weights of two repeats are put side by side for each block of ticks.
        remats: What may be tried of ``course.budget.REMAT``.
        margin: Of memory, as a share of what is counted.

    Raises:
        ValueError: A name is unknown, or the margin is no share; the message says what there is.
    """

    plan: str = "cast"
    optimizer: str = "adam"
    rings: bool = True
    share_loss: bool = True
    scanned: bool = False
    pairs: bool = True
    remats: tuple[str, ...] = ("none", "block")
    margin: float = MARGIN

    def __post_init__(self) -> None:
        for what, given, known in (("plan", self.plan, PLANS), ("optimizer", self.optimizer, OPTIMIZERS)):
            if given not in known:
                raise ValueError(f"no {what} is called {given!r}; there are: {', '.join(known)}")
        for remat in self.remats:
            if remat not in REMAT:
                raise ValueError(f"no remat is called {remat!r}; there are: {', '.join(REMAT)}")
        if not self.remats:
            raise ValueError(f"no remat is given; there are: {', '.join(REMAT)}")
        if not 0 <= self.margin < float("inf"):
            raise ValueError(f"margin is {self.margin:g}: it is a share, 0 or more; 0.2 adds a fifth")

    @property
    def element(self) -> int:
        """Bytes of an element of what is computed with."""
        return PLANS[self.plan].activation

    @property
    def dtype(self) -> str:
        """Of matrix products, in StableHLO's name."""
        return {4: "f32", 2: "bf16"}[self.element]


DEFAULT = Training()
