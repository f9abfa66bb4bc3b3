"""``execute_schedule``, ``two_weight_versions_step`` and ``split_backward``: programs compared with a single device."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.draws import compile_oracle, draw_leaves, draw_rate, unseen_mesh
from autograder.chapters.schedules.wrapping import DENSE, Executed, Layer, activation_of, rows_of, weights_of
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN
from autograder.contract.case_builders import pipe_of, pipelines_of, stages_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind, Unit
from autograder.contract.wrapping import wrappings
from course.machines import machine
from course.schedules import LOOPED, Table, family, tabulate

WRAPPINGS = wrappings("schedules")
MACHINE = "free network"
# The limit on temporaries, between reused slots and a place for every microbatch, and the tolerance of the bubble.
TEMPORARIES, BUBBLE = 1.35, 0.03


def schedule_of(case: Case[Executed]) -> Table:
    """The case's table."""
    s = case.sizes
    return _table(s.schedule, stages_of(case), s.num_microbatches, s.num_repeats)


@lru_cache(maxsize=64)
def _table(name: str, *sizes: int) -> Table:
    return tabulate(family(name, *sizes))


def given(case: Case[Executed]) -> dict[str, Any]:
    """The table as plain data."""
    table = schedule_of(case)
    columns = {name: column.tolist() for name, column in table.columns.items()}
    return {"table": {**vars(table), "columns": columns}}


def draw_execute(rng: np.random.Generator, case: Case[Executed]) -> dict[str, Any]:
    rows = rows_of(case)
    return {
        "weights": draw_leaves(rng, weights_of(case), 1 / np.sqrt(case.sizes.width)),
        "microbatches": draw_leaves(rng, rows, rng.uniform(0.5, 2)),
        "targets": draw_leaves(rng, rows),
    }


def execute_oracle(inputs: dict[str, Any], case: Case[Executed]) -> dict[str, Any]:
    """Run every pipeline's batch through all parts in order, on one device."""
    results = [
        _on_one_device(
            inputs["weights"],
            *(np.split(inputs[name], pipelines_of(case), 1)[n] for name in _DATA),
            case.sizes.activation,
        )
        for n in range(pipelines_of(case))
    ]
    gradients = jax.tree.map(lambda *leaves: np.stack(leaves), *(tree for _, tree in results))
    return {"values": _on_last_stages([loss for loss, _ in results], case), "gradients": gradients}


_DATA = ("microbatches", "targets")


@partial(compile_oracle, static_argnums=3)
def _on_one_device(weights: Any, microbatches: Any, targets: Any, activation: str) -> Any:
    """The mean loss of a batch, and its gradient."""
    act, _ = DENSE[activation]

    def loss_of(weights):
        y, leaves = microbatches, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), weights)
        for kernel, bias in zip(leaves["kernel"], leaves["bias"], strict=True):
            y = act(y @ kernel + bias)
        return jnp.mean(jnp.sum((y - targets) ** 2, axis=-1)) / 2

    return jax.value_and_grad(loss_of)(weights)


def _on_last_stages(losses: Any, case: Case[Executed]) -> np.ndarray:
    """Each pipeline's loss on the device of its last stage, and zeros on the others."""
    grid = np.zeros((pipelines_of(case), stages_of(case)), np.float32)
    grid[:, -1] = losses
    return (grid if list(case.mesh)[-1] == pipe_of(case) else grid.T).ravel()


def permuted(evidence: TaskEvidence) -> Fact:
    """Allow two permutes of a microbatch's activations in every tick of every step; require what must be sent."""

    def microbatch_bytes(e: Evidence) -> int:
        return 4 * e.case.sizes.steps * e.case.sizes.rows * e.case.sizes.width if stages_of(e.case) > 1 else 0

    def least(e: Evidence) -> float:
        """A middle stage sends all activations on and all gradients back; each of two sends one less per microbatch."""
        s = e.case.sizes
        return s.num_microbatches * (2 * s.num_repeats - (stages_of(e.case) == 2)) * microbatch_bytes(e)

    def most(e: Evidence) -> float:
        return 2 * schedule_of(e.case).num_ticks * microbatch_bytes(e)

    return byte_facts.bytes_sent("permute bytes", evidence.programs, "collective_permute", most, least=least)


