"""Facts that many contracts share: each measures something, says what it should have been, and where to look."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.task import Evidence
from autograder.contract.verdict import Fact, Kind
from course.program import Collective
from course.program.program import spec_of

# float32 results of differently ordered sums agree to about 1e-6 of the largest element; bfloat16 inside gives 1e-3.
TOLERANCE = 2e-5


def arrays_match(
    name: str, evidence: list[Evidence], prefix: str, hint: str = "", *, weight: float = 1, tolerance: float = TOLERANCE
) -> Fact:
    """Every leaf under ``prefix`` equals the oracle's, in shape, dtype and value, on every case.

    The measured figure is the largest difference relative to the largest expected element of the leaf.
    """
    leaves = [(e, leaf) for e in evidence for leaf in e.expected if _under(leaf, prefix) and e.expected[leaf].size]
    found = [_leaf_match(name, e, leaf, hint, tolerance) for e, leaf in leaves]
    kind = Kind.GRADIENTS if _under(prefix, "gradients") else Kind.VALUES
    return replace(worst(found, name), weight=weight, kind=kind)


def global_norm_matches(evidence: list[Evidence], prefix: str) -> Fact:
    """The norm over all leaves under ``prefix`` equals the oracle's: what clipping by global norm would see."""
    some = [e for e in evidence if any(_under(leaf, prefix) for leaf in e.expected)]
    return replace(worst([_norm_matches(e, prefix) for e in some], "gradient norm"), kind=Kind.GRADIENTS)


def _norm_matches(e: Evidence, prefix: str) -> Fact:
    measured, expected = (
        float(np.sqrt(sum(np.sum(np.square(a, dtype=np.float64)) for n, a in side.items() if _under(n, prefix))))
        for side in (e.measured, e.expected)
    )
    scale = max(expected, 1e-30)
    passed = bool(abs(measured - expected) <= TOLERANCE * scale)
    figures, said = (_short(measured), _short(expected), ""), f"{measured:.6g} and should be {expected:.6g}"
    if e.secret:
        figures = (f"{abs(measured - expected) / scale:.1e}", f"{TOLERANCE:.0e}", "relative")
        said = f"{measured / scale:.4g} times what it should be"
    message = "" if passed else f"on mesh {e.case.mesh_text} the norm over all leaves is {said}"
    where: dict[str, Any] = {"case": e.case.name, "line": e.line}
    return Fact("gradient norm", passed, *figures, **where, message=message)


def bytes_sent(
    name: str,
    evidence: list[Evidence],
    kind: str,
    expected: Callable[[Evidence], float],
    *,
    times: tuple[float, float] = (1, 1),
    least: Callable[[Evidence], float] | None = None,
    axes: tuple[str, ...] | None = None,
    weight: float = 1,
) -> Fact:
    """Bytes that a device sends by one kind of collective lie between ``times`` multiples of the closed form.

    Args:
        name: Of the fact.
        evidence: The cases.
        kind: StableHLO's name, ``all_reduce``.
        expected: The closed form of a case.
        times: The least and the most multiples of it.
        least: Another closed form, where from that on it is enough.
        axes: Count only what goes over exactly these axes; over any if left out.
        weight: How much the fact counts.
    """
    found = []
    for e in evidence:
        sent = [c for c in e.costs.collectives if c.kind == kind and (axes is None or set(c.axes) == set(axes))]
        total, form = sum(c.total_bytes for c in sent), expected(e)
        low, high = least(e) if least else form * times[0], form * times[1]
        passed = bool(low * 0.9999 <= total <= high * 1.0001)
        limit = bytes_text(low) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"
        message = "" if passed else _bytes_message(e, kind, sent, total, low, high)
        line = max(sent, key=lambda c: c.total_bytes).line if sent else e.line
        found.append(
            Fact(name, passed, bytes_text(total), limit, "bytes", None, None, e.case.name, line, message, weight)
        )
    return worst(found, name)


def times_sent(name: str, evidence: list[Evidence], kind: str, expected: Callable[[Evidence], int], hint: str) -> Fact:
    """How often a device runs one kind of collective, each array of it counted, loops unrolled: exactly so often."""
    found = []
    for e in evidence:
        sent = [c for c in e.costs.collectives if c.kind == kind]
        count, wanted = sum(c.count for c in sent), expected(e)
        most = max(sent, key=lambda c: c.count, default=None)
        message = ""
        if count != wanted:
            message = f"on mesh {e.case.mesh_text} there are {count} of {plain(kind)}, expected {wanted}"
            message += f"; most often {_describe(most)}. {hint}" if most else f". {hint}"
        line = most.line if most else e.line
        found.append(
            Fact(name, count == wanted, str(count), str(wanted), "", case=e.case.name, line=line, message=message)
        )
    return worst(found, name)


