"""``train_step_3d``: SGD over three axes, with its gradient clipped by the norm that one device would see."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.chapters.transformer_3d.forward import on_each_device
from autograder.chapters.transformer_3d.sent import sent_facts
from autograder.chapters.transformer_3d.shared import SIZES, draw_batch, given_specs, run_on_one_device, unseen
from autograder.chapters.transformer_3d.wrapping.model import sizes_of, stacked_of
from autograder.contract import facts
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

_GRADIENTS = "Is the gradient complete, and is it scaled by one number, the same on every device? "


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """A learning rate so large that an update shows; ``norm`` is in percent, and 0 leaves gradients as they are."""
    s, every = case.sizes, [draw_batch(rng, case) for _ in range(case.sizes["steps"])]
    return {
        "params": draw_leaves(rng, stacked_of(case), 0.3),
        "batch": {name: np.stack([batch[name] for batch in every]) for name in every[0]},
        "key": rng.integers(0, 2**32 - 1, 2, np.uint32),
        "learning_rate": np.float32(rng.uniform(0.5, 1.0) * s["rate"] / 100),
        "largest_norm": np.float32(rng.uniform(0.8, 1.0) * s["norm"] / 100 if s["norm"] else 1e30),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a part gets the same."""
    after, losses, gradients = run_on_one_device(inputs, case, case.sizes["steps"])
    mean = np.repeat(losses.mean(1)[None], sizes_of(case)[0], 0)
    return {"values": {"loss": on_each_device(mean, case), "params": after}, "gradients": gradients}


def step_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(cases, "gradients"),
        *sent_facts(cases),
    ]


_SIZES = {**SIZES, "num_layers": 2, "num_repeats": 1, "steps": 2, "rate": 50, "norm": 50}
_TWENTY = {**_SIZES, "steps": 20, "rate": 60, "norm": 0}
_CLIPPED = {**_SIZES, "steps": 20, "rate": 60, "norm": 50}


def _unseen(rng: np.random.Generator) -> Case:
    norm = int(rng.integers(2) * rng.integers(30, 90))
    how = {"steps": int(rng.choice([2, 3])), "rate": int(rng.integers(30, 70)), "norm": norm}
    return unseen(rng, ((2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 3)), **how)


TRAIN_STEP_3D = Task(
    wrapping=wrappings("transformer_3d")["train_step_3d"],
    kind="local",
    points=4,
    cases=(
        Case("data=2 x pipe=2 x tensor=2", {"data": 2, "pipe": 2, "tensor": 2}, _SIZES, quick=True),
        Case("replica=1 x stage=2 x model=4, 20 steps", {"replica": 1, "stage": 2, "model": 4}, _TWENTY, quick=True),
        Case("data=4 x pipe=1 x tensor=2, 20 steps", {"data": 4, "pipe": 1, "tensor": 2}, _CLIPPED),
        Case("data=8 x pipe=1 x tensor=1, 20 steps", {"data": 8, "pipe": 1, "tensor": 1}, _TWENTY),
        Case("data=1 x pipe=8 x tensor=1, 20 steps", {"data": 1, "pipe": 8, "tensor": 1}, {**_TWENTY, "num_layers": 8}),
        Case("data=1 x pipe=1 x tensor=8, 20 steps", {"data": 1, "pipe": 1, "tensor": 8}, _CLIPPED),
        Case("data=2 x pipe=2 x tensor=2, 20 steps", {"data": 2, "pipe": 2, "tensor": 2}, _TWENTY),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=step_facts,
    given=given_specs,
)
