"""Messages of facts about wrong numbers: all values if inputs are public, none if they are secret."""

import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest

from autograder.contract.byte_facts import (
    bytes_at_most,
    bytes_sent,
    only_collectives,
    resident_bytes,
    state_bytes,
    times_sent,
)
from autograder.contract.case import UNSEEN, ModelSizes, Sizes
from autograder.contract.diagnosis.wrong_values import KEYS, MASKS_RIGHT
from autograder.contract.facts import (
    LOSS_ALONE,
    arrays_match,
    global_norm_matches,
    parts_match,
    precise_in,
    products_of,
    same_program_size,
    values_and_gradients,
    worst,
)
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import FIRST_LOSS, FOLLOW, LATER_LOSSES, Fact, Kind, conclude
from course.program import Collective, Costs, Leaf, Memory


@dataclass(frozen=True, kw_only=True)
class Model(ModelSizes):
    num_microbatches: int = 0


DRAWN = np.random.default_rng(5).standard_normal((4, 8)).astype(np.float32)
ONE = DRAWN + np.eye(4, 8, 3, dtype=np.float32) * np.float32(0.5) * (np.arange(4) == 2)[:, None]


def evidence(measured, *, secret, name="gradients/layers/up"):
    case = Case("data=8", {"data": 8, "tensor": 1}, Sizes())
    return Evidence(
        case,
        (),
        (),
        {name: measured},
        {name: DRAWN},
        Costs(0, 0, 0, (), {}),
        Memory(0, 0, 0, 0, ()),
        "mine:3",
        secret=secret,
    )


def both(measured, secret):
    e = [evidence(measured, secret=secret)]
    return arrays_match("gradients", e, "gradients"), global_norm_matches(e, "gradients")


@pytest.mark.parametrize("measured", [8 * DRAWN, DRAWN / 8, ONE, -DRAWN, 0 * DRAWN, DRAWN + 100])
def test_secret_inputs_are_judged_alike_and_no_value_is_said(measured):
    norms = [float(np.linalg.norm(a)) for a in (measured, DRAWN)]
    values = [f"{abs(float(v)):.4g}" for v in (*measured.flat, *DRAWN.flat, *norms) if abs(v) > 1e-6 and v % 1]
    for public, secret in zip(both(measured, False), both(measured, True), strict=True):
        assert (public.passed, public.line, public.case) == (secret.passed, secret.line, secret.case)
        excerpt = f"{secret.measured_text} {secret.limit_text} {secret.message}"
        assert [value for value in values if len(value) > 4 and value in excerpt] == []
        if public.passed is False:
            assert any(value in f"{public.measured_text} {public.message}" for value in values), (
                "the public one says it"
            )


def test_a_secret_message_says_where_how_many_how_far_and_which_factor():
    wrong, norm = both(8 * DRAWN, True)
    at = list(map(int, np.unravel_index(np.argmax(np.abs(DRAWN)), DRAWN.shape)))
    assert wrong.message.startswith(
        f"leaf layers/up in the case 'data=8': 32 of 32 elements are wrong, the worst at {at}"
    )
    assert "by 7 times the largest expected one" in wrong.message
    assert "8 times too large, and axis 'data' has that size" in wrong.message
    assert "norm over all leaves on all devices together is 8 times what it should be" in norm.message
    (single, _) = both(ONE, True)
    assert re.search(r"1 of 32 elements is wrong, the worst at \[2, 5\] by 0\.\d+ times", single.message)


def test_where_inputs_are_public_both_values_are_shown():
    wrong, norm = both(8 * DRAWN, False)
    assert re.search(r"measured -?[\d.]+, expected -?[\d.]+ at \[\d, \d\]", wrong.message)
    assert re.search(r"the norm over all leaves on all devices together is [\d.]+ and should be [\d.]+", norm.message)


def test_a_tolerance_may_be_stated_and_none_means_to_the_last_bit():
    off = evidence(DRAWN * np.float32(1.001), secret=False)
    assert [arrays_match("gradients", [off], "gradients", tolerance=t).passed for t in (1e-2, 2e-5)] == [True, False]
    same = evidence(DRAWN.copy(), secret=False)
    assert arrays_match("gradients", [same], "gradients", tolerance=0).passed is True
    last = evidence(np.nextafter(DRAWN, 9, dtype=np.float32), secret=False)
    assert arrays_match("gradients", [last], "gradients", tolerance=0).passed is False


