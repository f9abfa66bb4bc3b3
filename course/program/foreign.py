"""Features of programs that no chapter needs, translated for the analyses: for predictions only.

A convolution is priced as the equivalent matmul over the elements in its window, without padding and the
holes from the gradient of a stride.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from course.program.integers import Known, evaluate
from course.program.ir import Block, Op, Value, walk
from course.program.program import ProgramError

MATMULS = {"stablehlo.convolution", "stablehlo.dot"}
# The kind that each of these counts as.
LIKE = {
    **dict.fromkeys(MATMULS, "dot_general"),
    **dict.fromkeys(("chlo.top_k", "mhlo.topk"), "sort"),
    "stablehlo.if": "case",
    "mhlo.copy": "reshape",
    "stablehlo.map": "abs",
}


def as_product(
    name: str, operands: list[Value], result: Value, attributes: dict[str, Any]
) -> tuple[list[Value], dict[str, Any]]:
    """Operands and attributes of the ``dot_general`` with the same FLOPs as a ``dot`` or convolution."""
    if name == "stablehlo.dot":
        return operands, {"dot_dimension_numbers": f"lhs_contracting_dimensions = [{len(operands[0].shape) - 1}]"}
    image, kernel = operands
    match = re.search(r"\[(.*?)\]x\[(.*?)\]->\[(.*?)\]", attributes["dimension_numbers"])
    if not match:
        raise ProgramError(f"a convolution's dims have an unknown format: {attributes['dimension_numbers']}")
    of_image, of_kernel, of_result = (text.replace(" ", "").split(",") for text in match.groups())
    contracted = [place for place, dim in enumerate(of_kernel) if dim != "o"]
    spatial = [dim for dim in of_kernel if dim.isdigit()]
    met = window = 1
    for number, dim in enumerate(sorted(spatial, key=int)):
        sizes = (
            value.shape[dims.index(dim)]
            for value, dims in ((image, of_image), (kernel, of_kernel), (result, of_result))
        )
        size, taps, places = sizes
        met *= _met(size, taps, places, number, attributes)
        window *= taps * places
    text = f"lhs_contracting_dimensions = [{', '.join(map(str, contracted))}]"
    return [kernel, image], {"dot_dimension_numbers": text, "share": met / max(1, window)}


def _met(size: int, taps: int, places: int, number: int, attributes: dict[str, Any]) -> int:
    """Pairs of a window element and an image element along a dim, over all positions of the window."""
    stride, hole, spread = (
        (attributes.get(name) or (1,) * (number + 1))[number]
        for name in ("window_strides", "lhs_dilation", "rhs_dilation")
    )
    padding = [int(number) for number in re.findall(r"-?\d+", attributes.get("padding", "0").partition(":")[0])]
    before = padding[2 * number] if len(padding) > 1 else padding[0]
    at = np.arange(places)[:, None] * stride - before + np.arange(taps)[None, :] * spread
    return int(np.sum((at >= 0) & (at <= (size - 1) * hole) & (at % hole == 0)))


def rows_of_axes(text: str, meshes: dict[str, str]) -> np.ndarray:
    """The groups, one per row, of a collective that gives them as axes of a mesh, whole or in part.

    Args:
        text: ``#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref<name = "x">]>``.
        meshes: The module's meshes, as written in its text.
    """
    name = re.search(r"mesh = @([\w.\-]+)", text)
    declared = meshes[name[1]] if name else ""
    chosen = {
        axis: (int(before or 1), int(size or 0))
        for axis, before, size in re.findall(r'axis_ref<name = "([^"]+)"(?:, sub_axis_info = \((\d+)\)(\d+))?>', text)
    }
    shape, inside, outside = split_axes(re.findall(r'"([^"]+)"=(\d+)', declared), chosen)
    order = re.search(r"device_ids=\[([\d, ]+)\]", declared)
    devices = np.array([int(device) for device in order[1].split(",")]) if order else np.arange(math.prod(shape))
    return np.transpose(devices.reshape(shape), outside + inside).reshape(-1, math.prod(shape[dim] for dim in inside))


def split_axes(
    sizes: Iterable[tuple[str, str]], chosen: dict[str, tuple[int, int]]
) -> tuple[list[int], list[int], list[int]]:
    """A mesh with three dims for each axis, so that a part of an axis is a dim of its own.

    Args:
        sizes: Each axis and its size, in the mesh's order.
        chosen: The axes that a collective runs over, each with the number of parts that it is cut into first, and the
            number of pieces of each part that the collective runs over, or 0 for all of them.

    Returns:
        The shape, the dims of the chosen axes in their order, and the other dims.
    """
    shape: list[int] = []
    along: dict[str, int] = {}
    for axis, size in sizes:
        before, part = chosen.get(axis, (1, 0))
        part = part or int(size)
        along[axis] = len(shape) + 1
        shape += [before, part, int(size) // (before * part)]
    inside = [along[axis] for axis in chosen]
    return shape, inside, [dim for dim in range(len(shape)) if dim not in inside]


def scatter_reductions(main: Block, count: int) -> None:
    """Turn every all-reduce of whose result each device uses only its own block into a reduce-scatter.

    XLA's partitioner writes it like this, and its ``ReduceScatterCreator`` converts it for GPUs and TPUs.

    Args:
        main: The program of one device; changed in place.
        count: Number of devices.
    """
    readers: dict[Value, list[Op]] = {}
    for op in walk(main):
        for value in op.operands:
            readers.setdefault(value, []).append(op)
    blocks = [main, *(region for op in walk(main) for region in op.regions if op.kind in ("while", "case"))]
    returned = {value for block in blocks for value in block.returns}
    for block in blocks:
        makers = {result: op for op in block.ops for result in op.results}
        removed: set[Op] = set()
        for place, op in enumerate(block.ops):
            if op.kind != "all_reduce" or len(op.results) != 1 or op.results[0] in returned:
                continue
            part, *other_readers = readers.get(op.results[0], [op])
            if other_readers or part.kind != "dynamic_slice" or makers.get(part.results[0]) is not part:
                continue
            dim = _own_block(op, part, makers, count)
            if dim is not None:
                attributes = {**op.attributes, "scatter_dimension": dim}
                results = part.results
                block.ops[place] = Op(
                    "reduce_scatter", op.operands, results, attributes, op.regions, op.line, op.function
                )
                removed.add(part)
        block.ops = [op for op in block.ops if op not in removed]


def _own_block(reduced: Op, part: Op, makers: dict[Value, Op], count: int) -> int | None:
    """The dim along which each device of a group slices its block out of a reduced array, if there is one."""
    whole, own = reduced.results[0].shape, part.results[0].shape
    cut = [dim for dim, (before, after) in enumerate(zip(whole, own, strict=True)) if before != after]
    rows = reduced.attributes.get("replica_groups")
    if len(cut) != 1 or rows is None or len(set(rows.flatten().tolist())) != count:
        return None
    dim = cut[0]
    size = own[dim]
    if size * rows.shape[1] != whole[dim]:
        return None
    starts = [_numbers(part.operands[1 + dim], makers, device) for device in range(count)]
    taken = [[starts[device] for device in row] for row in rows.tolist()]
    return dim if all(row == [size * place for place in range(len(row))] for row in taken) else None


def _numbers(value: Value, makers: dict[Value, Op], device: int) -> int | None:
    """A value that depends only on a device's number; None for any other."""
    known: Known = {}
    needed: list[Op] = []
    queue = [value]
    while queue:
        op = makers.get(queue.pop())
        if op is None:
            return None
        needed.append(op)
        queue += op.operands
    for op in reversed(needed):
        evaluate(op, known, device)
    return int(known[value]) if value in known and known[value].size == 1 else None
