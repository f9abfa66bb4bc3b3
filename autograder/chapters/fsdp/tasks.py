"""Grading of the functions of ``fsdp``: layouts, results on one device, and permitted communication."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import all_reduce_bytes, split_spec
from autograder.chapters.draws import (
    ODD,
    compile_oracle,
    draw_batch,
    draw_leaves,
    draw_masked,
    draw_rate,
    flows_back,
    meshes,
    sgd_on_one_device,
    stacked,
    unseen_case,
    unseen_model,
)
from autograder.chapters.fsdp.wrapping import (
    Axes,
    Leaves,
    StepSizes,
    holders_of,
    hybrid_axes,
    leaf_shapes,
    rows_of,
    step_axes,
)
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.byte_facts import resident_bytes
from autograder.contract.case import ModelSizes
from autograder.contract.case_builders import axis_of, axis_size, build_model, encode_specs, params_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.model import full_loss
from course.program import Leaf

WRAPPINGS = wrappings("fsdp")


def specs_of(case: Case[StepSizes]) -> Any:
    """Specs of the model's parameters; the dim that stacks layers is never split."""

    def split(part: str, tree: Any) -> Any:
        return jax.tree.map(lambda s: _rule(case, s.shape, skip=int(part == "layers")), tree)

    return {part: split(part, tree) for part, tree in params_of(case).items()}


def _rule(case: Case[Any], shape: tuple[int, ...], skip: int = 0) -> P:
    return split_spec(shape, axis_size(case), case.sizes.min_size, axis_of(case), skip)


def _leaf_specs(case: Case[Leaves]) -> Any:
    return jax.tree.map(lambda s: _rule(case, s.shape), leaf_shapes(case))


def mean_or_own(stacked: Any, specs: Any) -> Any:
    """The part of all gradients that a device keeps: its part of their mean, or its own if the leaf is whole."""
    return jax.tree.map(lambda g, spec: np.mean(g, 0, np.float64).astype(g.dtype) if len(spec) else g, stacked, specs)


def whole_and_split(e: Evidence) -> tuple[list[Leaf], list[Leaf]]:
    """The shards of whole leaves, and those of split leaves."""
    leaves = [leaf for leaf in e.inputs if leaf.name.startswith("shards/")]
    return [leaf for leaf in leaves if not any(leaf.spec)], [leaf for leaf in leaves if any(leaf.spec)]


def bytes_of(leaves: list[Leaf]) -> int:
    """Total bytes of these float32 leaves, unsplit."""
    return sum(4 * math.prod(leaf.shape) for leaf in leaves)


def ring_bytes(e: Evidence) -> float:
    """(n-1)/n of the bytes of each split leaf: a device's traffic in an all-gather or a reduce-scatter of them."""
    n = axis_size(e.case)
    return getattr(e.case.sizes, "steps", 1) * (n - 1) / n * bytes_of(whole_and_split(e)[1])


def _both_ways(
    evidence: list[Evidence],
    times: tuple[float, float] = (1, 1),
    allowed: tuple[str, ...] = (),
    over: Callable[[Case[Any]], str] | None = None,
) -> Any:
    """Facts about bytes of all-gathers (``times`` those of all parts) and reduce-scatters, and other collectives."""
    axes: Any = lambda case: (axis_of(case),)  # noqa: E731
    kinds = ("all_gather", "reduce_scatter")
    return [
        byte_facts.bytes_sent("all-gather bytes", evidence, "all_gather", ring_bytes, times=times, axes=axes),
        byte_facts.bytes_sent("reduce-scatter bytes", evidence, "reduce_scatter", ring_bytes, axes=axes),
        byte_facts.only_collectives("other collectives", evidence, (*kinds, *allowed), over),
    ]


# shard_params and gather_params: a tree with every kind of leaf, split and reassembled.


def shard_params_facts(evidence: TaskEvidence) -> list[Fact]:
    def resident(e: Evidence, split: bool = True) -> int:
        specs = [_rule(e.case, leaf.shape) if split else P() for leaf in e.inputs]
        return sum(resident_bytes(leaf.shape, s, e.case.mesh) for leaf, s in zip(e.inputs, specs, strict=True))

    cases = evidence.cases
    return [
        facts.arrays_match("values", cases, "values", "Joined together, the parts must equal the leaf. "),
        facts.specs_match(
            cases,
            lambda e: [_rule(e.case, leaf.shape) for leaf in e.inputs],
            lambda case: f"axis_name {axis_of(case)!r}, min_size {case.sizes.min_size}",
        ),
        byte_facts.state_bytes(cases, resident, lambda e: resident(e, split=False)),
        byte_facts.only_collectives("communication", cases, ()),
    ]


