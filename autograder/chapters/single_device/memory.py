"""Gradients from microbatches, depth as a loop, attention in chunks: residuals and recomputation."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.draws import compile_oracle, draw_batch, draw_leaves, loss_and_gradients, unseen_model
from autograder.chapters.single_device.wrapping import MESH, Batch, Heads, activations
from autograder.contract import facts, limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, params_of
from autograder.contract.task import Case, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("single_device")


def does_not_grow(evidence: TaskEvidence, small: str, large: str, what: str, hint: str) -> Fact:
    """Require the Program to have no more operations in the case ``large`` than in ``small``, if both were analysed.

    A body written out a few times is a loop too, so both cases use multiples of the usual repeat counts. But operations
    written out as often as the larger case runs them, and skipped in the smaller one, are not a loop: on average, each
    written product must run at least twice.
    """
    by_case = {e.case.name: e for e in evidence.cases}
    if small not in by_case or large not in by_case:
        return facts.unmeasured("program size", Kind.PROGRAM, f"this check leaves out {small} or {large}")
    fact = facts.same_program_size("program size", by_case[small], by_case[large], what, hint)
    costs = by_case[large].costs
    written, run = costs.written.get("dot_general", 0), sum(costs.products.values())
    if fact.passed and run < 2 * written:
        growth = f"in the case {large}, the program has {written} matmuls and runs {run}: a loop runs the same ones"
        fact = replace(fact, passed=False, message=f"{growth} again and again. {hint}")
    return fact


# accumulate_gradients: the gradient of a batch from microbatches, one at a time.

FEW, MANY = "8 microbatches", "24 microbatches"


def draw_accumulation(rng: np.random.Generator, case: Case[Batch]) -> dict[str, Any]:
    return {
        "params": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)),
        "batch": draw_batch(rng, case.sizes, case.sizes.rows),
    }


def accumulation_oracle(inputs: dict[str, Any], case: Case[Batch]) -> dict[str, Any]:
    """Loss and gradient of the whole batch at once."""
    loss, gradients = loss_and_gradients(case.sizes.model)(inputs["params"], inputs["batch"])
    return {"values": np.asarray(loss), "gradients": jax.tree.map(np.asarray, gradients)}


_GROWS = "What is written out once per microbatch, although it could be a loop?"
_TOO_MUCH = "What is still in memory from one microbatch when the next one starts?"
_TWICE = "Does a forward or backward pass repeat what another one has already computed?"


def accumulation_facts(evidence: TaskEvidence) -> list[Fact]:
    mean = "Is it a mean over rows: within each microbatch, and over all microbatches? "
    return [
        *facts.values_and_gradients(evidence.cases, gradients=mean, weight=1),
        does_not_grow(evidence, FEW, MANY, "the number of microbatches", _GROWS),
        limits.temporaries_within(evidence, 1.15, _TOO_MUCH, weight=2),
        limits.flops_within(evidence, 1.15, _TWICE),
    ]


_MLP = Batch(width=16, hidden=32, num_layers=2, features=8, rows=48, num_microbatches=8)
_TRANSFORMER = Batch(width=16, hidden=32, num_layers=2, vocab=32, seq=7, max_seq=9, rows=15, num_microbatches=3)
# A batch that is small compared with a gradient: changing its layout costs little.
_LARGE = _MLP.replace(width=2048, hidden=8192, features=128, rows=16384)


def _unseen_batch(rng: np.random.Generator) -> Case[Batch]:
    return Case(UNSEEN, MESH, Batch(**unseen_model(rng), num_microbatches=int(rng.choice([3, 6]))))


ACCUMULATE_GRADIENTS = Task(
    wrapping=WRAPPINGS["accumulate_gradients"],
    kind="transform",
    points=2,
    core_facts=("live temporaries",),
    cases=(
        Case(FEW, MESH, _MLP, quick=True),
        Case(MANY, MESH, _MLP.replace(num_microbatches=24), quick=True),
        Case("3 microbatches of tokens", MESH, _TRANSFORMER),
        Case("1 microbatch", MESH, _MLP.replace(num_microbatches=1)),
    ),
    unseen=_unseen_batch,
    draw=draw_accumulation,
    oracle=accumulation_oracle,
    facts=accumulation_facts,
    at_scale=(Case("8 microbatches, width 2048", MESH, _LARGE), FEW),
    naive_memory="differentiates_the_scanned_loss",
)

# scan_layers and remat_layers: depth as a loop, and its residuals for the backward pass.

SHALLOW, DEEP = "24 layers", "48 layers"


def draw_layers(rng: np.random.Generator, case: Case[Batch]) -> dict[str, Any]:
    x = activations(case)
    leaves = draw_leaves(rng, {"params": params_of(case)["layers"], "inputs": x, "upstream": x})
    # Small enough to keep a deep stack's gradients and their rounding errors from exploding.
    return {**leaves, "params": jax.tree.map(lambda a: a * np.float32(a.shape[1] ** -0.5), leaves["params"])}


@lru_cache(maxsize=32)
def _layer_and_transpose(sizes: ModelSizes) -> Any:
    layer = build_model(sizes).layer
    return compile_oracle(layer), compile_oracle(lambda params, x, upstream: jax.vjp(layer, params, x)[1](upstream))


def layers_oracle(inputs: dict[str, Any], case: Case[Batch]) -> dict[str, Any]:
    """Run layer after layer in a Python loop, and then the backward pass."""
    run, back = _layer_and_transpose(case.sizes.model.replace(num_layers=1))
    layers = [jax.tree.map(lambda leaf, i=i: leaf[i], inputs["params"]) for i in range(case.sizes.num_layers)]
    layer_inputs, upstream, gradients = [inputs["inputs"]], inputs["upstream"], []
    for params in layers:
        layer_inputs.append(run(params, layer_inputs[-1]))
    for params, x in zip(reversed(layers), reversed(layer_inputs[:-1]), strict=True):
        of_params, upstream = back(params, x, upstream)
        gradients.append(of_params)
    of_params = jax.tree.map(lambda *each: np.stack(each), *reversed(gradients))
    return {"values": np.asarray(layer_inputs[-1]), "gradients": {"layers": of_params, "x": np.asarray(upstream)}}


_RESIDUALS = (
    "What is kept for every layer until the backward pass gets there, and which part of it is cheap to recompute?"
)
_AGAIN = "How often is each matmul of the forward pass computed?"


def _scan_facts(evidence: TaskEvidence) -> list[Fact]:
    grows = "What is written out once per layer, although it could be a loop?"
    return [
        *facts.values_and_gradients(evidence.cases, weight=1),
        does_not_grow(evidence, SHALLOW, DEEP, "depth", grows),
    ]


def _remat_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        *facts.values_and_gradients(evidence.cases, weight=1),
        limits.temporaries_within(evidence, 0.35, _RESIDUALS, than=limits.NAIVE, weight=2),
        limits.flops_within(evidence, 4 / 3, _AGAIN, than=limits.NAIVE, weight=2),
    ]


_STACK = Batch(width=16, hidden=32, num_layers=8, features=8, rows=4)
_WITH_ATTENTION = Batch(width=16, hidden=32, num_layers=3, vocab=8, seq=8, rows=2)
# At these sizes, attention's squares are the largest cost of a policy that keeps every product.
_TWELVE = Batch(width=1024, hidden=4096, num_heads=16, num_layers=12, vocab=8, seq=1024, rows=4)
_UNSEEN = (
    Batch(width=12, hidden=20, num_layers=5, features=8, rows=6),
    Batch(width=24, hidden=40, num_layers=4, features=8, rows=5),
    Batch(width=24, hidden=20, num_layers=6, num_heads=3, vocab=8, seq=6, rows=3),
    Batch(width=12, hidden=40, num_layers=5, num_heads=3, vocab=8, seq=10, rows=3),
)


def _unseen_stack(rng: np.random.Generator) -> Case[Batch]:
    return Case(UNSEEN, MESH, _UNSEEN[rng.integers(len(_UNSEEN))])


SCAN_LAYERS = Task(
    wrapping=WRAPPINGS["scan_layers"],
    kind="transform",
    points=1,
    core_facts=("program size",),
    cases=(
        Case(SHALLOW, MESH, _STACK.replace(num_layers=24), quick=True),
        Case(DEEP, MESH, _STACK.replace(num_layers=48), quick=True),
        Case("3 layers with attention", MESH, _WITH_ATTENTION),
        Case("1 layer", MESH, _STACK.replace(num_layers=1)),
    ),
    unseen=_unseen_stack,
    draw=draw_layers,
    oracle=layers_oracle,
    facts=_scan_facts,
)

REMAT_LAYERS = Task(
    wrapping=WRAPPINGS["remat_layers"],
    kind="transform",
    points=2,
    core_facts=("live temporaries",),
    cases=(
        Case("12 layers", MESH, _WITH_ATTENTION.replace(num_layers=12), quick=True),
        Case("3 layers", MESH, _WITH_ATTENTION, quick=True),
        Case("8 layers without attention", MESH, _STACK),
    ),
    unseen=_unseen_stack,
    draw=draw_layers,
    oracle=layers_oracle,
    facts=_remat_facts,
    at_scale=(Case("12 layers, width 1024", MESH, _TWELVE), "12 layers"),
    stretches=({"seq": 640}, {"width": 256, "num_heads": 4}, {"hidden": 1024}),
    naive_memory="keeps_everything",
)

# chunked_attention: causal attention over chunks of keys and values, forward and backward.

# Scores reach about 220, where float32 is exact to 2^-17 (8e-6). A score adds up ten such roundings, an error in
# the exponent is the same relative error in the weight, and JAX's own attention is off by 1.8e-5 here.
TOLERANCE = 1e-4
# Masked chunks may be left out, which leaves little more than half of the work.
LEAST_WORK = 0.45


def draw_attention(rng: np.random.Generator, case: Case[Heads]) -> dict[str, Any]:
    """Normal numbers; the first feature of queries and keys shifts the scores, differently in each head of each row.

    A softmax that subtracts too much or too little underflows or overflows: all scores are large or very
    negative, they rise or fall with the key, or change sign from query to query, or from chunk to chunk.
    """
    s, arrays = case.sizes, draw_leaves(rng, WRAPPINGS["chunked_attention"].input_shapes(case))
    if not s.reach:
        return arrays
    places = np.arange(s.seq)
    rising, by_query, by_chunk = 2 * places / (s.seq - 1) - 1, 1 - 2 * (places % 2), 2 * (places // s.chunk % 2) - 1
    patterns = ((1, 1), (-1, 1), (1, rising), (-1, rising), (by_query, 1), (1, by_chunk))
    large, order = np.sqrt(s.reach * np.sqrt(s.head_dim)), iter(rng.permutation(s.rows * s.num_heads))
    for row, head in np.ndindex(s.rows, s.num_heads):
        of_queries, of_keys = patterns[next(order) % len(patterns)]
        # The gradient of a query is a sum over keys that cancels, so keys, and their rounding, are the smaller ones.
        arrays["q"][row, :, head, 0], arrays["k"][row, :, head, 0] = 3 * large * of_queries, large / 3 * of_keys
    return arrays


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention in float64: values ``[batch, seq, num_heads, head_dim]`` and weights."""
    q, k, v = (np.moveaxis(x, 1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.moveaxis(weights @ v, 2, 1), weights


def attention_oracle(inputs: dict[str, Any], case: Case[Heads]) -> dict[str, Any]:
    """Attention and its gradient in float64, with the whole square of scores."""
    q, k, v, upstream = (inputs[name].astype(np.float64) for name in ("q", "k", "v", "upstream"))
    values, weights = attention(q, k, v)
    q, k, v, upstream = (np.moveaxis(x, 1, 2) for x in (q, k, v, upstream))
    of_weights = upstream @ v.swapaxes(2, 3)
    of_scores = weights * (of_weights - np.sum(weights * of_weights, -1, keepdims=True)) / np.sqrt(q.shape[-1])
    gradients = {
        "q": np.moveaxis(of_scores @ k, 2, 1),
        "k": np.moveaxis(of_scores.swapaxes(2, 3) @ q, 2, 1),
        "v": np.moveaxis(weights.swapaxes(2, 3) @ upstream, 2, 1),
    }
    return jax.tree.map(lambda a: a.astype(np.float32), {"values": values, "gradients": gradients})


_LATER = (
    "If the queries of the first chunk are right and later ones are wrong: what happens to the sum and to the values "
    "so far when a later chunk has a larger score?"
)
_MAXIMUM = "Which maximum is −∞ when it is subtracted, or 0 where all scores are far below 0?"
_SQUARE = "Which array has an element for each pair of a query and a key, even if it is computed in parts?"
_ALIVE = "What is still in memory from each chunk when all chunks have been processed?"
_TWICE_ATTENDED = "How many times are queries multiplied by keys, and weights by values?"


def attention_facts(evidence: TaskEvidence) -> list[Fact]:
    least_work: dict[str, Any] = {"least": LEAST_WORK}
    return [
        facts.arrays_match("values", evidence.cases, "values", _LATER, tolerance=TOLERANCE, not_finite=_MAXIMUM),
        facts.arrays_match(
            "gradients", evidence.cases, "gradients", tolerance=TOLERANCE, weight=2, not_finite=_MAXIMUM
        ),
        limits.largest_within(evidence, _quarter, _SQUARE, weight=2, **least_work),
        limits.temporaries_within(evidence, 0.4, _ALIVE, than=limits.NAIVE, **least_work),
        limits.flops_within(evidence, 1.35, _TWICE_ATTENDED, than=limits.NAIVE, **least_work),
    ]


def _quarter(case: Case[Heads]) -> int:
    s = case.sizes
    return s.rows * s.num_heads * s.seq**2 // 4


# No two sizes are equal, because JAX would merge their results. There are as many heads as in the large case: a loop
# over heads is allowed.
_HEADS = Heads(rows=2, num_heads=4, head_dim=10, seq=48, chunk=6)
_LONG = Heads(rows=2, num_heads=4, head_dim=64, seq=4096, chunk=512, reach=0)


def _unseen_heads(rng: np.random.Generator) -> Case[Heads]:
    chunk, chunks = int(rng.choice([4, 8, 12])), int(rng.choice([4, 5, 7]))
    rows, reach = int(rng.choice([3, 5])), int(rng.integers(215, 225))
    heads = {"num_heads": int(rng.choice([2, 5])), "head_dim": int(rng.choice([6, 14]))}
    return Case(UNSEEN, MESH, Heads(chunk=chunk, seq=chunk * chunks, rows=rows, reach=reach, **heads))


CHUNKED_ATTENTION = Task(
    wrapping=WRAPPINGS["chunked_attention"],
    points=4,
    core_facts=("largest temporary",),
    cases=(
        Case("8 chunks", MESH, _HEADS, quick=True),
        # Few numbers divide these keys: code that has a fixed number of chunks cannot cut them.
        Case("3 chunks", MESH, _HEADS.replace(seq=39, chunk=13, num_heads=3, reach=0), quick=True),
        Case("1 chunk", MESH, _HEADS.replace(seq=16, chunk=16)),
    ),
    unseen=_unseen_heads,
    draw=draw_attention,
    oracle=attention_oracle,
    facts=attention_facts,
    at_scale=(Case("4,096 tokens, 8 chunks", MESH, _LONG), "8 chunks"),
    stretches=({"seq": 3072, "chunk": 384}, {"head_dim": 64}),
    naive_memory="keeps_the_square",
)
