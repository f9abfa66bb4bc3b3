"""``init_dense``: there is no unique right answer, so the facts examine the drawn numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from autograder.chapters.draws import unseen_mesh
from autograder.chapters.tensor_parallel.wrapping import Kernel, init_shapes, splits_of
from autograder.contract import byte_facts, facts
from autograder.contract.case import UNSEEN
from autograder.contract.case_builders import others_of, parts_of, tensor_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Direction, Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

# 8,640 normal numbers have a mean within 0.011 standard deviations of 0, and a spread within 0.8% of the right one, in
# two of three draws. The same two consecutive float32 hardly ever recur.
OFF, ALIKE = 0.1, 0.1
# Size limit of the largest array, in kernel parts: drawing one takes an array of random bits, and a kernel has six.
PARTS_ALIVE = 2
# Limit on operations per number of a device's own parts: drawing one takes 130 to 175; a whole kernel takes six times
# that.
FOR_EACH = 400
# The axis that splits features comes last.
UNSEEN_MESHES = ((2, 3), (2, 4), (3, 2), (1, 5), (4, 2))


def draw(rng: np.random.Generator, _: Case[Kernel]) -> dict[str, Any]:
    """Keys as from an even seed and the next: adding a device's place to one, or XORing it in, can give the other."""
    first = rng.integers(0, 2**31, 2, np.uint32) * 2
    return {"keys": {"first": first, "second": first + np.array([0, 1], np.uint32)}}


def oracle(_: dict[str, Any], case: Case[Kernel]) -> dict[str, Any]:
    """Zeros in the expected shapes: ``init_facts`` checks the numbers."""
    devices = int(np.prod(list(case.mesh.values())))
    return {
        "values": {
            f"{name}_{which}": jax.tree.map(lambda s: np.zeros((devices, *s.shape), s.dtype), init_shapes(case, split))
            for name, split in splits_of(case).items()
            for which in ("first", "second")
        }
    }


def init_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.worst([_values(e) for e in evidence.cases]),
        facts.worst([_scale(e) for e in evidence.cases]),
        byte_facts.only_collectives("communication", evidence.cases, ()),
        *(
            facts.worst(alone)
            if (alone := [fact(e) for e in evidence.cases if not e.case.sizes.whole])
            else facts.unmeasured(name, kind, _NOT_ALONE)
            for name, kind, fact in ((LARGEST, Kind.MEMORY, _largest), (DRAWN, Kind.COMPUTE, _drawn))
        ),
    ]


LARGEST, DRAWN = "largest temporary", "numbers drawn"
_NOT_ALONE = "every case of this check also draws a kernel that is not split"


def _largest(e: Evidence) -> Fact:
    """No array has more elements than ``PARTS_ALIVE`` parts of a kernel if each device draws only its parts."""
    largest, elements = e.memory.largest, e.memory.largest_numbers
    most = PARTS_ALIVE * e.case.sizes.d_in * e.case.sizes.d_out // parts_of(e.case)
    message, line = "", ""
    if largest and elements > most:
        message = (
            f"{e.case.place} a device holds an array of {elements:,} elements; its part of a kernel has "
            f"{most // PARTS_ALIVE:,}. Which numbers does it need, and which does it draw?"
        )
        line = largest.line
    return facts.case_fact(e, LARGEST, Kind.MEMORY, message, elements, most, unit=Unit.ELEMENTS, line=line)


def _drawn(e: Evidence) -> Fact:
    """A device computes at most ``FOR_EACH`` operations for each number of its own parts, both keys together.

    Compilers that fuse the drawing never store numbers that are discarded, but they do compute them.
    """
    own = 2 * sum(init_shapes(e.case, split)["kernel"].size for split in splits_of(e.case).values())
    computed, most, message = e.costs.elementwise, FOR_EACH * own, ""
    if computed > most:
        message = (
            f"{e.case.place} a device computes {computed / own:,.0f} operations for each number that it "
            "keeps; drawing one takes about 170. Which numbers does it need, and which does it draw?"
        )
    return facts.case_fact(e, DRAWN, Kind.COMPUTE, message, computed, most, unit=Unit.OPERATIONS)


def _values(e: Evidence) -> Fact:
    wrong = next(_mistakes(e), "")
    message = f"{e.case.place}: {wrong}" if wrong else ""
    measured, limit = "not as specified" if wrong else "as specified", "parts that differ, copies that are equal"
    return facts.case_fact(e, "values", Kind.VALUES, message, measured, limit)