def products_of(name: str, evidence: list[Evidence], allowed: str, hint: str) -> Fact:
    """Every matrix product multiplies operands of the dtype ``allowed``, in StableHLO's words: ``bf16``."""
    found = []
    for e in evidence:
        wanted = f"{allowed} x {allowed}"
        others = {kind: count for kind, count in e.costs.products.items() if kind != wanted}
        every, right = sum(e.costs.products.values()), e.costs.products.get(wanted, 0)
        said = ", ".join(f"{count} of {kind}" for kind, count in sorted(others.items()))
        message = f"beside {right} products of {wanted} there are {said}. {hint}" if others else ""
        if not every:
            message = f"no product was found that could be of {wanted}. {hint}"
        passed = not others and every > 0
        found.append(Fact(name, passed, f"{right} of {every}", f"{every} of {every}", f"{wanted} products",
                          case=e.case.name, line=_line_of(e, others), message=message))  # fmt: skip
    return worst(found, name)


def precise_in(
    name: str,
    evidence: list[Evidence],
    dtype: str,
    hint: str,
    least: Callable[[Evidence], dict[tuple[str, ...], int]] = lambda _: {},
) -> Fact:
    """Every function and sum that ``Costs.precise`` counts is taken in ``dtype``, in StableHLO's words: ``f32``.

    ``least`` says of how many elements some functions have to be taken, any of a tuple's: what is made of others
    instead, such as an exponential of ``tanh``, is not counted and may be of any precision.
    """
    found = []
    for e in evidence:
        every = e.costs.precise
        others = {kind: count for kind, count in every.items() if not kind.endswith(f" of {dtype}")}
        said = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items()))
        total, wrong = sum(every.values()), sum(others.values())
        message = f"beside {total - wrong} of {dtype} there are {said}. {hint}" if others else ""
        if not every:
            message = f"no function or sum was found that could be of {dtype}. {hint}"
        few = [
            (kinds, sum(e.costs.taken.get(f"{kind} of {dtype}", 0) for kind in kinds), n)
            for kinds, n in least(e).items()
        ]
        few = [(" or ".join(kinds), there, n) for kinds, there, n in few if there < n]
        if few and not message:
            message = "".join(
                f"{kinds} is taken in {dtype} of {there:,} elements, and {n:,} are needed. " for kinds, there, n in few
            )
            message += hint
        figures = f"{total - wrong} of {total}", f"{total} of {total}", f"of {dtype}"
        passed = bool(every) and not others and not few
        found.append(Fact(name, passed, *figures, case=e.case.name, line=_line_of(e, others), message=message))
    return worst(found, name)


def _line_of(e: Evidence, kinds: Iterable[str]) -> str:
    """Where the first operation of one of these kinds stands; the function's line if nobody knows."""
    return next((e.costs.lines[kind] for kind in kinds if kind in e.costs.lines), e.line)


def same_program_size(name: str, smaller: Evidence, larger: Evidence, what: str, hint: str) -> Fact:
    """The Program has no more operations of any kind in one case than in another, in which ``what`` is larger.

    It must also run more matrix products there: one that does as much where less is asked for shows nothing.
    """
    few, many = smaller.costs, larger.costs
    grown = [kind for kind, count in many.written.items() if count > few.written.get(kind, 0)]
    runs = [sum(costs.products.values()) for costs in (few, many)]
    message = ""
    if grown or many.operations > few.operations:
        more = plain(grown[0]) if grown else "them"
        message = (
            f"the program has {few.operations} operations in the case {smaller.case.name} and {many.operations} in "
            f"{larger.case.name}, with more of {more}: it grows with {what}. {hint}")  # fmt: skip
    elif runs[1] <= runs[0]:
        message = (
            f"the program runs {runs[0]} matrix products in the case {smaller.case.name} and {runs[1]} in "
            f"{larger.case.name}, where there is more to do: it does as much in both. {hint}")  # fmt: skip
    return Fact(name, not message, str(many.operations), str(few.operations), "operations", case=larger.case.name,
                line=larger.line, message=message)  # fmt: skip


