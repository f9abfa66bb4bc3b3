"""Grading of ``route``, ``balancing_loss``, ``dispatch`` and ``combine``, in three parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.draws import OVERFLOWS, compile_oracle, flows_back, unseen_case
from autograder.chapters.expert_parallel.wrapping import Routing, devices_of
from autograder.contract import byte_facts, facts, limits
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings
from course.moe import balance_and_z

WRAPPINGS = wrappings("expert_parallel")
ALONE = {"data": 1}

# route: gates, experts and places of one device's tokens.


def places_of(logits: np.ndarray, bias: np.ndarray, k: int, capacity: int) -> tuple[np.ndarray, ...]:
    """``(gates, experts, places)`` by a loop over tokens; of several equal scores, the first counts as the largest."""
    gates = np.asarray(jax.nn.softmax(logits))
    experts = np.argsort(-(gates + bias), axis=1, kind="stable")[:, :k].astype(np.int32)
    taken, places = np.zeros(logits.shape[1], np.int32), np.zeros_like(experts)
    for token, chosen in enumerate(experts):
        places[token] = np.minimum(taken[chosen], capacity)
        taken[chosen] += 1
    return np.take_along_axis(gates, experts, 1), experts, places


def draw_route(rng: np.random.Generator, case: Case[Routing]) -> dict[str, Any]:
    """Logits in steps of a half, so that many are equal, and biases for and against experts."""
    s = case.sizes
    shift = s.large * OVERFLOWS * rng.choice([-1, 1], (s.tokens, 1))
    return {
        "logits": np.float32(rng.integers(-3, 4, (s.tokens, s.num_experts)) / 2 + shift),
        "bias": np.float32(rng.choice([-0.3, 0, 0.3], s.num_experts)),
        "upstream": flows_back(rng, s.tokens, s.k),
    }


def route_oracle(inputs: dict[str, Any], case: Case[Routing]) -> dict[str, Any]:
    logits, s = inputs["logits"], case.sizes
    results = places_of(logits, inputs["bias"], s.k, s.capacity)
    upstream = np.zeros_like(logits)
    np.put_along_axis(upstream, results[1], inputs["upstream"], 1)
    of_logits = np.asarray(jax.vjp(jax.nn.softmax, logits)[1](upstream)[0])
    return {
        "values": dict(zip(("gates", "experts", "places"), results, strict=True)),
        "gradients": {"logits": of_logits, "bias": np.zeros_like(inputs["bias"])},
    }


def route_facts(evidence: TaskEvidence) -> list[Fact]:
    values = {
        "values/experts": (
            "What is added to a gate for the choice, which of several equal scores wins, and how are choices ordered? "
        ),
        "values/gates": (
            "The experts are right. Which numbers is a gate computed from, is it the softmax alone, and what is the "
            "gate of a choice that has no place? "
        ),
        "values/places": (
            "The experts are right. Which tokens come first, when is an expert full, and what is the place of a choice "
            "that is dropped? "
        ),
    }
    gradients = "Which of the results carry a gradient, and through which function of the logits does it flow? "
    return [
        facts.parts_match("values", evidence.cases, values, weight=2),
        facts.arrays_match("gradients", evidence.cases, "gradients", gradients, weight=2),
    ]


_FEW = Routing(tokens=20, num_experts=6, k=2, capacity=5)
ROUTE = Task(
    wrapping=WRAPPINGS["route"],
    points=3,
    cases=(
        Case("6 experts", ALONE, _FEW, quick=True),
        Case("one choice of 5 experts", ALONE, Routing(tokens=17, num_experts=5, k=1, capacity=3), quick=True),
        Case("all of 3 experts", ALONE, Routing(tokens=8, num_experts=3, k=3, capacity=6)),
        Case("5 tokens, large logits", ALONE, Routing(tokens=5, num_experts=9, k=2, capacity=2, large=True)),
        # More than 8-bit integers can count, and than bfloat16 can tell apart.
        Case("700 tokens", ALONE, Routing(tokens=700, num_experts=2, k=1, capacity=500)),
    ),
    unseen=lambda rng: unseen_case(rng, unseen_routing(rng), (1,)),
    draw=draw_route,
    oracle=route_oracle,
    facts=route_facts,
)


def unseen_routing(rng: np.random.Generator, **more: Any) -> Routing:
    # Divisible by no number of experts, so that no expert has exactly the mean number of tokens.
    num_experts, tokens = int(rng.choice([7, 11])), int(rng.choice([19, 23]))
    k = int(rng.choice([2, 3]))
    return Routing(tokens=tokens, num_experts=num_experts, k=k, capacity=2 * tokens * k // (3 * num_experts), **more)


# balancing_loss: two losses whose mean over devices is one device's.


def draw_balance(rng: np.random.Generator, case: Case[Routing]) -> dict[str, Any]:
    """Every device prefers different experts, so a mean of products is not a product of means."""
    s, n = case.sizes, devices_of(case)
    preferred = 1.5 * rng.standard_normal((n, 1, s.num_experts))
    logits = rng.standard_normal((n, s.tokens, s.num_experts)) + preferred
    logits += s.large * OVERFLOWS * rng.choice([-1, 1], (n, s.tokens, 1))
    if n == s.k == 1 and not s.tokens % s.num_experts:  # the first expert gets exactly its share
        logits[:, :, 0] = -9
        logits[:, : s.tokens // s.num_experts, 0] = 9
    return {
        "logits": np.float32(logits.reshape(-1, s.num_experts)),
        "bias": np.float32(rng.uniform(-0.2, 0.2, s.num_experts)),
        "upstream": flows_back(rng, 2),
    }


@partial(compile_oracle, static_argnums=3)
def _balance(logits: jax.Array, bias: jax.Array, upstream: jax.Array, k: int) -> tuple[jax.Array, ...]:
    """Both losses over all tokens, each expert's load, and the gradient of the logits."""

    def losses(logits):
        balance, z, load = balance_and_z(logits, bias, k)
        return (balance, z), load

    (balance, z), back, load = jax.vjp(losses, logits, has_aux=True)
    return balance, z, load, *back((upstream[0], upstream[1]))


