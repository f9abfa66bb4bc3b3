"""``mixed_precision_loss``: bfloat16 for matrix products, float32 where precision is needed."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.single_device.wrapping import MESH, transformer_params
from autograder.contract import facts, limits
from autograder.contract.draws import draw_leaves, flows_back
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.data import token_batch

# An operand rounded to bfloat16 is off by 2^-8 at most, and by about 2^-9 on the average. On its way through two layers
# and back a gradient meets some thirty such roundings in random directions: 2^-9 times the root of 30 is 1 %, and the
# worst of some thousand elements is off by up to four times as much. A loss is a mean over all tokens: most cancels.
OF_THE_LOSS, OF_A_GRADIENT = 2**-9, 2**-4


def _draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    s = case.sizes
    params = draw_leaves(rng, transformer_params(case))
    # Norms near one; kernels such that what they give is as large as what they get.
    scaled = jax.tree.map(lambda a: 1 + a / 10 if a.ndim == 1 else a * np.float32(a.shape[0] ** -0.5), params)
    scaled |= {name: params[name] for name in ("token", "position")}
    batch = token_batch(int(rng.integers(2**31)), 0, batch=s["rows"], seq=s["seq"], vocab=s["vocab"])
    return {"params": scaled, "batch": batch, "upstream": flows_back(rng)}


def plain_loss(params: Any, batch: Any, num_heads: int) -> jax.Array:
    """The Transformer's loss in the dtype of its parameters, written apart from the notebook's."""

    def norm(x, scale):
        return scale * x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)

    rows, seq = batch["inputs"].shape
    x = jnp.take(params["token"], batch["inputs"], axis=0) + params["position"][None]
    seen = jnp.arange(seq)[:, None] >= jnp.arange(seq)
    for layer in params["layers"]:
        q, k, v = jnp.split(norm(x, layer["attention_norm"]) @ layer["qkv"], 3, axis=-1)
        q, k, v = (a.reshape(rows, seq, num_heads, -1).swapaxes(1, 2) for a in (q, k, v))
        scores = jnp.where(seen, q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]).astype(np.float32), -1e30)
        exponentials = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        mixed = exponentials / exponentials.sum(-1, keepdims=True) @ v
        x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]
    logits = norm(x, params["norm"]) @ params["head"]
    right = jnp.sum(logits * jax.nn.one_hot(batch["targets"], logits.shape[-1], dtype=logits.dtype), -1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - right)


@lru_cache(maxsize=8)
def _value_and_gradient(num_heads: int) -> Any:

    @jax.jit
    def run(params, batch, upstream):
        loss, back = jax.vjp(lambda params: plain_loss(params, batch, num_heads), params)
        return loss, *back(upstream)

    return run


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Loss and gradient in float32."""
    run = _value_and_gradient(case.sizes["num_heads"])
    loss, gradients = run(inputs["params"], inputs["batch"], inputs["upstream"])
    return {"values": np.asarray(loss), "gradients": jax.tree.map(np.asarray, gradients)}


_PRODUCTS = "Which operand arrives in another dtype? In a product of two dtypes the smaller one is converted first."
_PRECISE = (
    "Softmax, norms, the loss and sums over many elements belong into float32, in the backward pass too: a gradient is "
    "summed in the dtype of the array that it belongs to, so where do you cast?"
)
_KEPT = "What does the backward pass keep in float32 that could be kept in bfloat16? Look at the largest first."


def _functions(e: Evidence) -> dict[tuple[str, ...], int]:
    """Of how many elements the model takes an exponential (of each softmax what a query sees, and the loss's), a root
    (each norm's) and a logarithm.
    """
    s = e.case.sizes
    tokens, layers = s["rows"] * s["seq"], s["num_layers"]
    return {
        ("exponential", "exponential_minus_one"): tokens * (layers * s["num_heads"] * s["seq"] // 2 + s["vocab"]),
        ("rsqrt", "sqrt", "power"): tokens * (2 * layers + 1),
        ("log", "log_plus_one"): tokens,
    }


def _facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", tolerance=OF_THE_LOSS),
        facts.arrays_match("gradients", cases, "gradients", tolerance=OF_A_GRADIENT),
        facts.products_of("product dtypes", cases, "bf16", _PRODUCTS),
        facts.precise_in("float32 functions and sums", cases, "f32", _PRECISE, _functions),
        limits.temporaries_within(large, references, 0.7, _KEPT, than=limits.NAIVE),
    ]


_SMALL = {"width": 32, "hidden": 64, "num_layers": 2, "num_heads": 2, "vocab": 32, "seq": 16, "rows": 4}
_ONE = {**_SMALL, "num_layers": 1, "num_heads": 4, "seq": 8}
_WIDE = {"width": 48, "hidden": 96, "num_layers": 2, "num_heads": 3, "vocab": 24, "seq": 12, "rows": 6}
_LARGE = {"width": 1024, "hidden": 4096, "num_layers": 2, "num_heads": 8, "vocab": 2048, "seq": 512, "rows": 16}


_UNSEEN = (
    {"width": 24, "hidden": 80, "num_layers": 2, "num_heads": 1, "vocab": 40, "seq": 10, "rows": 8},
    {"width": 40, "hidden": 72, "num_layers": 2, "num_heads": 5, "vocab": 28, "seq": 12, "rows": 5},
    {"width": 40, "hidden": 48, "num_layers": 1, "num_heads": 5, "vocab": 20, "seq": 14, "rows": 7},
)


def _unseen(rng: np.random.Generator) -> Case:
    return Case("unseen", MESH, dict(_UNSEEN[rng.integers(len(_UNSEEN))]))


TASK = Task(
    wrapping=wrappings("single_device")["mixed_precision_loss"],
    kind="step",
    points=2,
    cases=(
        Case("2 layers", MESH, _SMALL, quick=True),
        Case("1 layer", MESH, _ONE, quick=True),
        Case("width 48", MESH, _WIDE),
    ),
    unseen=_unseen,
    draw=_draw,
    oracle=oracle,
    facts=_facts,
    analysed=(Case("2 layers, width 1024", MESH, _LARGE), "2 layers"),
    naive="computes_in_float32",
)
