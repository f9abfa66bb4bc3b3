"""Facts shared by many contracts: each measures something, gives the expected value, and says where to look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.comparing import is_under, norm, rounding, scale_of, shapes_on_a_device
from autograder.contract.diagnosis import dropout, factors, wrong_values
from autograder.contract.diagnosis.layout import layout, rank_of
from autograder.contract.output_checks import broadcast, show_spec
from autograder.contract.sentence import About, Sentence
from autograder.contract.task import Case, Evidence
from autograder.contract.text import append_sentence, count_of, distinct_texts, six_digits
from autograder.contract.verdict import NOT_MEASURED, Direction, Fact, Kind, Unit
from course.program.ir import plain_kind
from course.program.program import spec_of

# float32 sums in different orders agree to about 1e-6 of the largest element; bfloat16 intermediates give 1e-3.
TOLERANCE = 2e-5
BEFORE = "Gradients are read off the results: begin with “values”."
FIRST_LOSS = (
    "The loss is wrong before anything is updated, and the gradients follow from it: begin with the loss. "
    "Over which rows, and over which devices, is it averaged? If that is right, what is different in the forward pass?"
)
FOLLOW = "In a step, the values follow from the gradients, which are wrong, too: begin with the gradients."
LOSS_ALONE = "All other results are right: over which rows, and over which devices, is the loss averaged?"


def worst(facts: Sequence[Fact], name: str = "values", kind: Kind = Kind.VALUES) -> Fact:
    """One fact for all cases: the first that fails, else the first, which contracts make the most informative one.

    Without facts, return a failed fact called ``name``, whose message says that there was nothing to examine.
    """
    if not facts:
        message = "there is nothing to look at here"
        return Fact(name, kind, False, "nothing", "something to look at", message=message)
    failed = [fact for fact in facts if fact.passed is False]
    chosen = failed[0] if failed else facts[0]
    others = {fact.case for fact in failed} - {chosen.case}
    also_fails = f"(also fails in: {'; '.join(sorted(others))})" if others else ""
    return replace(chosen, message=append_sentence(chosen.message, also_fails))


def case_fact(
    e: Evidence, name: str, kind: Kind, message: str, measured: Any, limit: Any = None, **details: Any
) -> Fact:
    """Build a fact about one case, which passes if there is no message; ``details`` as for ``Fact``.

    It names a line only if ``details`` gives one, since the cause of an error is not on the function's first line.
    """
    return Fact(name, kind, not message, measured, limit, message=message, case=e.case.name, **details)


def unmeasured(name: str, kind: Kind, why: str, weight: float = 1, case: str = "") -> Fact:
    """A fact that this check does not measure."""
    return Fact(name, kind, None, NOT_MEASURED, message=why, weight=weight, case=case)


def arrays_match(
    name: str,
    evidence: list[Evidence],
    prefix: str,
    hint: str = "",
    *,
    weight: float = 1,
    tolerance: float = TOLERANCE,
    picture: Callable[[Evidence], str] = lambda _: "",
    not_finite: str = "",
    keys: bool = True,
) -> Fact:
    """Require every leaf under ``prefix`` to equal the oracle's in shape, dtype and value, in every case.

    The measured figure is the largest difference relative to the largest expected element of the leaf. ``picture`` is
    appended to the message for a case with known inputs, on separate lines, as from ``misplaced.grid``;
    ``not_finite`` is the question about a leaf that has infinite elements or NaN. ``keys`` is False if another fact
    already asks from which keys masks are drawn.
    """
    kind = Kind.GRADIENTS if is_under(prefix, "gradients") else Kind.VALUES
    leaves = [(e, leaf) for e in evidence for leaf in e.expected if is_under(leaf, prefix) and e.expected[leaf].size]
    leaf_facts = [_leaf_match(name, kind, e, leaf, tolerance) for e, leaf in leaves]
    wrong = [(e, leaf) for (e, leaf), fact in zip(leaves, leaf_facts, strict=True) if not fact.passed]
    if wrong:
        (e, leaf), first = wrong[0], next(i for i, fact in enumerate(leaf_facts) if not fact.passed)
        sentences, about = [leaf_facts[first].message], leaf_facts[first].about
        if leaf_facts[first].unit == Unit.RELATIVE:
            others = [x for x in evidence if not _differs(x, tolerance) and any(x is y for y, _ in leaves)]
            cases = [x for x in evidence if _differs(x, tolerance)], others
            swap = wrong_values.exchanged(e, leaf, tolerance)
            cause = Sentence(swap) or wrong_values.explain_values(e, leaf, tolerance, evidence)
            partly = len(wrong) < len(leaves) or bool(np.any(np.isclose(e.measured[leaf], e.expected[leaf])))
            before = [(x, _leaf_match("", kind, e, x, tolerance)) for x in e.expected if is_under(x, "values")]
            before = [x for x, fact in before if not fact.passed and fact.unit == Unit.RELATIVE]
            alike = [wrong_values.explain_values(e, x, tolerance, evidence) for x in before]
            partly = partly or any(About.RIGHT_MASKS in sentence.about for sentence in alike)
            asks = Sentence() if swap else dropout.question(cause, hint, *cases, nothing_right=keys and not partly)
            about = (*cause.about, *asks.about)
            sentences += [cause.text, asks.text]
            if kind is Kind.GRADIENTS and cause and cause in alike:
                sentences[1:], about = ["As with “values”."], ()
        elif not_finite and leaf_facts[first].limit == "finite":
            sentences.append(not_finite)
        elif leaf_facts[first].limit == "finite" and About.NOT_FINITE not in about:
            sentences.append(hint)
        wrong_leaves, all_leaves = ([leaf for x, leaf in pairs if x is e] for pairs in (wrong, leaves))
        asks_more = bool(hint) and About.SUM_OR_MEAN not in about
        sentences.append(wrong_values.explain_leaves(e, wrong_leaves, all_leaves, asks=asks_more))
        drawn = "" if e.secret or leaf_facts[first].unit != Unit.RELATIVE else picture(e)
        message = " ".join(part.strip() for part in sentences if part) + drawn
        leaf_facts[first] = replace(leaf_facts[first], message=message, about=about)
    return replace(worst(leaf_facts, name, kind), weight=weight)


def parts_match(name: str, evidence: list[Evidence], hints: Mapping[str, str], *, weight: float = 1) -> Fact:
    """Like ``arrays_match`` for several parts, each with its own question; the fact is about the first wrong part.

    ``hints`` maps prefixes to questions, in the order in which a function computes the parts.
    """
    facts = [arrays_match(name, evidence, part, hint, weight=weight) for part, hint in hints.items()]
    return next((fact for fact in facts if not fact.passed), facts[-1])


def values_and_gradients(
    cases: list[Evidence],
    values: str = "",
    gradients: str = "",
    *,
    weight: float = 2,
    norm: str = "gradients",
    step: bool = False,
    first_loss: str = "",
) -> list[Fact]:
    """Require the values, the gradient of each leaf, and the global norm of the gradients under ``norm``.

    Values and gradients have their own hints. In a ``step`` the values follow from the gradients, so their hint is
    given only once the gradients are right; if only a loss is wrong, the hint is about the loss. ``first_loss`` is an
    additional question about a loss that is wrong alone, or before any update.
    """
    back = arrays_match("gradients", cases, "gradients", gradients, weight=weight)
    after = step and back.passed is False
    loss = step and all(
        leaf.rpartition("/")[2] in ("loss", "losses") or _leaf_match("", Kind.VALUES, e, leaf, TOLERANCE).passed
        for e in cases
        for leaf in e.expected
        if is_under(leaf, "values") and e.expected[leaf].size
    )
    values_fact = arrays_match(
        "values", cases, "values", "" if after else f"{LOSS_ALONE} {first_loss}" if loss else values
    )
    results = [(e, leaf) for e in cases for leaf in e.expected if is_under(leaf, "values")]
    if any(wrong_values.exchanged(*result, TOLERANCE) for result in results):
        back = replace(back, message=back.message and BEFORE)
    elif after and values_fact.passed is False and values_fact.unit == Unit.RELATIVE:
        begin = Sentence(FOLLOW, (About.WRONG_GRADIENTS,))
        if any(map(_first_loss_wrong, cases)):
            begin = Sentence(f"{FIRST_LOSS} {first_loss}".strip(), (About.FIRST_LOSS,))
        values_fact = replace(
            values_fact, message=f"{values_fact.message} {begin.text}", about=(*values_fact.about, *begin.about)
        )
    if About.ALWAYS_DROPS in values_fact.about and back.passed is False:
        back = arrays_match("gradients", cases, "gradients", gradients, weight=weight, keys=False)
    return [values_fact, back, global_norm_matches(cases, norm)]


def _first_loss_wrong(e: Evidence) -> bool:
    """Return True if a loss is wrong before any update; of several steps, along the last dim, only the first counts."""
    for leaf in e.expected:
        if is_under(leaf, "values") and leaf.rpartition("/")[2] in ("loss", "losses") and leaf in e.measured:
            measured, expected = e.measured[leaf], e.expected[leaf]
            if (
                measured.shape == expected.shape
                and expected.ndim
                and getattr(e.case.sizes, "steps", 0) == expected.shape[-1]
            ):
                measured, expected = measured[..., 0], expected[..., 0]
            if measured.shape != expected.shape or not np.allclose(measured, expected, rtol=10 * TOLERANCE, atol=0):
                return True
    return False


def global_norm_matches(evidence: list[Evidence], prefix: str) -> Fact:
    """Require the norm over all leaves under ``prefix`` to equal the oracle's: the norm used for gradient clipping.

    A leaf that every device has whole counts once.
    """
    name, cases = "gradient norm", [e for e in evidence if any(is_under(leaf, prefix) for leaf in e.expected)]
    return worst([_norm_matches(name, e, prefix) for e in cases], name, Kind.GRADIENTS)


def _norm_matches(name: str, e: Evidence, prefix: str) -> Fact:
    measured, expected = (norm(e, side, prefix) for side in (e.measured, e.expected))
    scale = max(expected, 1e-30)
    figures: dict[str, Any] = {"measured": measured, "limit": expected, "direction": Direction.EXACTLY}
    comparison = "{} and should be {}".format(*distinct_texts(six_digits, measured, expected))
    if e.secret:
        figures = {"measured": abs(measured - expected) / scale, "limit": TOLERANCE, "unit": Unit.RELATIVE}
        comparison = factors.times(measured / scale)
    wrong = not abs(measured - expected) <= TOLERANCE * scale
    where = f"{e.case.place} the norm over all leaves, each counted once,"
    message = f"{where} is {comparison}" if wrong else ""
    return case_fact(e, name, Kind.GRADIENTS, message, **figures)


def products_of(name: str, evidence: list[Evidence], dtype: str, hint: str) -> Fact:
    """Require every matmul to multiply operands of ``dtype``, as written in StableHLO: ``bf16``."""

    def look(e: Evidence) -> Fact:
        required = f"{dtype} x {dtype}"
        others = {kind: count for kind, count in e.costs.products.items() if kind != required}
        total, right = sum(e.costs.products.values()), e.costs.products.get(required, 0)
        counts = ", ".join(f"{count} of {kind}" for kind, count in sorted(others.items()))
        before = f"besides {right}" if right else "instead of"
        products = "product" if right == 1 else "products"
        message = f"{before} {products} of {required} there are {counts}. {hint}" if others else ""
        if not total:
            message = f"no product was found that could be of {required}. {hint}"
        details = {"direction": Direction.ALL, "unit": Unit.PRODUCTS, "of": dtype, "line": _line_of(e, others)}
        return case_fact(e, name, Kind.COMPUTE, message, right, total, **details)

    return worst([look(e) for e in evidence], name, Kind.COMPUTE)


def precise_in(
    name: str,
    evidence: list[Evidence],
    dtype: str,
    hint: str,
    least: Callable[[Evidence], dict[tuple[str, ...], int]] = lambda _: {},
) -> Fact:
    """Require ``dtype`` for every function and sum counted by ``Costs.precise``, as written in StableHLO: ``f32``.

    ``least`` gives the minimum number of elements for some functions; those in a tuple count together. Functions that
    are computed in another way, such as an exponential via ``tanh``, are not counted and may have any precision.
    """

    def look(e: Evidence) -> Fact:
        by_kind = e.costs.precise
        others = {kind: count for kind, count in by_kind.items() if not kind.endswith(f" of {dtype}")}
        counts = ", ".join(f"{kind} ({count})" for kind, count in sorted(others.items()))
        total, wrong = sum(by_kind.values()), sum(others.values())
        message = f"besides {total - wrong} of {dtype} there are: {counts}. {hint}" if others else ""
        if not by_kind:
            message = f"no function or sum was found that could be of {dtype}. {hint}"
        taken = {kinds: sum(e.costs.taken.get(f"{kind} of {dtype}", 0) for kind in kinds) for kinds in least(e)}
        few = [(" or ".join(kinds), taken[kinds], n) for kinds, n in least(e).items() if taken[kinds] < n]
        if few and not message:
            message = "".join(
                f"{kinds} is computed in {dtype} for {count_of(present, 'element')}, and {n:,} are needed. "
                for kinds, present, n in few
            )
            message += hint
            total, wrong = few[0][2], few[0][2] - few[0][1]
        details = {"direction": Direction.ALL, "unit": Unit.DTYPE, "of": dtype, "line": _line_of(e, others)}
        return case_fact(e, name, Kind.COMPUTE, message, total - wrong, total, **details)

    return worst([look(e) for e in evidence], name, Kind.COMPUTE)


def _line_of(e: Evidence, kinds: Iterable[str]) -> str:
    """The line of the first operation of one of these kinds; the function's line if unknown."""
    return next((e.costs.lines[kind] for kind in kinds if kind in e.costs.lines), e.line)


