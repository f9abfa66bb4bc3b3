"""Grading of ``merge_attention``, ``zigzag_order`` and ``ring_attention``, each in a part of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.context_parallel.wrapping import Chunks, Heads, Partials, shards_of
from autograder.chapters.draws import axis_names, compile_oracle, draw_leaves, shift_scores, unseen_mesh
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("context_parallel")

# merge_attention: partial results, merged in float64.

ONE = {"data": 1}


def draw_partials(rng: np.random.Generator, case: Case[Partials]) -> dict[str, Any]:
    """Partial results near each other and far apart, by up to twice ``reach``; some queries see one set, or neither."""
    inputs = draw_leaves(rng, WRAPPINGS["merge_attention"].input_shapes(case))
    partials, sign = inputs["partials"], rng.choice([-1, 1], (case.sizes.queries, case.sizes.num_heads))
    for name, (start, step) in {"first": (0, 4), "second": (0, 6)}.items():
        lse = partials[name]["lse"] + case.sizes.reach * sign
        lse.reshape(-1)[start::step] = -np.inf
        partials[name]["lse"] = np.float32(lse)
        partials[name]["out"][np.isinf(lse)] = 0
    partials["second"]["lse"].reshape(-1)[1::5] += np.float32(30)
    partials["second"]["lse"].reshape(-1)[5::6] *= -1  # where both sets are seen
    return inputs


def merge_oracle(inputs: dict[str, Any], case: Case[Partials]) -> dict[str, Any]:
    """Merge in float64, from the weights of both."""
    del case
    first, second = (jax.tree.map(np.float64, inputs["partials"][name]) for name in ("first", "second"))
    upstream = jax.tree.map(np.float64, inputs["upstream"])
    lse = np.logaddexp(first["lse"], second["lse"])
    unseen = np.isneginf(lse)
    weights = [np.exp(part["lse"] - np.where(unseen, 0, lse)) for part in (first, second)]
    out = sum(w[..., None] * part["out"] for w, part in zip(weights, (first, second), strict=True))
    gradients = {}
    for name, part, w in zip(("first", "second"), (first, second), weights, strict=True):
        of_weight = (upstream["out"] * (part["out"] - out)).sum(-1) + upstream["lse"]
        gradients[name] = {"out": w[..., None] * upstream["out"], "lse": w * of_weight}
    values = {"out": out, "lse": np.where(unseen, 0, lse), "lse_is_infinite": unseen}
    return jax.tree.map(np.float32, {"values": values, "gradients": gradients})


# The largest error, as a share of the largest element, that lost digits can explain.
LITTLE = 1e-2
DIGITS = (
    "Results near zero are right, so the formula is right, but digits are lost: near 10,000, float32 has steps of "
    "0.001, and so does the logarithm of a sum. Which differences are exact, and do the two weights add up to 1?"
)


def merge_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "What share of the whole sum does each result have, and what if a query has no key in one set, or in both?"
    back = "Each `lse` changes both weights, and with them both results: which of these derivatives is missing?"
    infinite = "Is there an infinite derivative, or NaN, on a side that `jnp.where` did not choose?"
    hints = (DIGITS, DIGITS) if _loses_digits(evidence.cases) else (values, back)
    return [
        facts.arrays_match("values", evidence.cases, "values", hints[0], weight=2, not_finite=values),
        facts.arrays_match("gradients", evidence.cases, "gradients", hints[1], not_finite=infinite),
    ]


def _loses_digits(cases: list[Evidence]) -> bool:
    """Return True if results are only slightly wrong, and only where log-sum-exps are in the thousands."""
    off = {True: [0.0], False: [0.0]}
    for e in cases:
        for leaf, expected in e.expected.items():
            error = np.abs(e.measured[leaf] - expected).max() / max(np.abs(expected).max(), 1e-30)
            off[e.case.sizes.reach >= 1000].append(float(error))
    return bool(np.max(off[False]) <= facts.TOLERANCE < np.max(off[True]) < LITTLE)


def _unseen_partials(rng: np.random.Generator) -> Case[Partials]:
    queries, heads, size, reach = (int(rng.choice(choices)) for choices in ((6, 9), (4, 7), (3, 8), (0, 3000, 8000)))
    return Case(UNSEEN, ONE, Partials(queries=queries, num_heads=heads, head_dim=size, reach=reach))


_PARTIALS = Partials(queries=8, num_heads=3, head_dim=5)
MERGE_ATTENTION = Task(
    wrapping=WRAPPINGS["merge_attention"],
    points=2,
    cases=(
        Case("scores near zero", ONE, _PARTIALS, quick=True),
        Case("scores near 10,000", ONE, _PARTIALS.replace(reach=10_000), quick=True),
        Case("scores near 90, one head", ONE, _PARTIALS.replace(reach=90, num_heads=1, queries=24)),
    ),
    unseen=_unseen_partials,
    draw=draw_partials,
    oracle=merge_oracle,
    facts=merge_facts,
)


# zigzag_order: the order of chunks on devices, which rings use, too, and the work of the busiest device.

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
    return draw_leaves(rng, WRAPPINGS["zigzag_order"].input_shapes(case), case.sizes.width**-0.5)


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
    wrapping=WRAPPINGS["zigzag_order"],
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


# ring_attention: one device's attention, bytes of the ring, and what it hides and keeps.

# Exposed communication relative to that of gathering all keys and values, and live temporaries and time of the ring
# relative to the reference's. Gathering takes 1.82 times its temporaries, a ring that saves every block 1.31 times,
# and one that skips nothing takes 1.7 times as long.
RING_EXPOSED, RING_TEMPORARIES, RING_TIME = 0.3, 1.15, 1.2


def draw_heads(rng: np.random.Generator, case: Case[Heads]) -> dict[str, Any]:
    inputs = draw_leaves(rng, WRAPPINGS["ring_attention"].input_shapes(case))
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
RING_TOLERANCE = 4e-5
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
        facts.arrays_match("values", evidence.cases, "values", values, weight=2, tolerance=RING_TOLERANCE),
        facts.arrays_match("gradients", backward, "gradients", back, weight=2, tolerance=RING_TOLERANCE),
        byte_facts.bytes_sent(
            "permute bytes",
            evidence.programs,
            "collective_permute",
            lambda e: _ring_bytes(e, (2, 0)),
            least=lambda e: _ring_bytes(e, (2, -2)),
            few=lambda e, sent: KEPT if e.case.sizes.backward and sent >= _ring_bytes(e, (1, -1)) else "",
        ),
        byte_facts.only_collectives("other collectives", evidence.programs, ("collective_permute",)),
        limits.temporaries_within(evidence, RING_TEMPORARIES, resident, weight=2),
        time_limits.exposed_within(evidence, RING_EXPOSED, late, weight=3, than=limits.NAIVE),
        time_limits.time_within(evidence, RING_TIME, slow, weight=2),
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
    wrapping=WRAPPINGS["ring_attention"],
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
