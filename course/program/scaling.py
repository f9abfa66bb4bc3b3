"""Allowed differences in one operation between two sizes of a program: it does the same, to larger arrays.

The complete rules:

- No dim of any value is smaller at the large size, and none is empty at only one size.
- A slice, a window or an update is at least the same fraction of its array; an array that is padded or cut by padding
  keeps its fraction too, and zero padding stays zero. A slice may also take whole pieces out of a concatenated array,
  and padding put them back: see ``pieces``.
- The part that a loop takes or updates per trip may be smaller if the number of trips grows accordingly.
- A dim of one element that is summed, contracted or repeated is one element at both sizes.
- A part that is only multiplied by zeros may be any: it has no effect, as in ``0 * x[0]``, which varies like ``x``. So
  may the padding of zeros, which is its gradient.
- A gather or scatter moves at least the same fraction of the array, or grows its places as much as integer inputs.
- A product with a matrix that does not depend on inputs, and is not all zero, keeps its fraction of the other operand:
  it does not select.
- Constants are zero, infinite or negative at both sizes or at neither; truth values are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from course.program.ir import Op, Value, dims_of
from course.program.pieces import Joined

# Attributes that grow with arrays; all others are the same at both sizes.
GROWING = {
    "slice": {"start_indices", "limit_indices"},
    "dynamic_slice": {"slice_sizes"},
    "gather": {"slice_sizes"},
    "pad": {"edge_padding_low", "edge_padding_high"},
    "reduce_window": {"window_dimensions", "padding"},
    "constant": {"value", "zero", "signs"},
}
_SMALLER = "keeps a smaller part at the large size than at the small one"
_ONE = "takes a dim of one element at one size for a dim of many at the other"


def same_attributes(ours: Op, theirs: Op) -> bool:
    """Check that all attributes that do not grow are equal."""
    grow = GROWING.get(ours.kind, set())
    names = (ours.attributes.keys() | theirs.attributes.keys()) - grow
    return all(_equal(ours.attributes.get(name), theirs.attributes.get(name)) for name in names)


def _equal(one: Any, other: Any) -> bool:
    return one is other or (np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other)


def shrinks(small: Value, large: Value) -> bool:
    """Return True if a value has another rank, or a smaller dim, at the large size."""
    if len(small.shape) != len(large.shape):
        return True
    return any(now < before or (before == 0 < now) for before, now in zip(small.shape, large.shape, strict=True))


def character(constant: Op) -> Any:
    """The properties of a constant that are the same at all sizes: zeros, signs, infinities, or truth values."""
    return constant.attributes.get("signs", constant.attributes.get("zero"))


def out_of_scale(
    ours: Op, theirs: Op, from_inputs: set[Value], idle: set[Value], integer_growth: float, joined: Joined
) -> str:
    """Describe how an operation differs at the large size; empty if it does the same.

    Args:
        ours, theirs: The operation at the small and at the large size.
        from_inputs: Values of the large size that depend on an input.
        idle: Values of the large size without an effect: see ``effects``.
        integer_growth: Growth of the slowest-growing dim of integer inputs; infinite if there is none.
        joined: Values of the large size that are concatenated from pieces.
    """
    rule = _RULES.get(theirs.kind)
    if theirs.kind in _TAKES and theirs.results[0] in idle:
        return ""
    if theirs.kind in ("gather", "scatter"):
        return _places(ours, theirs, from_inputs, integer_growth)
    if theirs.kind == "dot_general":
        return _product(ours, theirs, from_inputs)
    if theirs.kind in ("slice", "dynamic_slice") and _whole_pieces(ours, theirs, joined):
        return ""
    if theirs.kind == "pad" and joined.put_back(ours, theirs):
        return ""
    return rule(ours, theirs) if rule else ""


def _whole_pieces(ours: Op, theirs: Op, joined: Joined) -> bool:
    """Check that a slice keeps its fraction of every dim but one, where it takes whole pieces, or is joined again."""
    pieces = joined.pieces.get(theirs.operands[0])
    if theirs.results[0] in joined.turned:
        return True
    if not pieces or not pieces.ends or not joined.takes_whole(ours, theirs, pieces):
        return False
    part, whole = parts_of(ours, theirs)
    return _keeps_share(part[: pieces.dim] + part[pieces.dim + 1 :], whole[: pieces.dim] + whole[pieces.dim + 1 :])


def _keeps_share(part: Iterable[tuple[int, int]], whole: Iterable[tuple[int, int]]) -> bool:
    """Check that each dim of a part, small and large, is no smaller a fraction of the whole."""
    pairs = zip(part, whole, strict=True)
    return all(now * of_before >= before * of_now for (before, now), (of_before, of_now) in pairs)


def _dims(ours: Value, theirs: Value) -> list[tuple[int, int]]:
    """Each dim at the small and at the large size."""
    return list(zip(ours.shape, theirs.shape, strict=True))


def parts_of(ours: Op, theirs: Op) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The dims of a slice or an update, and of the array that it is a part of, at both sizes."""
    ops = ours, theirs
    part = [op.operands[1] if op.kind == "dynamic_update_slice" else op.results[0] for op in ops]
    return _dims(*part), _dims(*(op.operands[0] for op in ops))


