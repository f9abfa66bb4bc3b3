"""Grading of the functions of ``expert_parallel``: draws, results on one device, and permitted communication."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import ring
from autograder.chapters.expert_parallel.wrapping import (
    Layer,
    Routing,
    Training,
    build_moe,
    data_of,
    devices_of,
    expert_of,
    expert_specs,
    holders_of,
    layer_params,
    moe_shapes,
)
from autograder.contract import byte_facts, facts, limits
from autograder.contract.draws import draw_leaves, draw_rate, flows_back, sgd, stacked, unseen_case
from autograder.contract.task import Case, Evidence, Judged, Task
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings
from course.data import token_batch
from course.moe import balance_and_z, moe, moe_loss

WRAPPINGS = wrappings("expert_parallel")
ALONE = {"data": 1}


def _float(array: Any) -> np.ndarray:
    return np.asarray(array, np.float32)


# route: gates, experts and places of one device's tokens.


def places_of(logits: np.ndarray, bias: np.ndarray, k: int, capacity: int) -> tuple[np.ndarray, ...]:
    """``(gates, experts, places)`` by a loop over tokens; of equal scores the first counts as larger."""
    gates = np.asarray(jax.nn.softmax(logits))
    experts = np.argsort(-(gates + bias), axis=1, kind="stable")[:, :k].astype(np.int32)
    taken, places = np.zeros(logits.shape[1], np.int32), np.zeros_like(experts)
    for token, chosen in enumerate(experts):
        places[token] = np.minimum(taken[chosen], capacity)
        taken[chosen] += 1
    return np.take_along_axis(gates, experts, 1), experts, places


def draw_route(rng: np.random.Generator, case: Case[Routing]) -> dict[str, Any]:
    """Logits in steps of a half, so that many are equal, and experts that are preferred or not."""
    s = case.sizes
    return {
        "logits": _float(rng.integers(-3, 4, (s.tokens, s.num_experts)) / 2),
        "bias": _float(rng.choice([0, 0.3], s.num_experts)),
        "upstream": flows_back(rng, s.tokens, s.k),
    }


def route_oracle(inputs: dict[str, Any], case: Case[Routing]) -> dict[str, Any]:
    logits, s = inputs["logits"], case.sizes
    found = places_of(logits, inputs["bias"], s.k, s.capacity)
    upstream = np.zeros_like(logits)
    np.put_along_axis(upstream, found[1], inputs["upstream"], 1)
    of_logits = np.asarray(jax.vjp(jax.nn.softmax, logits)[1](upstream)[0])
    return {
        "values": dict(zip(("gates", "experts", "places"), found, strict=True)),
        "gradients": {"logits": of_logits, "bias": np.zeros_like(inputs["bias"])},
    }


def route_facts(judged: Judged) -> list[Fact]:
    values = {
        "values/experts": "What is added to a gate for the choice, and which of equal scores counts as larger? ",
        "values/gates": "The experts are right. Of which numbers is a gate, and is it more than the softmax? ",
        "values/places": "The experts are right. Which tokens come first, and when is an expert full? ",
    }
    gradients = "Which of the results carry a gradient, and of which function of the logits are they? "
    return [
        facts.parts_match("values", judged.cases, values, weight=2),
        facts.arrays_match("gradients", judged.cases, "gradients", gradients, weight=2),
    ]


_FEW = Routing(tokens=20, num_experts=6, k=2, capacity=5)
ROUTE = Task(
    wrapping=WRAPPINGS["route"],
    points=3,
    cases=(
        Case("6 experts", ALONE, _FEW, quick=True),
        Case("one choice of 5 experts", ALONE, Routing(tokens=17, num_experts=5, k=1, capacity=3), quick=True),
        Case("all of 3 experts", ALONE, Routing(tokens=8, num_experts=3, k=3, capacity=6)),
    ),
    unseen=lambda rng: unseen_case(rng, _unseen_routing(rng), (1,)),
    draw=draw_route,
    oracle=route_oracle,
    facts=route_facts,
)


def _unseen_routing(rng: np.random.Generator, **more: Any) -> Routing:
    # Divisible by no number of experts, so that no expert has exactly the mean number of tokens.
    num_experts, tokens = int(rng.choice([7, 11])), int(rng.choice([19, 23]))
    k = int(rng.choice([2, 3]))
    return Routing(tokens=tokens, num_experts=num_experts, k=k, capacity=2 * tokens * k // (3 * num_experts), **more)


# balancing_loss: two losses whose mean over devices is one device's.


def draw_balance(rng: np.random.Generator, case: Case[Routing]) -> dict[str, Any]:
    """Every device prefers experts of its own, so a mean of products is no product of means."""
    s, n = case.sizes, devices_of(case)
    preferred = 1.5 * rng.standard_normal((n, 1, s.num_experts))
    logits = rng.standard_normal((n, s.tokens, s.num_experts)) + preferred
    if n == s.k == 1 and not s.tokens % s.num_experts:  # the first expert gets exactly its share
        logits[:, :, 0] = -9
        logits[:, : s.tokens // s.num_experts, 0] = 9
    return {
        "logits": _float(logits.reshape(-1, s.num_experts)),
        "bias": _float(rng.uniform(0, 0.2, s.num_experts)),
        "upstream": flows_back(rng, 2),
    }


def balance_oracle(inputs: dict[str, Any], case: Case[Routing]) -> dict[str, Any]:
    """The losses over all tokens; each device's gradient is that of its own loss, of which the mean is taken."""
    s, n = case.sizes, devices_of(case)

    def losses(logits):
        balance, z, load = balance_and_z(logits, inputs["bias"], s.k)
        return (balance, z), load

    (balance, z), back, load = jax.vjp(losses, inputs["logits"], has_aux=True)
    (gradients,) = back(tuple(jnp.asarray(inputs["upstream"])))
    after = inputs["bias"] + np.float32(s.rate) * np.sign(np.float32(1 / s.num_experts) - np.asarray(load))
    return {
        "values": {"balance": np.asarray(balance), "z": np.asarray(z), "bias": np.repeat(after[None], n, 0)},
        "gradients": n * np.asarray(gradients),
    }


