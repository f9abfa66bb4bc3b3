"""Models, axes and layouts as the functions of ``transformer_3d`` receive them.

The layout of leaves is the answer of ``init_3d``: other functions that need it receive it with the case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, ModelSizes
from autograder.contract.case_builders import decode_specs, params_by_head
from course.layout import Options

# In the order in which the functions receive them, whatever names a case uses.
Axes = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Sizes(ModelSizes):
    """A Transformer over three axes, and the options for computing a step.

    Attributes:
        rows: Sequences of a microbatch at each place on the data axis.
        num_microbatches: Number that enter a pipeline in a step.
        num_repeats: Number of times that each goes around.
        min_size: Leaves with fewer elements are not split over the data axis.
        rings: Whether activations travel in rings.
        remat: Whether layers are recomputed in the backward pass.
        bfloat16: Whether dense layers compute in bfloat16.
        steps: Number of steps.
        rate_scale: The factor of the drawn learning rate.
        largest_norm: The factor of the drawn clipping norm; 0 disables clipping.
    """

    rows: int = 1
    num_microbatches: int = 2
    num_repeats: int = 2
    min_size: int = 64
    rings: bool = False
    remat: bool = True
    bfloat16: bool = False
    steps: int = 1
    rate_scale: float = 0.5
    largest_norm: float = 0.0


def axes_of(case: Case[Any]) -> Axes:
    """The axes of data, of stages, and of features."""
    data, pipe, tensor = case.mesh
    return data, pipe, tensor


def sizes_of(case: Case[Any]) -> tuple[int, int, int]:
    """Sizes of these axes."""
    data, pipe, tensor = (case.mesh[axis] for axis in axes_of(case))
    return data, pipe, tensor


def options_of(case: Case[Sizes]) -> Options:
    """The options for computing a step of the case."""
    s = case.sizes
    return Options(
        num_microbatches=s.num_microbatches,
        rings=s.rings,
        remat=s.remat,
        dtype="bfloat16" if s.bfloat16 else "float32",
        parallel=s.parallel,
        rate=s.dropout,
    )


def in_stages(tree: Any, case: Case[Sizes]) -> Any:
    """Leaves under ``layers`` as ``[num_repeats, num_stages, layers_per_stage, ...]``; arrays or shapes."""
    grid = case.sizes.num_repeats, sizes_of(case)[1], -1

    def stack(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda a: a.reshape(*grid, *a.shape[1:]), leaf)
        return leaf.reshape(*grid, *leaf.shape[1:])

    return {**tree, "layers": jax.tree.map(stack, tree["layers"])}


def stacked_of(case: Case[Sizes]) -> Any:
    """Shapes of the parameters in stages."""
    return in_stages(params_by_head(case), case)


def axes_named(spec: P, dim: int) -> tuple[str, ...]:
    """The axes over which a spec splits a dim."""
    entry = spec[dim] if dim < len(spec) else None
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def named(spec: P) -> set[str]:
    """The axes that a spec names."""
    return {axis for dim in range(len(spec)) for axis in axes_named(spec, dim)}


def given_specs(case: Case[Sizes]) -> Any:
    """The spec of each leaf of the parameters in stages, as given by the case."""
    return decode_specs(case, stacked_of(case))


def rows_of(case: Case[Sizes]) -> int:
    """Number of sequences in the whole batch."""
    return case.sizes.rows * case.sizes.num_microbatches * sizes_of(case)[0]
