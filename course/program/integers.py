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

from course.program.ir import Op, Value, dims_of

MAX_ELEMENTS = 4096
# Most results that are remembered at a time, and most elements of one operation: together at most a few tens of MB.
MAX_COMPUTED, MAX_REMEMBERED = 20_000, 64
Known = dict[Value, np.ndarray]
Results = tuple[np.ndarray, ...] | None
Computed = dict[tuple[Op | bytes, ...], Results]

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
    values = _compute(op, operands) if computed is None else _remembered(op, operands, computed)
    known.update(zip(op.results, values or (), strict=False))


def _remembered(op: Op, operands: list[Any], computed: Computed) -> Results:
    if sum(value.elements for value in (*op.operands, *op.results)) > MAX_REMEMBERED:
        return _compute(op, operands)
    key = op, *(operand.tobytes() for operand in operands)
    if key not in computed:
        if len(computed) == MAX_COMPUTED:
            computed.clear()
        computed[key] = _compute(op, operands)
    return computed[key]


def _compute(op: Op, operands: list[Any]) -> Results:
    rule = RULES.get(op.kind)
    if rule is None or not op.results:
        return None
    if any(result.elements > MAX_ELEMENTS or result.dtype not in DTYPES for result in op.results):
        return None
    try:
        with np.errstate(all="ignore"):
            computed = rule(op, *operands)
            values = computed if isinstance(computed, tuple) else (computed,)
            fitting = [_fitting(value, DTYPES[r.dtype]) for value, r in zip(values, op.results, strict=True)]
    except (TypeError, ValueError, LookupError, OverflowError):  # a form that the rule does not know: never guessed
        return None
    known = [value.reshape(r.shape) for value, r in zip(fitting, op.results, strict=True) if value is not None]
    return tuple(known) if len(known) == len(fitting) else None


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
    direction = _DIRECTION.search(op.attributes["comparison_direction"])
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


def _gather(op: Op, a: np.ndarray, starts: np.ndarray) -> Any:
    numbers, sizes, shape = op.attributes["dimension_numbers"], op.attributes["slice_sizes"], op.results[0].shape
    if np.any((starts < -(2**31)) | (starts >= 2**31)):
        return None
    last = re.search(r"index_vector_dim = (\d+)", numbers)
    vector_dim = int(last[1]) if last else 0
    starts = starts[..., None] if vector_dim == starts.ndim else np.moveaxis(starts, vector_dim, -1)
    offset = dims_of(numbers, "offset_dims")
    batch = [dim for dim in range(len(shape)) if dim not in offset]
    batching = dims_of(numbers, "operand_batching_dims")
    their_dims = [dim - (dim > vector_dim) for dim in dims_of(numbers, "start_indices_batching_dims")]

    def along(dims: list[int], values: np.ndarray) -> np.ndarray:
        """Spread values of some of the result's dims over all of them."""
        return values.reshape([shape[dim] if dim in dims else 1 for dim in range(len(shape))])

    index = [np.zeros([1] * len(shape), int) for _ in range(a.ndim)]
    for number, dim in enumerate(dims_of(numbers, "start_index_map")):
        index[dim] = along(batch, np.clip(starts[..., number].astype(int), 0, a.shape[dim] - sizes[dim]))
    for dim, theirs in zip(batching, their_dims, strict=True):
        index[dim] = along([batch[theirs]], np.arange(a.shape[dim]))
    removed = {*dims_of(numbers, "collapsed_slice_dims"), *batching}
    for dim, out in zip((dim for dim in range(a.ndim) if dim not in removed), offset, strict=True):
        index[dim] = index[dim] + along([out], np.arange(sizes[dim]))
    return np.broadcast_to(a[tuple(index)], shape)


def _pad(op: Op, a: np.ndarray, value: np.ndarray) -> Any:
    low, high, inner = (op.attributes[name] for name in ("edge_padding_low", "edge_padding_high", "interior_padding"))
    if any(inner) or min((*low, *high), default=0) < 0:
        return None
    return np.pad(a, list(zip(low, high, strict=True)), constant_values=value)


