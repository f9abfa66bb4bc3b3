"""``accumulate_gradients``: the gradient of a batch from microbatches, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder import facts, forms, limits
from autograder.cases import batch_shapes, model_of, params_of
from autograder.chapters.single_device.common import MESH, does_not_grow, float32_scalar, on_one_device
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import batch_of, draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.model import full_loss

FEW, MANY = "2 microbatches", "8 microbatches"


def loss_of(case: Case) -> Callable[[Any, Any], jax.Array]:
    """The model's mean loss, each layer computed again in the backward pass."""
    model = model_of(case)

    def loss(params, batch):
        step = jax.checkpoint(lambda x, layer: (model.layer(layer, x), None))
        x, _ = jax.lax.scan(step, model.embed(params["embed"], batch["inputs"]), params["layers"])
        return model.loss(params["head"], x, batch["targets"])

    return loss


def _wrap(function: Any, case: Case) -> Wrapped:
    shapes = params_of(case)

    def local(params, batch):
        result = function(loss_of(case), params, batch, case.sizes["num_microbatches"])
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise Mismatch(
                f"accumulate_gradients returned {forms.describe(result)}, expected a tuple (loss, gradients)"
            )
        loss, gradients = result
        float32_scalar("accumulate_gradients, as loss,", loss)
        gradients = forms.same_tree("gradients", gradients, params)
        forms.same_shapes("accumulate_gradients", gradients, shapes, case)
        return {"values": loss, "gradients": gradients}

    return on_one_device(local, {"params": shapes, "batch": batch_shapes(case)}, ("values", "gradients"))


def _draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {"params": draw_leaves(rng, params_of(case), 0.3), "batch": batch_of(case, int(rng.integers(2**31)))}


@lru_cache(maxsize=16)
def _value_and_gradient(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.value_and_grad(lambda params, batch: full_loss(model, params, batch)))


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Loss and gradient of the whole batch at once."""
    loss, gradients = _value_and_gradient(tuple(case.sizes.items()))(inputs["params"], inputs["batch"])
    return {"values": np.asarray(loss), "gradients": jax.tree.map(np.asarray, gradients)}


_GROWS = "What is written once for each microbatch, and could be a loop?"
_TOO_MUCH = "What of one microbatch is still there when the next one starts?"
_TWICE = "Is a forward or backward pass run that another one has done already?"


def _facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", "Mean over rows: of each microbatch, and of them all? "),
        facts.global_norm_matches(cases, "gradients"),
        does_not_grow(cases, FEW, MANY, "the number of microbatches", _GROWS),
        limits.temporaries_within(large, references, 1.15, _TOO_MUCH, weight=2),
        limits.flops_within(large, references, 1.15, _TWICE),
    ]


_MLP = {"width": 16, "hidden": 32, "num_layers": 2, "features": 8, "rows": 32, "num_microbatches": 8}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 12, "num_microbatches": 4}
# A batch that is small beside a gradient: nobody is charged much for laying it out anew.
_LARGE = {"width": 2048, "hidden": 8192, "num_layers": 2, "features": 128, "rows": 16384, "num_microbatches": 8}


def _unseen(rng: np.random.Generator) -> Case:
    sizes = {**_MLP, "width": int(rng.choice([16, 24])), "rows": int(rng.choice([24, 48]))}
    return Case("unseen", MESH, {**sizes, "num_microbatches": int(rng.choice([3, 4, 6]))})


TASK = Task(
    wrapping=Wrapping("accumulate_gradients", "(loss_fn, params, batch, num_microbatches)", _wrap),
    kind="transform",
    points=2,
    cases=(
        Case(MANY, MESH, _MLP, quick=True),
        Case(FEW, MESH, {**_MLP, "num_microbatches": 2}, quick=True),
        Case("4 microbatches of tokens", MESH, _TRANSFORMER),
        Case("1 microbatch", MESH, {**_MLP, "num_microbatches": 1}),
    ),
    unseen=_unseen,
    draw=_draw,
    oracle=oracle,
    facts=_facts,
    analysed=(Case("8 microbatches, width 2048", MESH, _LARGE), MANY),
    naive="differentiates_the_scanned_loss",
)