def test_functions_and_sums_in_another_dtype_are_named():
    found = replace(evidence(DRAWN, secret=True), costs=Costs(0, 0, 0, (), {}, 0, {"log of f32": 2, "sum of bf16": 3}))
    fact = precise_in("functions", [found], "f32", "Look here.")
    assert (fact.passed, fact.measured_text, fact.limit_text, fact.unit_text) == (False, "2 of 5", "5 of 5", "of f32")
    assert fact.message == "besides 2 of f32 there are: sum of bf16 (3). Look here."
    assert fact.line == "mine:3", "nobody knows where"
    known = replace(found, costs=replace(found.costs, lines={"log of f32": "mine:8", "sum of bf16": "mine:9"}))
    assert precise_in("functions", [known], "f32", "").line == "mine:9"
    only = replace(found, costs=Costs(0, 0, 0, (), {}, 0, {"log of f32": 2}))
    assert precise_in("functions", [only], "f32", "").passed is True


def test_state_bytes_are_those_of_the_parts_that_a_device_holds():
    mesh = {"data": 4, "tensor": 2}
    assert resident_bytes((16, 8), jax.P(), mesh) == 512
    assert resident_bytes((16, 8), jax.P("data"), mesh) == 128
    assert resident_bytes((16, 8), jax.P(("data", "tensor")), mesh, itemsize=2) == 32
    assert resident_bytes((16, 8), jax.P("data", "tensor"), mesh) == 64
    split = Leaf("values/up", (16, 8), "float32", (("data",), ()), "result")
    e = replace(evidence(DRAWN, secret=False), case=Case("two axes", mesh, Sizes()), outputs=(split,))
    for form, passed in ((128, True), (512, False)):
        fact = state_bytes([e], lambda _, form=form: form, lambda _: 512)
        assert (fact.passed, fact.measured, fact.limit, fact.naive) == (passed, 128, form, 512)
        assert bool(fact.message) is not passed


def test_bytes_of_several_kinds_are_added_up_and_the_largest_is_named():
    sent = [
        Collective("reduce_scatter", ("data",), 8, 80, 70.0, 2, "mine:4", (20,), "f32"),
        Collective("all_gather", ("data",), 8, 10, 70.0, 3, "mine:5", (5, 2), "f32"),
        Collective("collective_permute", ("data",), 8, 999, 999.0, 1, "mine:6", (9,), "f32"),
    ]
    e = replace(evidence(DRAWN, secret=False), costs=Costs(0, 0, 0, tuple(sent), {}))
    kinds = ("reduce_scatter", "all_gather")
    assert bytes_at_most("bytes", [e], kinds, lambda _: 350, "").passed
    over = bytes_at_most("bytes", [e], kinds, lambda _: 349, "Look.")
    assert (over.passed, over.measured, over.limit, over.line) == (False, 350, 349, "mine:5")
    assert over.message.endswith("most of it is all-gather of f32[5x2] over data, 3 times. Look.")
    assert bytes_at_most("bytes", [replace(e, costs=Costs(0, 0, 0, (), {}))], kinds, lambda _: 0, "").passed
    thirds = replace(e, costs=Costs(0, 0, 0, (replace(sent[0], wire_bytes=560 / 3, count=1),), {}))
    assert bytes_at_most("bytes", [thirds], [sent[0].kind], lambda _: 2 * (2 / 3) * 4 * 5 * 7, "").passed


