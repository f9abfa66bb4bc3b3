"""``column_parallel_dense`` and ``row_parallel_dense``: rows are gathered on the way in, or summed on the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts
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
    split_features,
    split_rows,
    tensor_of,
    wrap_layer,
)
from autograder.contract import Case, Evidence, Task
from autograder.verdict import Fact
from autograder.wrapping import Wrapping

ALLOWED = ("all_gather", "reduce_scatter")


def dense(params: Any, x: Any) -> Any:
    """The layer on one device, ``[..., d_in] -> [..., d_out]``."""
    return x @ params["kernel"] + params.get("bias", 0)


def _column(case: Case) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    params, specs = {"kernel": leaf(s["d_in"], s["d_out"])}, {"kernel": P(None, axis)}
    if s["bias"]:
        params["bias"], specs["bias"] = leaf(s["d_out"]), P(axis)
    return Layer(params, specs, split_rows(case, s["d_in"]), split_features(case, s["d_out"]))


def _row(case: Case) -> Layer:
    s, axis = case.sizes, tensor_of(case)
    params, specs = {"kernel": leaf(s["d_in"], s["d_out"])}, {"kernel": P(axis)}
    if s["bias"]:
        params["bias"], specs["bias"] = leaf(s["d_out"]), P()
    return Layer(params, specs, split_features(case, s["d_in"]), split_rows(case, s["d_out"]))


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


def _unseen(narrow: str, wide: str) -> Any:
    def unseen(rng: np.random.Generator) -> Case:
        mesh = [{"tensor": 2, "data": 4}, {"data": 2, "tensor": 2}, {"replica": 2, "model": 4}][rng.integers(3)]
        features = {narrow: int(rng.choice([10, 14])), wide: int(rng.choice([24, 32]))}
        sizes = {"batch": int(rng.choice([0, 2])), "rows": 8, "bias": int(rng.integers(2)), "backward": 1}
        return Case("unseen", mesh, {**sizes, **features})

    return unseen


COLUMN_PARALLEL_DENSE = Task(
    wrapping=Wrapping(
        "column_parallel_dense",
        "(params, x, axis_name)",
        lambda function, case: wrap_layer("column_parallel_dense", function, case, _column(case)),
    ),
    kind="local",
    points=2,
    cases=_cases(d_in=_NARROW, d_out=_WIDE),
    unseen=_unseen("d_in", "d_out"),
    draw=lambda rng, case: draw_layer(rng, _column(case), case.sizes["backward"]),
    oracle=lambda inputs, case: layer_oracle(inputs, case, dense),
    facts=column_facts,
)

ROW_PARALLEL_DENSE = Task(
    wrapping=Wrapping(
        "row_parallel_dense",
        "(params, x, axis_name)",
        lambda function, case: wrap_layer("row_parallel_dense", function, case, _row(case)),
    ),
    kind="local",
    points=2,
    cases=_cases(d_in=_WIDE, d_out=_NARROW),
    unseen=_unseen("d_out", "d_in"),
    draw=lambda rng, case: draw_layer(rng, _row(case), case.sizes["backward"]),
    oracle=lambda inputs, case: layer_oracle(inputs, case, dense),
    facts=row_facts,
)
