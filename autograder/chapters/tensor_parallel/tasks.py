"""Grading of the functions of ``tensor_parallel``: layers on one device, permitted communication, and whole steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.draws import (
    compile_oracle,
    draw_batches,
    draw_leaves,
    draw_rate,
    sgd_on_one_device,
    unseen_mesh,
)
from autograder.chapters.tensor_parallel.init import UNSEEN_MESHES
from autograder.chapters.tensor_parallel.wrapping import LAYERS, Dense, Heads, Mlp, StepSizes, leaf, rows_of, specs_of
from autograder.contract import byte_facts, facts, time_limits
from autograder.contract.case import UNSEEN
from autograder.contract.case_builders import groups_of, params_of, parts_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.text import count_of
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings
from course.program.ir import plain_kind

WRAPPINGS = wrappings("tensor_parallel")
FORWARD, FORWARD_ALONE = "collectives forward", "tensor=3, forward"
ALLOWED = ("all_gather", "reduce_scatter")
# The communicated features, then counts forward and backward: gathers, further gathers allowed, scatters.
Travels = tuple[str, tuple[int, int], tuple[int, int], tuple[int, int]]
SHARE = "Which rows has each device seen, and how often is each counted? "
BIAS = "Are the rows in their original order, and is the bias added exactly once to each? "
BETWEEN = "What is computed between the two layers? What is added to the result, and how often? "
HEADS = "Which positions does each position see, what are scores divided by, and which features make up a head? "


def draw_layer(name: str, rng: np.random.Generator, case: Case[Any]) -> dict[str, Any]:
    """Parameters about as large as trained ones, nonzero biases, activations of any size."""
    layer = LAYERS[name](case)

    def weights(struct):
        fan_in = math.prod(struct.shape[:-1]) if len(struct.shape) < 4 else struct.shape[0]
        scale = fan_in**-0.5 if len(struct.shape) > 1 else 1.0
        return np.asarray(scale * rng.standard_normal(struct.shape), struct.dtype)

    inputs = {
        "params": jax.tree.map(weights, layer.params),
        "x": draw_leaves(rng, leaf(*layer.x[0]), rng.uniform(0.5, 2)),
    }
    if spread := getattr(case.sizes, "spread", 0):
        inputs["x"] /= np.std(inputs["x"])
        inputs["params"]["qkv"]["kernel"][:, :2] *= np.float32(spread**0.5)
    back = draw_leaves(rng, leaf(*layer.y[0]), rng.uniform(0.1, 10))
    return inputs | ({"upstream": back} if case.sizes.backward else {})


def layer_oracle(inputs: dict[str, Any], case: Case[Any], on_one_device: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """The layer on one device, for each place's rows; for a replicated leaf, the sum of its holders' gradients."""
    run = _each_place(on_one_device, groups_of(case))
    values, gradients = jax.tree.map(np.asarray, run(inputs["params"], inputs["x"], inputs.get("upstream")))
    return {"values": values} | ({} if gradients is None else {"gradients": gradients})


@lru_cache(maxsize=32)
def _each_place(on_one_device: Callable[[Any, Any], Any], places: int) -> Any:
    def by_place(a):
        return a.reshape(places, -1, *a.shape[1:])

    def whole(a):
        return a.reshape(-1, *a.shape[2:])

    def run(params, x, upstream):
        if upstream is None:
            return whole(jax.vmap(on_one_device, in_axes=(None, 0))(params, by_place(x))), None

        def run_place(x, upstream):
            values, back = jax.vjp(on_one_device, params, x)
            return values, back(upstream)

        values, (of_params, of_x) = jax.vmap(run_place)(by_place(x), by_place(upstream))
        return whole(values), {"x": whole(of_x), "params": of_params}

    return compile_oracle(run)


def summed(e: Evidence) -> Evidence:
    """Add up the shares of each replicated leaf's gradient: no device needs to hold all of it."""
    added = {
        name: a.reshape(groups_of(e.case), -1, *a.shape[1:]).sum(1, dtype=a.dtype)
        for name, a in e.measured.items()
        if name.startswith("gradients/params/") and a.shape != e.expected[name].shape
    }
    return replace(e, measured={**e.measured, **added})


