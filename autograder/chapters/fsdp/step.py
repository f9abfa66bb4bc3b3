"""``fsdp_train_step``: the whole step, with the next layer's weights on their way while this layer computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.chapters.fsdp.loss import TOO_MUCH
from autograder.chapters.fsdp.shared import bytes_of, given_specs, ring_bytes, whole_and_split
from autograder.chapters.fsdp.steps import draw_step, step_oracle, unseen_step
from autograder.chapters.fsdp.wrapping import step_axes
from autograder.contract import facts, limits
from autograder.contract.cases import axis_size
from autograder.contract.draws import ODD, meshes, unseen_mesh
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

# A step that carries each gradient on, to reduce-scatter it beside the next layer, copies it and takes 1.09 times as
# long; one that gathers ahead in the forward pass only, 1.21.
SLOWER = 1.15
_TOO_SLOW = (
    "Look at the timeline: which transfer does the device wait for, forward and backward, and what could it compute "
    "in the meantime?"
)
_EXPOSED = "The first gather and the end of the last reduce-scatter have nothing to hide behind; the others do."


def _averaged(e: Evidence) -> float:
    """The all-reduces of a step: the gradient of every whole leaf, and the loss."""
    n = axis_size(e.case)
    return 2 * (n - 1) / n * e.case.sizes["steps"] * (bytes_of(whole_and_split(e)[0]) + 4)


def _split(e: Evidence) -> float:
    return e.case.sizes["steps"] * ring_bytes(e)


def fsdp_train_step_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        limits.time_within(large, references, SLOWER, _TOO_SLOW, weight=4),
        limits.temporaries_within(large, references, 1.15, TOO_MUCH, weight=2),
        limits.exposed_within(large, references, 1.15, _EXPOSED, weight=0),
        facts.bytes_sent("all-gather bytes", counted, "all_gather", _split, times=(1, 2)),
        facts.bytes_sent("reduce-scatter bytes", counted, "reduce_scatter", _split),
        facts.bytes_sent("all-reduce bytes", counted, "all_reduce", _averaged),
        facts.only_collectives("other collectives", counted, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


# As many layers as the realistic size has: a program that is written layer by layer must be the same at both sizes.
_MLP = {"width": 16, "hidden": 32, "num_layers": 8, "features": 8, "rows": 4, "min_size": 64, "steps": 1, "rate": 100}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 4, "min_size": 64,
                "steps": 1, "rate": 200}  # fmt: skip
_LARGE_MLP = {**_MLP, "width": 4096, "hidden": 16384, "features": 2048, "rows": 2048, "min_size": 16384}
_SMALLER = {**_MLP, "num_layers": 3, "steps": 3, "rate": 20}


def _cases() -> tuple[Case, ...]:
    eight, other, two, one = meshes(_MLP, two=_TRANSFORMER)
    return eight, Case(other.name, other.mesh, _SMALLER, quick=True), two, one


def _unseen(rng: np.random.Generator) -> Case:
    return Case("unseen", unseen_mesh(rng, *ODD), unseen_step(rng))


FSDP_TRAIN_STEP = Task(
    wrapping=wrappings("fsdp")["fsdp_train_step"],
    given=given_specs,
    kind="local",
    points=5,
    cases=_cases(),
    unseen=_unseen,
    draw=lambda rng, case: draw_step(rng, case, step_axes(case)),
    oracle=lambda inputs, case: step_oracle(inputs, case, step_axes(case)),
    facts=fsdp_train_step_facts,
    analysed=(Case("data=8, 8 layers of width 4096", {"data": 8}, _LARGE_MLP), "data=8"),
    # The same leaves are split, along the same dims, as at both sizes.
    stretches=({"rows": 2048}, {"features": 64, "width": 256, "hidden": 2048, "min_size": 2048}),
    naive="gathers_everything_first",
    slow="gathers_when_it_computes",
)
