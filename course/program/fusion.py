"""Results that are never written to memory: fused into their readers, or views of another value's bytes.

The complete rules:

- An elementwise op, or one that only moves data, is fused when every reader of its result can compute it on
  the fly: other such ops, and reductions. If that moves more memory than writing it once for all of its readers, it
  is written.
- A reshape, an ``optimization_barrier``, and a slice or broadcast that keeps every element are views without
  their own bytes. So are a transpose and a slice of consecutive elements that only matmuls read: those accept
  operands in either order, at any offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from course.program.ir import ELEMENTWISE, MOVES, Block, Op, Value

_FUSED = (ELEMENTWISE | MOVES) - {"dynamic_update_slice", "scatter", "concatenate", "gather"}
_READS_ON_THE_FLY = _FUSED | {"reduce"}
# They read only the part that they select.
ADDRESSES = {"slice", "dynamic_slice", "gather"}


@dataclass(frozen=True)
class ElidedBuffers:
    """Results without a separate buffer.

    Attributes:
        fused: Results computed on the fly by their readers, with the bytes of values in memory that they need.
        views: Maps each view to the value whose bytes it shares.
    """

    fused: dict[Value, dict[Value, float]] = field(default_factory=dict)
    views: dict[Value, Value] = field(default_factory=dict)

    def origin(self, value: Value) -> Value:
        """The value whose bytes a view shares, through views of views; else the value itself."""
        while value in self.views:
            value = self.views[value]
        return value

    def reads(self, op: Op) -> dict[Value, float]:
        """Bytes that an op reads, by the value in memory, including reads of ops fused into it."""
        reads = self.inputs(op.operands)
        if op.kind in ADDRESSES:
            return {value: min(size, float(op.results[0].bytes)) for value, size in reads.items()}
        return reads

    def inputs(self, operands: Iterable[Value]) -> dict[Value, float]:
        """Bytes of some operands, by the value in memory."""
        sizes: dict[Value, float] = {}
        for operand in dict.fromkeys(operands):
            for value, size in self.fused.get(operand, {operand: float(operand.bytes)}).items():
                sizes[value] = max(size, sizes.get(value, 0.0))
        return sizes


def elided_buffers(block: Block) -> ElidedBuffers:
    """Results of this block, and of those inside it, that need no buffer."""
    elided = ElidedBuffers()
    _find(block, elided)
    return elided


def _find(block: Block, elided: ElidedBuffers) -> None:
    uses: dict[Value, list[Op]] = {}
    pinned, for_matmuls = set(block.returns), set()
    for op in block.ops:
        for operand in op.operands:
            uses.setdefault(operand, []).append(op)
        for region in op.regions:
            _find(region, elided)
            pinned |= captured(region)
    for op in reversed(block.ops):
        if not op.results:
            continue
        result = op.results[0]
        readers = uses.get(result, [])
        if result not in pinned and all(r.kind == "dot_general" or r.results[0] in for_matmuls for r in readers):
            for_matmuls.add(result)
        if _keeps_bytes(op) or (result in for_matmuls and _is_layout(op)):
            source = op.operands[1:2] if op.kind == "dynamic_update_slice" else op.operands
            elided.views.update(zip(op.results, source, strict=False))
        else:
            for_matmuls.discard(result)
            if op.kind not in _FUSED and op.kind != "constant":
                continue
        if op.kind != "optimization_barrier" and result not in pinned and _on_the_fly(result, readers, elided):
            elided.fused[result] = {}
    for op in block.ops:
        if op.results and op.results[0] in elided.fused:
            result, reads = op.results[0], elided.reads(op)
            readers, read_bytes = len(_readers(result, uses, elided)), sum(reads.values())
            if result.elements > 1 and readers * read_bytes > read_bytes + (readers + 1) * result.bytes:
                del elided.fused[result]
            else:
                elided.fused[result] = reads


def _readers(result: Value, uses: dict[Value, list[Op]], elided: ElidedBuffers) -> set[Op]:
    """The ops that read a result, itself or through a view."""
    readers, results = set(), [result]
    while results:
        source = results.pop()
        for reader in uses.get(source, []):
            if reader.results and elided.views.get(reader.results[0]) is source:
                results.append(reader.results[0])
            else:
                readers.add(reader)
    return readers


def _on_the_fly(result: Value, readers: list[Op], elided: ElidedBuffers) -> bool:
    """Check that every reader can compute ``result`` itself; for a view, the readers of the view count."""
    return all(
        reader.results[0] in elided.fused
        if reader.results and reader.results[0] in elided.views and elided.views[reader.results[0]] is result
        else reader.kind in _READS_ON_THE_FLY
        or (reader.kind == "dynamic_update_slice" and reader.operands[0] is not result)
        for reader in readers
    )


def _keeps_bytes(op: Op) -> bool:
    if op.kind in ("reshape", "optimization_barrier"):
        return True
    if op.kind in ("slice", "dynamic_slice", "broadcast_in_dim"):
        return op.results[0].elements == op.operands[0].elements
    return op.kind == "dynamic_update_slice" and op.operands[1].elements == op.results[0].elements


def _is_layout(op: Op) -> bool:
    """Check that a matmul can read the result in place: a permutation of dims, or a part without gaps."""
    if op.kind == "transpose":
        return True
    if op.kind not in ("slice", "dynamic_slice"):
        return False
    whole, part = op.operands[0].shape, op.results[0].shape
    first = next((i for i, dim in enumerate(part) if dim > 1), len(part))
    steps = op.attributes.get("strides", (1,) * len(part))
    return part[first + 1 :] == whole[first + 1 :] and all(step == 1 for step in steps)


def captured(block: Block) -> set[Value]:
    """Values that a region captures from outside."""
    own = set(block.arguments)
    values: set[Value] = set()
    for op in block.ops:
        values.update(operand for operand in op.operands if operand not in own)
        for region in op.regions:
            values |= captured(region) - own
        own.update(op.results)
    return values | {value for value in block.returns if value not in own}


def last_uses(block: Block, free: ElidedBuffers, kept: Iterable[Value] = ()) -> dict[Value, float]:
    """The index of the last op of the block that reads a value's bytes.

    It is infinite for bytes that the block returns, and for those of ``kept``. Reading an alias, or a fused result
    computed from a value, reads the value.
    """
    origins: dict[Value, frozenset[Value]] = {}
    last: dict[Value, float] = {}

    def origins_of(value: Value) -> frozenset[Value]:
        return origins.get(value, frozenset((value,)))

    def read(value: Value, reader: float) -> None:
        last.update(dict.fromkeys(origins_of(value), reader))

    for i, op in enumerate(block.ops):
        for value in (*op.operands, *(inner for region in op.regions for inner in captured(region))):
            read(value, i)
        if op.results and op.results[0] in free.views:
            for result in op.results:
                origins[result] = origins_of(free.views[result])
        elif op.results and op.results[0] in free.fused:
            origins[op.results[0]] = frozenset().union(*map(origins_of, op.operands))
    for value in (*block.returns, *kept):
        read(value, math.inf)
    uses = {}
    for value in {*origins, *last}:
        # An alias shares the bytes of one value; anything else has its own bytes.
        origin = next(iter(origins_of(value))) if len(origins_of(value)) == 1 else value
        if origin in last:
            uses[value] = last[origin]
    return uses