KEPT = (
    "For a split leaf, a device keeps its part of the mean over devices; for a whole one, it keeps its own gradient "
    "unchanged: which kind is this one? "
)


def gather_params_oracle(inputs: dict[str, Any], case: Case[Leaves]) -> dict[str, Any]:
    """Whole leaves on every device; the mean of the cotangents over devices, or each device's own."""
    return {
        "values": jax.tree.map(lambda a: np.repeat(a[None], axis_size(case), 0), inputs["shards"]),
        "gradients": mean_or_own(inputs["upstream"], _leaf_specs(case)),
    }


def gather_params_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.arrays_match("values", evidence.cases, "values"),
        facts.arrays_match("gradients", evidence.cases, "gradients", KEPT, weight=3),
        *_both_ways(evidence.cases),
    ]


def _unseen_leaves(rng: np.random.Generator) -> Case[Leaves]:
    unit, low = int(rng.choice([12, 24, 40])), int(rng.choice([32, 96, 128]))
    return unseen_case(rng, Leaves(unit=unit, min_size=low, turn=int(rng.integers(1, 8))), *ODD)


SHARD_PARAMS = Task(
    wrapping=WRAPPINGS["shard_params"],
    points=2,
    core_facts=("split dims",),
    cases=meshes(Leaves(), three=Leaves(unit=12, min_size=40)),
    unseen=_unseen_leaves,
    draw=lambda rng, case: {"params": draw_leaves(rng, leaf_shapes(case))},
    oracle=lambda inputs, case: {"values": inputs["params"]},
    facts=shard_params_facts,
    naive_memory="keeps_everything",
)

GATHER_PARAMS = Task(
    wrapping=WRAPPINGS["gather_params"],
    points=3,
    core_facts=("reduce-scatter bytes", "other collectives"),
    cases=meshes(Leaves(), three=Leaves(unit=12, min_size=40)),
    unseen=_unseen_leaves,
    given=lambda case: encode_specs(_leaf_specs(case)),
    draw=lambda rng, case: draw_leaves(rng, GATHER_PARAMS.input_shapes(case)),
    oracle=gather_params_oracle,
    facts=gather_params_facts,
    naive_memory="sums_padded_parts",
)

# fsdp_loss: a model's loss and gradient, with one whole layer at a time.

TOO_MUCH = "Which layers' weights are whole at that moment? Which of them could be gathered later, or gathered again?"


def draw_fsdp_loss(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    return {
        "shards": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)),
        "batch": draw_batch(rng, case.sizes, rows_of(case, step_axes(case))),
        # The same on every device, as for a mean over devices: averaging the gradient first is right too.
        "upstream": np.repeat(flows_back(rng, 1), axis_size(case)),
    }


def fsdp_loss_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """Loss and gradient of each device's rows on one device; sharded leaves then get the mean over devices."""
    rows = jax.tree.map(lambda a: a.reshape(axis_size(case), -1, *a.shape[1:]), inputs["batch"])
    run = _loss_of_each_device(case.sizes.model)
    losses, gradients = jax.tree.map(np.asarray, run(inputs["shards"], rows, inputs["upstream"]))
    return {"values": losses, "gradients": mean_or_own(gradients, specs_of(case))}


@lru_cache(maxsize=32)
def _loss_of_each_device(sizes: ModelSizes) -> Any:
    def loss_and_gradient(params, batch, upstream):
        loss, back = jax.vjp(lambda params: full_loss(build_model(sizes), params, batch), params)
        return loss, *back(upstream)

    return compile_oracle(jax.vmap(loss_and_gradient, in_axes=(None, 0, 0)))


def fsdp_loss_facts(evidence: TaskEvidence) -> list[Fact]:
    slow = "What is computed or read more often than necessary?"
    exposed = "The next function, `fsdp_train_step`, gathers one layer while another computes."
    return [
        *facts.values_and_gradients(evidence.cases),
        # A loop that adds to the stacked gradient in its carry has another copy of a device's parts, and takes 1.16
        # times as much; with one more whole layer, 1.42; with the products of every layer, 1.32.
        limits.temporaries_within(evidence, 1.25, TOO_MUCH, weight=4),
        time_limits.time_within(evidence, 1.15, slow),
        time_limits.exposed_within(evidence, 1.15, exposed, weight=0),
        *_both_ways(evidence.programs, (1, 2)),
    ]


# Four rows per device: a program that halves them must not get a single row, which JAX lowers differently.
_MLP = StepSizes(width=16, hidden=32, num_layers=3, features=8, rows=4)
_TRANSFORMER = StepSizes(width=16, hidden=32, num_layers=2, vocab=32, seq=8, rows=4)
# Three devices divide one dim of most kernels, which is not always the largest.
_THIRDS = StepSizes(width=12, hidden=20, num_layers=3, features=10, rows=4)
_LARGE = {"width": 4096, "hidden": 16384, "features": 2048, "rows": 2048, "min_size": 16384}


