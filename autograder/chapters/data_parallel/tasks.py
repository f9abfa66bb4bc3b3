"""Grading of the functions of ``data_parallel``: keys, sums of gradients, whole steps, and overlap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.data_parallel.wrapping import STEPS, Leaves, Named, StepSizes, of_leaves, rows_of
from autograder.chapters.draws import (
    ODD,
    compile_oracle,
    draw_leaves,
    draw_masked,
    loss_and_gradients,
    stacked,
    unseen_case,
    unseen_mesh,
    unseen_model,
)
from autograder.contract import byte_facts, facts, limits, time_limits
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import axis_size, build_model, params_of
from autograder.contract.task import Case, Evidence, Task, TaskEvidence
from autograder.contract.verdict import Fact, Kind
from autograder.contract.wrapping import wrappings
from course.mesh import mesh_text
from course.model import full_loss
from course.program import Leaf
from course.program.program import spec_of

WRAPPINGS = wrappings("data_parallel")


def case_over(mesh: dict[str, int], sizes: Named, *names: str, quick: bool = False) -> Case[Named]:
    """A case in which the function receives ``names``, which are part of the case's name."""
    return Case(f"{mesh_text(mesh)}, over {' and '.join(names) or 'no axis'}", mesh, sizes.replace(names=names), quick)


def unseen_over(rng: np.random.Generator, sizes: Named) -> Case[Named]:
    """Unseen axes with any names and sizes; the function receives at least one of them."""
    mesh = unseen_mesh(rng, (2, 4), (4, 2), (2, 2, 2), (3, 2), (6,), (5,))
    chosen = {*map(str, rng.permutation(list(mesh))[: rng.integers(1, len(mesh) + 1)])}
    return replace(case_over(mesh, sizes, *(axis for axis in mesh if axis in chosen)), name=UNSEEN)


# fold_key_over_axes: there is no unique right answer, so the facts examine the keys themselves.


def draw_keys(rng: np.random.Generator, case: Case[Named]) -> dict[str, Any]:
    """Two adjacent keys, like ``jax.random.key(seed)`` and ``jax.random.key(seed + 1)``.

    With several named axes they differ in the first word, which is 0 in a seed's key but not in one from ``split``.
    """
    first = rng.integers(0, 2**32 - 1, 2, np.uint32)
    apart = [1, 0] if len(case.sizes.names) > 1 else [0, 1]
    return {"keys": {"first": first, "second": first + np.array(apart, np.uint32)}}


def keys_oracle(inputs: dict[str, Any], case: Case[Named]) -> dict[str, Any]:
    """The input keys, on every device: ``key_facts`` checks how the result must differ."""
    sizes = tuple(case.mesh.values())
    return {"values": {name: np.broadcast_to(key, (*sizes, 2)).copy() for name, key in inputs["keys"].items()}}


def key_facts(evidence: TaskEvidence) -> list[Fact]:
    return [
        facts.worst([_keys(e) for e in evidence.cases]),
        byte_facts.only_collectives("communication", evidence.cases, ()),
    ]


def _keys(e: Evidence) -> Fact:
    """Keys differ over the named axes and no others; messages contain none of the numbers in a key."""
    wrong = next(_mistakes(e), "")
    axes = " and ".join(e.case.sizes.names)
    message = f"{e.case.place}, over {axes or 'no axis'}: {wrong}" if wrong else ""
    limit = f"different over {axes}, and only there" if axes else "equal everywhere"
    return facts.case_fact(e, "values", Kind.VALUES, message, "wrong keys" if wrong else "right keys", limit)