def _by_place(e: Evidence, name: str) -> np.ndarray:
    """Kernels of one kind, ``[other devices, devices of the axis, elements]``."""
    kernels = e.measured[f"values/{name}/kernel"]
    grid = kernels.reshape(*e.case.mesh.values(), -1)
    return np.moveaxis(grid, list(e.case.mesh).index(tensor_of(e.case)), -2).reshape(
        -1, parts_of(e.case), grid.shape[-1]
    )


def _pairs(numbers: np.ndarray) -> np.ndarray:
    """Every two consecutive numbers as one, without signs: overlapping parts share these, wherever they begin."""
    return np.unique(np.abs(np.stack([numbers[:-1], numbers[1:]], -1)).view(np.uint64))


def _alike(a: np.ndarray, b: np.ndarray) -> bool:
    return len(np.intersect1d(a, b, assume_unique=True)) > ALIKE * len(a)


def _mistakes(e: Evidence) -> Iterator[str]:
    axis, others = tensor_of(e.case), " and ".join(map(repr, others_of(e.case)))
    for name, split in splits_of(e.case).items():
        first, second = (_by_place(e, f"{name}_{which}") for which in ("first", "second"))
        kernel_name = f"the kernel split by {split}" if split else "the kernel that is not split"
        if not all(np.all(np.isfinite(a)) for a in e.measured.values()):
            yield "some numbers are not finite"
        if any(np.any(e.measured[f"values/{name}_{which}/bias"]) for which in ("first", "second")):
            yield f"the bias of {kernel_name} does not start at zero"
        if np.any(first != first[:1]):
            yield f"{kernel_name} differs between devices along {others}, which should hold equal copies of it"
        if split is None and np.any(first != first[:, :1]):
            yield f"{kernel_name} differs between devices along {axis!r}, which should hold equal copies of it"
        this_key, next_key = (
            [_pairs(part) for part in kernel[0][: None if split else 1]] for kernel in (first, second)
        )
        if any(len(part) < (1 - ALIKE) * (first.shape[-1] - 1) for part in this_key):
            yield f"the numbers of {kernel_name} repeat on one device"
        for (i, a), (j, b) in itertools.combinations(enumerate(this_key), 2):
            if _alike(a, b):
                yield f"devices {i} and {j} along {axis!r} drew the same part of {kernel_name}"
        for (i, a), (j, b) in itertools.product(enumerate(this_key), enumerate(next_key)):
            if _alike(a, b) and i == j:
                yield f"{kernel_name} comes out the same with two different keys"
            elif _alike(a, b):
                drew = f"device {i} along {axis!r} draws the same part of {kernel_name}"
                yield f"{drew} with the key of one seed as device {j} with the key of the next"


def _scale(e: Evidence) -> Fact:
    """The standard deviation of a whole kernel relative to ``d_in ** -0.5``: the worst one."""
    moments = {}
    for name, split in splits_of(e.case).items():
        kernel = _by_place(e, f"{name}_first")[0].astype(np.float64) * np.sqrt(e.case.sizes.d_in)
        moments[split] = np.std(kernel), np.mean(kernel)
    split = max(moments, key=lambda s: abs(moments[s][0] - 1) + abs(moments[s][1]))
    spread, mean = moments[split]
    kernel_name, message = f"the kernel split by {split}" if split else "the kernel that is not split", ""
    if abs(spread - 1) > OFF or abs(mean) > OFF:
        message = (
            f"{e.case.place} {kernel_name} has {spread:.3g} times the standard deviation that it has on one "
            "device. How many inputs does each output of the whole layer have?"
        )
        if abs(spread - 1) <= OFF:
            message = (
                f"{e.case.place} the mean of {kernel_name} is {mean:.2g} standard deviations and should be 0: "
                "around which number does it draw?"
            )
    options = {"direction": Direction.BETWEEN, "unit": Unit.ONE_DEVICE}
    return facts.case_fact(e, "initial scale", Kind.VALUES, message, float(spread), (1 - OFF, 1 + OFF), **options)


def _unseen(rng: np.random.Generator) -> Case[Kernel]:
    mesh = unseen_mesh(rng, *UNSEEN_MESHES)
    n = list(mesh.values())[-1]
    d_in, d_out = ((int(rng.integers(80, 130)) // n) * n for _ in range(2))
    return Case(UNSEEN, mesh, Kernel(d_in=d_in, d_out=d_out))


INIT_DENSE = Task(
    wrapping=wrappings("tensor_parallel")["init_dense"],
    points=2,
    core_facts=("initial scale",),
    cases=(
        Case.on({"data": 2, "tensor": 4}, Kernel(), quick=True),
        Case.on({"tensor": 6}, Kernel(whole=False), "parts alone", quick=True),
        Case.on({"model": 3}, Kernel()),
        Case.on({"data": 2, "tensor": 1}, Kernel()),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=init_facts,
)
