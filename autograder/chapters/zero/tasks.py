"""Grading of ``sharded_adamw`` and the steps of ``zero``: AdamW on one device, and permitted communication."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import all_reduce_bytes, split_spec
from autograder.chapters.draws import draw_batches, draw_leaves, loss_and_gradients, unseen_case, unseen_model
from autograder.chapters.zero.state import norm_of
from autograder.chapters.zero.wrapping import MOMENTS, StepSizes, axes_of, axis_given, config_of, devices_of
from autograder.contract import byte_facts, facts, limits
from autograder.contract.case_builders import encode_specs, params_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("zero")

# sharded_adamw and the steps: AdamW after clipping, on one device.


def specs_of(case: Case[StepSizes]) -> Any:
    """Specs of the optimizer's parts; the dim that stacks layers is never split."""

    def split(part: str, leaf: Any) -> P:
        return split_spec(leaf.shape, devices_of(case), case.sizes.min_size, axis_given(case), int(part == "layers"))

    return {part: jax.tree.map(partial(split, part), tree) for part, tree in params_of(case).items()}


def on_each(tree: Any, case: Case[StepSizes]) -> Any:
    """Whole leaves, repeated once per device."""
    return jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], devices_of(case), 0), tree)


def of_parts(tree: Any, case: Case[StepSizes]) -> Any:
    """Split leaves reassembled; whole leaves repeated once per device."""
    return jax.tree.map(
        lambda leaf, spec, copies: leaf if any(spec) else copies, tree, specs_of(case), on_each(tree, case)
    )


def adamw(params: Any, state: Any, gradients: Any, case: Case[StepSizes]) -> tuple[Any, Any, np.float32]:
    """An update of AdamW after clipping by the global norm, in float64: parameters, state and norm."""
    config, norm, count = config_of(case), norm_of(gradients), state["count"] + 1

    def update(part: str, p: Any, m: Any, v: Any, g: Any) -> Any:
        g = np.float64(g) * min(1, config.clip / norm)
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g**2
        mean, square = m / (1 - config.beta1**count), v / (1 - config.beta2**count)
        decay = config.weight_decay if p.ndim - (part == "layers") > 1 else 0
        after = p - config.learning_rate * (mean / (np.sqrt(square) + config.eps) + decay * p)
        return tuple(np.float32(x) for x in (after, m, v))

    trees = params, state["m"], state["v"], gradients
    updates = {part: jax.tree.map(partial(update, part), *(tree[part] for tree in trees)) for part in params}
    params, m, v = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), updates)
    return params, {"m": m, "v": v, "count": np.int32(count)}, norm


