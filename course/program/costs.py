"""Costs: what one device computes and sends, with loops unrolled and branches resolved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from course.program.collectives import DeviceClass, Groups, check_everyone_comes, device_classes, groups_of
from course.program.evaluate import executed, follow
from course.program.ir import COLLECTIVES, ELEMENTWISE, MOVES, Block, Module, Op, dims_of, walk
from course.program.precision import Special, precision_sensitive, special

# Real operations per complex operation; a function such as the exponential takes several of those.
_OF_COMPLEX = {"real": 1, "imag": 1, "complex": 1, "add": 2, "subtract": 2, "negate": 2, "select": 2, "compare": 2}
_OF_COMPLEX |= {"convert": 2, "multiply": 6, "divide": 11}


@dataclass(frozen=True)
class Collective:
    """One collective operation of a Program, as a device executes it.

    Attributes:
        kind: StableHLO's name, ``all_gather``.
        axes: Mesh axes that it runs over; axes of size 1 are never among them.
        group_size: Number of devices that take part.
        operand_bytes: Bytes that each device contributes.
        wire_bytes: Bytes that each device sends in one execution, by the ring algorithm: (n-1)/n of the full
            array for a gather or scatter, twice that for an all-reduce, the operand for a permute.
        count: Number of executions.
        line: The learner's line.
        shape, dtype: Shape and dtype of the first operand on one device.
        shift: For a permute along one axis, the distance of every transfer: 1 to the next device, the
            size less 1 to the previous one; None if transfers differ, and for any other kind.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    operand_bytes: int
    wire_bytes: float
    count: int
    line: str
    shape: tuple[int, ...]
    dtype: str
    shift: int | None = None

    @property
    def total_bytes(self) -> float:
        return self.wire_bytes * self.count


@dataclass(frozen=True)
class Costs:
    """Costs of the busiest device; collectives of any device.

    Attributes:
        flops: Floating-point operations of matmuls, ``2 m n k`` each, ``8 m n k`` for complex numbers,
            including products written as a multiplication, or a selection by a mask, and a sum.
        elementwise: Elements computed by elementwise operations, sorts and random bits, and operations of reductions;
            complex operations count as real ones.
        bytes_touched: Bytes of operands and results of every operation, without fusion.
        collectives: The collectives executed, without groups of one device.
        products: Number of multiplications for each pair of operand dtypes, ``{"f32 x f32": 12}``, by a product or by a
            multiplication that is summed like one. A branch on data counts each of its branches.
        operations: Number of operations as written: each loop's body once, however often it runs.
        written: The same by kind, only for blocks that run.
        precise: Executions of each function of ``PRECISE``, and of each sum over a dim or into places of an array, by
            dtype, ``{"exponential of f32": 4, "sum of bf16": 1}``. Exponentials count only if they are summed: those of
            an activation, which go into a product, do not matter.
        taken: Number of elements of each entry of ``precise``.
        lines: The learner's line of the first operation of each kind in ``products`` and ``precise``, and of the first
            ``selection`` that is summed like a product, if known.
    """

    flops: float
    elementwise: float
    bytes_touched: float
    collectives: tuple[Collective, ...]
    products: dict[str, int]
    operations: int = 0
    precise: dict[str, int] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    taken: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


def costs(module: Module) -> Costs:
    """The costs of the busiest device, from the number of executions of each block.

    Raises:
        ProgramError: An op, a trip count or a branch cannot be resolved.
    """
    classes = device_classes(module)
    known = special(module.main)
    cost_of_block = cache(lambda block: _of_block(block, known))
    if len(classes) == 1:
        return _of_class(module, classes[0], cost_of_block)
    check_everyone_comes(module, classes)
    class_costs = [_of_class(module, device_class, cost_of_block) for device_class in classes]
    busiest = max(class_costs, key=lambda c: (c.flops + c.elementwise, _total_bytes(list(c.collectives))))
    return replace(busiest, collectives=_of_any(class_costs))