def balance_facts(judged: Judged) -> list[Fact]:
    whose = "A mean of products is not the product of means: which of the two factors must be known of all tokens? "
    values = {
        "values/balance": whose,
        "values/z": "Of what is the square taken, and over which tokens is the mean? ",
        "values/bias": "By how much does a bias change, which way, and what of an expert with exactly its share? ",
    }

    def most(e: Evidence) -> float:
        return sum(ring(size, 4 * (3 * e.case.sizes.num_experts + 4)) for size in e.case.mesh.values())

    return [
        facts.parts_match("values", judged.cases, values, weight=2),
        facts.arrays_match("gradients", judged.cases, "gradients", whose, weight=2),
        byte_facts.bytes_at_most(
            "all-reduce bytes",
            judged.cases,
            ("all_reduce",),
            most,
            "How few numbers say how often each expert was chosen?",
        ),
        byte_facts.only_collectives("other collectives", judged.cases, ("all_reduce",)),
    ]


_BALANCE = Routing(tokens=11, num_experts=6, k=2, rate=0.25)
BALANCING_LOSS = Task(
    wrapping=WRAPPINGS["balancing_loss"],
    points=3,
    point=("other collectives",),
    cases=(
        Case("data=2 x expert=4", {"data": 2, "expert": 4}, _BALANCE.but(num_experts=12), quick=True),
        Case("pipe=3 x tensor=2", {"pipe": 3, "tensor": 2}, _BALANCE.but(tokens=7, num_experts=5, k=3), quick=True),
        Case("expert=5", {"expert": 5}, _BALANCE.but(k=1)),
        Case("data=1 x expert=1", {"data": 1, "expert": 1}, _BALANCE.but(tokens=16, num_experts=8, k=1)),
    ),
    unseen=lambda rng: unseen_case(rng, _unseen_routing(rng, rate=0.125), (5,), (2, 3), (2, 2), (6,)),
    draw=draw_balance,
    oracle=balance_oracle,
    facts=balance_facts,
)

