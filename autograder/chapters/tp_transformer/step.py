"""``tp_transformer_step``: SGD of a whole Transformer over ``data`` x ``tensor``, with rings for its activations.

The learning rate is drawn and large, so that an update is about as large as the parameters: the subtracted value,
divided by it, is the raw gradient, and a wrong scale cannot hide.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.draws import draw_batches, draw_keys, draw_leaves, draw_rate
from autograder.chapters.tp_transformer.tasks import (
    OF_THREE,
    SIZES,
    WRAPPINGS,
    activation_bytes,
    loss_and_gradient,
    of_model,
    ring_bytes,
    sums_bytes,
    unseen,
)
from autograder.chapters.tp_transformer.wrapping import Sizes, is_split, rows_of
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case_builders import groups_of, params_by_head, parts_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact

# Relative to a step whose activations are gathered and scattered in one piece.
EXPOSED = 0.4
MOVES = ("collective_permute", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast")


def draw(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    # Weights of wide layers are smaller, as from any initializer: otherwise scores would be so large that rounding
    # decides where attention looks.
    scale = 0.3 * min(1.0, (_RING.width / case.sizes.width) ** 0.5)
    return {
        "params": draw_leaves(rng, params_by_head(case), scale),
        "batch": draw_batches(rng, case.sizes, rows_of(case), case.sizes.steps),
        "key": draw_keys(rng),
        "learning_rate": draw_rate(rng, case.sizes.rate_scale),
    }


def oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """The steps on one device, group by group, and the mean over groups; every holder of a leaf gets the same."""
    groups, parts, rate = groups_of(case), parts_of(case), inputs["learning_rate"]
    run, key = loss_and_gradient(*of_model(case)), jax.random.wrap_key_data(inputs["key"])
    params, total, losses = inputs["params"], None, []
    for number in range(case.sizes.steps):
        batch = {name: rows[number].reshape(groups, -1, rows.shape[-1]) for name, rows in inputs["batch"].items()}
        own = jax.random.fold_in(key, number)
        results = [
            run(params, {name: rows[group] for name, rows in batch.items()}, jax.random.fold_in(own, group))
            for group in range(groups)
        ]
        loss, gradients = jax.tree.map(lambda *leaves: np.mean(leaves, 0, np.float64).astype(np.float32), *results)
        params = jax.tree.map(lambda leaf, g: leaf - rate * g, params, gradients)
        total = gradients if total is None else jax.tree.map(np.add, total, gradients)
        losses.append(loss)

    def copied(tree):
        def copies(leaf, split):
            by_group = np.repeat(leaf[None], groups, 0)
            return by_group if split else np.repeat(by_group[:, None], parts, 1)

        return jax.tree.map(copies, tree, is_split(tree))

    losses = np.repeat(np.stack(losses)[None], groups * parts, 0)
    return {"values": {"loss": losses, "params": copied(params)}, "gradients": copied(total)}


def _resident(case: Case[Sizes]) -> tuple[int, int]:
    """Bytes of split leaves on one device, and of whole ones."""
    sizes = {True: 0, False: 0}
    shapes = params_by_head(case)
    for leaf, split in zip(jax.tree.leaves(shapes), jax.tree.leaves(is_split(shapes)), strict=True):
        sizes[split] += 4 * int(np.prod(leaf.shape))
    return sizes[True] // parts_of(case), sizes[False]


def _apart(e: Evidence) -> float:
    """Bytes of all-reduces: whole leaves over the tensor axis, all and the loss over the others; sums of the loss."""
    groups, (split, whole) = groups_of(e.case), _resident(e.case)
    gradients = all_reduce_bytes(parts_of(e.case), whole) + all_reduce_bytes(groups, split + whole + 4)
    return e.case.sizes.steps * (gradients + sums_bytes(e.case))


def _together(e: Evidence) -> float:
    """The same with whole leaves over all devices at once, and the loss not counted."""
    groups, (split, whole) = groups_of(e.case), _resident(e.case)
    return e.case.sizes.steps * (all_reduce_bytes(groups * parts_of(e.case), whole) + all_reduce_bytes(groups, split))


def half_of_logits(case: Case[Sizes]) -> int:
    """Half the elements of the logits: four times a device's part on eight devices, and more than activations."""
    return case.sizes.rows * case.sizes.seq * case.sizes.vocab // 2


