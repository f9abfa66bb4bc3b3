"""Grading of ``moe_layer``, ``overlapped_moe`` and ``moe_step``: a device's own tokens, experts split over devices.

In two parts: the layers, and the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.draws import compile_oracle, draw_leaves, draw_rate, sgd, stacked, unseen_case
from autograder.chapters.expert_parallel.wrapping import (
    Layer,
    StepSizes,
    build_moe,
    data_of,
    devices_of,
    expert_of,
    expert_specs,
    holders_of,
    layer_params,
    moe_shapes,
)
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.data import token_batch
from course.moe import moe, moe_loss

WRAPPINGS = wrappings("expert_parallel")

# moe_layer and overlapped_moe: every device's own tokens, experts split over devices.


def draw_layer(rng: np.random.Generator, case: Case[Layer]) -> dict[str, Any]:
    s, n = case.sizes, devices_of(case)
    params = draw_leaves(rng, layer_params(s), 0.3)
    params["router"]["bias"] = np.float32(rng.uniform(-0.1, 0.1, s.num_experts))
    x = np.float32(rng.standard_normal((n * s.tokens, s.width)))
    upstream = {"y": rng.standard_normal(x.shape), "logits": rng.standard_normal((n * s.tokens, s.num_experts))}
    return {"params": params, "x": x, "upstream": jax.tree.map(np.float32, upstream)}


@lru_cache(maxsize=32)
def _layer_of_each_device(k: int, capacity: int) -> Any:
    def run(params, x, upstream):
        values, back = jax.vjp(lambda params, x: moe(params, x, k, capacity), params, x)
        return values, back((upstream["y"], upstream["logits"]))

    return compile_oracle(jax.vmap(run, in_axes=(None, 0, 0)))


def layer_oracle(inputs: dict[str, Any], case: Case[Layer]) -> dict[str, Any]:
    """Each device's tokens compete for places separately; an expert's gradient is the sum over those it served."""
    s, n = case.sizes, devices_of(case)
    rows = jax.tree.map(lambda a: a.reshape(n, s.tokens, -1), (inputs["x"], inputs["upstream"]))
    results = _layer_of_each_device(s.k, s.capacity)(inputs["params"], *rows)
    (y, logits), (of_params, of_x) = jax.tree.map(np.asarray, results)

    def summed(gradient, spec):
        if not any(spec):
            return gradient
        # Devices are numbered in order of the mesh; those along ``expert`` share a copy of the experts.
        grid = gradient.reshape(*case.mesh.values(), *gradient.shape[1:])
        return grid.sum(list(case.mesh).index(expert_of(case)), dtype=np.float64).astype(np.float32)

    gradients = jax.tree.map(summed, of_params, expert_specs(of_params, case))
    flat = {"y": y, "logits": logits, "x": of_x}
    flat = {name: leaf.reshape(-1, leaf.shape[-1]) for name, leaf in flat.items()}
    values = {"y": flat["y"], "logits": flat["logits"]}
    return {"values": values, "gradients": {"params": gradients, "x": flat["x"]}}


def traveling(e: Evidence, layers: int = 1) -> float:
    """Bytes that a device sends to dispatch and combine, forward and backward: its places four times."""
    s, n = e.case.sizes, e.case.mesh[expert_of(e.case)]
    return 4 * layers * (n - 1) / n * 4 * s.num_experts * s.capacity * s.width


def layer_facts(evidence: TaskEvidence) -> list[Fact]:
    """Require right numbers, and nothing sent except tokens to their experts and back."""
    hint = (
        "Whose tokens did this expert serve, in which places, and which choices' results does a token get back? And "
        "does every token get the shared expert's output, unscaled? "
    )

    def over(case: Case[Any]) -> tuple[str]:
        return (expert_of(case),)

    return [
        facts.arrays_match("values", evidence.cases, "values", hint),
        facts.arrays_match("gradients", evidence.cases, "gradients", hint, weight=2),
        byte_facts.bytes_sent("all-to-all bytes", evidence.programs, "all_to_all", traveling, axes=over),
        byte_facts.only_collectives("other collectives", evidence.programs, ("all_to_all",)),
    ]


def moe_layer_facts(evidence: TaskEvidence) -> list[Fact]:
    zeros = "Which products have a dim for all experts, and how many of the numbers along it are zeros?"
    too_much = "Which array has a dim for tokens and one for experts, or weights of other devices' experts?"
    return [
        *layer_facts(evidence),
        limits.flops_within(evidence, 1.1, zeros, weight=2),
        limits.temporaries_within(evidence, LAYER_TEMPORARIES, too_much),
    ]


# Tokens by a table of their places take 1.53 times as much, and masks 2.94 times.
LAYER_TEMPORARIES = 2
# Two chunks expose about half, and a program that starts each transfer one chunk ahead gains 0.24.
OVERLAPPED_EXPOSED, OVERLAPPED_GAINED = 0.5, 0.2


def chunk_transfers(e: Evidence) -> int:
    """All-to-alls of a device: each chunk travels there and back, forward and backward."""
    return 4 * e.case.sizes.num_chunks * (e.case.mesh[expert_of(e.case)] > 1)


def overlapped_facts(evidence: TaskEvidence) -> list[Fact]:
    waits = (
        "Look at the timeline: what does the device wait for, forward and backward, and which other places could the "
        "experts compute in the meantime?"
    )
    chunks = "In how many chunks should places travel, and is that number the one that you are given?"
    return [
        *layer_facts(evidence),
        byte_facts.times_sent("all-to-alls", evidence.cases, "all_to_all", chunk_transfers, chunks),
        time_limits.exposed_within(evidence, OVERLAPPED_EXPOSED, waits, weight=3, than=limits.NAIVE),
        time_limits.time_gained(evidence, OVERLAPPED_GAINED, waits, weight=2),
    ]


# As many experts at both sizes, and as many places as choices, so that the programs can be compared.
_LAYER = Layer(tokens=128, width=16, hidden=12, num_experts=64, k=4, capacity=8, num_chunks=4)
_ODD = Layer(tokens=10, width=6, hidden=8, num_experts=6, k=2, capacity=3, num_chunks=3)
# Many small experts, in DeepSeek-V3's proportions: sending tokens takes about as long as the products.
_LARGE = _LAYER.replace(tokens=8192, width=2048, hidden=1024, capacity=512)


def _unseen_layer(rng: np.random.Generator) -> Case[Layer]:
    sizes = Layer(tokens=40, width=10, hidden=6, num_experts=36, k=int(rng.choice([2, 4])), capacity=3, num_chunks=3)
    return unseen_case(rng, sizes, (3,), (4,), (6,), (2, 3))


def _layer(name: str, **options: Any) -> Task:
    return Task(
        wrapping=WRAPPINGS[name],
        cases=(
            Case.on({"expert": 8}, _LAYER, quick=True),
            Case.on({"pipe": 3, "tensor": 2}, _ODD, quick=True),
            Case.on({"expert": 3, "data": 2}, _ODD.replace(k=1, num_experts=9, num_chunks=1, capacity=2)),
            Case.on({"expert": 1}, _ODD.replace(k=5)),
        ),
        unseen=_unseen_layer,
        draw=draw_layer,
        oracle=layer_oracle,
        at_scale=(Case.on({"expert": 8}, _LARGE, "64 experts of width 2048"), "expert=8"),
        stretches=({"tokens": 512, "capacity": 32}, {"width": 256, "hidden": 128}),
        **options,
    )


MOE_LAYER = _layer(
    "moe_layer",
    points=4,
    core_facts=("all-to-all bytes", "FLOPs"),
    facts=moe_layer_facts,
    naive_memory="multiplies_by_one_hot_masks",
)
OVERLAPPED_MOE = _layer(
    "overlapped_moe",
    points=3,
    core_facts=("exposed communication", "predicted time"),
    facts=overlapped_facts,
    naive_time="waits_for_every_place",
)


# moe_step: experts are averaged over the data axis alone, all other leaves over both.


def draw_step(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    s, rows = case.sizes, devices_of(case) * case.sizes.rows
    params = draw_leaves(rng, moe_shapes(s), rng.uniform(0.2, 0.4))
    layers, bias = params["layers"], params["layers"]["moe"]["router"]["bias"]
    layers["moe"]["router"]["bias"] = np.float32(rng.uniform(-0.1, 0.1, bias.shape))
    layers["norm"]["scale"] += 1  # otherwise experts read so little that an update of them is lost in rounding
    return {
        "params": params,
        "batch": stacked(
            lambda: token_batch(int(rng.integers(2**31)), 0, batch=rows, seq=s.seq, vocab=s.vocab), s.steps
        ),
        "learning_rate": draw_rate(rng, s.rate_scale),
    }


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: StepSizes, groups: int) -> Any:
    return sgd(lambda params, batch: moe_loss(build_moe(sizes), params, batch, sizes.capacity, groups))


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """The steps on one device, where each device's tokens compete for places separately."""
    run = _steps_on_one_device(case.sizes, devices_of(case))
    after, losses, gradients = run(inputs["params"], (inputs["batch"],), inputs["learning_rate"])

    def copies(leaf, spec):
        holders = holders_of(spec, case)
        return np.repeat(leaf[None], int(np.prod([case.mesh[axis] for axis in holders])), 0) if holders else leaf

    specs = expert_specs(after, case, skip=1)
    after, gradients = (jax.tree.map(copies, tree, specs) for tree in (after, gradients))
    return {"values": {"loss": copies(losses, P()), "params": after}, "gradients": gradients}