def _unseen_loss(rng: np.random.Generator) -> Case[StepSizes]:
    return unseen_case(rng, StepSizes(**unseen_model(rng), min_size=int(rng.choice([32, 100, 160]))), *ODD)


FSDP_LOSS = Task(
    wrapping=WRAPPINGS["fsdp_loss"],
    points=5,
    core_facts=("live temporaries",),
    cases=meshes(_MLP, three=_THIRDS, two=_TRANSFORMER),
    unseen=_unseen_loss,
    given=lambda case: encode_specs(specs_of(case)),
    draw=draw_fsdp_loss,
    oracle=fsdp_loss_oracle,
    facts=fsdp_loss_facts,
    at_scale=(Case.on({"data": 8}, _MLP.replace(**_LARGE), "width 4096"), "data=8"),
    # The same leaves are split, along the same dims, at both sizes.
    stretches=({"rows": 2048}, {"features": 64, "width": 512, "hidden": 4096, "min_size": 4097}),
    naive_memory="keeps_gathered_weights",
    naive_time="computes_a_few_rows_at_a_time",
)

# fsdp_train_step and hybrid_shard_step: the learning rate is drawn and large, so that an update is about as large as
# the parameters: the subtracted value, divided by it, is the raw gradient, and a wrong scale cannot hide.


def unseen_step(rng: np.random.Generator) -> StepSizes:
    """Unseen sizes for one step or two."""
    model = unseen_model(rng)
    # The gradient is read off the update, which must not be small compared with the parameter, as a Transformer's is.
    steps, largest = (1, 3.0) if "seq" in model else (int(rng.choice([1, 2])), 0.9)
    scale = float(rng.uniform(2 / 3, 1)) * largest / steps
    return StepSizes(**model, min_size=int(rng.choice([32, 100, 160])), steps=steps, rate_scale=scale)


def draw_step(rng: np.random.Generator, case: Case[StepSizes], axes: Axes, masked: bool = False) -> dict[str, Any]:
    """Parameters, a batch for every step, and a learning rate."""
    rows, devices = rows_of(case, axes), axis_size(case)
    draw = partial(draw_masked, devices=devices) if masked else draw_batch
    return {
        "shards": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)),
        "batch": stacked(lambda: draw(rng, case.sizes, rows), case.sizes.steps),
        "learning_rate": draw_rate(rng, case.sizes.rate_scale),
    }


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes], axes: Axes) -> dict[str, Any]:
    """The steps on one device, with all rows; every device that holds a leaf gets the same values."""
    run = sgd_on_one_device(case.sizes.model)
    after, losses, gradients = run(inputs["shards"], (inputs["batch"],), inputs["learning_rate"])

    def copies(leaf, spec):
        holders = holders_of(spec, axes)
        return np.repeat(leaf[None], math.prod(case.mesh[axis] for axis in holders), 0) if holders else leaf

    after, gradients = (jax.tree.map(copies, tree, specs_of(case)) for tree in (after, gradients))
    return {"values": {"loss": copies(losses, P()), "shards": after}, "gradients": gradients}


def fsdp_train_step_facts(evidence: TaskEvidence) -> list[Fact]:
    slow = (
        "Look at the timeline: which transfer does the device wait for, forward and backward, and what could it "
        "compute in the meantime?"
    )
    exposed = "The first gather and the end of the last reduce-scatter have nothing to hide behind; the others do."

    def averaged(e: Evidence) -> float:
        """Bytes of all-reduces: in each step, the gradient of every whole leaf, the loss, and the valid count."""
        size = bytes_of(whole_and_split(e)[0]) + 8
        return e.case.sizes.steps * all_reduce_bytes(axis_size(e.case), size)

    weighted = "A device's rows may all be padding: what does it add to the mean over all unmasked rows or tokens? "
    each = f"{weighted}Is this leaf split or whole, and where is it averaged? "
    return [
        *facts.values_and_gradients(evidence.cases, weighted, each, step=True),
        # A step that carries each gradient, to overlap its reduce-scatter with the next layer, copies it and takes 1.10
        # times as long; gathering ahead in the forward pass only, 1.23. More rows narrow the gap.
        time_limits.time_within(evidence, 1.18, slow, weight=4),
        # A step that updates each layer in the backward loop holds old and new parts, and takes 1.09 times as much.
        limits.temporaries_within(evidence, 1.2, TOO_MUCH, weight=2),
        time_limits.exposed_within(evidence, 1.15, exposed, weight=0),
        byte_facts.bytes_sent("all-reduce bytes", evidence.programs, "all_reduce", averaged),
        *_both_ways(evidence.programs, (1, 2), ("all_reduce",)),
    ]


