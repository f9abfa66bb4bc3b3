"""Participants of a compiled collective, in each of XLA's notations."""

from __future__ import annotations

import math
import re

import numpy as np

from course.program.compiled.schedule import Instruction
from course.program.foreign import split_axes
from course.program.program import ProgramError

_LISTED = r"\{((?:\{[\d,]*\},?)*)\}"
_COUNTED = r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
_BY_AXES = r"mesh\[((?:'[^']*'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"


def replica_groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """The devices of each group of a collective.

    XLA lists them, ``{{0,1},{2,3}}``; counts them, ``[2,2]<=[2,2]T(1,0)``: all devices in the second shape,
    transposed, in rows of the first; or names axes of a separate mesh, ``mesh['a'=2,'b'=4] {'b'}``, and parts of
    them, ``'b':(2)2``: those of size 2 within each of 2 outer parts. The devices of that mesh may be in another order,
    ``device_ids=([4,2]T(1,0))``: all of them in that shape, transposed, one after the other.

    Raises:
        ProgramError: They use another notation.
    """
    if listed := re.search("replica_groups=" + _LISTED, instruction.text):
        return _rows(listed[1]) or [list(range(num_devices))]
    if counted := re.search("replica_groups=" + _COUNTED, instruction.text):
        shape, source, order = (_numbers(part) for part in counted.groups())
        devices = np.arange(math.prod(source)).reshape(source)
        return np.transpose(devices, order or None).reshape(shape).tolist()
    named = re.search("replica_groups=" + _BY_AXES, instruction.text)
    if not named:
        raise ProgramError(
            f"the groups of the compiled {instruction.name} have an unknown format: {instruction.text[:120]}"
        )
    mesh, source, order, chosen = named.groups()
    return _by_axes(mesh, chosen, _numbers(source), _numbers(order))


def source_target_pairs(instruction: Instruction) -> list[list[int]]:
    """Source and target of each edge of a permute."""
    pairs = re.search("source_target_pairs=" + _LISTED, instruction.text)
    return _rows(pairs[1]) if pairs else []


def _by_axes(mesh: str, chosen: str, source: list[int], order: list[int]) -> list[list[int]]:
    parts = {
        name: (int(before or 1), int(size or 0))
        for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", chosen)
    }
    shape, inside, outside = split_axes(re.findall(r"'([^']*)'=(\d+)", mesh), parts)
    devices = np.arange(math.prod(shape))
    if source:
        devices = np.transpose(devices.reshape(source), order or None)
    return (
        np.transpose(devices.reshape(shape), outside + inside)
        .reshape(-1, math.prod(shape[dim] for dim in inside))
        .tolist()
    )


def _rows(text: str) -> list[list[int]]:
    return [_numbers(row) for row in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(",") if number]