def _bytes_of(case: Case[StepSizes]) -> tuple[float, float]:
    """Bytes of a device's own experts, and of all other leaves."""
    shapes = moe_shapes(case.sizes)
    leaves_and_specs = zip(jax.tree.leaves(shapes), jax.tree.leaves(expert_specs(shapes, case, 1)), strict=True)
    sizes = [(4 * leaf.size, any(spec)) for leaf, spec in leaves_and_specs]
    own = sum(size for size, split in sizes if split) / case.mesh[expert_of(case)]
    return own, sum(size for size, split in sizes if not split)


def _averaged(most: bool) -> Callable[[Evidence], float]:
    """The least, or the most, bytes of all-reduces: over all devices at once, or over one axis and then the other.

    The router's bias has no gradient, and may be left out.
    """

    def total(e: Evidence) -> float:
        s, (own, other_bytes) = e.case.sizes, _bytes_of(e.case)
        data, n = e.case.mesh[data_of(e.case)], devices_of(e.case)
        counts, bias = 4 * s.num_layers * s.num_experts, 4 * s.num_layers * s.num_experts
        if not most:
            return s.steps * (all_reduce_bytes(data, own) + all_reduce_bytes(n, other_bytes - bias + counts))
        reduced_bytes = other_bytes + 3 * counts + 4 * (4 * s.num_layers + 4)
        return s.steps * (
            all_reduce_bytes(data, own) + sum(all_reduce_bytes(size, reduced_bytes) for size in e.case.mesh.values())
        )

    return total


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients = "Over which axes do devices have copies of this leaf, and whose tokens contribute to its gradient? "
    own = "Which devices have a copy of an expert?"
    router = "And does it include both losses of the router, with their weights, each as the mean over layers?"
    return [
        *facts.values_and_gradients(evidence.cases, gradients=gradients, step=True, first_loss=router),
        byte_facts.bytes_sent(
            "all-reduce bytes", evidence.cases, "all_reduce", _averaged(True), least=_averaged(False), hint=own
        ),
        byte_facts.bytes_sent(
            "all-to-all bytes",
            evidence.cases,
            "all_to_all",
            lambda e: e.case.sizes.steps * traveling(e, e.case.sizes.num_layers),
        ),
        byte_facts.only_collectives("other collectives", evidence.cases, ("all_reduce", "all_to_all")),
    ]


