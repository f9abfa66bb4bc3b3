"""``column_parallel_dense`` and ``row_parallel_dense``: rows are gathered on the way in, or summed on the way out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

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
from autograder.contract import facts
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

ALLOWED = ("all_gather", "reduce_scatter")


def dense(params: Any, x: Any) -> Any:
    """The layer on one device, ``[..., d_in] -> [..., d_out]``."""
    return x @ params["kernel"] + params.get("bias", 0)


def column_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        *layer_facts(cases),
        sent(GATHERED, cases, "all_gather", "d_in", (1, 0), more=(0, 1)),
        sent(SCATTERED, cases, "reduce_scatter", "d_in", (0, 1)),
        facts.only_collectives(OTHER, cases, ALLOWED),
    ]


def row_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        *layer_facts(cases),
        sent(GATHERED, cases, "all_gather", "d_out", (0, 1)),
        sent(SCATTERED, cases, "reduce_scatter", "d_out", (1, 0)),
        facts.only_collectives(OTHER, cases, ALLOWED),
    ]


# Rows with the features that travel, twice over, are fewer numbers than the kernel, and than rows with the others.
_NARROW, _WIDE = 12, 112
_SIZES = {"batch": 3, "rows": 16, "bias": 1, "backward": 1}


def _cases(**features: int) -> tuple[Case, ...]:
    s = {**_SIZES, **features}
    return (
        Case("data=2 x tensor=4", {"data": 2, "tensor": 4}, s, quick=True),
        Case("tensor=8", {"tensor": 8}, {**s, "batch": 0}, quick=True),
        Case("replica=2 x model=2, no bias", {"replica": 2, "model": 2}, {**s, "bias": 0, "batch": 0}),
        Case("data=2 x tensor=1", {"data": 2, "tensor": 1}, s),
    )


def _unseen(narrow: str, wide: str) -> Callable[[np.random.Generator], Case]:
    def unseen(rng: np.random.Generator) -> Case:
        mesh = unseen_mesh(rng)
        n, sizes = list(mesh.values())[-1], {"batch": int(rng.choice([0, 2])), "bias": int(rng.integers(2))}
        features = {narrow: int(rng.choice([5, 7, 10])), wide: int(rng.integers(7, 12)) * n}
        return Case("unseen", mesh, {**sizes, **features, "rows": int(rng.choice([1, 2])) * n, "backward": 1})

    return unseen


def _task(name: str, narrow: str, wide: str, judge: Callable[..., list[Fact]]) -> Task:
    return Task(
        wrapping=wrappings("tensor_parallel")[name],
        kind="local",
        points=2,
        cases=_cases(**{narrow: _NARROW, wide: _WIDE}),
        unseen=_unseen(narrow, wide),
        draw=partial(draw_layer, name),
        oracle=lambda inputs, case: layer_oracle(inputs, case, dense),
        facts=judge,
    )


COLUMN_PARALLEL_DENSE = _task("column_parallel_dense", "d_in", "d_out", column_facts)
ROW_PARALLEL_DENSE = _task("row_parallel_dense", "d_out", "d_in", row_facts)
