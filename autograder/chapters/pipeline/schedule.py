"""Microbatches, ticks and whole schedules: the duration of a pass, its communication, and its results."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.chapters.draws import compile_oracle, draw_leaves, unseen_case
from autograder.chapters.pipeline.wrapping import (
    ACCEPTED,
    EXECUTED,
    OTHER_ERROR,
    REFUSED,
    SHIFT,
    UNNAMED,
    Blocks,
    execute_shapes,
    split_shapes,
    split_sizes,
    tick_shapes,
)
from autograder.contract import byte_facts, facts, time_limits
from autograder.contract.case_builders import groups_of, pipe_of, stages_of
from autograder.contract.diagnosis.misplaced import grid
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings

WRAPPINGS = wrappings("pipeline")


def microbatch_bytes(case: Case[Any]) -> int:
    """Bytes of one microbatch between two stages: float32 of the model's width, for each row or token."""
    return 4 * case.sizes.rows * (getattr(case.sizes, "seq", 0) or 1) * case.sizes.width


def ticks_of(case: Case[Any]) -> int:
    """Duration of a forward pass in stage times: every microbatch enters, and the last one passes all stages."""
    return case.sizes.num_microbatches + stages_of(case) - 1


def permuted(evidence: list[Evidence], passes: Any) -> Fact:
    """Require a stage to send at least its microbatches, at most one per tick, in each of ``passes(case)`` passes.

    With two stages, one may send only forward, and the other only backward. A transfer per stage and microbatch, one
    after the other, has the same bytes on every device, and more permutes than ticks.
    """

    def permutes(e: Evidence) -> int:
        return passes(e.case) * ticks_of(e.case) * (stages_of(e.case) > 1)

    def needed(e: Evidence) -> float:
        alone = (passes(e.case) + 1) // 2 if stages_of(e.case) == 2 else passes(e.case)
        return float(alone * e.case.sizes.num_microbatches * microbatch_bytes(e.case)) * (stages_of(e.case) > 1)

    name, kind = "permute bytes", "collective_permute"
    once = "How many ticks are there, and does every stage compute and send in the same one?"
    most = byte_facts.bytes_sent(name, evidence, kind, lambda e: permutes(e) * microbatch_bytes(e.case), least=needed)
    return facts.worst([most, byte_facts.times_sent(name, evidence, kind, permutes, once, fewer=True)])


def refused(name: str, cases: list[Evidence], what: str, hint: str) -> Fact:
    """Require a call to be refused; the leaf ``refused`` of the results records how it ended."""
    wrong = {
        ACCEPTED: ("not refused", f"raised no error. {hint}"),
        OTHER_ERROR: ("another error", "raised an error that is not a ValueError. Is it from your own check?"),
        UNNAMED: ("a number is missing", "raised a ValueError whose message does not name both numbers."),
    }

    def check(e: Evidence) -> Fact:
        flag = e.measured.get("refused")
        ended = int(flag) if flag is not None and flag.shape == () else ACCEPTED
        measured, outcome = wrong.get(ended, wrong[ACCEPTED])
        message = f"{e.case.place} the function was given {what}, and {outcome}"
        fine = ended == REFUSED
        return facts.case_fact(
            e, name, Kind.PROGRAM, "" if fine else message, "refused" if fine else measured, "refused"
        )

    return facts.worst([check(e) for e in cases])


# split_microbatches: rows in equal parts, in order, without moving between devices.


def draw_split(rng: np.random.Generator, case: Case[Blocks]) -> dict[str, Any]:
    def leaf(shape):
        if shape.dtype == np.int32:
            return rng.integers(1000, size=shape.shape, dtype=np.int32)
        return rng.standard_normal(shape.shape, np.float32)

    devices, _, rows = split_sizes(case)
    return {"batch": jax.tree.map(leaf, split_shapes(case, devices * rows))}


