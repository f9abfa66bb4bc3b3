"""Memory: resident bytes on one device while a Program runs, by liveness over its operations in program order.

The complete rules; ``fusion`` decides which results have no separate buffer:

- Every buffer lives from the op that writes it to the last op that reads it, or reads a result fused with it or a
  view of it.
- An update of a slice writes in place when the old value is not read later; so do an elementwise op and an
  all-reduce into an operand of the same size that dies there, and a transpose, which compilers fold into the layout.
- A loop's carried values live as long as the loop. One that the body passes through unchanged reuses the input
  buffer; one that the body recomputes needs a second buffer while the old one is still in use.
- An output that gets a donated input's buffer is written there by its op, once the old value is read; a loop may work
  there from the start if its carry starts from that input. Until then a donated input cannot be reused for anything
  else: gradients accumulated meanwhile are temporaries. An output made too early is a temporary, moved at the end.
- Other outputs are resident all the time, including values that are updated in place to become one.
- Inputs and outputs are counted separately; **temporaries** are everything else. Fragmentation is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from course.program.fusion import ElidedBuffers, captured, elided_buffers, last_uses
from course.program.ir import COLLECTIVES, ELEMENTWISE, FOLDED, Block, Module, Op, Value, ready_order
from course.program.program import Program

# Ops that may write over an operand as they read it.
_UPDATES = {"dynamic_update_slice", "scatter"}
_REPLACING = ELEMENTWISE | _UPDATES | {"transpose", "all_reduce"}


@dataclass(frozen=True)
class Alive:
    """A temporary that is alive at the peak."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    kind: str
    line: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: Resident bytes of the inputs.
        outputs: Resident bytes of the outputs, including those that reuse a donated input.
        aliased: The part of the outputs that reuses donated inputs.
        temporaries: Peak bytes in addition to inputs and outputs.
        alive: The temporaries at the peak, largest first.
        largest: The single temporary with the most numbers, at any moment; None if there is none.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    alive: tuple[Alive, ...]
    largest: Alive | None = None

    @property
    def largest_numbers(self) -> int:
        """Number of numbers in ``largest``."""
        return _numbers(self.largest.shape, self.largest.bytes) if self.largest else 0

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def to_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


