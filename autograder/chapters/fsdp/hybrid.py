"""``hybrid_shard_step``: split inside a node, replicated across nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from autograder.chapters.fsdp.shared import bytes_of, given_specs, ring_bytes, whole_and_split
from autograder.chapters.fsdp.steps import draw_step, step_oracle, unseen_step
from autograder.chapters.fsdp.wrapping import hybrid_axes
from autograder.contract import facts
from autograder.contract.draws import axis_names
from autograder.contract.task import Case, Evidence, Task
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings


def _inside(e: Evidence) -> float:
    return e.case.sizes["steps"] * ring_bytes(e)


def _between(e: Evidence) -> tuple[float, float]:
    """The least and the most that a device has to send across nodes: an all-reduce of its parts of the gradient.

    Leaves that stay whole, and the loss, are all-reduced over all devices at once, or inside a node and then across.
    """
    inside, across = (e.case.mesh[axis] for axis in hybrid_axes(e.case))
    whole, split = map(bytes_of, whole_and_split(e))
    if across == 1:
        return 0.0, 0.0
    parts, ring = split / inside, 2 * (across - 1) / across
    at_once = 2 * (inside * across - 1) / (inside * across)
    return e.case.sizes["steps"] * ring * (parts + whole), e.case.sizes["steps"] * (
        ring * parts + at_once * (whole + 4)
    )


def _bytes_between_nodes(cases: list[Evidence]) -> Fact:
    """What goes over the axis across nodes, whichever collective sends it."""
    found = []
    for e in cases:
        axis = hybrid_axes(e.case)[1]
        sent = [c for c in e.costs.collectives if axis in c.axes]
        total, (low, high) = sum(c.total_bytes for c in sent), _between(e)
        passed = bool(low * 0.9999 <= total <= high * 1.0001)
        most = max(sent, key=lambda c: c.total_bytes, default=None)
        message = ""
        if not passed:
            message = (
                f"on mesh {e.case.mesh_text} a device sends {facts.bytes_text(total)} bytes over {axis!r} and should "
                f"send {_range(low, high)}; {_most(most)} What is the least that nodes must tell each other?"
            )
        line = most.line if most else e.line
        found.append(Fact("bytes between nodes", passed, facts.bytes_text(total), _range(low, high), "bytes",
                          case=e.case.name, line=line, message=message))  # fmt: skip
    return facts.worst(found)


def _range(low: float, high: float) -> str:
    return f"{facts.bytes_text(low)} to {facts.bytes_text(high)}" if high else "0"


def _most(collective: Any) -> str:
    if collective is None:
        return "it sends nothing."
    shape, axes = "x".join(map(str, collective.shape)), " and ".join(collective.axes)
    return f"most of it is {facts.plain(collective.kind)} of {collective.dtype}[{shape}] over {axes}."


_WHOSE = "Is this leaf split or whole, and along which axes do devices hold gradients of the same numbers? "


def hybrid_shard_step_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", _WHOSE, weight=2),
        facts.global_norm_matches(cases, "gradients"),
        _over_inside("all-gather bytes", cases, "all_gather", (1, 2)),
        _over_inside("reduce-scatter bytes", cases, "reduce_scatter", (1, 1)),
        _bytes_between_nodes(cases),
        facts.only_collectives("other collectives", cases, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


def _over_inside(name: str, cases: list[Evidence], kind: str, times: tuple[int, int]) -> Fact:
    """Bytes sent by one kind of collective over the axis inside a node, on every mesh by that mesh's own name."""
    found = []
    for e in cases:
        found.append(facts.bytes_sent(name, [e], kind, _inside, times=times, axes=hybrid_axes(e.case)[:1]))
    return facts.worst(found)


# Names and order of the axes differ from mesh to mesh; parameters are split over `data`, or over the first axis.
_MLP = {"width": 16, "hidden": 32, "num_layers": 3, "features": 8, "rows": 4, "min_size": 64, "steps": 1, "rate": 100}
_CASES = (
    Case("replica=2 x data=4", {"replica": 2, "data": 4}, _MLP, quick=True),
    Case("device=2 x node=4", {"device": 2, "node": 4}, {**_MLP, "steps": 3, "rate": 20}, quick=True),
    Case("replica=1 x data=8", {"replica": 1, "data": 8}, _MLP),
    Case("replica=4 x data=1", {"replica": 4, "data": 1}, _MLP),
)


def _unseen(rng: np.random.Generator) -> Case:
    sizes = [(4, 2), (2, 4), (2, 2), (2, 3), (3, 2)][rng.integers(5)]
    return Case("unseen", dict(zip(axis_names(rng, 2), sizes, strict=True)), unseen_step(rng))


HYBRID_SHARD_STEP = Task(
    wrapping=wrappings("fsdp")["hybrid_shard_step"],
    given=given_specs,
    kind="local",
    points=3,
    cases=_CASES,
    unseen=_unseen,
    draw=lambda rng, case: draw_step(rng, case, hybrid_axes(case)),
    oracle=lambda inputs, case: step_oracle(inputs, case, hybrid_axes(case)),
    facts=hybrid_shard_step_facts,
    naive="reduces_whole_gradients_between_nodes",
)