# dispatch and combine: tokens to places, and back.


def _routed(rng: np.random.Generator, s: Routing) -> tuple[np.ndarray, ...]:
    return places_of(_float(rng.standard_normal((s.tokens, s.num_experts))), np.zeros(1, np.float32), s.k, s.capacity)


def _served(experts: np.ndarray, places: np.ndarray, capacity: int) -> Any:
    """``(token, choice, expert, place)`` of every choice that is not dropped."""
    for (token, choice), place in np.ndenumerate(places):
        if place < capacity:
            yield token, choice, experts[token, choice], place


def draw_dispatch(rng: np.random.Generator, case: Case[Routing]) -> dict[str, Any]:
    s = case.sizes
    _, experts, places = _routed(rng, s)
    x = _float(rng.standard_normal((s.tokens, s.width)))
    upstream = _float(rng.standard_normal((s.num_experts, s.capacity, s.width)))
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
        "y": _float(rng.standard_normal((s.num_experts, s.capacity, s.width))),
        "gates": _float(rng.uniform(0.2, 1, (s.tokens, s.k))),
        "experts": experts,
        "places": places,
        "upstream": _float(rng.standard_normal((s.tokens, s.width))),
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


def _flops(judged: Judged) -> Fact:
    """At most the products of a weighted sum over a token's choices, forward and backward: nothing times experts."""

    def look(e: Evidence) -> Fact:
        s = e.case.sizes
        most, message = 6 * s.tokens * s.k * s.width, ""
        if e.costs.flops > most:
            message = (
                f"a device computes {e.costs.flops:.4g} FLOPs in matrix products, and moving {s.tokens} tokens needs "
                f"none (at most {most:.4g} are allowed). What does it multiply by, and how much of that is zeros?"
            )
        return facts.at(e, "FLOPs", Kind.COMPUTE, message, e.costs.flops, most, unit=Unit.FLOPS)

    return facts.worst([look(e) for e in judged.all], "FLOPs", Kind.COMPUTE)


def moving_facts(judged: Judged) -> list[Fact]:
    too_much = "Which array has a dim for tokens and one for experts or places?"
    dropped = "Where is the token of this choice, is it dropped, and by what is it multiplied? "
    return [
        facts.arrays_match("values", judged.cases, "values", dropped),
        facts.arrays_match("gradients", judged.cases, "gradients", dropped, weight=2),
        _flops(judged),
        limits.temporaries_within(judged, MOVING_TEMPORARIES, too_much),
    ]


# `array.at[...].set` keeps who wrote each place for its derivative, and takes 3.3 times as much; a mask, 5 or more.
MOVING_TEMPORARIES = 4
_MOVED = Routing(tokens=20, num_experts=6, k=2, capacity=5, width=12)
# At the realistic size, 64 experts with a quarter more places than choices.
_MANY = _MOVED.but(tokens=8192, num_experts=64, capacity=320, width=1024)


def _moving(name: str, **how: Any) -> Task:
    return Task(
        wrapping=WRAPPINGS[name],
        points=2,
        point=("FLOPs",),
        cases=(
            Case("6 experts", ALONE, _MOVED, quick=True),
            Case(
                "one choice of 5 experts", ALONE, Routing(tokens=9, num_experts=5, k=1, capacity=2, width=8), quick=True
            ),
            Case("all of 3 experts", ALONE, Routing(tokens=7, num_experts=3, k=3, capacity=8, width=4)),
        ),
        unseen=lambda rng: unseen_case(rng, _unseen_routing(rng, width=10), (1,)),
        facts=moving_facts,
        at_scale=(Case("64 experts, width 1024", ALONE, _MANY), "6 experts"),
        stretches=({"tokens": 1024, "capacity": 320}, {"num_experts": 64}, {"width": 256}),
        naive_memory="multiplies_by_a_one_hot_mask" if name == "dispatch" else "multiplies_by_a_mask_of_gates",
        **how,
    )


