"""Sentences on why too few or too many bytes are sent, and the names of collectives in prose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autograder.contract.case import Case
from autograder.contract.sentence import About, Sentence
from autograder.contract.text import format_bytes, join_words
from course.program import Collective, Leaf
from course.program.ir import plain_kind

_WHICH_DTYPE = "which dtype should travel?"
_NARROW = {"bf16": 2, "f16": 2}


def deficit_cause(sent: Sequence[Collective], low: float, inputs: Iterable[Leaf], case: Case[Any]) -> Sentence:
    """Suggest why too few bytes are sent: in a narrower dtype than any input's, or once for all microbatches.

    The result is empty if neither is the case.
    """
    input_dtypes = {leaf.dtype for leaf in inputs}
    narrow = [c for c in sent if c.dtype in _NARROW and not input_dtypes & {"float16", "bfloat16"}]
    wide = sum(c.total_bytes * (4 / _NARROW[c.dtype] if c.dtype in _NARROW else 1) for c in sent)
    if narrow and wide >= low * (1 - 1e-4):
        most = max(narrow, key=lambda c: c.total_bytes)
        text = f"{array(most)} has numbers of {_NARROW[most.dtype]} bytes, and in float32 it would be "
        return Sentence(f"{text}{format_bytes(wide)}: {_WHICH_DTYPE}", (About.DTYPE,))
    total, microbatches = sum(c.total_bytes for c in sent), getattr(case.sizes, "num_microbatches", 1)
    if microbatches > 1 and abs(total * microbatches / low - 1) < 1e-4:
        return Sentence(f"that is {microbatches} times as much, once for each microbatch. In which of them is it sent?")
    return Sentence()


def excess_cause(
    sent: Sequence[Collective], total: float, upper: float, lower: float = 0, *, bfloat16: bool = False
) -> tuple[Collective, Sentence]:
    """Name the collective that may be redundant, as a sentence: one that sends exactly the excess, else the largest.

    Args:
        sent: The collectives that count.
        total: Their total bytes.
        upper: Upper limit in bytes.
        lower: Lower limit in bytes, which is enough; 0 if it is not known.
        bfloat16: True if the task requires weights to be sent in bfloat16.
    """
    excess, largest = total - upper, max(sent, key=lambda c: c.total_bytes)
    wide = [c for c in sent if c.dtype == "f32"]
    if bfloat16 and wide and (half := total - sum(c.total_bytes for c in wide) / 2) <= upper * (1 + 1e-4):
        most = max(wide, key=lambda c: c.total_bytes)
        enough = f"in bfloat16 all would be {format_bytes(half)}"
        text = f"{array(most)} has numbers of 4 bytes, and {enough}: {_WHICH_DTYPE}"
        return most, Sentence(text, (About.DTYPE,))
    for c in sorted(sent, key=lambda c: -c.wire_bytes):
        runs = round(excess / c.wire_bytes) if c.wire_bytes else 0
        twin = [other for other in sent if other is not c and (other.line, array(other)) == (c.line, array(c))]
        two_runs = 2 * c.wire_bytes
        if len(twin) == 1 and twin[0].count == c.count > 1 and abs(excess - two_runs) <= 1e-3 * excess:
            sends = f"the {array(c)} over {' and '.join(c.axes)} sends in 1 of its {c.count} runs forward"
            exactly = f"the excess of {format_bytes(excess)} is exactly what {sends} and 1 of {c.count} backward"
            return c, Sentence(f"{exactly}: does the loop make one step too many?")
        if 1 <= runs <= c.count and abs(excess - runs * c.wire_bytes) <= 1e-3 * excess:
            over = " and ".join(c.axes)
            if 0 < lower < upper and c.count > 1:
                each = f"the {array(c)} over {over} sends {format_bytes(c.wire_bytes)} in each of its {c.count} runs"
                each += f" forward and {c.count} backward" if len(twin) == 1 and twin[0].count == c.count else ""
                return c, Sentence(f"{each}, and {format_bytes(lower)} in all are enough.")
            runs_text = f" in {runs} of its {c.count} runs" if c.count > 1 else ""
            lines = list(dict.fromkeys(other.line for other in sent if described(other) == described(c) and other.line))
            exactly = f"the excess of {format_bytes(excess)} is exactly what"
            sends = f"{array(c)} over {over} sends{runs_text}"
            if len(lines) > 1:
                return c, Sentence(f"{exactly} one {sends}, of those in {join_words(lines)}: which is not needed?")
            return c, Sentence(f"{exactly} the {sends}.")
    return largest, Sentence(f"most of it is {described(largest)}.").then(inserted(largest))


def inserted(c: Collective) -> str:
    """Explain why JAX inserted a reduction into the backward pass of the course's model; else empty."""
    if c.kind != "all_reduce" or not c.line.startswith("course/"):
        return ""
    return (
        "JAX inserted these all-reduces into the backward pass, because the parameters are the same on all devices "
        "where they meet the data: see “Sums, means and what varies” of data_parallel."
    )


def array(c: Collective) -> str:
    """``all-gather of f32[8x4]``."""
    return f"{plain_kind(c.kind)} of {c.dtype}[{'x'.join(map(str, c.shape))}]"


def described(c: Collective, *, article: bool = False) -> str:
    """Like ``array``, with the axes and the number of runs."""
    before = "" if not article else "an " if c.kind.startswith("a") else "a "
    return f"{before}{array(c)} over {' and '.join(c.axes)}{f', {c.count} times' if c.count > 1 else ''}"
