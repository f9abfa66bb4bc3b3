"""Costs: what one device computes and sends, loops unrolled and branches resolved."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import combinations, zip_longest
from typing import Any

import numpy as np

from course.program.evaluate import depends_on_device, execute
from course.program.ir import COLLECTIVES, ELEMENTWISE, MOVES, Module, Op, unsupported
from course.program.program import ProgramError


@dataclass(frozen=True)
class Collective:
    """One collective operation of a Program, as a device executes it.

    Attributes:
        kind: StableHLO's name, ``all_gather``.
        axes: Mesh axes that it runs over; axes of size 1 are never among them.
        group_size: Devices that take part.
        operand_bytes: Bytes that each device puts in.
        wire_bytes: Bytes that each device sends in one execution, by the ring algorithm: (n-1)/n of the full
            array for a gather or scatter, twice that for an all-reduce, the operand for a permute.
        count: How often it is executed.
        line: The learner's line.
        shape, dtype: Of the first operand, on one device.
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

    @property
    def total_bytes(self) -> float:
        return self.wire_bytes * self.count


@dataclass(frozen=True)
class Costs:
    """Of the device that does most.

    Attributes:
        flops: Floating-point operations of matrix products, ``2 m n k`` each.
        elementwise: Elements that elementwise operations and reductions give.
        bytes_touched: Bytes of operands and results of every operation, nothing fused.
        collectives: What is sent; groups of one device left out.
        products: How often each pair of operand dtypes is multiplied, ``{"f32 x f32": 12}``.
    """

    flops: float
    elementwise: float
    bytes_touched: float
    collectives: tuple[Collective, ...]
    products: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Costs:
        collectives = [{**c, "axes": tuple(c["axes"]), "shape": tuple(c["shape"])} for c in data["collectives"]]
        return cls(**{**data, "collectives": tuple(Collective(**c) for c in collectives)})


def costs(module: Module) -> Costs:
    """Walk the program for every device and return the costs of the one that does most.

    Devices are only told apart where the program asks which one it is; else one stands for all, exactly.

    Raises:
        ProgramError: An op, a trip count or a branch cannot be resolved.
    """
    devices = range(math.prod(module.mesh.values()) if depends_on_device(module) else 1)
    orders: list[list[Collective]] = []
    every = [_of_device(module, device, orders) for device in devices]
    if len(devices) > 1:
        _check_everyone_comes(orders, module.mesh)
    return max(every, key=lambda c: (c.flops + c.elementwise, sum(x.total_bytes for x in c.collectives)))


def _check_everyone_comes(orders: list[list[Collective]], mesh: dict[str, int]) -> None:
    """Devices of one group must run the same collectives in the same order, or they wait for each other forever."""
    places = np.arange(len(orders)).reshape(list(mesh.values()))
    for axes in {c.axes for order in orders for c in order}:
        rest = [i for i, axis in enumerate(mesh) if axis not in axes]
        along = np.transpose(places, rest + [i for i, axis in enumerate(mesh) if axis in axes])
        for group in along.reshape(-1, math.prod(mesh[axis] for axis in axes)):
            ours = [[(c.kind, c.shape, c.line) for c in orders[device] if c.axes == axes] for device in group]
            for device, other in zip(group[1:], ours[1:], strict=True):
                for first, second in zip_longest(ours[0], other):
                    if first != second:
                        raise _deadlock(int(group[0]), first, int(device), second)


def _deadlock(device: int, ours: Any, other: int, theirs: Any) -> ProgramError:
    lines = [c[2] or "unknown line" for c in (ours, theirs) if c is not None]
    runs, there = ("no further collective" if c is None else c[0] for c in (ours, theirs))
    return ProgramError(
        f"{lines[0]}: devices would wait for each other forever: where device {device} runs {runs}, "
        f"device {other} runs {there}. A collective inside a branch must be reached by every device of its group."
    )


