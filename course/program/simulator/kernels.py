"""From operations to kernels: the kernels that a device launches, and their times by the roofline.

The complete rules:

- Ops that ``fusion`` marks as fused run inside the kernels that read them: their arithmetic and the memory that they
  read are charged to each of them.
- Ops that ``merging`` merges are one kernel.
- A matmul reads its operands and writes its result: ``Machine.matmul_seconds``. Every other kernel is
  charged its memory traffic or its arithmetic, whichever takes longer: ``Machine.kernel_seconds``.
- Reshapes (including broadcasts that repeat nothing), transposes, slices, barriers and constants are free: compilers
  fold them into layouts and addresses. An update of a slice is a kernel that reads its new content and writes it in
  place.
- Values that a loop passes to its next trip must be in the carry's buffer: a slice or transpose, or the value of
  another carry, is copied there.
- Arithmetic on single numbers, such as loop counters, is free too.
- Reading a slice touches the slice, not the whole array; the same holds for a gather and a scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from course.machine import Machine
from course.program.costs import dot_flops, elementwise_operations, reduce_operations
from course.program.fusion import ADDRESSES, ElidedBuffers, captured, elided_buffers
from course.program.ir import COLLECTIVES, ELEMENTWISE, FOLDED, Block, Module, Op, Value, ready_order, walk
from course.program.simulator.merging import Kernel, merge

FREE, KERNEL, COLLECTIVE, LOOP, BRANCH = range(5)
_SPREAD = {"broadcast_in_dim", "iota", "constant"}


@dataclass(eq=False, slots=True)
class Step:
    """A device's next piece of work.

    Attributes:
        op: The operation; for a kernel the one that writes its result, the first of several.
        what: ``FREE``, ``KERNEL``, ``COLLECTIVE``, ``LOOP`` or ``BRANCH``.
        reads: The values in memory that it needs.
        seconds: Duration of a kernel.
        flops: FLOPs of a matmul.
        bytes_moved: Memory that a kernel reads and writes.
        gives: The results of a merged kernel; otherwise, those of the op.
    """

    op: Op
    what: int
    reads: tuple[Value, ...]
    seconds: float = 0.0
    flops: float = 0.0
    bytes_moved: float = 0.0
    gives: tuple[Value, ...] = ()

    @property
    def results(self) -> Sequence[Value]:
        return self.gives or self.op.results


@dataclass(slots=True)
class _Chain:
    """A fused value.

    Attributes:
        op: The op that computes it.
        aligned: The values in memory that it is computed from element by element.
    """

    op: Op
    aligned: frozenset[Value]


def schedule(module: Module, machine: Machine) -> dict[Block, list[Step]]:
    """The steps of every block, in program order."""
    free = elided_buffers(module.main)
    steps = {module.main: _of_block(module.main, free, machine, None)}
    for op in walk(module.main):
        for number, region in enumerate(op.regions):
            loop = op if op.kind == "while" and number == 1 else None
            steps[region] = _of_block(region, free, machine, loop)
    return steps


def ready_first(steps: list[Step]) -> list[Step]:
    """The same steps with each collective directly after the kernel, loop or branch that it needs last.

    A device then issues it before waiting for anything else that comes earlier in the program.
    """
    order = ready_order((step.reads, step.results, step.what in (FREE, COLLECTIVE)) for step in steps)
    return [steps[number] for number in order]


def _of_block(block: Block, free: ElidedBuffers, machine: Machine, loop: Op | None) -> list[Step]:
    """The steps of a block; ``loop`` is the loop whose body it is, if any."""
    chains: dict[Value, _Chain] = {}
    steps = []
    carried = set(block.returns) if loop else set()
    for op in block.ops:
        if op.kind in ("while", "case"):
            reads = tuple(op.operands if op.kind == "while" else op.operands[:1])
            steps.append(Step(op, LOOP if op.kind == "while" else BRANCH, reads))
            continue
        if op.results and op.results[0] in free.fused:
            chains[op.results[0]] = _chain(op, chains)
            continue
        step = _step(op, chains, free, machine)
        moved = op.kind not in ("reshape", "constant") and not _repeats_nothing(op)
        if step.what == FREE and moved and op.results and op.results[0] in carried:
            step = _copy(op, step.reads, op.results[0], machine)
        # A free step without operands to wait for is ready at once: nothing to do.
        if step.what != FREE or step.reads:
            steps.append(step)
    if loop:
        arguments = set(block.arguments)
        for value, argument in zip(block.returns, block.arguments, strict=True):
            if value in arguments and value is not argument:
                steps.append(_copy(loop, (value,), value, machine))
    return _merged(block, steps, chains, free, machine)


def _merged(
    block: Block, steps: list[Step], chains: dict[Value, _Chain], free: ElidedBuffers, machine: Machine
) -> list[Step]:
    """The steps with the kernels that compilers merge into one."""

    def merge_input(step: Step) -> Kernel | tuple[tuple[Value, ...], tuple[Value, ...]]:
        if step.what == KERNEL and (step.op.kind in ELEMENTWISE or step.op.kind == "reduce") and not step.gives:
            return _mergeable(step.op, step.reads, chains, free)
        captured_values = (
            (value for region in step.op.regions for value in captured(region)) if step.what > COLLECTIVE else ()
        )
        return (*step.reads, *captured_values), tuple(step.results)

    merged = []
    for number, kernel in merge(block, [merge_input(step) for step in steps], partial(_ancestors, chains), free.origin):
        if kernel is None or len(kernel.ops) == 1:
            merged.append(steps[number])
            continue
        operands = [operand for op in kernel.ops for operand in op.operands]
        operations = _fused_operations(operands, chains) + sum(map(_own_operations, kernel.ops))
        bytes_moved = kernel.bytes_moved
        seconds = machine.kernel_seconds(bytes_moved, operations)
        merged.append(Step(kernel.op, KERNEL, tuple(kernel.needs), seconds, 0.0, bytes_moved, tuple(kernel.results)))
    return merged


def _mergeable(op: Op, needs: Sequence[Value], chains: dict[Value, _Chain], free: ElidedBuffers) -> Kernel:
    values = op.operands[: len(op.results)] if op.kind == "reduce" else op.operands
    reads = {free.origin(value): size for value, size in free.inputs(op.operands).items()}
    aligned = {free.origin(value) for value in _aligned(values, chains)}
    passes, queue = set(), list(values)
    while queue:
        value = queue.pop()
        if free.origin(value) in passes:
            continue
        passes.add(free.origin(value))
        if value in chains:
            queue += chains[value].op.operands
    reduces = (op.operands[0].shape, tuple(op.attributes["dimensions"])) if op.kind == "reduce" else None
    return Kernel(op, [op], dict.fromkeys(needs), reads, aligned, passes, values[0].elements, reduces)


def _aligned(values: Sequence[Value], chains: dict[Value, _Chain]) -> frozenset[Value]:
    """The values in memory that are read element by element to compute these values."""
    return frozenset().union(*(chains[value].aligned if value in chains else (value,) for value in values))


def _ancestors(chains: dict[Value, _Chain], reduction: Op) -> list[Value]:
    """A reduction's operand, and the values that it is computed from while these are one array of its size."""
    values = [reduction.operands[0]]
    while (chain := chains.get(values[-1])) is not None and (
        chain.op.kind in ELEMENTWISE or chain.op.kind == "reshape"
    ):
        whole = [
            value
            for value in dict.fromkeys(chain.op.operands)
            if not (value in chains and chains[value].op.kind in _SPREAD) and value.elements == values[0].elements
        ]
        if len(whole) != 1:
            break
        values += whole
    return values