def bytes_at_most(
    name: str, evidence: list[Evidence], kinds: Iterable[str], most: Callable[[Evidence], float], hint: str
) -> Fact:
    """What a device sends by all these kinds of collectives together is at most a closed form.

    Args:
        name: The fact's name.
        evidence: The cases that were run.
        kinds: Of collectives, by their names in StableHLO.
        most: Bytes of one device; a form may be a fraction, so it is compared with room for rounding alone.
        hint: A sentence that ends the message.
    """
    found = []
    for e in evidence:
        sent = [c for c in e.costs.collectives if c.kind in kinds]
        total, limit = sum(c.total_bytes for c in sent), most(e)
        passed, message, line = bool(total <= limit * (1 + 1e-9)), "", e.line
        if not passed:
            largest = max(sent, key=lambda c: c.total_bytes)
            shape, line = "x".join(map(str, largest.shape)), largest.line
            message = (
                f"on mesh {e.case.mesh_text} a device sends {total:,.0f} bytes and should send at most {limit:,.0f}; "
                f"most of it is {plain(largest.kind)} of {largest.dtype}[{shape}]. {hint}")  # fmt: skip
        found.append(Fact(name, passed, f"{total:,.0f}", f"{limit:,.0f}", "bytes", case=e.case.name, line=line,
                          message=message))  # fmt: skip
    return worst(found, name)


def only_collectives(name: str, evidence: list[Evidence], allowed: Iterable[str]) -> Fact:
    """No collective but the allowed ones; a group of one device counts as none."""
    allowed = set(allowed)
    found = []
    for e in evidence:
        others = [c for c in e.costs.collectives if c.kind not in allowed]
        message = ""
        if others:
            first = max(others, key=lambda c: c.total_bytes)
            said = " and ".join(plain(kind) for kind in sorted(allowed)) or "none at all"
            message = (
                f"on mesh {e.case.mesh_text} there is {_describe(first)}; allowed here: {said}. "
                "What does each device need that it does not have?"
            )
        count = sum(c.count for c in others)
        line = others[0].line if others else ""
        found.append(Fact(name, not others, str(count), "0", "", case=e.case.name, line=line, message=message))
    return worst(found, name)


def state_bytes(cases: list[Evidence], expected: Callable[[Evidence], int], whole: Callable[[Evidence], int]) -> Fact:
    """The outputs, which are the state that a device keeps, have exactly the bytes of the closed form.

    Args:
        cases: Whose outputs are the state.
        expected: The closed form of a case: bytes on one device, the sum of ``held_bytes``.
        whole: Bytes of the state if nothing is split.
    """
    found = []
    for e in cases:
        held, form = sum(part.local_bytes(e.case.mesh) for part in e.outputs), expected(e)
        passed = held == form and bool(e.outputs)
        message = "" if passed else (
            f"on mesh {e.case.mesh_text} each device holds {held:,} bytes and should hold {form:,}; "
            f"the whole tree has {whole(e):,}")  # fmt: skip
        found.append(Fact("state bytes per device", passed, f"{held:,}", f"{form:,}", "bytes",
                          naive=f"{whole(e):,}", case=e.case.name, line=e.line, message=message))  # fmt: skip
    return worst(found, "state bytes per device")


def held_bytes(shape: tuple[int, ...], spec: P, mesh: dict[str, int], itemsize: int = 4) -> int:
    """Bytes that a device holds of an array: all of them, divided by the size of every axis that its spec names."""
    parts = math.prod(mesh[axis] for axes in spec_of(spec, len(shape)) for axis in axes)
    return itemsize * math.prod(shape) // parts


def worst(facts: list[Fact], name: str = "values") -> Fact:
    """One fact for all cases: the first that fails, else the first, which contracts make the most telling one.

    A fact over nothing fails, under ``name``: it says that there was nothing to look at, not that all of it is right.
    """
    if not facts:
        return Fact(name, False, "nothing", "something to look at", message="there is nothing to look at here")
    failed = [fact for fact in facts if fact.passed is False]
    chosen = failed[0] if failed else facts[0]
    if len(failed) > 1:
        others = {fact.case for fact in failed} - {chosen.case}
        more = f" (also falls short: {', '.join(sorted(others))})" if others else ""
        return replace(chosen, message=chosen.message + more)
    return chosen


def _under(leaf: str, prefix: str) -> bool:
    return leaf == prefix or leaf.startswith(prefix + "/")