def _of_any(class_costs: list[Costs]) -> tuple[Collective, ...]:
    """Each collective as executed by the device that sends the most in it: no other device's work hides any of them.

    Permutes over the same axes with different pairs send in turns, so all of them are those of one device: the one
    that sends the most in them together.
    """
    heaviest: dict[Collective, list[Collective]] = {}
    for collective in (c for costs in class_costs for c in costs.collectives):
        key = _alike(collective)
        if key not in heaviest or collective.total_bytes > heaviest[key][0].total_bytes:
            heaviest[key] = [collective]
    for axes in {c.axes for c in heaviest if c.kind == "collective_permute"}:
        permutes = [
            [c for c in costs.collectives if (c.kind, c.axes) == ("collective_permute", axes)] for costs in class_costs
        ]
        most_sent = max(permutes, key=_total_bytes)
        for key in [c for c in heaviest if (c.kind, c.axes) == ("collective_permute", axes)]:
            own = [c for c in most_sent if _alike(c) == key]
            heaviest[key] = own or [replace(heaviest[key][0], wire_bytes=0.0)]
    return tuple(collective for collectives in heaviest.values() for collective in collectives)


def _alike(collective: Collective) -> Collective:
    return replace(collective, wire_bytes=0.0, count=0)


def _total_bytes(collectives: list[Collective]) -> float:
    return sum(c.total_bytes for c in collectives)


def _of_class(module: Module, device_class: DeviceClass, cost_of_block: Callable[[Block], _BlockCosts]) -> Costs:
    """Costs of a device of the class; ``cost_of_block`` returns those of a block without its collectives."""
    times = Counter(executed(module.main, iter(device_class.decisions)))
    total = _BlockCosts()
    sent: Counter[Collective] = Counter()
    for block, count in times.items():
        block_costs = cost_of_block(block)
        total.flops += count * block_costs.flops
        total.elementwise += count * block_costs.elementwise
        total.touched += count * block_costs.touched
        for name in ("products", "precise", "taken"):
            for kind, occurrences in getattr(block_costs, name).items():
                getattr(total, name)[kind] += count * occurrences
        total.lines = block_costs.lines | total.lines
        for op in block.ops:
            for collective in collectives_of(op, module.mesh, device_class.device) if op.kind in COLLECTIVES else ():
                sent[collective] += count
    for block in _other_sides(module, device_class.device):
        if block not in times:  # it runs for other data
            block_costs = cost_of_block(block)
            total.products += block_costs.products
            total.precise += block_costs.precise
            total.lines = block_costs.lines | total.lines
    collectives = tuple(replace(c, count=n) for c, n in sent.items())
    written = sum(1 for op in walk(module.main) if op.kind != "constant")
    kinds = Counter(op.kind for block in times for op in block.ops if op.kind != "constant")
    return Costs(
        flops=total.flops,
        elementwise=total.elementwise,
        bytes_touched=total.touched,
        collectives=collectives,
        products=dict(total.products),
        operations=written,
        precise=dict(total.precise),
        lines=total.lines,
        written=dict(kinds),
        taken=dict(total.taken),
    )


@dataclass
class _BlockCosts:
    """Costs of one execution of a block, without the loops, branches and collectives in it."""

    flops: float = 0.0
    elementwise: float = 0.0
    touched: float = 0.0
    products: Counter[str] = field(default_factory=Counter)
    precise: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    lines: dict[str, str] = field(default_factory=dict)


def _other_sides(module: Module, device: int) -> Iterator[Block]:
    """The blocks of all branches of conditionals that depend on data."""
    branches = follow(module, device).on_data if module.data_branches else ()
    for region in (region for op in branches for region in op.regions):
        yield region
        yield from (inner for op in walk(region) for inner in op.regions)


def _of_block(block: Block, known: Special) -> _BlockCosts:
    block_costs = _BlockCosts()
    for op in block.ops:
        if op.kind == "dot_general":
            block_costs.flops += dot_flops(op)
            dtypes = " x ".join(operand.dtype for operand in op.operands)
            block_costs.products[dtypes] += 1
            _note_line(block_costs.lines, dtypes, op)
        elif op.kind in ELEMENTWISE or op.kind in ("sort", "rng_bit_generator", "fft"):
            block_costs.elementwise += elementwise_operations(op)
        elif op.kind == "reduce" or op.kind == "reduce_window":
            block_costs.elementwise += reduce_operations(op)
        if op.kind in ELEMENTWISE or op.kind in MOVES or op.kind in ("dot_general", "reduce", "sort", "reduce_window"):
            block_costs.touched += _touched(op)
        for by_hand in known.by_hand.get(op, ()):
            block_costs.flops += by_hand.flops
            if by_hand.dtypes:
                block_costs.products[by_hand.dtypes] += 1
            _note_line(block_costs.lines, by_hand.dtypes or "selection", op)
        if kind := precision_sensitive(op, known):
            block_costs.precise[kind] += 1
            block_costs.taken[kind] += op.results[0].elements
            _note_line(block_costs.lines, kind, op)
    return block_costs