def balance_oracle(inputs: dict[str, Any], case: Case[Routing]) -> dict[str, Any]:
    """The losses over all tokens: means of the devices' losses; each device has the gradient of its own loss."""
    s, n = case.sizes, devices_of(case)
    balance, z, load, gradients = _balance(inputs["logits"], inputs["bias"], inputs["upstream"], s.k)
    after = inputs["bias"] + np.float32(s.rate) * np.sign(np.float32(1 / s.num_experts) - np.asarray(load))
    return {
        "values": {"balance": np.asarray(balance), "z": np.asarray(z), "bias": np.repeat(after[None], n, 0)},
        "gradients": n * np.asarray(gradients),
    }


def balance_facts(evidence: TaskEvidence) -> list[Fact]:
    balance = (
        "A mean of products is not the product of means: which of the two factors must be over all tokens? Is the "
        "bias used only in the choice, and does every choice of a token count? "
    )
    back = "Which factor carries a gradient, and is it the mean over this device's tokens alone or over all? "
    values = {
        "values/balance": balance,
        "values/z": "What is squared, and over which tokens is the mean? ",
        "values/bias": (
            "By how much does a bias change, in which direction, and what happens to an expert with exactly its share? "
        ),
    }

    def most(e: Evidence) -> float:
        return sum(all_reduce_bytes(size, 4 * (3 * e.case.sizes.num_experts + 4)) for size in e.case.mesh.values())

    return [
        facts.parts_match("values", evidence.cases, values, weight=2),
        facts.arrays_match("gradients", evidence.cases, "gradients", back, weight=2),
        byte_facts.bytes_at_most(
            "all-reduce bytes",
            evidence.cases,
            ("all_reduce",),
            most,
            "How few numbers are enough to say how often each expert was chosen?",
        ),
        byte_facts.only_collectives("other collectives", evidence.cases, ("all_reduce",)),
    ]


_BALANCE = Routing(tokens=11, num_experts=6, k=2, rate=0.25)
BALANCING_LOSS = Task(
    wrapping=WRAPPINGS["balancing_loss"],
    # No core facts: it is about a mean of products that is not a product of means, which values and gradients show. An
    # answer that gathers choices to count them has understood that, and sends little compared with the tokens.
    points=3,
    cases=(
        Case.on({"data": 2, "expert": 4}, _BALANCE.replace(num_experts=12, k=3), quick=True),
        Case.on({"pipe": 3, "tensor": 2}, _BALANCE.replace(tokens=7, num_experts=5, k=3), quick=True),
        Case.on({"expert": 5}, _BALANCE.replace(k=1, tokens=300, large=True), "300 tokens, large logits"),
        Case.on({"data": 1, "expert": 1}, _BALANCE.replace(tokens=16, num_experts=8, k=1)),
    ),
    unseen=lambda rng: unseen_case(rng, unseen_routing(rng, rate=0.125), (5,), (2, 3), (2, 2), (6,)),
    draw=draw_balance,
    oracle=balance_oracle,
    facts=balance_facts,
)


# dispatch and combine: tokens to places, and back.


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