def draw_state(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    """Parameters, and moments as after several updates: no root of a second moment is as small as a rounding error."""
    shapes = params_of(case)
    params = draw_leaves(rng, shapes, rng.uniform(0.2, 0.4))
    v = jax.tree.map(lambda s: rng.uniform(0.5, 2, s.shape).astype(np.float32) * np.float32(1e-3), shapes)
    state = {"m": draw_leaves(rng, shapes, 0.02), "v": v, "count": np.int32(case.sizes.count)}
    return {"params": params, "state": state}


def draw_adamw(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    return {**draw_state(rng, case), "gradients": draw_leaves(rng, params_of(case), rng.uniform(0.05, 0.1))}


def draw_step(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    rows = case.sizes.rows * devices_of(case)
    return {**draw_state(rng, case), "batch": draw_batches(rng, case.sizes, rows, case.sizes.steps)}


def adamw_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    params, state, norm = adamw(inputs["params"], inputs["state"], inputs["gradients"], case)
    return {"values": results(params, state, norm, case)}


def results(params: Any, state: Any, norm: Any, case: Case[StepSizes]) -> dict[str, Any]:
    """The results in the form in which the wrapper returns them."""
    moments = {name: of_parts(state[name], case) for name in MOMENTS}
    state = {**moments, "count": on_each(state["count"], case)}
    return {"params": on_each(params, case), "state": state, "norm": on_each(norm, case)}


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """Steps on one device, on all rows at once, with the gradients of all steps added up."""
    params, state, losses, norms, all_gradients = inputs["params"], inputs["state"], [], [], []
    for number in range(case.sizes.steps):
        batch = jax.tree.map(lambda rows, i=number: rows[i], inputs["batch"])
        loss, gradients = jax.tree.map(np.asarray, loss_and_gradients(case.sizes.model)(params, batch))
        params, state, norm = adamw(params, state, gradients, case)
        losses, norms, all_gradients = [*losses, loss], [*norms, norm], [*all_gradients, gradients]
    values = results(params, state, np.stack(norms), case) | {"loss": on_each(np.stack(losses), case)}
    return {"values": values, "gradients": of_parts(jax.tree.map(lambda *g: np.sum(g, 0), *all_gradients), case)}


def split_and_whole(e: Evidence) -> tuple[int, int]:
    """Bytes of the parameters that are split, and of those that stay whole."""
    moments = [leaf for leaf in e.inputs if leaf.name.startswith("state/m/")]
    split = sum(4 * math.prod(leaf.shape) for leaf in moments if any(leaf.spec))
    return split, sum(4 * math.prod(leaf.shape) for leaf in moments) - split


def one_way(e: Evidence) -> float:
    """(n-1)/n of the split leaves: what a device sends in an all-gather or a reduce-scatter of them, in all steps."""
    n = devices_of(e.case)
    return e.case.sizes.steps * (n - 1) / n * split_and_whole(e)[0]


def sent_facts(evidence: list[Evidence], scatters: Callable[[Evidence], int], numbers: int, whole: bool) -> list[Fact]:
    """Facts about bytes: in each step ``scatters`` reduce-scatters, an all-gather, all-reduces of ``numbers`` scalars.

    With ``whole``, the gradients of leaves that stay whole are all-reduced as well.
    """

    def reduced(e: Evidence) -> float:
        size = 4 * numbers + (split_and_whole(e)[1] if whole else 0)
        return e.case.sizes.steps * all_reduce_bytes(devices_of(e.case), size)

    kinds = ("all_gather", "all_reduce", *(["reduce_scatter"] if whole else []))
    traffic_facts = [
        byte_facts.bytes_sent("all-gather bytes", evidence, "all_gather", one_way, axes=axes_of),
        byte_facts.bytes_sent("all-reduce bytes", evidence, "all_reduce", reduced),
        byte_facts.only_collectives("other collectives", evidence, kinds),
    ]
    if whole:
        scattered = byte_facts.bytes_sent(
            "reduce-scatter bytes",
            evidence,
            "reduce_scatter",
            lambda e: scatters(e) * one_way(e),
            hint="How many times is each element of a gradient sent?",
        )
        traffic_facts.insert(0, scattered)
    return traffic_facts


UPDATE = "The gradients are right, so look at the update: the clipping, the two corrections, the decay. "
NORM = "Is it the mean over the rows of all devices, for every leaf? "


def sharded_adamw_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.parts_match("values", evidence.cases, _PARTS, weight=2),
        *sent_facts(evidence.cases, lambda _: 0, 1, whole=False),
    ]


# In the order in which the update computes them, so that the first one that is wrong is the most informative.
_PARTS = {
    "values/norm": "Which devices' parts does the norm include, and is it taken before or after clipping? ",
    "values/state/count": (
        "The norm is right. How many updates have been made, this one included, and do the corrections use that "
        "number? "
    ),
    "values/state/m": (
        "Norm and count are right. Which factor scales the gradient, for which leaves, and is anything else added to "
        "it? "
    ),
    "values/state/v": "Norm, count and the other moment are right. What is this one a mean of? ",
    "values/params": (
        "Norm and state are right. If all leaves are wrong, how many updates have been made by now, and what is `eps` "
        "added to? If only some are, which of them decay, and by how much? "
    ),
}


# The next best version of the second stage holds another stack of parts.
TEMPORARIES_1, TEMPORARIES_2 = 2, 1.2


def zero1_step_facts(evidence: TaskEvidence) -> list[Fact]:
    too_much = "Which arrays are whole at that moment, although parts would do?"
    return [
        *facts.values_and_gradients(evidence.cases, UPDATE, NORM, step=True),
        limits.temporaries_within(evidence, TEMPORARIES_1, too_much, weight=2),
        *sent_facts(evidence.programs, lambda _: 1, 2, whole=True),
    ]


def _whole_stacks(e: Evidence) -> bool:
    """Return True if a temporary at the peak is larger than any part of the state."""
    parts = [leaf.local_bytes(e.case.mesh) for leaf in e.inputs if leaf.name.startswith("state/")]
    return any(alive.bytes > max(parts) for alive in e.memory.alive)


def zero2_step_facts(evidence: TaskEvidence) -> list[Fact]:
    too_much = "Which layers' gradients are whole at that moment, and how soon could they be scattered?"
    if evidence.at_scale and not _whole_stacks(evidence.at_scale):
        too_much = (
            "No stack of whole gradients is live then: is there a second stack of parts? A loop updates its carry in "
            "place, but stacks its outputs in a new array."
        )
    return [
        *facts.values_and_gradients(evidence.cases, UPDATE, NORM, step=True),
        limits.temporaries_within(evidence, TEMPORARIES_2, too_much, weight=4),
        *sent_facts(evidence.programs, lambda e: e.case.sizes.num_microbatches, 2, whole=True),
    ]


# As many layers as the realistic size has: a program that is written layer by layer must be the same at both sizes.
_MLP = StepSizes(width=16, hidden=32, num_layers=12, features=8, rows=8, num_microbatches=4)
_TRANSFORMER = StepSizes(width=16, hidden=32, num_layers=2, vocab=32, seq=8, rows=6, num_microbatches=3, clip=100.0)
# Three devices divide one dim of most kernels, and not always the largest.
_MODEL: dict[str, Any] = {"width": 12, "hidden": 20, "num_layers": 3, "features": 10}
_THIRDS = StepSizes(**_MODEL, rows=4, num_microbatches=2, count=0, beta1=0.7, beta2=0.95, eps=0.03)


_LARGE = {"width": 4096, "hidden": 16384, "features": 2048, "min_size": 16384}
# The same leaves are split, along the same dims, as at both sizes.
_STRETCHED = {"features": 64, "width": 128, "hidden": 1024, "min_size": 1024}


def _cases(three: StepSizes, two: StepSizes) -> tuple[Case[StepSizes], ...]:
    return (
        Case.on({"data": 8}, _MLP, quick=True),
        Case.on({"pipe": 3, "tensor": 2}, three, quick=True),
        Case.on({"node": 4, "data": 2}, two.replace(every_axis=True), "over both"),
        Case.on({"data": 1}, _MLP.replace(num_microbatches=1, rows=4)),
    )


def _unseen(rng: np.random.Generator) -> Case[StepSizes]:
    sizes = unseen_model(rng)
    return unseen_case(
        rng,
        StepSizes(
            **sizes,
            num_microbatches=int(rng.choice([2, 6])),
            count=int(rng.integers(4)),
            every_axis=bool(rng.integers(2)),
            learning_rate=float(rng.choice([0.03, 0.07])),
            beta1=float(rng.choice([0.6, 0.75])),
            beta2=float(rng.choice([0.85, 0.95])),
            eps=float(rng.choice([0.005, 0.02])),
            weight_decay=float(rng.choice([0.3, 0.6])),
            clip=float(rng.choice([0.2, 100])),
        ),
        (3,),
        (6,),
        (3, 2),
        (2, 2),
    )


def _task(name: str, **settings: Any) -> Task:
    """A task with a model's leaves; clipping may be a branch on the norm."""
    return Task(
        wrapping=WRAPPINGS[name],
        unseen=_unseen,
        given=lambda case: encode_specs(specs_of(case)),
        data_branches=True,
        **settings,
    )


SHARDED_ADAMW = _task(
    "sharded_adamw",
    points=3,
    core_facts=("all-gather bytes",),
    cases=_cases(_THIRDS, _TRANSFORMER),
    draw=draw_adamw,
    oracle=adamw_oracle,
    facts=sharded_adamw_facts,
    naive_memory="gathers_moments_and_gradients",
)

ZERO1_STEP = _task(
    "zero1_step",
    points=2,
    core_facts=("all-gather bytes", "all-reduce bytes", "live temporaries"),
    cases=_cases(_THIRDS.replace(steps=3), _TRANSFORMER),
    draw=draw_step,
    oracle=step_oracle,
    facts=zero1_step_facts,
    # So few rows that most of what is live is the gradient.
    at_scale=(Case.on({"data": 8}, _MLP.replace(**_LARGE, rows=64), "width 4096"), "data=8"),
    stretches=({"rows": 64}, _STRETCHED),
    naive_memory="updates_whole_leaves",
)

ZERO2_STEP = _task(
    "zero2_step",
    points=4,
    core_facts=("live temporaries", "reduce-scatter bytes"),
    cases=_cases(_THIRDS.replace(steps=3), _TRANSFORMER),
    draw=draw_step,
    oracle=step_oracle,
    facts=zero2_step_facts,
    at_scale=(Case.on({"data": 8}, _MLP.replace(**_LARGE, rows=1024), "width 4096"), "data=8"),
    stretches=({"rows": 1024}, _STRETCHED),
    naive_memory="keeps_whole_gradients_between_microbatches",
)
