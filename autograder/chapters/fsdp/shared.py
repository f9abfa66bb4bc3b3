"""What the functions of ``fsdp`` share: who holds what of a model, and what one travel of all its parts sends."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from autograder.chapters.closed_forms import split_spec
from autograder.contract.cases import axis_of, axis_size, params_of
from autograder.contract.task import Case, Evidence
from course.program import Leaf
from course.program.program import path_name


def specs_of(case: Case) -> tuple[Any, Any]:
    """Shapes of the model's parameters, and their specs; the dim that stacks layers is never split."""
    shapes = params_of(case)
    size, low, axis = axis_size(case), case.sizes["min_size"], axis_of(case)
    specs = {
        part: jax.tree.map(lambda s, skip=int(part == "layers"): split_spec(s.shape, size, low, axis, skip), tree)
        for part, tree in shapes.items()
    }
    return shapes, specs


def given_specs(case: Case) -> dict[str, Any]:
    """What the wrappers of functions that take shards are given: how leaves are split."""
    return as_given(specs_of(case)[1])


def as_given(specs: Any) -> dict[str, Any]:
    """Specs as plain data, by the leaf's path."""
    return {"specs": {path_name("", path): list(spec) for path, spec in jax.tree.leaves_with_path(specs)}}


def mean_or_own(stacked: Any, specs: Any) -> Any:
    """What a device keeps of the gradients of all: its part of their mean, or its own where the leaf is whole."""
    return jax.tree.map(lambda g, spec: np.mean(g, 0, np.float64).astype(g.dtype) if len(spec) else g, stacked, specs)


def whole_and_split(e: Evidence, prefix: str = "shards") -> tuple[list[Leaf], list[Leaf]]:
    """The leaves under ``prefix`` that stay whole, and those that are split."""
    leaves = [leaf for leaf in e.inputs if leaf.name.startswith(prefix + "/")]
    return [leaf for leaf in leaves if not any(leaf.spec)], [leaf for leaf in leaves if any(leaf.spec)]


def bytes_of(leaves: list[Leaf]) -> int:
    """Of whole float32 leaves together."""
    return sum(4 * math.prod(leaf.shape) for leaf in leaves)


def ring_bytes(e: Evidence, prefix: str = "shards") -> float:
    """(n-1)/n of the bytes of each split leaf: what a device sends in an all-gather or a reduce-scatter of them."""
    n = axis_size(e.case)
    return (n - 1) / n * bytes_of(whole_and_split(e, prefix)[1])
