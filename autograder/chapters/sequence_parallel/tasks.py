"""Grading of the functions of ``sequence_parallel``: results on one device, bytes sent, and what layers save."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from autograder.chapters.draws import compile_oracle, draw_keys, draw_leaves, shift_scores, unseen_mesh
from autograder.chapters.sequence_parallel.wrapping import BLOCK, ENTER, LEAVE, SELECTIVE, ULYSSES, Heads, Region, Stack
from autograder.contract import byte_facts, facts, limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, groups_of, join_heads, params_by_head, parts_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("sequence_parallel")
OTHER = "other collectives"


def one_way(case: Case[Any], size: float) -> float:
    """Bytes that a device sends to gather or to scatter an array of ``size`` bytes."""
    return (parts_of(case) - 1) / parts_of(case) * size


def draw(name: str, rng: np.random.Generator, case: Case[Any]) -> dict[str, Any]:
    shapes = WRAPPINGS[name].input_shapes(case)
    return {key: draw_leaves(rng, tree, rng.uniform(0.5, 2)) for key, tree in shapes.items()}


# enter_tensor_region and leave_tensor_region: each is the other's transpose.


def own_parts(whole: np.ndarray, case: Case[Region]) -> np.ndarray:
    """The part, or copy, of ``whole`` on each device of the tensor axis: ``[tensor, rows, ...]``."""
    n = parts_of(case)
    return np.stack(np.split(whole, n, 1) if case.sizes.split else [whole] * n)


def region_oracle(name: str, inputs: dict[str, Any], case: Case[Region]) -> dict[str, Any]:
    """All tokens on every device, or the sum of all shares; for gradients, the other way round."""
    x, upstream = inputs["x"], inputs["upstream"]
    whole, shares = (x, upstream) if name == ENTER else (upstream, x)
    copied = np.stack([whole] * parts_of(case))
    added = own_parts(shares.sum(0, dtype=np.float64).astype(np.float32), case)
    values, gradients = (copied, added) if name == ENTER else (added, copied)
    return {"values": values, "gradients": gradients}


def region_facts(name: str, evidence: TaskEvidence) -> list[Fact]:
    values = "Which tokens does this device need, and from which devices? "
    gradients = "Which devices have a share of this token's gradient, and how many return it? "
    typed = (
        "Is a whole result typed as the same on every device? Does a device keep only a part of what all of them get?"
        if name == LEAVE
        else ""
    )

    def sent(e: Evidence, split: bool) -> float:
        s = e.case.sizes
        return one_way(e.case, 4 * s.rows * s.seq * s.width) if s.split == split else 0

    cases = evidence.cases
    return [
        *facts.values_and_gradients(cases, values, gradients),
        *(
            byte_facts.bytes_sent(f"{kind.replace('_', '-')} bytes", cases, kind, partial(sent, split=True))
            for kind in ("all_gather", "reduce_scatter")
        ),
        byte_facts.bytes_sent("all-reduce bytes", cases, "all_reduce", lambda e: 2 * sent(e, split=False), hint=typed),
        byte_facts.only_collectives(OTHER, cases, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


_REGION = Region(rows=2, seq=24, width=5)


def _unseen_region(rng: np.random.Generator) -> Case[Region]:
    mesh = unseen_mesh(rng, (2, 4), (2,), (3,), (2, 3), (5,))
    n = list(mesh.values())[-1]
    sizes = {"rows": int(rng.choice([1, 3])), "seq": int(rng.choice([3, 7])) * n, "width": int(rng.choice([4, 9]))}
    return Case(UNSEEN, mesh, Region(**sizes, split=bool(rng.integers(2))))


def _region(name: str) -> Task:
    return Task(
        wrapping=WRAPPINGS[name],
        points=2,
        core_facts=("all-gather bytes", "reduce-scatter bytes"),
        cases=(
            Case.on({"tensor": 4}, _REGION, quick=True),
            Case.on({"data": 2, "tensor": 4}, _REGION.replace(split=False), "whole", quick=True),
            Case.on({"data": 2, "model": 3}, _REGION.replace(rows=1)),
            Case.on({"tensor": 1}, _REGION),
        ),
        unseen=_unseen_region,
        draw=partial(draw, name),
        oracle=partial(region_oracle, name),
        facts=partial(region_facts, name),
    )


ENTER_TENSOR_REGION, LEAVE_TENSOR_REGION = _region(ENTER), _region(LEAVE)

# sp_block and selective_recompute: a stack of layers, forward and backward.

# Limit on FLOPs of matmuls, relative to a stack without recomputation.
FLOPS = 1.05


def draw_stack(rng: np.random.Generator, case: Case[Stack]) -> dict[str, Any]:
    shapes = WRAPPINGS[SELECTIVE].input_shapes(case)
    scales = {"params": 0.3, "x": rng.uniform(0.5, 2), "upstream": rng.uniform(0.5, 2)}
    return {name: draw_leaves(rng, shapes[name], scale) for name, scale in scales.items()} | {"key": draw_keys(rng)}


def stack_oracle(inputs: dict[str, Any], case: Case[Stack]) -> dict[str, Any]:
    """The course's layers on one device for each group."""
    run, groups = _one_group(case.sizes.model, parts_of(case), case.sizes.gain), groups_of(case)
    x, upstream = (np.split(inputs[name], groups) for name in ("x", "upstream"))
    results = [run(inputs["params"], *rows, inputs["key"]) for rows in zip(x, upstream, strict=True)]
    values, of_params, of_x = zip(*results, strict=True)
    of_params = jax.tree.map(lambda *leaves: np.stack(leaves), *of_params)
    return {"values": np.concatenate(values), "gradients": {"params": of_params, "x": np.concatenate(of_x)}}