def _leaf_match(name: str, e: Evidence, leaf: str, hint: str, tolerance: float = TOLERANCE) -> Fact:
    expected, measured = e.expected[leaf], e.measured.get(leaf)
    inner = leaf.partition("/")[2]
    where = f"{f'leaf {inner}' if inner else 'the result'} on mesh {e.case.mesh_text}"
    fail: dict[str, Any] = {"case": e.case.name, "line": e.line}
    if measured is None:
        return Fact(name, False, "missing", "present", **fail, message=f"{where} is missing from the result")
    if (measured.shape, measured.dtype) != (expected.shape, expected.dtype):
        found, wanted = (f"{a.dtype}{list(a.shape)}" for a in (measured, expected))
        return Fact(name, False, found, wanted, **fail, message=f"{where}: measured {found}, expected {wanted}")
    if not np.all(np.isfinite(measured)):
        bad = int(np.sum(~np.isfinite(measured)))
        return Fact(
            name, False, f"{bad} not finite", "finite", **fail, message=f"{where}: {bad} of {measured.size} not finite"
        )
    scale = max(float(np.max(np.abs(expected), initial=0)), 1e-30)
    errors = np.abs(measured.astype(np.float64) - expected.astype(np.float64))
    error = float(np.max(errors, initial=0)) / scale
    if error <= tolerance:
        return Fact(name, True, f"{error:.1e}", f"{tolerance:.0e}", "relative", case=e.case.name)
    at = np.unravel_index(int(np.argmax(errors)), errors.shape)
    place = f" at {list(map(int, at))}" if at else ""
    said = f"measured {float(measured[at]):.6g}, expected {float(expected[at]):.6g}{place}"
    if e.secret:
        wrong = int(np.sum(errors > tolerance * scale))
        said = (
            f"{wrong:,} of {errors.size:,} elements {'is' if wrong == 1 else 'are'} wrong, the worst{place} by "
            f"{_rough(error)} times the largest expected one"
        )
    message = f"{where}: {said}. {_factor(measured, expected, e.case.mesh)}{hint}"
    return Fact(name, False, f"{error:.1e}", f"{tolerance:.0e}", "relative", **fail, message=message.strip())


def _rough(ratio: float) -> str:
    """Two digits, and no exponent where people do without."""
    return f"{float(f'{ratio:.1e}'):g}"


def _factor(measured: np.ndarray, expected: np.ndarray, mesh: dict[str, int]) -> str:
    """A sentence where the whole leaf is off by one factor, since that says most about the cause."""
    weight = float(np.sum(np.square(expected, dtype=np.float64)))
    if weight == 0:
        return ""
    ratio = float(np.sum(measured.astype(np.float64) * expected) / weight)
    if np.max(np.abs(measured - ratio * expected)) > 1e-3 * np.max(np.abs(expected)):
        return ""
    if abs(ratio - 1) < 1e-3:  # rounding
        return ""
    if abs(ratio) < 1e-6:
        return "All of it is zero. "
    sizes = [axis for axis, size in mesh.items() if size > 1 and abs(ratio - size) < 1e-3 * size]
    inverse = [axis for axis, size in mesh.items() if size > 1 and abs(ratio * size - 1) < 1e-3]
    if sizes:
        return f"All of it is {ratio:.4g} times too large, and axis {sizes[0]!r} has that size: sum or mean? "
    if inverse:
        return f"All of it is {1 / ratio:.4g} times too small, and axis {inverse[0]!r} has that size. "
    return f"All of it is {ratio:.4g} times what it should be. "


def _bytes_message(e: Evidence, kind: str, sent: list[Collective], total: float, low: float, high: float) -> str:
    where = f"on mesh {e.case.mesh_text} a device sends {bytes_text(total)} bytes by {plain(kind)}"
    if total < low:
        return f"{where} and should send at least {bytes_text(low)}: is another way taken, or something never sent?"
    largest = max(sent, key=lambda c: c.total_bytes)
    return f"{where} and should send at most {bytes_text(high)}; most of it is {_describe(largest)}."


def _describe(c: Collective) -> str:
    times = f", {c.count} times" if c.count > 1 else ""
    return f"{plain(c.kind)} of {c.dtype}[{'x'.join(map(str, c.shape))}] over {' and '.join(c.axes)}{times}"


def plain(kind: str) -> str:
    """A collective's name as people write it."""
    return kind.replace("_", "-").replace("collective-", "")


def bytes_text(number: float) -> str:
    """A number of bytes with thousands marked."""
    return f"{number:,.0f}"


def _short(number: float) -> str:
    return f"{number:.6g}"