def _of_device(module: Module, device: int, orders: list[list[Collective]]) -> Costs:
    flops = elementwise = touched = 0.0
    sent: Counter[Collective] = Counter()
    products: Counter[str] = Counter()
    order: list[Collective] = []
    orders.append(order)
    for op in execute(module, device):
        if op.kind in COLLECTIVES:
            for found in _collectives(op, module.mesh, device):
                sent[found] += 1
                order.append(found)
        elif op.kind == "dot_general":
            flops += dot_flops(op)
            products[" x ".join(operand.dtype for operand in op.operands)] += 1
        elif op.kind in ELEMENTWISE or op.kind in ("sort", "reduce_window", "rng_bit_generator"):
            elementwise += sum(result.elements for result in op.results)
        elif op.kind == "reduce":
            elementwise += sum(operand.elements for operand in op.operands)
        if op.kind in ELEMENTWISE or op.kind in MOVES or op.kind in ("dot_general", "reduce", "sort", "reduce_window"):
            touched += _touched(op)
    collectives = tuple(Collective(**{**asdict(c), "count": n}) for c, n in sent.items())
    return Costs(flops, elementwise, touched, collectives, dict(products))


def dot_flops(op: Op) -> float:
    """``2 x (elements of the result) x (contracted elements)``."""
    dims = re.search(r"lhs_contracting_dimensions = \[([\d, ]*)\]", op.attributes["dot_dimension_numbers"])
    contracted = [int(dim) for dim in dims[1].split(",") if dim.strip()] if dims else []
    return 2.0 * op.results[0].elements * math.prod(op.operands[0].shape[dim] for dim in contracted)


def _touched(op: Op) -> float:
    if op.kind in ("slice", "dynamic_slice", "gather", "broadcast_in_dim", "iota"):
        return 2.0 * sum(result.bytes for result in op.results)
    if op.kind == "dynamic_update_slice":
        return 2.0 * op.operands[1].bytes
    return float(sum(value.bytes for value in (*op.operands, *op.results)))


def _collectives(op: Op, mesh: dict[str, int], device: int) -> list[Collective]:
    """One entry an operand, since a collective of several arrays sends each."""
    axes, size = collective_axes(op, mesh)
    if size <= 1:
        return []
    found = []
    for operand in op.operands:
        wire = _wire_bytes(op, operand.bytes, size, device)
        shape, dtype = operand.shape, operand.dtype
        found.append(Collective(op.kind, axes, size, operand.bytes, wire, 1, op.line, shape, dtype))
    return found


def _wire_bytes(op: Op, operand_bytes: int, n: int, device: int) -> float:
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


def collective_axes(op: Op, mesh: dict[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes that a collective runs over, and how many devices take part in a group."""
    names = [axis for axis, size in mesh.items() if size > 1]
    places = np.arange(math.prod(mesh.values())).reshape(list(mesh.values()))
    if op.kind == "collective_permute":
        pairs = [(s, t) for s, t in op.attributes["source_target_pairs"] if s != t]
        where = {int(d): np.argwhere(places == d)[0] for pair in pairs for d in pair}
        moved = {i for s, t in pairs for i in np.flatnonzero(where[int(s)] != where[int(t)])}
        axes = tuple(axis for i, axis in enumerate(mesh) if i in moved)
        return axes, math.prod(mesh[axis] for axis in axes)
    if "replica_axes" in op.attributes:
        named = tuple(axis for axis in mesh if axis in op.attributes["replica_axes"] and mesh[axis] > 1)
        return named, math.prod(mesh[axis] for axis in named)
    groups = {frozenset(int(d) for d in group if d >= 0) for group in op.attributes["replica_groups"]}
    if all(len(group) == 1 for group in groups):
        return (), 1
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            rest = [i for i, axis in enumerate(mesh) if axis not in axes]
            along = np.transpose(places, rest + [i for i, axis in enumerate(mesh) if axis in axes])
            rows = along.reshape(-1, math.prod(mesh[axis] for axis in axes))
            if {frozenset(map(int, row)) for row in rows} == groups:
                return axes, rows.shape[1]
    raise unsupported(op, op.line, f"its groups {sorted(map(sorted, groups))} are no axes of mesh {mesh}")
