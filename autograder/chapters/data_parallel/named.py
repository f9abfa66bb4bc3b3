"""Cases whose function is told axes by name, and arrays that are returned as every device holds them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from autograder.contract import Case
from course.mesh import as_varying


def case_over(mesh: dict[str, int], names: tuple[str, ...], sizes: dict[str, int], *, quick: bool = False) -> Case:
    """A case in which the function is told ``names``; the case says so in its name."""
    text = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    flags = {f"over {axis}": int(axis in names) for axis in mesh}
    return Case(f"{text}, over {' and '.join(names) or 'no axis'}", mesh, {**sizes, **flags}, quick)


def names_of(case: Case) -> tuple[str, ...]:
    """The axes that the function is told."""
    return tuple(axis for axis in case.mesh if case.sizes[f"over {axis}"])


def varies_everywhere(x: Any, case: Case) -> Any:
    """``x``, typed as different on each device of the mesh."""
    for axis in case.mesh:
        x = as_varying(x, axis)
    return x


def each_device(x: jax.Array, case: Case) -> jax.Array:
    """A local array as a part of all devices' arrays, which get one leading dim for each axis of the mesh."""
    return varies_everywhere(x, case).reshape(*[1] * len(case.mesh), *x.shape)


def each_device_spec(case: Case) -> P:
    """The spec of what ``each_device`` gives."""
    return P(*case.mesh)