def test_collectives_are_counted_up_to_a_number_and_over_one_axis_where_that_is_asked():
    reduces = Collective("all_reduce", ("data", "node"), 8, 80, 70.0, 2, "mine:4", (20,), "f32")
    sends = Collective("collective_permute", ("node",), 8, 10, 70.0, 3, "mine:5", (5, 2), "f32")
    e = [replace(evidence(DRAWN, secret=False), costs=Costs(0, 0, 0, (reduces, sends), {}))]
    verdicts = [times_sent("times", e, "all_reduce", lambda _, n=n: n, "", fewer=True) for n in (1, 2, 3)]
    assert [fact.passed for fact in verdicts] == [False, True, True] and "may run 1 at most" in verdicts[0].message
    assert not times_sent("times", e, "all_reduce", lambda _: 3, "").passed
    assert only_collectives("others", e, ("all_reduce",), over=lambda _: "data").passed
    for allowed, axis in ((("all_reduce",), "node"), ((), "data")):
        assert not only_collectives("others", e, allowed, over=lambda _, axis=axis: axis).passed


NOTHING = Evidence(Case("data=8", {"data": 8}, Sizes()), (), (), {}, {}, Costs(0, 0, 0, (), {}), Memory(0, 0, 0, 0, ()))
VACUOUS = {
    "arrays of no case": lambda: arrays_match("values", [], "values"),
    "arrays of no leaf": lambda: arrays_match("values", [NOTHING], "values"),
    "arrays of no element": lambda: arrays_match("values", [empty()], "values"),
    "norm of no case": lambda: global_norm_matches([], "gradients"),
    "norm of no leaf": lambda: global_norm_matches([NOTHING], "gradients"),
    "bytes of no case": lambda: bytes_sent("bytes", [], "all_gather", lambda _: 0),
    "times of no case": lambda: times_sent("times", [], "all_gather", lambda _: 0, ""),
    "most bytes of no case": lambda: bytes_at_most("bytes", [], ("all_gather",), lambda _: 1, ""),
    "collectives of no case": lambda: only_collectives("others", [], ()),
    "products of no case": lambda: products_of("products", [], "bf16", ""),
    "no product": lambda: products_of("products", [NOTHING], "bf16", ""),
    "no function or sum": lambda: precise_in("functions", [NOTHING], "f32", ""),
    "state of no case": lambda: state_bytes([], lambda _: 0, lambda _: 0),
    "no state": lambda: state_bytes([NOTHING], lambda _: 0, lambda _: 0),
    "no facts": lambda: worst([]),
}


def empty():
    none = np.zeros((0, 3), np.float32)
    return replace(NOTHING, measured={"values/none": none}, expected={"values/none": none})


@pytest.mark.parametrize("what", VACUOUS)
def test_a_fact_over_nothing_fails(what):
    fact = VACUOUS[what]()
    assert fact.passed is False and fact.message


def test_gradients_that_are_wrong_or_not_there_leave_no_points_to_any_other_fact():
    good = arrays_match("values", [evidence(DRAWN, secret=True, name="values/x")], "values")
    for bad in (
        arrays_match("gradients", [evidence(1.01 * DRAWN, secret=True)], "gradients"),
        arrays_match("gradients", [NOTHING], "gradients"),
        arrays_match("gradients", [evidence(DRAWN + np.float32(np.nan), secret=True)], "gradients"),
        global_norm_matches([evidence(1.01 * DRAWN, secret=True)], "gradients"),
        global_norm_matches([evidence(DRAWN + np.float32(np.nan), secret=True)], "gradients"),
        global_norm_matches([NOTHING], "gradients"),
    ):
        assert (good.passed, bad.passed, bad.kind) == (True, False, Kind.GRADIENTS)
        assert conclude("f", 4, [good, bad]).points == 0
        assert conclude("f", 4, [good, bad]).reason == "Wrong gradients earn no points, whatever other limits are met."


@pytest.mark.parametrize(
    ("bubble", "bytes_", "points"),
    [(True, True, 8), (True, False, 7), (False, True, 4), (False, False, 4), (None, True, 8)],
)
def test_an_answer_that_misses_its_point_keeps_at_most_half(bubble, bytes_, points):
    facts = [
        Fact("values", Kind.VALUES, True, weight=6),
        Fact("bubble", Kind.TIME, bubble, core=True),
        Fact("bytes", Kind.COMMUNICATION, bytes_),
    ]
    found = conclude("f", 8, facts)
    assert (found.points, "“bubble”" in found.reason) == (points, bubble is False)


