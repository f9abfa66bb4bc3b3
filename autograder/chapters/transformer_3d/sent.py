"""What a step over three axes may send: the closed forms, and the facts that hold a program against them."""

from __future__ import annotations

from collections.abc import Callable

from autograder.chapters.transformer_3d.shared import part_bytes
from autograder.chapters.transformer_3d.wrapping.model import axes_of, sizes_of
from autograder.contract import facts
from autograder.contract.facts import plain, worst
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact
from course.schedules import num_ticks

MOVES = ("all_gather", "reduce_scatter", "collective_permute", "all_to_all")
_RINGS = "With rings, only the embedding's sums travel over this axis in one piece: what else does?"
_SUMS = "Which gradients are summed more often than once, or by devices that have parts of different things?"


def steps_of(case: Case) -> int:
    return case.sizes.get("steps", 1)


def parts_over_data(case: Case) -> int:
    """Bytes of the parts that a device holds of leaves that are split over the data axis."""
    data = axes_of(case)[0]
    return sum(held for held, split, _ in part_bytes(case) if data in split)


def gathered(case: Case) -> float:
    """Bytes that a device sends to gather every split leaf over the data axis once, or to scatter its gradient."""
    return steps_of(case) * (sizes_of(case)[0] - 1) * parts_over_data(case)


def microbatch_bytes(case: Case) -> float:
    """Of a device's part of one microbatch's activations."""
    s = case.sizes
    return 4 * s["rows"] * s["seq"] * s["width"] / sizes_of(case)[2]


def ticks_of(case: Case) -> int:
    """Ticks of the looped schedule, forward."""
    return num_ticks(sizes_of(case)[1], case.sizes["num_microbatches"], case.sizes["num_repeats"])


def permuted(case: Case) -> float:
    """Bytes that a device passes on over the pipe axis, forward and backward."""
    return 2 * steps_of(case) * ticks_of(case) * microbatch_bytes(case) if sizes_of(case)[1] > 1 else 0


# --8<-- [start:sums]
def most_summed(case: Case) -> float:
    """The most that a device sends in all-reduces: every gradient over the axes that its leaf is whole on, one by one.

    Beside them, the loss: three numbers a token over the tensor axis, twice where they are computed again, and
    scalars.
    """
    mesh, s = case.mesh, case.sizes
    ring = {axis: 2 * (size - 1) / size for axis, size in mesh.items()}
    whole = sum(ring[axis] * held for held, split, _ in part_bytes(case) for axis in mesh if axis not in split)
    tokens = s["rows"] * s["num_microbatches"] * s["seq"]
    of_loss = ring[axes_of(case)[2]] * 4 * 2 * 3 * (tokens + 1)
    return steps_of(case) * (whole + of_loss + 4 * 16 * sum(ring.values()))


# --8<-- [end:sums]


def sent_facts(cases: list[Evidence]) -> list[Fact]:
    """Over ``data``, over ``pipe``, and in all-reduces."""
    low = {0: (1.0, 2.0), 1: (0.5, 2.0)}  # bfloat16 takes half
    return [
        _between("all-gather bytes over data", cases, "all_gather", 0, gathered,
                 lambda e: low[e.case.sizes["bfloat16"]]),
        _between("reduce-scatter bytes over data", cases, "reduce_scatter", 0, gathered,
                 lambda e: (0.5 if e.case.sizes["bfloat16"] else 1.0, 1.0)),
        _between("permute bytes over pipe", cases, "collective_permute", 1, permuted, lambda e: (0.5, 1.5)),
        facts.bytes_at_most("all-reduce bytes", cases, ("all_reduce",), lambda e: most_summed(e.case), _SUMS),
    ]  # fmt: skip


def _between(
    name: str, cases: list[Evidence], kind: str, role: int, form: Callable[[Case], float],
    times: Callable[[Evidence], tuple[float, float]],
) -> Fact:  # fmt: skip
    found = [
        facts.bytes_sent(name, [e], kind, lambda e: form(e.case), times=times(e), axes=(axes_of(e.case)[role],))
        for e in cases
    ]
    return worst(found)


def no_pieces(cases: list[Evidence]) -> Fact:
    """With rings, what is gathered and scattered over the tensor axis is the embedding's, forward and backward."""
    found, name = [], "transfers in one piece"
    for e in cases:
        tensor = axes_of(e.case)[2]
        sent = [c for c in e.costs.collectives if c.axes == (tensor,) and c.kind in ("all_gather", "reduce_scatter")]
        size = sizes_of(e.case)[2]
        once = (size - 1) * microbatch_bytes(e.case) * e.case.sizes["num_microbatches"]
        total, limit = sum(c.total_bytes for c in sent), 3 * steps_of(e.case) * once
        if not e.case.sizes["rings"]:
            continue
        passed, message, line = bool(total <= 1.0001 * limit), "", e.line
        if not passed:
            most = max(sent, key=lambda c: c.total_bytes)
            message, line = (
                f"on mesh {e.case.mesh_text} there is {plain(most.kind)} of {most.total_bytes:,.0f} bytes. {_RINGS}",
                most.line,
            )
        found.append(Fact(name, passed, f"{total:,.0f}", f"{limit:,.0f}", "bytes", case=e.case.name, line=line,
                          message=message))  # fmt: skip
    return worst(found) if found else Fact(name, None, "not measured", "", message="no case asks for rings", weight=0)
