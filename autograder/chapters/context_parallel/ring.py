"""Grading of ``ring_attention``: one device's attention, bytes of the ring, and what it hides and keeps."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.context_parallel.order import given, in_sequence, on_devices
from autograder.chapters.context_parallel.wrapping import Heads, shards_of
from autograder.chapters.draws import axis_names, compile_oracle, draw_leaves, shift_scores
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

WRAPPING = wrappings("context_parallel")["ring_attention"]
# Exposed communication relative to that of gathering all keys and values, and live temporaries and time of the ring
# relative to the reference's. Gathering takes 1.82 times its temporaries, a ring that saves every block 1.31 times,
# and one that skips nothing takes 1.7 times as long.
EXPOSED, TEMPORARIES, TIME = 0.3, 1.15, 1.2


def draw_heads(rng: np.random.Generator, case: Case[Heads]) -> dict[str, Any]:
    inputs = draw_leaves(rng, WRAPPING.input_shapes(case))
    if case.sizes.large:
        shift_scores(rng, inputs["q"], inputs["k"])
    return inputs


def attention(q: Any, k: Any, v: Any) -> jax.Array:
    """Causal attention on one device, each head of keys repeated for its heads of queries."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    earlier = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf), axis=-1), v)


@cache
def _both_passes() -> Any:
    def run(q, k, v, upstream):
        values, back = jax.vjp(attention, q, k, v)
        return values, back(upstream * values)

    return compile_oracle(run)


def ring_oracle(inputs: dict[str, Any], case: Case[Heads]) -> dict[str, Any]:
    arranged = {name: in_sequence(x, case, 1) for name, x in inputs.items()}
    upstream = arranged.pop("upstream", np.ones_like(arranged["q"]))
    values, gradients = jax.tree.map(
        lambda x: on_devices(np.asarray(x), case, 1), _both_passes()(**arranged, upstream=upstream)
    )
    if not case.sizes.backward:
        return {"values": values}
    return {"values": values, "gradients": dict(zip("qkv", gradients, strict=True))}


# --8<-- [start:hop]
def hop(rows: int, tokens: int, kv_features: int) -> int:
    """Bytes of one transfer in a ring: the keys and values of a device's tokens, in float32."""
    return 4 * 2 * rows * tokens * kv_features


# --8<-- [end:hop]


def _ring_bytes(e: Evidence, backward: tuple[int, int]) -> float:
    """Bytes of ``n - 1`` transfers forward, and ``a n + b`` backward."""
    s, n = e.case.sizes, shards_of(e.case)
    times = n - 1 + (backward[0] * n + backward[1] if s.backward and n > 1 else 0)
    return times * hop(s.rows, s.chunks * s.length, s.num_kv_heads * s.head_dim)


# The log of a sum near 92 is rounded by up to 3.8e-6 in each of four merges. The backward pass computes weights from it
# (an error in an exponent is the same relative error in a weight): right answers differ by up to 1.6e-5.
TOLERANCE = 4e-5
KEPT = (
    "keys and values did not go round again. If they were kept from the forward pass, “live temporaries” has them, too."
)


def ring_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "Which keys has a device seen after each step, and which of them are in the result twice, or not at all?"
    back = "Whose keys does a device have when it adds to a sum, and on which device does that sum end?"
    late = "Which transfer, forward or backward, waits for a computation in the same step, or makes one wait?"
    resident = (
        "How many devices' keys and values are on one device at the same time, what would JAX's own derivative of your "
        "loop save in every step, and does each sum add its part in its step, or all parts at the end?"
    )
    slow = "What is computed that no query sees, or computed again?"
    large = evidence.at_scale
    if large and large.costs.flops <= 1.02 * evidence.references.get("flops", {}).get(limits.REFERENCE, 0):
        slow = "No more is multiplied than in the reference: what is copied, saved or waited for in every step?"
    backward = [e for e in evidence.cases if e.case.sizes.backward]
    return [
        facts.arrays_match("values", evidence.cases, "values", values, weight=2, tolerance=TOLERANCE),
        facts.arrays_match("gradients", backward, "gradients", back, weight=2, tolerance=TOLERANCE),
        byte_facts.bytes_sent(
            "permute bytes",
            evidence.programs,
            "collective_permute",
            lambda e: _ring_bytes(e, (2, 0)),
            least=lambda e: _ring_bytes(e, (2, -2)),
            few=lambda e, sent: KEPT if e.case.sizes.backward and sent >= _ring_bytes(e, (1, -1)) else "",
        ),
        byte_facts.only_collectives("other collectives", evidence.programs, ("collective_permute",)),
        limits.temporaries_within(evidence, TEMPORARIES, resident, weight=2),
        time_limits.exposed_within(evidence, EXPOSED, late, weight=3, than=limits.NAIVE),
        time_limits.time_within(evidence, TIME, slow, weight=2),
    ]


def _unseen_heads(rng: np.random.Generator) -> Case[Heads]:
    mesh = dict(zip(axis_names(rng, 2), ((1, 4), (2, 2), (2, 3), (1, 5), (1, 6))[rng.integers(5)], strict=True))
    heads = (4, 1) if rng.integers(2) else (6, 3)
    sizes = Heads(
        rows=int(rng.integers(1, 3)),
        length=int(rng.choice([2, 5])),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=7,
    )
    chunks = int(rng.integers(1, 4))
    order: dict[str, Any] = {"turn": int(rng.integers(0, 3)), "shuffled": chunks > 2 or bool(rng.integers(2))}
    return Case(UNSEEN, mesh, sizes.replace(chunks=chunks, **order))


# As many heads as in the large case: a loop over heads is allowed.
_HEADS = Heads(rows=1, length=3, num_heads=8, num_kv_heads=4, head_dim=5)
_LARGE = {"length": 1024, "head_dim": 256}
RING_ATTENTION = Task(
    wrapping=WRAPPING,
    points=6,
    core_facts=("exposed communication", "live temporaries"),
    cases=(
        Case.on({"context": 8}, _HEADS, quick=True),
        Case.on(
            {"data": 2, "context": 3},
            _HEADS.replace(rows=2, chunks=1, length=4, num_heads=6, num_kv_heads=2),
            quick=True,
        ),
        Case.on({"context": 4}, _HEADS.replace(backward=False), "forward alone"),
        Case.on(
            {"model": 2, "ring": 4},
            _HEADS.replace(
                shuffled=True, turn=1, large=True, num_heads=2, num_kv_heads=2, head_dim=4, chunks=3, length=4
            ),
            "in any order, large scores",
        ),
        Case.on({"data": 2, "context": 1}, _HEADS),
    ),
    unseen=_unseen_heads,
    draw=draw_heads,
    oracle=ring_oracle,
    facts=ring_facts,
    given=given,
    stretches=({"length": 128}, {"head_dim": 256}),
    at_scale=(Case.on({"context": 8}, _HEADS.replace(**_LARGE), "16,384 tokens"), "context=8"),
    naive_memory="gathers_keys_and_values",
    naive_time="gathers_keys_and_values",
)