_STEP = StepSizes(width=8, hidden=12, num_layers=2, num_experts=8, k=2, capacity=5, vocab=16, seq=6, rows=2)


def _step_case(name: str, quick: bool = False, **sizes: Any) -> Case[StepSizes]:
    mesh = dict(part.split("=") for part in name.split(" x "))
    return Case(name, {axis: int(size) for axis, size in mesh.items()}, _STEP.replace(**sizes), quick=quick)


def _unseen_step(rng: np.random.Generator) -> Case[StepSizes]:
    sizes = _STEP.replace(num_experts=12, k=int(rng.choice([1, 3])), vocab=24, rows=3, capacity=7, balance=0.2, z=0.05)
    sizes = sizes.replace(width=int(rng.choice([8, 12])), hidden=int(rng.choice([16, 20])))
    return unseen_case(rng, sizes, (2, 2), (2, 3), (3, 2), (1, 6))


MOE_STEP = Task(
    wrapping=WRAPPINGS["moe_step"],
    points=5,
    core_facts=("all-reduce bytes", "other collectives"),
    cases=(
        _step_case("data=2 x expert=4", quick=True),
        _step_case("replica=3 x device=2", quick=True, num_experts=6, rows=1, seq=8, k=1, z=0.02),
        _step_case("data=1 x expert=8"),
        _step_case("expert=1 x data=5", num_experts=3, num_layers=1, steps=2, rate_scale=3.0),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
)