DISPATCH = _moving("dispatch", draw=draw_dispatch, oracle=dispatch_oracle)
COMBINE = _moving("combine", draw=draw_combine, oracle=combine_oracle)

# moe_layer and overlapped_moe: every device's own tokens, experts split over devices.


def draw_layer(rng: np.random.Generator, case: Case[Layer]) -> dict[str, Any]:
    s, n = case.sizes, devices_of(case)
    params = draw_leaves(rng, layer_params(s), 0.3)
    params["router"]["bias"] = _float(rng.uniform(0, 0.1, s.num_experts))
    x = _float(rng.standard_normal((n * s.tokens, s.width)))
    upstream = {"y": rng.standard_normal(x.shape), "logits": rng.standard_normal((n * s.tokens, s.num_experts))}
    return {"params": params, "x": x, "upstream": jax.tree.map(_float, upstream)}


@lru_cache(maxsize=32)
def _layer_of_each_device(k: int, capacity: int) -> Any:
    def one(params, x, upstream):
        values, back = jax.vjp(lambda params, x: moe(params, x, k, capacity), params, x)
        return values, back((upstream["y"], upstream["logits"]))

    return jax.jit(jax.vmap(one, in_axes=(None, 0, 0)))


def layer_oracle(inputs: dict[str, Any], case: Case[Layer]) -> dict[str, Any]:
    """Each device's tokens compete for places separately; an expert's gradient is the sum over those it served."""
    s, n = case.sizes, devices_of(case)
    rows = jax.tree.map(lambda a: a.reshape(n, s.tokens, -1), (inputs["x"], inputs["upstream"]))
    found = _layer_of_each_device(s.k, s.capacity)(inputs["params"], *rows)
    (y, logits), (of_params, of_x) = jax.tree.map(np.asarray, found)

    def kept(gradient, spec):
        if not any(spec):
            return gradient
        # Devices are numbered in order of the mesh; those along ``expert`` share a copy of the experts.
        grid = gradient.reshape(*case.mesh.values(), *gradient.shape[1:])
        return grid.sum(list(case.mesh).index(expert_of(case)), dtype=np.float64).astype(np.float32)

    gradients = jax.tree.map(kept, of_params, expert_specs(of_params, case))
    flat = {"y": y, "logits": logits, "x": of_x}
    flat = {name: leaf.reshape(-1, leaf.shape[-1]) for name, leaf in flat.items()}
    values = {"y": flat["y"], "logits": flat["logits"]}
    return {"values": values, "gradients": {"params": gradients, "x": flat["x"]}}


def _traveling(e: Evidence, layers: int = 1) -> float:
    """Bytes that a device sends to dispatch and combine, forward and backward: its places four times."""
    s, n = e.case.sizes, e.case.mesh[expert_of(e.case)]
    return 4 * layers * (n - 1) / n * 4 * s.num_experts * s.capacity * s.width


def layer_facts(judged: Judged) -> list[Fact]:
    """Right numbers, and nothing sent but tokens to their experts and back."""
    whose = "Whose tokens did this expert serve, in which places, and which of its choices does a token get back? "

    def over(case: Case[Any]) -> tuple[str]:
        return (expert_of(case),)

    return [
        facts.arrays_match("values", judged.cases, "values", whose),
        facts.arrays_match("gradients", judged.cases, "gradients", whose, weight=2),
        byte_facts.bytes_sent("all-to-all bytes", judged.all, "all_to_all", _traveling, axes=over),
        byte_facts.only_collectives("other collectives", judged.all, ("all_to_all",)),
    ]


def moe_layer_facts(judged: Judged) -> list[Fact]:
    zeros = "Which products have a dim for all experts, and how many of the numbers in it are zeros?"
    return [
        *layer_facts(judged),
        limits.flops_within(judged, 1.1, zeros, weight=2),
        limits.temporaries_within(judged, LAYER_TEMPORARIES, "Which array has a dim for tokens and one for experts?"),
    ]


