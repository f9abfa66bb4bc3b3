"""Memory: what lives on one device while a Program runs, by liveness over its operations.

The rules, all of them:

- Every buffer lives from the op that writes it to the last op that reads it.
- An elementwise op, or one that only moves data, writes no buffer of its own when everything that reads its
  result can compute it on the fly (other such ops and reductions): it is fused, and what it reads lives on until
  the last of those readers.
- A reshape and an ``optimization_barrier`` write nothing; an update of a slice writes in place when nobody reads
  the old value later; so does an elementwise op into an operand of the same size that dies there, and a transpose,
  which compilers fold into the layout.
- A loop's carried values live as long as the loop. One that the body passes through unchanged is the buffer that
  went in; one that the body computes afresh needs a second buffer while the old value is still read.
- Inputs and outputs are counted apart; **temporaries** are everything else.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from course.program.fusion import captured, fused_values
from course.program.ir import ELEMENTWISE, Block, Module, Op, Value
from course.program.program import Program

_ALIASES = {"reshape", "optimization_barrier"}


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
        arguments: Held by the inputs.
        outputs: Held by the outputs, those that reuse a donated input included.
        aliased: Of the outputs, what reuses donated inputs.
        temporaries: The most that lives at once beside inputs and outputs.
        alive: The temporaries at that moment, largest first.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    alive: tuple[Alive, ...]

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Memory:
        alive = tuple(Alive(**{**a, "shape": tuple(a["shape"])}) for a in data["alive"])
        return cls(**{**data, "alive": alive})


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
    # What each value's bytes lie in: one buffer, or, for a fused value, all that it is computed from.
    places: dict[Value, tuple[_Buffer, ...]] = field(default_factory=dict)

    def new(self, value: Value, op: Op | None, role: str = "temporary") -> None:
        buffer = _Buffer(value.bytes, self.clock, self.clock, value, op, role)
        self.buffers.append(buffer)
        self.places[value] = (buffer,)

    def read(self, value: Value) -> None:
        for buffer in self.places.get(value, ()):
            buffer.end = max(buffer.end, self.clock)


def memory(module: Module, program: Program) -> Memory:
    """Liveness of the Program on one device.

    Args:
        module: ``parse(program)``.
        program: For the signature: which inputs are donated.
    """
    state = _State()
    for value in module.main.arguments:
        state.new(value, None, "argument")
    _schedule(module.main, state, fused_values(module.main))
    state.clock += 1
    for value in module.main.returns:
        state.read(value)
        if value.elements and len(state.places[value]) == 1 and state.places[value][0].role == "temporary":
            state.places[value][0].role = "output"
    temporaries, alive = _peak([b for b in state.buffers if b.role == "temporary" and b.bytes])
    arguments = sum(value.bytes for value in module.main.arguments)
    outputs = sum(value.bytes for value in module.main.returns)
    return Memory(arguments, outputs, _aliased(program), temporaries, alive)


def _aliased(program: Program) -> int:
    """Bytes of outputs that fit a donated input of the same shape, dtype and sharding."""
    free = [program.inputs[i] for i in program.donated]
    total = 0
    for leaf in program.outputs:
        match = next((d for d in free if (d.shape, d.dtype, d.spec) == (leaf.shape, leaf.dtype, leaf.spec)), None)
        if match:
            free.remove(match)
            total += leaf.local_bytes(program.mesh)
    return total


def _schedule(block: Block, state: _State, fused: set[Value]) -> None:
    last = _last_uses(block, fused)
    for op in block.ops:
        state.clock += 1
        if op.kind == "while":
            _loop(op, state, fused, last)
        elif op.kind == "case":
            _branches(op, state, fused)
        elif op.kind == "constant" and op.results[0].elements <= 1:
            state.places[op.results[0]] = ()
        elif op.kind in _ALIASES:
            _alias(op, state)
        elif op.results and op.results[0] in fused:
            places = [buffer for operand in op.operands for buffer in state.places.get(operand, ())]
            state.places[op.results[0]] = tuple(dict.fromkeys(places))
        else:
            _write(op, state, last)


def _alias(op: Op, state: _State) -> None:
    for operand, result in zip(op.operands, op.results, strict=True):
        state.places[result] = state.places.get(operand, ())


def _write(op: Op, state: _State, last: dict[Value, Op | None]) -> None:
    for operand in op.operands:
        state.read(operand)
    target = _in_place(op, state, last)
    for result in op.results:
        if target is not None and result is op.results[0]:
            state.places[result] = (target,)
            target.end = max(target.end, state.clock)
        else:
            state.new(result, op)


def _in_place(op: Op, state: _State, last: dict[Value, Op | None]) -> _Buffer | None:
    """The buffer of an operand that dies here and that the result may take over."""
    if op.kind in ("dynamic_update_slice", "scatter"):
        candidates = op.operands[:1]
    elif op.kind in ELEMENTWISE or op.kind == "transpose":
        candidates = op.operands
    else:
        return None
    for operand in candidates:
        places = state.places.get(operand, ())
        same = operand.bytes == op.results[0].bytes and len(places) == 1 and places[0].bytes == operand.bytes
        if same and places[0].role != "argument" and last.get(operand) is op and places[0].end <= state.clock:
            return places[0]
    return None


def _last_uses(block: Block, fused: set[Value]) -> dict[Value, Op | None]:
    """The last op of the block that reads a value's bytes, None for bytes that the block returns.

    Reading an alias, or something fused that is computed from a value, reads the value.
    """
    origins: dict[Value, frozenset[Value]] = {}
    last: dict[Value, Op | None] = {}

    def read(value: Value, reader: Op | None) -> None:
        for origin in origins.get(value, frozenset((value,))):
            last[origin] = reader

    for op in block.ops:
        inner = [value for region in op.regions for value in captured(region)]
        for value in (*op.operands, *inner):
            read(value, op)
        if op.kind in _ALIASES:
            for operand, result in zip(op.operands, op.results, strict=True):
                origins[result] = origins.get(operand, frozenset((operand,)))
        elif op.results and op.results[0] in fused:
            every = [origins.get(operand, frozenset((operand,))) for operand in op.operands]
            origins[op.results[0]] = frozenset().union(*every)
    for value in block.returns:
        read(value, None)
    return {
        value: last[origin] for value in {*origins, *last} for origin in [_origin(value, origins)] if origin in last
    }


def _origin(value: Value, origins: dict[Value, frozenset[Value]]) -> Value:
    """The value whose bytes an alias is; the value itself where it has bytes of its own."""
    found = origins.get(value, frozenset((value,)))
    return next(iter(found)) if len(found) == 1 else value


def _loop(op: Op, state: _State, fused: set[Value], last: dict[Value, Op | None]) -> None:
    condition, body = op.regions
    for operand in op.operands:
        state.read(operand)
    carried: list[tuple[_Buffer, ...]] = []
    for i, operand in enumerate(op.operands):
        places = state.places.get(operand, ())
        unchanged = body.returns[i] is body.arguments[i]
        own = len(places) == 1 and places[0].role != "argument" and places[0].bytes == operand.bytes
        if unchanged or (own and last.get(operand) is op and op.operands.count(operand) == 1):
            carried.append(places)
        else:
            state.new(op.results[i], op)
            carried.append(state.places[op.results[i]])
    for region in (condition, body):
        state.places.update(zip(region.arguments, carried, strict=True))
    read_inside = [place for v in captured(body) | captured(condition) for place in state.places.get(v, ())]
    _schedule(condition, state, fused)
    _schedule(body, state, fused)
    state.clock += 1
    for value in body.returns:
        state.read(value)
    for buffer in [*read_inside, *(place for places in carried for place in places)]:
        buffer.end = max(buffer.end, state.clock)
    _merge_carries(body, carried, state, fused)
    state.places.update(zip(op.results, carried, strict=True))


def _merge_carries(body: Block, carried: list[tuple[_Buffer, ...]], state: _State, fused: set[Value]) -> None:
    """A value computed afresh is written straight into its carry when the old one was read for the last time."""
    last = _last_uses(body, fused)
    position = {id(op): i for i, op in enumerate(body.ops)}
    maker = {result: op for op in body.ops for result in op.results}
    for argument, value, places in zip(body.arguments, body.returns, carried, strict=True):
        buffer = state.places.get(value, ())
        if value is argument or len(buffer) != 1 or buffer == places or len(places) != 1:
            continue
        made, reader = maker.get(value), last.get(argument)
        fresh = made is not None and buffer[0].op is made
        returned = argument in last and reader is None
        if fresh and not returned and (reader is None or position[id(reader)] < position[id(made)]):
            buffer[0].bytes = 0


def _branches(op: Op, state: _State, fused: set[Value]) -> None:
    for operand in op.operands:
        state.read(operand)
    for result in op.results:
        state.new(result, op)
    read_inside = [place for region in op.regions for v in captured(region) for place in state.places.get(v, ())]
    for region in op.regions:
        _schedule(region, state, fused)
        state.clock += 1
        for value in region.returns:
            state.read(value)
            for buffer in state.places.get(value, ()):
                if buffer.op is not None and buffer.op in region.ops:
                    buffer.bytes = 0  # written straight into the result, which is counted from the start
    for buffer in [*read_inside, *(place for result in op.results for place in state.places[result])]:
        buffer.end = max(buffer.end, state.clock)


def _peak(buffers: list[_Buffer]) -> tuple[int, tuple[Alive, ...]]:
    events = sorted([(b.start, 1, b.bytes) for b in buffers] + [(b.end + 1, 0, -b.bytes) for b in buffers])
    now = best = when = 0
    for clock, _, change in events:
        now += change
        if now > best:
            best, when = now, clock
    living = sorted((b for b in buffers if b.start <= when <= b.end), key=lambda b: -b.bytes)
    return best, tuple(
        Alive(b.bytes, b.value.shape, b.value.dtype, b.op.kind if b.op else "", b.op.line if b.op else "")
        for b in living[:50]
    )
