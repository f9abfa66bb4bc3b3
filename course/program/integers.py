"""Integers and booleans computed as every compiler computes them, or not at all.

No floats: their rounding, fusion and flushing depend on the compiler. Only arrays of up to 4,096 elements whose
inputs are all known are computed, and only if no two compilers could differ: not if it overflows its dtype, divides
by zero or shifts by more than the width. Everything else is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from course.program.ir import Op, Value

MAX_ELEMENTS = 4096
# Most results that are remembered at a time, and most elements of one operation: together at most a few tens of MB.
MAX_COMPUTED, MAX_REMEMBERED = 20_000, 64
Known = dict[Value, np.ndarray]
Computed = dict[tuple[Op | bytes, ...], np.ndarray | None]

DTYPES = {"i1": np.bool_}
DTYPES |= {f"{u}i{bits}": np.dtype(f"{u and 'u'}int{bits}").type for u in ("", "u") for bits in (8, 16, 32, 64)}


def bind(targets: list[Value], sources: list[Value], known: Known) -> None:
    """Give each target the known value of its source; forget the target's old value if there is none."""
    values = [known.get(source) for source in sources]
    for target, value in zip(targets, values, strict=True):
        if value is None:
            known.pop(target, None)
        else:
            known[target] = value


def evaluate(op: Op, known: Known, device: int, computed: Computed | None = None) -> None:
    """Add the op's result to the known values if it can be computed; otherwise forget an older one.

    ``computed`` has earlier results for the same few numbers, from other trips of a loop and for other devices.
    """
    if op.kind == "optimization_barrier":  # from remat: each value separately, whichever others pass through
        bind(op.results, op.operands, known)
        return
    if op.kind == "constant" and op.results[0] in known:  # from an earlier trip of a loop
        return
    for result in op.results:
        known.pop(result, None)
    if op.kind == "partition_id":
        known[op.results[0]] = np.array(device, np.uint32)
        return
    operands = [known.get(operand) for operand in op.operands]
    if any(operand is None for operand in operands):
        return
    value = _compute(op, operands) if computed is None else _remembered(op, operands, computed)
    if value is not None:
        known[op.results[0]] = value


def _remembered(op: Op, operands: list[Any], computed: Computed) -> np.ndarray | None:
    if sum(value.elements for value in (*op.operands, *op.results)) > MAX_REMEMBERED:
        return _compute(op, operands)
    key = op, *(operand.tobytes() for operand in operands)
    if key not in computed:
        if len(computed) == MAX_COMPUTED:
            computed.clear()
        computed[key] = _compute(op, operands)
    return computed[key]


def _compute(op: Op, operands: list[Any]) -> np.ndarray | None:
    rule = RULES.get(op.kind)
    if rule is None or not op.results:
        return None
    if any(result.elements > MAX_ELEMENTS or result.dtype not in DTYPES for result in op.results):
        return None
    try:
        with np.errstate(all="ignore"):
            value = _fitting(rule(op, *operands), DTYPES[op.results[0].dtype])
    except (TypeError, ValueError, IndexError, OverflowError):  # a form that the rule does not know: never guessed
        return None
    return None if value is None else value.reshape(op.results[0].shape)


def _fitting(value: Any, dtype: Any) -> np.ndarray | None:
    """The value as ``dtype``; None if it does not fit, because the result then depends on the compiler.

    Machines wrap around, but a compiler's reasoning about a loop's counter or a comparison may assume no overflow.
    """
    if value is None:
        return None
    value = np.asarray(value)
    if value.dtype == dtype:
        return value
    if dtype is np.bool_:  # only "convert" makes booleans of numbers, and does so itself
        return None
    limits = np.iinfo(dtype)
    if value.size and not limits.min <= int(value.min()) <= int(value.max()) <= limits.max:
        return None
    return value.astype(dtype)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, *operands: function(*operands)


