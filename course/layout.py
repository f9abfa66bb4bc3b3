"""The layout of a Transformer whose features are split over an axis, as in the tensor-parallel chapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


# --8<-- [start:options]
@dataclass(frozen=True)
class Options:
    """How a step over ``data`` x ``pipe`` x ``tensor`` computes what it computes; all combinations are allowed.

    Attributes:
        num_microbatches: Parts that the rows of a pipeline are taken in.
        rings: Whether the activations of split layers travel in rings while others are multiplied.
        remat: Whether of each tick only the input is kept, and weights are gathered again in the backward pass.
        dtype: What dense layers multiply, and what travels of their activations and weights: ``float32`` or
            ``bfloat16``. Everything else is float32.
        parallel: Whether attention and MLP of a layer are side by side.
        rate: Share of elements that dropout drops.
    """

    num_microbatches: int = 1
    rings: bool = False
    remat: bool = True
    dtype: str = "float32"
    parallel: bool = False
    rate: float = 0.0


# --8<-- [end:options]


def split_dim(names: tuple[str, ...]) -> int | None:
    """The dim of a leaf that is split, of one layer and with heads apart; None for a leaf that every device holds.

    Args:
        names: The leaf's path: ``("layers", "attention", "qkv", "kernel")``.
    """
    match names:
        case (*_, "qkv", "kernel"):
            return 2
        case (*_, "attention", "out", "kernel") | (*_, "down", "kernel") | (*_, "token"):
            return 0
        case (*_, "up" | "out", "kernel"):
            return 1
        case (*_, "up" | "out", "bias"):
            return 0
    return None


# --8<-- [start:specs]
def tensor_specs(params: Any, axis_name: str) -> Any:
    """The ``PartitionSpec`` of each leaf: of a Transformer with stacked ``layers``, of its parts, or of one layer.

    Args:
        params: Arrays or shapes; attention as ``course.model.split_heads`` gives it.
        axis_name: The mesh axis.
    """

    def spec(path, _):
        names = tuple(str(entry.key) for entry in path)
        dim = split_dim(names)
        return P() if dim is None else P(*[None] * (dim + ("layers" in names)), axis_name)

    return jax.tree.map_with_path(spec, params)


# --8<-- [end:specs]


def along(spec: P, axis_name: str) -> P:
    """The part of a spec that is of one axis: ``P(None, ("tensor", "data"))`` along ``data`` is ``P(None, "data")``."""
    dims = [axis_name if axis_name in (entry if isinstance(entry, tuple) else (entry,)) else None for entry in spec]
    return P(*dims) if axis_name in dims else P()