def ring_bytes(case: Case[Any], features: int) -> float:
    """(n-1)/n of the bytes of one place's rows with these features: one all-gather or reduce-scatter of them."""
    s, n = case.sizes, parts_of(case)
    return 4 * (n - 1) / n * max(s.batch, 1) * math.prod(s.more) * s.rows * features


def sent(
    name: str, cases: list[Evidence], kind: str, features: str, least: tuple[int, int], more: tuple[int, int] = (0, 0)
) -> Fact:
    """Require ``least`` collectives of one kind, forward and backward, and allow up to ``more`` in addition.

    ``features`` names the size of the array that is sent: the smaller one.
    """

    def times(e: Evidence, pair: tuple[int, int]) -> float:
        return (pair[0] + e.case.sizes.backward * pair[1]) * ring_bytes(e.case, getattr(e.case.sizes, features))

    def most(e: Evidence) -> float:
        return times(e, least) + times(e, more)

    return byte_facts.bytes_sent(name, cases, kind, most, least=lambda e: times(e, least))


def layer_facts(evidence: TaskEvidence, travels: Travels, forward: str = BIAS) -> list[Fact]:
    """Values, with the question ``forward``, gradients, and communication."""
    unknown = facts.unmeasured("gradients", Kind.GRADIENTS, "no case of this check is differentiated", 2)
    backward = [summed(e) for e in evidence.cases if e.case.sizes.backward]
    features, gathers, extra_gathers, scatters = travels
    values = facts.arrays_match("values", evidence.cases, "values", forward)
    hint = SHARE if values.passed else "The values are already wrong, and gradients depend on them: look there first. "
    return [
        values,
        facts.arrays_match("gradients", backward, "gradients", hint, weight=2) if backward else unknown,
        sent("all-gather bytes", evidence.programs, "all_gather", features, gathers, extra_gathers),
        sent("reduce-scatter bytes", evidence.programs, "reduce_scatter", features, scatters),
        byte_facts.only_collectives("other collectives", evidence.programs, ALLOWED),
    ]


# column_parallel_dense and row_parallel_dense: rows are gathered at the input, or summed at the output.


def dense(params: Any, x: Any) -> Any:
    """The layer on one device, ``[..., d_in] -> [..., d_out]``."""
    return x @ params["kernel"] + params.get("bias", 0)


def _dense(name: str, narrow: str, wide: str, judge: Callable[[TaskEvidence], list[Fact]]) -> Task:
    # Twice the rows with the features that are sent are fewer numbers than the kernel, and than rows with the others.
    features: dict[str, Any] = {narrow: 10, wide: 168}
    sizes = Dense(rows=24, **features)

    def unseen(rng: np.random.Generator) -> Case[Dense]:
        mesh = unseen_mesh(rng, *UNSEEN_MESHES)
        n, batch, bias = list(mesh.values())[-1], int(rng.choice([0, 2])), bool(rng.integers(2))
        features: dict[str, Any] = {narrow: int(rng.choice([5, 7, 10])), wide: int(rng.integers(7, 12)) * n}
        return Case(UNSEEN, mesh, Dense(batch=batch, bias=bias, rows=int(rng.choice([1, 2])) * n, **features))

    return Task(
        wrapping=WRAPPINGS[name],
        points=2,
        core_facts=("all-gather bytes" if narrow == "d_in" else "reduce-scatter bytes",),
        cases=(
            Case.on({"data": 2, "tensor": 4}, sizes, quick=True),
            Case.on({"tensor": 6}, sizes.replace(bias=False, batch=0), "no bias", quick=True),
            Case.on({"replica": 2, "model": 2}, sizes.replace(more=(5,), rows=6), "two dims in front"),
            Case.on({"data": 2, "tensor": 1}, sizes.replace(bias=False)),
        ),
        unseen=unseen,
        draw=partial(draw_layer, name),
        oracle=partial(layer_oracle, on_one_device=dense),
        facts=judge,
    )


