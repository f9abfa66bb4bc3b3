"""``looping_train_step``: the gradients of a repeat are averaged while earlier repeats still run backward."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autograder.chapters.looping_pipeline.shared import as_stages, in_a_row, ticks_of, unseen_mesh
from autograder.chapters.looping_pipeline.wrapping import data_of, model_of, params_of, pipelines_of, rows_of
from autograder.contract import facts, limits
from autograder.contract.cases import microbatch_bytes, stages_of
from autograder.contract.draws import draw_leaves
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.data import regression_batch, token_batch
from course.model import full_loss

# Of the synchronisation after the whole backward pass; one repeat of R is left exposed, 1/R of it.
EXPOSED = 0.5
# A group of layers in a scan of its own takes 1.5 times as long as one that is written out, and is as right; what
# reduces in every tick takes 1.9 times as long.
TIME, TEMPORARIES = 1.6, 1.5


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    """Parameters, a batch and a key for every step, and a learning rate so large that no scale can hide."""
    s, batches = case.sizes, []
    for seed in rng.integers(2**31, size=s["steps"]):
        if "seq" in s:
            batches.append(token_batch(int(seed), 0, batch=rows_of(case), seq=s["seq"], vocab=s["vocab"]))
        else:
            sizes = {"num_inputs": s["features"], "num_outputs": s["features"]}
            batches.append(regression_batch(int(seed), 0, batch=rows_of(case), **sizes))
    return {
        "params": draw_leaves(rng, params_of(case)[0], 0.3),
        "batch": {name: np.stack([batch[name] for batch in batches]) for name in batches[0]},
        "key": rng.integers(2**32, size=(s["steps"], 2), dtype=np.uint32),
        "learning_rate": np.float32(rng.uniform(0.5, 1.0) * s["rate"] / 100),
    }


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The steps on one device: every pipeline's microbatches one by one, and the mean over all of them."""
    params = {**inputs["params"], "layers": in_a_row(inputs["params"]["layers"])}
    run = _on_one_device(pipelines_of(case), stages_of(case), tuple(case.sizes.items()))
    found = run(params, inputs["batch"], inputs["key"], inputs["learning_rate"])
    after, losses, gradients = jax.tree.map(np.asarray, found)
    devices = pipelines_of(case) * stages_of(case)

    def held(tree):
        whole = {part: jax.tree.map(lambda leaf: np.repeat(leaf[None], devices, 0), tree[part])
                 for part in ("embed", "head")}  # fmt: skip
        layers = as_stages(tree["layers"], case)
        return {**whole, "layers": jax.tree.map(lambda leaf: np.repeat(leaf[None], pipelines_of(case), 0), layers)}

    losses = np.repeat(losses[None], devices, 0)
    return {"values": {"loss": losses, "params": held(after)}, "gradients": held(gradients)}


@lru_cache(maxsize=32)
def _on_one_device(pipelines: int, num_stages: int, sizes: tuple[tuple[str, int], ...]) -> Any:
    """Parameters after the steps, each step's loss, and the sum of the gradients."""
    case = Case("", {"pipe": num_stages}, dict(sizes))
    model, count = model_of(case), case.sizes["num_microbatches"]

    def loss_of(params, batch, data):
        def one(rows, pipeline, microbatch):
            key = jax.random.fold_in(jax.random.wrap_key_data(data), pipeline)
            return full_loss(model, params, rows, jax.random.fold_in(key, microbatch))

        rows = jax.tree.map(lambda a: a.reshape(pipelines * count, -1, *a.shape[1:]), batch)
        numbers = jnp.arange(pipelines * count)
        return jnp.mean(jax.vmap(one)(rows, numbers // count, numbers % count))

    def run(params, batches, keys, rate):
        def step(carry, given):
            params, total = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, *given)
            after = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            return (after, jax.tree.map(jnp.add, total, gradients)), loss

        start = params, jax.tree.map(jnp.zeros_like, params)
        (after, total), losses = lax.scan(step, start, (batches, keys))
        return after, losses, total

    return jax.jit(run)


def _held_bytes(case: Case) -> tuple[int, int]:
    """Of a device's layers, and of embedding and head."""
    shapes = params_of(case)[0]
    size = {part: sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes[part])) for part in shapes}
    return size["layers"] // stages_of(case), size["embed"] + size["head"]


def _over_data(case: Case) -> tuple[float, float]:
    """The least and the most that a device sends over ``data``: each gradient in one all-reduce, and the loss.

    Embedding, head and loss are summed over both axes at once, or over the stages and then over the pipelines.
    """
    pipelines, stages = pipelines_of(case), stages_of(case)
    if pipelines == 1:
        return 0.0, 0.0
    layers, ends = _held_bytes(case)
    ring, at_once = 2 * (pipelines - 1) / pipelines, 2 * (pipelines * stages - 1) / (pipelines * stages)
    steps = case.sizes["steps"]
    return steps * ring * (layers + ends), steps * (ring * layers + at_once * (ends + 4))


