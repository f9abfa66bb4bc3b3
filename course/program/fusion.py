"""Which results are never written to memory, because compilers fuse them into what reads them.

An elementwise op, or one that only moves data, writes nothing when everything that reads its result can compute it
on the fly: other such ops, and reductions.
"""

from __future__ import annotations

from course.program.ir import ELEMENTWISE, MOVES, Block, Op, Value

_FUSED = (ELEMENTWISE | MOVES) - {"dynamic_update_slice", "scatter", "concatenate", "gather"}
_READS_ON_THE_FLY = _FUSED | {"reduce"}


def fused_values(block: Block) -> set[Value]:
    """Results that are never written to memory, in this block and those inside it."""
    uses: dict[Value, list[Op]] = {}
    pinned = set(block.returns)
    fused: set[Value] = set()
    for op in block.ops:
        for operand in op.operands:
            uses.setdefault(operand, []).append(op)
        for region in op.regions:
            fused |= fused_values(region)
            pinned |= captured(region)
    for op in reversed(block.ops):
        if op.kind not in _FUSED and op.kind != "constant" and op.kind != "reshape":
            continue
        result = op.results[0]
        readers = uses.get(result, [])
        on_the_fly = all(
            reader.kind in _READS_ON_THE_FLY
            or (reader.kind == "reshape" and reader.results[0] in fused)
            or (reader.kind == "dynamic_update_slice" and reader.operands[0] is not result)
            for reader in readers
        )
        if result not in pinned and on_the_fly:
            fused.add(result)
    return fused


def captured(block: Block) -> set[Value]:
    """Values that a region uses without having been given them."""
    own = set(block.arguments)
    found: set[Value] = set()
    for op in block.ops:
        found.update(operand for operand in op.operands if operand not in own)
        for region in op.regions:
            found |= captured(region) - own
        own.update(op.results)
    return found | {value for value in block.returns if value not in own}