KEY = Leaf("key", (2,), "uint32", ((),), "input")
MASKS = [np.random.default_rng(seed).random((4, 8)) > 0.25 for seed in range(2)]
CUBE = {"data": 2, "pipe": 2, "tensor": 4}
CAUSES = {
    "product of axes": (8 * DRAWN, "8 times too large, and axes 'data' and 'tensor', or 'pipe' and 'tensor' together"),
    "all axes": (DRAWN / 16, "16 times too small, and axes 'data', 'pipe' and 'tensor' together have that size"),
    "one of several": (2 * DRAWN, "2 times too large, and axis 'data' or 'pipe' has that size: sum or mean?"),
    "one or two": (4 * DRAWN, "axis 'tensor' has that size, or axes 'data' and 'pipe' together have that size"),
    "microbatches": (6 * DRAWN, "6 times too large, and there are as many microbatches: sum or mean?"),
    "no size": (5 * DRAWN, "All of it is 5 times what it should be."),
    "sign": (-DRAWN, "All of it has the opposite sign."),
    "nothing": (0 * DRAWN, "All of it is zero."),
    "rounded": (np.float32(jax.numpy.bfloat16(1) * DRAWN.astype(jax.numpy.bfloat16)), "off by a little, at most 0.002"),
    "nearly": (DRAWN * np.float32(1.004), "All of it is 1.004 times what it should be."),
    "other order": (DRAWN[::-1], "All its numbers are right, but in the wrong places"),
    "other masks": (DRAWN + 9 * np.float32(MASKS[0]) - 9 * MASKS[1], "as two masks of dropout agree by chance"),
    "mean of all": (np.tile(DRAWN.mean(0), (4, 1)), "Its 4 parts along dim 0 are all the same, the mean of what they"),
    "sum of pairs": (np.tile(DRAWN[:2] + DRAWN[2:], (2, 1)), "Its 2 parts along dim 0 are all the same, the sum of"),
    "one place": (ONE, "Along dim 1, of 8, only index 5 is wrong."),
    "a row": (DRAWN + (np.arange(8) > 2), "Along dim 1, of 8, only indices 3 to 7 are wrong."),
}


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("what", CAUSES)
def test_the_cause_of_wrong_numbers_is_said_where_they_show_it(what, secret):
    measured, excerpt = CAUSES[what]
    case = Case("c", CUBE, Model(width=1, hidden=1, dropout=0.25, num_microbatches=6))
    e = replace(evidence(np.float32(measured), secret=secret), case=case, inputs=(KEY,))
    fact = arrays_match("gradients", [e], "gradients", "A guess.")
    assert (fact.passed, excerpt in fact.message) == (False, True), fact.message
    assert ("A guess." in fact.message) is (
        what not in ("other masks", "rounded") and not re.search("sum or mean|mean or sum", fact.message)
    )


@pytest.mark.parametrize(
    ("factor", "excerpt"), [(1.004, "off by 0.004 times what it should be"), (8, "axes 'data' and 'tensor'")]
)
def test_a_single_number_is_off_by_a_difference_or_by_sizes(factor, excerpt):
    one = {"gradients/loss": np.float32(3)}
    wrong = {"gradients/loss": np.float32(3 * factor)}
    case = Case("c", CUBE, Sizes())
    e = replace(evidence(DRAWN, secret=True), case=case, expected=one, measured=wrong)
    assert excerpt in arrays_match("gradients", [e], "gradients").message
    if factor < 2:
        assert excerpt in global_norm_matches([e], "gradients").message


def test_other_cases_tell_which_axis_a_factor_is():
    """The same axes may have other names there; where a leaf is right, none may have another size than 1."""
    model, both = Model(width=1, hidden=1, num_microbatches=2), {"data": 2, "pipe": 2, "tensor": 2}
    base = evidence(2 * DRAWN, secret=True)
    one = replace(base, case=Case("cube", both, model))
    said = arrays_match("gradients", [one], "gradients").message
    assert "axis 'data' or 'pipe' or 'tensor' has that size, or there are as many microbatches" in said
    three = Case("three", {"replica": 3, "stage": 1, "model": 2}, model.replace(num_microbatches=5))
    for measured, axis in ((3 * DRAWN, "data"), (2 * DRAWN, "tensor"), (DRAWN, "pipe")):
        other = replace(base, measured=dict.fromkeys(base.measured, np.float32(measured)), case=three)
        said = arrays_match("gradients", [one, other], "gradients").message
        assert f"2 times too large, and axis '{axis}' has that size: sum or mean?" in said, said


