"""What every compiler does to a Program first, and what the analyses would otherwise misread."""

from __future__ import annotations

from course.program.ir import Block, Op, Value, walk


def add_in_place(main: Block) -> None:
    """Adding zeros with a slice set in them adds to that slice alone.

    Autodiff of ``x[i]`` in a loop accumulates so; XLA's algebraic simplifier turns ``add(a, dynamic_update_slice(0,
    u, i))`` into ``dynamic_update_slice(a, add(dynamic_slice(a, i), u), i)``.
    """
    makers = {result: op for op in walk(main) for result in op.results}
    for block in [main, *(region for op in walk(main) for region in op.regions)]:
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
        old, new = (Value(part.shape, part.dtype, part.bits) for _ in range(2))
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
