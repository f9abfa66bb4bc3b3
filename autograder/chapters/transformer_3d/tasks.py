"""``init_3d``, ``forward_3d`` and ``train_step_3d``: each device's part, a complete gradient, and clipped SGD."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.draws import draw_batch, draw_batches, draw_keys, draw_leaves, draw_rate
from autograder.chapters.transformer_3d.communication import bfloat16_facts, layer_runs, no_whole_transfers, sent_facts
from autograder.chapters.transformer_3d.layers import THREE
from autograder.chapters.transformer_3d.layouts import SIZES, given_specs, run_on_one_device, specs_of, unseen
from autograder.chapters.transformer_3d.wrapping import Sizes, axes_of, in_stages, rows_of, sizes_of, stacked_of
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case_builders import params_by_head
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("transformer_3d")

# init_3d: each device's part of a Transformer's parameters, over three axes at once.


def init_facts(evidence: TaskEvidence) -> list[Fact]:
    def rules(e: Evidence) -> list[P]:
        return jax.tree.leaves(specs_of(e.case), is_leaf=lambda s: isinstance(s, P))

    def resident(e: Evidence, split: bool = True) -> int:
        pairs = zip(jax.tree.leaves(stacked_of(e.case)), rules(e), strict=True)
        return sum(byte_facts.resident_bytes(leaf.shape, spec if split else P(), e.case.mesh) for leaf, spec in pairs)

    cases = evidence.cases
    return [
        facts.arrays_match("values", cases, "values", "Put together, the parts must reproduce each layer. "),
        facts.specs_match(cases, rules, lambda case: f"min_size {case.sizes.min_size}"),
        byte_facts.state_bytes(cases, resident, lambda e: resident(e, split=False)),
        byte_facts.only_collectives("communication", cases, ()),
    ]


def _unseen_parts(rng: np.random.Generator) -> Case[Sizes]:
    return unseen(rng, (2, 4, 1), (4, 1, 2), (3, 2, 1), (1, 2, 3), num_repeats=int(rng.integers(1, 4)))


_EIGHT_LAYERS = SIZES.replace(num_layers=8)

INIT_3D = Task(
    wrapping=WRAPPINGS["init_3d"],
    points=3,
    core_facts=("split dims",),
    cases=(
        Case.on({"data": 2, "pipe": 2, "tensor": 2}, _EIGHT_LAYERS, quick=True),
        Case.on({"replica": 4, "stage": 2, "model": 1}, _EIGHT_LAYERS, quick=True),
        Case.on({"data": 1, "pipe": 1, "tensor": 8}, _EIGHT_LAYERS),
        Case.on({"data": 8, "pipe": 1, "tensor": 1}, _EIGHT_LAYERS.replace(num_repeats=4)),
        Case.on({"data": 1, "pipe": 2, "tensor": 1}, _EIGHT_LAYERS.replace(num_repeats=1)),
    ),
    unseen=_unseen_parts,
    draw=lambda rng, case: {"params": draw_leaves(rng, params_by_head(case))},
    # Reassembled, the parts are the whole parameters, in stages.
    oracle=lambda inputs, case: {"values": in_stages(inputs["params"], case)},
    facts=init_facts,
)

# forward_3d: the loss of a pipeline's rows, whose gradient is complete and in parts.

# Relative to the reference; and to the extra time of gathering in every tick.
TEMPORARIES, EXPOSED = 1.3, 0.7


def draw_forward(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    return {
        "params": draw_leaves(rng, stacked_of(case), 0.3),
        "batch": draw_batch(rng, case.sizes, rows_of(case)),
        "key": draw_keys(rng),
        "upstream": np.float32(rng.uniform(-4, -2)),
    }


def forward_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """On one device, with all rows: the loss at each device's place on the data axis, ``upstream`` times gradients."""
    batches = {name: rows[None] for name, rows in inputs["batch"].items()}
    _, losses, gradients = run_on_one_device({**inputs, "batch": batches}, case)
    scaled = jax.tree.map(lambda gradient: inputs["upstream"] * gradient, gradients)
    return {"values": on_each_device(losses[0], case), "gradients": scaled}


