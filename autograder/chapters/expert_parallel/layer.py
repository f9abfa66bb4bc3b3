"""Grading of ``moe_layer`` and ``overlapped_moe``: every device's own tokens, experts split over devices."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np

from autograder.chapters.draws import compile_oracle, draw_leaves, unseen_case
from autograder.chapters.expert_parallel.wrapping import Layer, devices_of, expert_of, expert_specs, layer_params
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.moe import moe

WRAPPINGS = wrappings("expert_parallel")


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
EXPOSED, GAINED = 0.5, 0.2


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
        time_limits.exposed_within(evidence, EXPOSED, waits, weight=3, than=limits.NAIVE),
        time_limits.time_gained(evidence, GAINED, waits, weight=2),
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