def column_facts(evidence: TaskEvidence) -> list[Fact]:
    return layer_facts(evidence, ("d_in", (1, 0), (0, 1), (0, 1)))


def row_facts(evidence: TaskEvidence) -> list[Fact]:
    return layer_facts(evidence, ("d_out", (0, 1), (0, 0), (1, 0)))


COLUMN_PARALLEL_DENSE = _dense("column_parallel_dense", "d_in", "d_out", column_facts)
ROW_PARALLEL_DENSE = _dense("row_parallel_dense", "d_out", "d_in", row_facts)

# tp_mlp and tp_attention: two dense layers, with no communication between them.

# Right answers that gather or multiply again in the backward pass take up to 1.12 times as long; a step that sends
# twice as much by all-reduces takes 1.33 times, and the naive baselines, which send the larger arrays, 1.85 and 1.88.
SLOWER = 1.25


def mlp_on_one_device(params: Any, x: Any) -> Any:
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))


def attention_on_one_device(params: Any, x: Any) -> Any:
    """Causal attention, one softmax per head; ``[batch, seq, width]`` to the same shape."""
    q, k, v = jnp.einsum("bsw,wthd->tbshd", x, params["qkv"]["kernel"])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd,hdw->bqw", weights, v, params["out"]["kernel"])


def _collectives_forward(e: Evidence) -> Fact:
    """One all-gather and one reduce-scatter."""
    n = int(parts_of(e.case) > 1)
    runs = {kind: sum(c.count for c in e.costs.collectives if c.kind == kind) for kind in ALLOWED}
    total = sum(c.count for c in e.costs.collectives)
    counts = ", ".join(f"{count} {plain_kind(kind)}" for kind, count in runs.items())
    counts += f", {count_of(total - sum(runs.values()), 'other')}" if total > sum(runs.values()) else ""
    message, line = "", e.line
    if total != 2 * n or any(count != n for count in runs.values()):
        between = "Can a device go from the first dense layer to the second with only the features that it has?"
        if runs["all_gather"] > n:
            between = "What is gathered several times, and do the products need other rows?"
        message = f"{e.case.place} the forward pass has {counts}; expected {n} of each. {between}"
        line = max(e.costs.collectives, key=lambda c: c.total_bytes).line if total else e.line
    return facts.case_fact(e, FORWARD, Kind.COMMUNICATION, message, counts, f"{n} of each", line=line)


def block_facts(evidence: TaskEvidence, values: str) -> list[Fact]:
    forward = [_collectives_forward(e) for e in evidence.cases if not e.case.sizes.backward]
    why = "this check has no case without a backward pass"
    return [
        *layer_facts(evidence, ("width", (1, 1), (0, 1), (1, 1)), values),
        facts.worst(forward) if forward else facts.unmeasured(FORWARD, Kind.COMMUNICATION, why),
    ]


def mlp_facts(evidence: TaskEvidence) -> list[Fact]:
    too_slow = "Which transfer takes longest, and does any device need the whole of that array?"
    return [*block_facts(evidence, BETWEEN), time_limits.time_within(evidence, SLOWER, too_slow, weight=2)]


_MLP = Mlp(rows=48, width=10, hidden=144)
_HEADS = Heads(rows=24, width=10, num_heads=8, head_dim=5)


def _unseen_mlp(rng: np.random.Generator) -> Case[Mlp]:
    mesh = unseen_mesh(rng, *UNSEEN_MESHES)
    n, batch, width = list(mesh.values())[-1], int(rng.choice([0, 2])), int(rng.choice([5, 8, 10]))
    return Case(UNSEEN, mesh, Mlp(batch=batch, rows=2 * n, width=width, hidden=int(rng.integers(5, 9)) * n))