def _exact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Arithmetic that cannot overflow; not on booleans: StableHLO adds them with "or", and parts of XLA with "xor"."""

    def rule(op: Op, *operands: np.ndarray) -> Any:
        if operands[0].dtype == np.bool_:
            return None
        wide = np.int64 if operands[0].dtype.itemsize < 4 or operands[0].dtype == np.int32 else object
        return function(*(operand.astype(wide) for operand in operands))

    return rule


def _divide(a: np.ndarray, b: np.ndarray) -> Any:
    if np.any(b == 0):
        return None
    sign = np.where((a < 0) != (b < 0), -1, 1).astype(object)
    return abs(a) // abs(b) * sign  # StableHLO rounds to zero, NumPy down


def _remainder(op: Op, a: np.ndarray, b: np.ndarray) -> Any:
    quotient = _fitting(_exact(_divide)(op, a, b), a.dtype.type)  # machines that trap do so for a remainder too
    return None if quotient is None else _exact(lambda a, b, quotient: a - quotient * b)(op, a, b, quotient)


def _shift(function: Callable[..., Any], view: str = "") -> Callable[..., Any]:
    """Shifts by less than the width: compilers differ on others, including whether they are valid at all."""

    def rule(op: Op, a: np.ndarray, by: np.ndarray) -> Any:
        if a.dtype == np.bool_ or np.any((by < 0) | (by >= a.dtype.itemsize * 8)):
            return None
        view_dtype = f"{view}{a.dtype.itemsize}" if view else a.dtype
        return function(a.view(view_dtype), by.astype(view_dtype)).view(a.dtype)

    return rule


def _convert(op: Op, a: np.ndarray) -> Any:
    return a != 0 if op.results[0].dtype == "i1" else a


def _compare(op: Op, a: np.ndarray, b: np.ndarray) -> Any:
    signedness = "SIGNED" if np.issubdtype(a.dtype, np.signedinteger) else "UNSIGNED"
    if "compare_type" in op.attributes and not re.search(rf"\b(NOTYPE|{signedness})\b", op.attributes["compare_type"]):
        return None
    direction = re.search(r"EQ|NE|LE|LT|GE|GT", op.attributes["comparison_direction"])
    compare = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal}
    compare |= {"GT": np.greater, "GE": np.greater_equal}
    return compare[direction[0]](a, b) if direction else None


def _clamp(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> Any:
    return None if np.any(low > high) else np.minimum(np.maximum(x, low), high)


def _broadcast(op: Op, a: np.ndarray) -> Any:
    dims = op.attributes["broadcast_dimensions"]
    shape = [1] * len(op.results[0].shape)
    for dim, size in zip(dims, np.shape(a), strict=True):
        shape[dim] = size
    ordered = np.transpose(a, np.argsort(dims)) if dims else a
    return np.broadcast_to(np.reshape(ordered, shape), op.results[0].shape)


def _slice(op: Op, a: np.ndarray) -> Any:
    bounds = (op.attributes[key] for key in ("start_indices", "limit_indices", "strides"))
    return a[tuple(slice(*bound) for bound in zip(*bounds, strict=True))]


def _starts(a: np.ndarray, sizes: tuple[int, ...], starts: tuple[np.ndarray, ...]) -> tuple[slice, ...]:
    if any(not -(2**31) <= int(start) < 2**31 for start in starts):
        raise ValueError("compilers do not agree on what such a start means")
    clamped = [min(max(int(s), 0), dim - size) for s, dim, size in zip(starts, a.shape, sizes, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(clamped, sizes, strict=True))


def _dynamic_slice(op: Op, a: np.ndarray, *starts: np.ndarray) -> Any:
    return a[_starts(a, op.attributes["slice_sizes"], starts)]


def _dynamic_update_slice(op: Op, a: np.ndarray, update: np.ndarray, *starts: np.ndarray) -> Any:
    result = np.array(a)
    result[_starts(a, np.shape(update), starts)] = update
    return result


def _iota(op: Op) -> Any:
    shape = op.results[0].shape
    dim = op.attributes["iota_dimension"]
    along = np.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return np.broadcast_to(along, shape)


def _reduce(op: Op, a: np.ndarray, initial: np.ndarray, *others: np.ndarray) -> Any:
    block = op.regions[0]
    ops = block.ops
    kind = ops[0].kind if len(ops) == 1 else ""
    if ops[0].operands != block.arguments or block.returns != ops[0].results or len(op.results) != 1:
        return None
    if kind not in _REDUCERS or (kind in ("add", "multiply") and a.dtype == np.bool_):
        return None
    least, most = (0, 1) if a.dtype == np.bool_ else (np.iinfo(a.dtype).min, np.iinfo(a.dtype).max)
    neutral = {"add": 0, "multiply": 1, "maximum": least, "minimum": most, "or": 0, "and": -1}[kind]
    if initial != np.array(neutral).astype(a.dtype):  # XLA may add any other value any number of times, or never
        return None
    values = a.astype(object) if kind in ("add", "multiply") else a
    return _REDUCERS[kind].reduce(values, axis=tuple(op.attributes["dimensions"]))


_REDUCERS = {"add": np.add, "and": np.bitwise_and, "maximum": np.maximum, "minimum": np.minimum}
_REDUCERS |= {"multiply": np.multiply, "or": np.bitwise_or}


RULES: dict[str, Callable[..., Any]] = {
    "constant": lambda op: op.attributes.get("value"),
    "abs": _exact(np.abs),
    "add": _exact(np.add),
    "and": _plain(np.bitwise_and),
    "broadcast_in_dim": _broadcast,
    "clamp": _plain(_clamp),
    "compare": _compare,
    "concatenate": lambda op, *parts: np.concatenate(parts, axis=op.attributes["dimension"]),
    "convert": _convert,
    "divide": _exact(_divide),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "maximum": _plain(np.maximum),
    "minimum": _plain(np.minimum),
    "multiply": _exact(np.multiply),
    "negate": _exact(np.negative),
    "not": _plain(np.bitwise_not),
    "or": _plain(np.bitwise_or),
    "reduce": _reduce,
    "remainder": _remainder,
    "reshape": lambda op, a: np.reshape(a, op.results[0].shape),
    "reverse": lambda op, a: np.flip(a, op.attributes["dimensions"]),
    "select": _plain(np.where),
    "shift_left": _shift(np.left_shift),
    "shift_right_arithmetic": _shift(np.right_shift, "i"),
    "shift_right_logical": _shift(np.right_shift, "u"),
    "sign": _exact(np.sign),
    "slice": _slice,
    "subtract": _exact(np.subtract),
    "transpose": lambda op, a: np.transpose(a, op.attributes["permutation"]),
    "xor": _plain(np.bitwise_xor),
}