# Tokens by a table of their places take 1.53 times as much, and masks 2.94 times.
LAYER_TEMPORARIES = 2
# Two chunks expose about half, and a program that starts each transfer one chunk ahead gains 0.24.
EXPOSED, GAINED = 0.5, 0.2


def overlapped_facts(judged: Judged) -> list[Fact]:
    waits = (
        "Look at the timeline: what does the device wait for, forward and backward, and which other places could their "
        "experts compute in the meantime?"
    )
    return [
        *layer_facts(judged),
        limits.exposed_within(judged, EXPOSED, waits, weight=3, than=limits.NAIVE),
        limits.time_gained(judged, GAINED, waits, weight=2),
    ]


# As many experts at both sizes, and as many places as choices, so that the programs compare.
_LAYER = Layer(tokens=128, width=16, hidden=12, num_experts=64, k=4, capacity=8, num_chunks=4)
_ODD = Layer(tokens=10, width=6, hidden=8, num_experts=6, k=2, capacity=3, num_chunks=3)
# Experts as small and as many as in DeepSeek-V3's proportions, where tokens take about as long as products.
_LARGE = _LAYER.but(tokens=8192, width=2048, hidden=1024, capacity=512)


def _unseen_layer(rng: np.random.Generator) -> Case[Layer]:
    sizes = Layer(tokens=40, width=10, hidden=6, num_experts=36, k=int(rng.choice([2, 4])), capacity=3, num_chunks=3)
    return unseen_case(rng, sizes, (3,), (4,), (6,), (2, 3))


def _layer(name: str, **how: Any) -> Task:
    return Task(
        wrapping=WRAPPINGS[name],
        cases=(
            Case("expert=8", {"expert": 8}, _LAYER, quick=True),
            Case("pipe=3 x tensor=2", {"pipe": 3, "tensor": 2}, _ODD, quick=True),
            Case("expert=3 x data=2", {"expert": 3, "data": 2}, _ODD.but(k=1, num_experts=9, num_chunks=1, capacity=2)),
            Case("expert=1", {"expert": 1}, _ODD.but(k=5)),
        ),
        unseen=_unseen_layer,
        draw=draw_layer,
        oracle=layer_oracle,
        at_scale=(Case("expert=8, 64 experts of width 2048", {"expert": 8}, _LARGE), "expert=8"),
        stretches=({"tokens": 512, "capacity": 32}, {"width": 256, "hidden": 128}),
        **how,
    )


MOE_LAYER = _layer(
    "moe_layer",
    points=4,
    point=("all-to-all bytes", "FLOPs"),
    facts=moe_layer_facts,
    naive_memory="multiplies_by_one_hot_masks",
)
OVERLAPPED_MOE = _layer(
    "overlapped_moe",
    points=3,
    point=("exposed communication", "predicted time"),
    facts=overlapped_facts,
    naive_time="waits_for_every_place",
)

# moe_step: experts are averaged over the data axis alone, all other leaves over both.


def draw_step(rng: np.random.Generator, case: Case[Training]) -> dict[str, Any]:
    s, rows = case.sizes, devices_of(case) * case.sizes.rows
    params = draw_leaves(rng, moe_shapes(s), rng.uniform(0.2, 0.4))
    layers, bias = params["layers"], params["layers"]["moe"]["router"]["bias"]
    layers["moe"]["router"]["bias"] = _float(rng.uniform(0, 0.1, bias.shape))
    layers["norm"]["scale"] += 1  # else experts read so little that an update of them is lost in rounding
    return {
        "params": params,
        "batch": stacked(
            lambda: token_batch(int(rng.integers(2**31)), 0, batch=rows, seq=s.seq, vocab=s.vocab), s.steps
        ),
        "learning_rate": draw_rate(rng, s.rate_scale),
    }


@lru_cache(maxsize=32)
def _steps_on_one_device(sizes: Training, groups: int) -> Any:
    return sgd(lambda params, batch: moe_loss(build_moe(sizes), params, batch, sizes.capacity, groups))


