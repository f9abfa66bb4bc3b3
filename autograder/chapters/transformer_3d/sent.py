"""What a step over three axes may send: the closed forms, and the facts that compare a program with them."""

from __future__ import annotations

from collections.abc import Callable

from autograder.chapters.transformer_3d.oracles import part_bytes
from autograder.chapters.transformer_3d.wrapping.model import Sizes, axes_of, sizes_of
from autograder.contract import facts
from autograder.contract.facts import Form, at, plain, unmeasured, worst
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact, Kind, Unit
from course.schedules import num_ticks

MOVES = ("all_gather", "reduce_scatter", "collective_permute", "all_to_all")
_RINGS = "With rings, only the embedding's sums travel over this axis in one piece: what else does?"
_SUMS = "Which gradients are summed more often than once, or by devices that have parts of different things?"


def parts_over_data(case: Case[Sizes]) -> int:
    """Bytes of the parts that a device holds of leaves that are split over the data axis."""
    data = axes_of(case)[0]
    return sum(held for held, split, _ in part_bytes(case) if data in split)


def gathered(case: Case[Sizes]) -> float:
    """Bytes that a device sends to gather every split leaf over the data axis once, or to scatter its gradient."""
    return case.sizes.steps * (sizes_of(case)[0] - 1) * parts_over_data(case)


def microbatch_bytes(case: Case[Sizes]) -> float:
    """Of a device's part of one microbatch's activations."""
    s = case.sizes
    return 4 * s.rows * s.seq * s.width / sizes_of(case)[2]


def ticks_of(case: Case[Sizes]) -> int:
    """Ticks of the looped schedule, forward."""
    return num_ticks(sizes_of(case)[1], case.sizes.num_microbatches, case.sizes.num_repeats)


def permuted(case: Case[Sizes]) -> float:
    """Bytes that a device passes on over the pipe axis, forward and backward."""
    return 2 * case.sizes.steps * ticks_of(case) * microbatch_bytes(case) if sizes_of(case)[1] > 1 else 0


# --8<-- [start:sums]
def most_summed(case: Case[Sizes]) -> float:
    """The most that a device sends in all-reduces: every gradient over the axes that its leaf is whole on, one by one.

    Besides, the loss: three numbers a token over the tensor axis, twice where they are computed again, and
    scalars.
    """
    mesh, s = case.mesh, case.sizes
    ring = {axis: 2 * (size - 1) / size for axis, size in mesh.items()}
    whole = sum(ring[axis] * held for held, split, _ in part_bytes(case) for axis in mesh if axis not in split)
    tokens = s.rows * s.num_microbatches * s.seq
    of_loss = ring[axes_of(case)[2]] * 4 * 2 * 3 * (tokens + 1)
    return case.sizes.steps * (whole + of_loss + 4 * 16 * sum(ring.values()))


# --8<-- [end:sums]


def sent_facts(evidence: list[Evidence]) -> list[Fact]:
    """Over ``data``, over ``pipe``, and in all-reduces; bfloat16 takes half."""

    def half(e: Evidence) -> float:
        return (0.5 if e.case.sizes.bfloat16 else 1) * gathered(e.case)

    def over(name: str, kind: str, role: int, form: Callable[[Case[Sizes]], float], most: float, least: Form) -> Fact:
        name, axes = f"{name} over {('data', 'pipe')[role]}", lambda case: (axes_of(case)[role],)
        return facts.bytes_sent(name, evidence, kind, lambda e: most * form(e.case), least=least, axes=axes)

    return [
        over("all-gather bytes", "all_gather", 0, gathered, 2, half),
        over("reduce-scatter bytes", "reduce_scatter", 0, gathered, 1, half),
        over("permute bytes", "collective_permute", 1, permuted, 1.5, lambda e: 0.5 * permuted(e.case)),
        facts.bytes_at_most("all-reduce bytes", evidence, ("all_reduce",), lambda e: most_summed(e.case), _SUMS),
    ]


def no_pieces(evidence: list[Evidence]) -> Fact:
    """With rings, what is gathered and scattered over the tensor axis is the embedding's, forward and backward."""
    name = "transfers in one piece"

    def look(e: Evidence) -> Fact:
        tensor = axes_of(e.case)[2]
        sent = [c for c in e.costs.collectives if c.axes == (tensor,) and c.kind in ("all_gather", "reduce_scatter")]
        once = (sizes_of(e.case)[2] - 1) * microbatch_bytes(e.case) * e.case.sizes.num_microbatches
        total, limit = sum(c.total_bytes for c in sent), 3 * e.case.sizes.steps * once
        message, line = "", e.line
        if total > limit * (1 + facts.ROUNDING):
            most = max(sent, key=lambda c: c.total_bytes)
            line, what = most.line, f"{plain(most.kind)} of {most.total_bytes:,.0f} bytes"
            message = f"on mesh {e.case.mesh_text} there is {what}. {_RINGS}"
        return at(e, name, Kind.COMMUNICATION, message, total, limit, unit=Unit.BYTES, line=line)

    found = [look(e) for e in evidence if e.case.sizes.rings]
    return worst(found) if found else unmeasured(name, Kind.COMMUNICATION, "no case asks for rings", weight=0)