def execute_facts(evidence: TaskEvidence) -> list[Fact]:
    values = (
        "Is the loss the mean over microbatches, of the last part alone, each with its own microbatch's number? Does "
        "each device follow its own column of the table, with the weights of the part it says? Does every other part "
        "read its input from a slot that has been written and not overwritten since?"
    )
    gradients = (
        "Are the gradients of all microbatches added up? Does each action use the weights of its part, and does its "
        "result go to the right neighbour? If so, which action reads a slot that another one has overwritten, or that "
        "has not been written yet? Follow the first microbatch through the table."
    )
    bubble = "Does each tick compute only the table's action, or several actions, of which one is then chosen?"
    slots = "What is kept of each microbatch, and for how long does the table need it? Its slots are reused."
    loss = facts.arrays_match("values", evidence.cases, "values", values)
    return [
        loss,
        facts.arrays_match("gradients", evidence.cases, "gradients", gradients if loss.passed else "", weight=2),
        time_limits.bubble_is(
            evidence.at_scale,
            lambda case: schedule_of(case).num_ticks,
            lambda case: 3 * case.sizes.num_repeats * case.sizes.num_microbatches,
            _tick_seconds,
            bubble,
            within=BUBBLE,
            weight=2,
            what="step",
            shorter=True,
        ),
        limits.temporaries_within(evidence, TEMPORARIES, slots, weight=2),
        permuted(evidence),
        byte_facts.only_collectives("other collectives", evidence.programs, ("collective_permute",)),
    ]


def _tick_seconds(case: Case[Executed]) -> float:
    """The duration of the matmuls in one pass of a part."""
    s = case.sizes
    return 2 * s.rows * s.width**2 * s.num_layers / machine(MACHINE).peak("f32")


_SMALL = Executed(schedule="zero_bubble", num_microbatches=12, rows=3, width=5)
_LOOP = _SMALL.replace(schedule="interleaved", num_repeats=2)


def _draw_schedule(rng: np.random.Generator, mesh: dict[str, int], *names: str) -> dict[str, Any]:
    """A schedule that is defined for the mesh's stages, and its sizes."""
    stages, name = list(mesh.values())[-1], str(rng.choice(names))
    repeats = int(rng.integers(2, 4)) if name in LOOPED else 1
    count = stages * int(rng.integers(1, 3)) if name == "interleaved" else int(rng.integers(1, 2 * stages + 2))
    return {"schedule": name, "num_microbatches": count, "num_repeats": repeats}


def unseen_execute(rng: np.random.Generator) -> Case[Executed]:
    mesh = unseen_mesh(rng, (4,), (3,), (2, 2), (2, 3), (2, 4), (5,))
    sizes: dict[str, Any] = {"width": int(rng.choice([6, 7])), "rows": int(rng.choice([2, 4]))}
    chosen = _draw_schedule(rng, mesh, "gpipe", "1f1b", "interleaved", "breadth_first", "zero_bubble")
    return Case(
        UNSEEN,
        mesh,
        _SMALL.replace(num_layers=int(rng.integers(1, 3)), activation=str(rng.choice([*DENSE])), **chosen, **sizes),
    )


def draw_versions(rng: np.random.Generator, case: Case[Executed]) -> dict[str, Any]:
    """Two versions that differ, so that confusing them cannot pass."""
    rows = rows_of(case, case.sizes.steps)
    return {
        "versions": {
            name: draw_leaves(rng, weights_of(case), 1 / np.sqrt(case.sizes.width)) for name in ("newest", "older")
        },
        "microbatches": draw_leaves(rng, rows),
        "targets": draw_leaves(rng, rows),
        "learning_rate": draw_rate(rng, 0.3),
    }


def versions_oracle(inputs: dict[str, Any], case: Case[Executed]) -> dict[str, Any]:
    """The recursion on one device: the gradient at the older weights changes the newest ones."""
    newest, older = inputs["versions"]["newest"], inputs["versions"]["older"]
    rate, losses, total = inputs["learning_rate"], [], jax.tree.map(np.zeros_like, newest)
    for step in range(case.sizes.steps):
        loss, gradient = _on_one_device(older, *(inputs[name][step] for name in _DATA), case.sizes.activation)
        newest, older = jax.tree.map(lambda w, g: w - rate * np.asarray(g), newest, gradient), newest
        total = jax.tree.map(lambda sums, g: sums + np.asarray(g), total, gradient)
        losses.append(loss)

    def copied(tree):
        return jax.tree.map(lambda leaf: np.repeat(leaf[None], pipelines_of(case), 0), tree)

    devices = pipelines_of(case) * stages_of(case)
    losses = np.repeat(np.asarray(losses, np.float32)[None], devices, 0)
    after = copied({"newest": newest, "older": older})
    return {"values": {"loss": losses, "versions": after}, "gradients": copied(total)}