def _mistakes(e: Evidence) -> Iterator[str]:
    names, mesh = e.case.sizes.names, e.case.mesh
    shape = (*mesh.values(), 2)
    for which in ("first", "second"):
        keys = e.measured[f"values/{which}"]
        if (keys.shape, keys.dtype) != (shape, np.dtype(np.uint32)):
            yield f"the keys' data are {keys.dtype}{list(keys.shape)}, expected uint32{list(shape)}"
            return
    first, second = (_by_device(e.measured[f"values/{which}"]) for which in ("first", "second"))
    input_key = tuple(e.expected["values/first"].reshape(-1, 2)[0].tolist())
    devices = list(np.ndindex(*mesh.values()))
    same_place: dict[tuple[int, ...], tuple[int, ...]] = {}
    for device in devices:
        place = tuple(i for i, axis in zip(device, mesh, strict=True) if axis in names)
        other = same_place.setdefault(place, device)
        if first[device] != first[other]:
            yield (
                f"the devices at {_at(other, mesh)} and {_at(device, mesh)} hold different keys, although these "
                "devices differ only along axes that were not named. Would their dropout masks be the same?"
            )
    holder: dict[tuple[int, ...], tuple[int, ...]] = {}
    for device in same_place.values():
        other = holder.setdefault(first[device], device)
        if other != device:
            yield (
                f"the devices at {_at(other, mesh)} and {_at(device, mesh)} hold the same key. Do you use all named "
                "axes, and does each place along them get a different number?"
            )
    if names and input_key in holder:
        yield (
            f"the device at {_at(holder[input_key], mesh)} still holds the key that was given. Other code may use "
            "that key for numbers that must be equal everywhere, and would draw the same numbers there"
        )
    apart = np.subtract(e.expected["values/second"], e.expected["values/first"]).reshape(-1, 2)[0].tolist()
    other = "which differs in the first of its two words, as keys from `split` do" if apart[0] else "the next seed's"
    for device, key in second.items():
        if names and [(b - a) % 2**32 for a, b in zip(first[device], key, strict=True)] == apart:
            yield (
                f"the device at {_at(device, mesh)} holds the given key plus a number: from the next key it gets one "
                "more, so runs that start from nearby keys end up with the same keys"
            )
        if key in holder and (names or first == second):
            yield (
                f"a run with another key, {other}, gives the device at {_at(device, mesh)} the same key "
                f"as this run gives the device at {_at(holder[key], mesh)}: how does the result depend on the key?"
            )


def _by_device(keys: np.ndarray) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {device: tuple(keys[device].tolist()) for device in np.ndindex(*keys.shape[:-1])}


def _at(device: tuple[int, ...], mesh: dict[str, int]) -> str:
    return f"({', '.join(f'{axis} {i}' for i, axis in zip(device, mesh, strict=True))})"


FOLD_KEY_OVER_AXES = Task(
    wrapping=WRAPPINGS["fold_key_over_axes"],
    points=1,
    cases=(
        case_over({"data": 4, "tensor": 2}, Named(), "data", quick=True),
        case_over({"data": 4, "tensor": 2}, Named(), "data", "tensor", quick=True),
        case_over({"data": 5}, Named(), "data"),
        case_over({"pipe": 2, "tensor": 3}, Named(), "tensor", "pipe"),
        case_over({"data": 2, "pipe": 2, "tensor": 2}, Named(), "data", "tensor"),
        case_over({"data": 2}, Named()),
        case_over({"data": 1, "tensor": 2}, Named(), "data"),
    ),
    unseen=lambda rng: unseen_over(rng, Named()),
    draw=draw_keys,
    oracle=keys_oracle,
    facts=key_facts,
)

# sync_gradients: a mean over the axes that a leaf is replicated over, and nothing else.


def open_axes(spec: P, case: Case[Any]) -> tuple[str, ...]:
    """The mesh axes that a leaf is not split over: each of their places has its own gradient."""
    split_axes = {axis for entry in spec_of(spec, len(spec)) for axis in entry}
    return tuple(axis for axis in case.mesh if axis not in split_axes)


def sync_oracle(inputs: dict[str, Any], case: Case[Leaves]) -> dict[str, Any]:
    """The mean over the dims of the named axes that a leaf is not split over, broadcast to each of their places."""

    def mean(stacked, spec):
        averaged = {*open_axes(spec, case)} & {*case.sizes.names}
        dims = tuple(i for i, axis in enumerate(case.mesh) if axis in averaged)
        average = np.mean(stacked, dims, np.float64, keepdims=True).astype(np.float32)
        return np.broadcast_to(average, stacked.shape).copy()

    return {"values": jax.tree.map(mean, inputs["gradients"], of_leaves(case, lambda _, spec: spec))}


