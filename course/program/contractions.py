"""Matmuls written as a multiplication and a sum: ``(a[:, :, None] * b[None]).sum(1)``.

Each factor is broadcast along a dim that the other one has and the sum keeps, and neither is broadcast along the summed
dim. A mask that selects elements is a factor too. Dims are stored as ranges of strides in row-major order, which
survive a reshape: the middle dim of shape ``[5, 3, 2]`` is ``(2, 6)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from course.program.ir import ELEMENTWISE, Block, Op, Value, is_uniform, makers_of, unsupported, walk

Spans = frozenset[tuple[int, int]]
_NOTHING: Spans = frozenset()
# The largest program of transformer_3d takes 585 steps; without a limit, a hostile one would take hours.
MAX_STEPS = 2_000_000


def products_by_hand(main: Block) -> dict[Op, list[Op]]:
    """The sums that are matmuls, and the multiplications or selections that each of them adds up.

    Raises:
        ProgramError: Following all sums to what they add up takes more than ``MAX_STEPS`` steps.
    """
    makers, broadcast = makers_of(main), _broadcast_spans(main)
    products, steps = {}, 0
    for total in filter(_is_sum, walk(main)):
        added = []
        for op, summed, kept in _terms_of(total, makers, broadcast):
            steps += 1
            if steps > MAX_STEPS:
                raise unsupported(total, total.line, "the program's sums add up too many operations to follow")
            if _is_product(op, broadcast, summed, kept):
                added.append(op)
        if added:
            products[total] = added
    return products


def _is_sum(op: Op) -> bool:
    if op.kind != "reduce" or len(op.results) > 1 or "f" not in op.results[0].dtype:
        return False
    return any(inner.kind == "add" for inner in walk(op.regions[0]))


def _terms_of(total: Op, makers: dict[Value, Op], broadcast: dict[Value, Spans]) -> Iterator[tuple[Op, Spans, Spans]]:
    """Each operation that a sum is linear in, and the spans of its result that are summed and kept."""
    each, dims = _dim_spans(total.operands[0].shape), total.attributes["dimensions"]
    summed = frozenset(each[dim] for dim in dims)
    queue, seen = [(total.operands[0], summed, frozenset(each) - summed)], {total.operands[0]}
    while queue:
        value, summed, kept = queue.pop()
        if (op := makers.get(value)) is None:
            continue
        yield op, summed, kept
        if op.kind == "transpose":
            summed, kept = (_before_transpose(op, spans) for spans in (summed, kept))
        terms = [operand for operand in _terms(op, value, broadcast) if operand not in seen]
        seen.update(terms)
        queue += [(operand, summed, kept) for operand in terms]


def _is_product(op: Op, broadcast: dict[Value, Spans], summed: Spans, kept: Spans) -> bool:
    """Check that the sum of this operation's result along some dims is a matmul."""
    if op.kind not in ("multiply", "select"):
        return False
    first, *others = (broadcast.get(operand, _NOTHING) for operand in op.operands)
    return any(
        _overlap(kept, _minus(first, other))
        and _overlap(kept, _minus(other, first))
        and bool(_minus(summed, first | other))
        for other in others
    )


def _terms(op: Op, value: Value, broadcast: dict[Value, Spans]) -> list[Value]:
    """The operands that a value is linear in, scaled at most by factors that are themselves broadcast."""
    match op.kind, op.operands:
        case (("add" | "subtract" | "negate" | "convert" | "reshape" | "transpose"), operands):
            return operands
        case "optimization_barrier", operands:
            return [operands[op.results.index(value)]]
        case "multiply", (a, b):
            return [x for x, scale in ((a, b), (b, a)) if x is not scale and broadcast.get(scale)]
        case "divide", (a, divisor):
            return [a] if broadcast.get(divisor) else []
        case "select", (mask, *branches):
            return branches if mask.elements == 1 or broadcast.get(mask) else []
    return []


def _broadcast_spans(main: Block) -> dict[Value, Spans]:
    """The dims along which each value repeats the same elements, as far as known."""
    broadcast: dict[Value, Spans] = {}
    for op in walk(main):
        known = [broadcast.get(operand, _NOTHING) for operand in op.operands]
        for number, result in enumerate(op.results):
            if op.kind == "optimization_barrier":
                broadcast[result] = known[number]
            elif len(op.results) == 1 and (spans := _spans_of(op, known)):
                broadcast[result] = spans
    return broadcast


def _spans_of(op: Op, known: list[Spans]) -> Spans:
    """The spans of an operation's result, from those of its operands."""
    shape = op.results[0].shape
    each = _dim_spans(shape)
    whole = _minus(each, ())
    if op.kind == "iota":
        return whole - {each[op.attributes["iota_dimension"]]}
    if op.kind == "constant":
        return whole if is_uniform(op) else _NOTHING
    if op.kind == "reshape":
        return known[0]
    if op.kind in ELEMENTWISE:
        for spans, operand in zip(known, op.operands, strict=True):
            whole = whole if operand.elements == 1 else _minus(whole, _minus(whole, spans))
        return whole
    if op.kind not in ("broadcast_in_dim", "transpose", "reduce"):
        return _NOTHING
    before = _dim_spans(op.operands[0].shape)
    varying = {dim for dim, span in enumerate(before) if _minus({span}, known[0])}
    if op.kind == "broadcast_in_dim":
        new_dims = op.attributes["broadcast_dimensions"]
        kept = {new for old, new in enumerate(new_dims) if old in varying}
    else:
        summed = op.attributes["dimensions"] if op.kind == "reduce" else ()
        old_dims = op.attributes.get("permutation") or [dim for dim in range(len(before)) if dim not in summed]
        kept = {new for new, old in enumerate(old_dims) if old in varying}
    return _minus((span for dim, span in enumerate(each) if dim not in kept), ())


def _before_transpose(op: Op, spans: Spans) -> Spans:
    """The spans in a transpose's operand of those dims that the spans cover in its result."""
    before, after = _dim_spans(op.operands[0].shape), _dim_spans(op.results[0].shape)
    return frozenset(
        before[old]
        for new, old in enumerate(op.attributes["permutation"])
        if after[new][0] < after[new][1] and not _minus({after[new]}, spans)
    )


def _dim_spans(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each dim's span; that of a dim of size 1 is empty."""
    return [(math.prod(shape[dim + 1 :]), math.prod(shape[dim:])) for dim in range(len(shape))]


def _minus(spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Spans:
    """The rest of the spans, without the others."""
    left = {span for span in spans if span[0] < span[1]}
    for low, high in others:
        cut = {piece for start, end in left for piece in ((start, min(end, low)), (max(start, high), end))}
        left = {piece for piece in cut if piece[0] < piece[1]}
    return frozenset(left)


def _overlap(spans: Spans, others: Spans) -> bool:
    return any(max(low, start) < min(high, end) for low, high in spans for start, end in others)
