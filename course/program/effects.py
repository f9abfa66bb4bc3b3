"""Values that depend on inputs, and those without an effect on any result: all zero, or only multiplied by zeros."""

from __future__ import annotations

from course.program.ir import Block, Op, Value, walk


def depending(main: Block) -> set[Value]:
    """The values that depend on an input, and those that are all zero: a product with zeros selects nothing."""
    dependent = set(main.arguments)
    _spread(main, dependent)
    return dependent | _all_zero(main)


def without_effect(main: Block) -> set[Value]:
    """The values that are all zero, and those that are only multiplied by zeros, in whichever shape."""
    zeros = _all_zero(main)
    idle = set(zeros)
    readers: dict[Value, list[Op]] = {}
    returned: set[Value] = set()
    ops = list(walk(main))
    for block in (main, *(region for op in ops for region in op.regions)):
        returned.update(block.returns)
    for op in ops:
        for operand in op.operands:
            readers.setdefault(operand, []).append(op)

    def ignores(reader: Op, value: Value) -> bool:
        if reader.kind == "multiply":
            return any(operand in zeros for operand in reader.operands if operand is not value)
        return reader.kind in _SAME_NUMBERS and reader.results[0] in idle

    for op in reversed(ops):
        for value in () if op.regions else op.results:
            if value not in returned and readers.get(value) and all(ignores(r, value) for r in readers[value]):
                idle.add(value)
    return idle


# Operations whose result has the numbers of their operand.
_SAME_NUMBERS = {"reshape", "transpose", "broadcast_in_dim", "convert"}
# Operations whose result is zero if one of their operands is, and those for which all must be.
_ZERO_IF_ANY = {"multiply", "dot_general", "and"}
_ZERO_IF_ALL = {"add", "subtract", "negate", "tanh", "concatenate", "dynamic_update_slice", "pad", "reduce", "sqrt"}
_ZERO_AS_FIRST = {"reshape", "transpose", "broadcast_in_dim", "slice", "dynamic_slice", "convert", "gather"}


def _all_zero(main: Block) -> set[Value]:
    zeros: set[Value] = set()
    _spread_zeros(main, zeros)
    return zeros


def _spread_zeros(block: Block, zeros: set[Value]) -> None:
    """Add the values that are all zero for any inputs, as far as that follows from operation to operation."""
    for op in block.ops:
        if op.kind == "while":
            _spread_zeros_loop(op, zeros)
            continue
        for region in op.regions:
            _spread_zeros(region, zeros)
        if op.kind == "case":
            returned = zip(*(region.returns for region in op.regions), strict=True)
            zeros.update(
                result for result, values in zip(op.results, returned, strict=True) if zeros.issuperset(values)
            )
            continue
        known = [operand in zeros for operand in op.operands]
        if (
            op.attributes.get("zero")
            or (op.kind in _ZERO_IF_ANY and any(known))
            or (op.kind in _ZERO_IF_ALL and all(known[: 2 if op.kind == "dynamic_update_slice" else None]))
            or (op.kind in _ZERO_AS_FIRST and known[0])
            or (op.kind == "select" and all(known[1:]))
        ):
            zeros.update(op.results)


def _spread_zeros_loop(op: Op, zeros: set[Value]) -> None:
    """A carried value is zero if it begins as zero and every trip returns zero."""
    carried = [operand in zeros for operand in op.operands]
    while True:
        inside = set(zeros)
        for region in op.regions:
            inside.update(argument for argument, zero in zip(region.arguments, carried, strict=True) if zero)
            _spread_zeros(region, inside)
        after = [zero and value in inside for zero, value in zip(carried, op.regions[1].returns, strict=True)]
        if after == carried:
            break
        carried = after
    zeros |= inside
    zeros.update(result for result, zero in zip(op.results, carried, strict=True) if zero)


def _spread(block: Block, dependent: set[Value]) -> None:
    for op in block.ops:
        if op.kind == "while":
            _spread_loop(op, dependent)
        else:
            for region in op.regions if op.kind == "case" else ():
                _spread(region, dependent)
            inner = [value for region in op.regions for value in region.returns] if op.kind == "case" else []
            if any(value in dependent for value in (*op.operands, *inner)):
                dependent.update(op.results)


def _spread_loop(op: Op, dependent: set[Value]) -> None:
    condition, body = op.regions
    carried = [operand in dependent for operand in op.operands]
    while True:
        for argument, other, depends in zip(body.arguments, condition.arguments, carried, strict=True):
            if depends:
                dependent.update((argument, other))
        _spread(body, dependent)
        updated = [depends or value in dependent for depends, value in zip(carried, body.returns, strict=True)]
        if updated == carried:
            break
        carried = updated
    dependent.update(result for result, depends in zip(op.results, carried, strict=True) if depends)
