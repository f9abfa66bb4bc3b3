"""Pictures of shardings: an array as a grid of blocks with the devices that hold each, next to the mesh.

One piece of SVG without scripts, style sheets or addresses, narrow enough for a phone; and the same as a text table.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from course.render.holdings import Layout, layout
from course.render.svg import AXES, LETTER, MATMUL, TEXT, svg, text, unique

# Narrow enough to be read on a phone without scrolling.
GUTTER, GRID, GAP, MESH = 36.0, 220.0, 26.0, 120.0
LEAST = 0.76
LOWEST, HIGHEST, ROW, CHIP, CELL, NARROW = 84.0, 220.0, 30.0, 20.0, 30.0, 20.0
MAX_BLOCKS, MAX_DEVICES = 16, 256
HUES = (MATMUL, AXES[0], AXES[2], AXES[1], AXES[3])
TINTS = (0.22, 0.5, 0.34, 0.62)


@dataclass(frozen=True)
class Holdings:
    """The blocks of an array and their devices: a picture in a notebook, a table in a terminal.

    Attributes:
        shape: Shape of the whole array.
        spec: A ``PartitionSpec``, or a tuple like one.
        mesh: A ``Mesh``, an ``AbstractMesh``, or axis sizes by name.
        title: Heading; by default the shape and the mesh.
        labels: Names of the dims.
        show_spec: Whether the heading includes the spec. An exercise that asks for it leaves it out.
        note: Text below; by default the shape of a block and the number of copies.
    """

    shape: tuple[int, ...]
    spec: Any
    mesh: Any
    title: str = ""
    labels: tuple[str, ...] = ()
    show_spec: bool = False
    note: str = ""

    def _repr_html_(self) -> str:
        array, labels = (self.shape, self.spec, self.mesh), self.labels
        picture = holdings_svg(*array, title=self.title, labels=labels, show_spec=self.show_spec, note=self.note)
        return f'<div style="overflow-x:auto;margin:8px 0;">{picture}</div>'

    def __repr__(self) -> str:
        placement = layout(self.shape, self.spec, self.mesh)
        head = [self.title or _heading(placement), *([_spec_text(self.spec)] if self.show_spec else [])]
        return "\n".join(
            [*head, holdings_table(self.shape, self.spec, self.mesh), self.note or _blocks_text(placement)]
        )


def who_holds(array: Any, *, title: str = "", labels: Sequence[str] = (), show_spec: bool = False) -> Holdings:
    """The blocks of a ``jax.Array`` and their devices, as the last line of a notebook's cell or in a ``print``.

    Raises:
        ValueError: The array has no ``NamedSharding``.
    """
    sharding = getattr(array, "sharding", None)
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    if spec is None or mesh is None or not getattr(mesh, "shape", None):
        kind = type(array).__name__ if sharding is None else f"an array with a {type(sharding).__name__}"
        raise ValueError(
            f"only an array with a NamedSharding has a mesh, and this is {kind}: place it first, with "
            "jax.device_put(array, NamedSharding(mesh, spec))"
        )
    return Holdings(tuple(array.shape), spec, mesh, title, tuple(labels), show_spec)


def holdings_table(shape: Sequence[int], spec: Any, mesh: Any) -> str:
    """The same as text: a line for each device, with its position in the mesh and the indices of its block."""
    placement = layout(shape, spec, mesh)
    block = {device: index for index, holders in placement.holders.items() for device in holders}
    places = zip(placement.devices.ravel().tolist(), np.ndindex(placement.devices.shape), strict=True)
    rows = [("device", *placement.axes, "holds")]
    rows += [(str(d), *map(str, at), f"[{', '.join(placement.ranges(block[d]))}]") for d, at in places]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def holdings_svg(
    shape: Sequence[int],
    spec: Any,
    mesh: Any,
    *,
    title: str = "",
    labels: Sequence[str] = (),
    show_spec: bool = False,
    note: str = "",
    file: bool = False,
) -> str:
    """An array as a grid of blocks, each with the devices that hold it, next to the mesh in the same colours.

    For an array with more than two dims, the leading ones are folded into the rows, and a note says so.

    Args:
        shape: Shape of the whole array.
        spec: A ``PartitionSpec``, or a tuple like one: for each dim ``None``, an axis, or a tuple of axes.
        mesh: A ``Mesh``, an ``AbstractMesh``, or axis sizes by name.
        title: Heading; by default the shape and the mesh.
        labels: Names of the dims; ``dim 0`` and so on by default.
        show_spec: Whether the spec is written next to the shape.
        note: Text below; by default the shape of a block and the number of copies.
        file: Whether the picture is standalone, with its own colours.

    Raises:
        ValueError: The spec does not fit the shape or the mesh, the numbers of labels and dims differ, or it is divided
            into more blocks than can be drawn.
    """
    placement = layout(shape, spec, mesh)
    names = tuple(labels) or tuple(f"dim {i}" for i in range(len(placement.shape)))
    if len(names) != len(placement.shape):
        raise ValueError(
            f"{len(names)} labels were given for shape {list(placement.shape)}: give one for each dim, or none"
        )
    if max(_folded(placement)) > MAX_BLOCKS or placement.devices.size > MAX_DEVICES:
        raise ValueError(
            f"{' by '.join(map(str, _folded(placement)))} blocks on {placement.devices.size} devices are too many "
            f"to read: draw at most {MAX_BLOCKS} along each dim, for example with a smaller mesh"
        )
    left = max([GUTTER] + [len(label) * LETTER + 10 for label in _row_labels(placement)])
    width = left + GRID + GAP + max(MESH, NARROW * _columns(placement)) + 1
    head = textwrap.wrap(title or _heading(placement), int(width / (LETTER * 1.3)))
    head += [_spec_text(spec)] if show_spec else []
    parts = [text(line, 0, 15 + 17 * i, size=TEXT + 1, weight="600") for i, line in enumerate(head)]
    top = 17.0 * len(head) + 20
    array, low = _array(placement, names, left, top)
    devices, lower = _mesh(placement, left + GRID + GAP, top)
    foot = textwrap.wrap(" ".join([note or _blocks_text(placement), *_fold_note(names)]), int(width / LETTER))
    y = max(low, lower) + 20
    parts += [*array, *devices, *(text(line, 0, y + 15 * i, faint=True) for i, line in enumerate(foot))]
    holders_text = " ".join(
        f"Block [{', '.join(placement.ranges(i))}]: {_listed(ids)}." for i, ids in placement.holders.items()
    )
    name = unique(repr((parts, file)), "s")
    about = f"{note or _blocks_text(placement)} {holders_text}"
    height, picture_title = y + 15 * len(foot) - 6, f"Blocks by device: {' '.join(head)}"
    return svg(width, height, picture_title, about, "".join(parts), name, file=file, least=LEAST)


def _heading(placement: Layout) -> str:
    mesh = ", ".join(f"{name} {size}" for name, size in placement.axes.items())
    return f"shape {list(placement.shape)} on the mesh {mesh}"


def _spec_text(spec: Any) -> str:
    return f"P({', '.join(repr(entry) for entry in spec)})"


def _blocks_text(placement: Layout) -> str:
    parts, copies = math.prod(placement.counts), placement.copies
    share = "all of it" if parts == 1 else f"1/{parts} of it"
    times = {1: "once", 2: "twice"}.get(copies, f"{copies} times")
    return f"Each device holds a block of shape {list(placement.block)}, {share}; each block is held {times}."


def _fold_note(names: Sequence[str]) -> list[str]:
    if len(names) < 3:
        return []
    return [f"The rows are those of {', '.join(names[:-2])} and {names[-2]} together."]


def _listed(ids: Sequence[int]) -> str:
    return f"device{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def _folded(placement: Layout) -> tuple[int, int]:
    """Rows and columns of the grid."""
    if len(placement.shape) < 2:
        return 1, math.prod(placement.counts)
    return math.prod(placement.counts[:-1]), placement.counts[-1]


def _tint(placement: Layout, index: tuple[int, ...]) -> tuple[str, float]:
    """Colour and strength of a block, unique among up to 20."""
    at = list(placement.holders).index(index)
    return HUES[at % len(HUES)], TINTS[at // len(HUES) % len(TINTS)]


def _box(x: float, y: float, width: float, height: float, tint: tuple[str, float], title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    fill = f'fill="{tint[0]}" fill-opacity="{tint[1]}" stroke="currentColor" stroke-opacity="0.6"'
    return f"<rect {place} {fill}><title>{title}</title></rect>"


def _divided(placement: Layout, index: tuple[int, ...], dims: slice) -> str:
    """The index range of a block in the given dims that are divided."""
    return ", ".join(range_text for range_text in placement.ranges(index)[dims] if range_text != ":")


def _row_labels(placement: Layout) -> list[str]:
    _, columns = _folded(placement)
    return [_divided(placement, index, slice(-1)) for index in list(placement.holders)[::columns]]


def _array(placement: Layout, names: Sequence[str], left: float, top: float) -> tuple[list[str], float]:
    """The grid of blocks with its ranges, and its end."""
    rows, columns = _folded(placement)
    shape = placement.shape
    height = LOWEST if len(shape) < 2 else min(max(GRID * shape[-2] / max(shape[-1], 1), LOWEST), HIGHEST)
    height = max(height, ROW * rows)
    wide, high = GRID / columns, height / rows
    sized = [f"{n}: {s}" if n[-1:].isdigit() else f"{n} {s}" for n, s in zip(names, shape, strict=True)]
    down = " × ".join(sized[:-1])
    across = f"{sized[-1]} →" if shape else "a single number"
    parts = [text(f"{down} ↓", 0, top, size=TEXT)] if down else []
    lines = 2 if (len(down) + len(across) + 5) * LETTER * 1.1 > left + GRID else 1
    y = top + 15.0 * (lines - 1)
    parts.append(text(across, left + GRID, y, "end", size=TEXT))
    y += 22 if columns > 1 else 8
    label_step = max(
        1, math.ceil(max(len(_divided(placement, i, slice(-1, None))) + 1 for i in placement.holders) * LETTER / wide)
    )
    for place, (index, ids) in enumerate(placement.holders.items()):
        row, column = divmod(place, columns)
        x, at = left + column * wide, y + row * high
        title = f"[{', '.join(placement.ranges(index))}]: {_listed(ids)}"
        parts.append(_box(x, at, wide, high, _tint(placement, index), title))
        parts += _chips(ids, x, at, wide, high)
        if row == 0 and column % label_step == 0:
            parts.append(text(_divided(placement, index, slice(-1, None)), x + wide / 2, y - 6, "middle", faint=True))
    for row, label in enumerate(_row_labels(placement)):
        parts.append(text(label, left - 6, y + (row + 0.5) * high + 4, "end", faint=True))
    return parts, y + height


def _chips(ids: Sequence[int], x: float, y: float, width: float, height: float) -> list[str]:
    """The numbers of the devices, each in a circle if there is room, otherwise their count."""
    step = CHIP + 4 if width >= CHIP + 4 else width
    across = max(1, int(width // step))
    lines = math.ceil(len(ids) / across)
    if lines * (CHIP + 2) > height or (len(ids) > 1 and width < CHIP):
        count = f"{len(ids)}×" if width < 70 else f"{len(ids)} devices"
        return [text(count, x + width / 2, y + height / 2 + 4, "middle", passive=True)]
    across = math.ceil(len(ids) / lines)
    parts = []
    for i, device in enumerate(ids):
        row, column = divmod(i, across)
        in_row = min(across, len(ids) - row * across)
        middle = x + width / 2 + (column - (in_row - 1) / 2) * step
        at = y + height / 2 + (row - (lines - 1) / 2) * (CHIP + 2)
        ring = f'<circle cx="{middle:.1f}" cy="{at:.1f}" r="{CHIP / 2 - 1:g}" fill="none" stroke="currentColor" '
        parts += [ring + 'stroke-opacity="0.55" pointer-events="none"/>'] if width >= CHIP + 2 else []
        parts.append(text(str(device), middle, at + 4, "middle", passive=True))
    return parts


def _columns(placement: Layout) -> int:
    """Columns of the mesh's picture; a single axis runs from top to bottom."""
    return placement.devices.shape[-1] if placement.devices.ndim > 1 else 1