def split_oracle(inputs: dict[str, Any], case: Case[Blocks]) -> dict[str, Any]:
    devices, count, rows = split_sizes(case)

    def split(leaf):
        parts = leaf.reshape(devices, count, rows // count, *leaf.shape[1:])
        return np.moveaxis(parts, 0, 1).reshape(count, -1, *leaf.shape[1:])

    return {"values": jax.tree.map(split, inputs["batch"]), "refused": np.int32(REFUSED)}


def split_facts(evidence: TaskEvidence) -> list[Fact]:
    hint = "Dropping a row or adding padding trains on a different batch from the one intended."
    return [
        facts.arrays_match("values", evidence.cases, "values", "Microbatch 0 has the first rows, in order."),
        refused("uneven batch", evidence.cases, "a batch with one row too many", hint),
        byte_facts.only_collectives("communication", evidence.cases, ()),
    ]


def _unseen_split(rng: np.random.Generator) -> Case[Blocks]:
    count, rows, width = (int(rng.choice(choices)) for choices in ([2, 5, 7], [4, 5], [4, 6]))
    return unseen_case(rng, Blocks(num_microbatches=count, rows=rows, width=width), (4,), (2, 2), (6,), (2, 4))


SPLIT_MICROBATCHES = Task(
    wrapping=WRAPPINGS["split_microbatches"],
    points=1,
    cases=(
        Case.on({"data": 2, "pipe": 4}, Blocks(num_microbatches=4, rows=3, width=5), quick=True),
        Case.on({"data": 5}, Blocks(num_microbatches=3, rows=2, width=5), quick=True),
        Case.on({"tensor": 2}, Blocks(num_microbatches=8, rows=1, width=5)),
        Case.on({"data": 1}, Blocks(num_microbatches=1, rows=7, width=5)),
    ),
    unseen=_unseen_split,
    draw=draw_split,
    oracle=split_oracle,
    facts=split_facts,
)

# pipeline_tick: the work of one stage in one tick, for every tick of a schedule.


def _has_work(tick: Any, stage: Any, count: int) -> Any:
    return (tick >= stage) & (tick - stage < count)


def _counted(case: Case[Blocks]) -> dict[str, np.ndarray]:
    """Masks ``[tick, stage]`` of where a stage has work, and of where it receives the previous stage's result."""
    tick, stage = np.arange(ticks_of(case))[:, None], np.arange(stages_of(case))
    busy = _has_work(tick, stage, case.sizes.num_microbatches)
    return {"y": busy, "sent": np.concatenate([np.zeros_like(busy[:, :1]), busy[:, :-1]], 1)}


def draw_tick(rng: np.random.Generator, case: Case[Blocks]) -> dict[str, Any]:
    shapes = tick_shapes(PIPELINE_TICK.complete(case))
    inputs = draw_leaves(rng, {name: shape for name, shape in shapes.items() if name != "counted"})
    weights = inputs["weights"] / np.float32(np.sqrt(case.sizes.width))
    return {**inputs, "weights": weights, "counted": _counted(case)}


def tick_oracle(inputs: dict[str, Any], case: Case[Blocks]) -> dict[str, Any]:
    """All stages and ticks at once on one device: their results, and their received inputs."""
    run = _all_ticks(stages_of(case), case.sizes.num_microbatches)
    stages = stages_of(case)
    microbatches = np.broadcast_to(inputs["microbatches"], (stages, *inputs["microbatches"].shape))
    values, gradients = jax.tree.map(
        np.asarray, run(inputs["weights"], microbatches, np.moveaxis(inputs["arrived"], 1, 0), inputs["upstream"])
    )
    return {"values": values, "gradients": gradients}


@lru_cache(maxsize=32)
def _all_ticks(stages: int, count: int) -> Any:
    number = jnp.arange(stages)[:, None]
    tick = jnp.arange(count + stages - 1)[None]
    busy = _has_work(tick, number, count)[..., None, None]
    turn = (tick - number)[..., None, None].astype(jnp.float32)

    def values(weights, microbatches, arrived):
        own = microbatches[number, jnp.clip(tick, 0, count - 1)]
        x = jnp.where(number[..., None, None] == 0, own, arrived)
        y = jnp.where(busy, x + (1 + turn / 8) * jnp.tanh(jnp.einsum("strw,swv->strv", x, weights) + SHIFT), 0)
        return {"y": y, "sent": jnp.concatenate([jnp.zeros_like(y[:1]), y[:-1]])}

    def run(weights, microbatches, arrived, upstream):
        outputs, back = jax.vjp(values, weights, microbatches, arrived)
        gradients = back(jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), upstream))
        return outputs, dict(zip(("weights", "microbatches", "arrived"), gradients, strict=True))

    return compile_oracle(run)