def step_oracle(inputs: dict[str, Any], case: Case[Training]) -> dict[str, Any]:
    """The steps on one device, where each device's tokens compete for places separately."""
    run = _steps_on_one_device(case.sizes, devices_of(case))
    after, losses, gradients = run(inputs["params"], (inputs["batch"],), inputs["learning_rate"])

    def copies(leaf, spec):
        holders = holders_of(spec, case)
        return np.repeat(leaf[None], int(np.prod([case.mesh[axis] for axis in holders])), 0) if holders else leaf

    specs = expert_specs(after, case, skip=1)
    after, gradients = (jax.tree.map(copies, tree, specs) for tree in (after, gradients))
    return {"values": {"loss": copies(losses, P()), "params": after}, "gradients": gradients}


def _bytes_of(case: Case[Training]) -> tuple[float, float]:
    """Bytes of a device's own experts, and of all other leaves."""
    shapes = moe_shapes(case.sizes)
    every = zip(jax.tree.leaves(shapes), jax.tree.leaves(expert_specs(shapes, case, 1)), strict=True)
    sizes = [(4 * leaf.size, any(spec)) for leaf, spec in every]
    own = sum(size for size, split in sizes if split) / case.mesh[expert_of(case)]
    return own, sum(size for size, split in sizes if not split)


def _averaged(most: bool) -> Callable[[Evidence], float]:
    """The least, or the most, bytes of all-reduces: over all devices at once, or over one axis and then the other.

    The router's bias has no gradient, and may be left out.
    """

    def total(e: Evidence) -> float:
        s, (own, others) = e.case.sizes, _bytes_of(e.case)
        data, n = e.case.mesh[data_of(e.case)], devices_of(e.case)
        counts, bias = 4 * s.num_layers * s.num_experts, 4 * s.num_layers * s.num_experts
        if not most:
            return s.steps * (ring(data, own) + ring(n, others - bias + counts))
        every = others + 3 * counts + 4 * (4 * s.num_layers + 4)
        return s.steps * (ring(data, own) + sum(ring(size, every) for size in e.case.mesh.values()))

    return total


def step_facts(judged: Judged) -> list[Fact]:
    whose = "Over which axes do devices have copies of this leaf, and whose tokens has its gradient? "
    own = "Which devices have a copy of an expert?"
    return [
        *facts.values_and_gradients(judged.cases, gradients=whose, step=True),
        byte_facts.bytes_sent(
            "all-reduce bytes", judged.cases, "all_reduce", _averaged(True), least=_averaged(False), hint=own
        ),
        byte_facts.bytes_sent(
            "all-to-all bytes",
            judged.cases,
            "all_to_all",
            lambda e: e.case.sizes.steps * _traveling(e, e.case.sizes.num_layers),
        ),
        byte_facts.only_collectives("other collectives", judged.cases, ("all_reduce", "all_to_all")),
    ]


_STEP = Training(width=8, hidden=12, num_layers=2, num_experts=8, k=2, capacity=5, vocab=16, seq=6, rows=2)


def _step_case(name: str, quick: bool = False, **sizes: Any) -> Case[Training]:
    mesh = dict(part.split("=") for part in name.split(" x "))
    return Case(name, {axis: int(size) for axis, size in mesh.items()}, _STEP.but(**sizes), quick=quick)


def _unseen_step(rng: np.random.Generator) -> Case[Training]:
    sizes = _STEP.but(num_experts=12, k=int(rng.choice([1, 3])), vocab=24, rows=3, capacity=7, balance=0.2)
    return unseen_case(rng, sizes, (2, 2), (2, 3), (3, 2), (1, 6))


MOE_STEP = Task(
    wrapping=WRAPPINGS["moe_step"],
    points=5,
    point=("all-reduce bytes", "other collectives"),
    cases=(
        _step_case("data=2 x expert=4", quick=True),
        _step_case("replica=3 x device=2", quick=True, num_experts=6, rows=1, seq=8, k=1),
        _step_case("data=1 x expert=8"),
        _step_case("expert=1 x data=5", num_experts=3, num_layers=1, steps=2, rate_scale=3.0),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
)
