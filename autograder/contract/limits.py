"""Facts limited by the reference or the naive baseline at a realistic size: memory and FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from autograder.contract import facts
from autograder.contract.facts import unmeasured
from autograder.contract.task import Case, Evidence, TaskEvidence
from autograder.contract.text import distinct_bytes, format_bytes, short
from autograder.contract.verdict import Fact, Kind, Unit
from course.program.ir import plain_kind

# A forward and backward pass is 3/4 of a step that recomputes every activation, slightly less if the first
# layer's input needs no gradient.
LEAST_WORK = 0.7
MOST_ARRAYS = 6
REFERENCE, NAIVE = "reference", "naive"
_CHANGES = (
    "the program changes with its sizes: {}. It must run the same operations on larger arrays: decide by the arguments "
    "you are given, not by how large arrays are, and cut them into the same number of parts at every size."
)


def temporaries_within(evidence: TaskEvidence, ratio: float, hint: str, **options: Any) -> Fact:
    """Limit live temporaries to ``ratio`` times the reference's; ``options`` as for ``within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        return _at_the_peak(e, format_bytes(e.memory.temporaries), times, hint)

    return within(
        "live temporaries",
        Kind.MEMORY,
        "temporaries",
        lambda e: e.memory.temporaries,
        look,
        evidence,
        ratio,
        unit=Unit.BYTES,
        **options,
    )


def temporaries_at_most(
    evidence: TaskEvidence, most: Callable[[Case[Any]], int], hint: str, *, weight: float = 1
) -> Fact:
    """Limit live temporaries at scale to this many bytes, a closed form of the case."""
    name, figure, e = "live temporaries", "temporaries", evidence.at_scale
    factor = evidence.factor(name)
    if fact := barred(name, Kind.MEMORY, evidence, figure, weight=weight):
        return fact
    assert e
    at_peak, limit = e.memory.temporaries, factor * most(e.case)
    live, most_allowed = distinct_bytes(at_peak, limit)
    message, line = _at_the_peak(e, live, f"{most_allowed} are allowed", hint) if at_peak > limit else ("", "")
    known = {key: evidence.references[figure].get(key) for key in (REFERENCE, NAIVE)}
    return facts.case_fact(
        e, name, Kind.MEMORY, message, at_peak, limit, unit=Unit.BYTES, line=line, weight=weight, **known
    )


