"""Small integers and booleans, evaluated per device, so that trip counts and branches resolve.

No floats: how a compiler rounds, fuses and flushes them is its own affair. Only arrays of up to 4,096 elements whose
inputs are all known are computed; everything else is unknown, and a trip count or branch that depends on something
unknown is an error that names the op and its line. Where a module allows it, such a branch is taken on its dearer side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from course.program.ir import COLLECTIVES, Block, Module, Op, Value, unsupported, walk

MAX_ELEMENTS = 4096
# Operations that are evaluated for one device, those on many elements counted more.
MAX_EVALUATED = 1_000_000
MAX_DECISIONS = 1_000_000
Known = dict[Value, np.ndarray]

_DTYPES = {"i1": np.bool_}
_DTYPES |= {f"{u}i{bits}": np.dtype(f"{u and 'u'}int{bits}").type for u in ("", "u") for bits in (8, 16, 32, 64)}


def decide(module: Module, device: int) -> tuple[int, ...]:
    """What ``device`` decides, in order: 1 or 0 before each trip of a loop, and the number of each branch taken.

    Raises:
        ProgramError: A trip count or a branch depends on data.
    """
    return _Run(module, device).decisions()


def executed(block: Block, decisions: Iterator[int]) -> Iterator[Block]:
    """Every block that runs, each time that it runs, by the decisions of one device."""
    yield block
    for op in control(block):
        if op.kind == "while":
            condition, body = op.regions
            yield from executed(condition, decisions)
            while next(decisions):
                yield from executed(body, decisions)
                yield from executed(condition, decisions)
        else:
            yield from executed(op.regions[next(decisions)], decisions)


def control(block: Block) -> list[Op]:
    """The loops and branches of a block, in order."""
    return [op for op in block.ops if op.kind in ("while", "case")]


def depends_on_device(module: Module) -> bool:
    """Whether devices may decide differently; if not, they all run the same ops."""
    return any(op.kind in ("partition_id", "replica_id") for op in _deciding(module.main))


def _deciding(main: Block) -> set[Op]:
    """The ops that loops and branches depend on."""
    makers = {result: op for op in walk(main) for result in op.results}
    carries = {}
    for op in walk(main):
        for region in op.regions if op.kind == "while" else ():
            carries |= {argument: (op, i) for i, argument in enumerate(region.arguments)}
    queue = [value for op in walk(main) for value in _decided_by(op)]
    found: set[Op] = set()
    seen: set[Value] = set()
    while queue:
        value = queue.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in carries:
            loop, i = carries[value]
            queue += [loop.operands[i], loop.regions[1].returns[i]]
        op = makers.get(value)
        if op is None:
            continue
        if op.kind in ("while", "case"):
            index = op.results.index(value)
            queue += [region.returns[index] for region in (op.regions[1:] if op.kind == "while" else op.regions)]
            queue += [op.operands[index]] if op.kind == "while" else []
        elif op.kind == "optimization_barrier":
            found.add(op)
            queue.append(op.operands[op.results.index(value)])
        else:
            found.add(op)
            queue += op.operands
    return found


def _decided_by(op: Op) -> list[Value]:
    if op.kind == "while":
        return [op.regions[0].returns[0]]
    return [op.operands[0]] if op.kind == "case" else []


class _Run:
    """Evaluates for one device what its decisions depend on, and nothing else."""

    def __init__(self, module: Module, device: int):
        self.main, self.device, self.data_branches = module.main, device, module.data_branches
        self.known: Known = {}
        self.found: list[int] = []
        self.left: float = MAX_EVALUATED
        deciding = _deciding(module.main)
        blocks = [module.main, *(region for op in walk(module.main) for region in op.regions)]
        self.relevant = {b: [op for op in b.ops if op in deciding or op.kind in ("while", "case")] for b in blocks}

    def decisions(self) -> tuple[int, ...]:
        self._run(self.main)
        return tuple(self.found)

    def _run(self, block: Block) -> None:
        for op in self.relevant[block]:
            self.left -= 1 + sum(result.elements for result in op.results if result.elements <= MAX_ELEMENTS) / 64
            if self.left < 0:
                raise unsupported(op, op.line, "following the program's counters takes too long; use fewer trips")
            if op.kind == "while":
                self._loop(op)
            elif op.kind == "case":
                self._branch(op)
            else:
                _evaluate(op, self.known, self.device)

    def _decide(self, choice: int, op: Op) -> None:
        if len(self.found) >= MAX_DECISIONS:
            raise unsupported(op, op.line, f"loops run more than {MAX_DECISIONS:,} times in all")
        self.found.append(choice)

    def _branch(self, op: Op) -> None:
        index = self.known.get(op.operands[0])
        if index is None and not self.data_branches:
            raise unsupported(op, op.line, "which branch runs depends on data, so its cost cannot be known")
        if index is None:
            position = _dearer(op)
        else:
            position = int(index) if 0 <= int(index) < len(op.regions) else len(op.regions) - 1
        self._decide(position, op)
        self._run(op.regions[position])
        if index is None:
            for result in op.results:
                self.known.pop(result, None)
        else:
            _bind(op.results, op.regions[position].returns, self.known)

    def _loop(self, op: Op) -> None:
        condition, body = op.regions
        _bind(body.arguments, op.operands, self.known)
        while True:
            _bind(condition.arguments, body.arguments, self.known)
            self._run(condition)
            proceed = self.known.get(condition.returns[0])
            if proceed is None:
                raise unsupported(op, op.line, "how often this loop runs depends on data, so its cost cannot be known")
            self._decide(int(bool(proceed)), op)
            if not proceed:
                break
            self._run(body)
            _bind(body.arguments, body.returns, self.known)
        _bind(op.results, body.arguments, self.known)


def _dearer(op: Op) -> int:
    """The side of a branch that gives more elements, one that depends on data and may hold no collective.

    Raises:
        ProgramError: A side holds a collective: devices that take different sides would wait for each other.
    """
    for inner in (inner for region in op.regions for inner in walk(region)):
        if inner.kind in COLLECTIVES:
            raise unsupported(inner, inner.line, "a collective in a branch that depends on data may not be reached")
    work = [sum(result.elements for inner in walk(region) for result in inner.results) for region in op.regions]
    return work.index(max(work))


def _bind(targets: list[Value], sources: list[Value], known: Known) -> None:
    values = [known.get(source) for source in sources]
    for target, value in zip(targets, values, strict=True):
        if value is None:
            known.pop(target, None)
        else:
            known[target] = value


def _evaluate(op: Op, known: Known, device: int) -> None:
    """Put the op's result among the known values if it can be computed; forget an older one if not."""
    if op.kind == "optimization_barrier":  # of remat: each value by itself, whatever passes beside it
        _bind(op.results, op.operands, known)
        return
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
