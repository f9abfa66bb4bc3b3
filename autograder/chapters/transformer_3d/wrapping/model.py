"""Models, axes and who holds what, as the functions of ``transformer_3d`` are given them.

How leaves are split is the answer of ``init_3d``: where another function is given it, it comes with the case.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.wrapping import Case
from course.layout import Options
from course.model import Model, split_heads, transformer
from course.program.program import path_name

# In the order in which the functions are given them, whatever a case calls them.
Axes = tuple[str, str, str]
_OF_MODEL = ("width", "hidden", "num_layers", "num_heads", "vocab", "max_seq", "dropout", "parallel")


def axes_of(case: Case) -> Axes:
    """The axes of data, of stages, and of features."""
    data, pipe, tensor = case.mesh
    return data, pipe, tensor


def sizes_of(case: Case) -> tuple[int, int, int]:
    """Their sizes."""
    data, pipe, tensor = (case.mesh[axis] for axis in axes_of(case))
    return data, pipe, tensor


def options_of(case: Case) -> Options:
    """How the case wants the step to be computed."""
    s = case.sizes
    return Options(
        num_microbatches=s["num_microbatches"],
        rings=bool(s["rings"]),
        remat=bool(s["remat"]),
        dtype="bfloat16" if s["bfloat16"] else "float32",
        parallel=bool(s["parallel"]),
        rate=s["dropout"] / 100,
    )


def model_sizes(case: Case) -> tuple[tuple[str, int], ...]:
    """Those of the case's sizes that its model has."""
    return tuple((name, case.sizes[name]) for name in _OF_MODEL)


@lru_cache(maxsize=64)
def model_of(sizes: tuple[tuple[str, int], ...]) -> Model:
    """The course's model on one device."""
    s = dict(sizes)
    return transformer(width=s["width"], hidden=s["hidden"], num_layers=s["num_layers"], num_heads=s["num_heads"],
                       vocab=s["vocab"], max_seq=s["max_seq"], dropout=s["dropout"] / 100,
                       parallel=bool(s["parallel"]))  # fmt: skip


def whole_of(case: Case) -> Any:
    """Shapes of the whole parameters, heads apart, layers stacked: what ``init_3d`` is given."""
    return _whole_of(model_sizes(case))


@lru_cache(maxsize=64)
def _whole_of(sizes: tuple[tuple[str, int], ...]) -> Any:
    def init():
        params = model_of(sizes).init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], dict(sizes)["num_heads"])
        return params

    return jax.eval_shape(init)


def in_stages(tree: Any, case: Case) -> Any:
    """Leaves under ``layers`` as ``[num_repeats, num_stages, layers_per_stage, ...]``; arrays or shapes."""
    grid = case.sizes["num_repeats"], sizes_of(case)[1], -1

    def stack(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda a: a.reshape(*grid, *a.shape[1:]), leaf)
        return leaf.reshape(*grid, *leaf.shape[1:])

    return {**tree, "layers": jax.tree.map(stack, tree["layers"])}


def stacked_of(case: Case) -> Any:
    """Shapes of the parameters in stages."""
    return in_stages(whole_of(case), case)


def axes_named(spec: P, dim: int) -> tuple[str, ...]:
    """The axes over which a spec splits a dim."""
    entry = spec[dim] if dim < len(spec) else None
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def named(spec: P) -> set[str]:
    """The axes that a spec names."""
    return {axis for dim in range(len(spec)) for axis in axes_named(spec, dim)}


def given_specs(case: Case) -> Any:
    """The spec of each leaf of the parameters in stages, as the case says it: axes for each dim, by the leaf's name."""

    def spec(path, _):
        dims = case.given["specs"][path_name("", path)]
        return P(*(None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in dims))

    return jax.tree.map_with_path(spec, stacked_of(case))


def rows_of(case: Case) -> int:
    """Sequences in the whole batch."""
    return case.sizes["rows"] * case.sizes["num_microbatches"] * sizes_of(case)[0]


def batch_shapes(case: Case, *steps: int) -> dict[str, Any]:
    """Of one batch, or of a stack of them."""
    shape = (*steps, rows_of(case), case.sizes["seq"])
    return {name: jax.ShapeDtypeStruct(shape, np.int32) for name in ("inputs", "targets")}
