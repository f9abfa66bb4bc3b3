"""The layout of results: which device holds which block of a leaf, and where an element is in its own array."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from autograder.contract.task import Evidence
from autograder.contract.text import join_words
from course.program import Leaf


def rank_of(e: Evidence, name: str) -> int | None:
    """The number of dims of the input that a result belongs to: of a gradient, an updated value or a moment.

    None if there is no such input.
    """
    inner = f"/{name.partition('/')[2]}"
    same = [leaf for leaf in e.inputs if len(inner) > 1 and f"/{leaf.name}".endswith(inner)]
    moments = [leaf for leaf in e.inputs if "/" in leaf.name and inner.endswith(f"/{leaf.name.partition('/')[2]}")]
    return next((len(leaf.shape) for leaf in (*same, *moments)), None)


def layout(e: Evidence, name: str, *, summed: bool = False) -> Layout | None:
    """The layout of a leaf of the results; None if the contract has put the leaves of several devices together.

    With ``summed``, the contract may have added up the devices' shares along a dim that only distinguishes devices.
    """
    leaf, expected_shape = next((output for output in e.outputs if output.name == name), None), e.expected[name].shape
    rank = rank_of(e, name)
    if leaf is None or leaf.shape == expected_shape:
        return leaf and Layout(leaf, e.case.mesh, rank, e.squeezed)
    for dim in range(len(leaf.shape) if summed else 0):
        shape, spec = ((*a[:dim], *a[dim + 1 :]) for a in (leaf.shape, leaf.spec))
        if leaf.spec[dim] and shape == expected_shape:
            return Layout(replace(leaf, shape=shape, spec=spec), e.case.mesh, rank, e.squeezed)
    return None


def device_at(axes: Sequence[str], places: Sequence[int], mesh: Mapping[str, int]) -> str:
    """Name a place, ``the device at pipe 3 and data 0``, unlike a size, ``pipe=4``; plural if an axis is not named."""
    if not axes:
        return ""
    noun = "device" if len(axes) == sum(size > 1 for size in mesh.values()) else "devices"
    return f"the {noun} at {join_words(f'{axis} {place}' for axis, place in zip(axes, places, strict=True))}"


class Layout:
    """The layout of a leaf: the block of it that each device has."""

    def __init__(self, leaf: Leaf, mesh: Mapping[str, int], rank: int | None = None, squeezed: tuple[str, ...] = ()):
        self.leaf, self.mesh, self.name, self.shape = leaf, mesh, leaf.name, leaf.shape
        self.parts = [math.prod(mesh[axis] for axis in axes) for axes in leaf.spec]
        self.axes = axes = [axis for entry in leaf.spec for axis in entry if mesh[axis] > 1]
        one_axis = len(axes) == sum(size > 1 for size in mesh.values()) == 1
        self.places = list(product(*(range(mesh[axis]) for axis in axes)))
        self.devices = [f"device {at[0]}" if one_axis else device_at(axes, at, mesh) for at in self.places]
        # Dims in which a device has more than one index. Leading dims that only distinguish devices are not part of the
        # function's own array, which has ``rank`` dims if that is known; its own dims are numbered from there.
        self.dims = [d for d, n in enumerate(self.parts) if not leaf.spec[d] or leaf.shape[d] > n]
        self.front = self.dims[0] if self.dims else len(self.parts)
        before = len(self.parts) - rank if rank is not None else -1
        if before >= 0 and list(self.shape[:before]) == self.parts[:before]:
            self.front = before
        alone = {(axis,) for axis in squeezed}
        squeezed_dims = {d for d, axes in enumerate(leaf.spec) if axes in alone and d not in self.dims}
        self.own = [d for d in range(self.front, len(self.parts)) if d not in squeezed_dims]
        self.local = [d - self.front - sum(self.front <= other < d for other in squeezed_dims) for d in self.dims]

    def coordinates(self, axis: str) -> np.ndarray:
        """Each device's place on an axis."""
        return np.array([at[self.axes.index(axis)] for at in self.places])

    def holder(self, place: Sequence[int]) -> str:
        """Name the devices that have an element, given its index in the whole array; empty if all have it."""
        on: dict[str, int] = {}
        for at, size, axes in zip(place, self.shape, self.leaf.spec, strict=True):
            number = int(at) * math.prod(self.mesh[axis] for axis in axes) // size
            for axis in reversed(axes):
                number, coordinate = divmod(number, self.mesh[axis])
                on |= {axis: coordinate} if self.mesh[axis] > 1 else {}
        return device_at(sorted(on), [on[axis] for axis in sorted(on)], self.mesh)

    def index(self, place: Sequence[int]) -> list[int]:
        """The index of an element in the array of a device that has it."""
        return [int(place[d]) % (self.shape[d] // self.parts[d]) for d in self.own]

    def of(self, array: np.ndarray) -> np.ndarray:
        """The blocks of the array, ``[devices, ...]``."""
        sizes = zip(self.shape, self.parts, strict=True)
        cut = array.reshape([n for dim, parts in sizes for n in (parts, dim // parts)])
        apart = cut.transpose([*range(0, cut.ndim, 2), *range(1, cut.ndim, 2)])
        local = [self.shape[dim] // self.parts[dim] for dim in self.dims]
        return apart.reshape(len(self.devices), *local).astype(np.float64)
