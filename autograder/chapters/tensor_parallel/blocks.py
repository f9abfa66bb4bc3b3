"""``tp_mlp`` and ``tp_attention``: two dense layers, and nothing sent between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.tensor_parallel.dense import ALLOWED, dense
from autograder.chapters.tensor_parallel.shared import (
    GATHERED,
    OTHER,
    SCATTERED,
    draw_layer,
    layer_facts,
    layer_oracle,
    sent,
    unseen_mesh,
)
from autograder.chapters.tensor_parallel.wrapping import split_of
from autograder.contract import facts, limits
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

FORWARD = "collectives forward"
# Right answers that gather or multiply once more in the backward pass take up to 1.12 times as long; a step that sends
# twice as much by all-reduces 1.33, and the naive ones, which send what is larger, 1.85 and 1.88.
SLOWER = 1.25
_BETWEEN = "Can a device go on from the first dense layer to the second with the features that it has?"
_TOO_SLOW = "Which transfer is the longest, and must that array be whole anywhere?"


def mlp_on_one_device(params: Any, x: Any) -> Any:
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))


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


def _unseen_mlp(rng: np.random.Generator) -> Case:
    mesh = unseen_mesh(rng)
    n = list(mesh.values())[-1]
    sizes = {"batch": int(rng.choice([0, 2])), "rows": 2 * n, "width": int(rng.choice([5, 8, 10]))}
    return Case("unseen", mesh, {**sizes, "hidden": int(rng.integers(5, 9)) * n, "backward": 1})


def _unseen_attention(rng: np.random.Generator) -> Case:
    mesh = unseen_mesh(rng)
    n = list(mesh.values())[-1]
    sizes = {"batch": int(rng.choice([1, 2])), "rows": int(rng.choice([1, 2])) * n, "width": int(rng.choice([6, 10]))}
    return Case("unseen", mesh, {**sizes, "heads": int(rng.choice([1, 2])) * n, "head_dim": 3, "backward": 1})


TP_MLP = Task(
    wrapping=wrappings("tensor_parallel")["tp_mlp"],
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
    draw=partial(draw_layer, "tp_mlp"),
    oracle=lambda inputs, case: layer_oracle(inputs, case, mlp_on_one_device),
    facts=mlp_facts,
    analysed=(Case("tensor=8, 4,096 rows of width 4,096", {"tensor": 8}, _LARGE), "tensor=8"),
    naive="gathers_the_hidden_features",
    slow="gathers_the_hidden_features",
)

TP_ATTENTION = Task(
    wrapping=wrappings("tensor_parallel")["tp_attention"],
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
    draw=partial(draw_layer, "tp_attention"),
    oracle=lambda inputs, case: layer_oracle(inputs, case, attention_on_one_device),
    facts=block_facts,
)
