"""How the functions of ``async_tensor_parallel`` are judged: sizes, a product's oracle, and what is sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.chapters.async_tensor_parallel.wrapping import groups_of, size_of, wrap_product
from autograder.contract import facts
from autograder.contract.draws import axis_names
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact

# At these sizes, on eight idealised H100, a chunk of rows travels about as long as it is multiplied.
WIDTH, HIDDEN, TOKENS = 4608, 18432, 4096


def chunk_bytes(case: Case, features: int) -> int:
    """Of one device's rows with so many features, in float32."""
    return 4 * case.sizes.get("batch", 1) * case.sizes["rows"] * features


def grouped(array: np.ndarray, case: Case) -> np.ndarray:
    """``[groups, batch, rows, features]``: what each group of devices works on, in float64."""
    return array.reshape(groups_of(case), -1, *array.shape[-2:]).astype(np.float64)


def draw(name: str, rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Rows and gradients of any size, and a kernel that keeps it."""
    shapes = wrap_product(name, None, case).inputs
    found = {name: rng.uniform(0.5, 2) * rng.standard_normal(shape.shape) for name, shape in shapes.items()}
    found["kernel"] /= np.sqrt(len(found["kernel"]))
    return {name: array.astype(np.float32) for name, array in found.items()}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """One product on one device, and its gradients."""
    kernel = inputs["kernel"].astype(np.float64)
    values = (inputs["x"].astype(np.float64) @ kernel).astype(np.float32)
    if "upstream" not in inputs:
        return {"values": values}
    of_x = (inputs["upstream"].astype(np.float64) @ kernel.T).astype(np.float32)
    x, upstream = grouped(inputs["x"], case), grouped(inputs["upstream"], case)
    of_kernel = np.einsum("gbri,gbro->gio", x, upstream).astype(np.float32)
    return {"values": values, "gradients": {"x": of_x, "kernel": of_kernel.reshape(-1, of_kernel.shape[-1])}}


def permuted(cases: list[Evidence], features: str) -> Fact:
    """Permutes send (n-1)/n of the rows forward, as much again backward, and once more at most for the kernel."""

    def form(e: Evidence) -> float:
        return (size_of(e.case) - 1) * chunk_bytes(e.case, e.case.sizes[features])

    found = []
    for e in cases:
        times = (2, 3) if e.case.sizes["backward"] else (1, 1)
        found.append(facts.bytes_sent("permute bytes", [e], "collective_permute", form, times=times))
    return facts.worst(found)


def meshes(small: dict[str, int], deep: dict[str, int], forward: str) -> tuple[Case, ...]:
    """The meshes that these functions are run on; ``forward`` names the case without gradients, which is analysed."""
    both = {"backward": 1}
    return (
        Case("tensor=8", {"tensor": 8}, {**small, **both}, quick=True),
        Case(forward, {"tensor": 8}, {**small, "backward": 0}, quick=True),
        Case("data=2 x tensor=4", {"data": 2, "tensor": 4}, {**deep, **both}, quick=True),
        Case("tensor=2 x data=4", {"tensor": 2, "data": 4}, {**deep, **both}),
        Case("model=2", {"model": 2}, {**small, **both}),
        Case("data=8 x tensor=1", {"data": 8, "tensor": 1}, {**deep, **both}),
    )


def unseen(rng: np.random.Generator, dims: dict[str, int]) -> Case:
    """A mesh that learners have not seen, by names and sizes, the axis of features last; without a batch on some."""
    shape = [(4,), (3,), (2, 3), (2, 4), (4, 2), (5,), (6,)][rng.integers(7)]
    mesh = dict(zip(axis_names(rng, len(shape)), shape, strict=True))
    batch = int(rng.integers(len(shape) - 1, 4))
    rows = {"rows": int(rng.choice([2, 4, 6])), **({"batch": batch} if batch else {})}
    return Case("unseen", mesh, {**rows, **dims})
