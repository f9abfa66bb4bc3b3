"""Matrix products written by hand: ``(a[:, :, None] * b[None]).sum(1)``, or with a mask in place of a factor.

Each factor is repeated along a dim that the other one has, and neither along the dim of the sum. Where a value is
repeated is recorded by its elements' order in memory, which a reshape does not change: the span ``(2, 6)`` of a value
of shape ``[5, 3, 2]`` is its middle dim.
"""

from __future__ import annotations

import math
from itertools import combinations, product

from course.program.ir import ELEMENTWISE, Block, Op, Value, walk

Spans = frozenset[tuple[int, int]]
# A sum of these is the same operation of sums, so a product reaches its sum through them.
_LINEAR = set("add subtract negate multiply divide convert reshape transpose select optimization_barrier".split())
_NOTHING: Spans = frozenset()


def products_by_hand(main: Block) -> dict[Op, list[Op]]:
    """The sums that are matrix products, and the multiplications or selections that each of them sums."""
    repeated: dict[Value, Spans] = {}
    unsummed: dict[Value, dict[Op, Spans]] = {}  # for each product, where one of its factors is repeated
    products: dict[Op, list[Op]] = {}
    for op in walk(main):
        if len(op.results) != 1:
            continue
        result = op.results[0]
        repeated[result] = _repeated(op, repeated)
        reached = {factor: spans for operand in op.operands for factor, spans in unsummed.get(operand, {}).items()}
        if op.kind == "reduce" and any(inner.kind == "add" for inner in walk(op.regions[0])):
            each = _span_of_each(op.operands[0].shape)
            dims = {each[dim] for dim in op.attributes["dimensions"]}
            summed = [by for by, spans in reached.items() if not all(_covered(span, spans) for span in dims)]
            products.update({op: summed} if summed else {})
        elif op.kind == "transpose":
            unsummed[result] = {factor: _transposed(op, spans) for factor, spans in reached.items()}
        elif op.kind in _LINEAR and "f" in result.dtype:
            unsummed[result] = reached | _outer(op, repeated)
    return products


def _outer(op: Op, repeated: dict[Value, Spans]) -> dict[Op, Spans]:
    """The operation, and where a factor is repeated, if another one is not repeated there, and the other way round."""
    if op.kind not in ("multiply", "select"):
        return {}
    spans = [repeated.get(factor, _NOTHING) for factor in op.operands]
    pairs = [(a, b) for a, b in combinations(spans, 2) if _more(a, b) and _more(b, a)]
    return {op: pairs[0][0] | pairs[0][1]} if pairs else {}


def _more(spans: Spans, others: Spans) -> bool:
    return not all(_covered(span, others) for span in spans)


def _repeated(op: Op, repeated: dict[Value, Spans]) -> Spans:
    """The spans along which an operation's result is repeated, as far as known."""
    shape = op.results[0].shape
    if op.kind == "iota":
        return _spans(shape, set(range(len(shape))) - {op.attributes["iota_dimension"]})
    if op.kind == "constant":
        return _spans(shape, set(range(len(shape)))) if op.attributes.get("zero") else _NOTHING
    operands = [repeated.get(operand, _NOTHING) for operand in op.operands]
    if op.kind in ("reshape", "optimization_barrier"):
        return operands[0]
    if op.kind in ELEMENTWISE:
        whole = _spans(shape, set(range(len(shape))))
        of_arrays = [spans for spans, operand in zip(operands, op.operands, strict=True) if operand.elements > 1]
        for spans in of_arrays:
            whole = frozenset((low, high) for low, high in map(_overlap, product(whole, spans)) if low < high)
        return whole
    if op.kind == "transpose":
        return _transposed(op, operands[0])
    if op.kind != "broadcast_in_dim":
        return _NOTHING
    same = _dims(op.operands[0].shape, operands[0])
    kept = {new for old, new in enumerate(op.attributes["broadcast_dimensions"]) if old not in same}
    return _spans(shape, set(range(len(shape))) - kept)


def _transposed(op: Op, spans: Spans) -> Spans:
    same = _dims(op.operands[0].shape, spans)
    return _spans(op.results[0].shape, {new for new, old in enumerate(op.attributes["permutation"]) if old in same})


def _dims(shape: tuple[int, ...], spans: Spans) -> set[int]:
    """The dims that the spans cover, and those of size 1."""
    return {dim for dim, span in enumerate(_span_of_each(shape)) if _covered(span, spans)}


def _overlap(pair: tuple[tuple[int, int], tuple[int, int]]) -> tuple[int, int]:
    (low, high), (other_low, other_high) = pair
    return max(low, other_low), min(high, other_high)


def _covered(span: tuple[int, int], spans: Spans) -> bool:
    return span[0] == span[1] or any(low <= span[0] and span[1] <= high for low, high in spans)


def _span_of_each(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(math.prod(shape[dim + 1 :]), math.prod(shape[dim:])) for dim in range(len(shape))]


def _spans(shape: tuple[int, ...], dims: set[int]) -> Spans:
    """The spans of some dims, neighbours as one."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(span for dim, span in enumerate(_span_of_each(shape)) if dim in dims and span[0] < span[1]):
        if merged and merged[-1][1] == low:
            low = merged.pop()[0]
        merged.append((low, high))
    return frozenset(merged)
