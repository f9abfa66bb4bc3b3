"""Grading of the functions of ``async_tensor_parallel``: products in rings, and two layers made of them."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.async_tensor_parallel.wrapping import (
    GATHER,
    KINDS,
    SCATTER,
    Mlp,
    Product,
    Rows,
    mlp_shapes,
    rows_shape,
)
from autograder.chapters.draws import compile_oracle, draw_leaves, unseen_mesh
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN
from autograder.contract.case_builders import groups_of, parts_of, tensor_of
from autograder.contract.orders import orders, places
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Direction, Fact, Kind, Unit
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("async_tensor_parallel")
# At these sizes, on eight idealised H100s, transferring a chunk of rows takes about as long as multiplying it.
WIDTH, HIDDEN, TOKENS = 4608, 18432, 4096
# Limits relative to the synchronous version: time and memory of a ring, and time of a bidirectional one. A ring of sums
# takes 0.71, where one of rows takes 0.64: seven times, two chunks are read and one is written, and an addition waits
# for its transfer, so nothing hides it.
TIME = {GATHER: 0.75, SCATTER: 0.8}
TEMPORARIES, BOTH_WAYS = 0.6, 0.9
SMALL = "tensor=8, forward alone"


def chunk_bytes(case: Case[Rows], features: int) -> int:
    """Bytes of one device's rows with ``features``, in float32."""
    return 4 * max(case.sizes.batch, 1) * case.sizes.rows * features


def grouped(array: np.ndarray, case: Case[Rows]) -> np.ndarray:
    """The input of each group of devices, ``[groups, batch, rows, features]``, in float64."""
    return array.reshape(groups_of(case), -1, *array.shape[-2:]).astype(np.float64)


def unseen(rng: np.random.Generator) -> tuple[dict[str, int], dict[str, Any]]:
    """An unseen mesh, the feature axis last, and rows; some cases have no batch."""
    mesh = unseen_mesh(rng, (4,), (3,), (2, 3), (2, 4), (4, 2), (5,), (6,))
    return mesh, {"rows": int(rng.choice([2, 4, 6])), "batch": int(rng.integers(len(mesh) - 1, 4))}


# Four products in rings: two unidirectional, and two that send half of everything in each direction.


def draw_product(name: str, rng: np.random.Generator, case: Case[Product]) -> dict[str, Any]:
    """Rows and gradients of any size, and a kernel that preserves it."""
    shapes = WRAPPINGS[name].input_shapes(case)
    inputs = {name: rng.uniform(0.5, 2) * rng.standard_normal(shape.shape) for name, shape in shapes.items()}
    inputs["kernel"] /= np.sqrt(len(inputs["kernel"]))
    return {name: array.astype(np.float32) for name, array in inputs.items()}


def product(inputs: dict[str, Any], case: Case[Product]) -> dict[str, Any]:
    """One product on one device, and its gradients."""
    kernel = inputs["kernel"].astype(np.float64)
    values = (inputs["x"].astype(np.float64) @ kernel).astype(np.float32)
    if "upstream" not in inputs:
        return {"values": values}
    of_x = (inputs["upstream"].astype(np.float64) @ kernel.T).astype(np.float32)
    x, upstream = grouped(inputs["x"], case), grouped(inputs["upstream"], case)
    of_kernel = np.einsum("gbri,gbro->gio", x, upstream).astype(np.float32)
    return {"values": values, "gradients": {"x": of_x, "kernel": of_kernel.reshape(-1, of_kernel.shape[-1])}}


_SENTENCES = {
    GATHER: "the rows of the one with index `i` belong at place `{}` of the result, and not at place `i`.",
    SCATTER: "the one with index `i` leaves with part `{}` of the rows, and not with part `i`.",
}


def ring_oracle(inputs: dict[str, Any], case: Case[Product], kind: str) -> dict[str, Any]:
    """The product, its rows in the order that the case requires."""
    place, reordered = places(case, parts_of(case)), dict(inputs)
    moved, back = ("x", "gradients") if kind == GATHER else ("upstream", "values")
    if moved in reordered:
        reordered[moved] = _chunks(reordered[moved], np.argsort(place))
    results = product(reordered, case)
    if kind == SCATTER:
        return {**results, back: _chunks(results[back], place)}
    if back in results:
        results[back] = {**results[back], "x": _chunks(results[back]["x"], place)}
    return results