# As many layers as the realistic size: a program written layer by layer must be the same at both sizes.
_DEEP = _MLP.replace(num_layers=8)
# Learning rates large enough to read gradients off the updates, and small enough not to amplify rounding errors.
_THREE_STEPS = _THIRDS.replace(steps=3, rate_scale=0.5)
FSDP_TRAIN_STEP = Task(
    wrapping=WRAPPINGS["fsdp_train_step"],
    points=5,
    core_facts=("predicted time", "live temporaries"),
    cases=meshes(_DEEP, three=_THREE_STEPS, two=_TRANSFORMER.replace(rate_scale=2.0)),
    unseen=lambda rng: unseen_case(rng, unseen_step(rng), *ODD),
    given=lambda case: encode_specs(specs_of(case)),
    draw=lambda rng, case: draw_step(rng, case, step_axes(case), masked=True),
    oracle=lambda inputs, case: step_oracle(inputs, case, step_axes(case)),
    facts=fsdp_train_step_facts,
    at_scale=(Case.on({"data": 8}, _DEEP.replace(**_LARGE | {"rows": 1792}), "8 layers of width 4096"), "data=8"),
    # The same leaves are split, along the same dims, at both sizes.
    stretches=({"rows": 1792}, {"features": 64, "width": 256, "hidden": 2048, "min_size": 2048}),
    naive_memory="gathers_everything_first",
    naive_time="gathers_when_it_computes",
)


def _averaged_inside(e: Evidence, most: bool) -> float:
    """The least, or the most, bytes for averaging whole leaves and the loss: inside a node, or over all devices."""
    inside, across = (e.case.mesh[axis] for axis in hybrid_axes(e.case))
    n = inside * across if most else inside
    return e.case.sizes.steps * all_reduce_bytes(n, bytes_of(whole_and_split(e)[0]) + 4)


def _between_nodes(e: Evidence, most: bool) -> float:
    """The least, or the most, bytes that a device sends across nodes: an all-reduce of its parts of the gradient.

    Leaves that stay whole, and the loss, are all-reduced over all devices at once, or inside a node and then across.
    """
    inside, across = (e.case.mesh[axis] for axis in hybrid_axes(e.case))
    if across == 1:
        return 0.0
    whole, split = map(bytes_of, whole_and_split(e))
    of_whole = all_reduce_bytes(inside * across, whole + 4) if most else all_reduce_bytes(across, whole)
    return e.case.sizes.steps * (all_reduce_bytes(across, split / inside) + of_whole)


def hybrid_shard_step_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients_hint = "Is this leaf split or whole, and along which axes do devices hold gradients of the same entries? "

    def node(case: Case[Any]) -> str:
        return hybrid_axes(case)[0]

    return [
        *facts.values_and_gradients(evidence.cases, gradients=gradients_hint, step=True),
        *_both_ways(evidence.cases, (1, 2), ("all_reduce",), over=node),
        byte_facts.bytes_sent(
            "all-reduce bytes",
            evidence.cases,
            "all_reduce",
            partial(_averaged_inside, most=True),
            least=partial(_averaged_inside, most=False),
            over=node,
            hint="Which gradients are already means over the node?",
        ),
        byte_facts.bytes_sent(
            "bytes between nodes",
            evidence.cases,
            None,
            partial(_between_nodes, most=True),
            least=partial(_between_nodes, most=False),
            over=lambda case: hybrid_axes(case)[1],
            hint="What is the least that nodes have to send each other?",
        ),
    ]


HYBRID_SHARD_STEP = Task(
    wrapping=WRAPPINGS["hybrid_shard_step"],
    points=3,
    core_facts=("bytes between nodes",),
    # Names and order of the axes vary by mesh; parameters are split over `data`, or over the first axis.
    cases=(
        Case.on({"replica": 2, "data": 4}, _MLP, quick=True),
        Case.on({"device": 3, "node": 2}, _THREE_STEPS, quick=True),
        Case.on({"replica": 1, "data": 8}, _TRANSFORMER.replace(rate_scale=2.0)),
        Case.on({"replica": 4, "data": 1}, _MLP),
    ),
    unseen=lambda rng: unseen_case(rng, unseen_step(rng), (4, 2), (2, 4), (2, 2), (2, 3), (3, 2)),
    given=lambda case: encode_specs(specs_of(case)),
    draw=lambda rng, case: draw_step(rng, case, hybrid_axes(case)),
    oracle=lambda inputs, case: step_oracle(inputs, case, hybrid_axes(case)),
    facts=hybrid_shard_step_facts,
    naive_memory="reduces_whole_gradients_between_nodes",
)
