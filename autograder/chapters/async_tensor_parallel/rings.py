"""Four products in rings: two that go one way round, and two that send half of everything each way."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.chapters.async_tensor_parallel import shared
from autograder.chapters.async_tensor_parallel.shared import HIDDEN, TOKENS, WIDTH
from autograder.chapters.async_tensor_parallel.wrapping import GATHER, KINDS, SCATTER, size_of
from autograder.contract import facts, limits
from autograder.contract.orders import orders, places
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

SMALL = "tensor=8, forward alone"
# Of the synchronous version's: what a ring takes and holds, and what one does that goes both ways.
TIME, TEMPORARIES, BOTH_WAYS = 0.75, 0.6, 0.95
# Dims of one device; a scatter's are those of a gather turned round.
_DIMS = {
    GATHER: ({"d_in": 6, "d_out": 5}, {"d_in": WIDTH, "d_out": HIDDEN // 8}),
    SCATTER: ({"d_in": 5, "d_out": 6}, {"d_in": HIDDEN // 8, "d_out": WIDTH}),
}
# Which dim's chunks travel.
_SENT = {GATHER: "d_in", SCATTER: "d_out"}

_WHERE = {
    GATHER: "After k steps, whose rows does a device hold, and where do they belong in the result? ",
    SCATTER: "Which rows has a partial sum been made of when it arrives, and where does it end? ",
}
_BACK = "Is every device's product differentiated, and does what flows back end on the device that it belongs to? "
_LATE = (
    "What does each transfer wait for, and what is computed meanwhile? In an iteration of a loop, a transfer can hide "
    "behind what needs neither its result nor gives its operand."
)
_HELD = "Which array is as large as all rows, and must all of it be there at once?"
_SLOW = "What is read, written or copied in every step beside the products, and how large is it?"


def _unseen(kind: str, rng: np.random.Generator) -> Case:
    fixed, free = ("d_in", "d_out") if kind == GATHER else ("d_out", "d_in")
    dims = {fixed: int(rng.choice([4, 8, 10])), free: int(rng.choice([3, 6, 7])), "backward": 1}
    return shared.unseen(rng, dims)


def _common(kind: str, counted: list[Evidence], cases: list[Evidence]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", _WHERE[kind], weight=2),
        facts.arrays_match("gradients", [e for e in cases if e.case.sizes["backward"]], "gradients", _BACK),
        shared.permuted(counted, _SENT[kind]),
        facts.only_collectives("other collectives", counted, ("collective_permute",)),
    ]


def _ring_facts(kind: str, cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    return [
        *_common(kind, [*cases, large] if large else cases, cases),
        limits.time_within(large, references, TIME, _LATE, weight=3, than=limits.NAIVE),
        limits.temporaries_within(large, references, TEMPORARIES, _HELD, weight=2, than=limits.NAIVE),
    ]


def _both_ways_facts(
    kind: str, cases: list[Evidence], large: Evidence | None, references: dict[str, Any]
) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        *_common(kind, counted, cases),
        equal_ways(counted),
        limits.time_within(large, references, BOTH_WAYS, _SLOW, weight=2, than=limits.NAIVE),
    ]


def equal_ways(evidence: list[Evidence]) -> Fact:
    """As many bytes travel towards higher places on the axis as towards lower ones, by the shorter way round."""
    return facts.worst([_equal_ways(e) for e in evidence])


def _equal_ways(e: Evidence) -> Fact:
    forth = back = 0.0
    for c in e.costs.collectives:
        if c.kind == "collective_permute" and c.shift is not None:
            half = c.group_size / 2
            # Half-way round, both ways are as long.
            forth += c.total_bytes * (0.5 if c.shift == half else c.shift < half)
            back += c.total_bytes * (0.5 if c.shift == half else c.shift > half)
    sends = forth + back > 0 or size_of(e.case) == 1
    passed = sends and abs(forth - back) <= 1e-4 * max(forth, back)
    message = "" if passed else (
        f"on mesh {e.case.mesh_text} a device sends {facts.bytes_text(forth)} bytes towards higher places on the axis "
        f"and {facts.bytes_text(back)} towards lower ones. Which way does each half go?")  # fmt: skip
    figures = facts.bytes_text(forth), facts.bytes_text(back)
    return Fact("bytes each way", passed, *figures, "bytes", case=e.case.name, line=e.line, message=message, weight=2)


_SENTENCES = {
    GATHER: "the rows of the one with index `i` belong at place `{}` of the result's, and not at place `i`.",
    SCATTER: "the one with index `i` leaves with part `{}` of the rows, and not with part `i`.",
}


def oracle(kind: str, inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The product, its rows in the order that the case asks for."""
    place, given = places(case, size_of(case)), dict(inputs)
    moved, back = ("x", "gradients") if kind == GATHER else ("upstream", "values")
    if moved in given:
        given[moved] = _chunks(given[moved], np.argsort(place))
    found = shared.oracle(given, case)
    if kind == SCATTER:
        return {**found, back: _chunks(found[back], place)}
    if back in found:
        found[back] = {**found[back], "x": _chunks(found[back]["x"], place)}
    return found


def _chunks(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """``[..., rows, features]`` with its devices' rows in that order."""
    chunks = rows.reshape(*rows.shape[:-2], len(order), -1, rows.shape[-1])
    return chunks[..., order, :, :].reshape(rows.shape)


def task(name: str, points: float, *, both_ways: bool) -> Task:
    """The task of one of the four; the naive way is the synchronous one, in memory as in time."""
    kind = KINDS[name]
    dims, large = _DIMS[kind]
    small = {"rows": 2, **dims}
    judge = _both_ways_facts if both_ways else _ring_facts
    sizes = {"rows": TOKENS // 8, **large, "backward": 0}
    return Task(
        wrapping=wrappings("async_tensor_parallel")[name],
        kind="local",
        points=points,
        cases=shared.meshes(small, {"rows": 4, **dims, "batch": 3}, SMALL),
        unseen=lambda rng: _unseen(kind, rng),
        draw=lambda rng, case: shared.draw(name, rng, case),
        oracle=lambda inputs, case: oracle(kind, inputs, case),
        facts=lambda cases, large, references: judge(kind, cases, large, references),
        analysed=(Case(f"tensor=8, width {WIDTH}", {"tensor": 8}, sizes), SMALL),
        naive="gathers_then_multiplies" if kind == GATHER else "multiplies_then_scatters",
        slow="gathers_then_multiplies" if kind == GATHER else "multiplies_then_scatters",
        variants=orders(_SENTENCES[kind]),
        varies_with="rows",  # a gather's rows and a scatter's then fit together, as in ``async_tp_mlp``
    )


TASKS = (
    task("ring_gather_matmul", 3, both_ways=False),
    task("matmul_ring_scatter", 3, both_ways=False),
    task("bidirectional_gather_matmul", 2, both_ways=True),
    task("bidirectional_matmul_scatter", 2, both_ways=True),
)
