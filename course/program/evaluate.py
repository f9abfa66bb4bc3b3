"""Small integers and booleans, evaluated per device, so that trip counts and branches resolve.

A trip count or branch that depends on a value unknown to ``integers`` is an error that names the op and its line. If
the module allows it, such a conditional takes its more expensive branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from course.program.integers import DTYPES, MAX_ELEMENTS, RULES, Computed, Known, bind, evaluate
from course.program.ir import COLLECTIVES, Block, Module, Op, Value, makers_of, unsupported, walk

# Limit on operations evaluated for one device; those on many elements count more.
MAX_EVALUATED = 1_000_000
MAX_DECISIONS = 1_000_000
_CONTROL = ("while", "case")
_TOO_LONG = "following the program's counters takes too long; use fewer trips"
_UNKNOWN = "so its cost cannot be known"


class Followed(NamedTuple):
    """Decisions of one device.

    Attributes:
        decisions: In order: 1 or 0 before each trip of a loop, and the number of each branch taken.
        on_data: The conditionals that depend on data, taken on their more expensive branch.
    """

    decisions: tuple[int, ...]
    on_data: frozenset[Op]


def follow(module: Module, device: int) -> Followed:
    """The decisions of ``device``; computed once for all callers, so that they agree.

    Raises:
        ProgramError: A trip count or a branch depends on data.
    """
    devices = module.followed
    if devices is None:
        devices = _Devices(module)
        object.__setattr__(module, "followed", devices)  # a cache: the dataclass is frozen otherwise
    return devices[device]


def taken(block: Block, decisions: Iterator[int]) -> Iterator[tuple[Op, int]]:
    """Each deciding loop and branch with its decision, in order, from the decisions of one device."""
    for op in control(block):
        if op.kind == "case":
            choice = next(decisions)
            yield op, choice
            yield from taken(op.regions[choice], decisions)
            continue
        condition, body = op.regions
        while True:
            yield from taken(condition, decisions)
            choice = next(decisions)
            yield op, choice
            if not choice:
                break
            yield from taken(body, decisions)


def executed(block: Block, decisions: Iterator[int]) -> Iterator[Block]:
    """Every block that runs, once per execution, from the decisions of one device."""
    yield block
    for op, choice in taken(block, decisions):
        if op.kind == "case":
            yield op.regions[choice]
        else:
            yield from op.regions[: 1 + choice]


def control(block: Block) -> list[Op]:
    """The loops and branches of a block, in order."""
    return [op for op in block.ops if op.kind in _CONTROL]


def depends_on_device(module: Module) -> bool:
    """Return True if devices can make different decisions; otherwise they all run the same ops."""
    return _reads_device(_deciding(module.main))


def _reads_device(deciding: set[Op]) -> bool:
    return any(op.kind in ("partition_id", "replica_id") for op in deciding)


def _deciding(main: Block) -> set[Op]:
    """The ops that loops and branches depend on."""
    return _dependencies(main, [value for op in walk(main) for value in _decided_by(op)])[0]


def _dependencies(main: Block, queue: list[Value]) -> tuple[set[Op], set[Value]]:
    """The ops and the values that some values depend on, those values included."""
    makers = makers_of(main)
    carries = {}
    for op in walk(main):
        for region in op.regions if op.kind == "while" else ():
            carries |= {argument: (op, i) for i, argument in enumerate(region.arguments)}
    deciding: set[Op] = set()
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
            deciding.add(op)
            queue.append(op.operands[op.results.index(value)])
        else:
            deciding.add(op)
            queue += op.operands
    return deciding, seen


def _decided_by(op: Op) -> list[Value]:
    if op.kind == "while":
        return [op.regions[0].returns[0]]
    return [op.operands[0]] if op.kind == "case" else []


class _Devices(dict[int, Followed]):
    """The decisions of each device, from one survey of the operations that they depend on."""

    def __init__(self, module: Module):
        super().__init__()
        deciding, everything = _deciding(module.main), list(walk(module.main))
        blocks = [module.main, *(region for op in everything for region in op.regions)]
        self.module, self.alike = module, not _reads_device(deciding)
        self.makers = {result: op for op in everything for result in op.results}
        self.computed: Computed = {}
        self.relevant = {
            block: [(op, _work(op)) for op in block.ops if op in deciding or op.kind in _CONTROL] for block in blocks
        }

    def __missing__(self, device: int) -> Followed:
        self[device] = next(iter(self.values())) if self and self.alike else _Run(self, device).follow()
        return self[device]


def _work(op: Op) -> float:
    """The amount by which evaluating an operation counts towards ``MAX_EVALUATED``."""
    return 1 + sum(result.elements for result in op.results if result.elements <= MAX_ELEMENTS) / 64


class _Run:
    """Evaluate only the inputs of one device's decisions."""

    def __init__(self, devices: _Devices, device: int):
        self.main, self.device = devices.module.main, device
        self.data_branches, self.alike = devices.module.data_branches, devices.module.alike
        self.known: Known = {}
        self.decisions: list[int] = []
        self.on_data: set[Op] = set()
        self.left: float = MAX_EVALUATED
        self.makers, self.relevant, self.computed = devices.makers, devices.relevant, devices.computed

    def follow(self) -> Followed:
        self._run(self.main)
        return Followed(tuple(self.decisions), frozenset(self.on_data))

    def _run(self, block: Block) -> None:
        for op, work in self.relevant[block]:
            self.left -= work
            if self.left < 0:
                raise unsupported(op, op.line, _TOO_LONG)
            if op.kind == "while":
                self._loop(op)
            elif op.kind == "case":
                self._branch(op)
            else:
                evaluate(op, self.known, self.device, self.computed)

    def _decide(self, choice: int, op: Op) -> None:
        if len(self.decisions) >= MAX_DECISIONS:
            raise unsupported(op, op.line, f"loops run more than {MAX_DECISIONS:,} times in all")
        self.decisions.append(choice)

    def _branch(self, op: Op) -> None:
        index = self.known.get(op.operands[0])
        if index is None and not self.data_branches:
            why = f"which branch runs depends on {self._reason(op.operands[0])}, {_UNKNOWN}"
            raise unsupported(op, op.line, f"{why}; compute both sides and select one")
        if index is None:
            position = self._more_expensive(op)
            self.on_data.add(op)
        else:
            position = _side(int(index), len(op.regions))
        self._decide(position, op)
        self._run(op.regions[position])
        if index is None:
            for result in op.results:
                self.known.pop(result, None)
        else:
            bind(op.results, op.regions[position].returns, self.known)

    def _more_expensive(self, op: Op) -> int:
        """The branch that computes more elements, counting every trip of its loops.

        Raises:
            ProgramError: A branch contains a collective: devices on different branches would wait for each other.
        """
        for inner in (inner for region in op.regions for inner in walk(region) if not self.alike):
            if inner.kind in COLLECTIVES:
                raise unsupported(
                    inner, inner.line, "a collective in a branch that depends on data might not be reached; move it out"
                )
        work, start = [], len(self.decisions)
        for region in op.regions:
            self._run(region)
            blocks = executed(region, iter(self.decisions[start:]))
            work.append(sum(result.elements for block in blocks for step in block.ops for result in step.results))
            del self.decisions[start:]
        return work.index(max(work))

    def _reason(self, value: Value) -> str:
        """Name the cause of an unknown value: data, or the first operation that known values do not determine."""
        reasons, values = _dependencies(self.main, [value])
        if values & set(self.main.arguments):
            return "data"
        for op in walk(self.main):
            if op not in reasons or not op.operands or any(operand not in self.known for operand in op.operands):
                continue
            known = {operand: self.known[operand] for operand in op.operands}
            evaluate(op, known, self.device)
            if op.results[0] in known:
                continue
            where = f" ({op.line})" if op.line else ""
            if any(result.dtype not in DTYPES for result in op.results):
                return f"floats{where}, which compilers round differently"
            if any(result.elements > MAX_ELEMENTS for result in op.results):
                return f"an array of more than {MAX_ELEMENTS:,} integers{where}"
            if op.kind in RULES:
                return f"integers that overflow or divide by zero{where}"
            return f"{op.name}{where}, whose result is not known in advance"
        return "floats, which compilers round differently"  # constants of floats, which no operation above makes

    def _loop(self, op: Op) -> None:
        condition, body = op.regions
        if (trips := counted_trips(op, self.makers) or 0) > self.left:
            raise unsupported(op, op.line, f"this loop runs {trips:,} times, and {_TOO_LONG}")
        bind(body.arguments, op.operands, self.known)
        while True:
            bind(condition.arguments, body.arguments, self.known)
            self._run(condition)
            proceed = self.known.get(condition.returns[0])
            if proceed is None:
                why = f"how often this loop runs depends on {self._reason(condition.returns[0])}, {_UNKNOWN}"
                raise unsupported(op, op.line, f"{why}; fix its trips, as lax.scan does")
            self._decide(int(bool(proceed)), op)
            if not proceed:
                break
            self._run(body)
            bind(body.arguments, body.returns, self.known)
        bind(op.results, body.arguments, self.known)


def counted_trips(op: Op, makers: dict[Value, Op]) -> int | None:
    """Trips of a loop that counts from a constant to a constant by ones, which cannot overflow; else None."""
    if op.kind != "while" or len(op.regions[0].ops) != 1:
        return None
    condition, body = op.regions
    compare = condition.ops[0]
    if compare.kind != "compare" or "LT" not in compare.attributes["comparison_direction"]:
        return None
    counter, limit = compare.operands
    if condition.returns != compare.results or counter not in condition.arguments or counter.dtype != "i32":
        return None
    place = condition.arguments.index(counter)
    step = makers.get(body.returns[place])
    if step is None or step.kind != "add" or step.operands[0] is not body.arguments[place]:
        return None
    start, stop, by = (_constant(value, makers) for value in (op.operands[place], limit, step.operands[1]))
    return max(0, stop - start) if by == 1 and start is not None and stop is not None else None


def _constant(value: Value, makers: dict[Value, Op]) -> int | None:
    op = makers.get(value)
    return int(op.attributes["value"]) if op and op.kind == "constant" and "value" in op.attributes else None


def _side(index: int, count: int) -> int:
    """The branch that runs for an index: the last one for any index out of range."""
    return index if 0 <= index < count else count - 1
