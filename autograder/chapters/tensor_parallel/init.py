"""``init_dense``: there is no one right answer, so the numbers that were drawn are looked at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from autograder.chapters.tensor_parallel.shared import unseen_mesh
from autograder.chapters.tensor_parallel.wrapping import SPLITS, init_shapes, others_of, split_of, tensor_of
from autograder.contract import facts
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings

# 6,144 normal numbers have a mean within 0.013 standard deviations of 0, and a spread within 0.9 % of the right one, in
# two of three draws; 768 numbers on one device that have nothing to do with 768 others correlate by 0.036.
OFF, ALIKE = 0.1, 0.25


def draw(rng: np.random.Generator, _: Case) -> dict[str, Any]:
    """Two keys that are neighbours, as from one seed and the next."""
    first = rng.integers(0, 2**32 - 1, 2, np.uint32)
    return {"keys": {"first": first, "second": first + np.array([0, 1], np.uint32)}}


def oracle(_: dict[str, Any], case: Case) -> dict[str, Any]:
    """Zeros in the shapes that are expected: ``init_facts`` says what must be true of the numbers."""
    devices = int(np.prod(list(case.mesh.values())))
    return {
        "values": {
            f"{name}_{which}": jax.tree.map(lambda s: np.zeros((devices, *s.shape), s.dtype), init_shapes(case, split))
            for name, split in SPLITS.items()
            for which in ("first", "second")
        }
    }


def init_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.worst([_values(e) for e in cases]),
        facts.worst([_scale(e) for e in cases]),
        facts.only_collectives("communication", cases, ()),
    ]


def _values(e: Evidence) -> Fact:
    wrong = next(_mistakes(e), "")
    message = f"on mesh {e.case.mesh_text}: {wrong}" if wrong else ""
    limit = "parts that differ, copies that are equal"
    return Fact("values", not wrong, "other numbers" if wrong else "such numbers", limit, case=e.case.name,
                line=e.line if wrong else "", message=message, kind=Kind.VALUES)  # fmt: skip


def _by_place(e: Evidence, name: str) -> np.ndarray:
    """Kernels of one kind, ``[other devices, devices of the axis, elements]``."""
    kernels = e.measured[f"values/{name}/kernel"]
    grid = kernels.reshape(*e.case.mesh.values(), -1)
    return np.moveaxis(grid, list(e.case.mesh).index(tensor_of(e.case)), -2).reshape(
        -1, split_of(e.case), grid.shape[-1]
    )


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    spread = np.std(a, dtype=np.float64) * np.std(b, dtype=np.float64)
    return bool(spread == 0 or abs(np.mean(a * b, dtype=np.float64)) > ALIKE * spread)


def _mistakes(e: Evidence) -> Iterator[str]:
    axis, others = tensor_of(e.case), " and ".join(map(repr, others_of(e.case)))
    for name, split in SPLITS.items():
        first, second = (_by_place(e, f"{name}_{which}") for which in ("first", "second"))
        what = f"the kernel split by {split}" if split else "the kernel that is not split"
        if not all(np.all(np.isfinite(a)) for a in e.measured.values()):
            yield "some numbers are not finite"
        if np.any(e.measured[f"values/{name}_first/bias"]):
            yield f"the bias beside {what} does not start at zero"
        if np.any(first != first[:1]):
            yield f"{what} differs between devices along {others}, which hold copies of it"
        if split is None and np.any(first != first[:, :1]):
            yield f"{what} differs between devices along {axis!r}, which hold copies of it"
        if _alike(first[0], second[0]):
            yield f"{what} comes out alike with two different keys"
        if split is not None:
            for i, j in itertools.combinations(range(split_of(e.case)), 2):
                if _alike(first[0, i], first[0, j]):
                    yield f"devices {i} and {j} along {axis!r} drew the same part of {what}"


def _scale(e: Evidence) -> Fact:
    """The standard deviation of a whole kernel, relative to ``d_in ** -0.5``: the one that is farthest off."""
    found = {}
    for name, split in SPLITS.items():
        kernel = _by_place(e, f"{name}_first")[0].astype(np.float64) * np.sqrt(e.case.sizes["d_in"])
        found[split] = np.std(kernel), np.mean(kernel)
    split = max(found, key=lambda s: abs(found[s][0] - 1) + abs(found[s][1]))
    spread, mean = found[split]
    passed = bool(abs(spread - 1) <= OFF and abs(mean) <= OFF)
    what = f"the kernel split by {split}" if split else "the kernel that is not split"
    message = "" if passed else (
        f"on mesh {e.case.mesh_text} {what} has {spread:.3g} times the standard deviation that it has on one device, "
        f"and a mean of {mean:.2g} of it. How many inputs has each output of the whole layer?")  # fmt: skip
    return Fact("initial scale", passed, f"{spread:.3f}", f"{1 - OFF:g} to {1 + OFF:g}", "of one device's",
                case=e.case.name, line="" if passed else e.line, message=message)  # fmt: skip


_SIZES = {"d_in": 64, "d_out": 96}


def _unseen(rng: np.random.Generator) -> Case:
    mesh = unseen_mesh(rng)
    n = list(mesh.values())[-1]
    return Case("unseen", mesh, {name: (int(rng.integers(80, 130)) // n) * n for name in ("d_in", "d_out")})


INIT_DENSE = Task(
    wrapping=wrappings("tensor_parallel")["init_dense"],
    kind="local",
    points=2,
    cases=(
        Case("data=2 x tensor=4", {"data": 2, "tensor": 4}, _SIZES, quick=True),
        Case("tensor=8", {"tensor": 8}, _SIZES, quick=True),
        Case("model=2", {"model": 2}, _SIZES),
        Case("data=2 x tensor=1", {"data": 2, "tensor": 1}, _SIZES),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=init_facts,
)
