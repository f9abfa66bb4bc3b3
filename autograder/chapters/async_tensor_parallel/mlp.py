"""``async_tp_mlp``: two layers, forward and backward, with every transfer beside a product."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.async_tensor_parallel import shared
from autograder.chapters.async_tensor_parallel.shared import HIDDEN, TOKENS, WIDTH
from autograder.chapters.async_tensor_parallel.wrapping import groups_of, mlp_shapes, rows_shape, size_of
from autograder.contract import facts, limits
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact

# Of tp_mlp's, forward and backward: what may be exposed, and how long it may take.
EXPOSED, TIME = 0.4, 1.0
_DIMS = {"width": 6, "hidden": 5}
CASES = (
    Case("tensor=8", {"tensor": 8}, {"rows": 2, **_DIMS}, quick=True),
    Case("data=2 x tensor=4", {"data": 2, "tensor": 4}, {"rows": 3, "batch": 2, **_DIMS}, quick=True),
    Case("tensor=2 x data=4", {"tensor": 2, "data": 4}, {"rows": 3, "batch": 1, **_DIMS}),
    Case("data=8 x tensor=1", {"data": 8, "tensor": 1}, {"rows": 3, "batch": 2, **_DIMS}),
    Case("model=2", {"model": 2}, {"rows": 4, **_DIMS}),
)
_LARGE = {"rows": TOKENS // 8, "width": WIDTH, "hidden": HIDDEN // 8}
ANALYSED = (Case(f"tensor=8, width {WIDTH}", {"tensor": 8}, _LARGE), "tensor=8")


def unseen(rng: np.random.Generator) -> Case:
    return shared.unseen(rng, {"width": int(rng.choice([4, 7])), "hidden": int(rng.choice([3, 7]))})


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shape = rows_shape(case, case.sizes["width"])
    x, upstream = (np.float32(rng.uniform(0.5, 2) * rng.standard_normal(shape)) for _ in range(2))
    return {"params": draw_leaves(rng, mlp_shapes(case), 0.5), "x": x, "upstream": upstream}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The MLP on one device, and the gradients of half of ``upstream`` times the square of what it gives."""
    n, groups = size_of(case), groups_of(case)
    x, upstream = (inputs[name].reshape(groups, -1, *inputs[name].shape[-2:]) for name in ("x", "upstream"))
    values, of_params, of_x = jax.tree.map(np.asarray, _both_ways(inputs["params"], x, upstream))
    # The bias of the result is whole on every device, and each has its own rows' gradient of it.
    own = values * upstream
    rows = own.reshape(groups, -1, n, own.shape[2] // n, own.shape[3])
    of_params["down"]["bias"] = rows.sum((1, 3), np.float64).astype(np.float32).reshape(-1)
    for layer, leaf in (("up", "kernel"), ("down", "kernel"), ("up", "bias")):
        found = of_params[layer][leaf]
        of_params[layer][leaf] = found.reshape(-1, *found.shape[2:])
    shape = inputs["x"].shape
    return {"values": values.reshape(shape), "gradients": {"params": of_params, "x": of_x.reshape(shape)}}


def plain(params: Any, x: Any) -> Any:
    """The two layers on one device."""
    hidden = jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


@lru_cache(maxsize=1)
def _grouped() -> Any:
    def one(params, x, upstream):
        value, transpose = jax.vjp(plain, params, x)
        return value, *transpose(upstream * value)

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))


def _both_ways(params: Any, x: Any, upstream: Any) -> Any:
    return _grouped()(jax.tree.map(jnp.asarray, params), x, upstream)


_EXPOSED = (
    "Which transfer is it, and of which pass? What is computed in the same iteration that neither needs its result nor "
    "gives its operand?"
)
_SLOW = (
    "Little may be exposed, and yet it takes longer than waiting would: what does the backward pass read and write in "
    "every step that it would not without a ring?"
)


def mlp_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases

    def form(e: Evidence) -> float:
        return (size_of(e.case) - 1) * shared.chunk_bytes(e.case, e.case.sizes["width"])

    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients/params"),
        facts.bytes_sent("permute bytes", counted, "collective_permute", form, times=(4, 6)),
        facts.only_collectives("other collectives", counted, ("collective_permute",)),
        limits.exposed_within(large, references, EXPOSED, _EXPOSED, weight=4, than=limits.NAIVE),
        limits.time_within(large, references, TIME, _SLOW, weight=2, than=limits.NAIVE),
    ]