def _sort(op: Op, *arrays: np.ndarray) -> Any:
    block, key, dim = op.regions[0], arrays[0], op.attributes["dimension"]
    compare = block.ops[0]
    if len(block.ops) > 1 or compare.operands != block.arguments[:2] or block.returns != compare.results:
        return None
    if "LT" not in compare.attributes["comparison_direction"] or _compare(compare, key[:0], key[:0]) is None:
        return None
    if not (op.attributes.get("is_stable") or len(arrays) == 1):
        return None
    order = np.argsort(key, axis=dim, kind="stable")
    return tuple(np.take_along_axis(array, order, dim) for array in arrays)


def _place_of_extreme(op: Op, a: np.ndarray, places: np.ndarray, first: np.ndarray, first_place: np.ndarray) -> Any:
    """The result of an argmax or an argmin, and its place: the least among equals."""
    block, (dim,) = op.regions[0], op.attributes["dimensions"]
    numbers = {value: n for n, value in enumerate([*block.arguments, *(o.results[0] for o in block.ops)])}
    form = [(inner.kind, *(numbers[operand] for operand in inner.operands)) for inner in block.ops]
    comparisons = [inner for inner in block.ops if inner.kind == "compare"]
    directions = [_DIRECTION.search(inner.attributes["comparison_direction"]) for inner in comparisons]
    order = [direction[0] for direction in directions if direction]
    if form != _ARGMAX or [numbers[value] for value in block.returns] != [11, 12] or order[1:] != ["NE", "EQ", "LT"]:
        return None
    of = (a, a, a, places)
    if order[0] not in ("GT", "LT") or any(
        _compare(inner, values[:0], values[:0]) is None for inner, values in zip(comparisons, of, strict=True)
    ):
        return None
    extreme = np.maximum if order[0] == "GT" else np.minimum
    best = extreme(extreme.reduce(a, axis=dim), first)
    none = np.iinfo(places.dtype).max
    at = np.where(a == np.expand_dims(best, dim), places, none).min(axis=dim)
    return best, np.where(first == best, np.minimum(at, first_place), at)


# JAX's choice between (value, place) 0, 1 and 2, 3: greater, or not a number, or equal and at a smaller place.
_ARGMAX = [
    ("compare", 0, 2),
    ("compare", 0, 0),
    ("or", 4, 5),
    ("compare", 0, 2),
    ("compare", 1, 3),
    ("and", 7, 8),
    ("or", 6, 9),
    ("select", 6, 0, 2),
    ("select", 10, 1, 3),
]
_DIRECTION = re.compile("EQ|NE|LE|LT|GE|GT")


def _dot_general(op: Op, a: np.ndarray, b: np.ndarray) -> Any:
    numbers = op.attributes["dot_dimension_numbers"]
    if a.dtype == np.bool_ or b.dtype == np.bool_ or dims_of(numbers, "lhs_batching_dimensions"):
        return None
    if a.size * b.size > MAX_ELEMENTS:  # its time would not be in proportion to its results
        return None
    mine, others = (tuple(dims_of(numbers, f"{side}_contracting_dimensions")) for side in ("lhs", "rhs"))
    return np.tensordot(a.astype(object), b.astype(object), (mine, others))


def _reduce(op: Op, a: np.ndarray, initial: np.ndarray, *others: np.ndarray) -> Any:
    if len(op.results) == 2:
        return _place_of_extreme(op, a, initial, *others)
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
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "maximum": _plain(np.maximum),
    "minimum": _plain(np.minimum),
    "multiply": _exact(np.multiply),
    "negate": _exact(np.negative),
    "not": _plain(np.bitwise_not),
    "or": _plain(np.bitwise_or),
    "pad": _pad,
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
    "sort": _sort,
    "subtract": _exact(np.subtract),
    "transpose": lambda op, a: np.transpose(a, op.attributes["permutation"]),
    "xor": _plain(np.bitwise_xor),
}