@lru_cache(maxsize=32)
def _one_group(sizes: ModelSizes, parts: int, gain: int) -> Any:
    model, places = build_model(sizes), np.arange(parts, dtype=np.int32)

    def run(params, x, upstream, key):
        def layer(x, numbered):
            number, weights = numbered
            own = jax.random.fold_in(jax.random.wrap_key_data(key), number)
            return model.layer(weights, x, jax.vmap(partial(jax.random.fold_in, own))(places)), None

        def stack(params, x):
            joined = join_heads(params)
            joined["attention"]["out"]["kernel"] *= gain
            return jax.lax.scan(layer, x, (np.arange(sizes.num_layers, dtype=np.int32), joined))[0]

        values, back = jax.vjp(stack, params, x)
        return values, *back(upstream)

    return compile_oracle(run)


# --8<-- [start:saved]
def formula(case: Case[Stack]) -> tuple[int, int]:
    """Bytes that one layer saves by Korthikanti's formula in float32, and those of its attention scores.

    Of 16 arrays of the width, 2 are inputs of norms, 2 of the products after them, 3 are q, k and v, 1 the mixed
    values, and 8 the hidden features before and after GELU. There are two arrays of scores, as in the formula with
    dropout: here they have no dropout, but JAX saves exponentials as well as weights.
    """
    s, n = case.sizes, parts_of(case)
    tokens = s.rows * s.seq
    arrays = 4 * (8 * s.width + 2 * s.hidden)
    masks = 2 * s.width if s.dropout else 0
    return tokens * (arrays + masks) // n, 2 * 4 * s.rows * s.num_heads * s.seq**2 // n


def most_saved(case: Case[Stack]) -> int:
    """The formula's bytes for three more layers than there are, plus two layers' scores.

    Even one array of scores for every layer is more. The extra layers and the scores leave room for what one backward
    pass has at once.
    """
    plain, scores = formula(case)
    return (case.sizes.num_layers + 3) * plain + 2 * scores


# --8<-- [end:saved]


def whole_bytes(case: Case[Stack]) -> int:
    """Bytes of all leaves that every device holds whole: two norms' scales, and a bias."""
    leaves = jax.tree.leaves_with_path(params_by_head(case)["layers"])
    names = {path: [str(entry.key) for entry in path] for path, _ in leaves}
    return sum(
        4 * math.prod(leaf.shape)
        for path, leaf in leaves
        if names[path][-1] == "scale" or names[path][-2:] == ["down", "bias"]
    )


