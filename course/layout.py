"""Who holds what of a Transformer's parameters that are split over an axis, as the tensor-parallel chapters split it."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P


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
