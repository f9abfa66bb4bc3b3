"""Communication and bfloat16 compute of a step over three axes: closed forms, and facts that check them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax

from autograder.chapters.closed_forms import all_reduce_bytes
from autograder.chapters.transformer_3d.layouts import part_bytes
from autograder.chapters.transformer_3d.wrapping import Sizes, axes_of, named, sizes_of, stacked_of, stage_specs
from autograder.contract import byte_facts, facts
from autograder.contract.facts import case_fact, unmeasured, worst
from autograder.contract.task import Case, Evidence
from autograder.contract.text import count_of
from autograder.contract.verdict import Direction, Fact, Kind, Unit
from course.program import Collective
from course.program.ir import plain_kind
from course.schedules import num_ticks

_NO_RINGS = "With rings, nothing travels over this axis in one piece: where is something gathered or scattered whole?"
_RINGS = "With rings, only the embedding's sums travel over this axis in one piece: what else does?"
_ROUNDED = "If it is right in float32, what else is rounded, such as what one block passes on to the next?"
_RINGS_HINT = "does this case ask for rings?"
_LATER = "not measured yet: the cases {} are run once those before them pass"
_NEEDED = "what does a device need that it does not have?"
SUMS = "Which gradients are summed more than once, or over devices that hold different parts?"
# Relative error of bfloat16 products in layers of this size, compared with float32.
ROUNDED = 0.05


def parts_over_data(case: Case[Sizes], layers: bool = False) -> int:
    """Bytes of a device's parts of the leaves (or only the layers' leaves) that are split over the data axis."""
    data = axes_of(case)[0]
    return sum(
        num_bytes for num_bytes, split, of_layers in part_bytes(case) if data in split and (of_layers or not layers)
    )


def gathered(case: Case[Sizes], layers: bool = False) -> float:
    """Bytes that a device sends to gather every split leaf over the data axis once, or to scatter its gradient."""
    return case.sizes.steps * (sizes_of(case)[0] - 1) * parts_over_data(case, layers)


def microbatch_bytes(case: Case[Sizes]) -> float:
    """Bytes of a device's part of one microbatch's activations."""
    s = case.sizes
    return 4 * s.rows * s.seq * s.width / sizes_of(case)[2]


def ticks_of(case: Case[Sizes]) -> int:
    """Ticks of the looped schedule, forward."""
    return num_ticks(sizes_of(case)[1], case.sizes.num_microbatches, case.sizes.num_repeats)


def layer_runs(case: Case[Sizes]) -> int:
    """Number of forward runs of a layer in all ticks, including idle ones."""
    return ticks_of(case) * case.sizes.num_layers // sizes_of(case)[1] // case.sizes.num_repeats


def permuted(case: Case[Sizes]) -> float:
    """Bytes that a device permutes over the pipe axis, forward and backward."""
    return 2 * case.sizes.steps * ticks_of(case) * microbatch_bytes(case) if sizes_of(case)[1] > 1 else 0


# --8<-- [start:sums]
def most_summed(case: Case[Sizes]) -> float:
    """Maximum bytes that a device all-reduces: every gradient over the axes on which its leaf is whole, one by one.

    In addition, the loss: three numbers per token over the tensor axis, twice if they are recomputed, and
    scalars.
    """
    mesh, s = case.mesh, case.sizes
    whole = sum(
        all_reduce_bytes(size, num_bytes)
        for num_bytes, split, _ in part_bytes(case)
        for axis, size in mesh.items()
        if axis not in split
    )
    tokens = s.rows * s.num_microbatches * s.seq
    of_loss = all_reduce_bytes(sizes_of(case)[2], 4 * 2 * 3 * (tokens + 1))
    scalars = sum(all_reduce_bytes(size, 4 * 16) for size in mesh.values())
    return s.steps * (whole + of_loss + scalars)


# --8<-- [end:sums]


def over_data(evidence: list[Evidence], layers: bool = False, most: float = 2) -> list[Fact]:
    """Gathers and reduce-scatters of parts; weights sent in bfloat16 take half the bytes, gradients never do."""

    def form(e: Evidence) -> float:
        return gathered(e.case, layers)

    def half(e: Evidence) -> float:
        return (0.5 if e.case.sizes.bfloat16 else 1) * form(e)

    def data(case: Case[Sizes]) -> tuple[str]:
        return (axes_of(case)[0],)

    def in_float32(e: Evidence) -> Fact:
        sent = [
            c for c in e.costs.collectives if (c.kind, c.axes) == ("all_gather", data(e.case)) and c.dtype != "bf16"
        ]
        message = f"with dtype bfloat16 there are all-gathers of {sent[0].dtype} over {sent[0].axes[0]}" if sent else ""
        return case_fact(e, name, Kind.COMMUNICATION, message, sum(c.total_bytes for c in sent), 0, line=e.line)

    name = "all-gather bytes over data"
    gathers = byte_facts.bytes_sent(name, evidence, "all_gather", lambda e: most * half(e), least=half, axes=data)
    return [
        worst([gathers, *(in_float32(e) for e in evidence if e.case.sizes.bfloat16)]),
        byte_facts.bytes_sent("reduce-scatter bytes over data", evidence, "reduce_scatter", form, axes=data),
    ]


def whole_facts(evidence: list[Evidence]) -> list[Fact]:
    """Require each split leaf to be gathered and scattered once, each whole one all-reduced, and nothing else sent."""

    def whole(e: Evidence, one_by_one: bool) -> float:
        total = 0.0
        for num_bytes, split, of_layers in part_bytes(e.case):
            data, pipe, tensor = axes_of(e.case)
            axes = [axis for axis in (data, tensor, *([] if of_layers else [pipe])) if axis not in split]
            sizes = [e.case.mesh[axis] for axis in axes]
            groups = sizes if one_by_one else [math.prod(sizes)]
            total += sum(all_reduce_bytes(n, num_bytes) for n in groups)
        return total

    summed = byte_facts.bytes_sent(
        "all-reduce bytes", evidence, "all_reduce", lambda e: whole(e, True), least=lambda e: whole(e, False), hint=SUMS
    )
    return [*over_data(evidence, most=1), summed, nothing_else(evidence, DATA | {("all_reduce", None)})]


def layers_facts(evidence: list[Evidence]) -> list[Fact]:
    """Communication over each axis, for the layers alone."""
    return [
        *over_data(evidence, layers=True),
        permuted_fact(evidence),
        over_tensor(evidence, layer_moves),
        byte_facts.bytes_at_most("all-reduce bytes", evidence, ("all_reduce",), layer_sums, SUMS),
        nothing_else(evidence, DATA | TENSOR | {("collective_permute", 1), ("all_reduce", None)}),
    ]


def sent_facts(evidence: list[Evidence]) -> list[Fact]:
    """Communication over each axis, and in all-reduces; bfloat16 takes half."""

    def around(e: Evidence) -> float:
        """Bytes to distribute the last stage's outputs once, and their gradients once."""
        s, stages = e.case.sizes, sizes_of(e.case)[1]
        return s.steps * all_reduce_bytes(stages, s.num_microbatches * microbatch_bytes(e.case))

    pipe = "other bytes over pipe"
    return [
        *over_data(evidence),
        permuted_fact(evidence),
        byte_facts.bytes_sent(
            pipe,
            evidence,
            ("all_gather", "reduce_scatter"),
            around,
            times=(0, 1),
            axes=lambda case: (axes_of(case)[1],),
            hint="Which stages need the outputs, and which stage has the gradient of which output?",
        ),
        over_tensor(evidence, lambda case: layer_moves(case) + end_moves(case)),
        byte_facts.bytes_at_most("all-reduce bytes", evidence, ("all_reduce",), lambda e: most_summed(e.case), SUMS),
        nothing_else(
            evidence,
            DATA | TENSOR | {(kind, 1) for kind in ("collective_permute", *SCATTERED)} | {("all_reduce", None)},
        ),
    ]