def stack_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "Which tokens and heads does this device have, and which dropout keys does it use? "
    gradients = "If a whole leaf is wrong: is each device's share of its gradient counted exactly once? "
    saved = "Which whole activation is saved before a product, and what is cheap to compute again?"
    twice = "Which products are computed twice, and for which of them would a saved result be small?"
    cases = evidence.programs

    def once(e: Evidence) -> float:
        s = e.case.sizes
        return s.num_layers * one_way(e.case, 4 * s.rows * s.seq * s.width)

    return [
        *facts.values_and_gradients(evidence.cases, values, gradients),
        byte_facts.bytes_sent("all-gather bytes", cases, "all_gather", once, times=(4, 6)),
        byte_facts.bytes_sent("reduce-scatter bytes", cases, "reduce_scatter", once, times=(4, 4)),
        byte_facts.bytes_sent(
            "all-reduce bytes", cases, "all_reduce", lambda e: 2 * one_way(e.case, whole_bytes(e.case))
        ),
        byte_facts.only_collectives(OTHER, cases, ("all_gather", "reduce_scatter", "all_reduce")),
        limits.temporaries_at_most(evidence, most_saved, saved, weight=3),
        limits.flops_within(evidence, FLOPS, twice, than=limits.NAIVE, weight=2),
    ]


SIZES = Stack(width=16, hidden=40, num_heads=8, num_layers=2, vocab=8, seq=24, rows=2, dropout=0.25)
# The proportions of the realistic size, with two heads on each of eight devices.
_EIGHT = SIZES.replace(width=32, hidden=128, num_heads=16, num_layers=12, rows=3, dropout=0.1)
_LARGE = _EIGHT.replace(width=1024, hidden=4096, seq=1024, rows=8)


def _unseen_stack(rng: np.random.Generator) -> Case[Stack]:
    mesh = unseen_mesh(rng, (2, 4), (2,), (3,), (2, 3), (4, 2))
    n = list(mesh.values())[-1]
    sizes = {"width": 12 * n, "hidden": 7 * n, "num_heads": 2 * n, "seq": 3 * n}
    return Case(UNSEEN, mesh, SIZES.replace(**sizes, num_layers=1, rows=3, dropout=float(rng.choice([0.15, 0.4]))))


def _stack(name: str, points: int, naive: str) -> Task:
    return Task(
        wrapping=WRAPPINGS[name],
        points=points,
        core_facts=("live temporaries",),
        cases=(
            Case.on({"tensor": 4}, SIZES, quick=True),
            Case.on({"tensor": 8}, _EIGHT, "12 layers", quick=True),
            Case.on(
                {"data": 2, "model": 3},
                SIZES.replace(
                    **{"width": 24, "hidden": 42, "num_heads": 6, "seq": 21, "rows": 1, "num_layers": 1},
                    gain=2 if name == BLOCK else 1,
                ),
            ),
            Case.on({"tensor": 1}, SIZES.replace(dropout=0.0)),
        ),
        unseen=_unseen_stack,
        draw=draw_stack,
        oracle=stack_oracle,
        facts=stack_facts,
        stretches=({"seq": 256}, {"rows": 8, "width": 256}, {"hidden": 4096}),
        at_scale=(Case.on({"tensor": 8}, _LARGE, "12 layers of width 1024"), "tensor=8, 12 layers"),
        naive_memory=naive,
    )


SP_BLOCK = _stack(BLOCK, 5, "leaves_it_to_jax")
SELECTIVE_RECOMPUTE = _stack(SELECTIVE, 2, "keeps_the_scores")

# ulysses_attention: from tokens in parts to heads in parts, and back.


def draw_heads(rng: np.random.Generator, case: Case[Heads]) -> dict[str, Any]:
    inputs = draw(ULYSSES, rng, case)
    if case.sizes.large:
        shift_scores(rng, inputs["q"], inputs["k"])
    return inputs


