"""Grading of the functions of ``context_parallel``: partial results, a ring, the order of tokens, and a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.closed_forms import ring
from autograder.chapters.context_parallel.wrapping import (
    Chunks,
    Heads,
    Partials,
    Training,
    context_of,
    rows_of,
    shards_of,
)
from autograder.contract import byte_facts, causes, facts, limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, groups_of, join_heads, params_by_head
from autograder.contract.draws import axis_names, draw_batch, draw_keys, draw_leaves, draw_rate, sgd, stacked
from autograder.contract.draws import unseen_mesh as draw_mesh
from autograder.contract.task import Case, Evidence, Judged, Task
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("context_parallel")
ONE = {"data": 1}
# Exposed communication relative to that of gathering all keys and values, and live temporaries and time of the ring
# relative to the reference's. Gathering takes 1.82 times its temporaries, a ring that saves
# every block 1.31 times, and one that skips nothing takes 1.7 times as long.
EXPOSED, TEMPORARIES, TIME = 0.3, 1.15, 1.2
# The most a device may compute relative to the mean, and the time relative to that of contiguous tokens.
LOADED, FASTER = 1.05, 0.65
# Live temporaries of a step, relative to the reference's.
STEP_TEMPORARIES = 1.25


def order_of(case: Case[Any]) -> list[list[int]]:
    """The chunks of each device: contiguous, or one from the front and one from the back; moved by ``turn`` places."""
    n = shards_of(case)
    order = [[i] if case.sizes.chunks == 1 else [i, 2 * n - 1 - i] for i in range(n)]
    return [order[(i + case.sizes.turn) % n] for i in range(n)]


def _given(case: Case[Any]) -> dict[str, Any]:
    return {"order": order_of(case)}


def in_sequence(x: np.ndarray, case: Case[Any], dim: int) -> np.ndarray:
    """The chunks of ``x`` along ``dim``, from the order of devices to that of the sequence."""
    return _chunks(x, np.argsort(np.ravel(order_of(case))), dim)


def on_devices(x: np.ndarray, case: Case[Any], dim: int) -> np.ndarray:
    """The inverse of ``in_sequence``."""
    return _chunks(x, np.ravel(order_of(case)), dim)


def _chunks(x: np.ndarray, numbers: np.ndarray, dim: int) -> np.ndarray:
    return np.concatenate([np.split(x, len(numbers), dim)[number] for number in numbers], dim)


# merge_attention


def draw_partials(rng: np.random.Generator, case: Case[Partials]) -> dict[str, Any]:
    """Partial results near each other and far apart; some queries see one of the two sets of keys, some neither."""
    inputs = draw_leaves(rng, WRAPPINGS["merge_attention"].wrap(print, case).inputs)
    partials, sign = inputs["partials"], rng.choice([-1, 1], (case.sizes.queries, case.sizes.num_heads))
    for name, (start, step) in {"first": (0, 4), "second": (0, 6)}.items():
        lse = partials[name]["lse"] + case.sizes.reach * sign
        lse.reshape(-1)[start::step] = -np.inf
        partials[name]["lse"] = np.float32(lse)
        partials[name]["out"][np.isinf(lse)] = 0
    partials["second"]["lse"].reshape(-1)[1::5] += np.float32(30)
    return inputs


def merge_oracle(inputs: dict[str, Any], case: Case[Partials]) -> dict[str, Any]:
    """In float64, from the weights of both."""
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
    values = {"out": out, "lse": np.where(unseen, 0, lse), "unseen": unseen}
    return jax.tree.map(np.float32, {"values": values, "gradients": gradients})


DIGITS = (
    "Results near zero are right, so the formula is, and digits are lost: near 10,000 float32 has steps of 0.001, and "
    "so has the logarithm of a sum. Which differences are exact, and do the two weights add up to 1?"
)


def merge_facts(judged: Judged) -> list[Fact]:
    values = (
        "By how much of the whole sum does each result count, and what if a query has no key in one set, or in both?"
    )
    back = "Each `lse` changes both weights, and with them both results: which of these derivatives is missing?"
    infinite = "Is there an infinite derivative, or NaN, on a side that `jnp.where` did not choose?"
    asked = (DIGITS, DIGITS) if _loses_digits(judged.cases) else (values, back)
    return [
        facts.arrays_match("values", judged.cases, "values", asked[0], weight=2, not_finite=values),
        facts.arrays_match("gradients", judged.cases, "gradients", asked[1], not_finite=infinite),
    ]


def _loses_digits(cases: list[Evidence]) -> bool:
    """Whether results are wrong by little, and only where log-sum-exps are in the thousands."""
    off = {True: [0.0], False: [0.0]}
    for e in cases:
        for leaf, expected in e.expected.items():
            error = np.abs(e.measured[leaf] - expected).max() / max(np.abs(expected).max(), 1e-30)
            off[e.case.sizes.reach >= 1000].append(float(error))
    return bool(np.max(off[False]) <= facts.TOLERANCE < np.max(off[True]) < causes.ROUNDED)


def _unseen_partials(rng: np.random.Generator) -> Case[Partials]:
    queries, heads, size, reach = (int(rng.choice(some)) for some in ((6, 9), (4, 7), (3, 8), (0, 3000, 8000)))
    return Case(UNSEEN, ONE, Partials(queries=queries, num_heads=heads, head_dim=size, reach=reach))


_PARTIALS = Partials(queries=8, num_heads=3, head_dim=5)
MERGE_ATTENTION = Task(
    wrapping=WRAPPINGS["merge_attention"],
    points=2,
    cases=(
        Case("scores near zero", ONE, _PARTIALS, quick=True),
        Case("scores near 10,000", ONE, _PARTIALS.but(reach=10_000), quick=True),
        Case("scores near 90, one head", ONE, _PARTIALS.but(reach=90, num_heads=1, queries=24)),
    ),
    unseen=_unseen_partials,
    draw=draw_partials,
    oracle=merge_oracle,
    facts=merge_facts,
)

# ring_attention


def draw_heads(rng: np.random.Generator, case: Case[Heads]) -> dict[str, Any]:
    return draw_leaves(rng, WRAPPINGS["ring_attention"].wrap(print, case).inputs)


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

    return jax.jit(run)


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


KEPT = (
    "keys and values did not go round again. If they were kept from the forward pass, “live temporaries” has them, too."
)


def ring_facts(judged: Judged) -> list[Fact]:
    values = (
        "After how many steps has a device seen which keys, and which of them are in the result twice, or not at all?"
    )
    back = "Whose keys has a device when it adds to a sum, and on which device does that sum end?"
    late = (
        "Which transfer, forward or backward, waits for what is computed in the same step, or is waited for? For a "
        "transfer in a backward pass of your own, JAX knows only the line that calls the whole function."
    )
    kept = (
        "How many devices' keys and values are on one device at the same time, and what would JAX's own derivative of "
        "your loop save in every step?"
    )
    slow = "What is computed that nobody sees, or computed again?"
    large = judged.at_scale
    if large and large.costs.flops <= 1.02 * judged.references.get("flops", {}).get(limits.REFERENCE, 0):
        slow = "No more is multiplied than in the reference: what is copied, saved or waited for in every step?"
    backward = [e for e in judged.cases if e.case.sizes.backward]
    return [
        facts.arrays_match("values", judged.cases, "values", values, weight=2),
        facts.arrays_match("gradients", backward, "gradients", back, weight=2),
        byte_facts.bytes_sent(
            "permute bytes",
            judged.all,
            "collective_permute",
            lambda e: _ring_bytes(e, (2, 0)),
            least=lambda e: _ring_bytes(e, (2, -2)),
            few=lambda e, sent: KEPT if e.case.sizes.backward and sent >= _ring_bytes(e, (1, -1)) else "",
        ),
        byte_facts.only_collectives("other collectives", judged.all, ("collective_permute",)),
        limits.temporaries_within(judged, TEMPORARIES, kept, weight=2),
        limits.exposed_within(judged, EXPOSED, late, weight=3, than=limits.NAIVE),
        limits.time_within(judged, TIME, slow, weight=2),
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
    return Case(UNSEEN, mesh, sizes.but(chunks=int(rng.integers(1, 3)), turn=int(rng.integers(0, 3))))


_HEADS = Heads(rows=1, length=3, num_heads=4, num_kv_heads=2, head_dim=5)
_LARGE = {"length": 1024, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256}
RING_ATTENTION = Task(
    wrapping=WRAPPINGS["ring_attention"],
    points=6,
    point=("exposed communication", "live temporaries"),
    cases=(
        Case("context=8", {"context": 8}, _HEADS, quick=True),
        Case(
            "data=2 x context=3",
            {"data": 2, "context": 3},
            _HEADS.but(rows=2, chunks=1, length=4, num_heads=6),
            quick=True,
        ),
        Case("context=4, forward alone", {"context": 4}, _HEADS.but(backward=False)),
        Case("model=2 x ring=4, moved", {"model": 2, "ring": 4}, _HEADS.but(turn=1, num_heads=2)),
        Case("data=2 x context=1", {"data": 2, "context": 1}, _HEADS),
    ),
    unseen=_unseen_heads,
    draw=draw_heads,
    oracle=ring_oracle,
    facts=ring_facts,
    given=_given,
    stretches=({"length": 128}, {"num_heads": 8, "num_kv_heads": 4, "head_dim": 256}),
    at_scale=(Case("context=8, 16,384 tokens", {"context": 8}, _HEADS.but(**_LARGE)), "context=8"),
    naive_memory="gathers_keys_and_values",
    naive_time="gathers_keys_and_values",
)

# zigzag_order


def draw_chunks(rng: np.random.Generator, case: Case[Chunks]) -> dict[str, Any]:
    return draw_leaves(rng, WRAPPINGS["zigzag_order"].wrap(print, case).inputs, case.sizes.width**-0.5)


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
            f"on mesh {e.case.mesh_text} the device with most work computes {most / mean:.2f} times the mean over all "
            "devices. How many pairs of chunks does each device compute? These numbers should be equal."
        )
    return facts.at(e, "most loaded device", Kind.COMPUTE, message, most, LOADED * mean, unit=Unit.FLOPS, weight=2)


def order_facts(judged: Judged) -> list[Fact]:
    values = "Which chunk is on no device, or on two?"
    slow = "For which device do the others wait, and which chunks does it have?"
    return [
        facts.arrays_match("values", judged.cases, "values", values),
        facts.worst([_most_loaded(e) for e in judged.all]),
        limits.time_within(judged, FASTER, slow, weight=2, than=limits.NAIVE),
    ]


def _unseen_chunks(rng: np.random.Generator) -> Case[Chunks]:
    return Case(UNSEEN, draw_mesh(rng, (4,), (5,), (6,)), Chunks(length=int(rng.choice([2, 5])), width=7))


_CHUNKS = Chunks(length=3, width=4)
ZIGZAG_ORDER = Task(
    wrapping=WRAPPINGS["zigzag_order"],
    points=2,
    point=("most loaded device",),
    cases=(
        Case("context=8", {"context": 8}, _CHUNKS, quick=True),
        Case("context=3", {"context": 3}, _CHUNKS, quick=True),
        Case("context=1", {"context": 1}, _CHUNKS),
    ),
    unseen=_unseen_chunks,
    draw=draw_chunks,
    oracle=order_oracle,
    facts=order_facts,
    stretches=({"length": 64}, {"width": 256}),
    at_scale=(Case("context=8, 32,768 tokens", {"context": 8}, Chunks(length=2048, width=2048)), "context=8"),
    naive_time="contiguous_order",
)

# cp_transformer_step


def draw_step(rng: np.random.Generator, case: Case[Training]) -> dict[str, Any]:
    """Parameters and batches; devices count different numbers of tokens, and one of several counts none at all."""
    s, data, shards = case.sizes, groups_of(case, context_of), shards_of(case)

    def one():
        shares = rng.permutation(np.linspace(0 if data * shards > 2 else 0.25, 1, data * shards))
        own = s.rows * s.seq // shards
        counted = rng.permuted(np.arange(own) < np.ceil(shares * own)[:, None], axis=1).astype(np.float32)
        mask = counted.reshape(data, shards, s.rows, -1).swapaxes(1, 2).reshape(data * s.rows, s.seq)
        return {**draw_batch(rng, s, rows_of(case)), "mask": mask}

    scale = 0.3 * min(1.0, (_STEP.width / s.width) ** 0.5)  # scores of wide layers would else be decided by rounding
    return {
        "params": draw_leaves(rng, params_by_head(case), scale),
        "batch": stacked(one, s.steps),
        "key": draw_keys(rng),
        "learning_rate": draw_rate(rng, s.rate_scale),
    }


@cache
def _steps(sizes: ModelSizes, chunks: int) -> Any:
    """SGD on one device, with the dropout key of every chunk of a sequence and every place of the data axis."""
    model = build_model(sizes)

    def loss_of(params, batch, key):
        layers = join_heads(params["layers"])

        def sum_of(place, rows):
            def layer(x, numbered):
                number, weights = numbered
                own = jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(key), place), number)
                keys = jax.vmap(lambda chunk: jax.random.fold_in(own, chunk))(jnp.arange(chunks))
                return model.layer(weights, x, keys), None

            x = model.embed(params["embed"], rows["inputs"])
            x, _ = jax.lax.scan(layer, x, (jnp.arange(sizes.num_layers), layers))
            return model.loss(params["head"], x, rows["targets"], rows["mask"]) * rows["mask"].sum()

        places = jnp.arange(len(batch["mask"]))
        return jax.vmap(sum_of)(places, batch).sum() / batch["mask"].sum()

    return sgd(loss_of)


def step_oracle(inputs: dict[str, Any], case: Case[Training]) -> dict[str, Any]:
    s, data, shards = case.sizes, groups_of(case, context_of), shards_of(case)
    batch = {
        name: in_sequence(rows, case, 2).reshape(s.steps, data, s.rows, s.seq) for name, rows in inputs["batch"].items()
    }
    key = jax.random.wrap_key_data(inputs["key"])
    keys = np.stack([jax.random.key_data(jax.random.fold_in(key, number)) for number in range(s.steps)])
    run = _steps(s.model, shards * s.chunks)
    after, losses, gradients = run(inputs["params"], (batch, keys), inputs["learning_rate"])
    copies = jax.tree.map(lambda x: np.repeat(x[None], data * shards, 0), (after, losses, gradients))
    return {"values": {"params": copies[0], "loss": copies[1]}, "gradients": copies[2]}


def _param_bytes(case: Case[Training]) -> int:
    return sum(4 * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params_by_head(case)))


def _reduced(e: Evidence, scalars: int) -> float:
    """Bytes of an all-reduce of every leaf over all devices, and of some scalars."""
    devices = groups_of(e.case, context_of) * shards_of(e.case)
    return e.case.sizes.steps * ring(devices, _param_bytes(e.case) + 4 * scalars)


def _permuted(e: Evidence, times: tuple[int, int]) -> float:
    """Bytes of ``a n + b`` transfers of a device's keys and values in every layer."""
    s, n = e.case.sizes, shards_of(e.case)
    count = times[0] * n + times[1] if n > 1 else 0
    return s.steps * s.num_layers * count * hop(s.rows, s.seq // n, s.width)


def step_facts(judged: Judged) -> list[Fact]:
    values = "Over which tokens is the returned loss a mean, and which position and which key has each chunk?"
    back = "Which devices have a share of this leaf's gradient, and which tokens does each share count?"
    kept = "Which activations of a layer stay until the backward pass gets there?"
    return [
        *facts.values_and_gradients(judged.cases, values, back, step=True),
        byte_facts.bytes_sent(
            "all-reduce bytes", judged.all, "all_reduce", lambda e: _reduced(e, 2), least=lambda e: _reduced(e, 0)
        ),
        byte_facts.bytes_sent(
            "permute bytes",
            judged.all,
            "collective_permute",
            lambda e: _permuted(e, (4, -2)),
            least=lambda e: _permuted(e, (3, -3)),
        ),
        byte_facts.only_collectives("other collectives", judged.all, ("all_reduce", "collective_permute")),
        limits.temporaries_within(judged, STEP_TEMPORARIES, kept, weight=2),
    ]


_STEP = Training(width=8, hidden=12, num_layers=2, num_heads=2, vocab=20, seq=16, max_seq=18, rows=2)
_WIDE = {
    "width": 1024,
    "hidden": 4096,
    "num_heads": 8,
    "vocab": 2048,
    "seq": 16384,
    "max_seq": 16384,
    "rate_scale": 0.01,
}


def _unseen_step(rng: np.random.Generator) -> Case[Training]:
    mesh = dict(zip(axis_names(rng, 2), ((1, 4), (2, 2), (2, 3))[rng.integers(3)], strict=True))
    steps, seq = int(rng.choice([1, 2])), 24
    how = {"steps": steps, "rate_scale": float(rng.uniform(0.6, 1.6)) / steps, "turn": int(rng.integers(2))}
    return Case(UNSEEN, mesh, _STEP.but(seq=seq, max_seq=seq, dropout=0.15, chunks=int(rng.integers(1, 3)), **how))


CP_TRANSFORMER_STEP = Task(
    wrapping=WRAPPINGS["cp_transformer_step"],
    points=5,
    point=("live temporaries",),
    cases=(
        Case(
            "data=1 x context=8",
            {"data": 1, "context": 8},
            _STEP.but(seq=32, max_seq=34, num_layers=3, rows=1),
            quick=True,
        ),
        Case("data=2 x context=2, dropout", {"data": 2, "context": 2}, _STEP.but(dropout=0.25), quick=True),
        Case(
            "replica=2 x ring=3, contiguous, 3 steps",
            {"replica": 2, "ring": 3},
            _STEP.but(chunks=1, seq=12, steps=3, turn=1, rate_scale=0.4),
        ),
        Case("data=5 x context=1", {"data": 5, "context": 1}, _STEP.but(rows=1, num_layers=1)),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
    given=_given,
    stretches=({"seq": 128, "max_seq": 128}, {"width": 256}, {"hidden": 1024, "vocab": 2048}),
    at_scale=(
        Case("data=1 x context=8, 16,384 tokens", {"data": 1, "context": 8}, _STEP.but(num_layers=3, rows=1, **_WIDE)),
        "data=1 x context=8",
    ),
    naive_memory="keeps_every_activation",
)