def _mesh(placement: Layout, x: float, top: float) -> tuple[list[str], float]:
    """The mesh as a grid of devices in the colours of their blocks, and its end."""
    block = {device: index for index, holders in placement.holders.items() for device in holders}
    sizes = list(placement.axes.items())
    columns = _columns(placement)
    planes = placement.devices.reshape(-1, sizes[-2][1] if len(sizes) > 1 else sizes[0][1], columns)
    cell = min(CELL, max(MESH / columns, NARROW))
    parts, y = [], top
    for number, plane in enumerate(planes):
        if len(planes) > 1:
            parts.append(text(_plane(sizes[:-2], number), x, y, size=TEXT, weight="600"))
            y += 17
        for (name, size), arrow in zip(sizes[-2:], "↓→", strict=False):
            parts.append(text(f"{name} {size} {arrow}", x, y, size=TEXT))
            y += 15
        y -= 7
        for (row, column), device in np.ndenumerate(plane):
            at = x + column * cell, y + row * CELL
            title = f"device {device} holds [{', '.join(placement.ranges(block[int(device)]))}]"
            parts.append(_box(*at, cell, CELL, _tint(placement, block[int(device)]), title))
            parts.append(text(str(device), at[0] + cell / 2, at[1] + CELL / 2 + 4, "middle", passive=True))
        y += len(plane) * CELL + (22 if number + 1 < len(planes) else 0)
    return parts, y


def _plane(sizes: Sequence[tuple[str, int]], number: int) -> str:
    """The position of a plane of the mesh along the leading axes."""
    positions = []
    for name, size in reversed(sizes):
        number, at = divmod(number, size)
        positions.append(f"{name} {at}")
    return ", ".join(reversed(positions))