def _averaged_bytes(e: Evidence) -> tuple[float, float]:
    """The least and the most bytes of all steps' all-reduces: gradients over ``data``, and two numbers."""
    pipelines, stages = pipelines_of(e.case), stages_of(e.case)
    own = sum(4 * leaf.size for leaf in jax.tree.leaves(weights_of(e.case))) // stages
    gradients = e.case.sizes.steps * all_reduce_bytes(pipelines, own)
    numbers = 2 * e.case.sizes.steps * (all_reduce_bytes(pipelines, 4) + all_reduce_bytes(stages, 4))
    return gradients, gradients + numbers


def versions_facts(evidence: TaskEvidence) -> list[Fact]:
    values = (
        "At which version is the gradient taken, which one does it change, and which is the older one in the next step?"
    )
    version = "At which of the two versions is the loss computed?"
    gradients = f"This is the sum over all steps. {values} Is it the mean over all pipelines?"
    return [
        *facts.values_and_gradients(evidence.cases, values, gradients, step=True, first_loss=version),
        byte_facts.bytes_sent(
            "all-reduce bytes",
            evidence.programs,
            "all_reduce",
            lambda e: _averaged_bytes(e)[1],
            least=lambda e: _averaged_bytes(e)[0],
            hint="Is every gradient of this device reduced exactly once per step, over data only?",
        ),
        permuted(evidence),
        byte_facts.only_collectives("other collectives", evidence.programs, ("all_reduce", "collective_permute")),
    ]


_STEPS = Executed(schedule="1f1b", num_microbatches=4, rows=2, width=5, steps=6)


def unseen_versions(rng: np.random.Generator) -> Case[Executed]:
    mesh = unseen_mesh(rng, (2, 2), (2, 3), (3, 2), (1, 4))
    sizes: dict[str, Any] = {"width": int(rng.choice([6, 7])), "rows": int(rng.choice([1, 3]))}
    sizes |= {"num_layers": int(rng.integers(1, 3)), "activation": str(rng.choice([*DENSE])), "steps": 4}
    return Case(UNSEEN, mesh, _STEPS.replace(**_draw_schedule(rng, mesh, "gpipe", "1f1b", "zero_bubble"), **sizes))


EXECUTE_SCHEDULE = Task(
    wrapping=WRAPPINGS["execute_schedule"],
    points=5,
    core_facts=("bubble", "live temporaries"),
    cases=(
        Case.on({"pipe": 4}, _SMALL, "ZB-H1", quick=True),
        Case.on({"pipe": 2}, _LOOP.replace(num_microbatches=4, num_layers=2), "interleaved", quick=True),
        Case.on(
            {"data": 2, "stage": 3}, _SMALL.replace(schedule="gpipe", num_microbatches=2, activation="sigmoid"), "GPipe"
        ),
        Case.on({"pipe": 5}, _SMALL.replace(schedule="1f1b", num_microbatches=7), "1F1B"),
        Case.on({"pipe": 4, "data": 2}, _LOOP.replace(schedule="breadth_first", num_microbatches=3), "breadth-first"),
        Case.on({"pipe": 1}, _LOOP.replace(num_microbatches=2), "interleaved"),
    ),
    unseen=unseen_execute,
    draw=draw_execute,
    oracle=execute_oracle,
    facts=execute_facts,
    at_scale=(Case.on({"pipe": 4}, _SMALL.replace(width=512, rows=256), "ZB-H1, width 512"), "pipe=4, ZB-H1"),
    naive_memory="keeps_a_place_for_every_microbatch",
    naive_time="computes_everything_and_chooses",
    machine=MACHINE,
    given=given,
)
TWO_WEIGHT_VERSIONS_STEP = Task(
    wrapping=WRAPPINGS["two_weight_versions_step"],
    points=2,
    cases=(
        Case.on({"data": 2, "pipe": 2}, _STEPS, "1F1B", quick=True),
        Case.on(
            {"pipe": 2, "replica": 3},
            _STEPS.replace(schedule="zero_bubble", num_microbatches=3, rows=1),
            "ZB-H1",
            quick=True,
        ),
        Case.on(
            {"data": 1, "pipe": 5},
            _STEPS.replace(schedule="gpipe", num_microbatches=2, num_layers=2, activation="sigmoid", steps=3),
            "GPipe, 2 layers",
        ),
        Case.on({"data": 8, "pipe": 1}, _STEPS.replace(num_microbatches=2), "1F1B"),
    ),
    unseen=unseen_versions,
    draw=draw_versions,
    oracle=versions_oracle,
    facts=versions_facts,
    given=given,
)


