"""``tp_mlp`` and ``tp_attention``: two dense layers, and nothing sent between them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, limits
from autograder.chapters.tensor_parallel.dense import ALLOWED, dense
from autograder.chapters.tensor_parallel.shared import (
    GATHERED,
    OTHER,
    SCATTERED,
    Layer,
    draw_layer,
    layer_facts,
    layer_oracle,
    leaf,
    sent,
    split_of,
    split_rows,
    tensor_of,
    wrap_layer,
)
from autograder.contract import Case, Evidence, Task
from autograder.verdict import Fact
from autograder.wrapping import Wrapping

FORWARD = "collectives forward"
# Right answers that gather or multiply once more in the backward pass take up to 1.12 times as long; a step that sends
# twice as much by all-reduces 1.33, and the naive ones, which send what is larger, 1.85 and 1.88.
SLOWER = 1.25
_BETWEEN = "Can a device go on from the first dense layer to the second with the features that it has?"
_TOO_SLOW = "Which transfer is the longest, and must that array be whole anywhere?"


def _mlp(case: Case) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    params = {
        "up": {"kernel": leaf(s["width"], s["hidden"]), "bias": leaf(s["hidden"])},
        "down": {"kernel": leaf(s["hidden"], s["width"]), "bias": leaf(s["width"])},
    }
    specs = {"up": {"kernel": P(None, axis), "bias": P(axis)}, "down": {"kernel": P(axis), "bias": P()}}
    return Layer(params, specs, split_rows(case, s["width"]), split_rows(case, s["width"]))


def mlp_on_one_device(params: Any, x: Any) -> Any:
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))


def _attention(case: Case) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    heads = s["heads"], s["head_dim"]
    params = {"qkv": {"kernel": leaf(s["width"], 3, *heads)}, "out": {"kernel": leaf(*heads, s["width"])}}
    specs = {"qkv": {"kernel": P(None, None, axis)}, "out": {"kernel": P(axis)}}
    return Layer(params, specs, split_rows(case, s["width"]), split_rows(case, s["width"]))


def attention_on_one_device(params: Any, x: Any) -> Any:
    """Causal, one softmax a head; ``[batch, seq, width]`` to the same."""
    q, k, v = jnp.einsum("bsw,wthd->tbshd", x, params["qkv"]["kernel"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd,hdw->bqw", weights, v, params["out"]["kernel"])


def _collectives_forward(cases: list[Evidence]) -> Fact:
    """One all-gather and one reduce-scatter, in the cases that have no backward pass."""
    found = []
    for e in [e for e in cases if not e.case.sizes["backward"]]:
        n = int(split_of(e.case) > 1)
        counted = {kind: sum(c.count for c in e.costs.collectives if c.kind == kind) for kind in ALLOWED}
        every = sum(c.count for c in e.costs.collectives)
        passed = every == 2 * n and all(count == n for count in counted.values())
        said = ", ".join(f"{count} {facts.plain(kind)}" for kind, count in counted.items())
        said += f", {every - sum(counted.values())} others" if every > sum(counted.values()) else ""
        message, line = "", ""
        if not passed:
            message = f"on mesh {e.case.mesh_text} the forward pass has {said}; expected {n} of each. {_BETWEEN}"
            line = max(e.costs.collectives, key=lambda c: c.total_bytes).line if every else e.line
        found.append(Fact(FORWARD, passed, said, f"{n} of each", case=e.case.name, line=line, message=message))
    missing = Fact(FORWARD, None, "not measured", message="this check has no case without a backward pass")
    return facts.worst(found) if found else missing


def block_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        *layer_facts(cases),
        _collectives_forward(cases),
        sent(GATHERED, counted, "all_gather", "width", (1, 1), more=(0, 1)),
        sent(SCATTERED, counted, "reduce_scatter", "width", (1, 1)),
        facts.only_collectives(OTHER, counted, ALLOWED),
    ]


def mlp_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    return [
        *block_facts(cases, large, references),
        limits.time_within(large, references, SLOWER, _TOO_SLOW, weight=2),
    ]


_SIZES = {"batch": 3, "rows": 32, "width": 12, "hidden": 80, "backward": 1}
_LARGE = {"batch": 0, "rows": 4096, "width": 4096, "hidden": 16384, "backward": 1}
_HEADS = {"batch": 3, "rows": 16, "width": 12, "heads": 8, "head_dim": 5, "backward": 1}


def _unseen_mesh(rng: np.random.Generator) -> dict[str, int]:
    return [{"tensor": 2, "data": 4}, {"data": 2, "tensor": 2}, {"replica": 2, "model": 4}][rng.integers(3)]


def _unseen_mlp(rng: np.random.Generator) -> Case:
    sizes = {**_SIZES, "batch": int(rng.choice([0, 2])), "rows": 8, "hidden": int(rng.choice([24, 32]))}
    return Case("unseen", _unseen_mesh(rng), sizes)


def _unseen_attention(rng: np.random.Generator) -> Case:
    sizes = {**_HEADS, "batch": 2, "rows": int(rng.choice([8, 12])), "head_dim": int(rng.choice([3, 6]))}
    return Case("unseen", _unseen_mesh(rng), sizes)


TP_MLP = Task(
    wrapping=Wrapping(
        "tp_mlp", "(params, x, axis_name)", lambda function, case: wrap_layer("tp_mlp", function, case, _mlp(case))
    ),
    kind="local",
    points=3,
    cases=(
        Case("data=2 x tensor=4", {"data": 2, "tensor": 4}, _SIZES, quick=True),
        Case("tensor=8", {"tensor": 8}, {**_SIZES, "batch": 0}, quick=True),
        Case("tensor=4, forward", {"tensor": 4}, {**_SIZES, "backward": 0}, quick=True),
        Case("replica=2 x model=2", {"replica": 2, "model": 2}, {**_SIZES, "batch": 0}),
        Case("data=2 x tensor=1", {"data": 2, "tensor": 1}, _SIZES),
    ),
    unseen=_unseen_mlp,
    draw=lambda rng, case: draw_layer(rng, _mlp(case), case.sizes["backward"]),
    oracle=lambda inputs, case: layer_oracle(inputs, case, mlp_on_one_device),
    facts=mlp_facts,
    analysed=(Case("tensor=8, 4,096 rows of width 4,096", {"tensor": 8}, _LARGE), "tensor=8"),
    naive="gathers_the_hidden_features",
    slow="gathers_the_hidden_features",
)

TP_ATTENTION = Task(
    wrapping=Wrapping(
        "tp_attention",
        "(params, x, axis_name)",
        lambda function, case: wrap_layer("tp_attention", function, case, _attention(case)),
    ),
    kind="local",
    points=3,
    cases=(
        Case("data=2 x tensor=4", {"data": 2, "tensor": 4}, _HEADS, quick=True),
        Case("tensor=8", {"tensor": 8}, _HEADS, quick=True),
        Case("tensor=2, 6 heads, forward", {"tensor": 2}, {**_HEADS, "heads": 6, "backward": 0}, quick=True),
        Case("replica=2 x model=2, 6 heads", {"replica": 2, "model": 2}, {**_HEADS, "heads": 6}),
        Case("data=2 x tensor=1", {"data": 2, "tensor": 1}, _HEADS),
    ),
    unseen=_unseen_attention,
    draw=lambda rng, case: draw_layer(rng, _attention(case), case.sizes["backward"]),
    oracle=lambda inputs, case: layer_oracle(inputs, case, attention_on_one_device),
    facts=block_facts,
)
