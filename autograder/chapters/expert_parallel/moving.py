"""Grading of ``dispatch`` and ``combine``: tokens to places, and back."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from autograder.chapters.draws import unseen_case
from autograder.chapters.expert_parallel.routing import ALONE, places_of, unseen_routing
from autograder.chapters.expert_parallel.wrapping import Routing
from autograder.contract import facts, limits
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("expert_parallel")


def _routed(rng: np.random.Generator, s: Routing) -> tuple[np.ndarray, ...]:
    logits = rng.standard_normal((s.tokens, s.num_experts)).astype(np.float32)
    return places_of(logits, np.zeros(1, np.float32), s.k, s.capacity)


def _served(experts: np.ndarray, places: np.ndarray, capacity: int) -> Any:
    """``(token, choice, expert, place)`` of every choice that is not dropped."""
    for (token, choice), place in np.ndenumerate(places):
        if place < capacity:
            yield token, choice, experts[token, choice], place


def draw_dispatch(rng: np.random.Generator, case: Case[Routing]) -> dict[str, Any]:
    s = case.sizes
    _, experts, places = _routed(rng, s)
    x = np.float32(rng.standard_normal((s.tokens, s.width)))
    upstream = np.float32(rng.standard_normal((s.num_experts, s.capacity, s.width)))
    return {"x": x, "experts": experts, "places": places, "upstream": upstream}


def dispatch_oracle(inputs: dict[str, Any], case: Case[Routing]) -> dict[str, Any]:
    values, gradients = np.zeros_like(inputs["upstream"]), np.zeros_like(inputs["x"])
    for token, _, expert, place in _served(inputs["experts"], inputs["places"], case.sizes.capacity):
        values[expert, place] = inputs["x"][token]
        gradients[token] += inputs["upstream"][expert, place]
    return {"values": values, "gradients": gradients}


def draw_combine(rng: np.random.Generator, case: Case[Routing]) -> dict[str, Any]:
    s = case.sizes
    _, experts, places = _routed(rng, s)
    return {
        "y": np.float32(rng.standard_normal((s.num_experts, s.capacity, s.width))),
        "gates": np.float32(rng.uniform(0.2, 1, (s.tokens, s.k))),
        "experts": experts,
        "places": places,
        "upstream": np.float32(rng.standard_normal((s.tokens, s.width))),
    }


def combine_oracle(inputs: dict[str, Any], case: Case[Routing]) -> dict[str, Any]:
    values = np.zeros_like(inputs["upstream"])
    of_y, of_gates = np.zeros_like(inputs["y"]), np.zeros_like(inputs["gates"])
    for token, choice, expert, place in _served(inputs["experts"], inputs["places"], case.sizes.capacity):
        gate, upstream = inputs["gates"][token, choice], inputs["upstream"][token]
        values[token] += gate * inputs["y"][expert, place]
        of_y[expert, place] = gate * upstream
        of_gates[token, choice] = inputs["y"][expert, place] @ upstream
    return {"values": values, "gradients": {"y": of_y, "gates": of_gates}}


def _flops(evidence: TaskEvidence) -> Fact:
    """Allow only the products of a weighted sum over a token's choices, forward and backward: none over experts."""

    def fact(e: Evidence) -> Fact:
        s = e.case.sizes
        most, message, line = 6 * s.tokens * s.k * s.width, "", ""
        if e.costs.flops > most:
            line = next((e.costs.lines[how] for how in (*e.costs.products, "selection") if how in e.costs.lines), "")
            message = (
                f"a device computes {e.costs.flops:,.0f} FLOPs in matmuls, and moving {s.tokens} tokens needs "
                f"none (at most {most:,.0f} are allowed). What does it multiply by, and how much of that is zeros?"
            )
        return facts.case_fact(e, "FLOPs", Kind.COMPUTE, message, e.costs.flops, most, unit=Unit.FLOPS, line=line)

    return facts.worst([fact(e) for e in evidence.programs], "FLOPs", Kind.COMPUTE)


# For each function, the questions about values and about gradients.
HINTS = {
    "dispatch": (
        "Is every token in the places of all its choices, and where does a dropped choice go? ",
        "Which places does a token's gradient come from, and what does a dropped choice add to it? ",
    ),
    "combine": (
        "Is each result the sum over a token's choices of gate times output, and what does a dropped choice read? ",
        "Do a gate and what it scales both carry a gradient, and what gradient does a dropped choice give to its gate "
        "and to the place that it read? ",
    ),
}


def moving_facts(name: str, evidence: TaskEvidence) -> list[Fact]:
    too_much = "Which array has a dim for tokens and one for experts or places?"
    values, gradients = HINTS[name]
    return [
        facts.arrays_match("values", evidence.cases, "values", values),
        facts.arrays_match("gradients", evidence.cases, "gradients", gradients, weight=2),
        _flops(evidence),
        limits.temporaries_within(evidence, MOVING_TEMPORARIES, too_much),
    ]


# `array.at[...].set` saves which token wrote each place for its derivative, and takes 3.3 times as much; a mask takes
# 5 times or more.
MOVING_TEMPORARIES = 4
_MOVED = Routing(tokens=20, num_experts=6, k=2, capacity=5, width=12)
# At the realistic size, 64 experts with a quarter more places than choices.
_MANY = _MOVED.replace(tokens=8192, num_experts=64, capacity=320, width=1024)


def _moving(name: str, **options: Any) -> Task:
    return Task(
        wrapping=WRAPPINGS[name],
        points=2,
        core_facts=("FLOPs",),
        cases=(
            Case("6 experts", ALONE, _MOVED, quick=True),
            Case(
                "one choice of 5 experts", ALONE, Routing(tokens=9, num_experts=5, k=1, capacity=2, width=8), quick=True
            ),
            Case("all of 3 experts", ALONE, Routing(tokens=7, num_experts=3, k=3, capacity=8, width=4)),
        ),
        unseen=lambda rng: unseen_case(rng, unseen_routing(rng, width=10), (1,)),
        facts=partial(moving_facts, name),
        at_scale=(Case("64 experts, width 1024", ALONE, _MANY), "6 experts"),
        stretches=({"tokens": 1024, "capacity": 320}, {"num_experts": 64}, {"width": 256}),
        naive_memory="multiplies_by_a_one_hot_mask" if name == "dispatch" else "multiplies_by_a_mask_of_gates",
        **options,
    )


DISPATCH = _moving("dispatch", draw=draw_dispatch, oracle=dispatch_oracle)
COMBINE = _moving("combine", draw=draw_combine, oracle=combine_oracle)
