"""The order of chunks on devices, and the grading of ``zigzag_order``: the work of the busiest device."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.chapters.context_parallel.wrapping import Chunks, shards_of
from autograder.chapters.draws import draw_leaves, unseen_mesh
from autograder.contract import facts, limits, time_limits
from autograder.contract.case import UNSEEN
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

WRAPPING = wrappings("context_parallel")["zigzag_order"]
# The most a device may compute relative to the mean, and the time relative to that of contiguous tokens.
LOADED, FASTER = 1.05, 0.65


def order_of(case: Case[Any]) -> list[list[int]]:
    """The chunks of each device: contiguous, or one from the front and one from the back, moved by ``turn`` places.

    With ``shuffled`` they are in random order.
    """
    n = shards_of(case)
    if case.sizes.shuffled:
        numbers = np.random.default_rng(case.sizes.turn).permutation(n * case.sizes.chunks)
        return numbers.reshape(n, -1).tolist()
    order = [[i] if case.sizes.chunks == 1 else [i, 2 * n - 1 - i] for i in range(n)]
    return [order[(i + case.sizes.turn) % n] for i in range(n)]


def given(case: Case[Any]) -> dict[str, Any]:
    return {"order": order_of(case)}


def in_sequence(x: np.ndarray, case: Case[Any], dim: int) -> np.ndarray:
    """The chunks of ``x`` along ``dim``, moved from device order to sequence order."""
    return _chunks(x, np.argsort(np.ravel(order_of(case))), dim)


def on_devices(x: np.ndarray, case: Case[Any], dim: int) -> np.ndarray:
    """The inverse of ``in_sequence``."""
    return _chunks(x, np.ravel(order_of(case)), dim)


def _chunks(x: np.ndarray, numbers: np.ndarray, dim: int) -> np.ndarray:
    return np.concatenate([np.split(x, len(numbers), dim)[number] for number in numbers], dim)


def draw_chunks(rng: np.random.Generator, case: Case[Chunks]) -> dict[str, Any]:
    return draw_leaves(rng, WRAPPING.input_shapes(case), case.sizes.width**-0.5)


def order_oracle(inputs: dict[str, Any], case: Case[Chunks]) -> dict[str, Any]:
    """Products of all queries with all earlier keys, in float64; the mean over each chunk."""
    q, k, v = (np.float64(inputs[name]) for name in "qkv")
    mixed = np.matmul(np.tril(np.matmul(q, k.T)), v)
    return {"values": np.float32(mixed.reshape(2 * shards_of(case), case.sizes.length, -1).mean(1))}


def mean_work(case: Case[Chunks]) -> int:
    """FLOPs of a device if all do the same: ``n (2 n + 1)`` pairs of chunks over ``n``, two products for each."""
    return (2 * shards_of(case) + 1) * 4 * case.sizes.length**2 * case.sizes.width


def _most_loaded(e: Evidence) -> Fact:
    most, mean, message = e.costs.flops, mean_work(e.case), ""
    if most > LOADED * mean:
        message = (
            f"{e.case.place} the device with the most work computes {most / mean:.2f} times the mean over all "
            "devices. How many pairs of chunks does each device compute? These numbers should be equal."
        )
    return facts.case_fact(
        e, "most loaded device", Kind.COMPUTE, message, most, LOADED * mean, unit=Unit.FLOPS, weight=2
    )


def order_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "Which chunk is on no device, or on two?"
    slow = "Which device do the others wait for, and which chunks does it have?"
    return [
        facts.arrays_match("values", evidence.cases, "values", values),
        facts.worst([_most_loaded(e) for e in evidence.programs]),
        time_limits.time_within(evidence, FASTER, slow, weight=2, than=limits.NAIVE),
    ]


def _unseen_chunks(rng: np.random.Generator) -> Case[Chunks]:
    return Case(UNSEEN, unseen_mesh(rng, (4,), (5,), (6,)), Chunks(length=int(rng.choice([2, 5])), width=7))


_CHUNKS = Chunks(length=3, width=4)
ZIGZAG_ORDER = Task(
    wrapping=WRAPPING,
    points=2,
    core_facts=("most loaded device",),
    cases=(
        Case.on({"context": 8}, _CHUNKS, quick=True),
        Case.on({"context": 3}, _CHUNKS, quick=True),
        Case.on({"context": 1}, _CHUNKS),
    ),
    unseen=_unseen_chunks,
    draw=draw_chunks,
    oracle=order_oracle,
    facts=order_facts,
    stretches=({"length": 64}, {"width": 256}),
    at_scale=(Case.on({"context": 8}, Chunks(length=2048, width=2048), "32,768 tokens"), "context=8"),
    naive_time="contiguous_order",
)
