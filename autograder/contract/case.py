"""Cases: a mesh, and the sizes of everything that a function is given on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar

import msgspec

# The name of the case that official grading draws.
UNSEEN = "unseen"


class Mesh(dict[str, int]):
    """Axis sizes by name, in order; hashable, and never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and list(self.items()) == list(other.items())


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Base of each chapter's sizes, thresholds and choices; a chapter's functions know what its fields mean."""

    def but(self, **changes: Any) -> Self:
        """The same sizes with some changed."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class ModelSizes(Sizes):
    """A model of the course: a Transformer where ``seq`` is given, else an MLP.

    Attributes:
        width: Of the activations between layers.
        hidden: Of each layer's hidden activations.
        num_layers: How many layers there are.
        features: An MLP's inputs, and its outputs too where ``outputs`` is 0.
        outputs: An MLP's outputs.
        vocab: A Transformer's vocabulary.
        seq: Tokens in a sequence.
        max_seq: Positions that a Transformer knows; ``seq`` where it is 0.
        num_heads: Of a Transformer's attention.
        dropout: The rate.
        parallel: Whether attention and MLP of a Transformer's block run side by side.
    """

    width: int
    hidden: int
    num_layers: int = 0
    features: int = 0
    outputs: int = 0
    vocab: int = 0
    seq: int = 0
    max_seq: int = 0
    num_heads: int = 2
    dropout: float = 0.0
    parallel: bool = False

    @property
    def model(self) -> ModelSizes:
        """These sizes alone: cases that differ in others share a model."""
        return ModelSizes(**{entry.name: getattr(self, entry.name) for entry in fields(ModelSizes)})


@dataclass(frozen=True, kw_only=True)
class Ordered(Sizes):
    """Sizes of a function whose chunks a course may ask for in another order (``contract.orders``).

    Attributes:
        order: The name of the order; empty for the usual one.
    """

    order: str = ""


S = TypeVar("S", bound=Sizes, covariant=True)


@dataclass(frozen=True)
class Case(Generic[S]):
    """A mesh and the sizes of everything that a function is given on it; hashable.

    Attributes:
        name: What a learner reads: ``data=8``.
        mesh: Axis sizes by name.
        sizes: Every other size, threshold and choice.
        quick: Whether ``check`` begins with it, and goes on to the others once it passes.
        given: Plain data that the wrapper needs and must not compute, such as how leaves are split (``Task.given``).
    """

    name: str
    mesh: dict[str, int]
    sizes: S
    quick: bool = False
    given: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Mesh(self.mesh))

    @property
    def mesh_text(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())

    def but(self, **changes: Any) -> Self:
        """The case with some of its sizes changed."""
        return replace(self, sizes=self.sizes.but(**changes))


def to_plain(case: Case[Any]) -> dict[str, Any]:
    """The case as JSON has it."""
    return asdict(case)


def from_plain(plain: dict[str, Any], sizes: type[S]) -> Case[S]:
    """The case from JSON; sizes that are left out have their defaults.

    Raises:
        msgspec.ValidationError: A size is missing or of another type.
    """
    return Case(**{**plain, "sizes": msgspec.convert(plain["sizes"], sizes)})