def _copy(op: Op, reads: tuple[Value, ...], value: Value, machine: Machine) -> Step:
    """A kernel that copies a value into the carry's buffer."""
    bytes_moved = 2.0 * value.bytes
    return Step(op, KERNEL, reads, machine.kernel_seconds(bytes_moved), 0.0, bytes_moved)


def _chain(op: Op, chains: dict[Value, _Chain]) -> _Chain:
    in_place = op.kind in ELEMENTWISE or (op.kind == "reshape" or _repeats_nothing(op))
    return _Chain(op, _aligned(op.operands, chains) if in_place else frozenset())


def _repeats_nothing(op: Op) -> bool:
    return op.kind == "broadcast_in_dim" and op.results[0].elements == op.operands[0].elements


def _fused_operations(operands: list[Value], chains: dict[Value, _Chain]) -> float:
    """Operations of everything that is fused into some operands; each op counts once, however many paths lead to it."""
    seen: set[Value] = set()
    queue = list(operands)
    total = 0.0
    while queue:
        value = queue.pop()
        chain = chains.get(value)
        if chain is None or value in seen:
            continue
        seen.add(value)
        total += elementwise_operations(chain.op) if chain.op.kind in ELEMENTWISE else 0.0
        queue += chain.op.operands
    return total


def _step(op: Op, chains: dict[Value, _Chain], free: ElidedBuffers, machine: Machine) -> Step:
    reads = free.inputs(op.operands)
    values = tuple(reads)
    if op.kind in COLLECTIVES:
        return Step(op, COLLECTIVE, values)
    folded = (op.kind in FOLDED or _repeats_nothing(op)) and (not op.operands or op.operands[0] not in chains)
    if folded or (op.kind in ELEMENTWISE and op.results[0].elements <= 1):
        return Step(op, FREE, values)
    if op.kind == "dot_general":
        flops, bytes_moved = dot_flops(op), sum(reads.values()) + op.results[0].bytes
        seconds = max(machine.matmul_seconds(flops, bytes_moved, operand.dtype) for operand in op.operands)
        return Step(op, KERNEL, values, seconds, flops, bytes_moved)
    bytes_moved, operations = _traffic(op, reads, chains, free)
    return Step(op, KERNEL, values, machine.kernel_seconds(bytes_moved, operations), 0.0, bytes_moved)


def _traffic(
    op: Op, reads: dict[Value, float], chains: dict[Value, _Chain], free: ElidedBuffers
) -> tuple[float, float]:
    """Bytes and operations of a kernel that is not a matmul."""
    written_bytes = float(sum(result.bytes for result in op.results))
    if op.kind == "dynamic_update_slice":
        update = op.operands[1:2]
        return sum(free.inputs(update).values()) + update[0].bytes, _fused_operations(update, chains)
    operations = _fused_operations(op.operands, chains)
    if op.kind == "scatter":
        updates = sum(operand.bytes for operand in op.operands[1:])
        return 2.0 * updates + (written_bytes if op.operands[0] in chains else 0.0), operations
    if op.kind in ADDRESSES:
        return 2.0 * written_bytes, operations
    return sum(reads.values()) + written_bytes, operations + _own_operations(op)


def _own_operations(op: Op) -> float:
    """Operations of a kernel's last step, without the fused ones."""
    if op.kind in ELEMENTWISE or op.kind == "fft":
        return elementwise_operations(op)
    if op.kind == "rng_bit_generator":
        return op.results[0].elements
    if op.kind in ("reduce", "reduce_window"):
        return reduce_operations(op)
    if op.kind == "sort":
        return op.operands[0].elements * max(1.0, math.log2(max(2, op.operands[0].elements)))
    return 0.0
