"""Validate the structure of a learner's return values; messages give the actual and the expected structure."""

from __future__ import annotations

import math
from types import GeneratorType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case
from autograder.contract.text import count_of
from autograder.contract.wrapping import Mismatch
from course.mesh import varying_axes
from course.program.program import path_name, spec_of


def show_spec(spec: P) -> str:
    """Format a spec as ``P('data')``, without the comma of a tuple."""
    return str(spec).replace(",)", ")")


def describe(x: Any) -> str:
    """Describe a value in a learner's terms."""
    if x is None:
        return "None (is a return missing?)"
    if type(x) in (tuple, list):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, GeneratorType):
        return "a generator (return a tuple of what it yields)"
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    kind = type(x).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def broadcast(measured: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """End a sentence about a wrong shape; say so if arrays of other shapes were combined without an error."""
    try:
        larger = np.broadcast_shapes(measured, expected) == measured != expected
    except ValueError:
        return "."
    if not larger or math.prod(measured) <= math.prod(expected):
        return "."
    return (
        f": broadcasting gave it {list(measured)}, since arrays whose shapes differ are combined without an error if "
        "a dim is missing or has size 1. Which operand has a different shape from what you think?"
    )


def check_spec(where: str, shard: Any, spec: Any, axes: tuple[str, ...], ndim: int | None = None) -> None:
    """Require a spec that this part of a leaf, split over some of ``axes``, can have.

    Args:
        where: The leaf, for the message.
        shard: The part.
        spec: Its spec.
        axes: The axes that a spec may name.
        ndim: The number of dims of the whole leaf, if the part may have a different number.

    Raises:
        Mismatch: It is not a spec, names other axes, has too many entries, or says that a part that differs is whole.
    """
    if not isinstance(spec, P):
        raise Mismatch(f"{where}: its spec is {describe(spec)}, expected a PartitionSpec")
    shown = f"its spec {show_spec(spec)}"
    if ndim is not None and getattr(shard, "ndim", None) != ndim:
        raise Mismatch(
            f"{where}: the part is {describe(shard)} with {shown}, expected one with {count_of(ndim, 'dim')}"
        )
    named = {a for entry in spec_of(spec, max(len(spec), shard.ndim)) for a in entry}
    if not named <= {*axes}:
        allowed = f"the axis to split over is {axes[0]!r}" if len(axes) == 1 else f"the axes to split over are {axes}"
        raise Mismatch(f"{where}: {shown} names {sorted(named - {*axes})}; {allowed}")
    if len(spec) > shard.ndim:
        raise Mismatch(f"{where}: {shown} has {len(spec)} entries and the leaf has {shard.ndim} dims")
    differs = varying_axes(shard) - named
    if differs:
        raise Mismatch(
            f"{where}: the part differs from device to device over {', '.join(sorted(differs))}, and {shown} says that "
            "it is whole. Does the spec say which dim you split?"
        )


def same_tree(what: str, tree: Any, like: Any, is_leaf: Any = None) -> Any:
    """Return ``tree`` if it has the structure of ``like``.

    Raises:
        Mismatch: It does not; the message names the missing or unknown leaves.
    """
    if jax.tree.structure(tree, is_leaf=is_leaf) == jax.tree.structure(like):
        return tree
    if not isinstance(tree, dict):
        raise Mismatch(f"{what}: measured {describe(tree)}, expected a tree of dicts like the input's")
    measured, expected = (
        [path_name("", path) for path, _ in jax.tree.leaves_with_path(t, is_leaf=is_leaf)] for t in (tree, like)
    )
    missing, unknown = sorted(set(expected) - set(measured)), sorted(set(measured) - set(expected))
    raise Mismatch(
        f"{what}: measured a tree of {count_of(len(measured), 'leaf', 'leaves')}, expected one like the input's, of "
        f"{len(expected)}; "
        f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"[:600]
    )


def same_shapes(name: str, tree: Any, like: Any, case: Case[Any]) -> Any:
    """Return ``tree`` if it has the structure of ``like``, and the shape and dtype of every leaf.

    Raises:
        Mismatch: They differ; the message names the leaf, the mesh, and both values.
    """
    if hasattr(like, "shape") and not hasattr(tree, "shape"):
        raise Mismatch(f"{name} returned {describe(tree)} {case.place}, expected {describe(like)}")
    same_tree(name, tree, like)
    for (path, leaf), struct in zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(like), strict=True):
        if not hasattr(leaf, "shape") or (leaf.shape, leaf.dtype) != (struct.shape, struct.dtype):
            shape = getattr(leaf, "shape", ())
            expected = f"expected {describe(struct)}{broadcast(shape, struct.shape)}"
            if not path:
                raise Mismatch(f"{name} returned {describe(leaf)} {case.place}, {expected}")
            raise Mismatch(f"leaf {path_name('', path)} {case.place}: {name} gives {describe(leaf)}, {expected}")
    return tree


def scalar(name: str, result: Any, what: str) -> None:
    """Require a scalar.

    Raises:
        Mismatch: It is not a scalar; ``what`` describes the expected value.
    """
    if not hasattr(result, "shape") or result.shape != ():
        raise Mismatch(f"{name} returned {describe(result)}, expected a scalar, {what}")


def tuple_of(name: str, result: Any, *parts: str) -> Any:
    """Return ``result`` if it is a tuple of as many elements as ``parts``.

    Raises:
        Mismatch: It is not; the message names its ``parts``.
    """
    if not isinstance(result, tuple) or len(result) != len(parts):
        raise Mismatch(f"{name} returned {describe(result)}, expected a tuple ({', '.join(parts)})")
    return result


def state_and_loss(name: str, what: str, result: Any, like: Any, case: Case[Any]) -> tuple[Any, Any]:
    """Return a step's results: a tree like ``like``, called ``what`` in messages, and a scalar.

    Raises:
        Mismatch: The step returned anything else.
    """
    state, loss = tuple_of(name, result, what, "loss")
    same_shapes(name, same_tree(what, state, like), like, case)
    if not hasattr(loss, "shape") or loss.shape != ():
        raise Mismatch(f"{name} returned {describe(loss)} as its loss, expected a scalar, the mean over all rows")
    return state, loss
