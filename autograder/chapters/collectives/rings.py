"""Four collectives made of permutes: their results, traffic and memory limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from autograder.chapters.collectives.wrapping import Chunks
from autograder.chapters.draws import ODD, draw_leaves, unseen_case
from autograder.contract import byte_facts, facts, limits
from autograder.contract.case_builders import axis_size
from autograder.contract.orders import orders, places
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings

# Chunks that may be resident in addition to the result, on the 8 devices of the realistic size: a ring needs two, a
# bidirectional one three; keeping all arrivals until the end takes seven or more.
CHUNKS_ALIVE = 4


def chunk_bytes(case: Case[Chunks]) -> int:
    """The bytes of one chunk."""
    return np.dtype(case.sizes.dtype).itemsize * case.sizes.chunk * math.prod(case.sizes.dims)


def gathered(x: np.ndarray, place: np.ndarray) -> np.ndarray:
    """``[n, chunk, ...]`` to the all-gathered result on every device, ``[n, n * chunk, ...]``."""
    return np.repeat(x[np.argsort(place)].reshape(1, -1, *x.shape[2:]), len(x), 0)


def scattered(x: np.ndarray, place: np.ndarray) -> np.ndarray:
    """``[n, n * chunk, ...]`` to the chunks of the sum, ``[n, chunk, ...]``."""
    return _sum(x).reshape(len(x), -1, *x.shape[2:])[place]


def reduced(x: np.ndarray, _: np.ndarray) -> np.ndarray:
    """``[n, n * chunk, ...]`` to the sum on every device."""
    return np.repeat(_sum(x)[None], len(x), 0)


def exchanged(x: np.ndarray, place: np.ndarray) -> np.ndarray:
    """``[n, n * chunk, ...]``: chunk j of device i arrives at device j, at index i."""
    return _swapped(x)[:, np.argsort(place)].reshape(x.shape)


def sent_back(x: np.ndarray, place: np.ndarray) -> np.ndarray:
    """The transpose: the cotangent at index i belongs to chunk j of device i."""
    return _swapped(_chunked(x)[:, place].reshape(x.shape)).reshape(x.shape)


def _swapped(x: np.ndarray) -> np.ndarray:
    return _chunked(x).swapaxes(0, 1)


def _chunked(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), len(x), -1, *x.shape[2:])


def _sum(x: np.ndarray) -> np.ndarray:
    return x.sum(0, dtype=np.float64).astype(x.dtype)


Stacked = Callable[[np.ndarray, np.ndarray], np.ndarray]
# The effect of each on the arrays of all devices, and the effect of its transpose on the cotangents.
MEANING: dict[str, tuple[Stacked, Stacked]] = {
    "ring_all_gather": (gathered, scattered),
    "ring_reduce_scatter": (scattered, gathered),
    "ring_all_reduce": (reduced, reduced),
    "ring_all_to_all": (exchanged, sent_back),
}


def _oracle(name: str, inputs: dict[str, Any], case: Case[Chunks]) -> dict[str, Any]:
    n, (forward, backward) = axis_size(case), MEANING[name]
    place = places(case, n)
    x = inputs["x"].reshape(n, -1, *inputs["x"].shape[1:])
    if "upstream" not in inputs:
        return {"values": forward(x, place)}
    upstream = inputs["upstream"].reshape(n, -1, *inputs["upstream"].shape[1:])
    return {"values": forward(x, place), "gradients": backward(upstream, place)}


def bytes_form(case: Case[Chunks], name: str) -> float:
    """The closed form: (n-1)/n of the whole array, doubled for an all-reduce, and doubled again with a gradient."""
    times = (2 if name == "ring_all_reduce" else 1) * (2 if case.sizes.backward else 1)
    return times * (axis_size(case) - 1) * chunk_bytes(case)


_WHERE = "Which chunk does each device hold after each step, and where does it belong? "
_BACK = "The function is linear, so its gradient is its transpose: is the path of every chunk differentiated? "
_TEMPORARIES = (
    "A chunk that arrives can be put in its place, added or passed on at once: which array is kept longer than that, "
    "or is larger than necessary? If you add several arrivals in a row (a + b + c …), the compiler makes one kernel "
    "of it, and all of them are in memory until it runs."
)


def _facts(name: str, evidence: TaskEvidence) -> list[Fact]:
    def form(e: Evidence) -> float:
        return bytes_form(e.case, name)

    return [
        facts.arrays_match("values", evidence.cases, "values", _WHERE, weight=2),
        facts.arrays_match("gradients", evidence.cases, "gradients", _BACK),
        byte_facts.bytes_sent("permute bytes", evidence.programs, "collective_permute", form),
        byte_facts.only_collectives("other collectives", evidence.programs, ("collective_permute",), kind=Kind.TOOLS),
        limits.temporaries_at_most(evidence, lambda case: CHUNKS_ALIVE * chunk_bytes(case), _TEMPORARIES),
    ]


_BOTH, _DEEP = Chunks(chunk=2, width=6), Chunks(chunk=5, depth=4, width=7)
SMALL = "data=8, forward alone"
CASES = (
    Case.on({"data": 8}, _BOTH, quick=True),
    Case.on({"data": 8}, _BOTH.replace(backward=False), "forward alone", quick=True),
    Case.on({"pipe": 3, "tensor": 2}, _DEEP, quick=True),
    Case.on({"tensor": 2, "data": 4}, Chunks(chunk=3, width=0), "no other dims"),
    # A sum of two is rounded once, in any order: float16 results are bitwise equal.
    Case.on({"data": 2}, _DEEP.replace(dtype="float16"), "float16", quick=True),
    Case.on({"data": 1}, _BOTH, quick=True),
)
LARGE = Case.on({"data": 8}, Chunks(chunk=1024, width=4096, backward=False), "chunks of 16 MiB")


def _unseen(rng: np.random.Generator) -> Case[Chunks]:
    return unseen_case(rng, Chunks(chunk=int(rng.choice([1, 4, 5])), width=int(rng.choice([1, 7, 16]))), *ODD)


# What a course may require of each. The first two must agree, so that their composition is still an all-reduce.
_SENTENCES = {
    "ring_all_gather": "the chunk of the one with index `i` belongs at place `{}` of the result, and not at place `i`.",
    "ring_reduce_scatter": "the one with index `i` leaves with chunk `{}` of the sum, and not with chunk `i`.",
    "ring_all_to_all": "what the one with index `i` sent belongs at place `{}` of the result, and not at place `i`.",
}


def ring(name: str, naive: str) -> Task:
    """The task for one of the four; ``naive`` is the mutant that shows the naive baseline's memory."""
    wrapping = wrappings("collectives")[name]
    return Task(
        wrapping=wrapping,
        points=2,
        core_facts=("permute bytes", "live temporaries"),
        cases=CASES,
        unseen=_unseen,
        draw=lambda rng, case: draw_leaves(rng, wrapping.input_shapes(case)),
        oracle=partial(_oracle, name),
        facts=partial(_facts, name),
        at_scale=(LARGE, SMALL),
        naive_memory=naive,
        variants=orders(_SENTENCES[name]) if name in _SENTENCES else (),
        varies_with="" if name == "ring_all_to_all" else "chunks",
    )


RINGS = (
    ring("ring_all_gather", "keeps_every_chunk_until_the_end"),
    ring("ring_reduce_scatter", "adds_at_the_end"),
    ring("ring_all_reduce", "gathers_everything_and_adds"),
    ring("ring_all_to_all", "puts_in_order_at_the_end"),
)
