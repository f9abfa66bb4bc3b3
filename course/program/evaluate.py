"""Small integers and booleans, evaluated per device, so that trip counts and branches resolve.

No floats: how a compiler rounds, fuses and flushes them is its own affair. Only arrays of up to 4,096 elements whose
inputs are all known are computed; everything else is unknown, and a trip count or branch that depends on something
unknown is an error that names the op and its line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from course.program.ir import Block, Module, Op, Value, unsupported, walk

MAX_ELEMENTS = 4096
MAX_TRIPS = 1_000_000
Known = dict[Value, np.ndarray]

_DTYPES = {"i1": np.bool_}
_DTYPES |= {f"{u}i{bits}": np.dtype(f"{u and 'u'}int{bits}").type for u in ("", "u") for bits in (8, 16, 32, 64)}


def execute(module: Module, device: int) -> Iterator[Op]:
    """Every op that ``device`` executes, in order, loops unrolled.

    Raises:
        ProgramError: A trip count or a branch depends on data.
    """
    yield from _run(module.main, {}, device)


def depends_on_device(module: Module) -> bool:
    """Whether devices may execute different ops; if not, one device stands for all, exactly."""
    return any(op.kind in ("partition_id", "replica_id") for op in walk(module.main))


def _run(block: Block, known: Known, device: int) -> Iterator[Op]:
    for op in block.ops:
        if op.kind == "while":
            yield op
            yield from _loop(op, known, device)
        elif op.kind == "case":
            yield op
            index = known.get(op.operands[0])
            if index is None:
                raise unsupported(op, op.line, "which branch runs depends on data, so its cost cannot be known")
            position = int(index)
            branch = op.regions[position if 0 <= position < len(op.regions) else -1]
            yield from _run(branch, known, device)
            _bind(op.results, branch.returns, known)
        else:
            _evaluate(op, known, device)
            yield op


def _loop(op: Op, known: Known, device: int) -> Iterator[Op]:
    condition, body = op.regions
    _bind(body.arguments, op.operands, known)
    for _ in range(MAX_TRIPS):
        _bind(condition.arguments, body.arguments, known)
        yield from _run(condition, known, device)
        proceed = known.get(condition.returns[0])
        if proceed is None:
            raise unsupported(op, op.line, "how often this loop runs depends on data, so its cost cannot be known")
        if not bool(proceed):
            break
        yield from _run(body, known, device)
        _bind(body.arguments, body.returns, known)
    else:
        raise unsupported(op, op.line, f"this loop runs more than {MAX_TRIPS:,} times")
    _bind(op.results, body.arguments, known)


def _bind(targets: list[Value], sources: list[Value], known: Known) -> None:
    values = [known.get(source) for source in sources]
    for target, value in zip(targets, values, strict=True):
        if value is None:
            known.pop(target, None)
        else:
            known[target] = value


def _evaluate(op: Op, known: Known, device: int) -> None:
    """Put the op's result among the known values if it can be computed; forget an older one if not."""
    for result in op.results:
        known.pop(result, None)
    if not op.results or any(result.elements > MAX_ELEMENTS or result.dtype not in _DTYPES for result in op.results):
        return
    if op.kind == "partition_id":
        known[op.results[0]] = np.array(device, np.uint32)
        return
    operands = [known.get(operand) for operand in op.operands]
    if any(operand is None for operand in operands):
        return
    if op.kind == "optimization_barrier":
        known.update(zip(op.results, operands, strict=True))  # type: ignore[arg-type]
        return
    rule = _RULES.get(op.kind)
    if rule is None:
        return
    try:
        with np.errstate(all="ignore"):
            value = rule(op, *operands)
    except (TypeError, ValueError, IndexError):  # a form that the rule does not know: unknown, never guessed
        return
    if value is not None:
        known[op.results[0]] = np.asarray(value).astype(_DTYPES[op.results[0].dtype]).reshape(op.results[0].shape)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda op, *operands: function(*operands)