def on_each_device(of_places: np.ndarray, case: Case[Sizes]) -> np.ndarray:
    """Values of the places on the data axis, ``[data, ...]``, as each device has them, in the mesh's order."""
    at = list(case.mesh).index(axes_of(case)[0])
    places = np.indices(tuple(case.mesh.values()))[at].ravel()
    return of_places[places]


def forward_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "On which stage are the outputs of the last layer, and which rows' loss does each device compute? "
    gradients = "Which devices hold this leaf, which have only a share of its gradient, and where is it averaged? "
    too_much = "What is kept from the forward pass until the backward pass needs it? A tick's input would be enough."
    exposed = "When can the weights of a repeat be on their way, and how often are they gathered for its ticks?"
    return [
        *facts.values_and_gradients([e for e in evidence.cases if not e.case.sizes.bfloat16], values, gradients),
        *bfloat16_facts([e for e in evidence.cases if e.case.sizes.bfloat16], layer_runs),
        limits.temporaries_within(evidence, TEMPORARIES, too_much, weight=2),
        time_limits.exposed_over_within(evidence, EXPOSED, "data", exposed, weight=2, than=limits.NAIVE),
        *sent_facts(evidence.programs),
        no_whole_transfers(evidence.cases, 3),
    ]


_TWO_LAYERS = SIZES.replace(num_layers=2, num_repeats=1)
_OPTIONS = _TWO_LAYERS.replace(num_microbatches=3, dropout=0.25, max_seq=16)
# So large that the same leaves are split as in the small case, along the same dims.
_LARGE = {"width": 2048, "hidden": 8192, "num_heads": 16, "vocab": 32000, "seq": 512, "max_seq": 512, "min_size": 20000}


def _unseen_forward(rng: np.random.Generator) -> Case[Sizes]:
    remat, parallel = bool(rng.integers(2)), bool(rng.integers(2))
    count = int(rng.choice([3, 4]))
    options: dict[str, Any] = {"num_microbatches": count, "dropout": 0.15, "remat": remat, "parallel": parallel}
    options["rows"] = int(rng.integers(1, 3))
    return unseen(rng, (2, 2, 1), (1, 2, 2), (1, 1, 3), (3, 1, 2), **options)


_CUBE, _PIPE = {"data": 2, "pipe": 2, "tensor": 2}, {"data": 1, "pipe": 2, "tensor": 1}
# Rows whose dropout depends on the microbatch that they are in.
_FOUR = _TWO_LAYERS.replace(num_microbatches=4, rows=2, dropout=0.25)

FORWARD_3D = Task(
    wrapping=WRAPPINGS["forward_3d"],
    points=5,
    core_facts=("live temporaries", "exposed over data"),
    cases=(
        Case("data=2 x pipe=2 x tensor=2", _CUBE, SIZES, quick=True),
        Case.on(
            {"replica": 1, "stage": 2, "model": 4},
            _OPTIONS.replace(rings=True, parallel=True),
            "rings, parallel, dropout",
            quick=True,
        ),
        Case.on(
            {"data": 1, "pipe": 3, "tensor": 2},
            _OPTIONS.replace(bfloat16=True, num_layers=6, num_microbatches=2),
            "bfloat16, dropout",
        ),
        Case.on(
            {"data": 2, "pipe": 2, "tensor": 1},
            SIZES.replace(bfloat16=True, parallel=True, remat=False, num_microbatches=3),
            "bfloat16, parallel, no remat",
        ),
        Case.on(
            {"data": 2, "pipe": 1, "tensor": 3},
            _TWO_LAYERS.replace(**THREE, bfloat16=True, rings=True, parallel=True, remat=False),
            "bfloat16, rings, parallel, no remat",
        ),
        Case.on(
            {"data": 4, "pipe": 1, "tensor": 2},
            SIZES.replace(rings=True, dropout=0.25, remat=False, max_seq=16),
            "rings, dropout, no remat",
        ),
        # The stages share the loss, each with the outputs of more than one microbatch.
        Case("data=1 x pipe=2 x tensor=1, 4 microbatches", _PIPE, _FOUR),
    ),
    unseen=_unseen_forward,
    draw=draw_forward,
    oracle=forward_oracle,
    facts=forward_facts,
    stretches=(
        {"seq": 64, "max_seq": 64, "width": 256, "num_heads": 16, "hidden": 1024, "vocab": 2048, "min_size": 2500},
    ),
    at_scale=(
        Case("data=2 x pipe=2 x tensor=2, width 2048", _CUBE, SIZES.replace(**_LARGE)),
        "data=2 x pipe=2 x tensor=2",
    ),
    naive_memory="keeps_everything",
    naive_time="gathers_in_every_tick",
    exposed_axes=("data",),
    given=given_specs,
)

