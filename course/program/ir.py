"""A Program's operations as plain Python, so that the analyses need not know MLIR; ``stablehlo`` reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from course.program.program import ProgramError

COLLECTIVES = {"all_gather", "all_reduce", "all_to_all", "collective_broadcast", "collective_permute", "reduce_scatter"}
ELEMENTWISE = set(
    "abs add and atan2 bitcast_convert cbrt ceil clamp compare complex convert cosine count_leading_zeros divide "
    "exponential exponential_minus_one floor imag is_finite log log_plus_one logistic maximum minimum multiply negate "
    "not or popcnt power real reduce_precision remainder round_nearest_afz round_nearest_even rsqrt select shift_left "
    "shift_right_arithmetic shift_right_logical sign sine sqrt subtract tan tanh xor erf".split()
)
MOVES = set(
    "broadcast_in_dim concatenate dynamic_slice dynamic_update_slice gather iota pad reverse scatter slice "
    "transpose".split()
)
CHEAP = {"constant", "reshape", "optimization_barrier", "partition_id", "replica_id", "return"}
# Ops that compilers fold into layouts and addresses: they take no time, and wait only for their operands.
FOLDED = set("constant reshape transpose slice dynamic_slice optimization_barrier partition_id replica_id".split())
# CHLO functions in partitioned modules, and functions of libraries or single kernels: predictions price them,
# and submissions may not contain them.
FUNCTIONS = set("acos acosh asin asinh atan atanh cosh sinh".split())
ELEMENTWISE |= FUNCTIONS
LIBRARY = {"fft", "select_and_scatter"}
OTHER = {"case", "dot_general", "reduce", "while", "sort", "reduce_window", "rng_bit_generator"}
KNOWN = COLLECTIVES | (ELEMENTWISE - FUNCTIONS) | MOVES | CHEAP | OTHER


@dataclass(eq=False, slots=True)
class Value:
    """An array computed by an op or taken by a block: the part on one device."""

    shape: tuple[int, ...]
    dtype: str
    bits: int

    def copy(self) -> Value:
        """Another value of the same shape and dtype."""
        return Value(self.shape, self.dtype, self.bits)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.elements * self.bits // 8)


@dataclass(eq=False, slots=True)
class Block:
    """A sequence of operations: the body of a program, a loop or a branch."""

    arguments: list[Value]
    ops: list[Op] = field(default_factory=list)
    returns: list[Value] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Op:
    """One operation. ``kind`` is StableHLO's name without its prefix, ``line`` is ``cell:line`` or empty.

    ``function`` is the function that the learner called to get the operation, such as ``jnp.roll``, if known.
    """

    kind: str
    operands: list[Value]
    results: list[Value]
    attributes: dict[str, Any]
    regions: list[Block]
    line: str
    function: str = ""

    @property
    def name(self) -> str:
        """Name for messages: ``slice in jnp.roll``."""
        return f"{self.kind} in {self.function}" if self.function else self.kind


@dataclass(frozen=True)
class Module:
    """The program of one device. ``main`` maps the local blocks of the Program's inputs to those of its outputs.

    ``data_branches`` means that a branch may depend on data: it then counts as the more expensive branch. ``alike``
    means that all devices take the same branch, as XLA's partitioner ensures. ``shorter`` is the same without loops
    that always make one trip, for analyses of what runs; None if it has no such loop. ``followed`` caches the result of
    ``evaluate`` for each device.
    """

    main: Block
    mesh: dict[str, int]
    data_branches: bool = False
    alike: bool = False
    shorter: Module | None = field(default=None, compare=False, repr=False)
    followed: Any = field(default=None, compare=False, repr=False)


def plain_kind(kind: str) -> str:
    """The common name of an operation: ``matmul``, ``all-gather``, ``permute``."""
    return "matmul" if kind == "dot_general" else kind.replace("_", "-").replace("collective-", "")


def unsupported(op: Op | None, line: str, what: str) -> ProgramError:
    """The error for something that an analysis cannot resolve: names the op and the learner's line."""
    name = f"{op.name}: " if op else ""
    return ProgramError(f"{name}{what}", line)