def permuted_fact(evidence: list[Evidence]) -> Fact:
    """Allow one microbatch per tick over the pipe axis, forward and backward; half as much again if recomputed."""
    return byte_facts.bytes_sent(
        "permute bytes over pipe",
        evidence,
        "collective_permute",
        lambda e: permuted(e.case),
        times=(0.5, 1.5),
        axes=lambda case: (axes_of(case)[1],),
    )


SCATTERED = ("all_gather", "reduce_scatter")
# Kinds of collectives, and the position of the single axis that they run over.
DATA = frozenset((kind, 0) for kind in SCATTERED)
TENSOR = frozenset((kind, 2) for kind in (*SCATTERED, "collective_permute"))


def nothing_else(evidence: list[Evidence], known: Iterable[tuple[str, int | None]]) -> Fact:
    """Allow no collectives other than ``(kind, position of its axis)``; all-reduces may run over any axes.

    Only weights gathered over the data axis and traffic over the tensor axis may be bfloat16; rings run over
    that axis if the case requires them.
    """
    name, known = "other collectives", set(known)

    def fact(e: Evidence) -> Fact:
        axes = axes_of(e.case)

        def fine(c: Collective) -> bool:
            if c.dtype == "bf16" and c.axes != (axes[2],) and (c.kind, c.axes) != ("all_gather", (axes[0],)):
                return False
            if c.kind == "collective_permute" and c.axes == (axes[2],) and not e.case.sizes.rings:
                return False
            return (c.kind, None) in known or (len(c.axes) == 1 and (c.kind, axes.index(c.axes[0])) in known)

        unexpected = [c for c in e.costs.collectives if not fine(c)]
        message, line = "", e.line
        if unexpected:
            most = max(unexpected, key=lambda c: c.total_bytes)
            line, over = most.line, " and ".join(most.axes)
            message = (
                f"{e.case.place} there is {plain_kind(most.kind)} of {most.dtype}{list(most.shape)} over "
                f"{over}: {_RINGS_HINT if most.kind == 'collective_permute' and most.axes == (axes[2],) else _NEEDED}"
            )
        return case_fact(e, name, Kind.COMMUNICATION, message, sum(c.count for c in unexpected), 0, line=line)

    return worst([fact(e) for e in evidence], name, Kind.COMMUNICATION)