def attention_oracle(inputs: dict[str, Any], case: Case[Heads]) -> dict[str, Any]:
    values, gradients = _attention(*(inputs[name] for name in ("q", "k", "v", "upstream")))
    return {"values": np.asarray(values), "gradients": jax.tree.map(np.asarray, gradients)}


@compile_oracle
def _attention(q, k, v, upstream):
    """Causal attention of whole sequences; key heads are repeated."""
    times = q.shape[2] // k.shape[2]

    def attend(q, k, v):
        k, v = (jax.numpy.repeat(x, times, axis=2) for x in (k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    values, back = jax.vjp(attend, q, k, v)
    return values, dict(zip("qkv", back(upstream), strict=True))


def ulysses_bytes(case: Case[Heads]) -> float:
    """Bytes of all-to-alls of queries, keys, values and results, forward and backward.

    With fewer key heads than devices, each is sent to all devices that use it.
    """
    s, n = case.sizes, parts_of(case)
    a_head = 4 * s.rows * s.seq // n * s.head_dim
    return 2 * one_way(case, a_head * (2 * s.num_heads + 2 * max(s.kv_heads, n)))


def quarter_of_scores(case: Case[Heads]) -> int:
    """A quarter of the scores of a device's heads, in elements."""
    s = case.sizes
    return s.rows * s.num_heads // parts_of(case) * s.seq**2 // 4


def attention_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "Which heads does a device have after the first all-to-all, and which key head do they use? "
    gradients = "Which devices was a key head sent to, and do the gradients of all its copies come back? "
    heads = "How many heads of keys and values are sent, and how many of them does a device need?"
    square = "Which array has an element for each query and each key?"
    return [
        *facts.values_and_gradients(evidence.cases, values, gradients),
        byte_facts.bytes_sent(
            "all-to-all bytes", evidence.programs, "all_to_all", lambda e: ulysses_bytes(e.case), hint=heads, weight=2
        ),
        byte_facts.only_collectives(OTHER, evidence.programs, ("all_to_all",)),
        limits.largest_within(evidence, quarter_of_scores, square, weight=2),
    ]


_HEADS = Heads(rows=2, seq=24, num_heads=8, kv_heads=4, head_dim=6, chunk=4)
_SHARED = _HEADS.replace(rows=3, seq=48, num_heads=16, kv_heads=2, head_dim=10, chunk=6)
_LONG = _SHARED.replace(seq=8192, head_dim=128, chunk=1024)


def _unseen_heads(rng: np.random.Generator) -> Case[Heads]:
    mesh = unseen_mesh(rng, (2, 4), (2,), (3,), (2, 3), (5,))
    n = list(mesh.values())[-1]
    heads: dict[str, Any] = {
        "num_heads": 4 * n,
        "kv_heads": int(rng.choice([1, n, 2 * n])),
        "head_dim": int(rng.choice([4, 10])),
    }
    return Case(UNSEEN, mesh, Heads(rows=int(rng.choice([1, 3])), seq=6 * n, chunk=int(rng.choice([2, 3])), **heads))


ULYSSES_ATTENTION = Task(
    wrapping=WRAPPINGS[ULYSSES],
    points=4,
    core_facts=("all-to-all bytes", "largest temporary"),
    cases=(
        Case.on({"tensor": 4}, _HEADS, quick=True),
        Case.on({"tensor": 8}, _SHARED, "2 key heads", quick=True),
        Case.on({"data": 2, "model": 3}, _HEADS.replace(num_heads=6, kv_heads=3, seq=21, chunk=7, rows=1)),
        Case.on({"tensor": 2}, _HEADS.replace(kv_heads=8), "all heads"),
        Case.on({"data": 2, "tensor": 2}, _HEADS.replace(large=True, head_dim=4), "large scores"),
        Case.on({"tensor": 1}, _HEADS),
    ),
    unseen=_unseen_heads,
    draw=draw_heads,
    oracle=attention_oracle,
    facts=attention_facts,
    stretches=({"seq": 1024, "chunk": 128}, {"head_dim": 128}),
    at_scale=(Case.on({"tensor": 8}, _LONG, "8,192 tokens"), "tensor=8, 2 key heads"),
    naive_memory="attends_at_once",
)