def _divide(a: np.ndarray, b: np.ndarray) -> Any:
    if _undefined(a, b):
        return None
    quotient = np.abs(a) // np.abs(b)  # StableHLO rounds to zero, NumPy down
    return np.where((a < 0) != (b < 0), -quotient.astype(a.dtype), quotient)


def _remainder(a: np.ndarray, b: np.ndarray) -> Any:
    return None if _undefined(a, b) else np.fmod(a, b)


def _undefined(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether integer division overflows or divides by zero somewhere."""
    signed = np.issubdtype(a.dtype, np.signedinteger)
    return bool(np.any(b == 0) or (signed and np.any((a == np.iinfo(a.dtype).min) & (b == -1))))


def _compare(op: Op, a: np.ndarray, b: np.ndarray) -> Any:
    direction = re.search(r"EQ|NE|LE|LT|GE|GT", op.attributes["comparison_direction"])
    compare = {"EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal}
    compare |= {"GT": np.greater, "GE": np.greater_equal}
    return compare[direction[0]](a, b) if direction else None


def _broadcast(op: Op, a: np.ndarray) -> Any:
    dims = op.attributes["broadcast_dimensions"]
    shape = [1] * len(op.results[0].shape)
    for dim, size in zip(dims, np.shape(a), strict=True):
        shape[dim] = size
    return np.broadcast_to(np.reshape(a, shape), op.results[0].shape)


def _slice(op: Op, a: np.ndarray) -> Any:
    bounds = (op.attributes[key] for key in ("start_indices", "limit_indices", "strides"))
    return a[tuple(slice(*bound) for bound in zip(*bounds, strict=True))]


def _starts(a: np.ndarray, sizes: tuple[int, ...], starts: tuple[np.ndarray, ...]) -> tuple[slice, ...]:
    if any(int(start) > 2**31 - 1 for start in starts):
        raise ValueError("compilers do not agree what such a start means")
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
    reducers = {"add": np.add, "maximum": np.maximum, "minimum": np.minimum, "multiply": np.multiply}
    reducers |= {"and": np.bitwise_and, "or": np.bitwise_or}
    if len(ops) != 1 or ops[0].kind not in reducers or len(op.results) != 1:
        return None
    if ops[0].operands != block.arguments or block.returns != ops[0].results:
        return None
    return reducers[ops[0].kind].reduce(a, axis=tuple(op.attributes["dimensions"]), initial=initial, dtype=a.dtype)


_RULES: dict[str, Callable[..., Any]] = {
    "constant": lambda op: op.attributes.get("value"),
    "abs": _plain(np.abs),
    "add": _plain(np.add),
    "and": _plain(np.bitwise_and),
    "broadcast_in_dim": _broadcast,
    "clamp": _plain(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
    "compare": _compare,
    "concatenate": lambda op, *parts: np.concatenate(parts, axis=op.attributes["dimension"]),
    "convert": _plain(lambda x: x),
    "divide": _plain(_divide),
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "maximum": _plain(np.maximum),
    "minimum": _plain(np.minimum),
    "multiply": _plain(np.multiply),
    "negate": _plain(np.negative),
    "not": _plain(lambda x: np.logical_not(x) if x.dtype == np.bool_ else np.bitwise_not(x)),
    "or": _plain(np.bitwise_or),
    "reduce": _reduce,
    "remainder": _plain(_remainder),
    "reshape": lambda op, a: np.reshape(a, op.results[0].shape),
    "reverse": lambda op, a: np.flip(a, op.attributes["dimensions"]),
    "select": _plain(np.where),
    "sign": _plain(np.sign),
    "slice": _slice,
    "subtract": _plain(np.subtract),
    "transpose": lambda op, a: np.transpose(a, op.attributes["permutation"]),
    "xor": _plain(np.bitwise_xor),
}