def test_all_axes_with_the_size_are_named_and_the_functions_own_is_the_first():
    """A case that is right with another choice, as of what is split, does not tell which axis it is."""
    model = Model(width=1, hidden=1, parallel=True)
    base = evidence(2 * DRAWN, secret=True)
    one = replace(base, case=Case("both", {"data": 2, "tensor": 2}, model))
    right = replace(base, measured=base.expected, case=Case("split", {"tensor": 4}, model.replace(parallel=False)))
    said = arrays_match("gradients", [right, one], "gradients").message
    assert "axis 'tensor' or 'data' has that size: sum or mean?" in said, said


def test_numbers_that_differ_in_their_last_digits_are_written_with_them():
    e = evidence(np.nextafter(DRAWN, 9, dtype=np.float32), secret=False)
    excerpt = arrays_match("gradients", [e], "gradients", tolerance=0).message
    measured, expected = re.findall(r"(?:measured|expected) (-?[\d.]+)", excerpt)
    assert measured != expected


def test_what_is_wrong_with_dropout_alone_is_a_matter_of_keys():
    base = replace(evidence(2.5 * DRAWN + 1, secret=True), inputs=(KEY,))
    model = Model(width=1, hidden=1)
    with_dropout = replace(base, case=Case("some", CUBE, model.replace(dropout=0.25)))
    without = replace(base, measured={name: DRAWN for name in base.measured}, case=Case("none", CUBE, model))
    excerpt = arrays_match("gradients", [without, with_dropout], "gradients", "A guess.").message
    assert "It is right in every case without dropout and wrong with it: is each mask drawn" in excerpt
    assert "A guess." not in excerpt
    both = [replace(base, case=without.case), with_dropout]
    assert "dropout" not in arrays_match("gradients", both, "gradients").message
    excerpt = arrays_match("gradients", [with_dropout], "gradients", "A guess.").message
    assert "A guess. There is dropout in every case here: is each mask drawn" in excerpt
    excerpt = arrays_match("gradients", [replace(with_dropout, inputs=())], "gradients").message
    assert "dropout" not in excerpt, "the function is given no key"


def test_masks_are_right_where_single_elements_are_dropped_and_not_where_nothing_reads_a_row():
    rng = np.random.default_rng(0)
    mask, drawn = rng.random((12, 6)) < 0.7, np.float32(1 + rng.random((12, 6)))
    unread = np.arange(12)[:, None] < 8
    base = replace(evidence(DRAWN, secret=True), inputs=(KEY,))
    base = replace(base, case=Case("some", CUBE, Model(width=1, hidden=1).replace(dropout=0.25)))
    for kept, says in ((mask, True), (unread, False)):
        expected, wrong = drawn * kept, (drawn + rng.standard_normal(drawn.shape).astype(np.float32)) * kept
        e = replace(base, expected={"gradients": expected}, measured={"gradients": wrong}, outputs=())
        excerpt = arrays_match("gradients", [e], "gradients", "A guess.").message
        assert (MASKS_RIGHT in excerpt) is says and "A guess." in excerpt
        assert not (says and KEYS in excerpt), "the masks are right, so their keys are"


def test_wrong_leaves_are_named_where_there_are_several():
    names = [f"gradients/{name}" for name in ("a", "b", "c", "d")]
    e = replace(evidence(DRAWN, secret=True), expected={name: DRAWN for name in names})
    some = {name: DRAWN if name in names[1:3] else DRAWN + 1 for name in names}
    excerpt = arrays_match("gradients", [replace(e, measured=some)], "gradients").message
    assert excerpt.endswith("2 of 4 leaves are wrong here: a, d.")
    every = {name: DRAWN + 1 for name in names}
    assert (
        "All 4 leaves are wrong here." in arrays_match("gradients", [replace(e, measured=every)], "gradients").message
    )


def sends(*sent):
    return replace(evidence(DRAWN, secret=False), costs=Costs(0, 0, 0, sent, {}))