def _reduced(case: Case[Leaves]) -> list[tuple[int, int]]:
    """For each leaf that must be reduced: the number of participating devices, and its local bytes."""

    def group_and_bytes(shape: tuple[int, ...], spec: P) -> tuple[int, int]:
        return math.prod(case.mesh[a] for a in open_axes(spec, case) if a in case.sizes.names), 4 * math.prod(shape)

    groups_and_bytes = jax.tree.leaves(of_leaves(case, group_and_bytes), is_leaf=lambda x: isinstance(x, tuple))
    return [(group, size) for group, size in groups_and_bytes if group > 1]


def sync_facts(evidence: TaskEvidence) -> list[Fact]:
    def form(e: Evidence) -> float:
        return sum(all_reduce_bytes(n, size) for n, size in _reduced(e.case))

    hint, cases = "One is enough for each leaf that needs a mean, over all axes of that mean at once.", evidence.cases
    return [
        facts.arrays_match("values", cases, "values", "Which axes does this leaf's spec name? ", weight=2),
        byte_facts.times_sent("all-reduces", cases, "all_reduce", lambda e: len(_reduced(e.case)), hint, fewer=True),
        byte_facts.bytes_sent("all-reduce bytes", cases, "all_reduce", form),
        byte_facts.only_collectives("other collectives", cases, ("all_reduce",)),
    ]


SYNC_GRADIENTS = Task(
    wrapping=WRAPPINGS["sync_gradients"],
    points=2,
    core_facts=("all-reduce bytes",),
    cases=(
        case_over({"data": 4, "tensor": 2}, Leaves(), "data", "tensor", quick=True),
        case_over({"data": 8}, Leaves(), "data", quick=True),
        # One name is a part of the other: an axis must not be looked up in a spec's text.
        case_over({"fsdp_transpose": 3, "fsdp": 2}, Leaves(unit=12), "fsdp"),
        case_over({"data": 2, "tensor": 1}, Leaves(), "tensor", "data"),
        case_over({"data": 1}, Leaves(), "data"),
    ),
    unseen=lambda rng: unseen_over(rng, Leaves(unit=int(rng.choice([8, 24, 32])), turn=int(rng.integers(1, 8)))),
    draw=lambda rng, case: draw_leaves(rng, SYNC_GRADIENTS.input_shapes(case)),
    oracle=sync_oracle,
    facts=sync_facts,
)

# train_step_dp: three steps of SGD on many devices are three steps on one.


def params_in(e: Evidence) -> list[Leaf]:
    """The parameters among a Program's inputs."""
    return [leaf for leaf in e.inputs if leaf.name.startswith("params/")]


def ring_bytes(e: Evidence, numbers: int) -> float:
    """Bytes sent by one all-reduce of every parameter's gradient and of the given number of scalars."""
    size = 4 * numbers + sum(leaf.local_bytes(e.case.mesh) for leaf in params_in(e))
    return all_reduce_bytes(axis_size(e.case), size)


def draw_step(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    batches = stacked(lambda: draw_masked(rng, case.sizes, rows_of(case), axis_size(case)), STEPS)
    return {"params": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)), "batches": batches}


def step_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """SGD on one device, on all rows at once; gradients are those of the first step."""
    params, rate, decay = inputs["params"], np.float32(case.sizes.learning_rate), np.float32(case.sizes.weight_decay)
    losses, first = [], None
    for number in range(STEPS):
        batch = jax.tree.map(lambda rows, i=number: rows[i], inputs["batches"])
        loss, gradients = jax.tree.map(np.asarray, loss_and_gradients(case.sizes.model)(params, batch))
        losses, first = [*losses, loss], first or gradients
        pulled = jax.tree.map(lambda g, p, own: g + decay * p if own > 1 else g, gradients, params, own_dims(params))
        params = jax.tree.map(lambda p, g: p - rate * g, params, pulled)
    return {"values": {"losses": np.stack(losses), "params": params}, "gradients": first}