def dims_of(numbers: str, name: str) -> list[int]:
    """The dims that a dimension-numbers attribute lists under a name."""
    match = re.search(rf"{name} = \[([\d, ]*)\]", numbers)
    return [int(dim) for dim in match[1].split(",") if dim.strip()] if match else []


def walk(block: Block) -> Iterator[Op]:
    """All ops, depth first, in program order."""
    for op in block.ops:
        yield op
        for region in op.regions:
            yield from walk(region)


def is_uniform(constant: Op) -> bool:
    """Return True if all elements of a constant are known to be equal."""
    numbers = constant.attributes.get("value")
    if constant.results[0].elements == 1 or constant.attributes.get("zero"):
        return True
    return numbers is not None and bool(np.all(numbers == numbers.flat[:1]))


def makers_of(main: Block) -> dict[Value, Op]:
    """The op that computes each value."""
    return {result: op for op in walk(main) for result in op.results}


def blocks_of(main: Block) -> list[Block]:
    """The block and all blocks inside it."""
    return [main, *(region for op in walk(main) for region in op.regions)]


def ready_order(items: Iterable[tuple[Iterable[Value], Iterable[Value], bool]]) -> list[int]:
    """The order in which moving items come directly after the producer of their last operand.

    Args:
        items: The values read, the values produced, and whether the item moves.
    """
    produced_at: dict[Value, int] = {}
    places = []
    for number, (reads, gives, moves) in enumerate(items):
        place = max((produced_at.get(value, -1) for value in reads), default=-1) if moves else number
        produced_at.update(dict.fromkeys(gives, place))
        places.append((place, moves, number))
    return [number for *_, number in sorted(places)]


def remove_dead_code(block: Block) -> None:
    """Remove ops whose results are unused, loop-carried values included. No op here has side effects."""
    _sweep(block, set(block.returns))


def _sweep(block: Block, live: set[Value]) -> set[Value]:
    """Keep the ops needed for ``live``; return ``live`` with everything that the kept ops use."""
    live_ops = []
    for op in reversed(block.ops):
        if op.kind == "while":
            _trim_while(op, live)
        elif op.kind == "case":
            _trim_case(op, live)
        if not any(result in live for result in op.results):
            continue
        live_ops.append(op)
        live.update(op.operands)
        for region in op.regions:
            live.update(region.returns)
            _sweep(region, live)
    block.ops = live_ops[::-1]
    return live


def _trim_while(op: Op, live: set[Value]) -> None:
    """Drop carried values that neither the loop's users nor its condition nor a kept carry needs."""
    condition, body = op.regions
    needed = {i for i, result in enumerate(op.results) if result in live}
    if not needed:
        return
    while True:
        roots = {body.returns[i] for i in needed} | set(condition.returns)
        used = _needed_values(condition, set(condition.returns)) | _needed_values(body, roots)
        grown = needed | {
            i for i in range(len(op.operands)) if body.arguments[i] in used or condition.arguments[i] in used
        }
        if grown == needed:
            break
        needed = grown
    keep = sorted(needed)
    op.operands = [op.operands[i] for i in keep]
    op.results = [op.results[i] for i in keep]
    for region in op.regions:
        region.arguments = [region.arguments[i] for i in keep]
    body.returns = [body.returns[i] for i in keep]


def _trim_case(op: Op, live: set[Value]) -> None:
    keep = [i for i, result in enumerate(op.results) if result in live]
    op.results = [op.results[i] for i in keep]
    for region in op.regions:
        region.returns = [region.returns[i] for i in keep]


def _needed_values(block: Block, live: set[Value]) -> set[Value]:
    """``live`` with everything that computing it uses; the block is unchanged."""
    for op in reversed(block.ops):
        if any(result in live for result in op.results):
            live.update(op.operands)
            for region in op.regions:
                live.update(region.returns)
                _needed_values(region, live)
    return live