def test_bytes_that_are_few_because_of_their_dtype_are_no_missing_ones():
    half = Collective("all_gather", ("data",), 8, 10, 35.0, 3, "mine:5", (5, 2), "bf16")
    excerpt = bytes_sent("bytes", [sends(half)], "all_gather", lambda _: 210).message
    assert (
        "all-gather of bf16[5x2] has numbers of 2 bytes, and in float32 it would be 210 bytes: which dtype" in excerpt
    )
    whole = replace(half, dtype="f32")
    assert "never sent" in bytes_sent("bytes", [sends(whole)], "all_gather", lambda _: 210).message
    assert "never sent" in bytes_sent("bytes", [sends(half)], "all_gather", lambda _: 999).message


def test_bytes_too_many_are_laid_to_the_collective_that_sends_as_many():
    large = Collective("all_reduce", ("data",), 8, 4000, 7000.0, 1, "mine:4", (1000,), "f32")
    small = Collective("all_reduce", ("data",), 8, 4, 7.0, 12, "mine:9", (), "f32")
    fact = bytes_sent("bytes", [sends(large, small)], "all_reduce", lambda _: 7007)
    assert (
        "the excess of 77 bytes is exactly what the all-reduce of f32[] over data sends in 11 of its 12" in fact.message
    )
    assert fact.line == "mine:9"
    other = bytes_sent("bytes", [sends(large, small)], "all_reduce", lambda _: 7001)
    assert "most of it is all-reduce of f32[1000]" in other.message


@pytest.mark.parametrize(
    ("few", "many", "excerpt"),
    [
        (({"dot_general": 2, "add": 5}, 4), ({"dot_general": 2, "add": 5}, 16), ""),
        (({"dot_general": 2, "add": 15}, 4), ({"dot_general": 8, "add": 9}, 16), "more `matmul` operations: it grows"),
        (({"dot_general": 8, "add": 5}, 16), ({"dot_general": 8, "add": 5}, 16), "it does the same amount in both"),
        (({"dot_general": 2}, 4), ({"dot_general": 2, "slice": 1}, 16), "more `slice` operations"),
    ],
)
def test_program_that_is_padded_where_less_is_asked_for_still_grows(few, many, excerpt):
    def having(written, products):
        costs = Costs(0, 0, 0, (), {"f32 x f32": products}, sum(written.values()), written=written)
        return replace(evidence(DRAWN, secret=False), costs=costs)

    fact = same_program_size("program size", having(*few), having(*many), "depth", "Look here.")
    assert (fact.passed, excerpt in fact.message) == (not excerpt, True)


def test_facts_that_may_have_one_cause_are_said_to_once_and_the_first_to_look_at_is_named():
    def fact(name, kind, measured=1.0, limit: Any = 0.0, message="no", case="data=8"):
        return Fact(name, kind, False, measured, limit, message=message, case=case)

    def together(*facts):
        return conclude("f", 4, list(facts)).together

    values, back = fact("values", Kind.VALUES), fact("gradients", Kind.GRADIENTS)
    few, many = (fact("bytes", Kind.COMMUNICATION, sent, (8, 9)) for sent in (3, 12))
    other = fact("other collectives", Kind.COMMUNICATION, 1, 0)
    assert together(values) == ""
    assert together(values, back) == "“values” and “gradients” may have one cause: begin with “values”."
    assert together(replace(values, message=f"{LATER_LOSSES}."), back).endswith("begin with “gradients”.")
    assert together(values, back, few).startswith("“values”, “gradients” and “bytes” may have one cause: less is sent")
    assert "more is sent" in together(values, many, other) and "sent" not in together(values, few, other)
    assert "sent" not in together(values, back, replace(few, case="data=2"))
    assert together(few, other) == ""


@dataclass(frozen=True)
class Steps(Sizes):
    steps: int = 2


LOSSES = np.array([3, 2], np.float32)