def own_dims(params: Any) -> Any:
    """Number of dims of each leaf in one layer."""
    return {part: jax.tree.map(lambda p, part=part: p.ndim - (part == "layers"), params[part]) for part in params}


def step_facts(evidence: TaskEvidence) -> list[Fact]:
    def count(e: Evidence) -> int:
        return STEPS * (len(params_in(e)) + 2) if axis_size(e.case) > 1 else 0

    once = (
        f"Each of the {STEPS} steps needs at most one for each leaf, one for the loss and one for the unmasked count: "
        "where does each of yours run?"
    )
    counted = (
        "Devices and microbatches hold different numbers of unmasked rows or tokens: what does each add to the mean? "
    )
    too_much = "For how many rows are activations in memory at that moment, and how many rows are in a microbatch?"
    sent = byte_facts.bytes_sent(
        "all-reduce bytes", evidence.cases, "all_reduce", lambda e: STEPS * ring_bytes(e, 2), weight=2
    )
    updated = "If the gradients are right, look at the update: which leaves does weight decay change, and by how much? "
    alone = f"{counted}It is the gradient of the loss alone, without weight decay. "
    return [
        *facts.values_and_gradients(evidence.cases, updated, alone, step=True),
        sent,
        byte_facts.times_sent("all-reduces", evidence.cases, "all_reduce", count, once, fewer=True),
        byte_facts.only_collectives("other collectives", evidence.cases, ("all_reduce",)),
        limits.temporaries_within(evidence, 1.5, too_much),
    ]


# Every pair of these occurs in some case: an MLP or a Transformer; one layer or several; one microbatch or several.
_MLP = StepSizes(width=16, hidden=32, num_layers=2, features=8, rows=8, num_microbatches=4)
_TRANSFORMER = StepSizes(width=12, hidden=20, vocab=14, seq=5, rows=6, num_layers=1, num_microbatches=3)
_AT_ONCE = {"num_layers": 3, "num_microbatches": 1, "learning_rate": 0.05, "weight_decay": 0.7}


def _unseen_step(rng: np.random.Generator) -> Case[StepSizes]:
    settings = {
        "num_microbatches": int(rng.choice([3, 6])),
        "learning_rate": float(rng.choice([0.07, 0.13, 0.17, 0.26])),
        "weight_decay": float(rng.choice([0.2, 0.4, 0.5])),
    }
    return unseen_case(rng, StepSizes(**unseen_model(rng), **settings), *ODD)


TRAIN_STEP_DP = Task(
    wrapping=WRAPPINGS["train_step_dp"],
    points=3,
    core_facts=("all-reduce bytes", "live temporaries"),
    cases=(
        Case.on({"data": 8}, _MLP, quick=True),
        Case.on({"pipe": 3, "tensor": 2}, _TRANSFORMER.replace(**_AT_ONCE), quick=True),
        Case.on({"data": 2}, _TRANSFORMER.replace(learning_rate=0.2)),
        Case.on({"data": 1}, _MLP.replace(num_layers=1, num_microbatches=1)),
    ),
    unseen=_unseen_step,
    draw=draw_step,
    oracle=step_oracle,
    facts=step_facts,
    at_scale=(
        Case.on({"data": 8}, _MLP.replace(width=1024, hidden=4096, features=1024, rows=8192), "width 1024"),
        "data=8",
    ),
    # Larger steps for such a wide layer would amplify a rounding error into a large difference.
    stretches=({"rows": 8192}, {"width": 1024, "learning_rate": 1e-3}, {"hidden": 4096, "learning_rate": 1e-3}),
    naive_memory="takes_all_rows_at_once",
)

# overlapped_gradients: the reductions run during the last microbatch's backward pass.

# Relative to the exposed time of one synchronisation after the backward pass; as advice also for the compiled schedule.
EXPOSED = 0.35