# --8<-- [start:activations]
def most_moved(case: Case[Sizes]) -> float:
    """Bytes of activations that a device sends in a step: gathers and scatters, forward and backward.

    The embedding scatters, the loss gathers, and a layer does both: once if attention and MLP are in parallel, and
    twice if not. Half as much again is allowed for regathering in the backward pass.
    """
    moves = 2 + case.sizes.num_layers * (2 if case.sizes.parallel else 4)
    return 1.5 * 2 * case.sizes.steps * moves * ring_bytes(case, activation_bytes(case))


# --8<-- [end:activations]


def _embedded(e: Evidence) -> float:
    """Bytes that the embedding scatters and its gradient gathers; everything else uses rings."""
    return 2 * e.case.sizes.steps * ring_bytes(e.case, activation_bytes(e.case))


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients = "Is this leaf split over the tensor axis? If so, a device's gradient is complete; else it is a share."
    values = "Over which rows is the returned loss a mean, and what is subtracted from each leaf? "
    exposed = "Which activations are sent while nothing is multiplied, forward or backward?"
    logits = "Which of the logits does a device need, and what is enough to know about the others?"
    sent = "What does a layer send more than twice in each direction?"
    rings = "The embedding scatters its rows and gathers their gradient. Does a block, or the loss, not use a ring?"
    return [
        *facts.values_and_gradients(evidence.cases, values, gradients, step=True),
        time_limits.exposed_within(evidence, EXPOSED, exposed, than=limits.NAIVE, weight=3),
        time_limits.time_gained(evidence, (1 - EXPOSED) / 4, "What does it compute that the naive baseline does not?"),
        limits.largest_within(evidence, half_of_logits, logits, weight=2),
        byte_facts.bytes_at_most("activation bytes", evidence.programs, MOVES, lambda e: most_moved(e.case), sent),
        byte_facts.bytes_at_most(
            "bytes in one piece", evidence.cases, ("all_gather", "reduce_scatter"), _embedded, rings
        ),
        byte_facts.bytes_sent("all-reduce bytes", evidence.programs, "all_reduce", _apart, least=_together),
    ]


# Three layers, so that the communication that embedding and loss expose is the smaller part; and enough rows that half
# of all logits have more elements than all gradients of a device, which may be one array.
_RING = SIZES.replace(width=32, hidden=128, num_heads=16, num_layers=3, dropout=0.0)
_WIDE = {"width": 4096, "hidden": 16384, "vocab": 32000, "seq": 512, "max_seq": 512, "rows": 16, "rate_scale": 0.01}


def _unseen(rng: np.random.Generator) -> Case[Sizes]:
    steps, parallel = int(rng.choice([1, 2])), bool(rng.integers(2))
    options: dict[str, Any] = {"parallel": parallel, "steps": steps, "rate_scale": float(rng.uniform(0.6, 1.6)) / steps}
    # Two groups on each mesh, so that the oracle is compiled for few sizes only.
    return unseen(rng, (2, 4), (2, 3), (2, 2), dropout=0.15, **options)


TP_TRANSFORMER_STEP = Task(
    wrapping=WRAPPINGS["tp_transformer_step"],
    points=6,
    core_facts=("exposed communication",),
    cases=(
        Case.on({"data": 2, "tensor": 2}, SIZES, quick=True),
        Case.on({"data": 1, "tensor": 8}, _RING, quick=True),
        Case.on({"data": 2, "tensor": 4}, SIZES.replace(parallel=True), "parallel"),
        Case.on({"tensor": 3, "replica": 2}, OF_THREE.replace(steps=3, rate_scale=0.4), "3 steps"),
        Case.on({"data": 8, "tensor": 1}, SIZES.replace(rows=1, parallel=True), "parallel"),
        Case.on({"data": 1, "tensor": 1}, SIZES.replace(rows=1, num_layers=1), "1 layer"),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=step_facts,
    stretches=({"seq": 128, "max_seq": 128}, {"rows": 16, "width": 1024}, {"hidden": 16384, "vocab": 32000}),
    at_scale=(
        Case.on({"data": 1, "tensor": 8}, _RING.replace(**_WIDE), "three layers of width 4096"),
        "data=1 x tensor=8",
    ),
    naive_memory="keeps_all_logits",
    naive_time="gathers_and_scatters_whole",
)
