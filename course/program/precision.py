"""Operations that need precision: functions and sums, however they are written, and products in disguise."""

from __future__ import annotations

import re
from dataclasses import dataclass

from course.program.contractions import products_by_hand
from course.program.ir import ELEMENTWISE, Block, Op, Value, dims_of, is_uniform, makers_of, walk

# These functions in a softmax, a loss and a norm's statistics turn a small error in their input into a large one; long
# sums do so too.
PRECISE = {"exponential", "exponential_minus_one", "log", "log_plus_one", "power", "rsqrt", "sqrt"}
_MOVED = ("broadcast_in_dim", "reshape", "convert", "transpose", "optimization_barrier", "slice")


@dataclass(frozen=True)
class ByHand:
    """A matmul written as a sum: its factors' dtypes, ``"bf16 x f32"``, and its FLOPs.

    For a selection in place of a multiplication, ``dtypes`` is empty.
    """

    dtypes: str
    flops: float


@dataclass(frozen=True)
class Special:
    """Values with all elements equal, values that are summed, and sums written as other operations.

    ``by_hand`` has those that are products, ``of_parts`` the additions of one part of an array to another, and
    ``of_squares`` the dtypes in which sums of squares square.
    """

    equal: set[Value]
    summed: set[Value]
    by_hand: dict[Op, list[ByHand]]
    of_parts: set[Op]
    of_squares: dict[Op, str]


def special(main: Block) -> Special:
    """Collect the properties of a whole program that are needed to classify one of its operations."""
    return Special(_equal_numbers(main), _summed(main), _by_hand(main), _of_parts(main), _of_squares(main))


def precision_sensitive(op: Op, known: Special) -> str:
    """The key of the op in ``Costs.precise``; empty for any other, and for one on integers."""
    if not op.results or "f" not in (dtype := op.results[0].dtype):
        return ""
    if op.kind in ("exponential", "exponential_minus_one") and op.results[0] not in known.summed:
        return ""
    if op.kind in PRECISE:  # a function of equal numbers is itself a constant, such as the root of a head's width
        return "" if op.operands[0] in known.equal else f"{op.kind} of {dtype}"
    return f"sum of {known.of_squares.get(op, dtype)}" if _sums(op, known) else ""


def _sums(op: Op, known: Special) -> bool:
    """Check that an op adds up elements; over dims of size 1, as the transpose of ``x[None]`` does, it adds nothing."""
    if op.kind == "dot_general":  # one with a factor of equal numbers sums the other
        contracted = dims_of(op.attributes["dot_dimension_numbers"], "lhs_contracting_dimensions")
        several = any(op.operands[0].shape[dim] > 1 for dim in contracted)
        return several and any(operand in known.equal for operand in op.operands)
    if op.kind == "reduce" and op.operands[0].elements == op.results[0].elements:
        return False
    sums = op.kind in ("reduce", "reduce_window", "scatter") and any(o.kind == "add" for o in walk(op.regions[0]))
    return sums or op in known.of_parts


def _equal_numbers(main: Block) -> set[Value]:
    """The values with all elements equal, for any inputs, such as ones or ``1 + 0 * x``."""
    equal: set[Value] = set()
    zero: set[Value] = set()
    for op in walk(main):
        operands_equal = bool(op.operands) and all(operand in equal for operand in op.operands)
        if op.kind == "constant":
            is_equal = is_uniform(op)
            is_zero = bool(op.attributes.get("zero"))
        elif op.kind in _MOVED:
            is_equal, is_zero = operands_equal, all(operand in zero for operand in op.operands)
        else:
            itself = len(op.operands) == 2 and op.operands[0] is op.operands[1]
            is_zero = op.kind == "multiply" and any(operand in zero for operand in op.operands)
            is_zero = is_zero or (op.kind == "subtract" and itself)
            is_equal = op.kind in ELEMENTWISE and (operands_equal or (op.kind == "divide" and itself))
        zero.update(op.results if is_zero else ())
        equal.update(op.results if is_equal or is_zero else ())
    return equal


def _summed(main: Block) -> set[Value]:
    """The values that reach a sum, or leave their block, on a path without a matmul."""
    summed = {value for op in walk(main) for region in op.regions for value in region.returns} | set(main.returns)
    for op in reversed(list(walk(main))):
        ends = op.kind in ("reduce", "reduce_window", "scatter", "while", "case")
        if ends or (op.kind != "dot_general" and any(result in summed for result in op.results)):
            summed.update(op.operands)
    return summed


def _of_parts(main: Block) -> set[Op]:
    """Additions of two slices of one value, which make up a sum by halves, or of neighbours."""
    makers = makers_of(main)

    def sliced(value: Value) -> Value | None:
        parts = 0
        while (op := makers.get(value)) and op.kind in _MOVED and op.kind != "broadcast_in_dim":
            parts += op.kind == "slice" and op.operands[0].elements > op.results[0].elements
            value = op.operands[0]
        return value if parts else None

    adds = (op for op in walk(main) if op.kind == "add" and op.operands[0] is not op.operands[1])
    wholes = ((op, *map(sliced, op.operands)) for op in adds)
    return {op for op, first, second in wholes if first is not None and first is second}


def _of_squares(main: Block) -> dict[Op, str]:
    """The dtype of squares that a sum adds: a cast after squaring, as in ``mean(x * x, dtype=float32)``, is late."""
    makers = makers_of(main)

    def before_moves(value: Value) -> Value:
        while (op := makers.get(value)) and op.kind in _MOVED:
            value = op.operands[0]
        return value

    squares = ((op, before_moves(op.operands[0])) for op in walk(main) if op.kind == "reduce")
    makers_of_squares = ((op, value, makers.get(value)) for op, value in squares)
    return {
        op: value.dtype
        for op, value, maker in makers_of_squares
        if maker and maker.kind == "multiply" and len({*map(before_moves, maker.operands)}) == 1
    }


def _by_hand(main: Block) -> dict[Op, list[ByHand]]:
    """The products that each sum is, if any."""
    makers = makers_of(main)

    def dtype(factor: Value) -> str:
        """A factor's dtype before it is broadcast; a later cast to a wider one serves the sum alone."""
        value = factor
        while (op := makers.get(value)) and op.kind in _MOVED:
            if op.kind == "convert" and not _widens(op.operands[0].dtype, value.dtype):
                return value.dtype
            value = op.operands[0]
            if op.kind == "broadcast_in_dim":
                return value.dtype
        return factor.dtype

    def product(op: Op) -> ByHand:
        each = 8.0 if "complex" in op.results[0].dtype else 2.0
        dtypes = " x ".join(map(dtype, op.operands)) if op.kind == "multiply" else ""
        return ByHand(dtypes, each * op.results[0].elements)

    return {total: [product(op) for op in summed] for total, summed in products_by_hand(main).items()}


def _widens(source: str, target: str) -> bool:
    """Check that a cast keeps every number."""
    bits = [
        int(digits[0]) if "f" in dtype and (digits := re.findall(r"\d+", dtype)) else 0 for dtype in (source, target)
    ]
    return 0 < bits[0] < bits[1]