def _note_line(lines: dict[str, str], kind: str, op: Op) -> None:
    if op.line:
        lines.setdefault(kind, op.line)


def reduce_operations(op: Op) -> float:
    """Operations of a reduction: its region's operations for each element, or for each element of each window."""
    inner = sum(elementwise_operations(inner) for inner in walk(op.regions[0]) if inner.kind in ELEMENTWISE)
    per = max(1, inner // max(1, len(op.results)))
    if op.kind == "reduce":
        return float(per * sum(operand.elements for operand in op.operands[: len(op.results)]))
    window = math.prod(op.attributes["window_dimensions"])
    return float(per * window * sum(result.elements for result in op.results))


def elementwise_operations(op: Op) -> int:
    """Real operations: one per element, and several per element for complex numbers."""
    elements = sum(result.elements for result in op.results)
    if op.kind == "fft":  # 5 n log2 n (C. Van Loan, Computational Frameworks for the FFT, 1992)
        return int(5 * max(op.operands[0].elements, elements) * math.log2(math.prod(op.attributes["fft_length"])))
    if not any("complex" in value.dtype for value in (*op.operands, *op.results)):
        return elements
    return elements * _OF_COMPLEX.get(op.kind, 8)


def dot_flops(op: Op) -> float:
    """``2 x (elements of the result) x (contracted elements)``, and four times that for complex numbers."""
    contracted = dims_of(op.attributes["dot_dimension_numbers"], "lhs_contracting_dimensions")
    each = 8.0 if "complex" in op.results[0].dtype else 2.0
    share = op.attributes.get("share", 1.0)  # for a convolution, without padding
    return share * each * op.results[0].elements * math.prod(op.operands[0].shape[dim] for dim in contracted)


def _touched(op: Op) -> float:
    if op.kind in ("slice", "dynamic_slice", "gather", "broadcast_in_dim", "iota"):
        return 2.0 * sum(result.bytes for result in op.results)
    if op.kind == "dynamic_update_slice":
        return 2.0 * op.operands[1].bytes
    return float(sum(value.bytes for value in (*op.operands, *op.results)))


def collectives_of(op: Op, mesh: dict[str, int], device: int) -> list[Collective]:
    """A device's executions of a collective: one entry per operand, since each operand is sent."""
    groups = groups_of(op, mesh)
    group = groups.of(device)
    if not group:
        return []
    size = math.prod(mesh[axis] for axis in groups.axes) if groups.pairs else len(group)
    collectives = []
    for operand in op.operands:
        wire = wire_bytes(op, operand.bytes, size, device)
        shape, dtype, shift = operand.shape, operand.dtype, _shift(groups, mesh)
        collectives.append(Collective(op.kind, groups.axes, size, operand.bytes, wire, 1, op.line, shape, dtype, shift))
    return collectives


def _shift(groups: Groups, mesh: dict[str, int]) -> int | None:
    """The common distance along its axis of the transfers of a permute, if there is one."""
    if len(groups.axes) != 1:
        return None
    sizes, axis = tuple(mesh.values()), list(mesh).index(groups.axes[0])
    places = ([np.unravel_index(device, sizes)[axis] for device in pair] for pair in groups.pairs)
    shifts = {int(target - source) % sizes[axis] for source, target in places}
    return shifts.pop() if len(shifts) == 1 else None


def wire_bytes(op: Op, operand_bytes: int, n: int, device: int) -> float:
    """Bytes of an operand that ``device`` sends in a group of ``n``, by the ring algorithm."""
    if op.kind == "all_gather":
        return float((n - 1) * operand_bytes)
    if op.kind in ("reduce_scatter", "all_to_all"):
        return (n - 1) / n * operand_bytes
    if op.kind == "all_reduce":
        return 2 * (n - 1) / n * operand_bytes
    if op.kind == "collective_permute":
        pairs = op.attributes["source_target_pairs"]
        return float(operand_bytes) if any(s == device != t for s, t in pairs) else 0.0
    return float(operand_bytes)