def _at_the_peak(e: Evidence, live: str, allowed: str, hint: str) -> tuple[str, str]:
    """The message, which ends with a table of live arrays, and the line of the largest array."""
    at_peak, alive = e.memory.temporaries, e.memory.alive
    message = f"at the peak {live} of temporaries are live at once, {allowed}"
    if not alive:
        return f"{message}. {hint}", ""
    message += f"; the largest, {_array(alive[0])}, takes {format_bytes(alive[0].bytes)}"
    ranked = sorted(Counter(alive).items(), key=lambda entry: -entry[0].bytes * entry[1])
    rows = [
        (format_bytes(array.bytes * count), f"{count} x {_array(array)}", _origin_of(array.kind), array.line)
        for array, count in ranked[:MOST_ARRAYS]
    ]
    if rest := at_peak - sum(array.bytes * count for array, count in ranked[:MOST_ARRAYS]):
        rows.append((format_bytes(rest), "smaller ones", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        f"  {size:>{widths[0]}}  {arrays:{widths[1]}}  {origin:{widths[2]}}  {line}".rstrip()
        for size, arrays, origin, line in rows
    )
    return "\n".join([f"{message}. {hint}".strip(), "  alive at the peak:", *lines]), alive[0].line


def _origin_of(kind: str) -> str:
    return "kept by a loop" if kind == "while" else plain_kind(kind)


def _array(temporary: Any) -> str:
    return f"{temporary.dtype}[{'x'.join(map(str, temporary.shape))}]"


# --8<-- [start:flops_within]
def flops_within(evidence: TaskEvidence, ratio: float, hint: str, **options: Any) -> Fact:
    """Limit the FLOPs of matmuls to ``ratio`` times the reference's; ``options`` as for ``within``."""

    def look(e: Evidence, times: str) -> tuple[str, str]:
        return f"a device computes {short(e.costs.flops)} FLOPs, {times}. {hint}", ""

    return within(
        "FLOPs", Kind.COMPUTE, "flops", lambda e: e.costs.flops, look, evidence, ratio, unit=Unit.FLOPS, **options
    )


# --8<-- [end:flops_within]


def largest_within(
    evidence: TaskEvidence, most: Callable[[Case[Any]], int], hint: str, *, weight: float = 1, least: float = LEAST_WORK
) -> Fact:
    """Limit the elements of every temporary at scale to ``most``; ``least`` as for ``within``."""
    name, e = "largest temporary", evidence.at_scale
    factor = evidence.factor(name)
    if fact := barred(name, Kind.MEMORY, evidence, "temporaries", least=least, weight=weight):
        return fact
    assert e
    largest, elements, limit = e.memory.largest, e.memory.largest_numbers, factor * most(e.case)
    message, line = "", ""
    if largest and elements > limit:
        message = f"at some point an array {_array(largest)} with {elements:,} elements is live. {hint}"
        line = largest.line
    return facts.case_fact(e, name, Kind.MEMORY, message, elements, limit, unit=Unit.ELEMENTS, line=line, weight=weight)


LEFT_OUT = "this check leaves the realistic size out"


def within(
    name: str,
    kind: Kind,
    figure: str,
    measure: Callable[[Evidence], float],
    explain: Callable[[Evidence, str], tuple[str, str]],
    evidence: TaskEvidence,
    ratio: float,
    *,
    unit: Unit,
    factor: float = 1,
    weight: float = 1,
    than: str = REFERENCE,
    least: float = LEAST_WORK,
) -> Fact:
    """Limit a figure at scale to ``ratio`` times the reference's or the naive baseline's.

    Args:
        name: The fact's name.
        kind: The fact's kind.
        figure: Its name among the references.
        measure: Extracts the figure from the evidence.
        explain: Returns the message and line for an excessive figure, given its ratio in words.
        evidence: The evidence, and the measured references and naive baselines.
        ratio: The limit.
        unit: The display unit.
        factor: Conversion factor to ``unit``.
        weight: The fact's weight, 0 for advice.
        than: ``reference`` or ``naive``.
        least: The share of the reference's FLOPs below which part of the work must be missing.
    """
    ratio *= evidence.factor(name)
    if fact := barred(name, kind, evidence, figure, than, least, weight):
        return fact
    e, known = evidence.at_scale, evidence.references[figure]
    assert e
    measured, against = measure(e), known[than]
    message, line = "", ""
    if measured > ratio * against:
        shares = (f"{measured / against:.{digits}f}" for digits in (2, 4, 9)) if against else ()
        many = next((share for share in shares if float(share) > ratio), "more than that")
        times = f"{many} times {_possessive(than)} (the limit is {ratio:g} times)" if against else ""
        if not weight and against:
            times = f"{many} times {_possessive(than)}; a good program reaches {ratio:g} times (this costs no points)"
        message, line = explain(e, times or f"and {_possessive(than)} is 0")
    shown = {key: factor * known[key] for key in (REFERENCE, NAIVE) if key in known}
    details = {
        "unit": unit,
        "of": e.timeline.machine if factor != 1 and e.timeline else "",
        "weight": weight,
        "line": line,
    }
    return facts.case_fact(e, name, kind, message, factor * measured, factor * ratio * against, **details, **shown)


def barred(
    name: str,
    kind: Kind,
    evidence: TaskEvidence,
    figure: str,
    than: str = REFERENCE,
    least: float = LEAST_WORK,
    weight: float = 1,
) -> Fact | None:
    """Return the fact if the realistic size cannot be compared with the reference; None if it can."""
    e, known = evidence.at_scale, evidence.references
    if e is None:
        return unmeasured(name, kind, LEFT_OUT, weight)
    if e.structural_mismatch:
        return different(name, kind, e, weight)
    if than not in known.get(figure, {}) or not known.get("flops"):
        return unmeasured(name, kind, f"the {than} version has not been measured with this version of jax", weight)
    work = known["flops"]["reference"]
    if e.costs.flops < least * work:
        message = (
            f"at the realistic size the program computes {e.costs.flops:.3g} FLOPs, and the work takes {work:.3g}, "
            "including recomputation: is a part of the arrays left out there?"
        )
        return facts.case_fact(e, name, kind, message, "not comparable", weight=weight)
    return None


def _possessive(than: str) -> str:
    return "the naive baseline's" if than == NAIVE else f"the {than}'s"


def different(name: str, kind: Kind, e: Evidence, weight: float) -> Fact:
    return facts.case_fact(e, name, kind, _CHANGES.format(e.structural_mismatch), "not comparable", weight=weight)
