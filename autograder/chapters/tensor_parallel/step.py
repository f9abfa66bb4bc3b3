"""``tp_train_step``: the course's MLP on ``data`` x ``tensor``, with sharded and replicated leaves side by side.

The learning rate is drawn with the rest and is large, so that an update is of the size of the parameters: what a
step subtracts, divided by it, is the raw gradient, and no scale can hide.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax

from autograder.chapters.tensor_parallel.shared import GATHERED, OTHER, SCATTERED, unseen_mesh
from autograder.chapters.tensor_parallel.wrapping import places_of, rows_of, specs_of, split_of
from autograder.contract import facts
from autograder.contract.cases import model_of, params_of
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.data import regression_batch
from course.model import full_loss

WHOSE = "Is this leaf split or a copy, and whose losses does a device's gradient of it belong to? "


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Parameters, a batch for every step, and a learning rate."""
    s = case.sizes
    batches = [
        regression_batch(int(seed), 0, batch=rows_of(case), num_inputs=s["features"], num_outputs=s["outputs"])
        for seed in rng.integers(2**31, size=s["steps"])
    ]
    return {
        "params": draw_leaves(rng, params_of(case), 0.3),
        "batch": {name: np.stack([batch[name] for batch in batches]) for name in batches[0]},
        "learning_rate": np.float32(rng.uniform(0.5, 1.0) * s["rate"] / 100),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a leaf gets the same."""
    run = _steps_on_one_device(tuple(case.sizes.items()))
    after, losses, gradients = jax.tree.map(np.asarray, run(*inputs.values()))
    places, every = places_of(case), places_of(case) * split_of(case)

    def held(tree):
        return jax.tree.map(lambda leaf, spec: np.repeat(leaf[None], places if any(spec) else every, 0),
                            tree, specs_of(case))  # fmt: skip

    values = {"loss": np.repeat(losses[None], every, 0), "params": held(after)}
    return {"values": values, "gradients": held(gradients)}


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: tuple[tuple[str, int], ...]) -> Any:
    """Parameters after the steps, each step's loss, and the sum of the gradients."""
    model = model_of(Case("", {}, dict(sizes)))

    def run(params, batches, rate):
        def step(carry, batch):
            params, total = carry
            loss, gradients = jax.value_and_grad(lambda p: full_loss(model, p, batch))(params)
            after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            return (after, jax.tree.map(lambda a, b: a + b, total, gradients)), loss

        start = (params, jax.tree.map(lambda p: 0 * p, params))
        (after, total), losses = lax.scan(step, start, batches)
        return after, losses, total

    return jax.jit(run)


def _ring(devices: int, size: float) -> float:
    return 2 * (devices - 1) / devices * size


def _held(e: Evidence) -> tuple[int, int]:
    """Bytes of copies and of parts on one device."""
    leaves = [leaf for leaf in e.inputs if leaf.name.startswith("params/")]
    copies, parts = ([leaf for leaf in leaves if any(leaf.spec) == split] for split in (False, True))
    return tuple(sum(leaf.local_bytes(e.case.mesh) for leaf in some) for some in (copies, parts))  # type: ignore


def _apart(e: Evidence) -> float:
    """All-reduces of a step: copies and the loss over both axes, one after the other; parts over the data axis."""
    (copies, parts), places, n = _held(e), places_of(e.case), split_of(e.case)
    return e.case.sizes["steps"] * (_ring(places, copies + parts + 4) + _ring(n, copies + 4))


def _together(e: Evidence) -> float:
    """The same, copies over both axes at once, and the loss not counted."""
    (copies, parts), places, n = _held(e), places_of(e.case), split_of(e.case)
    return e.case.sizes["steps"] * (_ring(places * n, copies) + _ring(places, parts))


def _travels(e: Evidence, times: int) -> float:
    """So many gathers, or scatters, of one place's activations in every layer and step."""
    s, n = e.case.sizes, split_of(e.case)
    return times * s["steps"] * s["num_layers"] * (n - 1) / n * 4 * n * s["rows"] * s["width"]


def step_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", WHOSE, weight=3),
        facts.global_norm_matches(cases, "gradients"),
        facts.bytes_sent(GATHERED, cases, "all_gather", lambda e: _travels(e, 3), least=lambda e: _travels(e, 2)),
        facts.bytes_sent(SCATTERED, cases, "reduce_scatter", lambda e: _travels(e, 2)),
        facts.bytes_sent("all-reduce bytes", cases, "all_reduce", _apart, least=_together),
        facts.only_collectives(OTHER, cases, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


_SIZES = {"width": 12, "hidden": 40, "num_layers": 2, "features": 6, "outputs": 10, "rows": 3, "steps": 1, "rate": 100}
_THREE = {**_SIZES, "num_layers": 3, "steps": 3, "rate": 20}


def _on(data: int, tensor: int, sizes: dict[str, int], **how: Any) -> Case:
    said = ", 3 steps" if sizes["steps"] == 3 else ""
    return Case(f"data={data} x tensor={tensor}{said}", {"data": data, "tensor": tensor}, sizes, **how)


def _unseen(rng: np.random.Generator) -> Case:
    mesh = unseen_mesh(rng)
    features = {
        "features": int(rng.choice([3, 5])),
        "outputs": int(rng.choice([4, 7])),
        "width": int(rng.choice([8, 10])),
    }
    sizes = {**features, "hidden": int(rng.integers(4, 8)) * list(mesh.values())[-1], "num_layers": 3, "rows": 2}
    return Case("unseen", mesh, {**sizes, "steps": int(rng.choice([1, 2])), "rate": int(rng.integers(30, 90))})


TP_TRAIN_STEP = Task(
    wrapping=wrappings("tensor_parallel")["tp_train_step"],
    kind="local",
    points=5,
    cases=(
        _on(2, 4, _SIZES, quick=True),
        _on(1, 8, _THREE, quick=True),
        _on(4, 2, _SIZES),
        _on(8, 1, _SIZES),
        _on(1, 1, {**_SIZES, "rows": 6}),
        Case("replica=2 x model=2", {"replica": 2, "model": 2}, _SIZES),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=step_facts,
)