def _numbers(shape: tuple[int, ...], size: int) -> int:
    """Elements, where one larger than a float32 counts as several: a complex number, two packed in one."""
    return max(math.prod(shape), size // 4)


@dataclass(eq=False, slots=True)
class _Buffer:
    bytes: int
    start: int
    end: int
    value: Value
    op: Op | None
    role: str = "temporary"


@dataclass(eq=False)
class _State:
    clock: int = 0
    buffers: list[_Buffer] = field(default_factory=list)
    # Buffers with each value's bytes: one, or, for a fused value, those of everything it is computed from.
    places: dict[Value, tuple[_Buffer, ...]] = field(default_factory=dict)
    # Results that are written into a donated input's buffer.
    output_aliases: dict[Value, Value] = field(default_factory=dict)

    def new(self, value: Value, op: Op | None, role: str = "temporary") -> None:
        if value in self.output_aliases:
            self.places[value] = self.places[self.output_aliases[value]]
            self.places[value][0].role = "output"
            return
        buffer = _Buffer(value.bytes, self.clock, self.clock, value, op, role)
        self.buffers.append(buffer)
        self.places[value] = (buffer,)

    def read(self, value: Value) -> None:
        for buffer in self.places.get(value, ()):
            buffer.end = max(buffer.end, self.clock)


def issued_early(block: Block) -> Block:
    """The same block with each collective directly after its last dependency, as the timeline issues it ready-first.

    Ops that compilers fold into addresses move with it.
    """
    ops = [
        replace(op, regions=[issued_early(region) for region in op.regions]) if op.regions else op for op in block.ops
    ]
    order = ready_order((op.operands, op.results, op.kind in COLLECTIVES | FOLDED) for op in ops)
    return Block(block.arguments, [ops[number] for number in order], block.returns)


def memory(module: Module, program: Program, *, early: bool = False) -> Memory:
    """Liveness of the Program on one device.

    Args:
        module: ``parse(program)``.
        program: Provides the signature, including the donated inputs.
        early: Count a collective's result from its ready-first issue in the timeline; else in program order.
    """
    main = (module.shorter or module).main
    main = issued_early(main) if early else main
    state, free = _State(), elided_buffers(main)
    for value in main.arguments:
        state.new(value, None, "argument")
    pairs = _donations(program)
    state.output_aliases = _output_aliases(main, pairs, free)
    _schedule(main, state, free)
    state.clock += 1
    donated = set(pairs)
    for i, value in enumerate(main.returns):
        state.read(value)
        place = state.places[value]
        if i not in donated and value.elements and len(place) == 1 and place[0].role == "temporary":
            place[0].role = "output"
    temporary = [b for b in state.buffers if b.role == "temporary" and b.bytes]
    temporaries, alive = _peak(temporary)
    largest = max(temporary, key=lambda b: _numbers(b.value.shape, b.value.bytes), default=None)
    arguments = sum(value.bytes for value in main.arguments)
    outputs = sum(value.bytes for value in main.returns)
    aliased = sum(program.outputs[i].local_bytes(program.mesh) for i in pairs)
    return Memory(arguments, outputs, aliased, temporaries, alive, _described(largest) if largest else None)


def _donations(program: Program) -> dict[int, int]:
    """Map outputs to the donated inputs whose buffers they get: the first of the same shape, dtype and sharding."""
    free = {i: program.inputs[i] for i in sorted(program.donated)}
    pairs = {}
    for i, leaf in enumerate(program.outputs):
        key = (leaf.shape, leaf.dtype, leaf.spec)
        match = next(
            (
                j
                for j, donated_leaf in free.items()
                if (donated_leaf.shape, donated_leaf.dtype, donated_leaf.spec) == key
            ),
            None,
        )
        if match is not None:
            pairs[i] = match
            del free[match]
    return pairs


def _output_aliases(main: Block, pairs: dict[int, int], free: ElidedBuffers) -> dict[Value, Value]:
    """Map each result to the donated input whose buffer its op writes it into.

    A result computed before the last read of the old value is a temporary, moved at the end.
    """
    maker = {result: i for i, op in enumerate(main.ops) for result in op.results}
    last = last_uses(main, free)
    output_aliases = {}
    for output, donated in pairs.items():
        value, argument = free.origin(main.returns[output]), main.arguments[donated]
        if value not in maker or value in output_aliases:
            continue
        index, end = maker[value], last.get(argument, -1)
        if end < index or (end == index and _writes_over(main.ops[index], value, argument, free)):
            output_aliases[value] = argument
    return output_aliases


def _writes_over(op: Op, result: Value, argument: Value, free: ElidedBuffers) -> bool:
    """Check that the op may write ``result`` over ``argument``; a loop only in the carry that starts there."""
    if op.kind != "while":
        return op.kind in _REPLACING
    starts = [free.origin(operand) for operand in op.operands]
    is_captured = any(argument in captured(region) for region in op.regions)
    return not is_captured and starts.count(argument) == 1 and starts[op.results.index(result)] is argument


def _schedule(block: Block, state: _State, free: ElidedBuffers, kept: Set[Value] = frozenset()) -> None:
    """Note the buffers of a block's ops; ``kept`` are values from outside that are read again after the block."""
    last = last_uses(block, free, kept)
    for i, op in enumerate(block.ops):
        state.clock += 1
        read_here = {*op.operands, *(value for region in op.regions for value in captured(region))}
        dying = {value for value in read_here if last.get(value) == i}
        if op.kind == "while":
            _loop(op, state, free, dying)
        elif op.kind == "case":
            _branches(op, state, free, dying)
        elif op.kind == "constant" and op.results[0].elements <= 1:
            state.places[op.results[0]] = ()
        elif op.results and op.results[0] in free.views:
            state.places.update({result: state.places.get(free.views[result], ()) for result in op.results})
        elif op.results and op.results[0] in free.fused:
            places = [buffer for operand in op.operands for buffer in state.places.get(operand, ())]
            state.places[op.results[0]] = tuple(dict.fromkeys(places))
        else:
            _write(op, state, dying)


def _write(op: Op, state: _State, dying: set[Value]) -> None:
    for operand in op.operands:
        state.read(operand)
    target = _in_place(op, state, dying)
    for result in op.results:
        if target is not None and result is op.results[0]:
            state.places[result] = (target,)
            target.end = max(target.end, state.clock)
        else:
            state.new(result, op)


def _in_place(op: Op, state: _State, dying: set[Value]) -> _Buffer | None:
    """The buffer of an operand that dies here and that the result may take over."""
    if op.results[0] in state.output_aliases:
        return None
    if op.kind not in _REPLACING:
        return None
    for operand in op.operands[:1] if op.kind in _UPDATES else op.operands:
        places = state.places.get(operand, ())
        same = operand.bytes == op.results[0].bytes and len(places) == 1 and places[0].bytes == operand.bytes
        if same and places[0].role != "argument" and operand in dying and places[0].end <= state.clock:
            return places[0]
    return None


def _loop(op: Op, state: _State, free: ElidedBuffers, dying: set[Value]) -> None:
    condition, body = op.regions
    for operand in op.operands:
        state.read(operand)
    read_inside = [place for v in captured(body) | captured(condition) for place in state.places.get(v, ())]
    unchanged = [value is argument for value, argument in zip(body.returns, body.arguments, strict=True)]
    # Buffers that a carry cannot own exclusively: two carries may be views of one.
    taken = {id(place) for place in read_inside}
    unchanged_operands = [value for value, same in zip(op.operands, unchanged, strict=True) if same]
    taken |= {id(place) for value in unchanged_operands for place in state.places.get(value, ())}
    carried: list[tuple[_Buffer, ...]] = []
    for operand, result, same in zip(op.operands, op.results, unchanged, strict=True):
        places = state.places.get(operand, ())
        own = len(places) == 1 and places[0].role != "argument" and places[0].bytes == operand.bytes
        if same or (own and operand in dying and id(places[0]) not in taken):
            carried.append(places)
            taken |= {id(place) for place in places}
        else:
            state.new(result, op)
            carried.append(state.places[result])
    for region in (condition, body):
        state.places.update(zip(region.arguments, carried, strict=True))
    for region in (condition, body):
        _schedule(region, state, free, kept=captured(region))  # the next iteration reads it again
    state.clock += 1
    for value in body.returns:
        state.read(value)
    _merge_carries(body, carried, state)
    for buffer in [*read_inside, *(place for places in carried for place in places)]:
        buffer.end = max(buffer.end, state.clock)
    state.places.update(zip(op.results, carried, strict=True))


def _merge_carries(body: Block, carried: list[tuple[_Buffer, ...]], state: _State) -> None:
    """Write a recomputed value directly into its carry when the carry's old content is no longer needed."""
    op_ids = {id(op) for op in body.ops}
    for argument, value, places in zip(body.arguments, body.returns, carried, strict=True):
        buffer = state.places.get(value, ())
        if value is argument or len(buffer) != 1 or buffer == places or len(places) != 1:
            continue
        if id(buffer[0].op) in op_ids and places[0].end < buffer[0].start:
            buffer[0].bytes = 0


def _branches(op: Op, state: _State, free: ElidedBuffers, dying: set[Value]) -> None:
    for operand in op.operands:
        state.read(operand)
    for result in op.results:
        state.new(result, op)
    read_inside = [place for region in op.regions for v in captured(region) for place in state.places.get(v, ())]
    for region in op.regions:
        _schedule(region, state, free, kept=captured(region) - dying)
        state.clock += 1
        for value in region.returns:
            state.read(value)
            for buffer in state.places.get(value, ()):
                if buffer.op is not None and buffer.op in region.ops:
                    buffer.bytes = 0  # written directly into the result, which is counted from the start
    for buffer in [*read_inside, *(place for result in op.results for place in state.places[result])]:
        buffer.end = max(buffer.end, state.clock)


def _peak(buffers: list[_Buffer]) -> tuple[int, tuple[Alive, ...]]:
    events = sorted([(b.start, 1, b.bytes) for b in buffers] + [(b.end + 1, 0, -b.bytes) for b in buffers])
    now = best = peak_clock = 0
    for clock, _, change in events:
        now += change
        if now > best:
            best, peak_clock = now, clock
    living = sorted((b for b in buffers if b.start <= peak_clock <= b.end), key=lambda b: -b.bytes)
    return best, tuple(map(_described, living[:50]))


def _described(b: _Buffer) -> Alive:
    return Alive(b.bytes, b.value.shape, b.value.dtype, b.op.kind if b.op else "", b.op.line if b.op else "")
