"""Cases whose function is told axes by name."""

from __future__ import annotations

import numpy as np

from autograder.contract.draws import axis_names
from autograder.contract.task import Case


def case_over(mesh: dict[str, int], names: tuple[str, ...], sizes: dict[str, int], *, quick: bool = False) -> Case:
    """A case in which the function is told ``names``; the case says so in its name."""
    text = " x ".join(f"{axis}={size}" for axis, size in mesh.items())
    flags = {f"over {axis}": int(axis in names) for axis in mesh}
    return Case(f"{text}, over {' and '.join(names) or 'no axis'}", mesh, {**sizes, **flags}, quick)


def unseen_over(rng: np.random.Generator, sizes: dict[str, int]) -> Case:
    """Axes of unknown names, of any sizes, and some of them told, at least one."""
    shape = [(2, 4), (4, 2), (2, 2, 2), (3, 2), (6,), (5,)][rng.integers(6)]
    mesh = dict(zip(axis_names(rng, len(shape)), shape, strict=True))
    chosen = rng.permutation(list(mesh))[: rng.integers(1, len(mesh) + 1)]
    found = case_over(mesh, tuple(map(str, chosen)), sizes)
    return Case("unseen", found.mesh, found.sizes)