def same_program_size(name: str, smaller: Evidence, larger: Evidence, what: str, hint: str) -> Fact:
    """Require a Program to have no more operations of any kind when ``what`` grows from one case to another.

    The larger case must also run more matmuls: a Program that does as much in the smaller case proves nothing.
    """
    few, many = smaller.costs, larger.costs
    grown = [kind for kind, count in many.written.items() if count > few.written.get(kind, 0)]
    runs = [sum(costs.products.values()) for costs in (few, many)]
    cases, message = (smaller.case.name, larger.case.name), ""
    shown: tuple[Any, Any] = many.operations, few.operations
    if grown or many.operations > few.operations:
        more = f"with more `{plain_kind(grown[0])}` operations" if grown else "more of all kinds"
        message = (
            f"the program has {count_of(few.operations, 'operation')} in the case {cases[0]} and {many.operations:,} "
            f"in {cases[1]}, {more}: it grows with {what}. {hint}"
        )
    elif runs[1] <= runs[0]:
        message = (
            f"the program runs {count_of(runs[0], 'matmul')} in the case {cases[0]} and {runs[1]} in "
            f"{cases[1]}, where there is more to do: it does the same amount in both. Are all parts processed, one "
            "after the other?"
        )
        shown = count_of(runs[1], "matmul"), f"more than {runs[0]}"
    return case_fact(larger, name, Kind.PROGRAM, message, *shown, unit=Unit.OPERATIONS)