def _unseen_attention(rng: np.random.Generator) -> Case[Heads]:
    mesh = unseen_mesh(rng, *UNSEEN_MESHES)
    n, batch, width = list(mesh.values())[-1], int(rng.choice([1, 2])), int(rng.choice([6, 10]))
    rows, heads = (int(rng.choice([1, 2])) * n for _ in range(2))
    return Case(UNSEEN, mesh, Heads(batch=batch, rows=rows, width=width, num_heads=heads, head_dim=3))


TP_MLP = Task(
    wrapping=WRAPPINGS["tp_mlp"],
    points=3,
    core_facts=("collectives forward",),
    cases=(
        Case.on({"data": 2, "tensor": 4}, _MLP, quick=True),
        Case.on({"tensor": 8}, _MLP.replace(batch=0), quick=True),
        Case.on({"tensor": 3}, _MLP.replace(backward=False), "forward", quick=True),
        Case.on({"replica": 2, "model": 2}, _MLP.replace(more=(5,), rows=6), "two dims in front"),
        Case.on({"data": 2, "tensor": 1}, _MLP),
    ),
    unseen=_unseen_mlp,
    draw=partial(draw_layer, "tp_mlp"),
    oracle=partial(layer_oracle, on_one_device=mlp_on_one_device),
    facts=mlp_facts,
    at_scale=(
        Case.on({"tensor": 8}, Mlp(batch=0, rows=4096, width=4096, hidden=16384), "4,096 rows of width 4,096"),
        "tensor=8",
    ),
    naive_memory="gathers_the_hidden_features",
    naive_time="gathers_the_hidden_features",
)

TP_ATTENTION = Task(
    wrapping=WRAPPINGS["tp_attention"],
    points=3,
    core_facts=("collectives forward",),
    cases=(
        Case.on({"data": 2, "tensor": 4}, _HEADS, quick=True),
        Case.on({"tensor": 8}, _HEADS, quick=True),
        # Visible scores can be as far below the hidden ones as a finite mask lowers those; gradients would be inexact.
        Case.on({"tensor": 3}, _HEADS.replace(num_heads=6, spread=100.0, backward=False), "forward", quick=True),
        Case.on({"replica": 2, "model": 2}, _HEADS.replace(num_heads=6), "6 heads"),
        Case.on({"data": 2, "tensor": 1}, _HEADS),
    ),
    unseen=_unseen_attention,
    draw=partial(draw_layer, "tp_attention"),
    oracle=partial(layer_oracle, on_one_device=attention_on_one_device),
    facts=partial(block_facts, values=HEADS),
)

# tp_train_step: the course's MLP on ``data`` x ``tensor``, with sharded and replicated leaves alongside each other. The
# learning rate is drawn and large, so that an update is about as large as the parameters: the subtracted value,
# divided by it, is the raw gradient, and a wrong scale cannot hide.