def _chunks(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """``[..., rows, features]`` with its devices' rows in that order."""
    chunks = rows.reshape(*rows.shape[:-2], len(order), -1, rows.shape[-1])
    return chunks[..., order, :, :].reshape(rows.shape)


def _permuted(evidence: list[Evidence], features: str) -> Fact:
    """Require permutes of (n-1)/n of the rows forward, as much again backward, and at most once more for the kernel."""

    def form(e: Evidence, most: bool) -> float:
        once = (parts_of(e.case) - 1) * chunk_bytes(e.case, getattr(e.case.sizes, features))
        return once * (1 if not e.case.sizes.backward else 3 if most else 2)

    least = partial(form, most=False)
    return byte_facts.bytes_sent("permute bytes", evidence, "collective_permute", partial(form, most=True), least=least)


def equal_ways(e: Evidence) -> Fact:
    """Require equal bytes in both directions along the axis, all of them to neighbours, as on a ring of links."""
    permutes = [c for c in e.costs.collectives if c.kind == "collective_permute"]
    far = [c for c in permutes if c.shift not in (1, c.group_size - 1)]
    forth = sum(c.total_bytes for c in permutes if c.shift == 1)
    back = sum(c.total_bytes for c in permutes if c.shift == c.group_size - 1)
    sends, message = forth + back > 0 or parts_of(e.case) == 1, ""
    if far:
        message = (
            f"{e.case.place} a device sends {sum(c.total_bytes for c in far):,.0f} bytes past its two neighbours. On a "
            "ring of links, they occupy every link on their way. How many places does each half move in a step?"
        )
    elif not sends or abs(forth - back) > 1e-4 * max(forth, back):
        message = (
            f"{e.case.place} a device sends {forth:,.0f} bytes towards higher indices along the axis and "
            f"{back:,.0f} towards lower ones. Which way does each half go?"
        )
    options = {"direction": Direction.EXACTLY, "unit": Unit.BYTES, "weight": 2, "line": far[0].line if far else ""}
    sent = f"{forth:,.0f} up, {back:,.0f} down"
    return facts.case_fact(e, "bytes each way", Kind.COMMUNICATION, message, sent, "equal", **options)


def ring_facts(evidence: TaskEvidence, kind: str, both_ways: bool) -> list[Fact]:
    where = {
        GATHER: "After k steps, whose rows does a device hold, and where do they belong in the result? ",
        SCATTER: "When a partial sum arrives, which rows is it for, and on which device does it end? ",
    }
    back = "Is every device's product differentiated, and does each gradient end on the device that it belongs to? "
    late = (
        "What does each transfer wait for, and what is computed meanwhile? In an iteration of a loop, a transfer can "
        "hide behind computations that neither use its result nor compute its input."
    )
    resident = "Which array is as large as all rows together, and must all of it exist at once?"
    slow = "What is read, written or copied in every step besides the products, and how large is it?"
    differentiated = [e for e in evidence.cases if e.case.sizes.backward]
    common = [
        facts.arrays_match("values", evidence.cases, "values", where[kind], weight=2),
        facts.arrays_match("gradients", differentiated, "gradients", back),
        _permuted(evidence.programs, "d_in" if kind == GATHER else "d_out"),
        byte_facts.only_collectives("other collectives", evidence.programs, ("collective_permute",)),
    ]
    naive: dict[str, Any] = {"than": limits.NAIVE}
    if both_ways:
        ways = facts.worst([equal_ways(e) for e in evidence.programs])
        return [*common, ways, time_limits.time_within(evidence, BOTH_WAYS, slow, weight=2, **naive)]
    return [
        *common,
        time_limits.time_within(evidence, TIME[kind], late, weight=3, **naive),
        limits.temporaries_within(evidence, TEMPORARIES, resident, weight=2, **naive),
    ]


def _ring(name: str, points: float, *, both_ways: bool) -> Task:
    """The task of one of the four; the naive baseline is the synchronous one, for both memory and time."""
    kind = KINDS[name]
    # Dims of one device; a scatter's are those of a gather in reverse.
    small, large = (6, 10), (WIDTH, HIDDEN // 8)
    (d_in, d_out), (wide_in, wide_out) = (small, large) if kind == GATHER else (small[::-1], large[::-1])
    sizes, naive = Product(rows=2, d_in=d_in, d_out=d_out), "gathers_then_multiplies"
    batched = sizes.replace(rows=4, batch=5, **{"d_out" if kind == GATHER else "d_in": 7})
    # Half of twice as many rows: with fewer, a product would be bound by its kernel, and halving would show nothing.
    tokens = TOKENS * (2 if both_ways else 1)
    at_scale = Product(rows=tokens // 8, d_in=wide_in, d_out=wide_out, backward=False)

    def unseen_product(rng: np.random.Generator) -> Case[Product]:
        mesh, rows = unseen(rng)
        fixed, free = int(rng.choice([4, 8, 10])), int(rng.choice([3, 6, 7]))
        d_in, d_out = (fixed, free) if kind == GATHER else (free, fixed)
        return Case(UNSEEN, mesh, Product(d_in=d_in, d_out=d_out, **rows))

    return Task(
        wrapping=WRAPPINGS[name],
        points=points,
        core_facts=("predicted time", *(["bytes each way"] if both_ways else [])),
        cases=(
            Case.on({"tensor": 8}, sizes, quick=True),
            Case.on({"tensor": 8}, sizes.replace(backward=False), "forward alone", quick=True),
            Case.on({"data": 2, "tensor": 3}, batched, quick=True),
            Case.on({"tensor": 2, "data": 4}, batched),
            Case.on({"model": 4}, sizes),
            Case.on({"data": 8, "tensor": 1}, batched),
        ),
        unseen=unseen_product,
        draw=partial(draw_product, name),
        oracle=partial(ring_oracle, kind=kind),
        facts=partial(ring_facts, kind=kind, both_ways=both_ways),
        at_scale=(Case.on({"tensor": 8}, at_scale, f"width {WIDTH}"), SMALL),
        naive_memory=naive if kind == GATHER else "multiplies_then_scatters",
        naive_time=naive if kind == GATHER else "multiplies_then_scatters",
        variants=orders(_SENTENCES[kind]),
        varies_with="rows",  # a gather's and a scatter's rows then match, as in ``async_tp_mlp``
    )


RINGS = (
    _ring("ring_gather_matmul", 3, both_ways=False),
    _ring("matmul_ring_scatter", 3, both_ways=False),
    _ring("bidirectional_gather_matmul", 2, both_ways=True),
    _ring("bidirectional_matmul_scatter", 2, both_ways=True),
)

# async_tp_mlp: two layers, forward and backward, with every transfer next to a product.

# Relative to tp_mlp's forward and backward pass: exposed communication, total time, and live temporaries. The reference
# has 1.22 times its temporaries, and Python loops with JAX's own derivative, which are as fast, 2.1 times.
EXPOSED, MLP_TIME, MLP_TEMPORARIES = 0.4, 1.0, 1.5


def unseen_mlp(rng: np.random.Generator) -> Case[Mlp]:
    mesh, rows = unseen(rng)
    return Case(UNSEEN, mesh, Mlp(width=int(rng.choice([4, 7])), hidden=int(rng.choice([3, 7])), **rows))


def draw_mlp(rng: np.random.Generator, case: Case[Mlp]) -> dict[str, Any]:
    shape = rows_shape(case, case.sizes.width)
    x, upstream = (np.float32(rng.uniform(0.5, 2) * rng.standard_normal(shape)) for _ in range(2))
    return {"params": draw_leaves(rng, mlp_shapes(case), 0.5), "x": x, "upstream": upstream}


def mlp_oracle(inputs: dict[str, Any], case: Case[Mlp]) -> dict[str, Any]:
    """The MLP on one device, and the gradients of half of ``upstream`` times the square of its output."""
    n, groups = parts_of(case), groups_of(case)
    x, upstream = (inputs[name].reshape(groups, -1, *inputs[name].shape[-2:]) for name in ("x", "upstream"))
    values, of_params, of_x = jax.tree.map(np.asarray, _both_ways(inputs["params"], x, upstream))
    # The output bias is whole on every device, and each has the gradient from its own rows.
    own = values * upstream
    rows = own.reshape(groups, -1, n, own.shape[2] // n, own.shape[3])
    if case.sizes.shared:  # every group has the sum
        of_params, rows = (jax.tree.map(lambda a: np.broadcast_to(a.sum(0), a.shape), x) for x in (of_params, rows))
    of_params["down"]["bias"] = rows.sum((1, 3), np.float64).astype(np.float32).reshape(-1)
    for layer, leaf in (("up", "kernel"), ("down", "kernel"), ("up", "bias")):
        gradient = of_params[layer][leaf]
        of_params[layer][leaf] = gradient.reshape(-1, *gradient.shape[2:])
    shape = inputs["x"].shape
    return {"values": values.reshape(shape), "gradients": {"params": of_params, "x": of_x.reshape(shape)}}


def plain(params: Any, x: Any) -> Any:
    """The two layers on one device."""
    hidden = jax.nn.gelu(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


@cache
def _grouped() -> Any:
    def run(params, x, upstream):
        value, transpose = jax.vjp(plain, params, x)
        return value, *transpose(upstream * value)

    return compile_oracle(jax.vmap(run, in_axes=(None, 0, 0)))


def _both_ways(params: Any, x: Any, upstream: Any) -> Any:
    return _grouped()(jax.tree.map(jnp.asarray, params), x, upstream)


def mlp_facts(evidence: TaskEvidence) -> list[Fact]:
    exposed = (
        "Which transfer is it, and in which pass? What is computed in the same iteration that neither uses its result "
        "nor computes its input?"
    )
    slow = (
        "Little may be exposed, and yet this is slower than waiting: what does the backward pass read and write in "
        "every step of a ring that it would not without one?"
    )
    bias = "Which bias belongs to a device's own features and which to finished rows, and how often is each added?"
    back = "Does each device get the gradient of its own rows, and is a kernel's gradient the sum over all rows?"
    resident = (
        "How many arrays as large as a kernel does the backward pass have at once, and how many gradients do they form?"
    )

    def form(e: Evidence) -> float:
        return (parts_of(e.case) - 1) * chunk_bytes(e.case, e.case.sizes.width)

    def permutes_alone(cases: list[Evidence], over: Any = None) -> Fact:
        return byte_facts.only_collectives("other collectives", cases, ("collective_permute",), over)

    # If layers are the same over the other axes, JAX sums their gradients over these axes.
    own, shared = ([e for e in evidence.programs if e.case.sizes.shared is flag] for flag in (False, True))
    other_collectives = facts.worst([permutes_alone(own), *([permutes_alone(shared, tensor_of)] if shared else [])])
    return [
        *facts.values_and_gradients(evidence.cases, bias, back, norm="gradients/params"),
        byte_facts.bytes_sent("permute bytes", evidence.programs, "collective_permute", form, times=(4, 6)),
        other_collectives,
        time_limits.exposed_within(evidence, EXPOSED, exposed, weight=4, than=limits.NAIVE),
        time_limits.time_within(evidence, MLP_TIME, slow, weight=2, than=limits.NAIVE),
        limits.temporaries_within(evidence, MLP_TEMPORARIES, resident, weight=2, than=limits.NAIVE),
    ]


_MLP = Mlp(rows=4, batch=5, width=6, hidden=7)

ASYNC_TP_MLP = Task(
    wrapping=WRAPPINGS["async_tp_mlp"],
    points=4,
    core_facts=("exposed communication",),
    cases=(
        Case.on({"tensor": 8}, _MLP.replace(rows=2, batch=0, hidden=10), quick=True),
        Case.on({"data": 2, "tensor": 3}, _MLP, quick=True),
        Case.on({"tensor": 2, "data": 4}, _MLP.replace(batch=1)),
        Case.on({"data": 8, "tensor": 1}, _MLP),
        Case.on({"model": 4}, _MLP.replace(rows=3, batch=0)),
        Case.on({"data": 2, "tensor": 3}, _MLP.replace(shared=True), "layers the same over data"),
    ),
    unseen=unseen_mlp,
    draw=draw_mlp,
    oracle=mlp_oracle,
    facts=mlp_facts,
    at_scale=(
        Case.on({"tensor": 8}, Mlp(rows=TOKENS // 8, width=WIDTH, hidden=HIDDEN // 8), f"width {WIDTH}"),
        "tensor=8",
    ),
    naive_memory="synchronous",
    naive_time="synchronous",
    compiled_exposed=EXPOSED,
)
