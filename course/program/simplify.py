"""Simplifications that every compiler applies to a Program first, and without which the analyses would misread it."""

from __future__ import annotations

from dataclasses import replace

from course.program.evaluate import counted_trips
from course.program.ir import (
    CHEAP,
    COLLECTIVES,
    ELEMENTWISE,
    Block,
    Op,
    Value,
    blocks_of,
    makers_of,
    remove_dead_code,
    walk,
)

MAX_UNROLLED = 5
_OF_BITS = (ELEMENTWISE | CHEAP | {"broadcast_in_dim", "slice"}) - {"partition_id", "replica_id"}


def add_in_place(main: Block) -> None:
    """Replace the addition of an array that is zero except for one slice by an addition to that slice.

    Autodiff of ``x[i]`` in a loop accumulates like this; XLA's algebraic simplifier turns ``add(a,
    dynamic_update_slice(0, u, i))`` into ``dynamic_update_slice(a, add(dynamic_slice(a, i), u), i)``.
    """
    makers = makers_of(main)
    for block in blocks_of(main):
        ops: list[Op] = []
        for op in block.ops:
            ops += _slice_added(op, makers) or [op]
        block.ops = ops


def _slice_added(op: Op, makers: dict[Value, Op]) -> list[Op] | None:
    if op.kind != "add":
        return None
    for whole, padded in (op.operands, op.operands[::-1]):
        update = makers.get(padded)
        if update is None or update.kind != "dynamic_update_slice" or not _is_zero(update.operands[0], makers):
            continue
        part, starts = update.operands[1], update.operands[2:]
        old, new = part.copy(), part.copy()
        return [
            Op("dynamic_slice", [whole, *starts], [old], {"slice_sizes": part.shape}, [], op.line),
            Op("add", [old, part], [new], {}, [], op.line),
            Op("dynamic_update_slice", [whole, new, *starts], op.results, {}, [], op.line),
        ]
    return None


def _is_zero(value: Value, makers: dict[Value, Op]) -> bool:
    op = makers.get(value)
    while op is not None and op.kind in ("broadcast_in_dim", "reshape", "convert"):
        op = makers.get(op.operands[0])
    if op is None or op.kind != "constant":
        return False
    return bool(op.attributes.get("zero"))


def unroll_rounds(main: Block) -> None:
    """Unroll the few rounds of a random generator.

    JAX lowers threefry to a loop of five trips only for CPUs, and to the same arithmetic without a loop for every other
    platform, whose compilers turn it into one kernel. So a loop is unrolled if it makes a constant number of trips,
    at most ``MAX_UNROLLED``, and does only elementwise arithmetic on integers.
    """
    makers = makers_of(main)
    same: dict[Value, Value] = {}
    for block in blocks_of(main):
        ops: list[Op] = []
        for op in block.ops:
            trips = counted_trips(op, makers)
            ops += _unrolled(op, trips, same) if trips is not None and _is_of_bits(op.regions[1], trips) else [op]
        block.ops = ops
    if same:
        for block in blocks_of(main):
            for op in block.ops:
                op.operands = [_followed(operand, same) for operand in op.operands]
            block.returns = [_followed(value, same) for value in block.returns]


def _is_of_bits(body: Block, trips: int) -> bool:
    values = [*body.arguments, *(value for op in body.ops for value in (*op.operands, *op.results))]
    return (
        trips <= MAX_UNROLLED
        and all(op.kind in _OF_BITS for op in body.ops)
        and all("i" in value.dtype for value in values)
    )


def _unrolled(loop: Op, trips: int, same: dict[Value, Value]) -> list[Op]:
    """The body repeated ``trips`` times; ``same`` records the values of the loop's results and trips' arguments."""
    body, carried, ops = loop.regions[1], loop.operands, []
    for _ in range(trips):
        own = dict(zip(body.arguments, carried, strict=True))
        for op in body.ops:
            results = [result.copy() for result in op.results]
            operands = [own.get(operand, operand) for operand in op.operands]
            ops.append(Op(op.kind, operands, results, op.attributes, op.regions, op.line, op.function))
            own.update(zip(op.results, results, strict=True))
        carried = [own.get(value, value) for value in body.returns]
    same.update(zip(loop.results, carried, strict=True))
    return ops


def _followed(value: Value, same: dict[Value, Value]) -> Value:
    while value in same:
        value = same[value]
    return value


def without_single_trips(main: Block) -> Block | None:
    """The program with each loop that always makes one trip replaced by its body; None if there is none.

    XLA removes such loops, and with them the stacks of one element that they update. Those that communicate are kept.
    """
    makers = makers_of(main)
    single = {
        op
        for op in walk(main)
        if counted_trips(op, makers) == 1 and not any(inner.kind in COLLECTIVES for inner in walk(op.regions[1]))
    }
    if not single:
        return None
    simplified = _inlined(main, single, {})
    remove_dead_code(simplified)
    return simplified


def _inlined(block: Block, single: set[Op], same: dict[Value, Value]) -> Block:
    """A copy of the block; ``same`` records the values of the arguments and results of removed loops."""
    ops: list[Op] = []
    for op in block.ops:
        operands = [same.get(operand, operand) for operand in op.operands]
        if op in single:
            same.update(zip(op.regions[1].arguments, operands, strict=True))
            inside = _inlined(op.regions[1], single, same)
            same.update(zip(op.results, inside.returns, strict=True))
            ops += inside.ops
        elif op.kind == "dynamic_update_slice" and op.operands[1].elements == op.results[0].elements:
            ops.append(Op("reshape", operands[1:2], op.results, {}, [], op.line))
        else:
            ops.append(
                replace(op, operands=operands, regions=[_inlined(region, single, same) for region in op.regions])
            )
    return Block(block.arguments, ops, [same.get(value, value) for value in block.returns])