# split_backward: a layer's backward pass in two halves that cost as much as the whole one.


def draw_split(rng: np.random.Generator, case: Case[Layer]) -> dict[str, Any]:
    inputs = WRAPPINGS["split_backward"].input_shapes(case)
    return {name: draw_leaves(rng, tree, 0.5 if name == "weights" else 1) for name, tree in inputs.items()}


def split_oracle(inputs: dict[str, Any], case: Case[Layer]) -> dict[str, Any]:
    """One layer's output, and its gradients as JAX computes them."""

    def layer(weights, x):
        return x + activation_of(case.sizes.activation)(x @ weights["up"]) @ weights["down"]

    y, back = jax.vjp(layer, inputs["weights"], inputs["x"])
    of_weights, of_x = back(inputs["upstream"])
    gradients = {"x": of_x} if case.sizes.passes == 2 else {"x": of_x, **of_weights}
    return jax.tree.map(np.asarray, {"values": y, "gradients": gradients})


def products(evidence: TaskEvidence) -> Fact:
    """Require two products in each pass: nothing is recomputed, and nothing is computed for another pass."""
    name, hint = "FLOPs", "Which product is computed again, or computed early, for a later pass?"

    def fact(e: Evidence) -> Fact:
        s = e.case.sizes
        form, count = s.passes * 2 * 2 * s.rows * s.width * s.hidden, sum(e.costs.products.values())
        passes, message = "all three functions" if s.passes == 3 else "forward and backward_input", ""
        if e.costs.flops > form:
            message = f"{passes} compute {e.costs.flops:,.0f} FLOPs together, and {form:,} are enough. {hint}"
        elif count > 2 * s.passes:  # such as sums of elementwise products
            message = f"{passes} compute {count} matmuls together, and {2 * s.passes} are enough. {hint}"
        return facts.case_fact(e, name, Kind.COMPUTE, message, e.costs.flops, form, unit=Unit.FLOPS, weight=2)

    return facts.worst([fact(e) for e in evidence.cases], name, Kind.COMPUTE)


def split_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.arrays_match("values", evidence.cases, "values"),
        facts.arrays_match(
            "gradients",
            evidence.cases,
            "gradients",
            "What does this leaf multiply in the forward pass, or which paths lead from `x` to the output? And which "
            "of these gradients go through the activation's derivative?",
        ),
        products(evidence),
    ]


def unseen_split(rng: np.random.Generator) -> Case[Layer]:
    rows, width, hidden = (int(rng.choice(sizes)) for sizes in ((4, 7), (9, 11), (10, 17)))
    activation = str(rng.choice(["softplus", "sin"]))
    return Case(UNSEEN, {"data": 1}, Layer(rows=rows, width=width, hidden=hidden, activation=activation))


SPLIT_BACKWARD = Task(
    wrapping=WRAPPINGS["split_backward"],
    points=2,
    core_facts=("FLOPs",),
    cases=(
        Case("gelu", {"data": 1}, Layer(rows=6, width=5, hidden=12, activation="gelu"), quick=True),
        Case(
            "silu, without weights' gradients",
            {"data": 1},
            Layer(rows=4, width=8, hidden=10, activation="silu", passes=2),
            quick=True,
        ),
        Case("tanh, wide", {"data": 1}, Layer(rows=5, width=16, hidden=7, activation="tanh")),
    ),
    unseen=unseen_split,
    draw=draw_split,
    oracle=split_oracle,
    facts=split_facts,
)