def computed(e: Evidence) -> str:
    """A grid of the microbatch number that each stage used in each tick, and the right grid; empty if they match."""
    ticks, stages = ticks_of(e.case), stages_of(e.case)
    busy, y = _counted(e.case)["y"], e.measured["values/y"]
    weights, microbatches, arrived = (e.drawn[name] for name in ("weights", "microbatches", "arrived"))

    def as_microbatch(tick: int, stage: int) -> str:
        inputs = [arrived[tick, stage], *microbatches]
        for x in [microbatches[tick], *inputs] if stage == 0 else inputs:
            added = np.tanh(x @ weights[stage] + SHIFT)
            number = np.rint(8 * (np.sum((y[stage, tick] - x) * added) / np.sum(added**2) - 1))
            if np.allclose(y[stage, tick], x + (1 + number / 8) * added, atol=1e-4):
                right = x is inputs[0] if stage else np.array_equal(x, microbatches[tick])
                return f"{int(number)}{'' if right else '*'}"
        return "?"

    yours, right = (
        [[cell(tick, stage) if busy[tick, stage] else "." for tick in range(ticks)] for stage in range(stages)]
        for cell in (as_microbatch, lambda tick, stage: str(tick - stage))
    )
    title = "\nThe microbatch number that a stage computes with, * if its input is wrong, . where anything will do:"
    return "" if yours == right else title + grid(yours, right, "stage", "tick")


def tick_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "Which microbatch is this stage working on, where is its input from, and which stage needs its result?"
    return [
        facts.arrays_match("values", evidence.cases, "values", values, picture=computed),
        facts.arrays_match("gradients", evidence.cases, "gradients", weight=2),
        permuted(evidence.cases, lambda _: 2),
        byte_facts.only_collectives("other collectives", evidence.cases, ("collective_permute",)),
    ]


_THREE = Blocks(num_microbatches=3, rows=2, width=6)


def _unseen_tick(rng: np.random.Generator) -> Case[Blocks]:
    count, rows, width = (int(rng.choice(choices)) for choices in ([1, 4, 6], [3, 4], [5, 8]))
    return unseen_case(rng, Blocks(num_microbatches=count, rows=rows, width=width), (8,), (2, 2), (4,), (2, 3), (5,))


PIPELINE_TICK = Task(
    wrapping=WRAPPINGS["pipeline_tick"],
    given=lambda case: {"ticks": ticks_of(case)},
    points=3,
    core_facts=("permute bytes",),
    cases=(
        Case.on({"pipe": 4}, _THREE, quick=True),
        Case.on({"tensor": 2, "pipe": 3}, _THREE.replace(num_microbatches=5), quick=True),
        Case.on({"stage": 8}, _THREE.replace(num_microbatches=1)),
        Case.on({"pipe": 1}, _THREE),
    ),
    unseen=_unseen_tick,
    draw=draw_tick,
    oracle=tick_oracle,
    facts=tick_facts,
)

# execute_pipeline: all ticks of a schedule, its values and gradients, and how long the stages wait.


def stage_seconds(case: Case[Blocks]) -> float:
    """Seconds of the matmul of ``stage_of`` on the machine with a free network, at 1 TFLOP/s."""
    return 2 * case.sizes.rows * case.sizes.width**2 / 1e12


def draw_executed(rng: np.random.Generator, case: Case[Blocks]) -> dict[str, Any]:
    inputs = draw_leaves(rng, execute_shapes(case))
    return {**inputs, "weights": inputs["weights"] / np.float32(np.sqrt(case.sizes.width))}