@pytest.mark.parametrize(
    ("losses", "factor", "says"), [([4, 2], 2, FIRST_LOSS), ([3, 2.5], 2, FOLLOW), ([4, 2.5], 1, LOSS_ALONE)]
)
def test_a_step_is_sent_to_the_loss_if_that_is_wrong_before_any_update(losses, factor, says):
    e = evidence(factor * DRAWN, secret=False)
    e = replace(e, case=replace(e.case, sizes=Steps()))
    measured = {**e.measured, "values/loss": np.array(losses, np.float32)}
    e = replace(e, measured=measured, expected={**e.expected, "values/loss": LOSSES})
    assert values_and_gradients([e], step=True)[0].message.endswith(says)


def test_of_several_parts_the_first_that_is_wrong_asks_its_own_question():
    names = ("values/norm", "values/state")
    e = replace(evidence(ONE, secret=False), expected=dict.fromkeys(names, DRAWN))
    for wrong in names:
        measured = {name: ONE if name == wrong else DRAWN for name in names}
        found = parts_match("values", [replace(e, measured=measured)], {name: f"about {name}?" for name in names})
        assert not found.passed and f"about {wrong}?" in found.message
    assert parts_match("values", [replace(e, measured=dict(e.expected))], dict.fromkeys(names, "")).passed


def test_a_partial_answer_says_what_each_missed_fact_costs_and_that_adds_up():
    facts = [
        Fact("values", Kind.VALUES, True, weight=6),
        Fact("bubble", Kind.TIME, False, core=True),
        Fact("bytes", Kind.COMMUNICATION, False, weight=2),
    ]
    expected = "Of 8 points 2.22 are lost with “bubble” and 1.78 with “bytes”: 4 left."
    assert conclude("f", 8, facts).reason.endswith(expected)
    assert conclude("f", 2, [facts[0], facts[2]]).reason == "Of 2 points 0.5 are lost with “bytes”: 1.5 left."
    assert conclude("f", 1, [facts[0], facts[2]]).reason.startswith("Of 1 point 0.25")
    assert conclude("f", 2, [facts[0]]).reason == ""


def test_integers_are_not_looked_for_elsewhere_and_a_common_offset_is_said():
    right = np.array([[0, 1], [2, 0], [1, 3]], np.int32)
    e = replace(evidence(DRAWN, secret=False), expected={"values": right})
    for measured, excerpt in (
        (right + 1, "All of it is 1 too large."),
        (np.maximum(right, 1), "All 2 that are wrong are 1 too large."),
        (np.minimum(right, 2), "The one that is wrong is 1 too small."),
    ):
        message = arrays_match("values", [replace(e, measured={"values": measured.astype(np.int32)})], "values").message
        assert excerpt in message and "belongs" not in message, message


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("data=2 x tensor=4", "on mesh data=2 x tensor=4"),
        ("data=2 x tensor=4, 32 microbatches", "in the case 'data=2 x tensor=4, 32 microbatches'"),
        (UNSEEN, "on mesh data=2 x tensor=4 (width 6, hidden 9)"),
    ],
)
def test_a_case_is_named_by_its_mesh_and_by_what_else_tells_it_from_others(name, place):
    sizes = ModelSizes(width=6, hidden=9, num_heads=0, parallel=True)
    assert Case(name, {"data": 2, "tensor": 4}, sizes).place == place


@pytest.mark.parametrize(
    ("spacings", "rate", "right"), [(0, 1.0, True), (1, 1.0, True), (1, 4.0, True), (2, 1.0, False)]
)
def test_a_gradient_read_off_an_update_may_differ_as_float32_rounds_the_parameter(spacings, rate, right):
    """The gradient is so small beside its parameter that one spacing of the latter is more than the tolerance."""
    before, spacing = np.full((4, 8), 1.5, np.float32), np.spacing(np.float32(1.5))
    after = before - 256 * spacing
    read = (before - (after - spacings * spacing)) / np.float32(rate)
    judged = replace(
        evidence(read, secret=False),
        expected={"gradients/up": (before - after) / np.float32(rate), "values/params/up": after},
        measured={"gradients/up": read},
        drawn={"learning_rate": np.float32(rate)},
    )
    assert arrays_match("gradients", [judged], "gradients").passed is right
    unknown = replace(judged, drawn={})
    assert arrays_match("gradients", [unknown], "gradients").passed is (spacings == 0)