def _part(ours: Op, theirs: Op) -> str:
    return "" if _keeps_share(*parts_of(ours, theirs)) else _SMALLER


def _pad(ours: Op, theirs: Op) -> str:
    operand_dims, result_dims = _dims(ours.operands[0], theirs.operands[0]), _dims(ours.results[0], theirs.results[0])
    kept_dims = []
    names = "edge_padding_low", "edge_padding_high"
    edges = [list(zip(ours.attributes[name], theirs.attributes[name], strict=True)) for name in names]
    for (before, now), low, high in zip(operand_dims, *edges, strict=True):
        if any(np.sign(edge[0]) != np.sign(edge[1]) for edge in (low, high)):
            return "pads at only one size, or crops at one size and pads at the other"
        kept_dims.append(tuple(dim + min(0, a) + min(0, b) for dim, a, b in zip((before, now), low, high, strict=True)))
    return "" if _keeps_share(kept_dims, operand_dims) and _keeps_share(kept_dims, result_dims) else _SMALLER


def _broadcast(ours: Op, theirs: Op) -> str:
    operand_dims, result_dims = _dims(ours.operands[0], theirs.operands[0]), _dims(ours.results[0], theirs.results[0])
    for (before, now), dim in zip(operand_dims, theirs.attributes["broadcast_dimensions"], strict=True):
        if (before == result_dims[dim][0]) != (now == result_dims[dim][1]):
            return _ONE
    return ""


def _reduce(ours: Op, theirs: Op) -> str:
    before, now = ours.operands[0].shape, theirs.operands[0].shape
    return _ONE if any((before[dim] == 1) != (now[dim] == 1) for dim in theirs.attributes["dimensions"]) else ""


def _product(ours: Op, theirs: Op, from_inputs: set[Value]) -> str:
    numbers = theirs.attributes["dot_dimension_numbers"]
    for side, before, now in zip(("lhs", "rhs"), ours.operands, theirs.operands, strict=True):
        contracted = dims_of(numbers, f"{side}_contracting_dimensions")
        if any((before.shape[dim] == 1) != (now.shape[dim] == 1) for dim in contracted):
            return _ONE
    for matrix, before, now in zip(theirs.operands, ours.operands[::-1], theirs.operands[::-1], strict=True):
        if matrix in from_inputs or now not in from_inputs or _contracted_alone(matrix, theirs):
            continue
        if not _keeps_share(
            [(ours.results[0].elements, theirs.results[0].elements)], [(before.elements, now.elements)]
        ):
            return f"selects with a matrix that depends on no input, and {_SMALLER}"
    return ""


def _contracted_alone(operand: Value, op: Op) -> bool:
    """Check that a product sums over all of an operand, as a product with a vector of ones does."""
    numbers, side = op.attributes["dot_dimension_numbers"], "lhs" if operand is op.operands[0] else "rhs"
    used_dims = {dim for name in ("contracting", "batching") for dim in dims_of(numbers, f"{side}_{name}_dimensions")}
    return all(size == 1 for dim, size in enumerate(operand.shape) if dim not in used_dims)


def _places(ours: Op, theirs: Op, from_inputs: set[Value], integer_growth: float) -> str:
    moved = [op.results[0] if op.kind == "gather" else op.operands[2] for op in (ours, theirs)]
    part, whole = ((a.elements, b.elements) for a, b in (moved, (ours.operands[0], theirs.operands[0])))
    if theirs.kind == "gather":
        sizes = list(zip(ours.attributes["slice_sizes"], theirs.attributes["slice_sizes"], strict=True))
        dims = zip(sizes, _dims(ours.operands[0], theirs.operands[0]), strict=True)
        if not all(_keeps_share([size], [dim]) for size, dim in dims if size != (1, 1)):
            return _SMALLER
    if _keeps_share([part], [whole]):
        return ""
    starts = ours.operands[1], theirs.operands[1]
    before, now = (value.elements / max(1, value.shape[-1] if value.shape else 1) for value in starts)
    follows = theirs.operands[1] in from_inputs and now >= integer_growth * before
    return "" if follows else _SMALLER


# Operations that take a part of an array, or put one back.
_TAKES = {"slice", "dynamic_slice", "gather", "pad"}
_RULES: dict[str, Callable[[Op, Op], str]] = {
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "reduce_window"), _part),
    "pad": _pad,
    "broadcast_in_dim": _broadcast,
    "reduce": _reduce,
}
