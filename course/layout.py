"""The layout of a Transformer whose features are split over an axis, as in the tensor-parallel chapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P


# --8<-- [start:options]
@dataclass(frozen=True)
class Options:
    """Options for computing a step over ``data`` x ``pipe`` x ``tensor``; all combinations are allowed.

    Attributes:
        num_microbatches: Number of parts that a pipeline splits its rows into.
        rings: Whether the activations of split layers travel in rings that overlap with the matmuls.
        remat: Whether only the input of each tick is kept, and weights are gathered again in the backward pass.
        dtype: Dtype of the dense layers' operands and of the activations and weights they send: ``float32`` or
            ``bfloat16``. Everything else is float32.
        parallel: Whether attention and MLP of a layer run in parallel.
        rate: Dropout rate: the share of elements that are dropped.
    """

    num_microbatches: int = 1
    rings: bool = False
    remat: bool = True
    dtype: str = "float32"
    parallel: bool = False
    rate: float = 0.0


# --8<-- [end:options]


def split_dim(names: tuple[str, ...]) -> int | None:
    """The split dim of a leaf, for one layer with a separate heads dim; None for a leaf resident on every device.

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
    """The ``PartitionSpec`` of each leaf of a Transformer with stacked ``layers``, of its parts, or of one layer.

    Args:
        params: Arrays or shapes; attention as returned by ``course.model.split_heads``.
        axis_name: The mesh axis.
    """

    def spec(path, _):
        names = tuple(str(entry.key) for entry in path)
        dim = split_dim(names)
        return P() if dim is None else P(*[None] * (dim + ("layers" in names)), axis_name)

    return jax.tree.map_with_path(spec, params)


# --8<-- [end:specs]


def along(spec: P, axis_name: str) -> P:
    """The part of a spec that names one axis: ``P(None, ("tensor", "data"))`` along ``data`` is ``P(None, "data")``."""
    dims = [axis_name if axis_name in (entry if isinstance(entry, tuple) else (entry,)) else None for entry in spec]
    return P(*dims) if axis_name in dims else P()