def over_tensor(evidence: list[Evidence], form: Callable[[Case[Sizes]], float]) -> Fact:
    """Limit the bytes gathered, scattered and permuted over the tensor axis to a closed form."""
    return byte_facts.bytes_sent(
        "bytes over tensor",
        evidence,
        (*SCATTERED, "collective_permute"),
        lambda e: form(e.case),
        times=(0, 1),
        axes=lambda case: (axes_of(case)[2],),
        hint="Which activations does a device need whole, and how often?",
    )


# --8<-- [start:moves]
def moves_of_a_layer(case: Case[Sizes], again: bool) -> float:
    """Bytes over the tensor axis for a layer and a microbatch: gathers, scatters, and in rings both once more backward.

    Attention and MLP gather and scatter once each, or once together if they are in parallel. ``again`` adds the
    recomputed layer. Backward, a gather's transpose is a scatter; a ring's also resends what it has not kept.
    """
    s = case.sizes
    half = (sizes_of(case)[2] - 1) * microbatch_bytes(case) * (0.5 if s.bfloat16 else 1)
    backward = 3 if s.rings else 2
    return half * (2 if s.parallel else 4) / 2 * (2 + backward + (2 if again else 0))


# --8<-- [end:moves]


def stage_moves(case: Case[Sizes]) -> float:
    """Bytes for the layers of a stage on one microbatch, forward and backward."""
    return case.sizes.num_layers / sizes_of(case)[1] * moves_of_a_layer(case, again=False)


def layer_moves(case: Case[Sizes]) -> float:
    """Bytes for all ticks, including idle ones."""
    return case.sizes.steps * layer_runs(case) * moves_of_a_layer(case, again=case.sizes.remat)


def end_moves(case: Case[Sizes]) -> float:
    """Bytes for embedding (float32) and loss: all microbatches in each direction, and again if they are recomputed."""
    s = case.sizes
    whole = s.steps * s.num_microbatches * (sizes_of(case)[2] - 1) * microbatch_bytes(case)
    loss = (3 if s.rings else 2) + (1 if s.remat else 0)
    return whole * (3 + loss * (0.5 if s.bfloat16 else 1))


