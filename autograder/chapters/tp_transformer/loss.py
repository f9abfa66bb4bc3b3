"""``vocab_parallel_loss``: cross-entropy of logits that no device has all of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms, limits
from autograder.cases import varying
from autograder.chapters.tp_transformer.shared import (
    EVERY,
    SIZES,
    activation_bytes,
    added_up,
    given,
    groups_of,
    held_specs,
    hold,
    model_of,
    others_of,
    params_of,
    parts_of,
    ring_bytes,
    rows_of,
    shared_leaves,
    tensor_of,
)
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.layout import tensor_specs
from course.mesh import abstract_mesh

NAME = "vocab_parallel_loss"
_VALUES = "Which numbers must all devices agree on before the logarithm, and what happens to exp of a large one?"
_GRADIENTS = "How many devices return this loss, how is it typed, and which rows of logits has this device a part in?"
_LOGITS = "Which of all logits does a device need, and what of the others is enough?"
_SENT = "What does a token's loss need of another device's logits?"


def wrap(function: Any, case: Case) -> Wrapped:
    """Loss and gradients of every device; each returns its own share of the gradient of the norm."""
    axis, others, shapes = tensor_of(case), others_of(case), params_of(case)["head"]
    rows = others or None
    results = {"values": P((*others, axis)), "gradients": {"params": held_specs(shapes, case), "x": P(rows, axis)}}

    def local(params, x, targets):
        def run(params, x):
            loss = function(params, x, targets, given(case)[0], axis)
            if not hasattr(loss, "shape") or loss.shape != ():
                raise Mismatch(f"{NAME} returned {forms.describe(loss)}, expected a scalar, the mean over all tokens")
            return loss

        loss, (of_params, of_x) = jax.value_and_grad(run, argnums=(0, 1))(varying(params, case.mesh), x)
        return {"values": varying(loss, case.mesh)[None], "gradients": {"params": hold(of_params), "x": of_x}}

    in_specs = {"params": tensor_specs(shapes, axis), "x": P(rows, axis), "targets": P(rows)}

    def program(**inputs):
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=results)
        return mapped(*inputs.values())

    return Wrapped(program, _shapes(case), in_specs, results, {"params": "state"})


def _shapes(case: Case) -> dict[str, Any]:
    tokens = rows_of(case), case.sizes["seq"]
    return {
        "params": params_of(case)["head"],
        "x": jax.ShapeDtypeStruct((*tokens, case.sizes["width"]), np.float32),
        "targets": jax.ShapeDtypeStruct(tokens, np.int32),
    }


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """All logits are large, of either sign: the loss is what it would be without, and ``exp`` of them is not."""
    shapes = _shapes(case)
    found = {"params": draw_leaves(rng, shapes["params"], 0.3), "x": draw_leaves(rng, shapes["x"])}
    found["params"]["out"]["bias"] += np.float32(case.sizes["offset"])
    return {**found, "targets": rng.integers(0, case.sizes["vocab"], shapes["targets"].shape, np.int32)}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The course's head and loss on one device for each group."""
    groups = groups_of(case)
    x, targets = (inputs[name].reshape(groups, -1, *inputs[name].shape[1:]) for name in ("x", "targets"))
    run = _each_group(tuple(case.sizes.items()))
    losses, (of_params, of_x) = jax.tree.map(np.asarray, run(inputs["params"], x, targets))
    gradients = {"params": of_params, "x": of_x.reshape(inputs["x"].shape)}
    return {"values": np.repeat(losses, parts_of(case)), "gradients": gradients}


@lru_cache(maxsize=32)
def _each_group(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.vmap(jax.value_and_grad(model.loss, argnums=(0, 1)), in_axes=(None, 0, 0)))


# --8<-- [start:logits]
def part_of_logits(case: Case) -> int:
    """Elements of the logits that a device has: all tokens of its group, and its part of the vocabulary."""
    return case.sizes["rows"] * case.sizes["seq"] * case.sizes["vocab"] // parts_of(case)


# --8<-- [end:logits]


def sums_bytes(case: Case) -> float:
    """Three numbers a token, all-reduced: the largest logit, the sum of the exponentials, the target's logit.

    And a scalar, for those who add up parts of the loss.
    """
    return 2 * ring_bytes(case, 4 * (3 * case.sizes["rows"] * case.sizes["seq"] + 1))


def most_sent(case: Case) -> float:
    """Those sums, and the activations once in each direction, or twice as much where the sum of all is how they go."""
    return (4 if case.sizes["by_sum"] else 2) * ring_bytes(case, activation_bytes(case)) + sums_bytes(case)


def loss_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    whole = [added_up(e, shared_leaves(params_of(e.case)["head"], "gradients/params")) for e in cases]
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", whole, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(whole, "gradients"),
        limits.largest_within(large, references, part_of_logits, _LOGITS, weight=3),
        facts.bytes_at_most("bytes sent", counted, EVERY, lambda e: most_sent(e.case), _SENT),
    ]


_SIZES = {**SIZES, "num_layers": 1, "by_sum": 0, "offset": 120}
_LARGE = {
    **_SIZES,
    "width": 2048,
    "hidden": 8192,
    "num_heads": 16,
    "vocab": 32000,
    "seq": 1024,
    "max_seq": 1024,
    "rows": 8,
}


def _unseen(rng: np.random.Generator) -> Case:
    mesh = [{"data": 2, "tensor": 4}, {"tensor": 2}, {"tensor": 4, "data": 2}][rng.integers(3)]
    offset = int(rng.choice([-200, 150]))
    return Case("unseen", mesh, {**_SIZES, "rows": 3, "vocab": int(rng.choice([40, 72])), "offset": offset})


VOCAB_PARALLEL_LOSS = Task(
    wrapping=Wrapping(NAME, "(params, x, targets, gather_matmul, axis_name)", wrap),
    kind="local",
    points=5,
    cases=(
        Case("tensor=4", {"tensor": 4}, {**_SIZES, "offset": -150}, quick=True),
        Case("tensor=8", {"tensor": 8}, _SIZES, quick=True),
        Case("data=2 x tensor=2, by sums", {"data": 2, "tensor": 2}, {**_SIZES, "by_sum": 1, "offset": 0}),
        Case("data=4 x model=2", {"data": 4, "model": 2}, {**_SIZES, "rows": 1}),
        Case("tensor=1", {"tensor": 1}, _SIZES),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=loss_facts,
    analysed=(Case("tensor=8, vocabulary of 32,000", {"tensor": 8}, _LARGE), "tensor=8"),
    naive="gathers_logits",
)
