"""The contract of ``schedules``: when each stage does what."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.chapters.schedules.wrapping import Rows
from autograder.contract import facts, limits
from autograder.contract.case_builders import axis_size
from autograder.contract.draws import ODD, meshes, unseen_case
from autograder.contract.task import Case, Contract, Evidence, Judged, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings


def _draw(rng: np.random.Generator, case: Case[Rows]) -> dict[str, Any]:
    shape = axis_size(case) * case.sizes.rows, case.sizes.width
    return {"x": rng.standard_normal(shape).astype(np.float32)}


def _oracle(inputs: dict[str, Any], case: Case[Rows]) -> dict[str, Any]:
    mean = inputs["x"].mean(0, dtype=np.float64).astype(np.float32)
    return {"values": np.repeat(mean[None], axis_size(case), 0)}


def _unseen(rng: np.random.Generator) -> Case[Rows]:
    return unseen_case(rng, Rows(rows=int(rng.choice([2, 7])), width=int(rng.choice([4, 9]))), *ODD)


def _reduced_bytes(e: Evidence) -> float:
    """What a device sends in a ring all-reduce of one row."""
    n = axis_size(e.case)
    return 2 * (n - 1) / n * 4 * e.case.sizes.width


def _facts(judged: Judged) -> list[Fact]:
    too_much = "Is anything as large as what a device is given, or larger?"
    return [
        facts.arrays_match("values", judged.cases, "values", "Over which rows is it the mean?", weight=2),
        facts.bytes_sent("all-reduce bytes", judged.all, "all_reduce", _reduced_bytes),
        facts.only_collectives("other collectives", judged.all, ("all_reduce",)),
        limits.temporaries_at_most(judged, lambda case: 2 * case.sizes.rows * case.sizes.width, too_much),
    ]


MEAN = Task(
    wrapping=wrappings("schedules")["schedules_mean"],
    points=2,
    point=("live temporaries",),
    cases=meshes(Rows(rows=3, width=5)),
    unseen=_unseen,
    draw=_draw,
    oracle=_oracle,
    facts=_facts,
    at_scale=(Case("data=8, 16,384 rows", {"data": 8}, Rows(rows=16_384, width=4096)), "data=8"),
    naive_memory="gathers_every_row",
)

READ = {
    "values": ("schedules", "The idea"),
    "all-reduce bytes": ("schedules", "What it costs"),
    "other collectives": ("schedules", "What it costs"),
    "live temporaries": ("schedules", "What it costs"),
}

# Pieces of the notebook's text, and the facts that hold them.
PROMISES = {
    "schedules_mean": {
        "Return the mean over the rows of all devices": ("values",),
        "| collectives |": ("all-reduce bytes", "other collectives"),
        "| temporaries |": ("live temporaries",),
        "The mean over the rows": ("values",),
    }
}

CONTRACT = Contract("schedules", (MEAN,), question_points=1, read=READ)