def specs_match(
    evidence: list[Evidence], rules: Callable[[Evidence], list[P]], how: Callable[[Case[Any]], str]
) -> Fact:
    """Require every output to be split by ``rules``, given in output order; ``how`` describes the rules' arguments."""
    name = "split dims"

    def look(e: Evidence) -> Fact:
        pairs = list(zip(e.outputs, rules(e), strict=True))
        wrong = [(part, rule) for part, rule in pairs if part.spec != spec_of(rule, len(part.shape))]
        message = ""
        if wrong:
            part, rule = wrong[0]
            measured, expected = map(show_spec, (part.partition_spec, rule))
            message = (
                f"leaf {part.name.partition('/')[2]} {list(part.shape)} {e.case.place}: measured {measured}, "
                f"expected {expected} ({how(e.case)})"
            )
        figures = {"direction": Direction.ALL, "unit": Unit.LEAVES}
        return case_fact(e, name, Kind.VALUES, message, len(pairs) - len(wrong), len(pairs), **figures)

    return worst([look(e) for e in evidence], name)


def _differs(e: Evidence, tolerance: float) -> bool:
    return not all(
        _leaf_match("", Kind.VALUES, e, leaf, tolerance).passed for leaf in e.expected if e.expected[leaf].size
    )


def _leaf_match(name: str, kind: Kind, e: Evidence, leaf: str, tolerance: float) -> Fact:
    expected, measured = e.expected[leaf], e.measured.get(leaf)
    inner = leaf.partition("/")[2]
    where = f"{f'leaf {inner}' if inner else 'the gradient' if leaf == 'gradients' else 'the result'} {e.case.place}"
    if measured is None:
        return case_fact(e, name, kind, f"{where} is missing from the result.", "missing", "present")
    if (measured.shape, measured.dtype) != (expected.shape, expected.dtype):
        shapes = shapes_on_a_device(e, leaf)
        measured_text, expected_text = (
            f"{a.dtype}{list(shape)}" for a, shape in zip((measured, expected), shapes, strict=True)
        )
        each = " on each device" if shapes[0] != measured.shape else ""
        # A whole array in place of a part can be as large as one that broadcasting made.
        end = broadcast(*shapes) if broadcast(measured.shape, expected.shape) != "." else "."
        message = f"{where}: measured {measured_text}{each}, expected {expected_text}{end}"
        return case_fact(e, name, kind, message, measured_text, expected_text)
    if not np.all(np.isfinite(measured)):
        bad = int(np.sum(~np.isfinite(measured)))
        reason = wrong_values.not_finite(e, measured)
        return case_fact(e, name, kind, f"{where}: {reason.text}", f"{bad} not finite", "finite", about=reason.about)
    scale = scale_of(e, leaf)
    errors = np.abs(measured.astype(np.float64) - expected.astype(np.float64))
    error = float(np.max(errors, initial=0)) / scale
    tolerance += rounding(e, leaf) / scale
    figures: dict[str, Any] = {"measured": error, "limit": tolerance, "unit": Unit.RELATIVE}
    if error <= tolerance:
        return case_fact(e, name, kind, "", **figures)
    if not np.any(expected):  # there is nothing that an error could be a multiple of
        figures |= {"measured": "not zero", "limit": "zero"}
    worst_at = tuple(map(int, np.unravel_index(int(np.argmax(errors)), errors.shape)))
    leaf_layout = layout(e, leaf, summed=True)
    rank = rank_of(e, leaf)
    whole = list(worst_at)[len(worst_at) - rank if rank and rank <= len(worst_at) else 0 :]
    index, on = (leaf_layout.index(worst_at), leaf_layout.holder(worst_at)) if leaf_layout else (whole, "")
    if inner in ("loss", "losses", "norm") and expected.shape[-1:] == (getattr(e.case.sizes, "steps", 0),):
        place = f" in step {index[-1]}" if expected.shape[-1] > 1 else ""
    else:
        place = f" at {index}" if index else ""
    place += f" (on {on})" if on else ""
    texts = distinct_texts(six_digits, float(measured[worst_at]), float(expected[worst_at]))
    text = f"measured {texts[0]}, expected {texts[1]}{place}"
    if e.secret:
        wrong = int(np.sum(errors > tolerance * scale))
        text = (
            f"{wrong:,} of {errors.size:,} elements {'is' if wrong == 1 else 'are'} wrong, the worst{place} by "
            f"{float(f'{error:.1e}'):g} times the largest expected one"
        )
        if not np.any(expected):
            text = f"{wrong:,} of {errors.size:,} elements {'is' if wrong == 1 else 'are'} not zero and should be"
        elif errors.size == 1:
            text = f"off by {float(f'{error:.1e}'):g} times what it should be"
    return case_fact(e, name, kind, f"{where}: {text}.", **figures)