def draw_step(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    """Parameters, a batch for every step, and a learning rate."""
    return {
        "params": draw_leaves(rng, params_of(case), 0.3),
        "batch": draw_batches(rng, case.sizes, rows_of(case), case.sizes.steps),
        "learning_rate": draw_rate(rng, case.sizes.rate_scale),
    }


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """The steps on one device, with all rows; every holder of a leaf gets the same."""
    run = sgd_on_one_device(case.sizes.model)
    after, losses, gradients = run(inputs["params"], (inputs["batch"],), inputs["learning_rate"])
    places, devices = groups_of(case), groups_of(case) * parts_of(case)

    def copies(leaf, spec):
        return np.repeat(leaf[None], places if any(spec) else devices, 0)

    after, gradients = (jax.tree.map(copies, tree, specs_of(case)) for tree in (after, gradients))
    return {"values": {"loss": np.repeat(losses[None], devices, 0), "params": after}, "gradients": gradients}


def _resident(e: Evidence) -> tuple[int, int]:
    """Bytes of copies and of parts on one device."""
    leaves = [leaf for leaf in e.inputs if leaf.name.startswith("params/")]
    copies, parts = ([leaf for leaf in leaves if any(leaf.spec) == split] for split in (False, True))
    return tuple(sum(leaf.local_bytes(e.case.mesh) for leaf in group) for group in (copies, parts))  # type: ignore


def _apart(e: Evidence) -> float:
    """Bytes of all-reduces: copies and the loss over both axes in turn; parts over the data axis."""
    (copies, parts), places, n = _resident(e), groups_of(e.case), parts_of(e.case)
    return e.case.sizes.steps * (all_reduce_bytes(places, copies + parts + 4) + all_reduce_bytes(n, copies + 4))


def _together(e: Evidence) -> float:
    """The same with copies over both axes at once, and the loss not counted."""
    (copies, parts), places, n = _resident(e), groups_of(e.case), parts_of(e.case)
    return e.case.sizes.steps * (all_reduce_bytes(places * n, copies) + all_reduce_bytes(places, parts))


def _travels(e: Evidence, times: int) -> float:
    """Bytes of ``times`` gathers or scatters of one place's activations in every layer and step."""
    s, n = e.case.sizes, parts_of(e.case)
    return times * s.steps * s.num_layers * (n - 1) / n * 4 * n * s.rows * s.width


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    gradients = "Is this leaf split or a copy, and which devices' losses contribute to a device's gradient of it? "
    loss = "Over which rows is the returned loss a mean, and what is subtracted from each leaf? "
    cases = evidence.cases
    two, three = partial(_travels, times=2), partial(_travels, times=3)
    return [
        *facts.values_and_gradients(cases, loss, gradients, weight=3, step=True),
        byte_facts.bytes_sent("all-gather bytes", cases, "all_gather", three, least=two),
        byte_facts.bytes_sent("reduce-scatter bytes", cases, "reduce_scatter", two),
        byte_facts.bytes_sent("all-reduce bytes", cases, "all_reduce", _apart, least=_together),
        byte_facts.only_collectives("other collectives", cases, (*ALLOWED, "all_reduce")),
    ]


_ONE_STEP = StepSizes(width=12, hidden=48, num_layers=2, features=6, outputs=10, rows=5)
_THREE_STEPS = _ONE_STEP.replace(num_layers=3, steps=3, rate_scale=0.2)


def _unseen_step(rng: np.random.Generator) -> Case[StepSizes]:
    mesh = unseen_mesh(rng, *UNSEEN_MESHES)
    sizes = StepSizes(
        features=int(rng.choice([3, 5])),
        outputs=int(rng.choice([4, 7])),
        width=int(rng.choice([8, 10])),
        hidden=int(rng.integers(4, 8)) * list(mesh.values())[-1],
        num_layers=3,
        rows=2,
        steps=int(rng.choice([1, 2])),
        rate_scale=float(rng.uniform(0.3, 0.9)),
    )
    return Case(UNSEEN, mesh, sizes)


TP_TRAIN_STEP = Task(
    wrapping=WRAPPINGS["tp_train_step"],
    points=5,
    cases=(
        Case.on({"data": 2, "tensor": 4}, _ONE_STEP, quick=True),
        Case.on({"replica": 2, "model": 3}, _THREE_STEPS, "3 steps", quick=True),
        Case.on({"data": 4, "tensor": 2}, _ONE_STEP),
        Case.on({"data": 1, "tensor": 8}, _ONE_STEP),
        Case.on({"data": 8, "tensor": 1}, _ONE_STEP),
        Case.on({"data": 1, "tensor": 1}, _ONE_STEP.replace(rows=7)),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
)