# train_step_3d: SGD over three axes, with its gradient clipped by the norm that a single device would compute.


def draw_step(rng: np.random.Generator, case: Case[Sizes]) -> dict[str, Any]:
    """A learning rate large enough for visible updates; without a norm, gradients are unclipped."""
    s = case.sizes
    return {
        "params": draw_leaves(rng, stacked_of(case), 0.3),
        "batch": draw_batches(rng, s, rows_of(case), s.steps),
        "key": draw_keys(rng),
        "learning_rate": draw_rate(rng, s.rate_scale),
        "largest_norm": np.float32(rng.uniform(0.8, 1.0) * s.largest_norm if s.largest_norm else 1e30),
    }


def step_oracle(inputs: dict[str, Any], case: Case[Sizes]) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a part gets the same."""
    after, losses, gradients = run_on_one_device(inputs, case, case.sizes.steps)
    mean = np.repeat(losses.mean(1)[None], sizes_of(case)[0], 0)
    return {"values": {"loss": on_each_device(mean, case), "params": after}, "gradients": gradients}


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients = "Is the gradient complete, and is it scaled by one number, the same on every device? "
    values = "Over which rows is the returned loss a mean, and what is subtracted from each leaf? "
    return [*facts.values_and_gradients(evidence.cases, values, gradients, step=True), *sent_facts(evidence.cases)]


_TWENTY = _TWO_LAYERS.replace(steps=20, rate_scale=0.6)
_CLIPPED = _TWENTY.replace(largest_norm=0.4)
# Options that change results, so that a step must pass on what it is given.
_CHOSEN = _OPTIONS.replace(steps=2, largest_norm=0.4, parallel=True)


def _unseen_step(rng: np.random.Generator) -> Case[Sizes]:
    options: dict[str, Any] = {
        "steps": int(rng.choice([2, 3])),
        "rate_scale": float(rng.uniform(0.3, 0.7)),
        "largest_norm": float(rng.integers(2) * rng.uniform(0.3, 0.9)),
        "rows": int(rng.integers(1, 3)),
        "num_microbatches": int(rng.choice([2, 3])),
        "num_repeats": int(rng.integers(1, 3)),
        "dropout": 0.15,
        "parallel": bool(rng.integers(2)),
        "remat": bool(rng.integers(2)),
    }
    return unseen(rng, (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 3), **options)


TRAIN_STEP_3D = Task(
    wrapping=WRAPPINGS["train_step_3d"],
    points=4,
    cases=(
        Case("data=2 x pipe=2 x tensor=2", _CUBE, _CHOSEN, quick=True),
        Case.on({"replica": 1, "stage": 2, "model": 4}, _TWENTY, "20 steps", quick=True),
        Case.on({"data": 4, "pipe": 1, "tensor": 2}, _CLIPPED, "20 steps"),
        Case.on({"data": 8, "pipe": 1, "tensor": 1}, _TWENTY, "20 steps"),
        Case.on({"data": 1, "pipe": 8, "tensor": 1}, _TWENTY.replace(num_layers=8), "20 steps"),
        Case.on({"data": 1, "pipe": 1, "tensor": 8}, _CLIPPED.replace(rings=True), "rings, 20 steps"),
        Case("data=2 x pipe=2 x tensor=2, 20 steps", _CUBE, _TWENTY),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
    given=given_specs,
)
