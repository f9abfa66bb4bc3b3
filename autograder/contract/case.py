"""Cases: a mesh, and the sizes of everything a function receives on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar

import msgspec

# The name of the case that official grading draws.
UNSEEN = "unseen"


class Mesh(dict[str, int]):
    """Axis sizes by name, in order; immutable and hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and list(self.items()) == list(other.items())


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Base class for each chapter's sizes, thresholds and choices; the chapter's functions define their meaning."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some sizes changed."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class ModelSizes(Sizes):
    """Sizes of one of the course's models: a Transformer if ``seq`` is given, else an MLP.

    Attributes:
        width: Width of the activations between layers.
        hidden: Width of each layer's hidden activations.
        num_layers: Number of layers.
        features: An MLP's inputs, and its outputs too if ``outputs`` is 0.
        outputs: An MLP's outputs.
        vocab: A Transformer's vocabulary.
        seq: Tokens in a sequence.
        max_seq: Number of positions a Transformer embeds; ``seq`` if it is 0.
        num_heads: Number of a Transformer's attention heads.
        dropout: Dropout rate.
        parallel: True if the attention and MLP of a Transformer block run in parallel.
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
        """The model's sizes only, so that cases that differ in other sizes share a model."""
        return ModelSizes(**{entry.name: getattr(self, entry.name) for entry in fields(ModelSizes)})


@dataclass(frozen=True, kw_only=True)
class Ordered(Sizes):
    """Sizes of a function whose chunks a course may order differently (``contract.orders``).

    Attributes:
        order: The name of the order; empty for the default.
    """

    order: str = ""


S = TypeVar("S", bound=Sizes, covariant=True)
T = TypeVar("T", bound=Sizes)


@dataclass(frozen=True)
class Case(Generic[S]):
    """A mesh and the sizes of everything a function receives on it; hashable.

    Attributes:
        name: The name learners see: ``data=8``.
        mesh: Axis sizes by name.
        sizes: Every other size, threshold and choice.
        quick: True if ``check`` runs it before the other cases.
        given: Plain data that the wrapper needs and must not compute, such as how leaves are split (``Task.given``).
    """

    name: str
    mesh: dict[str, int]
    sizes: S
    quick: bool = False
    given: dict[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", Mesh(self.mesh))

    @classmethod
    def on(cls, mesh: Mapping[str, int], sizes: T, note: str = "", *, quick: bool = False) -> Case[T]:
        """The case named by its mesh, and by a note that tells it from others: ``data=8, width 4096``."""
        case = Case("", Mesh(mesh), sizes, quick)
        return replace(case, name=f"{case.mesh_text}, {note}" if note else case.mesh_text)

    @property
    def mesh_text(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())

    @property
    def place(self) -> str:
        """The case in a sentence: ``on mesh data=8``; with its sizes if it is drawn, by name if that says more."""
        if self.name == UNSEEN:
            known = vars(self.sizes).items()
            sizes = ", ".join(f"{name} {value}" for name, value in known if value and type(value) in (int, float))
            return f"on mesh {self.mesh_text}{f' ({sizes})' if sizes else ''}"
        return f"on mesh {self.mesh_text}" if self.name == self.mesh_text else f"in the case {self.name!r}"

    def with_sizes(self, **changes: Any) -> Self:
        """Return a copy of the case with some sizes changed."""
        return replace(self, sizes=self.sizes.replace(**changes))


def to_plain(case: Case[Any]) -> dict[str, Any]:
    """Convert the case to JSON-compatible data."""
    return asdict(case)


def from_plain(plain: dict[str, Any], sizes: type[S]) -> Case[S]:
    """Build the case from JSON data; omitted sizes take their defaults.

    Raises:
        msgspec.ValidationError: A size is missing or of another type.
    """
    return Case(**{**plain, "sizes": msgspec.convert(plain["sizes"], sizes)})