def execute_oracle(inputs: dict[str, Any], case: Case[Blocks]) -> dict[str, Any]:
    """One stage after another on one device; only the last stage's outputs and the first one's gradients count."""
    stages, groups = stages_of(case), groups_of(case, pipe_of)
    values, gradients = jax.tree.map(
        np.asarray, _one_device(groups)(inputs["weights"], inputs["microbatches"], inputs.get("upstream"))
    )

    def at(stage, array):
        return np.stack([array if i == stage else np.zeros_like(array) for i in range(stages)])

    result: dict[str, Any] = {"values": at(stages - 1, values)}
    if gradients is not None:
        weights = gradients["weights"].reshape(groups * stages, *gradients["weights"].shape[2:])
        result["gradients"] = {"weights": weights, "microbatches": at(0, gradients["microbatches"])}
    return result


@lru_cache(maxsize=32)
def _one_device(groups: int) -> Any:
    """Outputs ``[microbatches, rows, width]``, and gradients of each group's weights and of all microbatches."""

    def outputs(weights, microbatches):
        count, rows, width = microbatches.shape
        x = microbatches.reshape(count, groups, rows // groups, width)
        scale = 1 + jnp.arange(count, dtype=jnp.float32)[:, None, None, None] / 8
        for stage in range(weights.shape[1]):
            x = x + scale * jnp.tanh(jnp.einsum("mgrw,gwv->mgrv", x, weights[:, stage]) + SHIFT)
        return x.reshape(microbatches.shape)

    def run(weights, microbatches, upstream):
        group_weights = jnp.broadcast_to(weights, (groups, *weights.shape))
        values, back = jax.vjp(outputs, group_weights, microbatches)
        return values, None if upstream is None else dict(zip(EXECUTED, back(upstream), strict=True))

    return compile_oracle(run)


def execute_facts(evidence: TaskEvidence) -> list[Fact]:
    values = "In which tick does a stage finish a microbatch, and how many ticks pass until the last one is finished?"
    bubble = "How many ticks are there, and does a stage compute once in each?"
    backward = [e for e in evidence.cases if e.case.sizes.backward]
    drained = (lambda case: busy(case) * stages_of(case)), "microbatch"
    unknown = facts.unmeasured("gradients", Kind.GRADIENTS, "no case of this check is differentiated", 2)
    busy = lambda case: case.sizes.num_microbatches  # noqa: E731
    return [
        facts.arrays_match("values", evidence.cases, "values", values),
        facts.arrays_match("gradients", backward, "gradients", weight=2) if backward else unknown,
        time_limits.bubble_is(evidence.at_scale, ticks_of, busy, stage_seconds, bubble, weight=3, drained=drained),
        permuted(evidence.programs, lambda case: 1 + case.sizes.backward),
        byte_facts.only_collectives("other collectives", evidence.programs, ("collective_permute",)),
    ]


_SIX = Blocks(num_microbatches=6, rows=2, width=8)
# Fewer microbatches than stages, and forward only: the formula describes a forward pass.
_FORWARD = Blocks(num_microbatches=5, rows=2, width=16, backward=False)


def _unseen_executed(rng: np.random.Generator) -> Case[Blocks]:
    count, rows, width = (int(rng.choice(choices)) for choices in ([1, 4, 7], [3, 4], [6, 12]))
    sizes = Blocks(num_microbatches=count, rows=rows, width=width)
    return unseen_case(rng, sizes, (4, 2), (2, 2), (8,), (2, 3), (5,))


EXECUTE_PIPELINE = Task(
    wrapping=WRAPPINGS["execute_pipeline"],
    points=5,
    core_facts=("bubble",),
    cases=(
        Case.on({"pipe": 4}, _SIX, "6 microbatches", quick=True),
        Case.on({"pipe": 8}, _FORWARD, "5 microbatches, forward", quick=True),
        Case.on({"data": 2, "pipe": 3}, _SIX.replace(num_microbatches=1), "1 microbatch"),
        Case.on({"stage": 5}, _SIX.replace(num_microbatches=5), "5 microbatches"),
        Case.on({"pipe": 1}, _SIX.replace(num_microbatches=2), "2 microbatches"),
    ),
    unseen=_unseen_executed,
    draw=draw_executed,
    oracle=execute_oracle,
    facts=execute_facts,
    at_scale=(
        Case.on({"pipe": 8}, _FORWARD.replace(rows=1024, width=2048), "5 microbatches of 1,024 rows"),
        "pipe=8, 5 microbatches, forward",
    ),
    naive_time="waits_for_each_microbatch",
    machine="free network",
)