def draw_overlap(rng: np.random.Generator, case: Case[StepSizes]) -> dict[str, Any]:
    batch = draw_masked(rng, case.sizes, rows_of(case), axis_size(case))
    return {"params": draw_leaves(rng, params_of(case), rng.uniform(0.2, 0.4)), "batch": batch}


def overlap_oracle(inputs: dict[str, Any], case: Case[StepSizes]) -> dict[str, Any]:
    """Each device's share of the loss of all rows, and on every device that loss's gradient."""
    devices, batch, model = axis_size(case), inputs["batch"], case.sizes.model
    rows = jax.tree.map(lambda a: a.reshape(devices, -1, *a.shape[1:]), batch)
    counted = np.sum(rows["mask"].reshape(devices, -1), 1)
    shares = np.asarray(_loss_of_each_device(model)(inputs["params"], rows)) * (counted / np.sum(counted))
    _, gradients = jax.tree.map(np.asarray, loss_and_gradients(model)(inputs["params"], batch))
    return {"values": shares, "gradients": jax.tree.map(lambda g: np.repeat(g[None], devices, 0), gradients)}


@lru_cache(maxsize=32)
def _loss_of_each_device(sizes: ModelSizes) -> Any:
    return compile_oracle(jax.vmap(partial(full_loss, build_model(sizes)), in_axes=(None, 0)))


def overlap_facts(evidence: TaskEvidence) -> list[Fact]:
    exposed = (
        "When a reduction begins, which computation is left to hide it behind, and has the sum that it needs been "
        "computed by then? Computations run in the order in which they appear in your program."
    )
    share = "Each device returns its own share of the mean over all unmasked rows or tokens on all devices. "
    each = (
        "Is every microbatch weighted by its share of all devices' unmasked count, and is each layer's sum complete? "
    )
    return [
        *facts.values_and_gradients(evidence.cases, share, each),
        byte_facts.bytes_sent(
            "all-reduce bytes", evidence.programs, "all_reduce", lambda e: ring_bytes(e, 1), weight=2
        ),
        byte_facts.only_collectives("other collectives", evidence.programs, ("all_reduce",)),
        time_limits.exposed_within(evidence, EXPOSED, exposed, weight=4, than=limits.NAIVE),
        # The naive baseline's step takes only 1.07 times as long as the reference's: no limit on time alone separates
        # the two. The step must gain time, though, or work that fills the wait would pass.
        time_limits.time_gained(evidence, (1 - EXPOSED) / 4, "What does it compute that the naive baseline does not?"),
    ]


_DEEP = StepSizes(width=8, hidden=16, num_layers=12, features=8, rows=4, num_microbatches=2)


def _unseen_overlap(rng: np.random.Generator) -> Case[StepSizes]:
    return unseen_case(rng, StepSizes(**unseen_model(rng), num_microbatches=int(rng.choice([4, 6]))), *ODD)


OVERLAPPED_GRADIENTS = Task(
    wrapping=WRAPPINGS["overlapped_gradients"],
    points=4,
    core_facts=("exposed communication", "predicted time"),
    cases=(
        Case.on({"data": 8}, _DEEP, quick=True),
        Case.on({"pipe": 3, "tensor": 2}, _TRANSFORMER.replace(**_AT_ONCE), quick=True),
        Case.on({"data": 2}, _TRANSFORMER),
        Case.on({"data": 1}, _MLP.replace(num_layers=1, rows=4, num_microbatches=1)),
    ),
    unseen=_unseen_overlap,
    draw=draw_overlap,
    oracle=overlap_oracle,
    facts=overlap_facts,
    # Two microbatches of 4,096 rows per device.
    at_scale=(
        Case.on({"data": 8}, _DEEP.replace(width=2048, hidden=8192, features=2048, rows=8192), "width 2048"),
        "data=8",
    ),
    stretches=({"rows": 8192}, {"width": 2048}, {"hidden": 8192}),
    naive_memory="reduces_after_the_backward_pass",
    naive_time="reduces_after_the_backward_pass",
    machine="8xA5000",
    compiled_exposed=EXPOSED,
)