def _bytes_over_data(cases: list[Evidence]) -> Fact:
    found = []
    for e in cases:
        axis, (low, high) = data_of(e.case), _over_data(e.case)
        sent = [c for c in e.costs.collectives if axis in c.axes]
        total = sum(c.total_bytes for c in sent)
        passed = bool(low * 0.9999 <= total <= high * 1.0001)
        limit = f"{facts.bytes_text(low)} to {facts.bytes_text(high)}" if high else "0"
        most = max(sent, key=lambda c: c.total_bytes, default=None)
        message = "" if passed else (
            f"on mesh {e.case.mesh_text} a device sends {facts.bytes_text(total)} bytes over {axis!r} and should send "
            f"{limit}: is every gradient of this device reduced once in a step, none more often?")  # fmt: skip
        found.append(Fact("bytes over data", passed, facts.bytes_text(total), limit, "bytes", case=e.case.name,
                          line=most.line if most else e.line, message=message))  # fmt: skip
    return facts.worst(found)


_EXPOSED = (
    "After which tick of the backward pass is a repeat's gradient complete, where in your program does its average "
    "begin, and what is computed after it?"
)
_SLOW = "What is computed, or copied, more often than it must be?"
_TOO_MUCH = "What is kept of every tick until the backward pass comes to it? A tick's input would do."


def step_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases

    def permuted(e: Evidence) -> float:
        return 2 * e.case.sizes["steps"] * ticks_of(e.case) * microbatch_bytes(e.case) if stages_of(e.case) > 1 else 0

    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        limits.spent_within(large, references, EXPOSED, "data", _EXPOSED, weight=4, than=limits.NAIVE),
        limits.time_within(large, references, TIME, _SLOW),
        limits.temporaries_within(large, references, TEMPORARIES, _TOO_MUCH, weight=2),
        _bytes_over_data(counted),
        facts.bytes_sent("permute bytes", counted, "collective_permute", permuted, times=(0.5, 1)),
        facts.only_collectives("other collectives", counted, ("all_reduce", "collective_permute")),
    ]


_MLP = {"width": 8, "hidden": 16, "features": 4, "rows": 2, "layers_per_stage": 1, "steps": 1, "rate": 100}


def _sizes(num_microbatches: int, num_repeats: int, **more: int) -> dict[str, int]:
    return {**_MLP, "num_microbatches": num_microbatches, "num_repeats": num_repeats, **more}


_TRANSFORMER = {"vocab": 16, "seq": 4, "hidden": 16, "width": 8}
_LARGE = {"width": 2048, "hidden": 8192, "features": 64, "rows": 512}
CASES = (
    Case("data=4 x pipe=2, 4 microbatches", {"data": 4, "pipe": 2}, _sizes(4, 4), quick=True),
    Case("replica=2 x stage=4, 2 microbatches", {"replica": 2, "stage": 4},
         _sizes(2, 2, steps=3, rate=60, percent_dropped=25), quick=True),
    Case("data=2 x pipe=4, 6 microbatches", {"data": 2, "pipe": 4}, _sizes(6, 2, percent_dropped=25)),
    Case("pipe=2 x data=2, 3 microbatches", {"pipe": 2, "data": 2}, _sizes(3, 2, rate=200, **_TRANSFORMER)),
    Case("data=1 x pipe=8, 5 microbatches", {"data": 1, "pipe": 8}, _sizes(5, 1, layers_per_stage=2)),
    Case("data=8 x pipe=1, 2 microbatches", {"data": 8, "pipe": 1}, _sizes(2, 2)),
)  # fmt: skip
ANALYSED = (Case("data=4 x pipe=2, width 2048", {"data": 4, "pipe": 2}, _sizes(4, 4, **_LARGE)), CASES[0].name)


def unseen(rng: np.random.Generator) -> Case:
    mesh = unseen_mesh(rng, ((2, 2), (2, 3), (2, 4), (3, 2)))
    choices = {"width": (6, 12), "hidden": (12, 20), "features": (3, 5), "rows": (1, 3)}
    sizes, steps = {name: int(rng.choice(some)) for name, some in choices.items()}, int(rng.choice([1, 2]))
    how = {"percent_dropped": int(rng.integers(10, 40)), "steps": steps, "rate": int(rng.integers(60, 120)) // steps}
    return Case("unseen", mesh, _sizes(int(rng.integers(1, 7)), int(rng.integers(2, 4)), **sizes, **how))


LOOPING_TRAIN_STEP = Task(
    wrapping=wrappings("looping_pipeline")["looping_train_step"],
    kind="local",
    points=5,
    cases=CASES,
    unseen=unseen,
    draw=draw,
    oracle=oracle,
    facts=step_facts,
    analysed=ANALYSED,
    naive="keeps_all_activations",
    slow="averages_after_the_backward_pass",
    machine="8xA5000",
    spent_on=("data",),
)