def stage_sums(e: Evidence) -> float:
    """Bytes of the shares of leaves that are whole on the tensor axis, which the wrapper sums."""
    n, stages = sizes_of(e.case)[2], sizes_of(e.case)[1]
    layers = zip(jax.tree.leaves(stage_specs(e.case)), jax.tree.leaves(stacked_of(e.case)["layers"]), strict=True)
    num_bytes = sum(4 * leaf.size / stages for spec, leaf in layers if axes_of(e.case)[2] not in named(spec))
    return all_reduce_bytes(n, num_bytes)


def layer_sums(e: Evidence) -> float:
    """Bytes of every gradient of a layer over the axes on which its leaf is whole."""
    data, _, tensor = axes_of(e.case)
    pairs = [
        (num_bytes, axis, split) for num_bytes, split, layer in part_bytes(e.case) if layer for axis in (data, tensor)
    ]
    return sum(all_reduce_bytes(e.case.mesh[axis], num_bytes) for num_bytes, axis, split in pairs if axis not in split)


def bfloat16_facts(
    evidence: list[Evidence], runs: Callable[[Case[Sizes]], int], rounded: float = ROUNDED
) -> list[Fact]:
    """In bfloat16: only dense products; every function and sum in float32; results near those of float32.

    Args:
        evidence: The cases in bfloat16.
        runs: Number of forward runs of a layer in a case. Each run takes two products of attention forward and four
            backward, in float32, and two more if it is recomputed.
        rounded: Tolerance of results.
    """
    names = "bfloat16 products", "float32 elsewhere"
    if not evidence:
        return [unmeasured(name, Kind.COMPUTE, _LATER.format("in bfloat16")) for name in names]

    def fact(e: Evidence) -> Fact:
        count, products = runs(e.case), e.costs.products
        low, plainly = (products.get(f"{dtype} x {dtype}", 0) for dtype in ("bf16", "f32"))
        least, most, dense = 6 * count, 8 * count, (6 if e.case.sizes.parallel else 12) * count
        near = worst(
            [facts.arrays_match(names[0], [e], group, _ROUNDED, tolerance=rounded) for group in ("values", "gradients")]
        )
        message = ""
        if low < dense or not least <= plainly <= most or low + plainly < sum(products.values()):
            message = (
                f"with dtype bfloat16 there are {low} products of bfloat16 and "
                f"{count_of(sum(products.values()) - low, 'other')}. "
                "Products of dense layers, and of a head, should be of bfloat16, forward and backward, and those of "
                f"attention of float32: there should be between {least} and {most} of float32 here; there are {plainly}"
            )
        elif not near.passed:
            return near
        options = {"direction": Direction.BETWEEN, "unit": Unit.PRODUCTS}
        return case_fact(
            e, names[0], Kind.COMPUTE if near.passed else near.kind, message, plainly, (least, most), **options
        )

    hint = "The result of a product is cast back before anything else is done with it"
    return [worst([fact(e) for e in evidence]), facts.precise_in(names[1], evidence, "f32", hint)]


def no_whole_transfers(evidence: list[Evidence], times: float) -> Fact:
    """With rings, limit the bytes gathered and scattered over the tensor axis to ``times`` the embedding's rows."""
    name = "transfers in one piece"

    def fact(e: Evidence) -> Fact:
        tensor = axes_of(e.case)[2]
        sent = [c for c in e.costs.collectives if c.axes == (tensor,) and c.kind in ("all_gather", "reduce_scatter")]
        once = (sizes_of(e.case)[2] - 1) * microbatch_bytes(e.case) * e.case.sizes.num_microbatches
        total, limit = sum(c.total_bytes for c in sent), times * e.case.sizes.steps * once
        message, line = "", e.line
        if total > limit * (1 + byte_facts.ROUNDING):
            most = max(sent, key=lambda c: c.total_bytes)
            line, transfer = most.line, f"{plain_kind(most.kind)} of {most.total_bytes:,.0f} bytes"
            message = f"{e.case.place} there is {transfer}. {_RINGS if times else _NO_RINGS}"
        return case_fact(e, name, Kind.COMMUNICATION, message, total, limit, unit=Unit.BYTES, line=line)

    case_facts = [fact(e) for e in evidence if e.case.sizes.rings]
    return worst(case_facts) if case_facts else unmeasured(name, Kind.COMMUNICATION, _LATER.format("with rings"))
