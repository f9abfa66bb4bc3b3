"""Grading of the functions of ``zero``: layouts, results on one device, and permitted communication."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import all_reduce_bytes, split_spec
from autograder.chapters.draws import (
    ODD,
    draw_batches,
    draw_leaves,
    loss_and_gradients,
    meshes,
    unseen_case,
    unseen_model,
)
from autograder.chapters.zero.wrapping import (
    MOMENTS,
    NormLeaves,
    StateLeaves,
    StepSizes,
    axes_of,
    axis_given,
    config_of,
    devices_of,
    leaf_shapes,
    of_leaves,
)
from autograder.contract import byte_facts, facts, limits
from autograder.contract.byte_facts import resident_bytes
from autograder.contract.case_builders import encode_specs, params_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.mesh import mesh_text

WRAPPINGS = wrappings("zero")

# shard_optimizer_state: zeros, and how they are split.


def _split_rule(case: Case[StateLeaves], shape: tuple[int, ...]) -> P:
    return split_spec(shape, devices_of(case), case.sizes.min_size, axis_given(case))


def shard_optimizer_state_oracle(inputs: dict[str, Any], case: Case[StateLeaves]) -> dict[str, Any]:
    moments = {name: jax.tree.map(np.zeros_like, inputs["params"]) for name in MOMENTS}
    return {"values": {**moments, "count": np.zeros((), np.int32)}}


def shard_optimizer_state_facts(evidence: TaskEvidence) -> list[Fact]:
    def rules(e: Evidence) -> list[P]:
        return [P(), *2 * [_split_rule(e.case, leaf.shape) for leaf in e.inputs]]

    def resident(e: Evidence, split: bool = True) -> int:
        shapes = [(), *2 * [leaf.shape for leaf in e.inputs]]
        specs = rules(e) if split else [P()] * len(shapes)
        return sum(resident_bytes(s, spec, e.case.mesh) for s, spec in zip(shapes, specs, strict=True))

    def given(case: Case[Any]) -> str:
        return f"axis_name {axis_given(case)!r}, min_size {case.sizes.min_size}"

    cases = evidence.cases
    return [
        facts.arrays_match("values", cases, "values", "What does the optimizer know before the first update? "),
        facts.specs_match(cases, rules, given),
        byte_facts.state_bytes(cases, resident, lambda e: resident(e, split=False)),
        byte_facts.only_collectives("communication", cases, ()),
    ]


def _unseen_leaves(rng: np.random.Generator) -> Case[StateLeaves]:
    unit, low = int(rng.choice([12, 24, 40])), int(rng.choice([32, 96, 128]))
    turn, every = int(rng.integers(1, 8)), bool(rng.integers(2))
    return unseen_case(rng, StateLeaves(unit=unit, min_size=low, turn=turn, every_axis=every), *ODD)


SHARD_OPTIMIZER_STATE = Task(
    wrapping=WRAPPINGS["shard_optimizer_state"],
    points=1,
    core_facts=("state bytes per device",),
    cases=(
        *meshes(StateLeaves(), three=StateLeaves(unit=12, min_size=40)),
        Case("node=4 x data=2, over both", {"node": 4, "data": 2}, StateLeaves(every_axis=True)),
    ),
    unseen=_unseen_leaves,
    draw=lambda rng, case: {"params": draw_leaves(rng, leaf_shapes(case))},
    oracle=shard_optimizer_state_oracle,
    facts=shard_optimizer_state_facts,
    naive_memory="keeps_whole_moments",
)

# global_norm: leaves that are whole, and split over one axis, another, or both.


def _groups(case: Case[NormLeaves]) -> list[int]:
    """For each set of axes that leaves are split over, how many devices it has; sets of one device left out."""
    specs = jax.tree.leaves(of_leaves(case, lambda _, spec: frozenset(jax.tree.leaves(tuple(spec)))))
    sizes = [math.prod(case.mesh[axis] for axis in axes) for axes in set(specs)]
    return [size for size in sizes if size > 1]


def global_norm_oracle(inputs: dict[str, Any], case: Case[NormLeaves]) -> dict[str, Any]:
    return {"values": np.repeat(norm_of(inputs["tree"]), math.prod(case.mesh.values()))}


def norm_of(tree: Any) -> np.float32:
    """The Euclidean norm of all leaves together."""
    return np.float32(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))


def _norm_question(cases: list[Evidence]) -> str:
    """What to ask about the wrong norms of the first case that has some: nothing reduced, too little, or too much."""
    for e in cases:
        off = e.measured["values"] / e.expected["values"] - 1
        if not np.all(np.abs(off) <= facts.TOLERANCE):
            if not e.costs.collectives:
                return "No device knows the parts of the others: over which axes is each leaf's sum added up?"
            if np.ptp(off) > facts.TOLERANCE:
                return "Devices disagree: of which leaves are parts missing? An entry of a spec may name several axes."
            if np.all(off > 0):
                return (
                    "It is too large: which leaf is added up over devices that have the same part of it? "
                    "And is the root taken once, of the sum of all squares?"
                )
    return "How often does each element of each leaf count?"


def global_norm_facts(evidence: TaskEvidence) -> list[Fact]:
    cases, once = evidence.cases, "One for each set of axes that leaves are split over."
    return [
        facts.arrays_match("values", cases, "values", _norm_question(cases), weight=2),
        byte_facts.times_sent("all-reduces", cases, "all_reduce", lambda e: len(_groups(e.case)), once, fewer=True),
        byte_facts.bytes_sent(
            "all-reduce bytes",
            cases,
            "all_reduce",
            lambda e: sum(all_reduce_bytes(n, 4) for n in _groups(e.case)),
            times=(0, 1),
        ),
        byte_facts.only_collectives("other collectives", cases, ("all_reduce",)),
    ]


def _norm_case(mesh: dict[str, int], unit: int = 16, quick: bool = False) -> Case[NormLeaves]:
    return Case(mesh_text(mesh), mesh, NormLeaves(unit=unit), quick)


GLOBAL_NORM = Task(
    wrapping=WRAPPINGS["global_norm"],
    points=2,
    core_facts=("all-reduce bytes", "other collectives"),
    cases=(
        _norm_case({"data": 4, "tensor": 2}, quick=True),
        _norm_case({"pipe": 3, "tensor": 2}, 12, quick=True),
        _norm_case({"data": 8}),
        _norm_case({"data": 2, "tensor": 1}),
        _norm_case({"data": 1}),
    ),
    unseen=lambda rng: unseen_case(
        rng, NormLeaves(unit=int(rng.choice([8, 24])), turn=int(rng.integers(1, 8))), (2, 4), (2, 2), (3, 2), (5,)
    ),
    draw=lambda rng, case: draw_leaves(rng, GLOBAL_NORM.input_shapes(case)),
    oracle=global_norm_oracle,
    facts=global_norm_facts,
    naive_memory="gathers_every_leaf",
)

# sharded_adamw and the steps: AdamW behind clipping, on one device.


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
    """An update of AdamW behind clipping by the global norm, in float64: parameters, state and norm."""
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
    found = {part: jax.tree.map(partial(update, part), *(tree[part] for tree in trees)) for part in params}
    params, m, v = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), found)
    return params, {"m": m, "v": v, "count": np.int32(count)}, norm


def draw_state(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    """Parameters, and moments as of several updates: no root of a square is so small that it is a rounding error."""
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
    """As the wrapper returns them."""
    moments = {name: of_parts(state[name], case) for name in MOMENTS}
    state = {**moments, "count": on_each(state["count"], case)}
    return {"params": on_each(params, case), "state": state, "norm": on_each(norm, case)}


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """Steps on one device, on all rows at once; gradients of all steps added up."""
    params, state, losses, norms, every = inputs["params"], inputs["state"], [], [], []
    for number in range(case.sizes.steps):
        batch = jax.tree.map(lambda rows, i=number: rows[i], inputs["batch"])
        loss, gradients = jax.tree.map(np.asarray, loss_and_gradients(case.sizes.model)(params, batch))
        params, state, norm = adamw(params, state, gradients, case)
        losses, norms, every = [*losses, loss], [*norms, norm], [*every, gradients]
    values = results(params, state, np.stack(norms), case) | {"loss": on_each(np.stack(losses), case)}
    return {"values": values, "gradients": of_parts(jax.tree.map(lambda *g: np.sum(g, 0), *every), case)}


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
    """What goes where: ``scatters`` reduce-scatters a step, one all-gather, and all-reduces of ``numbers`` scalars.

    With ``whole``, the gradients of leaves that stay whole are all-reduced as well.
    """

    def reduced(e: Evidence) -> float:
        size = 4 * numbers + (split_and_whole(e)[1] if whole else 0)
        return e.case.sizes.steps * all_reduce_bytes(devices_of(e.case), size)

    kinds = ("all_gather", "all_reduce", *(["reduce_scatter"] if whole else []))
    found = [
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
            hint="How often does each element of a gradient travel?",
        )
        found.insert(0, scattered)
    return found


UPDATE = "The gradients are right, so look at the update: the clipping, the two corrections, the decay. "
NORM = "Is it the mean over the rows of all devices, of each leaf? "


def sharded_adamw_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.parts_match("values", evidence.cases, _PARTS, weight=2),
        *sent_facts(evidence.cases, lambda _: 0, 1, whole=False),
    ]


# In the order in which the update computes them, so that the first that is wrong says most.
_PARTS = {
    "values/norm": "Of which devices' parts is it the norm, and before or after clipping? ",
    "values/state/count": (
        "The norm is right. How many updates have been made, this one included, and do the corrections use that "
        "number? "
    ),
    "values/state/m": (
        "Norm and count are right. Which factor scales the gradient, for which leaves, and does anything else enter "
        "it? "
    ),
    "values/state/v": "Norm, count and the other moment are right. Of what is this one a mean? ",
    "values/params": (
        "Norm and state are right. Where all leaves are wrong, how many updates have been made by now, and what is "
        "`eps` added to? Where some are, which of them decay, and by how much? "
    ),
}


# The next best version of the second stage holds another stack of parts.
TEMPORARIES_1, TEMPORARIES_2 = 2, 1.2


def zero1_step_facts(evidence: TaskEvidence) -> list[Fact]:
    too_much = "Which of the arrays that are whole at that moment could be parts?"
    return [
        *facts.values_and_gradients(evidence.cases, UPDATE, NORM, step=True),
        limits.temporaries_within(evidence, TEMPORARIES_1, too_much, weight=2),
        *sent_facts(evidence.programs, lambda _: 1, 2, whole=True),
    ]


def _whole_stacks(e: Evidence) -> bool:
    """Whether a temporary at the peak is larger than any part of the state."""
    parts = [leaf.local_bytes(e.case.mesh) for leaf in e.inputs if leaf.name.startswith("state/")]
    return any(alive.bytes > max(parts) for alive in e.memory.alive)


def zero2_step_facts(evidence: TaskEvidence) -> list[Fact]:
    too_much = "Whose gradient is whole at that moment, and how soon could it be a part?"
    if evidence.at_scale and not _whole_stacks(evidence.at_scale):
        too_much = (
            "No stack of whole gradients lives then: is there a second stack of parts? A loop writes in place to what "
            "it carries, and stacks what it returns anew."
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
        Case("data=8", {"data": 8}, _MLP, quick=True),
        Case("pipe=3 x tensor=2", {"pipe": 3, "tensor": 2}, three, quick=True),
        Case("node=4 x data=2, over both", {"node": 4, "data": 2}, two.replace(every_axis=True)),
        Case("data=1", {"data": 1}, _MLP.replace(num_microbatches=1, rows=4)),
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


def _task(name: str, **how: Any) -> Task:
    return Task(wrapping=WRAPPINGS[name], unseen=_unseen, given=lambda case: encode_specs(specs_of(case)), **how)


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
    # So few rows that what lives is the gradient.
    at_scale=(Case("data=8, width 4096", {"data": 8}, _MLP.replace(**_LARGE, rows=64)), "data=8"),
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
    at_scale=(Case("data=8, width 4096", {"data": 8}, _MLP.replace(**_LARGE, rows=1024)), "data=8"),
    stretches=({"rows": 1024}, _STRETCHED),
    naive_memory="keeps_whole_gradients_between_microbatches",
)
